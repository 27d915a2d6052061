/* merge on the GPU: which variant of the kernel, and how many blocks. */
#include "gpu/device.h"
#include "gpu/gpu.h"
#include "tensor.h"

enum { VECTOR = 4 };

/* Whether VECTOR numbers of the array may be read or written at once, wherever a row begins. */
static bool is_aligned(const struct smla_output *array)
{
    int64_t bytes = VECTOR * smla_dtype_bytes(array->dtype);
    return (uintptr_t)array->data % (uintptr_t)bytes == 0 && array->stride[0] % VECTOR == 0 &&
           array->stride[1] % VECTOR == 0 && array->stride[2] % VECTOR == 0;
}

static enum smla_gpu_kernel choose_kernel(const struct smla_merge *work)
{
    if (work->d_v % VECTOR != 0 || !is_aligned(&work->out)) return SMLA_KERNEL_MERGE;
    for (int32_t p = 0; p < work->parts; p++) {
        if (!is_aligned(&work->part_out[p])) return SMLA_KERNEL_MERGE;
    }
    return SMLA_KERNEL_MERGE_VECTOR;
}

enum smla_status smla_gpu_merge(const struct smla_merge *work, int32_t device, uintptr_t stream,
                                struct smla_error *error)
{
    enum smla_gpu_kernel kernel = choose_kernel(work);
    int64_t rows = work->batch * work->s_q * work->heads; /* one for each warp */
    if (rows == 0) return SMLA_OK;

    struct smla_gpu_scope scope;
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    enum smla_status status = smla_gpu_launch(&scope, kernel, smla_gpu_grid_of(kernel, rows),
                                              stream, work, error);
    smla_gpu_leave(&scope);
    return status;
}
