/* The order of a launch among the other work on its tensors, and device memory of this library's
 * own. */
#include "gpu/device.h"
#include "gpu/gpu.h"

/* ---------------------------------------------------------------------------- order */

static enum smla_status record_and_wait(const struct smla_gpu_scope *scope, CUevent event,
                                        uintptr_t first, uintptr_t then, struct smla_error *error)
{
    SMLA_CUDA_TRY(scope->driver, error, cuEventRecord, event, (CUstream)first);
    SMLA_CUDA_TRY(scope->driver, error, cuStreamWaitEvent, (CUstream)then, event, 0);
    return SMLA_OK;
}

/* What comes on `then` from now on waits for what is on `first`. The driver keeps what it needs of
 * an event that is destroyed while streams wait for it. */
static enum smla_status order(const struct smla_gpu_scope *scope, uintptr_t first, uintptr_t then,
                              struct smla_error *error)
{
    CUevent event;
    SMLA_CUDA_TRY(scope->driver, error, cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
    enum smla_status status = record_and_wait(scope, event, first, then, error);
    scope->driver->cuEventDestroy(event);
    return status;
}

/* The legacy stream can never be captured, and may not even be asked during some captures. */
static enum smla_status is_captured(const struct smla_gpu_scope *scope, uintptr_t stream,
                                    bool *captured, struct smla_error *error)
{
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (stream) SMLA_CUDA_TRY(scope->driver, error, cuStreamIsCapturing, (CUstream)stream, &status);
    *captured = status != CU_STREAM_CAPTURE_STATUS_NONE;
    return SMLA_OK;
}

/* Streams whose work the launch may be ordered with: in a capture those of the same capture, since
 * a graph is ordered as a whole, where it is replayed. */
static enum smla_status keep_orderable(const struct smla_gpu_scope *scope,
                                       struct smla_gpu_streams *streams, struct smla_error *error)
{
    bool captured = false, other = false;
    int32_t kept = 0;
    SMLA_TRY(is_captured(scope, streams->launch, &captured, error));
    SMLA_FAIL_IF(captured && streams->wait, error, SMLA_ERROR_VALUE,
                 "stream: a call with JAX arrays waits for the GPU, which a capture does not "
                 "allow; expected tensors of PyTorch or CuPy");
    for (int32_t i = 0; i < streams->count; i++) {
        SMLA_TRY(is_captured(scope, streams->others[i], &other, error));
        SMLA_FAIL_IF(other && !captured, error, SMLA_ERROR_VALUE,
                     "stream: a tensor's framework is capturing its current stream into a graph, "
                     "and the call is launched on another one, which is not captured; expected "
                     "the captured stream");
        if (other == captured) streams->others[kept++] = streams->others[i];
    }
    streams->count = kept;
    return SMLA_OK;
}

static enum smla_status fork_streams(const struct smla_gpu_scope *scope,
                                     struct smla_gpu_streams *streams, struct smla_error *error)
{
    SMLA_TRY(keep_orderable(scope, streams, error));
    for (int32_t i = 0; i < streams->count; i++)
        SMLA_TRY(order(scope, streams->others[i], streams->launch, error));
    return SMLA_OK;
}

enum smla_status smla_gpu_fork(struct smla_gpu_streams *streams, int32_t device,
                               struct smla_error *error)
{
    struct smla_gpu_scope scope;
    if (streams->count == 0 && !streams->wait) return SMLA_OK;
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    enum smla_status status = fork_streams(&scope, streams, error);
    smla_gpu_leave(&scope);
    return status;
}

static enum smla_status join_streams(const struct smla_gpu_scope *scope,
                                     const struct smla_gpu_streams *streams,
                                     struct smla_error *error)
{
    for (int32_t i = 0; i < streams->count && streams->join; i++)
        SMLA_TRY(order(scope, streams->launch, streams->others[i], error));
    if (streams->wait)
        SMLA_CUDA_TRY(scope->driver, error, cuStreamSynchronize, (CUstream)streams->launch);
    return SMLA_OK;
}

enum smla_status smla_gpu_join(const struct smla_gpu_streams *streams, int32_t device,
                               struct smla_error *error)
{
    struct smla_gpu_scope scope;
    if (streams->count == 0 && !streams->wait) return SMLA_OK;
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    enum smla_status status = join_streams(&scope, streams, error);
    smla_gpu_leave(&scope);
    return status;
}

/* --------------------------------------------------------------------------- memory */

enum smla_status smla_gpu_borrow(int64_t bytes, int32_t device, uintptr_t stream, void **memory,
                                 struct smla_error *error)
{
    struct smla_gpu_scope scope;
    CUdeviceptr pointer = 0;
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    CUresult result = scope.driver->cuMemAllocAsync(&pointer, (size_t)bytes, (CUstream)stream);
    smla_gpu_leave(&scope);
    *memory = (void *)(uintptr_t)pointer;
    return result == CUDA_SUCCESS
               ? SMLA_OK
               : smla_driver_fail(scope.driver, result, "cuMemAllocAsync", error);
}

enum smla_status smla_gpu_return(void *memory, int32_t device, uintptr_t stream,
                                 struct smla_error *error)
{
    struct smla_gpu_scope scope;
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    CUresult result = scope.driver->cuMemFreeAsync((CUdeviceptr)(uintptr_t)memory,
                                                   (CUstream)stream);
    smla_gpu_leave(&scope);
    return result == CUDA_SUCCESS ? SMLA_OK
                                  : smla_driver_fail(scope.driver, result, "cuMemFreeAsync", error);
}

enum smla_status smla_gpu_allocate(int64_t bytes, int32_t device, void **memory,
                                   struct smla_error *error)
{
    struct smla_gpu_scope scope;
    CUdeviceptr pointer = 0;
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    CUresult result = scope.driver->cuMemAlloc(&pointer, (size_t)bytes);
    smla_gpu_leave(&scope);
    *memory = (void *)(uintptr_t)pointer;
    return result == CUDA_SUCCESS ? SMLA_OK
                                  : smla_driver_fail(scope.driver, result, "cuMemAlloc", error);
}

void smla_gpu_free(void *memory, int32_t device)
{
    struct smla_gpu_scope scope;
    struct smla_error ignored; /* at the end of a process the driver may be gone */
    if (smla_gpu_enter(device, &scope, &ignored) != SMLA_OK) return;
    scope.driver->cuMemFree((CUdeviceptr)(uintptr_t)memory);
    smla_gpu_leave(&scope);
}
