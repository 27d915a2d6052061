/* What the attend kernels share: which piece of the work a block takes, the valid entries of a
 * piece in order, the report of faults, and the way from sums to results. */
#pragma once

#include <math_constants.h>

#include "numbers.cuh"
#include "params.h"
#include "slot.h"
#include "warp.cuh"

namespace
{

/* -------------------------------------------------------------------------- the piece */

/* The row, head tile and split of a block, and the entries of the split: [begin, end) of both
 * sources' entries laid end to end. */
struct piece {
    int64_t row, batch, query;
    int64_t begin, end;
    int head; /* the first of the tile */
    int split;
};

__device__ piece piece_of_block(const smla_gpu_attend &launch, unsigned block, int head_tile)
{
    const smla_attend &work = launch.work;
    piece piece;
    const unsigned splits = launch.splits, head_tiles = launch.head_tiles;
    const unsigned s_q = (unsigned)work.s_q; /* no more than rows, and these than blocks */
    const unsigned row = block / splits / head_tiles;
    piece.split = (int)(block % splits);
    piece.head = (int)(block / splits % head_tiles) * head_tile;
    piece.row = row;
    piece.batch = row / s_q;
    piece.query = row % s_q;
    int64_t entries = work.source[0].topk + (work.sources == 2 ? work.source[1].topk : 0);
    piece.begin = piece.split * launch.split_entries;
    piece.end = piece.split + 1 == launch.splits ? entries : piece.begin + launch.split_entries;
    return piece;
}

/* Where an element of an array of indices is. */
__device__ const uint8_t *index_at(const smla_array &indices, int64_t element)
{
    return static_cast<const uint8_t *>(indices.data) +
           element * (indices.dtype == SMLA_INT64 ? 8 : 4);
}

/* Copies the parameters to shared memory: a barrier has to follow. The constant cache has none of
 * them yet and waits for one line after another; as memory they are read all at once. */
__device__ void copy_parameters(const smla_gpu_attend &launch, smla_gpu_attend &copy)
{
    constexpr unsigned WORDS = sizeof launch / 8;
    static_assert(sizeof launch % 8 == 0, "of 8 bytes");
    const uint2 *from = reinterpret_cast<const uint2 *>(&launch);
    asm volatile("" : "+l"(from)); /* no longer known to be constant */
    for (unsigned word = threadIdx.x; word < WORDS; word += blockDim.x) {
        reinterpret_cast<uint2 *>(&copy)[word] = from[word];
    }
}

/* -------------------------------------------------------------------------- faults */

/* What one thread has met. */
struct fault_tally {
    int64_t entry; /* the first, in the numbering of piece; -1: a length or request of its row */
    int32_t count;
    int32_t cause;
    int32_t source;
};

__device__ void tally(fault_tally &faults, int64_t entry, int cause, int which)
{
    if (cause < SMLA_FAULT_INDEX) return;
    if (faults.count++ == 0) {
        faults.entry = entry;
        faults.cause = cause;
        faults.source = which;
    }
}

/* Opens the piece's row in both sources, thread 0 for all: a barrier has to follow. */
__device__ void open_rows(const smla_attend &work, const piece &piece, smla_row (&rows)[2],
                          fault_tally &faults)
{
    if (threadIdx.x != 0) return;
    for (int which = 0; which < work.sources; which++) {
        smla_row &row = rows[which];
        smla_open_row(&work, which, piece.batch, piece.query, &row);
        if (piece.split != 0) continue;
        const int64_t before = (which ? work.source[0].topk : 0) - 1;
        if (which == 0) tally(faults, before, row.cause, which);
        if (row.bad_topk) tally(faults, before, SMLA_FAULT_TOPK, which);
        if (row.bad_seq) tally(faults, before, SMLA_FAULT_SEQ, which);
    }
}

/* What one thread of a block reports: the first of `count` faults. Only without contention does it
 * wait for the bus: a report that another block is writing, or that the host has not taken yet, is
 * left alone. */
__device__ void send_fault(const smla_gpu_attend &launch, const smla_row (&rows)[2],
                           const fault_tally &faults, unsigned count)
{
    if (atomicCAS(launch.fault_lock, 0u, 1u) != 0u) return;
    volatile smla_fault_slot *slot = launch.fault;
    if (!slot->full) {
        const smla_attend &work = launch.work;
        __shared__ smla_fault fault;
        int64_t j = faults.entry - (faults.source == 1 ? work.source[0].topk : 0);
        smla_fault_at(&work, faults.source, &rows[faults.source], j, (smla_cause)faults.cause,
                      &fault);
        const bool of_row = faults.cause >= SMLA_FAULT_REQUEST;
        const int64_t all_rows = work.batch * work.s_q;
        fault.count = of_row ? 1 : count;
        fault.total = of_row ? all_rows : all_rows * work.source[faults.source].topk;
        launch.fault->fault = fault;
        __threadfence_system();
        slot->full = 1;
        __threadfence_system();
    }
    atomicExch(launch.fault_lock, 0u);
}

/* Reports the first of what the threads of a block have found. All of them call it. */
__device__ void report_faults(const smla_gpu_attend &launch, const piece &piece,
                              const smla_row (&rows)[2], const fault_tally &faults)
{
    const int found = __syncthreads_count(faults.count != 0);
    if (!found) return;
    __shared__ unsigned long long first; /* (entry + 1) and the thread, the lowest wins */
    __shared__ unsigned int count;
    if (threadIdx.x == 0) {
        first = ~0ull;
        count = 0;
    }
    __syncthreads();
    const unsigned long long mine = (unsigned long long)(faults.entry + 1) * blockDim.x +
                                    threadIdx.x;
    if (faults.count) {
        atomicMin(&first, mine);
        atomicAdd(&count, (unsigned int)faults.count);
    }
    __syncthreads();
    if (faults.count && mine == first) send_fault(launch, rows, faults, count);
}

/* -------------------------------------------------------------------------- results */

/* The factor that turns one head's sums of exp(score - largest) * v into out. */
__device__ float output_factor(const smla_attend &work, int head, float largest, float sum)
{
    if (sum == 0.0f) return 0.0f;
    float denominator = sum;
    if (work.attn_sink.dtype != SMLA_DTYPE_NONE) {
        denominator += expf(
            static_cast<const float *>(work.attn_sink.data)[head * work.attn_sink.stride[0]] -
            largest);
    }
    return 1.0f / denominator;
}

/* lse and max_logits of one head, from the largest score and the sum over exp(score - largest).
 * Returns its output_factor. */
__device__ float finish_head(const smla_attend &work, int64_t batch, int64_t query, int head,
                             float largest, float sum)
{
    const bool empty = sum == 0.0f;
    if (work.lse.dtype != SMLA_DTYPE_NONE) {
        static_cast<float *>(
            work.lse.data)[element_of(work.lse, batch, query, head)] = empty ? work.empty_lse
                                                                             : largest + logf(sum);
    }
    if (work.max_logits.dtype != SMLA_DTYPE_NONE) {
        static_cast<float *>(work.max_logits.data)[element_of(work.max_logits, batch, query,
                                                              head)] = empty        ? -CUDART_INF_F
                                                                       : isnan(sum) ? sum
                                                                                    : largest;
    }
    return output_factor(work, head, largest, sum);
}

} // namespace
