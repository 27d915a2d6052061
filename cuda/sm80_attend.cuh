/* attend on tensor cores, on every GPU from 8.0 on: bfloat16 and float16 queries, d_qk 576 or 512,
 * d_v 512, cache rows of 16-byte alignment, at most 99 KB of shared memory.
 *
 * A block takes some heads of one row and one split of its entries. Of these it gathers the valid
 * ones, TILE at a time, into a ring of STAGES stages.
 *
 * A warp that multiplies belongs to one of four groups and, of 64 heads, to one of two halves.
 * Group g keeps of q the latent numbers from 128 g on and the rope numbers from 16 g on, of out the
 * value numbers from 128 g on, all in registers: a number of the cache is read twice from shared
 * memory, for the scores and for the values, however many heads there are. What a group makes of a
 * score is a part of it, so the four parts are added up through shared memory. These warps go
 * through the tiles like this, where / stands for a barrier of theirs:
 *
 *   / scores of tile i from their parts, weights
 *   / values of tile i; parts of the scores of tile i + 1
 *
 * Of 16 heads two more warps gather, for whose registers there is room: they read indices and start
 * copies while the others read q, and a tile is large enough for its weights not to cost more than
 * its products. Blocks of more heads have no such room: there all warps gather, between the values
 * and the next parts. Either way a tile is handed over by a barrier in shared memory, at which the
 * copies themselves arrive.
 *
 * Numbers. A packed row's e4m3 numbers become float16 ones exactly, q is brought into float16's
 * range by a power of two of each head and group. Weights are 2^(score * log2(e) - M), with M the
 * running maximum rounded up to an integer, so that moving M is exact. A group multiplies them by
 * its scales before it rounds them: w = weight * scale / 2^E, where a power of two of each head
 * brings the largest into float16's range, and out carries the same 2^E. E takes M's moves along
 * and is itself moved, and out rescaled, only when w would leave the range.
 *
 * w is a float16 number whatever q is, since the eight bits of a bfloat16 one are too few: a
 * bfloat16 cache's numbers become float16 ones for the values, and a tile with a number that
 * float16 does not have is multiplied as it is by the two bfloat16 numbers that w is the sum of.
 * Rounded to nearest, copies of an entry would err alike, and nothing bounds their number: w is
 * rounded up or down by turns, in proportion to what is cut off. Results for float16 queries are
 * held to three more bits: there w is the sum of two float16 numbers. */
#pragma once

#include <type_traits>

#include "attend.cuh"
#include "ptx.cuh"
#include "sm80_kernels.h"

namespace
{

#define SHARED_BYTES(name, heads, threads, bytes) constexpr int name##_shared = bytes;
SMLA_SM80_KERNELS(SHARED_BYTES)
#undef SHARED_BYTES

constexpr int STEP = 16;          /* entries: k of a value product, two columns of scores' n */
constexpr int GROUPS = 4;         /* of dims */
constexpr int HEADS_OF_TILE = 16; /* m of a product */
constexpr int LATENT = 512;
constexpr int ROPE = 64;
constexpr int LATENT_STEPS = LATENT / GROUPS / 16; /* k steps of a group's scores */
constexpr int VALUE_BLOCKS = LATENT / GROUPS / 8;  /* n steps of a group's values */
constexpr int QUAD = 4;                            /* lanes that share a row of sums */
constexpr float LOG2_E = 1.4426950408889634f;

/* -------------------------------------------------------------------------- shapes */

/* Bytes of a cache row. The pitch in shared memory is an odd multiple of 16: eight rows' words at
 * the same place are in eight different banks of 16 bytes. */
template <typename Query, int format, int d_qk> struct cache_row {
    static constexpr bool E4M3 = format != SMLA_DENSE;
    static constexpr bool TENSOR_SCALE = format == SMLA_FP8_TENSOR;
    static constexpr bool INLINE_SCALES = format == SMLA_FP8_DS_MLA ||
                                          format == SMLA_FP8_DS_MLA_NOROPE;
    static constexpr bool HAS_ROPE = d_qk == LATENT + ROPE;
    static constexpr bool E4M3_ROPE = format == SMLA_FP8_TENSOR;
    static constexpr int SCALES = INLINE_SCALES ? GROUPS : 1; /* of an entry */
    static constexpr int NUMBER = E4M3 ? 1 : 2;
    static constexpr int SCALES_AT = LATENT * NUMBER;
    static constexpr int ROPE_AT = SCALES_AT + (INLINE_SCALES ? GROUPS * 4 : 0);
    static constexpr int BYTES = ROPE_AT + (HAS_ROPE ? ROPE * (E4M3_ROPE ? 1 : 2) : 0);
    static constexpr int PITCH = (BYTES / 16 | 1) * 16;
    static_assert(BYTES % 16 == 0, "copied in pieces of 16 bytes");

    /* What the products multiply. A float16 query meets a bfloat16 rope as two bfloat16 terms. */
    using Latent = std::conditional_t<E4M3, __half, Query>;
    using Rope = std::conditional_t<INLINE_SCALES, __nv_bfloat16, Latent>;
    static constexpr bool SPLIT_ROPE = HAS_ROPE && INLINE_SCALES && std::is_same_v<Query, __half>;
    static constexpr int ROPE_TERMS = SPLIT_ROPE ? 2 : HAS_ROPE ? 1 : 0;

    /* What the values multiply are float16 numbers. */
    static constexpr bool CONVERTED = std::is_same_v<Latent, __nv_bfloat16>;
    static constexpr int TERMS = std::is_same_v<Query, __half> ? 2 : 1; /* of a weight */
};

template <int heads, int tile, int gather_warps> struct block_shape {
    static constexpr int HEADS = heads;
    static constexpr int TILE = tile; /* entries */
    static constexpr int HALVES = heads == 64 ? 2 : 1;
    static constexpr int TILES = heads / HEADS_OF_TILE / HALVES; /* of heads, of a warp */
    static constexpr int MULTIPLIERS = GROUPS * HALVES * WARP;   /* threads */
    static constexpr bool GATHER_WARPS = gather_warps > 0;       /* the first ones */
    static constexpr bool BULK = ptx::BULK_COPIES && GATHER_WARPS;
    static constexpr int GATHERERS = GATHER_WARPS ? gather_warps * WARP : MULTIPLIERS;
    static constexpr int THREADS = MULTIPLIERS + gather_warps * WARP;
    static constexpr int PER_THREAD = HEADS * TILE / MULTIPLIERS; /* scores */
    static constexpr int LANES = TILE / PER_THREAD;               /* that share a head's */
};

template <int heads>
using block_of = block_shape<heads, heads == 16 ? 32 : 16, heads == 16 ? 2 : 0>;

#define SAME_THREADS(name, heads, threads, bytes)                                                  \
    static_assert(block_of<heads>::THREADS == threads, "sm80_kernels.h");
SMLA_SM80_KERNELS(SAME_THREADS)
#undef SAME_THREADS

/* 16 entries' numbers of one head stand in the order in which a lane of the products needs them:
 * lane c of a quad has places [4 c, 4 c + 4), which are the entries 2 c, 2 c + 1, 2 c + 8, 2 c + 9.
 */
__device__ int entry_of_place(int place)
{
    return place / 16 * 16 + place % 16 / 4 * 2 + place % 2 + place % 4 / 2 * 8;
}

/* Numbers of a tile by head and entry. Steps are half a row of banks apart. */
template <typename Number, typename Block> struct tile_numbers {
    static constexpr int STEPS = Block::TILE / STEP;
    Number number[STEPS][Block::HEADS + (STEPS > 1)][STEP];

    __device__ Number *at(int head, int entry)
    {
        return &number[entry / STEP][head][entry % STEP];
    }
    __device__ const Number *at(int head, int entry) const
    {
        return &number[entry / STEP][head][entry % STEP];
    }
};

/* Where those who gather together are in their entries. */
struct gather_state {
    int rounds; /* of GATHERERS entries that were looked at */
    int found;  /* valid ones among them */
};

template <typename Row, typename Block, int stages> struct shared_state {
    uint8_t cache[stages][Block::TILE][Row::PITCH];
    tile_numbers<float, Block> part[GROUPS];                       /* of scores, by place */
    tile_numbers<uint16_t, Block> weight[Row::TERMS][Row::SCALES]; /* times scale / 2^E, by entry */
    float unit[Block::HEADS][Row::SCALES];                         /* 2^-E */
    float rescale[Block::HEADS][Row::SCALES];                      /* of out, where E has moved */
    float factor[Block::HEADS];                                    /* of out, at the end */
    float query_unit[Row::E4M3 ? GROUPS : 1][Row::E4M3 ? Block::HEADS : 1]; /* undoes q's power */
    uint4 rope[Row::SPLIT_ROPE ? 2 : 1][Block::TILES]
              [Row::HAS_ROPE ? Block::MULTIPLIERS : 1]; /* of q, as a thread multiplies it */
    float tensor_scale[Row::TENSOR_SCALE ? stages : 1][Block::TILE];
    uint64_t entries[2 * Block::GATHERERS]; /* ring: address of the row, plus its source */
    uint64_t full[stages];                  /* a tile has come into the stage */
    uint64_t empty[stages];                 /* and has been read, where warps only gather */
    piece piece;
    smla_row rows[2];
    unsigned long long first_fault; /* packed by note_fault; the lowest wins */
    unsigned int faults;
    gather_state gather[Block::GATHERERS / WARP]; /* of each warp, all the same */
    float largest[Block::HEADS];                  /* score so far */
    float sum[Block::MULTIPLIERS];                /* of weights, of a thread's places */
    int size[stages]; /* entries of the tile; 0: there are no more tiles */
    int valid[Block::GATHERERS / WARP];
    bool large[Block::MULTIPLIERS / WARP]; /* float16 does not have all values of the warp */
};

/* Barriers of the block, beside number 0 of all of it. */
enum { BARRIER_START = 1, BARRIER_GATHER, BARRIER_MULTIPLY };

/* The thread's number; what follows from it is worked out again wherever it is asked for, if a warp
 * has so many heads that registers are short. */
template <typename Block> __device__ int phase_thread()
{
    return Block::TILES > 1 ? ptx::fresh((int)threadIdx.x) : (int)threadIdx.x;
}

/* -------------------------------------------------------------------------- gathering */

/* Faults are rare: they are folded in shared memory, where they cost no registers. */
template <typename Shared>
__device__ void note_fault(Shared &shared, int64_t entry, int cause, int which)
{
    atomicMin(&shared.first_fault, (unsigned long long)(entry + 1) << 8 | cause << 1 | which);
    atomicAdd(&shared.faults, 1u);
}

template <typename Block> __device__ void sync_gatherers()
{
    ptx::sync_threads(BARRIER_GATHER, Block::GATHERERS);
}

template <typename Block> __device__ void sync_multipliers()
{
    ptx::sync_threads(BARRIER_MULTIPLY, Block::MULTIPLIERS);
}

constexpr int AHEAD = 256; /* entries */

/* Brings the indices of the AHEAD entries from `begin` on into L2. */
template <typename Block>
__device__ void prefetch_indices(const smla_gpu_attend &launch, int64_t begin, int64_t end,
                                 const smla_row (&rows)[2])
{
    const smla_attend &work = launch.work;
    const int64_t entry = begin + threadIdx.x * (AHEAD / Block::GATHERERS);
    const int which = entry >= work.source[0].topk;
    const int64_t j = entry - (which ? work.source[0].topk : 0);
    const smla_array &indices = work.source[which].indices;
    if (indices.dtype && entry < end && j < rows[which].entries) {
        ptx::prefetch(index_at(indices, rows[which].indices + j * indices.stride[2]));
    }
}

/* The valid ones among the next GATHERERS entries go to the ring, in order. */
template <typename Block, typename Shared>
__device__ void find_entries(const smla_gpu_attend &launch, Shared &shared)
{
    constexpr int WARPS = Block::GATHERERS / WARP, RING = 2 * Block::GATHERERS;
    const smla_attend &work = launch.work;
    const int thread = phase_thread<Block>(), warp = thread / WARP, lane = thread % WARP;
    gather_state state = shared.gather[warp];
    const int64_t next = shared.piece.begin + (int64_t)state.rounds * Block::GATHERERS;
    const int64_t entry = next + thread;
    const int which = entry >= work.source[0].topk;
    const int64_t j = entry - (which ? work.source[0].topk : 0);
    if (state.rounds % (AHEAD / Block::GATHERERS) == 0) {
        prefetch_indices<Block>(launch, next + Block::GATHERERS, shared.piece.end, shared.rows);
    }
    bool valid = false;
    smla_place place;
    if (entry < shared.piece.end && j < shared.rows[which].entries) {
        const smla_cause cause = smla_resolve(&work.source[which], &shared.rows[which], j, &place);
        valid = cause == SMLA_VALID;
        if (cause >= SMLA_FAULT_INDEX) note_fault(shared, entry, cause, which);
    }
    const unsigned votes = __ballot_sync(ALL_LANES, valid);
    if (lane == 0) shared.valid[warp] = __popc(votes);
    sync_gatherers<Block>();
    unsigned at = state.found + __popc(votes & ((1u << lane) - 1));
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) at += shared.valid[w];
        state.found += shared.valid[w];
    }
    if (valid) {
        shared.entries[at % RING] = reinterpret_cast<uint64_t>(
                                        smla_token(&work.source[which], &place)) |
                                    which;
    }
    state.rounds++;
    if (lane == 0) shared.gather[warp] = state;
    sync_gatherers<Block>();
}

/* Starts the copies of a tile, which follow one another, and returns its size: less than TILE at
 * the end of the entries, and 0 behind it. Rows that are not filled become zeros: nothing stale is
 * ever multiplied. */
template <typename Row, typename Block, int stages, typename Shared>
__device__ int copy_tile(const smla_gpu_attend &launch, Shared &shared, unsigned tile)
{
    constexpr int RING = 2 * Block::GATHERERS;
    constexpr int LANES = Block::BULK || Block::GATHERERS / Block::TILE > 8
                              ? Block::GATHERERS / Block::TILE
                              : 8;                 /* that copy a row */
    constexpr int ROWS = Block::GATHERERS / LANES; /* at once */
    const int first = tile * Block::TILE;          /* of the valid entries */
    const int thread = phase_thread<Block>();
    const gather_state &state = shared.gather[thread / WARP];
    while (state.found < first + Block::TILE &&
           (int64_t)state.rounds * Block::GATHERERS < shared.piece.end - shared.piece.begin) {
        find_entries<Block>(launch, shared);
    }
    const int size = max(min(state.found - first, Block::TILE), 0);
    const unsigned stage = tile % stages;
    if (Block::GATHER_WARPS) {
        ptx::wait_phase(&shared.empty[stage], (tile / stages & 1) ^ 1);
    }
    if (thread == 0) shared.size[stage] = size;
    int bulk_rows = 0; /* that the warp copies */
    if (size > 0) {
        const int lane = thread % LANES;
#pragma unroll
        for (int round = 0; round < Block::TILE; round += ROWS) {
            const int row = round + thread / LANES;
            const bool filled = row < size;
            const uint64_t entry = filled ? shared.entries[(unsigned)(first + row) % RING] : 0;
            const uint8_t *from = reinterpret_cast<const uint8_t *>(entry & ~uint64_t{15});
            uint8_t *to = shared.cache[stage][row];
            if (Block::BULK) {
                const bool copies = filled && lane == 0;
                bulk_rows += __popc(__ballot_sync(ALL_LANES, copies));
                if (copies) ptx::copy_bulk(to, from, Row::BYTES, &shared.full[stage]);
                if (!filled) {
                    for (int at = lane * 16; at < Row::BYTES; at += LANES * 16) {
                        *reinterpret_cast<uint4 *>(to + at) = uint4{};
                    }
                }
            } else {
#pragma unroll
                for (int at = lane * 16; at < Row::BYTES; at += LANES * 16) {
                    ptx::copy_16(to + at, from + at, filled ? 16 : 0);
                }
            }
            if (Row::TENSOR_SCALE && lane == 0) {
                shared.tensor_scale[stage][row] = filled ? launch.work.source[entry & 1].scale
                                                         : 0.0f;
            }
        }
    }
    if (!Block::BULK) {
        ptx::arrive_after_copies(&shared.full[stage]);
        __syncwarp();
        if (thread % WARP == 0) ptx::arrive(&shared.full[stage]);
    } else if (thread % WARP == 0) {
        ptx::arrive_for_bulk(&shared.full[stage], bulk_rows * Row::BYTES);
    } else {
        ptx::arrive(&shared.full[stage]);
    }
    return size;
}

/* -------------------------------------------------------------------------- the query */

/* A lane's place in the products of its warp. */
struct lane_place {
    int group;  /* of dims */
    int head;   /* of the block's: the warp's first */
    int row;    /* of sums; the second is 8 further */
    int column; /* pair of columns of sums, pair of k */
    int matrix; /* of the four that one instruction loads, whose address it gives */
    int line;   /* of these */
};

/* A thread's number among those that multiply. */
template <typename Block> __device__ int multiplier()
{
    return phase_thread<Block>() - (Block::GATHER_WARPS ? Block::GATHERERS : 0);
}

/* Worked out again by every phase of a tile: the registers are needed for sums. */
template <typename Block> __device__ lane_place place_of_lane()
{
    const int thread = ptx::fresh(multiplier<Block>()), warp = thread / WARP, lane = thread % WARP;
    return {warp % GROUPS, warp / GROUPS * Block::TILES * HEADS_OF_TILE,
            lane / QUAD,   lane % QUAD,
            lane / 8,      lane % 8};
}

template <typename Number> __device__ float number_of_bits(uint32_t bits);

template <> __device__ float number_of_bits<__half>(uint32_t bits)
{
    return __half2float(__ushort_as_half((unsigned short)bits));
}

template <> __device__ float number_of_bits<__nv_bfloat16>(uint32_t bits)
{
    return __uint_as_float(bits << 16);
}

__device__ float power_of_two(int exponent)
{
    return __int_as_float((exponent + 127) << 23);
}

/* floor(log2(number)) of a normal number above 0; -127 below. */
__device__ int exponent_of(float number)
{
    return (__float_as_int(number) >> 23 & 255) - 127;
}

__device__ float quad_max(float number)
{
    number = fmaxf(number, __shfl_xor_sync(ALL_LANES, number, 1));
    return fmaxf(number, __shfl_xor_sync(ALL_LANES, number, 2));
}

/* q as the left operand of the scores. Where e4m3 numbers are the right one, a lane reads four
 * neighbours of them at once, so that the order of k is permuted, here as there. */
template <typename Block> struct query_operand {
    uint32_t latent[Block::TILES][LATENT_STEPS][4];
    uint32_t rope[Block::TILES][4];
};

/* The two pairs of a k step that a lane has of one head, as they are stored: of 2-byte cache
 * numbers four numbers in two places, of e4m3 four neighbours. */
template <bool e4m3, bool aligned>
__device__ void load_pairs(const uint16_t *numbers, int column, uint32_t &first, uint32_t &second)
{
    if (e4m3 && aligned) {
        const uint2 pairs = *reinterpret_cast<const uint2 *>(numbers + 4 * column);
        first = pairs.x;
        second = pairs.y;
    } else {
        const uint16_t *at[2] = {numbers + (e4m3 ? 4 : 2) * column,
                                 numbers + (e4m3 ? 4 * column + 2 : 2 * column + 8)};
        first = aligned ? *reinterpret_cast<const uint32_t *>(at[0])
                        : at[0][0] | (uint32_t)at[0][1] << 16;
        second = aligned ? *reinterpret_cast<const uint32_t *>(at[1])
                         : at[1][0] | (uint32_t)at[1][1] << 16;
    }
}

template <typename Query> __device__ float largest_of_pair(uint32_t pair)
{
    return fmaxf(fabsf(number_of_bits<Query>(pair & 0xFFFF)),
                 fabsf(number_of_bits<Query>(pair >> 16)));
}

template <typename Query> __device__ uint32_t scale_pair(uint32_t pair, float factor)
{
    return ptx::pack<__half>(number_of_bits<Query>(pair & 0xFFFF) * factor,
                             number_of_bits<Query>(pair >> 16) * factor);
}

/* The two bfloat16 numbers whose sum is the float16 one, for each of a pair. */
__device__ void split_pair(uint32_t pair, uint32_t &high, uint32_t &low)
{
    const float first = number_of_bits<__half>(pair & 0xFFFF);
    const float second = number_of_bits<__half>(pair >> 16);
    high = ptx::pack<__nv_bfloat16>(first, second);
    low = ptx::pack<__nv_bfloat16>(first - number_of_bits<__nv_bfloat16>(high & 0xFFFF),
                                   second - number_of_bits<__nv_bfloat16>(high >> 16));
}

/* Brings a head's numbers into float16's range. Returns what undoes it. */
template <typename Query, typename Row>
__device__ float scale_head(int y, uint32_t (&latent)[LATENT_STEPS][4], uint32_t (&rope)[4])
{
    float largest = 0.0f;
#pragma unroll
    for (int i = y; i < 4; i += 2) {
#pragma unroll
        for (int s = 0; s < LATENT_STEPS; s++) {
            largest = fmaxf(largest, largest_of_pair<Query>(latent[s][i]));
        }
        if (Row::E4M3_ROPE) largest = fmaxf(largest, largest_of_pair<Query>(rope[i]));
    }
    const int exponent = max(exponent_of(quad_max(largest)) - 14, -100);
    const float factor = power_of_two(-exponent);
#pragma unroll
    for (int i = y; i < 4; i += 2) {
#pragma unroll
        for (int s = 0; s < LATENT_STEPS; s++) {
            latent[s][i] = scale_pair<Query>(latent[s][i], factor);
        }
        if (Row::E4M3_ROPE) rope[i] = scale_pair<Query>(rope[i], factor);
    }
    return power_of_two(exponent) * ptx::E4M3_UNIT;
}

/* Number d of a head's query. Its parts are the latent and the rope numbers, or one of all. */
__device__ const uint16_t *query_number(const smla_attend &work, const piece &piece, int head,
                                        int d)
{
    const int part = d >= work.q_width[0];
    const int64_t *stride = work.q_stride[part];
    return static_cast<const uint16_t *>(work.q[part]) + piece.batch * stride[0] +
           piece.query * stride[1] + head * stride[2] + (part ? d - work.q_width[0] : d);
}

/* Whether the numbers of every head of q begin at a multiple of `bytes`. */
__device__ bool is_query_aligned(const smla_attend &work, int bytes)
{
    uint64_t bits = 0;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        bits |= reinterpret_cast<uintptr_t>(work.q[part]);
#pragma unroll
        for (int i = 0; i < 3; i++) bits |= work.q_stride[part][i] * 2;
    }
    return bits % bytes == 0;
}

template <typename Row, typename Block, bool aligned>
__device__ void load_heads(const smla_attend &work, const piece &piece, query_operand<Block> &query)
{
    const lane_place lane = place_of_lane<Block>();
#pragma unroll
    for (int t = 0; t < Block::TILES; t++) {
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const int of_block = lane.head + t * HEADS_OF_TILE + lane.row + 8 * y;
            const int head = min(piece.head + of_block, work.heads - 1);
            const uint16_t *latent = query_number(work, piece, head, lane.group * 128);
            const uint16_t *rope = Row::HAS_ROPE
                                       ? query_number(work, piece, head, LATENT + lane.group * 16)
                                       : latent;
#pragma unroll
            for (int s = 0; s < LATENT_STEPS; s++) {
                load_pairs<Row::E4M3, aligned>(latent + 16 * s, lane.column, query.latent[t][s][y],
                                               query.latent[t][s][y + 2]);
            }
            if (Row::HAS_ROPE) {
                load_pairs<Row::E4M3_ROPE, aligned>(rope, lane.column, query.rope[t][y],
                                                    query.rope[t][y + 2]);
            }
        }
    }
}

template <typename Row, typename Block>
__device__ void load_query(const smla_attend &work, const piece &piece, query_operand<Block> &query)
{
    if (is_query_aligned(work, Row::E4M3 ? 8 : 4)) {
        load_heads<Row, Block, true>(work, piece, query);
    } else {
        load_heads<Row, Block, false>(work, piece, query);
    }
}

/* From numbers as they are stored to what is multiplied. */
template <typename Query, typename Row, typename Block, typename Shared>
__device__ void prepare_query(Shared &shared, query_operand<Block> &query)
{
    const lane_place lane = place_of_lane<Block>();
#pragma unroll
    for (int t = 0; t < Block::TILES; t++) {
        if (Row::E4M3) {
#pragma unroll
            for (int y = 0; y < 2; y++) {
                const int of_block = lane.head + t * HEADS_OF_TILE + lane.row + 8 * y;
                const float unit = scale_head<Query, Row>(y, query.latent[t], query.rope[t]);
                if (lane.column == 0) shared.query_unit[lane.group][of_block] = unit;
            }
        }
        uint32_t rest[4];
        if (Row::SPLIT_ROPE) {
#pragma unroll
            for (int i = 0; i < 4; i++) split_pair(query.rope[t][i], query.rope[t][i], rest[i]);
        }
#pragma unroll
        for (int term = 0; term < Row::ROPE_TERMS; term++) {
            const uint32_t (&rope)[4] = term == 0 ? query.rope[t] : rest;
            shared.rope[term][t][multiplier<Block>()] = make_uint4(rope[0], rope[1], rope[2],
                                                                   rope[3]);
        }
    }
    __syncwarp();
}

/* -------------------------------------------------------------------------- scores */

/* The scale of an entry's numbers in a group. */
template <typename Row, typename Shared>
__device__ float entry_scale(const Shared &shared, int stage, int entry, int group)
{
    if (!Row::E4M3) return 1.0f;
    if (Row::TENSOR_SCALE) return shared.tensor_scale[stage][entry];
    return reinterpret_cast<const float *>(shared.cache[stage][entry] + Row::SCALES_AT)[group];
}

/* |number| of the larger ones, NaN not counted. */
__device__ __nv_bfloat162 larger_pair(__nv_bfloat162 largest, uint32_t pair)
{
    return __hmax2(largest, __habs2(reinterpret_cast<const __nv_bfloat162 &>(pair)));
}

/* Adds q's rope numbers times those of 16 entries, blocks `step` and the next. */
template <typename Row, typename Block, typename Shared>
__device__ void multiply_rope(const Shared &shared, const uint32_t (&k)[2][2], int step,
                              float (&sums)[Block::TILES][Block::TILE / 8][4])
{
#pragma unroll
    for (int t = 0; t < Block::TILES; t++) {
#pragma unroll
        for (int term = 0; term < Row::ROPE_TERMS; term++) {
            const uint4 words = shared.rope[term][t][multiplier<Block>()];
            const uint32_t q[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int block = 0; block < 2; block++) {
                ptx::multiply<typename Row::Rope>(sums[t][step + block], q, k[block][0],
                                                  k[block][1]);
            }
        }
    }
}

/* shared.part[group] = q * k of the tile in `stage`, over the group's numbers. */
template <typename Row, typename Block, typename Shared>
__device__ void score_parts(Shared &shared, int stage, const query_operand<Block> &query)
{
    const lane_place lane = place_of_lane<Block>();
    constexpr int TILES = Block::TILES;
    constexpr int BLOCKS = Block::TILE / 8;  /* of entries */
    constexpr float PAST_FLOAT16 = 65536.0f; /* the next bfloat16 number after the last */
    float sums[TILES][BLOCKS][4] = {};
    __nv_bfloat162 largest = {};

    /* 64 bytes of 8 entries in one load: 2 steps of 2-byte numbers, 4 of e4m3 */
    constexpr int STEPS = 4 / Row::NUMBER;
    const uint32_t tile = ptx::shared_address(shared.cache[stage]);
    const uint32_t latent = tile + lane.line * Row::PITCH + lane.group * 128 * Row::NUMBER +
                            lane.matrix * 16;
#pragma unroll
    for (int step = 0; step < LATENT_STEPS; step += STEPS) {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            uint32_t words[4];
            ptx::load_matrices(words, latent + block * 8 * Row::PITCH + step * 16 * Row::NUMBER);
            if (Row::CONVERTED) {
#pragma unroll
                for (int i = 0; i < 4; i++) largest = larger_pair(largest, words[i]);
            }
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                uint32_t k[2] = {words[2 * s % 4], words[(2 * s + 1) % 4]};
                if (Row::E4M3) ptx::from_e4m3(k, words[s]);
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    ptx::multiply<typename Row::Latent>(sums[t][block], query.latent[t][step + s],
                                                        k[0], k[1]);
                }
            }
        }
    }
    if (Row::E4M3_ROPE && Row::HAS_ROPE) {
#pragma unroll
        for (int step = 0; step < BLOCKS; step += 2) {
            uint32_t words[2], k[2][2];
            ptx::load_matrices(words,
                               tile + (step * 8 + lane.line + lane.matrix % 2 * 8) * Row::PITCH +
                                   Row::ROPE_AT + lane.group * 16);
            ptx::from_e4m3(k[0], words[0]);
            ptx::from_e4m3(k[1], words[1]);
            multiply_rope<Row, Block>(shared, k, step, sums);
        }
    }
    if (Row::E4M3) {
        float unit[TILES][2];
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int y = 0; y < 2; y++) {
                unit[t][y] = shared.query_unit[lane.group]
                                              [lane.head + t * HEADS_OF_TILE + lane.row + 8 * y];
            }
        }
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const float scale = entry_scale<Row>(shared, stage, block * 8 + 2 * lane.column + x,
                                                     lane.group);
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    sums[t][block][x] = sums[t][block][x] * unit[t][0] * scale;
                    sums[t][block][x + 2] = sums[t][block][x + 2] * unit[t][1] * scale;
                }
            }
        }
    }
    if (!Row::E4M3_ROPE && Row::HAS_ROPE) {
#pragma unroll
        for (int step = 0; step < BLOCKS; step += 2) {
            uint32_t words[4];
            ptx::load_matrices(words,
                               tile + (step * 8 + lane.line + lane.matrix / 2 * 8) * Row::PITCH +
                                   Row::ROPE_AT + lane.group * 32 + lane.matrix % 2 * 16);
            const uint32_t k[2][2] = {{words[0], words[1]}, {words[2], words[3]}};
            multiply_rope<Row, Block>(shared, k, step, sums);
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const int head = lane.head + t * HEADS_OF_TILE + lane.row + 8 * y;
#pragma unroll
            for (int block = 0; block < BLOCKS; block += 2) {
                float *part = shared.part[lane.group].at(head, block * 8 + 4 * lane.column);
                *reinterpret_cast<float4 *>(part) = make_float4(
                    sums[t][block][2 * y], sums[t][block][2 * y + 1], sums[t][block + 1][2 * y],
                    sums[t][block + 1][2 * y + 1]);
            }
        }
    }
    if (Row::CONVERTED) {
        const float most = fmaxf(__low2float(largest), __high2float(largest));
        const bool large = __any_sync(ALL_LANES, most >= PAST_FLOAT16);
        if (threadIdx.x % WARP == 0) shared.large[multiplier<Block>() / WARP] = large;
    }
}

/* -------------------------------------------------------------------------- weights */

/* The golden section of 2^32: of its multiples, any run of them is spread evenly. */
constexpr uint32_t TURN = 0x9E3779B9u;

/* The part of a unit in the last place that a number is raised by before it is cut off, in [0, 1),
 * as a float16 number has it relative to the number's power of two. */
__device__ float rise_of_turn(uint32_t turns)
{
    return fmaf(__uint_as_float(turns >> 9 | 0x3F800000u), 0x1p-10f, -0x1p-10f);
}

__device__ float power_below(float number)
{
    return __uint_as_float(__float_as_uint(number) & 0xFF800000u);
}

/* M, of a largest score. */
__device__ float top_of(float largest)
{
    return ceilf(largest * LOG2_E);
}

/* largest * log2(e) - M. Scores past 2^24 have M rounded to more than an integer, which counts for
 * nothing beside their own rounding, so long as the largest weight stays about 1. */
__device__ float rest_of(float largest, float top)
{
    return fminf(fmaxf(fmaf(largest, LOG2_E, -top), -1.0f), 0.0f);
}

constexpr float LONGEST_DROP = 512.0f; /* 2^-512 is 0 whatever it is multiplied with */
constexpr float LARGEST_UNIT = 0x1p126f;
constexpr float LARGEST_WEIGHT = 16384.0f; /* of a float16 number, before E moves */
constexpr int FRESH_WEIGHT = 4;            /* log2 of the largest weight where E has moved */

template <int lanes> __device__ float lanes_max(float number)
{
#pragma unroll
    for (int step = 1; step < lanes; step *= 2) {
        number = fmaxf(number, __shfl_xor_sync(ALL_LANES, number, step));
    }
    return number;
}

/* Scores of a thread's places from their parts; -inf past the tile's entries. */
template <typename Block, typename Shared>
__device__ void sum_parts(const smla_attend &work, const Shared &shared, int size, int head,
                          int place, float (&score)[Block::PER_THREAD])
{
    constexpr int N = Block::PER_THREAD;
    float part[GROUPS][N];
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        load_run<float>(shared.part[group].at(head, place), 0, part[group]);
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        score[i] = ((part[0][i] + part[1][i]) + (part[2][i] + part[3][i])) * work.softmax_scale;
    }
    if (work.logit_cap > 0.0f) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            score[i] = work.logit_cap * tanhf(score[i] / work.logit_cap);
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (entry_of_place(place + i) >= size) score[i] = -CUDART_INF_F;
    }
}

/* The scales of N entries. */
template <typename Row, int N> struct entry_scales {
    float scale[N][Row::SCALES];
};

template <typename Row, int N, typename Shared>
__device__ entry_scales<Row, N> load_scales(const Shared &shared, int stage, int place)
{
    entry_scales<Row, N> scales;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int entry = entry_of_place(place + i);
        if (Row::INLINE_SCALES) {
            load_run<float>(shared.cache[stage][entry] + Row::SCALES_AT, 0, scales.scale[i]);
        } else {
            scales.scale[i][0] = entry_scale<Row>(shared, stage, entry, 0);
        }
    }
    return scales;
}

/* shared.weight = scaled * unit, of one of the entries' scales. */
template <typename Row, typename Shared, int N>
__device__ void store_weights(Shared &shared, int scale, int head, int place,
                              const float (&scaled)[N], float unit, uint32_t turns)
{
    float rest[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        rest[i] = scaled[i] * unit;
        if (Row::TERMS == 1) {
            rest[i] = fmaf(power_below(rest[i]), rise_of_turn(turns + i * TURN), rest[i]);
        }
    }
#pragma unroll
    for (int term = 0; term < Row::TERMS; term++) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const uint32_t pair = Row::TERMS == 1 ? ptx::cut(rest[i], rest[i + 1])
                                                  : ptx::pack<__half>(rest[i], rest[i + 1]);
            *reinterpret_cast<uint32_t *>(
                shared.weight[term][scale].at(head, entry_of_place(place + i))) = pair;
            rest[i] -= number_of_bits<__half>(pair & 0xFFFF);
            rest[i + 1] -= number_of_bits<__half>(pair >> 16);
        }
    }
}

/* Parts of the scores -> weights. Returns whether E has moved for any head of the warp;
 * shared.rescale holds what out has to be multiplied with. */
template <typename Row, typename Block, typename Shared>
__device__ bool weigh_tile(const smla_attend &work, Shared &shared, unsigned tile, int stage)
{
    constexpr int LANES = Block::LANES, N = Block::PER_THREAD, SCALES = Row::SCALES;
    const int thread = multiplier<Block>();
    const int head = thread / LANES, place = thread % LANES * N;
    float weight[N]; /* scores first */
    sum_parts<Block>(work, shared, shared.size[stage], head, place, weight);
    const entry_scales<Row, N> scales = load_scales<Row, N>(shared, stage, place);
    float units[SCALES];
    load_run<float>(shared.unit[head], 0, units);
    const float last = shared.largest[head];
    float largest = last;
#pragma unroll
    for (int i = 0; i < N; i++) largest = fmaxf(largest, weight[i]);
    largest = lanes_max<LANES>(largest);
    const float top = top_of(largest), before = top_of(last);
    const float rest = rest_of(largest, top);
    const float drop = top == before ? 0.0f : fminf(top - before, LONGEST_DROP);
    float sum = shared.sum[thread] * ptx::exp2_fast(-drop);
#pragma unroll
    for (int i = 0; i < N; i++) {
        weight[i] = ptx::exp2_fast(fmaf(weight[i] - largest, LOG2_E, rest));
        sum += weight[i];
    }
    shared.sum[thread] = sum;

    /* E as it is serves nearly always */
    const float rise = ptx::exp2_fast(drop);
    float biggest[SCALES];
    bool moves = false;
#pragma unroll
    for (int s = 0; s < SCALES; s++) {
        biggest[s] = 0.0f;
#pragma unroll
        for (int i = 0; i < N; i++) {
            biggest[s] = fmaxf(biggest[s], fabsf(weight[i] * scales.scale[i][s]));
        }
        units[s] *= rise;
        if (place == 0) shared.rescale[head][s] = 1.0f;
        moves |= units[s] > LARGEST_UNIT || biggest[s] * units[s] > LARGEST_WEIGHT;
    }
    moves = __any_sync(ALL_LANES, moves);
    if (moves) {
#pragma unroll
        for (int s = 0; s < SCALES; s++) {
            const float exponent = -exponent_of(shared.unit[head][s]) - drop;
            const float fresh = exponent_of(lanes_max<LANES>(biggest[s])) - FRESH_WEIGHT;
            const float moved = fmaxf(fmaxf(exponent, fresh), -126.0f);
            units[s] = ptx::exp2_fast(-moved);
            if (place == 0) shared.rescale[head][s] = ptx::exp2_fast(exponent - moved);
        }
    }
#pragma unroll
    for (int s = 0; s < SCALES; s++) {
        float scaled[N];
#pragma unroll
        for (int i = 0; i < N; i++) scaled[i] = ptx::fresh(weight[i]) * scales.scale[i][s];
        store_weights<Row>(shared, s, head, place, scaled, units[s],
                           (tile * Block::TILE + place) * TURN);
    }
    __syncwarp();
    if (place == 0) {
        store_run<float>(shared.unit[head], 0, units);
        shared.largest[head] = largest;
    }
    return moves;
}

/* -------------------------------------------------------------------------- values */

/* out = sums * 2^E, of the group's value numbers. Of 2-byte numbers block b of sums has the
 * numbers from 8 b on; of e4m3 blocks 2 b and 2 b + 1 have the even and the odd ones from 16 b on.
 */
template <typename Block> struct value_sums {
    float sums[Block::TILES][VALUE_BLOCKS][4];
};

template <typename Row, typename Block, typename Shared>
__device__ void rescale_values(const Shared &shared, value_sums<Block> &values)
{
    const lane_place lane = place_of_lane<Block>();
#pragma unroll
    for (int t = 0; t < Block::TILES; t++) {
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const float factor = shared.rescale[lane.head + t * HEADS_OF_TILE + lane.row + 8 * y]
                                               [lane.group % Row::SCALES];
#pragma unroll
            for (int b = 0; b < VALUE_BLOCKS; b++) {
                values.sums[t][b][2 * y] *= factor;
                values.sums[t][b][2 * y + 1] *= factor;
            }
        }
    }
}

/* A pair of bfloat16 numbers as float16 ones. */
__device__ uint32_t float16_pair(uint32_t pair)
{
    return ptx::pack<__half>(number_of_bits<__nv_bfloat16>(pair & 0xFFFF),
                             number_of_bits<__nv_bfloat16>(pair >> 16));
}

/* Adds 16 entries, the first line of which for this lane is at `entries`, times their weights to
 * the group's value numbers, as products of Number. */
template <typename Row, typename Block, typename Number>
__device__ void multiply_values(uint32_t entries, const uint32_t (&weights)[Block::TILES][4],
                                value_sums<Block> &values)
{
    constexpr int BLOCKS = 4 / Row::NUMBER;
    constexpr bool AS_STORED = std::is_same_v<Number, typename Row::Latent>;
#pragma unroll
    for (int block = 0; block < VALUE_BLOCKS; block += BLOCKS) {
        uint32_t words[4];
        ptx::load_transposed(words, entries + block * 8 * Row::NUMBER);
#pragma unroll
        for (int b = 0; b < BLOCKS; b += 2) {
            uint32_t v[2][2]; /* by block, by half of the entries */
            if (Row::E4M3) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t pairs[2]; /* bytes of two entries -> of two numbers */
                    ptx::from_e4m3(pairs, __byte_perm(words[b + half], 0, 0x3120));
                    v[0][half] = pairs[0];
                    v[1][half] = pairs[1];
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    v[i / 2][i % 2] = AS_STORED ? words[i] : float16_pair(words[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int t = 0; t < Block::TILES; t++) {
                    ptx::multiply<Number>(values.sums[t][block + b + i], weights[t], v[i][0],
                                          v[i][1]);
                }
            }
        }
    }
}

/* The weights of 16 entries from `step` on, as the left operand of the values. */
template <typename Row, typename Block, typename Shared>
__device__ void load_weights(const Shared &shared, int term, const lane_place &lane, int step,
                             uint32_t (&weights)[Block::TILES][4])
{
#pragma unroll
    for (int t = 0; t < Block::TILES; t++) {
        const int head = lane.head + t * HEADS_OF_TILE + lane.line + lane.matrix % 2 * 8;
        ptx::load_matrices(weights[t],
                           ptx::shared_address(shared.weight[term][lane.group % Row::SCALES].at(
                               head, step + lane.matrix / 2 * 8)));
    }
}

/* Adds the tile in `stage`, times its weights, to the group's value numbers, one term of the
 * weights after the other. */
template <typename Row, typename Block, typename Shared>
__device__ void add_values(const Shared &shared, int stage, value_sums<Block> &values)
{
    const lane_place lane = place_of_lane<Block>();
    /* 32 bytes of 16 entries in one load */
    const uint32_t tile = ptx::shared_address(shared.cache[stage]) +
                          (lane.line + lane.matrix % 2 * 8) * Row::PITCH +
                          lane.group * 128 * Row::NUMBER + lane.matrix / 2 * 16;
    uint32_t weights[Block::TILES][4];
#pragma unroll
    for (int step = 0; step < Block::TILE; step += STEP) {
        const uint32_t entries = tile + step * Row::PITCH;
        if constexpr (Row::CONVERTED) {
            if (shared.large[multiplier<Block>() / WARP]) {
#pragma unroll 1
                for (int low = 0; low < 2; low++) {
                    load_weights<Row, Block>(shared, 0, lane, step, weights);
#pragma unroll
                    for (int t = 0; t < Block::TILES; t++) {
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            uint32_t parts[2];
                            split_pair(weights[t][i], parts[0], parts[1]);
                            weights[t][i] = parts[low];
                        }
                    }
                    multiply_values<Row, Block, __nv_bfloat16>(entries, weights, values);
                }
                continue;
            }
        }
#pragma unroll
        for (int term = 0; term < Row::TERMS; term++) {
            load_weights<Row, Block>(shared, term, lane, step, weights);
            multiply_values<Row, Block, __half>(entries, weights, values);
        }
    }
}

/* -------------------------------------------------------------------------- results */

/* Largest score and sum of every head, and the factor of its sums of values. */
template <typename Block, typename Shared>
__device__ void finish_heads(const smla_gpu_attend &launch, Shared &shared)
{
    const smla_attend &work = launch.work;
    const piece &piece = shared.piece;
    float sum = shared.sum[multiplier<Block>()];
#pragma unroll
    for (int step = 1; step < Block::LANES; step *= 2) {
        sum += __shfl_xor_sync(ALL_LANES, sum, step);
    }
    const int head = multiplier<Block>() / Block::LANES;
    if (threadIdx.x % Block::LANES != 0 || piece.head + head >= work.heads) return;
    /* from weights relative to M to weights relative to the largest score */
    const float largest = shared.largest[head];
    const bool empty = sum == 0.0f;
    float factor = empty ? 0.0f : ptx::exp2_fast(-rest_of(largest, top_of(largest)));
    if (!empty) sum *= factor;
    if (launch.splits == 1) {
        factor *= finish_head(work, piece.batch, piece.query, piece.head + head, largest, sum);
    } else {
        const int64_t at = (piece.split * (work.batch * work.s_q) + piece.row) * work.heads +
                           piece.head + head;
        launch.part_max[at] = largest;
        launch.part_sum[at] = sum;
    }
    shared.factor[head] = factor;
}

constexpr int RUN = 4; /* numbers that a lane writes at once */

/* A lane's sums of one row of a pair of blocks as four neighbours. Of e4m3 numbers it has them so;
 * of 2-byte ones two of either block, so that the even lanes of a quad take block 0 and the odd
 * ones block 1. */
template <typename Row>
__device__ void join_blocks(const float (&first)[4], const float (&second)[4], int y, int column,
                            float (&numbers)[4])
{
    if (Row::E4M3) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            numbers[i] = (i % 2 ? second[2 * y + i / 2] : first[2 * y + i / 2]) * ptx::E4M3_UNIT;
        }
        return;
    }
    const bool odd = column % 2;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float in_first = first[2 * y + i], in_second = second[2 * y + i];
        const float kept = odd ? in_second : in_first;
        const float other = __shfl_xor_sync(ALL_LANES, odd ? in_first : in_second, 1);
        numbers[i] = odd ? other : kept;
        numbers[i + 2] = odd ? kept : other;
    }
}

template <typename Number, bool in_runs>
__device__ void store_neighbours(void *data, int64_t element, const float (&numbers)[RUN])
{
    if (in_runs) {
        store_run<Number>(data, element, numbers);
    } else {
#pragma unroll
        for (int i = 0; i < RUN; i++) {
            static_cast<Number *>(data)[element + i] = static_cast<Number>(numbers[i]);
        }
    }
}

/* The value numbers of the block, from number 0 of `row` on: four lanes side by side write whole
 * sectors. */
template <typename Row, typename Block, typename Number, bool in_runs, typename Shared>
__device__ void store_values(const smla_gpu_attend &launch, const Shared &shared,
                             const value_sums<Block> &values, void *data, int64_t row,
                             int64_t stride)
{
    const lane_place lane = place_of_lane<Block>();
    const int run = Row::E4M3 ? 4 * lane.column : lane.column % 2 * 8 + lane.column / 2 * 4;
#pragma unroll
    for (int t = 0; t < Block::TILES; t++) {
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const int of_block = lane.head + t * HEADS_OF_TILE + lane.row + 8 * y;
            const int head = shared.piece.head + of_block;
            const float factor = shared.factor[of_block];
            const float power = 1.0f / shared.unit[of_block][lane.group % Row::SCALES];
            const int64_t element = row + head * stride + lane.group * 128 + run;
#pragma unroll
            for (int b = 0; b < VALUE_BLOCKS; b += 2) {
                float numbers[RUN];
                join_blocks<Row>(values.sums[t][b], values.sums[t][b + 1], y, lane.column, numbers);
#pragma unroll
                for (int i = 0; i < RUN; i++) numbers[i] = numbers[i] * power * factor;
                if (head >= launch.work.heads) continue;
                store_neighbours<Number, in_runs>(data, element + 8 * b, numbers);
            }
        }
    }
}

template <typename Row, typename Block, typename Number, typename Shared>
__device__ void store_results(const smla_gpu_attend &launch, const Shared &shared,
                              const value_sums<Block> &values, void *data, int64_t row,
                              int64_t stride)
{
    const uintptr_t first = reinterpret_cast<uintptr_t>(static_cast<Number *>(data) + row);
    if (first % (RUN * sizeof(Number)) == 0 && stride % RUN == 0) {
        store_values<Row, Block, Number, true>(launch, shared, values, data, row, stride);
    } else {
        store_values<Row, Block, Number, false>(launch, shared, values, data, row, stride);
    }
}

/* The value numbers of the block: to out, or as a part of it to the workspace. */
template <typename Query, typename Row, typename Block, typename Shared>
__device__ void store_results(const smla_gpu_attend &launch, const Shared &shared,
                              const value_sums<Block> &values)
{
    const smla_attend &work = launch.work;
    const piece &piece = shared.piece;
    const bool is_part = launch.splits > 1;
    void *data = is_part ? launch.part_out : work.out.data;
    const int64_t row = is_part ? (piece.split * (work.batch * work.s_q) + piece.row) * work.heads *
                                      LATENT
                                : element_of(work.out, piece.batch, piece.query, 0);
    const int64_t stride = is_part ? LATENT : work.out.stride[2];
    if (is_part || work.out.dtype == SMLA_FLOAT32) {
        store_results<Row, Block, float>(launch, shared, values, data, row, stride);
    } else {
        store_results<Row, Block, Query>(launch, shared, values, data, row, stride);
    }
}

/* -------------------------------------------------------------------------- the kernel */

/* The largest of the blocks' shared memory that is declared where it is used. */
constexpr int OTHER_SHARED = 128;

/* The work of a thread that multiplies, from the first tile to the results. */
template <typename Query, typename Row, typename Block, int stages, typename Shared>
__device__ void attend_tiles(const smla_gpu_attend &launch, Shared &shared,
                             query_operand<Block> &query)
{
    const smla_attend &work = launch.work;
    value_sums<Block> values = {};

    /* Where these threads gather, too, the copies are stages - 1 tiles ahead. */
    if (!Block::GATHER_WARPS) {
        for (int tile = 0; tile < stages - 1; tile++) {
            copy_tile<Row, Block, stages>(launch, shared, tile);
        }
    }
    prepare_query<Query, Row>(shared, query);
#pragma unroll 1
    for (unsigned tile = 0;; tile++) {
        const int stage = tile % stages;
        ptx::wait_phase(&shared.full[stage], tile / stages & 1);
        if (shared.size[stage] == 0) break;
        score_parts<Row, Block>(shared, stage, query);
        sync_multipliers<Block>(); /* scores' parts are there, the last tile is done with */
        const bool moves = weigh_tile<Row, Block>(work, shared, tile, stage);
        if (ptx::sync_threads_or(BARRIER_MULTIPLY, Block::MULTIPLIERS, moves)) {
            rescale_values<Row>(shared, values);
        }
        add_values<Row, Block>(shared, stage, values);
        if (Block::GATHER_WARPS) {
            ptx::arrive(&shared.empty[stage]);
        } else {
            copy_tile<Row, Block, stages>(launch, shared, tile + stages - 1);
        }
    }
    sync_multipliers<Block>();
    finish_heads<Block>(launch, shared);
    sync_multipliers<Block>();
    store_results<Query, Row>(launch, shared, values);
}

template <typename Query, int format, int d_qk, typename Block, int stages, int shared_bytes>
__device__ void attend(const smla_gpu_attend &launch)
{
    using Row = cache_row<Query, format, d_qk>;
    using Shared = shared_state<Row, Block, stages>;
    static_assert(sizeof(Shared) == shared_bytes, "sm80_kernels.h: what the host asks for");
    static_assert(shared_bytes + OTHER_SHARED <= 99 * 1024, "what every GPU gives a block");
    extern __shared__ __align__(16) unsigned char memory[];
    Shared &shared = *reinterpret_cast<Shared *>(memory);
    const smla_attend &work = launch.work;

    ptx::allow_next_launch();
    const piece piece = piece_of_block(launch, blockIdx.x, Block::HEADS);
    if (threadIdx.x == 0) {
        shared.piece = piece;
        shared.first_fault = ~0ull;
        shared.faults = 0;
        for (int stage = 0; stage < stages; stage++) {
            ptx::init_phases(&shared.full[stage],
                             Block::GATHERERS + (Block::BULK ? 0 : Block::GATHERERS / WARP));
            ptx::init_phases(&shared.empty[stage], Block::MULTIPLIERS);
        }
        ptx::publish_phases();
        for (gather_state &state : shared.gather) state = {0, 0};
        fault_tally faults = {};
        open_rows(work, shared.piece, shared.rows, faults);
        if (faults.count) note_fault(shared, faults.entry, faults.cause, faults.source);
    }
    if (Block::GATHER_WARPS && threadIdx.x < Block::GATHERERS) {
        sync_gatherers<Block>();
        ptx::arrive_threads(BARRIER_START, Block::THREADS);
        unsigned tile = 0;
        while (copy_tile<Row, Block, stages>(launch, shared, tile) > 0) tile++;
    } else {
        query_operand<Block> query;
        shared.sum[multiplier<Block>()] = 0.0f;
        for (int i = multiplier<Block>(); i < Row::SCALES * Block::HEADS; i += Block::MULTIPLIERS) {
            shared.unit[i / Row::SCALES][i % Row::SCALES] = LARGEST_UNIT;
            shared.largest[i / Row::SCALES] = -CUDART_INF_F;
        }
        load_query<Row>(work, piece, query);
        ptx::sync_threads(BARRIER_START, Block::THREADS);
        attend_tiles<Query, Row, Block, stages>(launch, shared, query);
    }
    if (work.record && shared.piece.head == 0) {
        fault_tally faults = {};
        if (threadIdx.x == 0 && shared.faults) {
            faults.entry = (int64_t)(shared.first_fault >> 8) - 1;
            faults.cause = (int)(shared.first_fault >> 1 & 127);
            faults.source = (int)(shared.first_fault & 1);
            faults.count = (int)shared.faults;
        }
        report_faults(launch, shared.piece, shared.rows, faults);
    }
}

} // namespace
