/* Reading cache rows and nothing else, for bench. */
#include "gpu/device.h"
#include "gpu/gpu.h"

enum {
    PIECE = 16, /* bytes that a thread loads at once */
    MOST_BLOCKS = 1 << 16,
};

static bool is_contiguous(const struct smla_tensor *tensor)
{
    int64_t stride = 1;
    for (int32_t d = tensor->ndim - 1; d >= 0; d--) {
        if (tensor->shape[d] != 1 && tensor->stride[d] != stride) return false;
        stride *= tensor->shape[d];
    }
    return true;
}

static enum smla_status check_tensors(const struct smla_tensor *cache,
                                      const struct smla_tensor *indices,
                                      const struct smla_tensor *out, struct smla_error *error)
{
    const struct smla_tensor *const tensors[] = {cache, indices, out};
    char text[96];
    SMLA_FAIL_IF(cache->device.type != SMLA_CUDA, error, SMLA_ERROR_VALUE,
                 "kv_cache: expected a tensor on a GPU, got one on the CPU");
    for (int i = 0; i < 3; i++) {
        SMLA_FAIL_IF(tensors[i]->device.type != cache->device.type ||
                         tensors[i]->device.id != cache->device.id,
                     error, SMLA_ERROR_VALUE, "%s: expected a tensor on the device of kv_cache",
                     tensors[i]->name);
        SMLA_FAIL_IF(!is_contiguous(tensors[i]), error, SMLA_ERROR_VALUE,
                     "%s: expected a contiguous tensor", tensors[i]->name);
        SMLA_FAIL_IF(i > 0 && tensors[i]->dtype != SMLA_INT32, error, SMLA_ERROR_TYPE,
                     "%s: expected int32, got %s", tensors[i]->name, tensors[i]->dtype_name);
    }
    SMLA_FAIL_IF(cache->ndim == 0 || cache->shape[cache->ndim - 1] == 0 ||
                     cache->shape[cache->ndim - 1] * smla_dtype_bytes(cache->dtype) % PIECE != 0,
                 error, SMLA_ERROR_VALUE,
                 "kv_cache: expected rows of a multiple of %d bytes, got %s", PIECE,
                 smla_shape_text(cache, text));
    SMLA_FAIL_IF(smla_elements(indices) > INT32_MAX, error, SMLA_ERROR_VALUE,
                 "indices: expected less than 2^31 entries, got %s",
                 smla_shape_text(indices, text));
    SMLA_FAIL_IF((uintptr_t)cache->data % PIECE != 0, error, SMLA_ERROR_VALUE,
                 "kv_cache: expected an address that %d divides", PIECE);
    SMLA_FAIL_IF(out->readonly || smla_elements(out) == 0, error, SMLA_ERROR_VALUE,
                 "out: expected a tensor to write to, got %s%s", out->readonly ? "read-only " : "",
                 smla_shape_text(out, text));
    return SMLA_OK;
}

enum smla_status smla_gpu_gather(const struct smla_tensor *cache, const struct smla_tensor *indices,
                                 const struct smla_tensor *out, uintptr_t stream,
                                 struct smla_error *error)
{
    SMLA_TRY(check_tensors(cache, indices, out, error));
    const int64_t width = cache->shape[cache->ndim - 1];
    const int64_t slots = smla_elements(cache) / width;
    const struct smla_gpu_gather work = {
        .cache = cache->data,
        .indices = indices->data,
        .sums = out->data,
        .slots = slots > INT32_MAX ? (uint32_t)1 << 31 : (uint32_t)slots,
        .rows = (uint32_t)smla_elements(indices),
        .pieces = (uint32_t)(width * smla_dtype_bytes(cache->dtype) / PIECE),
    };
    const int64_t threads = smla_gpu_kernels[SMLA_KERNEL_GATHER].threads;
    const int64_t most = smla_elements(out);
    int64_t blocks = ((int64_t)work.rows * work.pieces + threads - 1) / threads;
    if (blocks > most) blocks = most;
    if (blocks > MOST_BLOCKS) blocks = MOST_BLOCKS;
    if (blocks == 0) blocks = 1;
    struct smla_gpu_scope scope;
    SMLA_TRY(smla_gpu_enter(cache->device.id, &scope, error));
    enum smla_status status = smla_gpu_launch(
        &scope, SMLA_KERNEL_GATHER, (struct smla_gpu_grid){.blocks = blocks}, stream, &work, error);
    smla_gpu_leave(&scope);
    return status;
}
