/* attend on Hopper for many heads: bfloat16 queries of 33 heads and more, d_qk 576 or 512, d_v 512,
 * cache rows of 16-byte alignment, a block of 64 heads to a multiprocessor.
 *
 * A block takes 64 heads of one row and one split of its entries. Its products are Hopper's, of
 * whole warpgroups, with operands in shared memory, so that no number of the cache passes through
 * the registers of those that multiply. Of the four warpgroups
 *
 *   0     gathers: its last warp looks entries up, tiles of 64 valid ones ahead; its others read
 *         their rows and write the numbers into one of two stages as the products want them: the
 *         latent numbers as float16, in rows of 64 numbers whose 16-byte pieces are swapped, the
 *         rope numbers as they are;
 *   1     scores: multiplies q by a tile, keeps the running maximum and the sum of the weights, and
 *         leaves the weights, as float32 numbers, to the next two;
 *   2, 3  values: multiply the weights by the scales, round them, and add their products with the
 *         tile to 256 of the 512 numbers of out each, in registers.
 *
 * They hand a tile on by barriers in shared memory, at which every thread arrives:
 *
 *   known     in 0       the rows of a tile are known, or, with a size of 0, there are no more
 *   read      in 0       and have been asked for: those of another tile may come
 *   full      0 -> 1     the stage holds a tile, or, with a size of 0, says that there is none
 *   weighed   1 -> 2, 3  its weights are there
 *   taken     2, 3 -> 1  and have been read: the ones of the next tile may come
 *   empty     2, 3 -> 0  half of the stage has been read
 *
 * While values are made of a tile, scores are made of the next, which is all that keeps the tensor
 * cores busy: two stages fill the shared memory. A stage's rope numbers are for the scores alone,
 * so half of the weights stands in their place.
 *
 * Numbers, as in sm80_attend.cuh. A packed row's e4m3 numbers become float16 ones exactly; a dense
 * row's latent numbers do by a power of two of the row. q's latent numbers are brought into
 * float16's range by a power of two of each head (and group of 128 numbers that share a scale).
 * Rope numbers are multiplied as the bfloat16 numbers that they are. Weights are
 * 2^(score * log2(e) - M), M the running maximum rounded up to an integer. The values take
 * w = weight * scale * 2^(M - B), cut off to float16 by turns, where B is an integer of each head
 * and group that keeps w in float16's range: out is the sums times 2^(B - M) of the last M. */
#pragma once

#include "sm80_attend.cuh"
#include "sm90_many_heads_kernels.h"
#include "wgmma.cuh"

namespace many_heads
{

/* -------------------------------------------------------------------------- shapes */

constexpr int HEADS = 64; /* of a block */
constexpr int TILE = 64;  /* entries */
constexpr int HALF = TILE / 2;
constexpr int STAGES = 2;
constexpr int THREADS = 4 * ptx::WARPGROUP;
constexpr int VALUE_THREADS = 2 * ptx::WARPGROUP;
constexpr int VALUE_WARPS = VALUE_THREADS / WARP;

#define SHARED_BYTES(name, heads, threads, bytes)                                                  \
    constexpr int name##_shared = bytes;                                                           \
    static_assert(heads == HEADS && threads == THREADS, "sm90_many_heads_kernels.h");
SMLA_SM90_MANY_HEADS_KERNELS(SHARED_BYTES)
#undef SHARED_BYTES

constexpr int COLUMNS = 64;                     /* of a block of an operand */
constexpr int ROW_BYTES = COLUMNS * 2;          /* of it */
constexpr int LATENT_BLOCKS = LATENT / COLUMNS; /* the rope numbers are one more */
constexpr int BLOCK_BYTES = TILE * ROW_BYTES;
constexpr int K_STEPS = COLUMNS / 16; /* of a block, along its rows */
constexpr int K_BYTES = 16 * 2;       /* of such a step */
constexpr int GROUP_BLOCKS = LATENT_BLOCKS / GROUPS;

/* How a row is stored and multiplied. */
template <int format, int d_qk> struct many_row {
    static constexpr bool E4M3 = format != SMLA_DENSE;
    static constexpr bool HAS_ROPE = d_qk == LATENT + ROPE;
    static constexpr int SCALES = E4M3 ? GROUPS : 1;  /* of an entry */
    static constexpr int VALUE_SCALES = E4M3 ? 2 : 1; /* of them for a warpgroup's values */
    static constexpr int LANES = E4M3 ? 4 : 8;        /* that read a row */
    static constexpr int PIECES = 8;                  /* of 16 latent bytes, of a lane */
    static constexpr int ROPE_PIECES = HAS_ROPE ? 8 / LANES : 0;
    static constexpr int PASS = WARP / LANES; /* rows of a warp at once */
    static constexpr int PASSES = TILE / PASS;
    static constexpr int SCALES_AT = LATENT; /* bytes, where E4M3 */
    static constexpr int ROPE_AT = E4M3 ? LATENT + GROUPS * 4 : LATENT * 2;
    static constexpr int BYTES = ROPE_AT + (HAS_ROPE ? ROPE * 2 : 0);
    static constexpr int STEPS = LATENT_BLOCKS * K_STEPS / SCALES; /* of one scale's products */

    /* Registers of a thread of each role, multiples of 8: one, one and two make 512. */
    static constexpr int GATHER_REGISTERS = 64;
    static constexpr int SCORE_REGISTERS = 112;
    static constexpr int VALUE_REGISTERS = 168;
    static_assert(GATHER_REGISTERS + SCORE_REGISTERS + 2 * VALUE_REGISTERS == 512, "all of them");
};

constexpr int KNOWN_TILES = 4; /* whose rows are looked up ahead */
constexpr int COPY_WARPS = 3;  /* of the first warpgroup; its last one looks entries up */

using operand_block = uint8_t[TILE][ROW_BYTES];

template <typename Row> struct shared_state {
    operand_block query[LATENT_BLOCKS];             /* rows are heads */
    operand_block cache[STAGES][LATENT_BLOCKS + 1]; /* rows are entries */
    float4 weight[HALF / 8][ptx::WARPGROUP];        /* of the first half, as threads have them */
    float scale[STAGES][Row::SCALES][TILE];
    float largest_scale[STAGES][Row::SCALES][Row::PASSES]; /* of a pass's rows each */
    float query_unit[Row::SCALES][HEADS];                  /* undoes q's power */
    float top[HEADS];                                      /* M of the tile */
    float factor[HEADS];                                   /* of out, at the end */
    const uint8_t *entries[KNOWN_TILES][TILE];             /* their rows */
    uint64_t known[KNOWN_TILES];
    uint64_t read[KNOWN_TILES];
    uint64_t full[STAGES];
    uint64_t empty[STAGES][2]; /* by half */
    uint64_t weighed;
    uint64_t taken;
    piece piece;
    smla_row rows[2];
    unsigned long long first_fault; /* packed by note_fault; the lowest wins */
    unsigned int faults;
    int known_size[KNOWN_TILES]; /* entries of the tile; 0: there are no more
                                    tiles */
    int size[STAGES];
};

/* Barriers of the block, beside those of sm80_attend.cuh. */
enum { BARRIER_QUERY = BARRIER_MULTIPLY + 1, BARRIER_FACTORS };

/* Whoever comes to a barrier of the block has let its lanes go their own ways before. */
__device__ void sync_roles(int barrier, int threads)
{
    __syncwarp();
    ptx::sync_threads(barrier, threads);
}

__device__ void arrive_roles(int barrier, int threads)
{
    __syncwarp();
    ptx::arrive_threads(barrier, threads);
}

/* A thread's number in its warpgroup. */
__device__ int group_thread()
{
    return threadIdx.x % ptx::WARPGROUP;
}

/* Its first row of sums; the second is 8 further. */
__device__ int group_row()
{
    return group_thread() / WARP * 16 + group_thread() % WARP / QUAD;
}

/* Byte of 16-byte piece `piece` of a row of a block. */
__device__ int swapped(int row, int piece)
{
    return row * ROW_BYTES + (piece ^ row % 8) * 16;
}

__device__ void wait_warp(uint64_t *barrier, unsigned parity)
{
    ptx::wait_phase(barrier, parity);
    __syncwarp();
}

/* -------------------------------------------------------------------------- gathering */

/* A lane's share of a row, as it is stored: latent piece p is the lane's 16 bytes of what
 * becomes block p of the operand. */
template <typename Row> struct row_pieces {
    uint4 latent[Row::PIECES];
    uint4 rope[Row::ROPE_PIECES ? Row::ROPE_PIECES : 1];
    float scale; /* of the lane's group */
};

/* The rope piece i of a lane. Two lanes of neighbouring rows take theirs in turned order, so
 * that eight lanes write to all banks. */
template <typename Row> __device__ int rope_piece(int row, int lane, int i)
{
    return Row::ROPE_PIECES == 1 ? lane : lane + (i ^ row % 2) * Row::LANES;
}

/* Zeros where there is no row. */
template <typename Row>
__device__ row_pieces<Row> load_row(const uint8_t *bytes, int row, bool present)
{
    const int lane = threadIdx.x % Row::LANES;
    row_pieces<Row> pieces;
#pragma unroll
    for (int p = 0; p < Row::PIECES; p++) {
        pieces.latent[p] = ptx::load_once(bytes + lane * 16 + p * Row::LANES * 16, present);
    }
#pragma unroll
    for (int i = 0; i < Row::ROPE_PIECES; i++) {
        pieces.rope[i] = ptx::load_once(bytes + Row::ROPE_AT + rope_piece<Row>(row, lane, i) * 16,
                                        present);
    }
    if (Row::E4M3) pieces.scale = ptx::load_number_once(bytes + Row::SCALES_AT + lane * 4, present);
    return pieces;
}

__device__ void store_piece(operand_block &block, int row, int piece, uint4 numbers)
{
    *reinterpret_cast<uint4 *>(&block[0][0] + swapped(row, piece)) = numbers;
}

/* 16 e4m3 numbers: two pieces of float16 ones. */
__device__ void store_e4m3(operand_block &block, int row, int piece, uint4 bytes)
{
    uint32_t pairs[4][2];
    ptx::from_e4m3(pairs[0], bytes.x);
    ptx::from_e4m3(pairs[1], bytes.y);
    ptx::from_e4m3(pairs[2], bytes.z);
    ptx::from_e4m3(pairs[3], bytes.w);
    store_piece(block, row, piece, make_uint4(pairs[0][0], pairs[0][1], pairs[1][0], pairs[1][1]));
    store_piece(block, row, piece + 1,
                make_uint4(pairs[2][0], pairs[2][1], pairs[3][0], pairs[3][1]));
}

__device__ float largest_of_piece(uint4 numbers)
{
    __nv_bfloat162 largest = larger_pair({}, numbers.x);
    largest = larger_pair(largest, numbers.y);
    largest = larger_pair(largest, numbers.z);
    largest = larger_pair(largest, numbers.w);
    return fmaxf(__low2float(largest), __high2float(largest));
}

__device__ uint4 scale_piece(uint4 numbers, float factor)
{
    return make_uint4(
        scale_pair<__nv_bfloat16>(numbers.x, factor), scale_pair<__nv_bfloat16>(numbers.y, factor),
        scale_pair<__nv_bfloat16>(numbers.z, factor), scale_pair<__nv_bfloat16>(numbers.w, factor));
}

/* The power of two that brings numbers up to `largest` into float16's range, and what undoes it. */
__device__ float power_for(float largest, float &unit)
{
    const int exponent = max(exponent_of(largest) - 14, -113);
    unit = power_of_two(exponent);
    return power_of_two(-exponent);
}

template <typename Row, typename Shared>
__device__ void store_row(Shared &shared, int stage, int pass, int row, row_pieces<Row> &pieces)
{
    const int lane = threadIdx.x % Row::LANES;
    float factor = 1.0f;
    if (!Row::E4M3) {
        float largest = 0.0f;
#pragma unroll
        for (int p = 0; p < Row::PIECES; p++) {
            largest = fmaxf(largest, largest_of_piece(pieces.latent[p]));
        }
        factor = power_for(lanes_max<Row::LANES>(largest), pieces.scale);
    }
#pragma unroll
    for (int p = 0; p < Row::PIECES; p++) {
        if (Row::E4M3) {
            store_e4m3(shared.cache[stage][p], row, 2 * lane, pieces.latent[p]);
        } else {
            store_piece(shared.cache[stage][p], row, lane, scale_piece(pieces.latent[p], factor));
        }
    }
#pragma unroll
    for (int i = 0; i < Row::ROPE_PIECES; i++) {
        store_piece(shared.cache[stage][LATENT_BLOCKS], row, rope_piece<Row>(row, lane, i),
                    pieces.rope[i]);
    }
    if (lane < Row::SCALES) shared.scale[stage][lane][row] = pieces.scale;
    float largest = fabsf(pieces.scale);
#pragma unroll
    for (int step = Row::LANES; step < WARP; step *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, step));
    }
    if (threadIdx.x % WARP < Row::SCALES) {
        shared.largest_scale[stage][threadIdx.x % WARP][pass] = largest;
    }
}

/* A source of slots whose tokens follow one another at the same distance throughout: every slot
 * is a block of its own. What an index means is then known without a look at memory, and without
 * a division, so that only the indices have to be there in time. */
__device__ bool is_plain(const smla_attend &work)
{
    const smla_source &source = work.source[0];
    return work.sources == 1 && source.indices.dtype && !source.block_table.dtype &&
           (source.num_blocks <= 1 ||
            source.block_stride == source.block_size * source.token_stride);
}

__device__ smla_source plain_source(const smla_source &source, const int64_t &position)
{
    smla_source plain = {};
    plain.indices.data = &position;
    plain.indices.dtype = SMLA_INT64;
    plain.cache = source.cache;
    plain.block_stride = source.token_stride;
    plain.num_blocks = source.num_blocks * source.block_size;
    plain.block_size = 1;
    return plain;
}

/* Where the index of an entry of the split is, or null where there is none. */
template <typename Shared>
__device__ const uint8_t *index_address(const smla_attend &work, const Shared &shared,
                                        int64_t entry)
{
    const int which = entry >= work.source[0].topk;
    const int64_t j = entry - (which ? work.source[0].topk : 0);
    const smla_array &indices = work.source[which].indices;
    if (!indices.dtype || entry >= shared.piece.end || j >= shared.rows[which].entries) {
        return nullptr;
    }
    return static_cast<const uint8_t *>(indices.data) +
           (shared.rows[which].indices + j * indices.stride[2]) *
               (indices.dtype == SMLA_INT64 ? 8 : 4);
}

/* The row of an entry of the split, or null. */
template <typename Shared>
__device__ const uint8_t *look_up(const smla_attend &work, Shared &shared, int64_t entry)
{
    const int which = entry >= work.source[0].topk;
    const int64_t j = entry - (which ? work.source[0].topk : 0);
    if (entry >= shared.piece.end || j >= shared.rows[which].entries) return nullptr;
    smla_place place;
    const smla_cause cause = smla_resolve(&work.source[which], &shared.rows[which], j, &place);
    if (cause >= SMLA_FAULT_INDEX) note_fault(shared, entry, cause, which);
    return cause == SMLA_VALID ? smla_token(&work.source[which], &place) : nullptr;
}

/* The indices of a plain source: of entry `begin` of the split on, `count` of them. */
struct plain_indices {
    const uint8_t *first;
    int64_t pitch; /* bytes */
    int64_t count;
    bool wide; /* int64 */

    __device__ int64_t load(int64_t i) const
    {
        if (i >= count) return -1;
        const uint8_t *at = first + i * pitch;
        return wide ? *reinterpret_cast<const int64_t *>(at)
                    : (int64_t)*reinterpret_cast<const int32_t *>(at);
    }
};

template <typename Shared>
__device__ plain_indices indices_of(const smla_attend &work, const Shared &shared)
{
    const smla_array &indices = work.source[0].indices;
    const int64_t begin = shared.piece.begin;
    const int64_t end = min(shared.piece.end, shared.rows[0].entries);
    const bool wide = indices.dtype == SMLA_INT64;
    const int64_t bytes = wide ? 8 : 4;
    return {static_cast<const uint8_t *>(indices.data) +
                (shared.rows[0].indices + begin * indices.stride[2]) * bytes,
            indices.stride[2] * bytes, end - begin, wide};
}

/* Until there is room for a tile's rows. */
template <typename Shared> __device__ void wait_for_room(Shared &shared, unsigned tile)
{
    wait_warp(&shared.read[tile % KNOWN_TILES], (tile / KNOWN_TILES & 1) ^ 1);
}

template <typename Shared> __device__ void publish_tile(Shared &shared, unsigned tile, int size)
{
    if (threadIdx.x % WARP == 0) shared.known_size[tile % KNOWN_TILES] = size;
    ptx::arrive(&shared.known[tile % KNOWN_TILES]);
}

/* Adds the rows of a round's valid entries to the tiles, in order, and asks for them. */
template <typename Row, typename Shared>
__device__ void add_rows(Shared &shared, const uint8_t *row, unsigned &found)
{
    const unsigned votes = __ballot_sync(ALL_LANES, row != nullptr);
    wait_for_room(shared, (found + WARP - 1) / TILE);
    if (row) {
        const unsigned at = found + __popc(votes & ((1u << threadIdx.x % WARP) - 1));
        shared.entries[at / TILE % KNOWN_TILES][at % TILE] = row;
        ptx::prefetch_bulk(row, Row::BYTES);
    }
    const unsigned tile = found / TILE;
    found += __popc(votes);
    if (found / TILE > tile) publish_tile(shared, tile, TILE);
}

/* The work of the last warp of the first warpgroup: the rows of the valid entries, 64 a tile.
 * What a round needs is asked for long before: a single warp waits for all that it needs. */
template <typename Row, typename Shared>
__device__ void look_up_tiles(const smla_gpu_attend &launch, Shared &shared)
{
    const smla_attend &work = launch.work;
    const int lane = threadIdx.x % WARP;
    const int64_t begin = shared.piece.begin, count = shared.piece.end - begin;
    unsigned found = 0;
    if (is_plain(work)) {
        const plain_indices indices = indices_of(work, shared);
        int64_t index = indices.load(lane);
        const smla_source source = plain_source(work.source[0], index);
        for (int64_t i = lane; i - lane < count; i += WARP) {
            if (i + AHEAD < indices.count) {
                ptx::prefetch(indices.first + (i + AHEAD) * indices.pitch);
            }
            const smla_row row = {};
            smla_place place;
            const smla_cause cause = smla_resolve(&source, &row, 0, &place);
            if (cause >= SMLA_FAULT_INDEX) note_fault(shared, begin + i, cause, 0);
            const uint8_t *bytes = cause == SMLA_VALID ? smla_token(&source, &place) : nullptr;
            index = indices.load(i + WARP);
            add_rows<Row>(shared, bytes, found);
        }
    } else {
        for (int64_t i = lane; i - lane < count; i += WARP) {
            const uint8_t *ahead = index_address(work, shared, begin + i + AHEAD);
            if (ahead) ptx::prefetch(ahead);
            add_rows<Row>(shared, look_up(work, shared, begin + i), found);
        }
    }
    unsigned tile = found / TILE;
    wait_for_room(shared, tile);
    if (found % TILE > 0) {
        publish_tile(shared, tile++, found % TILE);
        wait_for_room(shared, tile);
    }
    publish_tile(shared, tile, 0);
}

/* The work of the other warps of the first warpgroup, which take the rows by turns. Tiles come
 * half by half, the second one first: its part of the stage is given back first. */
template <typename Row, typename Shared> __device__ void copy_tiles(Shared &shared, int warp)
{
    for (unsigned tile = 0;; tile++) {
        const unsigned stage = tile % STAGES, parity = (tile / STAGES & 1) ^ 1;
        const unsigned known = tile % KNOWN_TILES;
        wait_warp(&shared.known[known], tile / KNOWN_TILES & 1);
        const int size = shared.known_size[known];
        if (size > 0) {
#pragma unroll 1
            for (int pass = (warp + tile) % COPY_WARPS; pass < Row::PASSES; pass += COPY_WARPS) {
                const int row = (pass * Row::PASS + HALF) % TILE +
                                (int)threadIdx.x % WARP / Row::LANES;
                row_pieces<Row> pieces = load_row<Row>(shared.entries[known][row], row, row < size);
                wait_warp(&shared.empty[stage][pass < Row::PASSES / 2], parity);
                store_row<Row>(shared, stage, pass, row, pieces);
            }
            ptx::arrive(&shared.read[known]);
        } else {
            wait_warp(&shared.empty[stage][1], parity);
            wait_warp(&shared.empty[stage][0], parity);
        }
        if (threadIdx.x == 0) shared.size[stage] = size;
        ptx::publish_operands();
        ptx::arrive(&shared.full[stage]);
        if (size == 0) break;
    }
}

/* -------------------------------------------------------------------------- the query */

/* 16 numbers of q. */
template <bool aligned> __device__ void load_sixteen(const uint16_t *numbers, uint4 (&pieces)[2])
{
    if constexpr (aligned) {
        pieces[0] = ptx::load_once(numbers, true);
        pieces[1] = ptx::load_once(numbers + 8, true);
    } else {
        uint32_t pairs[8];
#pragma unroll
        for (int i = 0; i < 8; i++) pairs[i] = numbers[2 * i] | (uint32_t)numbers[2 * i + 1] << 16;
        pieces[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        pieces[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    }
}

/* The latent numbers of q as an operand. A warp takes every eighth head, a lane 16 numbers of
 * each, all of which are asked for before the first is looked at. */
template <typename Row, bool aligned, typename Shared>
__device__ void store_heads(const smla_attend &work, const piece &piece, Shared &shared, int warp)
{
    constexpr int OF_WARP = HEADS / VALUE_WARPS, LANES = WARP / Row::SCALES;
    const int lane = threadIdx.x % WARP;
    uint4 pieces[OF_WARP][2];
#pragma unroll
    for (int i = 0; i < OF_WARP; i++) {
        const int head = min(piece.head + i * VALUE_WARPS + warp, work.heads - 1);
        load_sixteen<aligned>(query_number(work, piece, head, lane * 16), pieces[i]);
    }
#pragma unroll
    for (int i = 0; i < OF_WARP; i++) {
        const int of_block = i * VALUE_WARPS + warp;
        const float largest = fmaxf(largest_of_piece(pieces[i][0]), largest_of_piece(pieces[i][1]));
        float unit;
        const float factor = power_for(lanes_max<LANES>(largest), unit);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            store_piece(shared.query[lane / 4], of_block, lane % 4 * 2 + half,
                        scale_piece(pieces[i][half], factor));
        }
        if (lane % LANES == 0) shared.query_unit[lane / LANES][of_block] = unit;
    }
}

template <typename Row, typename Shared>
__device__ void store_query(const smla_attend &work, const piece &piece, Shared &shared, int warp)
{
    if (is_query_aligned(work, 16)) {
        store_heads<Row, true>(work, piece, shared, warp);
    } else {
        store_heads<Row, false>(work, piece, shared, warp);
    }
    ptx::publish_operands();
}

/* The rope numbers of q as the scores' left operand. */
__device__ void load_rope(const smla_attend &work, const piece &piece, uint32_t (&rope)[K_STEPS][4])
{
    const int column = threadIdx.x % QUAD;
    const bool aligned = is_query_aligned(work, 4);
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const int head = min(piece.head + group_row() + 8 * y, work.heads - 1);
        const uint16_t *numbers = query_number(work, piece, head, LATENT);
#pragma unroll
        for (int step = 0; step < K_STEPS; step++) {
            uint32_t &first = rope[step][y], &second = rope[step][y + 2];
            if (aligned) {
                load_pairs<false, true>(numbers + 16 * step, column, first, second);
            } else {
                load_pairs<false, false>(numbers + 16 * step, column, first, second);
            }
        }
    }
}

/* -------------------------------------------------------------------------- scores */

/* What a thread keeps of its two rows. */
struct row_state {
    float largest[2]; /* score so far */
    float sum[2];     /* of weights, of the thread's columns */
};

/* scores = q * k of the tile in `stage`, times the softmax scale: number 4 j + 2 y + x of a
 * thread is of its row y and entry 8 j + 2 column + x. */
template <typename Row, typename Shared>
__device__ void multiply_scores(const smla_attend &work, const Shared &shared, int stage,
                                const uint32_t (&rope)[K_STEPS][4], float (&scores)[32])
{
    const int row = group_row(), column = threadIdx.x % QUAD;
    const uint32_t query = ptx::shared_address(shared.query);
    const uint32_t cache = ptx::shared_address(shared.cache[stage]);
    float part[32];
    ptx::fence_products();
    if (Row::HAS_ROPE) {
#pragma unroll
        for (int step = 0; step < K_STEPS; step++) {
            ptx::multiply_along_k(
                scores, rope[step],
                ptx::operand_along_k(cache + LATENT_BLOCKS * BLOCK_BYTES + step * K_BYTES),
                step > 0);
        }
        ptx::commit_products();
    }
#pragma unroll
    for (int scale = 0; scale < Row::SCALES; scale++) {
        if (scale > 0) ptx::fence_products();
#pragma unroll
        for (int step = 0; step < Row::STEPS; step++) {
            const int at = scale * Row::STEPS + step;
            const int offset = at / K_STEPS * BLOCK_BYTES + at % K_STEPS * K_BYTES;
            ptx::multiply_along_k(part, ptx::operand_along_k(query + offset),
                                  ptx::operand_along_k(cache + offset), step > 0);
        }
        ptx::commit_products();
        ptx::wait_products<0>();
        const float unit[2] = {shared.query_unit[scale][row], shared.query_unit[scale][row + 8]};
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            float scales[2];
            load_run<float>(shared.scale[stage][scale], 8 * j + 2 * column, scales);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float number = part[4 * j + i] * unit[i / 2];
                float &score = scores[4 * j + i];
                score = Row::HAS_ROPE || scale > 0 ? fmaf(number, scales[i % 2], score)
                                                   : number * scales[i % 2];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 32; i++) scores[i] *= work.softmax_scale;
}

/* Scores -> weights. */
__device__ void weigh(const smla_attend &work, float inverse_cap, int size, float (&scores)[32],
                      row_state &state)
{
    const int column = threadIdx.x % QUAD;
    if (work.logit_cap > 0.0f) {
#pragma unroll
        for (int i = 0; i < 32; i++) scores[i] = work.logit_cap * tanhf(scores[i] * inverse_cap);
    }
    if (size < TILE) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            if (i / 4 * 8 + 2 * column + i % 2 >= size) scores[i] = -CUDART_INF_F;
        }
    }
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const float last = state.largest[y];
        float largest = last;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            largest = fmaxf(largest, scores[i / 2 * 4 + 2 * y + i % 2]);
        }
        largest = quad_max(largest);
        const float top = top_of(largest), before = top_of(last);
        const float rest = rest_of(largest, top);
        const float drop = top == before ? 0.0f : fminf(top - before, LONGEST_DROP);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float &score = scores[i / 2 * 4 + 2 * y + i % 2];
            score = ptx::exp2_fast(fmaf(score - largest, LOG2_E, rest));
            sum += score;
        }
        state.sum[y] = fmaf(state.sum[y], ptx::exp2_fast(-drop), sum);
        state.largest[y] = largest;
    }
}

/* Where the weights of a half of the tile in `stage` are. */
template <typename Shared>
__device__ auto weights_of(Shared &shared, int stage, int half) -> decltype(&shared.weight[0])
{
    return half == 0
               ? &shared.weight[0]
               : reinterpret_cast<decltype(&shared.weight[0])>(shared.cache[stage][LATENT_BLOCKS]);
}

/* Largest score and sum of every head, and the factor of its sums of values. */
template <typename Shared>
__device__ void finish_heads(const smla_gpu_attend &launch, Shared &shared, row_state &state)
{
    const smla_attend &work = launch.work;
    const piece &piece = shared.piece;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        float sum = state.sum[y];
        const float largest = state.largest[y];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        const int head = group_row() + 8 * y;
        if (threadIdx.x % QUAD != 0 || piece.head + head >= work.heads) continue;
        /* from weights relative to M to weights relative to the largest score */
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
}

/* The work of the second warpgroup. */
template <typename Row, typename Shared>
__device__ void score_tiles(const smla_gpu_attend &launch, Shared &shared,
                            const uint32_t (&rope)[K_STEPS][4])
{
    const smla_attend &work = launch.work;
    const int thread = group_thread();
    const float inverse_cap = 1.0f / work.logit_cap;
    row_state state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
#pragma unroll 1
    for (unsigned tile = 0;; tile++) {
        const int stage = tile % STAGES;
        wait_warp(&shared.full[stage], tile / STAGES & 1);
        const int size = shared.size[stage];
        if (size == 0) {
            ptx::wait_phase(&shared.taken, (tile & 1) ^ 1);
            break;
        }
        float scores[32];
        multiply_scores<Row>(work, shared, stage, rope, scores);
        weigh(work, inverse_cap, size, scores, state);
        ptx::wait_phase(&shared.taken, (tile & 1) ^ 1);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            weights_of(shared, stage, j / (HALF / 8))[j % (HALF / 8)][thread] = make_float4(
                scores[4 * j], scores[4 * j + 1], scores[4 * j + 2], scores[4 * j + 3]);
        }
        if (thread % QUAD == 0) {
            shared.top[group_row()] = top_of(state.largest[0]);
            shared.top[group_row() + 8] = top_of(state.largest[1]);
        }
        ptx::arrive(&shared.weighed);
    }
    ptx::arrive(&shared.weighed);
    finish_heads(launch, shared, state);
}

/* -------------------------------------------------------------------------- values */

constexpr int VALUE_GROUPS = GROUPS / 2; /* of a warpgroup, 128 numbers each */
constexpr int HALF_STEPS = HALF / 16;    /* k steps of a half */

/* A warpgroup's sums of values; of a thread's two rows M of the last tile, and B less that M: M may
 * be so large that B as such would be M again. */
template <typename Row> struct value_sums {
    float sums[VALUE_GROUPS][64];
    float rise[Row::VALUE_SCALES][2];
    float top[2];
};

/* A thread's weights of entries `entry` + 2 column and the next, and their scales. */
template <typename Shared> __device__ float4 load_weights(Shared &shared, int stage, int entry)
{
    return weights_of(shared, stage, entry / HALF)[entry % HALF / 8][group_thread()];
}

template <typename Shared>
__device__ float2 load_scales(const Shared &shared, int stage, int entry, int scale)
{
    return *reinterpret_cast<const float2 *>(
        &shared.scale[stage][scale][entry + threadIdx.x % QUAD * 2]);
}

/* w of 16 entries from `entry` on, of one of their scales: the left operand of their values. */
template <typename Shared>
__device__ void round_weights(const Shared &shared, unsigned tile, int entry, int scale,
                              const float4 (&weights)[2], const float (&unit)[2],
                              uint32_t (&operand)[4])
{
    constexpr int CUT_BITS = 13; /* of a float32 fraction, that float16 does not have */
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const float2 scales = load_scales(shared, tile % STAGES, entry + 8 * j, scale);
        const uint32_t turns = (tile * TILE + entry + 8 * j + threadIdx.x % QUAD * 2) * TURN;
        const uint32_t raise[2] = {turns >> (32 - CUT_BITS), (turns + TURN) >> (32 - CUT_BITS)};
        const auto raised = [&](float number, int x) {
            return __uint_as_float(__float_as_uint(number) + raise[x]);
        };
        operand[2 * j] = ptx::cut(raised(weights[j].x * scales.x * unit[0], 0),
                                  raised(weights[j].y * scales.y * unit[0], 1));
        operand[2 * j + 1] = ptx::cut(raised(weights[j].z * scales.x * unit[1], 0),
                                      raised(weights[j].w * scales.y * unit[1], 1));
    }
}

constexpr float LARGEST_POWER = 0x1p126f; /* 2^(M - B), before B moves */

/* Whether w of the tile may be more than float16 is to hold, by the largest of the scales. */
template <typename Row, typename Shared>
__device__ bool may_move(const Shared &shared, int stage, int scale, const float (&unit)[2])
{
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < Row::PASSES; i += 4) {
        float of_passes[4];
        load_run<float>(&shared.largest_scale[stage][scale][i], 0, of_passes);
        largest = fmaxf(
            largest, fmaxf(fmaxf(of_passes[0], of_passes[1]), fmaxf(of_passes[2], of_passes[3])));
    }
    const float power = fmaxf(unit[0], unit[1]);
    return power > LARGEST_POWER || largest * power > LARGEST_WEIGHT;
}

/* 2^(M - B) of a row. */
template <typename Row>
__device__ void units_of(const value_sums<Row> &values, float (&unit)[Row::VALUE_SCALES][2])
{
#pragma unroll
    for (int s = 0; s < Row::VALUE_SCALES; s++) {
        unit[s][0] = ptx::exp2_fast(-values.rise[s][0]);
        unit[s][1] = ptx::exp2_fast(-values.rise[s][1]);
    }
}

/* Takes M of a tile. */
template <typename Row> __device__ void take_top(const float (&top)[2], value_sums<Row> &values)
{
#pragma unroll
    for (int y = 0; y < 2; y++) {
        if (top[y] == values.top[y]) continue;
#pragma unroll
        for (int s = 0; s < Row::VALUE_SCALES; s++) values.rise[s][y] -= top[y] - values.top[y];
        values.top[y] = top[y];
    }
}

/* Moves B, and the sums along, where w of the tile is more than float16 is to hold. */
template <typename Row, typename Shared>
__device__ void move_base(Shared &shared, int stage, int first_scale,
                          const float (&unit)[Row::VALUE_SCALES][2], value_sums<Row> &values)
{
#pragma unroll
    for (int s = 0; s < Row::VALUE_SCALES; s++) {
        float biggest[2] = {};
#pragma unroll 1
        for (int entry = 0; entry < TILE; entry += 8) {
            const float4 weights = load_weights(shared, stage, entry);
            const float2 scales = load_scales(shared, stage, entry, first_scale + s);
            biggest[0] = fmaxf(biggest[0],
                               fmaxf(fabsf(weights.x * scales.x), fabsf(weights.y * scales.y)));
            biggest[1] = fmaxf(biggest[1],
                               fmaxf(fabsf(weights.z * scales.x), fabsf(weights.w * scales.y)));
        }
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const float largest = quad_max(biggest[y]), rise = values.rise[s][y];
            const int exponent = max(exponent_of(largest) - FRESH_WEIGHT, -126);
            if (unit[s][y] <= LARGEST_POWER && largest * unit[s][y] <= LARGEST_WEIGHT) continue;
            const float moved = fmaxf(rise, (float)exponent);
            const float factor = ptx::exp2_fast(rise - moved);
            values.rise[s][y] = moved;
#pragma unroll
            for (int g = s; g < VALUE_GROUPS; g += Row::VALUE_SCALES) {
#pragma unroll
                for (int i = 0; i < 32; i++) values.sums[g][i / 2 * 4 + 2 * y + i % 2] *= factor;
            }
        }
    }
}

/* The work of the third and the fourth warpgroup, of which `part` tells which. The products of
 * 16 entries are under way while the weights of the next are rounded. */
template <typename Row, typename Shared>
__device__ void add_tiles(Shared &shared, int part, value_sums<Row> &values)
{
    const int row = group_row(), first_scale = part * VALUE_GROUPS % Row::SCALES;
#pragma unroll 1
    for (unsigned tile = 0;; tile++) {
        const int stage = tile % STAGES;
        wait_warp(&shared.weighed, tile & 1);
        if (shared.size[stage] == 0) break;
        const float top[2] = {shared.top[row], shared.top[row + 8]};
        take_top(top, values);
        float unit[Row::VALUE_SCALES][2];
        units_of(values, unit);
        bool moves = false;
#pragma unroll
        for (int s = 0; s < Row::VALUE_SCALES; s++) {
            moves |= may_move<Row>(shared, stage, first_scale + s, unit[s]);
        }
        if (__any_sync(ALL_LANES, moves)) {
            move_base<Row>(shared, stage, first_scale, unit, values);
            units_of(values, unit);
        }
        const uint32_t cache = ptx::shared_address(shared.cache[stage]) +
                               part * VALUE_GROUPS * GROUP_BLOCKS * BLOCK_BYTES;
#pragma unroll
        for (int half = 1; half >= 0; half--) {
            uint32_t operands[2][4]; /* of this product and of the one under way */
#pragma unroll
            for (int step = 0; step < HALF_STEPS; step++) {
                const int entry = half * HALF + step * 16;
                const float4 weights[2] = {load_weights(shared, stage, entry),
                                           load_weights(shared, stage, entry + 8)};
#pragma unroll
                for (int s = 0; s < Row::VALUE_SCALES; s++) {
                    uint32_t (&operand)[4] = operands[(step * Row::VALUE_SCALES + s) % 2];
                    ptx::wait_products<1>();
                    if (half == 0 && step * Row::VALUE_SCALES + s == 1) {
                        ptx::arrive(&shared.empty[stage][1]);
                    }
                    round_weights(shared, tile, entry, first_scale + s, weights, unit[s], operand);
                    ptx::fence_products();
#pragma unroll
                    for (int g = s; g < VALUE_GROUPS; g += Row::VALUE_SCALES) {
                        ptx::multiply_across_k(
                            values.sums[g], operand,
                            ptx::operand_across_k<BLOCK_BYTES>(
                                cache + g * GROUP_BLOCKS * BLOCK_BYTES + entry * ROW_BYTES));
                    }
                    ptx::commit_products();
                }
            }
        }
        ptx::arrive(&shared.taken);
        ptx::wait_products<0>();
        ptx::arrive(&shared.empty[stage][0]);
    }
}

/* -------------------------------------------------------------------------- results */

/* The warpgroup's value numbers, from number 0 of `row` on: four lanes side by side write whole
 * sectors. */
template <typename Row, typename Number, bool in_runs, typename Shared>
__device__ void store_values(const smla_gpu_attend &launch, const Shared &shared, int part,
                             const value_sums<Row> &values, void *data, int64_t row, int64_t stride)
{
    using stored = cache_row<__nv_bfloat16, SMLA_DENSE, LATENT + ROPE>; /* the order of its sums */
    const int column = threadIdx.x % QUAD;
    const int run = column % 2 * 8 + column / 2 * 4;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const int of_block = group_row() + 8 * y, head = shared.piece.head + of_block;
        const float factor = head < launch.work.heads ? shared.factor[of_block] : 0.0f;
#pragma unroll
        for (int g = 0; g < VALUE_GROUPS; g++) {
            const float power = factor == 0.0f
                                    ? 0.0f
                                    : ptx::exp2_fast(values.rise[g % Row::VALUE_SCALES][y]);
            const int64_t element = row + head * stride + (part * VALUE_GROUPS + g) * 128 + run;
#pragma unroll
            for (int b = 0; b < 128 / 8; b += 2) {
                const float (&sums)[64] = values.sums[g];
                const float first[4] = {sums[4 * b], sums[4 * b + 1], sums[4 * b + 2],
                                        sums[4 * b + 3]};
                const float second[4] = {sums[4 * b + 4], sums[4 * b + 5], sums[4 * b + 6],
                                         sums[4 * b + 7]};
                float numbers[RUN];
                join_blocks<stored>(first, second, y, column, numbers);
#pragma unroll
                for (int i = 0; i < RUN; i++) numbers[i] = numbers[i] * power * factor;
                if (head >= launch.work.heads) continue;
                if (in_runs) {
                    store_run<Number>(data, element + 8 * b, numbers);
                } else {
#pragma unroll
                    for (int i = 0; i < RUN; i++) {
                        static_cast<Number *>(data)[element + 8 * b + i] = static_cast<Number>(
                            numbers[i]);
                    }
                }
            }
        }
    }
}

template <typename Row, typename Number, typename Shared>
__device__ void store_results(const smla_gpu_attend &launch, const Shared &shared, int part,
                              const value_sums<Row> &values, void *data, int64_t row,
                              int64_t stride)
{
    const uintptr_t first = reinterpret_cast<uintptr_t>(static_cast<Number *>(data) + row);
    if (first % (RUN * sizeof(Number)) == 0 && stride % RUN == 0) {
        store_values<Row, Number, true>(launch, shared, part, values, data, row, stride);
    } else {
        store_values<Row, Number, false>(launch, shared, part, values, data, row, stride);
    }
}

/* To out, or as a part of it to the workspace. */
template <typename Row, typename Shared>
__device__ void store_results(const smla_gpu_attend &launch, const Shared &shared, int part,
                              const value_sums<Row> &values)
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
        store_results<Row, float>(launch, shared, part, values, data, row, stride);
    } else {
        store_results<Row, __nv_bfloat16>(launch, shared, part, values, data, row, stride);
    }
}

/* -------------------------------------------------------------------------- the kernel */

template <int format, int d_qk, int shared_bytes>
__device__ void attend(const smla_gpu_attend &launch)
{
    using Row = many_row<format, d_qk>;
    using Shared = shared_state<Row>;
    constexpr int MULTIPLIERS = THREADS - ptx::WARPGROUP;
    static_assert(sizeof(Shared) == shared_bytes, "sm90_many_heads_kernels.h");
    static_assert(shared_bytes + 1024 <= 227 * 1024, "what Hopper gives a block");
    extern __shared__ __align__(1024) unsigned char operands[];
    Shared &shared = *reinterpret_cast<Shared *>(operands);
    const smla_attend &work = launch.work;

    ptx::allow_next_launch();
    const piece piece = piece_of_block(launch, blockIdx.x, HEADS);
    if (threadIdx.x == 0) {
        shared.piece = piece;
        shared.first_fault = ~0ull;
        shared.faults = 0;
        for (int stage = 0; stage < STAGES; stage++) {
            ptx::init_phases(&shared.full[stage], COPY_WARPS * WARP);
            ptx::init_phases(&shared.empty[stage][0], VALUE_THREADS);
            ptx::init_phases(&shared.empty[stage][1], VALUE_THREADS);
        }
        ptx::init_phases(&shared.weighed, ptx::WARPGROUP);
        ptx::init_phases(&shared.taken, VALUE_THREADS);
        for (int tile = 0; tile < KNOWN_TILES; tile++) {
            ptx::init_phases(&shared.known[tile], WARP);
            ptx::init_phases(&shared.read[tile], COPY_WARPS * WARP);
        }
    }
    __syncthreads();
    const int role = threadIdx.x / ptx::WARPGROUP;
    if (role == 0) {
        ptx::keep_registers<Row::GATHER_REGISTERS>();
        fault_tally faults = {};
        open_rows(work, shared.piece, shared.rows, faults);
        if (faults.count) note_fault(shared, faults.entry, faults.cause, faults.source);
        sync_roles(BARRIER_GATHER, ptx::WARPGROUP);
        const int warp = threadIdx.x / WARP;
        if (warp == COPY_WARPS) {
            look_up_tiles<Row>(launch, shared);
        } else {
            copy_tiles<Row>(shared, warp);
        }
    } else if (role == 1) {
        ptx::keep_registers<Row::SCORE_REGISTERS>();
        uint32_t rope[K_STEPS][4] = {};
        if (Row::HAS_ROPE) load_rope(work, piece, rope);
        sync_roles(BARRIER_QUERY, MULTIPLIERS);
        score_tiles<Row>(launch, shared, rope);
        arrive_roles(BARRIER_FACTORS, MULTIPLIERS);
    } else {
        ptx::take_registers<Row::VALUE_REGISTERS>();
        store_query<Row>(work, piece, shared, threadIdx.x / WARP - 2 * ptx::WARPGROUP / WARP);
        arrive_roles(BARRIER_QUERY, MULTIPLIERS);
        value_sums<Row> values = {};
#pragma unroll
        for (int y = 0; y < 2; y++) {
            values.top[y] = -CUDART_INF_F;
#pragma unroll
            for (int s = 0; s < Row::VALUE_SCALES; s++) values.rise[s][y] = -CUDART_INF_F;
        }
        add_tiles<Row>(shared, role - 2, values);
        sync_roles(BARRIER_FACTORS, MULTIPLIERS);
        store_results<Row>(launch, shared, role - 2, values);
    }
    __syncthreads(); /* nobody leaves while others still wait at a barrier */
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

} // namespace many_heads
