/* Looking at every entry of a call without attending: how many faults there are and which is the
 * first (any_check, then any_check_first), and where each entry leads (any_resolve). The
 * counterpart of src/cpu/check.c. A warp takes a row. */
#include "params.h"
#include "slot.h"
#include "warp.cuh"

namespace
{

constexpr int THREADS = 128;

/* The order in which faults are met, as one number: row by row, in a row the request, then for each
 * source topk_lens, seq_lens and the entries. */
enum { STEP_REQUEST = 0, STEP_TOPK = 0, STEP_SEQ = 1, STEP_ENTRY = 2 };

__device__ int64_t steps_before(const smla_attend &work, int which)
{
    return which == 0 ? 1 : 1 + STEP_ENTRY + work.source[0].topk;
}

__device__ int64_t steps_of_row(const smla_attend &work)
{
    return steps_before(work, 1) + STEP_ENTRY + work.source[1].topk;
}

__device__ void add(int64_t *total, int64_t count)
{
    if (count) atomicAdd(reinterpret_cast<unsigned long long *>(total), (unsigned long long)count);
}

/* What one lane has met. */
struct tally {
    int64_t seen[SMLA_CHECKED];
    int64_t faults[SMLA_CHECKED];
};

__device__ void meet(smla_cause cause, int64_t step, tally &tally, unsigned long long *earliest)
{
    tally.faults[smla_checked_array(cause)]++;
    atomicMin(earliest, (unsigned long long)step);
}

} // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    any_check(const __grid_constant__ smla_gpu_check check)
{
    const smla_attend &work = check.work;
    const int lane = threadIdx.x % WARP;
    const int64_t warps = (int64_t)gridDim.x * (THREADS / WARP);
    for (int which = 0; which < work.sources; which++) {
        const smla_source &source = work.source[which];
        tally tally = {};
        for (int64_t at = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
             at < work.batch * work.s_q; at += warps) {
            const int64_t row_step = at * steps_of_row(work);
            const int64_t step = row_step + steps_before(work, which);
            smla_row row;
            smla_open_row(&work, which, at / work.s_q, at % work.s_q, &row);
            if (lane == 0) {
                tally.seen[SMLA_CHECKED_REQUESTS]++;
                tally.seen[SMLA_CHECKED_TOPK_LENS]++;
                tally.seen[SMLA_CHECKED_SEQ_LENS]++;
                tally.seen[SMLA_CHECKED_INDICES] += row.entries;
                tally.seen[SMLA_CHECKED_TABLE] += row.entries;
                if (row.cause == SMLA_FAULT_REQUEST && which == 0) {
                    meet(SMLA_FAULT_REQUEST, row_step + STEP_REQUEST, tally, check.earliest);
                }
                if (row.bad_topk) meet(SMLA_FAULT_TOPK, step + STEP_TOPK, tally, check.earliest);
                if (row.bad_seq) meet(SMLA_FAULT_SEQ, step + STEP_SEQ, tally, check.earliest);
            }
            for (int64_t j = lane; j < row.entries; j += WARP) {
                smla_place place;
                const smla_cause cause = smla_resolve(&source, &row, j, &place);
                if (cause >= SMLA_FAULT_INDEX) {
                    meet(cause, step + STEP_ENTRY + j, tally, check.earliest);
                }
            }
        }
#pragma unroll
        for (int array = 0; array < SMLA_CHECKED; array++) {
            add(&check.tally->seen[which][array], tally.seen[array]);
            add(&check.tally->faults[which][array], tally.faults[array]);
        }
    }
}

/* One thread describes the earliest fault, where there is one. */
extern "C" __global__ void __launch_bounds__(THREADS, 8)
    any_check_first(const __grid_constant__ smla_gpu_check check)
{
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const smla_attend &work = check.work;
    if (*check.earliest == ~0ull) return;
    const int64_t at = (int64_t)*check.earliest / steps_of_row(work);
    int64_t step = (int64_t)*check.earliest % steps_of_row(work);
    const int which = work.sources == 2 && step >= steps_before(work, 1);
    smla_row row;
    smla_open_row(&work, which, at / work.s_q, at % work.s_q, &row);

    smla_place place;
    smla_cause cause = SMLA_FAULT_REQUEST;
    if (step != STEP_REQUEST) {
        step -= steps_before(work, which);
        cause = step == STEP_TOPK ? SMLA_FAULT_TOPK
                : step == STEP_SEQ
                    ? SMLA_FAULT_SEQ
                    : smla_resolve(&work.source[which], &row, step - STEP_ENTRY, &place);
    }
    smla_fault_at(&work, which, &row, step - STEP_ENTRY, cause, &check.tally->first);
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    any_resolve(const __grid_constant__ smla_gpu_resolve resolve)
{
    const smla_attend &work = resolve.work;
    const smla_source &source = work.source[resolve.which];
    const int lane = threadIdx.x % WARP;
    const int64_t warps = (int64_t)gridDim.x * (THREADS / WARP);
    for (int64_t at = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
         at < work.batch * work.s_q; at += warps) {
        int64_t *slots = resolve.slots + at * source.topk;
        smla_row row;
        smla_open_row(&work, resolve.which, at / work.s_q, at % work.s_q, &row);
        const int rest = row.cause == SMLA_VALID ? SMLA_PAST_TOPK_LEN : row.cause;
        for (int64_t j = lane; j < source.topk; j += WARP) {
            smla_place place;
            const int cause = j < row.entries ? smla_resolve(&source, &row, j, &place) : rest;
            slots[j] = cause == SMLA_VALID ? place.block * source.block_size + place.offset
                                           : -cause;
        }
    }
}
