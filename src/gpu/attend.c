/* attend and its checks on the GPU: from a checked problem and a plan to launches. */
#include <pthread.h>
#include <string.h>

#include "fault.h"
#include "format.h"
#include "gpu/device.h"
#include "gpu/gpu.h"
#include "slot.h"
#include "sm80_kernels.h"

static struct smla_layout layout_of(enum smla_format format, enum smla_dtype dense)
{
    const struct smla_format_info *info = smla_format(format);
    struct smla_layout layout = {
        .dtype = info->scale == SMLA_SCALE_NONE ? (int32_t)dense : SMLA_DTYPE_NONE,
        .quantised = info->quantised,
        .group = info->group,
        .scale_offset = info->scale == SMLA_SCALE_FLOAT32 ? info->scale_offset : -1,
        .rope_offset = info->rope_offset,
    };
    return layout;
}

/* -------------------------------------------------------------------------- attend */

static void set_workspace(struct smla_gpu_attend *launch, const struct smla_plan *plan,
                          void *workspace)
{
    const int64_t parts = plan->splits * plan->merged_heads;
    launch->part_out = workspace;
    launch->part_max = launch->part_out + parts * launch->work.d_v;
    launch->part_sum = launch->part_max + parts;
}

/* Blocks that merge: any_combine loops over heads, a warp of sm80_combine takes some of the runs of
 * one, a block of sm80_combine_many a run. */
static int64_t combine_blocks(const struct smla_plan *plan)
{
    const int64_t heads = plan->merged_heads, warps = SMLA_COMBINE_WARPS;
    const int64_t warps_of_head = SMLA_COMBINE_ALL_RUNS / SMLA_COMBINE_RUNS(plan->splits);
    switch (plan->combine_id) {
    case SMLA_KERNEL_SM80_COMBINE: return (heads * warps_of_head + warps - 1) / warps;
    case SMLA_KERNEL_SM80_COMBINE_MANY: return heads * SMLA_COMBINE_ALL_RUNS;
    default: return smla_gpu_grid_of(SMLA_KERNEL_COMBINE, heads).blocks;
    }
}

static enum smla_status launch_attend(const struct smla_gpu_scope *scope,
                                      const struct smla_gpu_attend *launch,
                                      const struct smla_plan *plan, uintptr_t stream,
                                      struct smla_error *error)
{
    const struct smla_attend *work = &launch->work;
    const int64_t pieces = work->batch * work->s_q * launch->head_tiles;
    const struct smla_gpu_grid blocks = {
        .blocks = launch->whole + (pieces - launch->whole) * launch->splits,
        .shared_bytes = plan->shared_bytes,
    };
    const struct smla_gpu_grid parts = {.blocks = combine_blocks(plan)};
    SMLA_TRY(smla_gpu_launch(scope, (enum smla_gpu_kernel)plan->kernel_id, blocks, stream, launch,
                             error));
    if (launch->splits == 1) return SMLA_OK;
    return smla_gpu_launch(scope, (enum smla_gpu_kernel)plan->combine_id, parts, stream, launch,
                           error);
}

enum smla_status smla_gpu_attend(const struct smla_attend *work, const struct smla_plan *plan,
                                 int32_t device, uintptr_t stream, void *workspace,
                                 enum smla_gpu_record record, struct smla_error *error)
{
    struct smla_gpu_attend launch;
    struct smla_gpu_scope scope;
    if (work->batch * work->s_q == 0) return SMLA_OK;
    memset(&launch, 0, sizeof launch);
    launch.work = *work;
    launch.split_entries = plan->split_entries;
    launch.splits = plan->splits;
    launch.whole = plan->whole;
    launch.cut_pieces = plan->cut_pieces;
    launch.head_tile = plan->head_tile;
    launch.head_tiles = (work->heads + plan->head_tile - 1) / plan->head_tile;
    for (int i = 0; i < work->sources; i++)
        launch.layout[i] = layout_of(work->source[i].format, work->q_dtype);
    if (launch.splits > 1) set_workspace(&launch, plan, workspace);
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    launch.fault = &scope.memory->in_device[record];
    launch.fault_lock = scope.memory->fault_lock;
    enum smla_status status = launch_attend(&scope, &launch, plan, stream, error);
    smla_gpu_leave(&scope);
    return status;
}

/* -------------------------------------------------------------------------- faults */

bool smla_gpu_has_fault(int32_t device, enum smla_gpu_record record)
{
    const struct smla_gpu_memory *memory = smla_gpu_memory(device);
    return memory && __atomic_load_n(&memory->faults[record].full, __ATOMIC_ACQUIRE);
}

bool smla_gpu_take_fault(int32_t device, enum smla_gpu_record record, struct smla_fault *fault)
{
    static pthread_mutex_t taking = PTHREAD_MUTEX_INITIALIZER;
    if (!smla_gpu_has_fault(device, record)) return false;
    struct smla_fault_slot *slot = &smla_gpu_memory(device)->faults[record];
    /* Of two threads that look at once, one takes it: a slot that was given back is written anew
     * while the other would still read it. */
    pthread_mutex_lock(&taking);
    bool taken = __atomic_load_n(&slot->full, __ATOMIC_ACQUIRE);
    if (taken) {
        *fault = slot->fault;
        __atomic_store_n(&slot->full, 0, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&taking);
    return taken;
}

enum smla_status smla_gpu_capturing(int32_t device, uintptr_t stream, bool *capturing,
                                    struct smla_error *error)
{
    struct smla_gpu_scope scope;
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    CUresult result = scope.driver->cuStreamIsCapturing((CUstream)stream, &status);
    smla_gpu_leave(&scope);
    if (result != CUDA_SUCCESS)
        return smla_driver_fail(scope.driver, result, "cuStreamIsCapturing", error);
    *capturing = status != CU_STREAM_CAPTURE_STATUS_NONE;
    return SMLA_OK;
}

static enum smla_status run_check(const struct smla_gpu_scope *scope,
                                  const struct smla_attend *work, uintptr_t stream,
                                  struct smla_tally *tally, struct smla_error *error)
{
    const CUdeviceptr memory = scope->memory->check, earliest = memory + sizeof *tally;
    const struct smla_gpu_check check = {
        .work = *work,
        .tally = (struct smla_tally *)(uintptr_t)memory,
        .earliest = (unsigned long long *)(uintptr_t)earliest,
    };
    const CUstream handle = (CUstream)stream;
    const int64_t rows = work->batch * work->s_q;
    SMLA_CUDA_TRY(scope->driver, error, cuMemsetD8Async, memory, 0, sizeof *tally, handle);
    SMLA_CUDA_TRY(scope->driver, error, cuMemsetD8Async, earliest, 0xFF, sizeof *check.earliest,
                  handle);
    SMLA_TRY(smla_gpu_launch(scope, SMLA_KERNEL_CHECK, smla_gpu_grid_of(SMLA_KERNEL_CHECK, rows),
                             stream, &check, error));
    SMLA_TRY(smla_gpu_launch(scope, SMLA_KERNEL_CHECK_FIRST, (struct smla_gpu_grid){.blocks = 1},
                             stream, &check, error));
    SMLA_CUDA_TRY(scope->driver, error, cuMemcpyDtoHAsync, tally, memory, sizeof *tally, handle);
    SMLA_CUDA_TRY(scope->driver, error, cuStreamSynchronize, handle);
    return SMLA_OK;
}

enum smla_status smla_gpu_check(const struct smla_attend *work, int32_t device, uintptr_t stream,
                                struct smla_fault *fault, struct smla_error *error)
{
    static pthread_mutex_t checking = PTHREAD_MUTEX_INITIALIZER; /* the room is one a device */
    struct smla_gpu_scope scope;
    struct smla_tally tally;
    fault->cause = SMLA_VALID;
    if (work->batch * work->s_q == 0) return SMLA_OK;
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    pthread_mutex_lock(&checking);
    enum smla_status status = run_check(&scope, work, stream, &tally, error);
    pthread_mutex_unlock(&checking);
    smla_gpu_leave(&scope);
    if (status == SMLA_OK) smla_tally_first(&tally, fault);
    return status;
}

enum smla_status smla_gpu_resolve(const struct smla_attend *work, int which, int32_t device,
                                  uintptr_t stream, int64_t *scratch, int64_t *slots,
                                  struct smla_error *error)
{
    const struct smla_gpu_resolve resolve = {.work = *work, .slots = scratch, .which = which};
    const int64_t rows = work->batch * work->s_q;
    const size_t bytes = (size_t)(rows * work->source[which].topk) * sizeof *slots;
    struct smla_gpu_scope scope;
    if (bytes == 0) return SMLA_OK;
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    enum smla_status status = smla_gpu_launch(&scope, SMLA_KERNEL_RESOLVE,
                                              smla_gpu_grid_of(SMLA_KERNEL_RESOLVE, rows), stream,
                                              &resolve, error);
    CUresult result = CUDA_SUCCESS;
    if (status == SMLA_OK)
        result = scope.driver->cuMemcpyDtoHAsync(slots, (CUdeviceptr)(uintptr_t)scratch, bytes,
                                                 (CUstream)stream);
    if (status == SMLA_OK && result == CUDA_SUCCESS)
        result = scope.driver->cuStreamSynchronize((CUstream)stream);
    if (result != CUDA_SUCCESS)
        status = smla_driver_fail(scope.driver, result, "cuMemcpyDtoHAsync", error);
    smla_gpu_leave(&scope);
    return status;
}

/* -------------------------------------------------------------------------- caches */

enum smla_status smla_gpu_append(const struct smla_append *work, int32_t device, uintptr_t stream,
                                 struct smla_error *error)
{
    const struct smla_gpu_append append = {
        .work = *work,
        .layout = layout_of(work->format, work->cache_dtype),
        .width = work->part_width[0] + work->part_width[1],
    };
    struct smla_gpu_scope scope;
    if (work->tokens == 0) return SMLA_OK;
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    enum smla_status status = smla_gpu_launch(&scope, SMLA_KERNEL_APPEND,
                                              smla_gpu_grid_of(SMLA_KERNEL_APPEND, work->tokens),
                                              stream, &append, error);
    smla_gpu_leave(&scope);
    return status;
}

enum smla_status smla_gpu_unpack(const struct smla_source *source, enum smla_dtype dtype,
                                 int32_t width, float *numbers, int32_t device, uintptr_t stream,
                                 struct smla_error *error)
{
    const struct smla_gpu_unpack unpack = {
        .source = *source,
        .layout = layout_of(source->format, dtype),
        .numbers = numbers,
        .width = width,
    };
    const int64_t slots = source->num_blocks * source->block_size;
    struct smla_gpu_scope scope;
    if (slots == 0) return SMLA_OK;
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    enum smla_status status = smla_gpu_launch(&scope, SMLA_KERNEL_UNPACK,
                                              smla_gpu_grid_of(SMLA_KERNEL_UNPACK, slots), stream,
                                              &unpack, error);
    smla_gpu_leave(&scope);
    return status;
}

enum smla_status smla_gpu_clear(void *memory, int64_t bytes, int32_t device, uintptr_t stream,
                                struct smla_error *error)
{
    struct smla_gpu_scope scope;
    if (bytes == 0) return SMLA_OK;
    SMLA_TRY(smla_gpu_enter(device, &scope, error));
    CUresult result = scope.driver->cuMemsetD8Async((CUdeviceptr)(uintptr_t)memory, 0,
                                                    (size_t)bytes, (CUstream)stream);
    smla_gpu_leave(&scope);
    return result == CUDA_SUCCESS
               ? SMLA_OK
               : smla_driver_fail(scope.driver, result, "cuMemsetD8Async", error);
}
