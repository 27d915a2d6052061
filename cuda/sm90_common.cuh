/* What the kernels of Hopper's own products have in common: how threads wait for one another,
 * operands in shared memory, the looking up of rows, q as an operand, the report of faults. Each of
 * these kernels has a block of 64 heads, and warps that only gather: two of them look the valid
 * entries of the block's split up, others copy their rows. */
#pragma once

#include "sm80_attend.cuh"
#include "sm90_kernels.h"
#include "wgmma.cuh"

namespace sm90
{

constexpr int HEADS = SMLA_SM90_HEADS;
constexpr int LOOK_UP_WARPS = 2;
constexpr int KNOWN_TILES = 4; /* whose rows are looked up ahead */

constexpr int COLUMNS = 64;                     /* of a block of an operand */
constexpr int ROW_BYTES = COLUMNS * 2;          /* of it */
constexpr int LATENT_BLOCKS = LATENT / COLUMNS; /* the rope numbers are one more */
constexpr int QUERY_BLOCK = HEADS * ROW_BYTES;  /* bytes */
constexpr int K_STEPS = COLUMNS / 16;           /* of a block, along its rows */
constexpr int K_BYTES = 16 * 2;                 /* of such a step */

/* Whoever comes to a barrier of several roles has let its lanes go their own ways before. */
__device__ void sync_roles(int barrier, int threads)
{
    __syncwarp();
    ptx::sync_threads(barrier, threads);
}

/* Byte of 16-byte piece `piece` of a row of a block. */
__device__ int swapped(int row, int piece)
{
    return row * ROW_BYTES + (piece ^ row % 8) * 16;
}

__device__ void store_piece(uint8_t (*block)[ROW_BYTES], int row, int piece, uint4 numbers)
{
    *reinterpret_cast<uint4 *>(&block[0][0] + swapped(row, piece)) = numbers;
}

__device__ void wait_warp(uint64_t *barrier, unsigned parity)
{
    ptx::wait_phase(barrier, parity);
    __syncwarp();
}

/* -------------------------------------------------------------------------- looking up */

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
    return index_at(indices, shared.rows[which].indices + j * indices.stride[2]);
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

/* Brings the first indices of the split into L2 before anybody knows how many of them count. */
template <int gatherers>
__device__ void prefetch_first_indices(const smla_attend &work, const piece &piece)
{
#pragma unroll
    for (int first = 0; first < AHEAD; first += gatherers) {
        const int64_t entry = piece.begin + first + threadIdx.x;
        const int which = entry >= work.source[0].topk;
        const int64_t j = entry - (which ? work.source[0].topk : 0);
        const smla_array &indices = work.source[which].indices;
        if (!indices.dtype || entry >= piece.end) return;
        ptx::prefetch(index_at(indices, piece.batch * indices.stride[0] +
                                            piece.query * indices.stride[1] +
                                            j * indices.stride[2]));
    }
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

/* Adds the rows of a round's valid entries to the tiles, in order. */
template <typename Row, typename Shared>
__device__ void add_rows(Shared &shared, const uint8_t *row)
{
    const unsigned votes = __ballot_sync(ALL_LANES, row != nullptr);
    const unsigned found = shared.found, tile = found / Row::TILE, end = found + __popc(votes);
    wait_for_room(shared, (found + WARP - 1) / Row::TILE);
    if (row) {
        const unsigned at = found + __popc(votes & ((1u << threadIdx.x % WARP) - 1));
        shared.entries[at / Row::TILE % KNOWN_TILES][at % Row::TILE] = row;
    }
    __syncwarp();
    if (threadIdx.x % WARP == 0) shared.found = end;
    if (end / Row::TILE > tile) publish_tile(shared, tile, Row::TILE);
}

/* What is left becomes a last tile, behind which there is none. */
template <typename Row, typename Shared> __device__ void end_tiles(Shared &shared)
{
    const unsigned found = shared.found;
    unsigned tile = found / Row::TILE;
    wait_for_room(shared, tile);
    if (found % Row::TILE > 0) {
        publish_tile(shared, tile++, found % Row::TILE);
        wait_for_room(shared, tile);
    }
    publish_tile(shared, tile, 0);
}

/* The rows of the valid entries of the split, for look-up warp `warp`: every other round of 32. A
 * row is known and asked for before its turn comes to be given a place. */
template <typename Row, bool plain, typename Shared>
__device__ void look_up_rounds(const smla_gpu_attend &launch, Shared &shared, int warp)
{
    constexpr int STRIDE = LOOK_UP_WARPS * WARP;
    const smla_attend &work = launch.work;
    const int64_t begin = shared.piece.begin;
    const int rounds = (int)((shared.piece.end - begin + WARP - 1) / WARP);
    int64_t i = warp * WARP + threadIdx.x % WARP;
    int64_t index = 0;
    const plain_indices indices = plain ? indices_of(work, shared) : plain_indices{};
    const smla_source source = plain_source(work.source[0], index);
    if (plain) index = indices.load(i);
    for (int round = warp; round <= rounds; round += LOOK_UP_WARPS, i += STRIDE) {
        const uint8_t *row = nullptr;
        if (plain) {
            if (i + AHEAD < indices.count) {
                ptx::prefetch(indices.first + (i + AHEAD) * indices.pitch);
            }
            const smla_row first = {};
            smla_place place;
            const smla_cause cause = smla_resolve(&source, &first, 0, &place);
            if (cause >= SMLA_FAULT_INDEX) note_fault(shared, begin + i, cause, 0);
            if (cause == SMLA_VALID) row = smla_token(&source, &place);
            index = indices.load(i + STRIDE);
        } else {
            const uint8_t *ahead = index_address(work, shared, begin + i + AHEAD);
            if (ahead) ptx::prefetch(ahead);
            row = look_up(work, shared, begin + i);
        }
        if (Row::PREFETCHED && row) ptx::prefetch_bulk(row, Row::BYTES);
        const int turn = round / LOOK_UP_WARPS & 1;
        wait_warp(&shared.turn[1 - warp], warp == 0 ? turn ^ 1 : turn);
        if (round == rounds) {
            end_tiles<Row>(shared);
        } else {
            add_rows<Row>(shared, row);
            ptx::arrive(&shared.turn[warp]);
        }
    }
}

template <typename Row, typename Shared>
__device__ void look_up_tiles(const smla_gpu_attend &launch, Shared &shared, int warp)
{
    if (is_plain(launch.work)) {
        look_up_rounds<Row, true>(launch, shared, warp);
    } else {
        look_up_rounds<Row, false>(launch, shared, warp);
    }
}

/* Until the rows of a tile are known. Returns how many they are. */
template <typename Shared> __device__ int wait_for_tile(Shared &shared, unsigned tile)
{
    wait_warp(&shared.known[tile % KNOWN_TILES], tile / KNOWN_TILES & 1);
    return shared.known_size[tile % KNOWN_TILES];
}

/* -------------------------------------------------------------------------- the query */

/* 8 numbers of q. */
template <bool aligned> __device__ uint4 load_eight(const uint16_t *numbers)
{
    if constexpr (aligned) {
        return ptx::load_once(numbers, true);
    } else {
        uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = numbers[2 * i] | (uint32_t)numbers[2 * i + 1] << 16;
        return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
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

/* q as an operand. Of the latent numbers a warp takes every eighth head, a lane 16 numbers of each,
 * those of one step, all of which are asked for before the first is looked at. Where a lane of the
 * products has four neighbours of a step's numbers (e4m3 ones), columns 2 c, 2 c + 1, 2 c + 8 and
 * 2 c + 9 of the operand are numbers 4 c to 4 c + 3. */
template <typename Row, bool aligned, typename Shared>
__device__ void store_heads(const smla_attend &work, const piece &piece, Shared &shared)
{
    constexpr int WARPS = Row::MULTIPLIERS / WARP, OF_WARP = HEADS / WARPS;
    constexpr int ROPE_HEADS = WARP / 8; /* of a warp at once */
    const int lane = threadIdx.x % WARP, warp = (threadIdx.x - Row::GATHERERS) / WARP;
    uint4 pieces[OF_WARP][2], rope[OF_WARP / ROPE_HEADS];
#pragma unroll
    for (int i = 0; i < OF_WARP; i++) {
        const int head = min(piece.head + i * WARPS + warp, work.heads - 1);
        const uint16_t *numbers = query_number(work, piece, head, lane * 16);
        pieces[i][0] = load_eight<aligned>(numbers);
        pieces[i][1] = load_eight<aligned>(numbers + 8);
    }
    if (Row::HAS_ROPE) {
#pragma unroll
        for (int i = 0; i < OF_WARP / ROPE_HEADS; i++) {
            const int head = piece.head + (i * WARPS + warp) * ROPE_HEADS + lane / 8;
            rope[i] = load_eight<aligned>(
                query_number(work, piece, min(head, work.heads - 1), LATENT + lane % 8 * 8));
        }
    }
#pragma unroll
    for (int i = 0; i < OF_WARP; i++) {
        const int of_block = i * WARPS + warp;
        const float largest = fmaxf(largest_of_piece(pieces[i][0]), largest_of_piece(pieces[i][1]));
        float unit;
        const float factor = power_for(lanes_max<WARP>(largest), unit);
        uint8_t (*const block)[ROW_BYTES] = shared.query[lane / 4];
        if constexpr (Row::NEIGHBOURS) {
            const uint4 first = scale_piece(pieces[i][0], factor);
            const uint4 second = scale_piece(pieces[i][1], factor);
            store_piece(block, of_block, lane % 4 * 2,
                        make_uint4(first.x, first.z, second.x, second.z));
            store_piece(block, of_block, lane % 4 * 2 + 1,
                        make_uint4(first.y, first.w, second.y, second.w));
        } else {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                store_piece(block, of_block, lane % 4 * 2 + half,
                            scale_piece(pieces[i][half], factor));
            }
        }
        if (lane == 0) shared.query_unit[of_block] = unit;
    }
    if (Row::HAS_ROPE) {
#pragma unroll
        for (int i = 0; i < OF_WARP / ROPE_HEADS; i++) {
            store_piece(shared.query[Row::BLOCKS - 1], (i * WARPS + warp) * ROPE_HEADS + lane / 8,
                        lane % 8, rope[i]);
        }
    }
}

template <typename Row, typename Shared>
__device__ void store_query(const smla_attend &work, const piece &piece, Shared &shared)
{
    if (is_query_aligned(work, 16)) {
        store_heads<Row, true>(work, piece, shared);
    } else {
        store_heads<Row, false>(work, piece, shared);
    }
    ptx::publish_operands();
}

/* -------------------------------------------------------------------------- faults */

/* What note_fault has kept goes to the host. All threads of the block call it, after the last of
 * them has noted one. */
template <typename Shared>
__device__ void report_noted(const smla_gpu_attend &launch, const Shared &shared)
{
    if (!launch.work.record || shared.piece.head != 0) return;
    fault_tally faults = {};
    if (threadIdx.x == 0 && shared.faults) {
        faults.entry = (int64_t)(shared.first_fault >> 8) - 1;
        faults.cause = (int)(shared.first_fault >> 1 & 127);
        faults.source = (int)(shared.first_fault & 1);
        faults.count = (int)shared.faults;
    }
    report_faults(launch, shared.piece, shared.rows, faults);
}

} // namespace sm90
