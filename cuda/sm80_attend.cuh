/* attend on tensor cores, on every GPU from 8.0 on: bfloat16 and float16 queries, d_qk 576 or 512,
 * d_v 512, cache rows of 16-byte alignment, at most 99 KB of shared memory.
 *
 * A block takes 16 * TILES heads of one row and one split of its entries. Of these it gathers the
 * valid ones, TILE at a time, into a ring of STAGES stages.
 *
 * A warp belongs to one of four groups and, of 64 heads, to one of two halves. Group g keeps of q
 * the latent numbers [128 g, 128 g + 128) and the rope numbers [16 g, 16 g + 16), of out the value
 * numbers [128 g, 128 g + 128), all in registers: a number of the cache is read twice from shared
 * memory, for the scores and for the values, however many heads there are. What a group makes of
 * a score is a part of it, so the four parts are added up through shared memory.
 *
 * The block goes through its tiles like this, where / stands for a barrier:
 *
 *   / start the copies of tile i + STAGES - 1; scores of tile i from their parts, weights
 *   / values of tile i; parts of the scores of tile i + 1
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

constexpr int TILE = 16; /* entries: k of a value product, two columns of scores' n */
constexpr int GROUPS = 4;
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

    /* What the values multiply are float16 numbers. */
    static constexpr bool CONVERTED = std::is_same_v<Latent, __nv_bfloat16>;
    static constexpr int TERMS = std::is_same_v<Query, __half> ? 2 : 1; /* of a weight */
};

template <int tiles, int halves> struct block_shape {
    static constexpr int HEADS = HEADS_OF_TILE * tiles;
    static constexpr int HALVES = halves;
    static constexpr int TILES = tiles / HALVES; /* of a warp */
    static constexpr int WARPS = GROUPS * HALVES;
    static constexpr int THREADS = WARPS * WARP;
    static constexpr int PER_THREAD = HEADS * TILE / THREADS; /* scores */
    static constexpr int LANES = TILE / PER_THREAD;           /* that share a head's scores */
};

template <int heads> using block_of = block_shape<heads / HEADS_OF_TILE, heads == 64 ? 2 : 1>;

/* A tile's numbers of one head stand in the order in which a lane of the products needs them:
 * lane c of a quad has places [4 c, 4 c + 4), which are the entries 2 c, 2 c + 1, 2 c + 8, 2 c + 9.
 */
__device__ int entry_of_place(int place)
{
    return place / 4 * 2 + place % 2 + place % 4 / 2 * 8;
}

template <typename Row, typename Block, int stages> struct shared_state {
    uint8_t cache[stages][TILE][Row::PITCH];
    float part[GROUPS][Block::HEADS][TILE];                       /* of scores, by place */
    uint16_t weight[Row::TERMS][Row::SCALES][Block::HEADS][TILE]; /* times scale / 2^E, by place */
    float unit[Row::SCALES][Block::HEADS];                        /* 2^-E */
    float rescale[Row::SCALES][Block::HEADS];                     /* of out, where E has moved */
    float factor[Block::HEADS];                                   /* of out, at the end */
    float query_unit[Row::E4M3 ? GROUPS : 1][Row::E4M3 ? Block::HEADS : 1]; /* undoes q's power */
    uint4 rope_rest[Row::SPLIT_ROPE ? Block::THREADS : 1][Row::SPLIT_ROPE ? Block::TILES : 1];
    float tensor_scale[Row::TENSOR_SCALE ? stages : 1][TILE];
    uint64_t entries[2 * Block::THREADS]; /* ring: address of the row, plus its source */
    piece piece;
    smla_row rows[2];
    unsigned long long first_fault; /* packed by note_fault; the lowest wins */
    unsigned int faults;
    int valid[Block::WARPS];
};

/* -------------------------------------------------------------------------- gathering */

/* Where a block is in its entries; the same in every thread. */
struct gather_state {
    int64_t next;   /* entry of the piece to look at next */
    unsigned first; /* place in the ring, modulo its size, of the first entry without a copy */
    int waiting;    /* entries in the ring without a copy */
    int stage;      /* of the next copies */
    int tiles;      /* copied or being copied, but without weights yet */
    int last_size;  /* entries of the newest of these; the others are full */
};

/* Faults are rare: they are folded in shared memory, where they cost no registers. */
template <typename Shared>
__device__ void note_fault(Shared &shared, int64_t entry, int cause, int which)
{
    atomicMin(&shared.first_fault, (unsigned long long)(entry + 1) << 8 | cause << 1 | which);
    atomicAdd(&shared.faults, 1u);
}

/* The valid ones among the next THREADS entries go to the ring, in order. */
template <typename Block, typename Shared>
__device__ void find_entries(const smla_gpu_attend &launch, Shared &shared, gather_state &gather)
{
    constexpr int RING = 2 * Block::THREADS;
    const smla_attend &work = launch.work;
    const int64_t entry = gather.next + threadIdx.x;
    const int which = entry >= work.source[0].topk;
    const int64_t j = entry - (which ? work.source[0].topk : 0);
    bool valid = false;
    smla_place place;
    if (entry < shared.piece.end && j < shared.rows[which].entries) {
        const smla_cause cause = smla_resolve(&work.source[which], &shared.rows[which], j, &place);
        valid = cause == SMLA_VALID;
        if (cause >= SMLA_FAULT_INDEX) note_fault(shared, entry, cause, which);
    }
    const unsigned votes = __ballot_sync(ALL_LANES, valid);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (lane == 0) shared.valid[warp] = __popc(votes);
    __syncthreads();
    unsigned at = gather.first + gather.waiting + __popc(votes & ((1u << lane) - 1));
    for (int w = 0; w < Block::WARPS; w++) {
        if (w < warp) at += shared.valid[w];
        gather.waiting += shared.valid[w];
    }
    if (valid) {
        shared.entries[at % RING] = reinterpret_cast<uint64_t>(
                                        smla_token(&work.source[which], &place)) |
                                    which;
    }
    gather.next += Block::THREADS;
    __syncthreads();
}

/* Starts the copies of the next tile, as one group of copies, empty where there are no entries
 * left. Rows that the last tile does not fill become zeros: nothing stale is ever multiplied. */
template <typename Row, typename Block, int stages, typename Shared>
__device__ void copy_tile(const smla_gpu_attend &launch, Shared &shared, gather_state &gather)
{
    constexpr int RING = 2 * Block::THREADS;
    constexpr int LANES = Block::THREADS / TILE; /* that copy one row */
    while (gather.waiting < TILE && gather.next < shared.piece.end) {
        find_entries<Block>(launch, shared, gather);
    }
    const int size = min(gather.waiting, TILE);
    if (size > 0) {
        const int row = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        const bool filled = row < size;
        const uint64_t entry = filled ? shared.entries[(gather.first + row) % RING] : 0;
        const uint8_t *from = reinterpret_cast<const uint8_t *>(entry & ~uint64_t{15});
        const uint32_t to = ptx::shared_address(shared.cache[gather.stage][row]);
#pragma unroll
        for (int at = lane * 16; at < Row::BYTES; at += LANES * 16) {
            ptx::copy_16(to + at, from + at, filled ? 16 : 0);
        }
        if (Row::TENSOR_SCALE && lane == 0) {
            shared.tensor_scale[gather.stage][row] = filled ? launch.work.source[entry & 1].scale
                                                            : 0.0f;
        }
        gather.first += size;
        gather.waiting -= size;
        gather.stage = gather.stage + 1 == stages ? 0 : gather.stage + 1;
        gather.tiles++;
        gather.last_size = size;
    }
    ptx::commit_copies();
}

/* -------------------------------------------------------------------------- the query */

/* A lane's place in the products of its warp. */
struct lane_place {
    int group;  /* of dims */
    int head;   /* of the block's: the warp's first */
    int row;    /* of sums; the second is 8 further */
    int column; /* pair of columns of sums, pair of k */
};

template <typename Block> __device__ lane_place place_of_lane()
{
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    return {warp % GROUPS, warp / GROUPS * Block::TILES * HEADS_OF_TILE, lane / QUAD, lane % QUAD};
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

/* Numbers d and d + 1, as they are stored: one word where the address allows it. */
template <bool paired> __device__ uint32_t query_pair(const uint16_t *numbers, int d)
{
    if (paired) return *reinterpret_cast<const uint32_t *>(numbers + d);
    return numbers[d] | (uint32_t)numbers[d + 1] << 16;
}

/* The pairs of one row of sums. */
template <typename Row, bool paired>
__device__ void load_head(const uint16_t *latent, const uint16_t *rope, int column, int y,
                          uint32_t (&latent_words)[LATENT_STEPS][4], uint32_t (&rope_words)[4])
{
#pragma unroll
    for (int i = y; i < 4; i += 2) {
        const int natural = 2 * column + (i < 2 ? 0 : 8);
        const int permuted = 4 * column + (i < 2 ? 0 : 2);
#pragma unroll
        for (int s = 0; s < LATENT_STEPS; s++) {
            latent_words[s][i] = query_pair<paired>(latent,
                                                    16 * s + (Row::E4M3 ? permuted : natural));
        }
        if (Row::HAS_ROPE) {
            rope_words[i] = query_pair<paired>(rope, Row::E4M3_ROPE ? permuted : natural);
        }
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

template <typename Query, typename Row, typename Block, typename Shared>
__device__ void load_query(const smla_attend &work, Shared &shared, const lane_place &lane,
                           query_operand<Block> &query)
{
    const piece &piece = shared.piece;
    const int rope_part = work.q_width[0] == LATENT;
    const auto part = [&](int which, int head) {
        const int64_t *stride = work.q_stride[which];
        return static_cast<const uint16_t *>(work.q[which]) + piece.batch * stride[0] +
               piece.query * stride[1] + head * stride[2];
    };
#pragma unroll
    for (int t = 0; t < Block::TILES; t++) {
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const int of_block = lane.head + t * HEADS_OF_TILE + lane.row + 8 * y;
            const int head = min(piece.head + of_block, work.heads - 1);
            const uint16_t *latent = part(0, head) + lane.group * 128;
            const uint16_t *rope = Row::HAS_ROPE ? part(rope_part, head) + lane.group * 16 +
                                                       (rope_part ? 0 : LATENT)
                                                 : latent;
            if ((reinterpret_cast<uintptr_t>(latent) | reinterpret_cast<uintptr_t>(rope)) % 4) {
                load_head<Row, false>(latent, rope, lane.column, y, query.latent[t], query.rope[t]);
            } else {
                load_head<Row, true>(latent, rope, lane.column, y, query.latent[t], query.rope[t]);
            }
            if (Row::E4M3) {
                const float unit = scale_head<Query, Row>(y, query.latent[t], query.rope[t]);
                if (lane.column == 0) shared.query_unit[lane.group][of_block] = unit;
            }
        }
        if (Row::SPLIT_ROPE) {
            uint32_t rest[4];
#pragma unroll
            for (int i = 0; i < 4; i++) split_pair(query.rope[t][i], query.rope[t][i], rest[i]);
            shared.rope_rest[threadIdx.x][t] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
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

/* shared.part[group] = q * k of the tile in `stage`, over the group's numbers. Returns whether
 * there are values among these that float16 does not have. */
template <typename Row, typename Block, typename Shared>
__device__ bool score_parts(Shared &shared, int stage, const lane_place &lane,
                            const query_operand<Block> &query)
{
    constexpr int TILES = Block::TILES;
    constexpr float PAST_FLOAT16 = 65536.0f; /* the next bfloat16 number after the last */
    float sums[TILES][2][4] = {};            /* entries 0 to 7, 8 to 15 */
    __nv_bfloat162 largest = {};

    /* 64 bytes of 8 entries in one load: 2 steps of 2-byte numbers, 4 of e4m3 */
    constexpr int STEPS = 4 / Row::NUMBER;
    const int matrix = threadIdx.x % WARP / 8, line = threadIdx.x % 8;
    const uint32_t tile = ptx::shared_address(shared.cache[stage]);
    const uint32_t latent = tile + line * Row::PITCH + lane.group * 128 * Row::NUMBER + matrix * 16;
#pragma unroll
    for (int step = 0; step < LATENT_STEPS; step += STEPS) {
#pragma unroll
        for (int block = 0; block < 2; block++) {
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
        uint32_t words[2];
        ptx::load_matrices(words,
                           tile + threadIdx.x % TILE * Row::PITCH + Row::ROPE_AT + lane.group * 16);
#pragma unroll
        for (int block = 0; block < 2; block++) {
            uint32_t k[2];
            ptx::from_e4m3(k, words[block]);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                ptx::multiply<typename Row::Rope>(sums[t][block], query.rope[t], k[0], k[1]);
            }
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
        for (int block = 0; block < 2; block++) {
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
        uint32_t words[4];
        ptx::load_matrices(words, tile + (line + matrix / 2 * 8) * Row::PITCH + Row::ROPE_AT +
                                      lane.group * 32 + matrix % 2 * 16);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            uint4 rest;
            if (Row::SPLIT_ROPE) rest = shared.rope_rest[threadIdx.x][t];
#pragma unroll
            for (int block = 0; block < 2; block++) {
                const uint32_t k[2] = {words[2 * block], words[2 * block + 1]};
                ptx::multiply<typename Row::Rope>(sums[t][block], query.rope[t], k[0], k[1]);
                if (Row::SPLIT_ROPE) {
                    const uint32_t low[4] = {rest.x, rest.y, rest.z, rest.w};
                    ptx::multiply<typename Row::Rope>(sums[t][block], low, k[0], k[1]);
                }
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int y = 0; y < 2; y++) {
            float *part = shared.part[lane.group][lane.head + t * HEADS_OF_TILE + lane.row + 8 * y];
            *reinterpret_cast<float4 *>(part + 4 * lane.column) = make_float4(
                sums[t][0][2 * y], sums[t][0][2 * y + 1], sums[t][1][2 * y], sums[t][1][2 * y + 1]);
        }
    }
    return Row::CONVERTED && __any_sync(ALL_LANES, fmaxf(__low2float(largest),
                                                         __high2float(largest)) >= PAST_FLOAT16);
}

/* -------------------------------------------------------------------------- weights */

/* What the LANES threads of a head know of it. */
struct softmax_state {
    float largest;  /* score so far */
    float sum;      /* of weights, of this thread's places */
    uint32_t turns; /* of rounding: how many its first place has had, times TURN */
};

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
        load_run<float>(shared.part[group][head], place, part[group]);
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

/* scaled = weight * scale, of one of the entries' scales. Returns the largest. */
template <typename Row, typename Shared, int N>
__device__ float scale_weights(const Shared &shared, int stage, int scale, int place,
                               const float (&weight)[N], float (&scaled)[N])
{
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        scaled[i] = weight[i] * entry_scale<Row>(shared, stage, entry_of_place(place + i), scale);
        largest = fmaxf(largest, fabsf(scaled[i]));
    }
    return largest;
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
        number_run<uint32_t, N / 2> packed;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const uint32_t pair = Row::TERMS == 1 ? ptx::cut(rest[i], rest[i + 1])
                                                  : ptx::pack<__half>(rest[i], rest[i + 1]);
            packed.number[i / 2] = pair;
            rest[i] -= number_of_bits<__half>(pair & 0xFFFF);
            rest[i + 1] -= number_of_bits<__half>(pair >> 16);
        }
        *reinterpret_cast<number_run<uint32_t, N / 2> *>(
            &shared.weight[term][scale][head][place]) = packed;
    }
}

/* Parts of the scores -> weights. Returns whether E has moved for any head of the warp; then
 * shared.rescale holds for all of the warp's heads what out has to be multiplied with. */
template <typename Row, typename Block, typename Shared>
__device__ bool weigh_tile(const smla_attend &work, Shared &shared, int stage, int size,
                           softmax_state &state)
{
    constexpr int LANES = Block::LANES, N = Block::PER_THREAD;
    const int head = threadIdx.x / LANES, place = threadIdx.x % LANES * N;
    float weight[N]; /* scores first */
    sum_parts<Block>(work, shared, size, head, place, weight);
    float largest = state.largest;
#pragma unroll
    for (int i = 0; i < N; i++) largest = fmaxf(largest, weight[i]);
    largest = lanes_max<LANES>(largest);
    const float top = top_of(largest), before = top_of(state.largest);
    const float drop = top == before ? 0.0f : fminf(top - before, LONGEST_DROP);
    float sum = state.sum * ptx::exp2_fast(-drop);
#pragma unroll
    for (int i = 0; i < N; i++) {
        weight[i] = ptx::exp2_fast(fmaf(weight[i], LOG2_E, -top));
        sum += weight[i];
    }
    const uint32_t turns = state.turns;
    state = {largest, sum, turns + TILE * TURN};

    /* E as it is serves nearly always */
    float scaled[N];
    bool moves = false;
    const float rise = ptx::exp2_fast(drop);
#pragma unroll
    for (int s = 0; s < Row::SCALES; s++) {
        const float unit = shared.unit[s][head] * rise;
        const float biggest = scale_weights<Row>(shared, stage, s, place, weight, scaled);
        store_weights<Row>(shared, s, head, place, scaled, unit, turns);
        moves |= unit > LARGEST_UNIT || biggest * unit > LARGEST_WEIGHT;
    }
    moves = __any_sync(ALL_LANES, moves);
    if (!moves) {
        __syncwarp();
        if (drop > 0.0f && place == 0) {
#pragma unroll
            for (int s = 0; s < Row::SCALES; s++) shared.unit[s][head] *= rise;
        }
        return false;
    }
#pragma unroll 1
    for (int s = 0; s < Row::SCALES; s++) {
        const float biggest = lanes_max<LANES>(
            scale_weights<Row>(shared, stage, s, place, weight, scaled));
        const float exponent = -exponent_of(shared.unit[s][head]) - drop;
        const float fresh = exponent_of(biggest) - FRESH_WEIGHT;
        const float moved = fmaxf(fmaxf(exponent, fresh), -126.0f);
        const float unit = ptx::exp2_fast(-moved);
        store_weights<Row>(shared, s, head, place, scaled, unit, turns);
        __syncwarp();
        if (place == 0) {
            shared.unit[s][head] = unit;
            shared.rescale[s][head] = ptx::exp2_fast(exponent - moved);
        }
    }
    return true;
}

/* Between two tiles: only the warps for which E moves set rescale. */
template <typename Row, typename Block, typename Shared>
__device__ void reset_rescale(Shared &shared)
{
    const int head = threadIdx.x / Block::LANES, scale = threadIdx.x % Block::LANES;
    if (scale < Row::SCALES) shared.rescale[scale][head] = 1.0f;
    __syncwarp();
}

/* -------------------------------------------------------------------------- values */

/* out = sums * 2^E, of the group's value numbers. Of 2-byte numbers block b of sums has the
 * numbers from 8 b on; of e4m3 blocks 2 b and 2 b + 1 have the even and the odd ones from 16 b on.
 */
template <typename Block> struct value_sums {
    float sums[Block::TILES][VALUE_BLOCKS][4];
};

template <typename Row, typename Block, typename Shared>
__device__ void rescale_values(const Shared &shared, const lane_place &lane,
                               value_sums<Block> &values)
{
#pragma unroll
    for (int t = 0; t < Block::TILES; t++) {
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const float factor = shared.rescale[lane.group % Row::SCALES]
                                               [lane.head + t * HEADS_OF_TILE + lane.row + 8 * y];
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

/* Adds the tile whose first line for this lane is at `tile` to the group's value numbers: `terms`
 * products of Number each. */
template <typename Row, typename Block, typename Number, int terms>
__device__ void multiply_values(uint32_t tile, const uint32_t (&weights)[terms][Block::TILES][4],
                                value_sums<Block> &values)
{
    constexpr int BLOCKS = 4 / Row::NUMBER;
    constexpr bool AS_STORED = std::is_same_v<Number, typename Row::Latent>;
#pragma unroll
    for (int block = 0; block < VALUE_BLOCKS; block += BLOCKS) {
        uint32_t words[4];
        ptx::load_transposed(words, tile + block * 8 * Row::NUMBER);
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
#pragma unroll
                    for (int term = 0; term < terms; term++) {
                        ptx::multiply<Number>(values.sums[t][block + b + i], weights[term][t],
                                              v[i][0], v[i][1]);
                    }
                }
            }
        }
    }
}

/* Adds the tile in `stage`, times its weights, to the group's value numbers; `large` are those that
 * float16 does not have. */
template <typename Row, typename Block, typename Shared>
__device__ void add_values(const Shared &shared, int stage, const lane_place &lane, bool large,
                           value_sums<Block> &values)
{
    uint32_t weights[Row::TERMS][Block::TILES][4];
#pragma unroll
    for (int term = 0; term < Row::TERMS; term++) {
#pragma unroll
        for (int t = 0; t < Block::TILES; t++) {
#pragma unroll
            for (int y = 0; y < 2; y++) {
                const int head = lane.head + t * HEADS_OF_TILE + lane.row + 8 * y;
                const uint2 pairs = *reinterpret_cast<const uint2 *>(
                    &shared.weight[term][lane.group % Row::SCALES][head][4 * lane.column]);
                weights[term][t][y] = pairs.x;
                weights[term][t][y + 2] = pairs.y;
            }
        }
    }
    /* 32 bytes of 16 entries in one load */
    const int matrix = threadIdx.x % WARP / 8, line = threadIdx.x % 8;
    const uint32_t tile = ptx::shared_address(shared.cache[stage]) +
                          (line + matrix % 2 * 8) * Row::PITCH + lane.group * 128 * Row::NUMBER +
                          matrix / 2 * 16;
    if constexpr (Row::CONVERTED) {
        if (large) {
            uint32_t terms[2][Block::TILES][4];
#pragma unroll
            for (int t = 0; t < Block::TILES; t++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    split_pair(weights[0][t][i], terms[0][t][i], terms[1][t][i]);
                }
            }
            multiply_values<Row, Block, __nv_bfloat16>(tile, terms, values);
            return;
        }
    }
    multiply_values<Row, Block, __half>(tile, weights, values);
}

/* -------------------------------------------------------------------------- results */

/* Largest score and sum of every head, and the factor of its sums of values. */
template <typename Block, typename Shared>
__device__ void finish_heads(const smla_gpu_attend &launch, Shared &shared, softmax_state state)
{
    const smla_attend &work = launch.work;
    const piece &piece = shared.piece;
#pragma unroll
    for (int step = 1; step < Block::LANES; step *= 2) {
        state.sum += __shfl_xor_sync(ALL_LANES, state.sum, step);
    }
    const int head = threadIdx.x / Block::LANES;
    if (threadIdx.x % Block::LANES != 0 || piece.head + head >= work.heads) return;
    /* from weights relative to M to weights relative to the largest score */
    const bool empty = state.sum == 0.0f;
    float factor = empty ? 0.0f
                         : ptx::exp2_fast(fmaf(-state.largest, LOG2_E, top_of(state.largest)));
    const float sum = empty ? 0.0f : state.sum * factor;
    if (launch.splits == 1) {
        factor *= finish_head(work, piece.batch, piece.query, piece.head + head, state.largest,
                              sum);
    } else {
        const int64_t at = (piece.split * (work.batch * work.s_q) + piece.row) * work.heads +
                           piece.head + head;
        launch.part_max[at] = state.largest;
        launch.part_sum[at] = sum;
    }
    shared.factor[head] = factor;
}

/* The value numbers of the block, by way of shared memory, where a warp puts eight heads' numbers
 * of its group and reads each head's back in their order. The ring of tiles is free by now. */
template <typename Row, typename Block, typename Shared>
__device__ void store_results(const smla_gpu_attend &launch, Shared &shared, const lane_place &lane,
                              const value_sums<Block> &values)
{
    constexpr int NUMBERS = 128, PITCH = NUMBERS + 4, N = NUMBERS / WARP;
    static_assert(sizeof(float) * Block::WARPS * 8 * PITCH <= sizeof(shared.cache), "");
    const smla_attend &work = launch.work;
    const piece &piece = shared.piece;
    smla_output out = work.out;
    int64_t row = element_of(out, piece.batch, piece.query, 0);
    if (launch.splits > 1) {
        out = {launch.part_out, {0, 0, LATENT}, SMLA_FLOAT32, 0};
        row = (piece.split * (work.batch * work.s_q) + piece.row) * work.heads * LATENT;
    }
    const int bytes = out.dtype == SMLA_FLOAT32 ? 4 : 2;
    const bool aligned = (reinterpret_cast<uintptr_t>(out.data) + row * bytes) % (N * bytes) == 0 &&
                         out.stride[2] % N == 0;
    float *staged = reinterpret_cast<float *>(shared.cache) + threadIdx.x / WARP * 8 * PITCH;
    const int from = threadIdx.x % WARP * N;

#pragma unroll
    for (int t = 0; t < Block::TILES; t++) {
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const int first = lane.head + t * HEADS_OF_TILE + 8 * y;
            const float power = 1.0f / shared.unit[lane.group % Row::SCALES][first + lane.row];
            const float factor = shared.factor[first + lane.row];
#pragma unroll
            for (int b = 0; b < VALUE_BLOCKS; b++) {
#pragma unroll
                for (int x = 0; x < 2; x++) {
                    const int number = Row::E4M3 ? b / 2 * 16 + 2 * (2 * lane.column + x) + b % 2
                                                 : b * 8 + 2 * lane.column + x;
                    const float sum = values.sums[t][b][2 * y + x];
                    staged[lane.row * PITCH + number] = (Row::E4M3 ? sum * ptx::E4M3_UNIT : sum) *
                                                        power * factor;
                }
            }
            __syncwarp();
#pragma unroll 1
            for (int i = 0; i < min(8, work.heads - piece.head - first); i++) {
                float numbers[N];
                load_run<float>(staged, i * PITCH + from, numbers);
                const int64_t element = row + (piece.head + first + i) * out.stride[2] +
                                        lane.group * NUMBERS + from;
                if (aligned) {
                    store_numbers(out.data, out.dtype, element, numbers);
                    continue;
                }
                for (int n = 0; n < N; n++) {
                    const float number[1] = {staged[i * PITCH + from + n]};
                    store_numbers(out.data, out.dtype, element + n, number);
                }
            }
            __syncwarp();
        }
    }
}

/* -------------------------------------------------------------------------- the kernel */

/* The largest of the blocks' shared memory that is declared where it is used. */
constexpr int OTHER_SHARED = 128;

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
    if (threadIdx.x == 0) {
        shared.piece = piece_of_block(launch, blockIdx.x, Block::HEADS);
        shared.first_fault = ~0ull;
        shared.faults = 0;
        fault_tally faults = {};
        open_rows(work, shared.piece, shared.rows, faults);
        if (faults.count) note_fault(shared, faults.entry, faults.cause, faults.source);
    }
    for (int i = threadIdx.x; i < Row::SCALES * Block::HEADS; i += Block::THREADS) {
        shared.unit[i / Block::HEADS][i % Block::HEADS] = LARGEST_UNIT;
        shared.rescale[i / Block::HEADS][i % Block::HEADS] = 1.0f;
    }
    __syncthreads();

    const lane_place lane = place_of_lane<Block>();
    gather_state gather = {shared.piece.begin, 0, 0, 0, 0, 0};
    query_operand<Block> query;
    softmax_state softmax = {-CUDART_INF_F, 0.0f,
                             threadIdx.x % Block::LANES * Block::PER_THREAD * TURN};
    value_sums<Block> values = {};
    int stage = 0;      /* of tile i */
    bool moved = false; /* E, for any head of the block in tile i */
    bool large = false; /* values of tile i, for this warp */

    /* The copies are stages - 1 tiles ahead of the values, the scores one. */
#pragma unroll 1
    for (int i = 1 - stages; i < 0 || gather.tiles > 0; i++) {
        if (i >= 0) __syncthreads(); /* scores' parts are there; tile i - 1 is done with */
        copy_tile<Row, Block, stages>(launch, shared, gather);
        if (i < -1) continue;
        if (i == -1) load_query<Query, Row>(work, shared, lane, query);
        if (i >= 0) {
            const int size = gather.tiles == 1 ? gather.last_size : TILE;
            if (moved) reset_rescale<Row, Block>(shared);
            moved = weigh_tile<Row, Block>(work, shared, stage, size, softmax);
        }
        ptx::wait_copies<stages - 2>();
        moved = __syncthreads_or(moved); /* weights are there, and tile i + 1 */
        if (i >= 0) {
            if (moved) rescale_values<Row>(shared, lane, values);
            add_values<Row, Block>(shared, stage, lane, large, values);
            stage = stage + 1 == stages ? 0 : stage + 1;
            gather.tiles--;
        }
        if (gather.tiles > 0) large = score_parts<Row, Block>(shared, stage, lane, query);
    }

    __syncthreads();
    finish_heads<Block>(launch, shared, softmax);
    __syncthreads();
    store_results<Row, Block>(launch, shared, lane, values);
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
