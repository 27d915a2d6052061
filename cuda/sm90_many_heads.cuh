/* attend on Hopper for many heads: bfloat16 queries of 33 heads and more, d_qk 576 or 512, d_v 512,
 * cache rows of 16-byte alignment, a block of 64 heads to a multiprocessor.
 *
 * A block takes 64 heads of one row and one split of its entries, in tiles of 48 valid ones (packed
 * rows) or 32 (dense ones). Its products are Hopper's, of whole warpgroups, with operands in shared
 * memory, so that no number of the cache passes through the registers of those that multiply. Of
 * the four warpgroups
 *
 *   0, 1  gather. Two warps look entries up, by turns; six read their rows, half of them ahead into
 *         registers and half into shared memory, and write the numbers into one of two or three
 *         stages as the products want them: the latent numbers as float16, in rows of 64 numbers
 *         whose 16-byte pieces are swapped, the rope numbers as they are;
 *   2, 3  multiply. Each makes scores and weights of every other tile, its own, and leaves the
 *         weights in shared memory for both. Each keeps 256 of the 512 numbers of out, in
 *         registers, to which it adds the values of all tiles in order.
 *
 * While one of the latter weighs, the other's products run: that is what keeps the tensor cores
 * busy. They hand things on by barriers in shared memory, at which every thread arrives:
 *
 *   turn      look-up -> look-up    the other warp's entries have their places
 *   known     look-up -> copying    the rows of a tile are known; a size of 0: there are no more
 *   read      copying -> look-up    and have been asked for: those of another tile may come
 *   full      copying -> products   the stage holds a tile; a size of 0: none
 *   empty     products -> copying   16 rows of it have been read by both
 *   weighed   products -> products  the weights of the tile are there
 *   taken     products -> products  and have been read by both: the owner's next ones may come
 *
 * Numbers, as in sm80_attend.cuh. A packed row's e4m3 numbers become float16 ones exactly; a dense
 * row's latent numbers do by a power of two of the row. q's latent numbers are brought into
 * float16's range by a power of two of each head (and group of 128 numbers that share a scale).
 * Rope numbers are multiplied as the bfloat16 numbers that they are. Weights are
 * 2^(score * log2(e) - M), M the running maximum of the warpgroup's own tiles, rounded up to an
 * integer. The values take w = weight * scale * 2^(M - B), cut off to float16 by turns, where B is
 * an integer of each head and group that keeps w in float16's range: out is the sums times 2^B. */
#pragma once

#include "sm80_attend.cuh"
#include "sm90_many_heads_kernels.h"
#include "wgmma.cuh"

namespace many_heads
{

/* -------------------------------------------------------------------------- shapes */

constexpr int HEADS = SMLA_SM90_HEADS;
constexpr int CHUNK = 16; /* entries, k of a value product */
constexpr int OWNERS = 2; /* warpgroups that multiply: tile t is that of number t % OWNERS */
constexpr int GATHERERS = 2 * ptx::WARPGROUP;
constexpr int MULTIPLIERS = 2 * ptx::WARPGROUP;
constexpr int THREADS = GATHERERS + MULTIPLIERS;
constexpr int COPY_WARPS = 6; /* of the gatherers; the others look entries up */
constexpr int LOOK_UP_WARPS = 2;
static_assert((COPY_WARPS + LOOK_UP_WARPS) * WARP == GATHERERS, "all of them");
constexpr int KNOWN_TILES = 4; /* whose rows are looked up ahead */

#define SHARED_BYTES(name, heads, threads, bytes)                                                  \
    constexpr int name##_shared = bytes;                                                           \
    static_assert(heads == HEADS && threads == THREADS, "sm90_many_heads_kernels.h");
SMLA_SM90_MANY_HEADS_KERNELS(SHARED_BYTES)
#undef SHARED_BYTES

constexpr int COLUMNS = 64;                     /* of a block of an operand */
constexpr int ROW_BYTES = COLUMNS * 2;          /* of it */
constexpr int LATENT_BLOCKS = LATENT / COLUMNS; /* the rope numbers are one more */
constexpr int QUERY_BLOCK = HEADS * ROW_BYTES;  /* bytes */
constexpr int K_STEPS = COLUMNS / 16;           /* of a block, along its rows */
constexpr int K_BYTES = 16 * 2;                 /* of such a step */
constexpr int GROUP_BLOCKS = LATENT_BLOCKS / GROUPS;
constexpr int VALUE_GROUPS = GROUPS / 2; /* of a warpgroup, 128 numbers each */

/* How a row is stored and multiplied. */
template <int format, int d_qk> struct many_row {
    static constexpr bool E4M3 = format != SMLA_DENSE;
    static constexpr bool HAS_ROPE = d_qk == LATENT + ROPE;
    static constexpr int BLOCKS = LATENT_BLOCKS + HAS_ROPE;
    static constexpr int SCALES = E4M3 ? GROUPS : 1;  /* of an entry */
    static constexpr int VALUE_SCALES = E4M3 ? 2 : 1; /* of them for a warpgroup's values */
    static constexpr int LANES = E4M3 ? 8 : 16;       /* that read a row */
    static constexpr int PIECES = 4;                  /* of 16 latent bytes, of a lane */
    static constexpr int ROPE_LANES = HAS_ROPE ? 8 : 0;
    static constexpr int TILE = E4M3 ? SMLA_SM90_PACKED_TILE : SMLA_SM90_DENSE_TILE;
    static constexpr int STAGES = E4M3 ? 2 : 3; /* of a tile each */
    static constexpr int CHUNKS = TILE / CHUNK;
    static constexpr int CACHE_BLOCK = TILE * ROW_BYTES; /* bytes of a block of an operand */
    static constexpr int PASS = WARP / LANES;            /* rows of a warp at once */
    static constexpr int PASSES = TILE / PASS;
    static constexpr int SCALES_AT = LATENT; /* bytes, where E4M3 */
    static constexpr int ROPE_AT = E4M3 ? LATENT + GROUPS * 4 : LATENT * 2;
    static constexpr int BYTES = ROPE_AT + (HAS_ROPE ? ROPE * 2 : 0);
    static constexpr int STEPS = LATENT_BLOCKS * K_STEPS / SCALES; /* of one scale's products */

    /* Registers of a thread, multiples of 8, of which there are 512 for four of them. */
    static constexpr int GATHER_REGISTERS = E4M3 ? 56 : 64;
    static constexpr int MULTIPLY_REGISTERS = 256 - GATHER_REGISTERS;
};

/* A pass of rows on its way to a warp: every lane's own pieces, for which no other lane waits. */
template <typename Row> struct landing {
    uint4 latent[Row::PIECES][WARP];
    uint4 rope[Row::HAS_ROPE ? WARP : 1];
    float scale[Row::E4M3 ? GROUPS * Row::PASS : 1];
};

/* Of a head's scores: the largest, and the sum of exp(score - largest). */
struct head_result {
    float largest, sum;
};

template <typename Row> struct shared_state {
    uint8_t query[Row::BLOCKS][HEADS][ROW_BYTES];
    uint8_t cache[Row::STAGES][Row::BLOCKS][Row::TILE][ROW_BYTES];
    float4 weight[OWNERS][Row::TILE / 8][ptx::WARPGROUP]; /* as threads have them */
    landing<Row> landing[COPY_WARPS];
    float scale[Row::STAGES][Row::SCALES][Row::TILE];
    union {
        float query_unit[Row::SCALES][HEADS]; /* undoes q's power */
        head_result result[OWNERS][HEADS];    /* of each owner's tiles, when all scores are made */
    };
    float largest_scale[Row::STAGES][Row::SCALES];  /* of the tile */
    float top[OWNERS][HEADS];                       /* M of the tile */
    const uint8_t *entries[KNOWN_TILES][Row::TILE]; /* their rows */
    uint64_t turn[LOOK_UP_WARPS];
    uint64_t known[KNOWN_TILES];
    uint64_t read[KNOWN_TILES];
    uint64_t full[Row::STAGES];
    uint64_t empty[Row::STAGES][Row::CHUNKS];
    uint64_t weighed[OWNERS];
    uint64_t taken[OWNERS];
    smla_gpu_attend launch;
    piece piece;
    smla_row rows[2];
    unsigned long long first_fault; /* packed by note_fault; the lowest wins */
    unsigned int faults;
    unsigned int found;          /* valid entries that have their places */
    int known_size[KNOWN_TILES]; /* entries of the tile; 0: there are no more tiles */
    int size[Row::STAGES];
};

/* Whoever comes to a barrier of several roles has let its lanes go their own ways before. */
__device__ void sync_roles(int barrier, int threads)
{
    __syncwarp();
    ptx::sync_threads(barrier, threads);
}

/* A thread's number in its warpgroup. What follows from it is worked out again wherever it is asked
 * for: registers are short. */
__device__ int group_thread()
{
    return ptx::fresh((int)threadIdx.x) % ptx::WARPGROUP;
}

/* Its first row of sums; the second is 8 further. */
__device__ int group_row()
{
    return group_thread() / WARP * 16 + group_thread() % WARP / QUAD;
}

/* The pair of its columns among those of its quad. */
__device__ int quad_column()
{
    return ptx::fresh((int)threadIdx.x) % QUAD;
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

/* A phase of a barrier, see ptx::wait_phase. */
struct phase_of {
    uint64_t *barrier;
    unsigned parity;
};

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
__device__ void prefetch_first_indices(const smla_attend &work, const piece &piece)
{
    const int64_t entry = piece.begin + threadIdx.x;
    const int which = entry >= work.source[0].topk;
    const int64_t j = entry - (which ? work.source[0].topk : 0);
    const smla_array &indices = work.source[which].indices;
    if (!indices.dtype || entry >= piece.end) return;
    ptx::prefetch(index_at(indices, piece.batch * indices.stride[0] +
                                        piece.query * indices.stride[1] + j * indices.stride[2]));
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
        if (row) ptx::prefetch_bulk(row, Row::BYTES);
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

/* -------------------------------------------------------------------------- copying */

/* A lane's share of what a warp reads at once: the row, and 16 bytes of every LANES * 16. Eight
 * lanes side by side write to all banks: of e4m3 numbers, of which each writes two pieces one after
 * the other, those of two rows. */
struct lane_share {
    int row, part;
};

template <typename Row> __device__ lane_share share_of_lane()
{
    const int lane = threadIdx.x % WARP;
    if (Row::E4M3) return {(lane >> 2 & 1) | (lane >> 3 & 2), (lane & 3) | (lane >> 1 & 4)};
    return {lane / Row::LANES, lane % Row::LANES};
}

template <typename Row> struct row_pieces {
    uint4 latent[Row::PIECES];
    uint4 rope;
    float scale; /* of the lanes of as many parts */
};

/* The rope piece of a lane: lanes of neighbouring rows have theirs in different halves of the
 * banks. */
template <typename Row> __device__ int rope_piece(const lane_share &share)
{
    return Row::E4M3 ? share.part ^ share.row % 2 * 4 : share.part;
}

template <typename Row> __device__ bool has_rope(const lane_share &share)
{
    return Row::HAS_ROPE && share.part < Row::ROPE_LANES;
}

template <typename Row> __device__ bool has_scale(const lane_share &share)
{
    return Row::E4M3 && share.part < GROUPS;
}

/* Loads a lane's pieces of a row: zeros where there is no row. */
template <typename Row>
__device__ row_pieces<Row> load_row(const lane_share &share, const uint8_t *bytes)
{
    row_pieces<Row> pieces;
    const uint8_t *first = bytes + share.part * 16;
#pragma unroll
    for (int p = 0; p < Row::PIECES; p++) {
        pieces.latent[p] = ptx::load_once(first + p * Row::LANES * 16, bytes);
    }
    if (Row::HAS_ROPE) {
        pieces.rope = ptx::load_once(bytes + Row::ROPE_AT + rope_piece<Row>(share) * 16,
                                     bytes && has_rope<Row>(share));
    }
    pieces.scale = 0.0f;
    if (Row::E4M3) {
        pieces.scale = ptx::load_number_once(bytes + Row::SCALES_AT + share.part * 4,
                                             bytes && has_scale<Row>(share));
    }
    return pieces;
}

/* The same by way of shared memory, for which no registers have to wait. */
template <typename Row>
__device__ void ask_for_row(landing<Row> &landing, const lane_share &share, const uint8_t *bytes)
{
    const uint8_t *first = bytes + share.part * 16;
    uint4 *to = &landing.latent[0][threadIdx.x % WARP];
    const int there = bytes ? 16 : 0;
    ptx::copy_16<0, 0>(to, first, there);
    ptx::copy_16<WARP * 16, Row::LANES * 16>(to, first, there);
    ptx::copy_16<2 * WARP * 16, 2 * Row::LANES * 16>(to, first, there);
    ptx::copy_16<3 * WARP * 16, 3 * Row::LANES * 16>(to, first, there);
    static_assert(Row::PIECES == 4, "of them");
    if (has_rope<Row>(share)) {
        ptx::copy_16<0, Row::ROPE_AT>(&landing.rope[threadIdx.x % WARP],
                                      bytes + rope_piece<Row>(share) * 16, there);
    }
    if (has_scale<Row>(share)) {
        ptx::copy_4<Row::SCALES_AT>(&landing.scale[share.row * GROUPS + share.part],
                                    bytes + share.part * 4, there / 4);
    }
}

template <typename Row>
__device__ row_pieces<Row> take_row(const landing<Row> &landing, const lane_share &share)
{
    const int lane = threadIdx.x % WARP;
    row_pieces<Row> pieces;
    ptx::wait_copies();
#pragma unroll
    for (int p = 0; p < Row::PIECES; p++) pieces.latent[p] = landing.latent[p][lane];
    if (has_rope<Row>(share)) pieces.rope = landing.rope[lane];
    pieces.scale = has_scale<Row>(share) ? landing.scale[share.row * GROUPS + share.part] : 0.0f;
    return pieces;
}

/* 16 e4m3 numbers become two pieces of float16 ones, of which the second stands at the other of two
 * neighbouring places. */
__device__ void store_e4m3(uint8_t *first, uint8_t *second, uint4 bytes)
{
    uint32_t pairs[4][2];
    ptx::from_e4m3(pairs[0], bytes.x);
    ptx::from_e4m3(pairs[1], bytes.y);
    ptx::from_e4m3(pairs[2], bytes.z);
    ptx::from_e4m3(pairs[3], bytes.w);
    *reinterpret_cast<uint4 *>(first) = make_uint4(pairs[0][0], pairs[0][1], pairs[1][0],
                                                   pairs[1][1]);
    *reinterpret_cast<uint4 *>(second) = make_uint4(pairs[2][0], pairs[2][1], pairs[3][0],
                                                    pairs[3][1]);
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

/* Writes the pieces of a row as the products want them. */
template <typename Row, typename Shared>
__device__ void store_row(Shared &shared, int stage, int pass, const lane_share &share,
                          row_pieces<Row> &pieces)
{
    const int row = pass * Row::PASS + share.row;
    auto *blocks = shared.cache[stage];
    float factor = 1.0f;
    if (!Row::E4M3) {
        float largest = 0.0f;
#pragma unroll
        for (int p = 0; p < Row::PIECES; p++) {
            largest = fmaxf(largest, largest_of_piece(pieces.latent[p]));
        }
        factor = power_for(lanes_max<Row::LANES>(largest), pieces.scale);
    }
    if (has_rope<Row>(share)) {
        store_piece(blocks[Row::BLOCKS - 1], row, rope_piece<Row>(share), pieces.rope);
    }
    if (share.part < Row::SCALES) shared.scale[stage][share.part][row] = pieces.scale;
    constexpr int OF_BLOCK = Row::E4M3 ? 4 : 8; /* pieces as they are read */
    constexpr int PITCH = Row::LANES / OF_BLOCK * Row::CACHE_BLOCK;
    const int at = share.part / OF_BLOCK * Row::CACHE_BLOCK +
                   swapped(row, share.part % OF_BLOCK * (8 / OF_BLOCK));
    uint8_t *const to = &blocks[0][0][0];
#pragma unroll
    for (int p = 0; p < Row::PIECES; p++) {
        const uint4 numbers = pieces.latent[p];
        if (Row::E4M3) {
            store_e4m3(to + at + p * PITCH, to + (at ^ 16) + p * PITCH, numbers);
        } else {
            *reinterpret_cast<uint4 *>(to + at + p * PITCH) = scale_piece(numbers, factor);
        }
        ptx::keep_order();
    }
}

/* Until the rows of a tile are known. Returns how many they are. */
template <typename Shared> __device__ int wait_for_tile(Shared &shared, unsigned tile)
{
    wait_warp(&shared.known[tile % KNOWN_TILES], tile / KNOWN_TILES & 1);
    return shared.known_size[tile % KNOWN_TILES];
}

/* The work of the copying warps: of all passes of rows, laid end to end, each takes every sixth.
 * While it waits for room in a stage it has the rows of one in registers and those of the next
 * where they land. Where there is room for the next at once, it goes on before it asks for more.
 * Behind the last tile there is an empty one for each of the warpgroups that multiply. */
template <typename Row, typename Shared> __device__ void copy_tiles(Shared &shared)
{
    const lane_share share = share_of_lane<Row>();
    landing<Row> &landing = shared.landing[threadIdx.x / WARP];
    int ends = INT_MAX;                      /* the first tile that is empty */
    const auto is_last = [](unsigned pass) { /* of the warp's in its tile */
                                             return pass % Row::PASSES + COPY_WARPS >= Row::PASSES;
    };
    const auto find_row = [&](unsigned pass, int &size) -> const uint8_t * {
        const unsigned tile = pass / Row::PASSES;
        size = (int)tile < ends ? wait_for_tile(shared, tile) : 0;
        if (size == 0) {
            ends = min(ends, (int)tile);
            return nullptr;
        }
        const int row = pass % Row::PASSES * Row::PASS + share.row;
        const uint8_t *bytes = row < size ? shared.entries[tile % KNOWN_TILES][row] : nullptr;
        if (is_last(pass)) ptx::arrive(&shared.read[tile % KNOWN_TILES]);
        return bytes;
    };
    const auto room_for = [&](unsigned pass) -> phase_of {
        const unsigned tile = pass / Row::PASSES;
        return {&shared.empty[tile % Row::STAGES][pass % Row::PASSES * Row::PASS / CHUNK],
                (tile / Row::STAGES & 1) ^ 1};
    };
    unsigned pass = threadIdx.x / WARP;
    int size, next_size;
    row_pieces<Row> pieces = load_row<Row>(share, find_row(pass, size));
    ask_for_row(landing, share, find_row(pass + COPY_WARPS, next_size));
    bool asked = true;
#pragma unroll 1
    for (;;) {
        const unsigned tile = pass / Row::PASSES, stage = tile % Row::STAGES;
        if ((int)tile >= ends && tile - ends >= OWNERS) break;
        const phase_of room = room_for(pass);
        wait_warp(room.barrier, room.parity);
        if (size > 0) store_row<Row>(shared, stage, pass % Row::PASSES, share, pieces);
        if (is_last(pass)) {
            if (threadIdx.x == 0) shared.size[stage] = size;
            ptx::publish_operands();
            ptx::arrive(&shared.full[stage]);
        }
        pass += COPY_WARPS;
        if (asked) {
            pieces = take_row(landing, share);
            size = next_size;
            const phase_of next_room = room_for(pass);
            asked = !__all_sync(ALL_LANES, ptx::has_ended(next_room.barrier, next_room.parity));
        } else {
            pieces = load_row<Row>(share, find_row(pass, size));
            asked = true;
        }
        if (asked) ask_for_row(landing, share, find_row(pass + COPY_WARPS, next_size));
    }
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

/* q as an operand. Of the latent numbers a warp takes every eighth head, a lane 16 numbers of each,
 * all of which are asked for before the first is looked at. */
template <typename Row, bool aligned, typename Shared>
__device__ void store_heads(const smla_attend &work, const piece &piece, Shared &shared)
{
    constexpr int WARPS = MULTIPLIERS / WARP, OF_WARP = HEADS / WARPS;
    constexpr int LANES = WARP / Row::SCALES;
    constexpr int ROPE_HEADS = WARP / 8; /* of a warp at once */
    const int lane = threadIdx.x % WARP, warp = (threadIdx.x - GATHERERS) / WARP;
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
        const float factor = power_for(lanes_max<LANES>(largest), unit);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            store_piece(shared.query[lane / 4], of_block, lane % 4 * 2 + half,
                        scale_piece(pieces[i][half], factor));
        }
        if (lane % LANES == 0) shared.query_unit[lane / LANES][of_block] = unit;
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

/* -------------------------------------------------------------------------- scores */

/* A thread's numbers of a tile: 4 j + 2 y + x is of its row y and entry 8 j + 2 column + x. */
template <typename Row> using tile_numbers = float[Row::TILE / 2];

/* What it keeps of its two rows. */
struct row_state {
    float largest[2]; /* score so far */
    float sum[2];     /* of weights, of the thread's columns */
};

/* scores = q * k of the tile in `stage`, times the softmax scale. */
template <typename Row, typename Shared>
__device__ void multiply_scores(const smla_attend &work, const Shared &shared, int stage,
                                tile_numbers<Row> &scores)
{
    const int row = group_row(), column = quad_column();
    const ptx::operand query = ptx::operand_along_k(ptx::shared_address(shared.query));
    const ptx::operand cache = ptx::operand_along_k(ptx::shared_address(shared.cache[stage]));
    tile_numbers<Row> part;
#pragma unroll
    for (int scale = 0; scale < Row::SCALES; scale++) {
        ptx::fence_products();
#pragma unroll
        for (int step = 0; step < Row::STEPS; step++) {
            const int at = scale * Row::STEPS + step, block = at / K_STEPS;
            const int offset = at % K_STEPS * K_BYTES;
            ptx::multiply_along_k<__half>(part, query.at(block * QUERY_BLOCK + offset),
                                          cache.at(block * Row::CACHE_BLOCK + offset), step > 0);
        }
        ptx::commit_products();
        const float unit[2] = {shared.query_unit[scale][row], shared.query_unit[scale][row + 8]};
        ptx::wait_products<0>();
#pragma unroll
        for (int j = 0; j < Row::TILE / 8; j++) {
            float scales[2];
            load_run<float>(shared.scale[stage][scale], 8 * j + 2 * column, scales);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float number = part[4 * j + i] * unit[i / 2];
                float &score = scores[4 * j + i];
                score = scale > 0 ? fmaf(number, scales[i % 2], score) : number * scales[i % 2];
            }
        }
    }
    if (Row::HAS_ROPE) {
        ptx::fence_products();
#pragma unroll
        for (int step = 0; step < K_STEPS; step++) {
            ptx::multiply_along_k<__nv_bfloat16>(
                part, query.at(LATENT_BLOCKS * QUERY_BLOCK + step * K_BYTES),
                cache.at(LATENT_BLOCKS * Row::CACHE_BLOCK + step * K_BYTES), step > 0);
        }
        ptx::commit_products();
        ptx::wait_products<0>();
#pragma unroll
        for (int i = 0; i < Row::TILE / 2; i++) scores[i] += part[i];
    }
#pragma unroll
    for (int i = 0; i < Row::TILE / 2; i++) scores[i] *= work.softmax_scale;
}

/* Scores -> weights. */
template <typename Row>
__device__ void weigh(const smla_attend &work, int size, tile_numbers<Row> &scores,
                      row_state &state)
{
    const int column = quad_column();
    if (work.logit_cap > 0.0f) {
        const float inverse = 1.0f / work.logit_cap;
#pragma unroll
        for (int i = 0; i < Row::TILE / 2; i++)
            scores[i] = work.logit_cap * tanhf(scores[i] * inverse);
    }
    if (size < Row::TILE) {
#pragma unroll
        for (int i = 0; i < Row::TILE / 2; i++) {
            if (i / 4 * 8 + 2 * column + i % 2 >= size) scores[i] = -CUDART_INF_F;
        }
    }
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const float last = state.largest[y];
        float largest = last;
#pragma unroll
        for (int i = 0; i < Row::TILE / 4; i++) {
            largest = fmaxf(largest, scores[i / 2 * 4 + 2 * y + i % 2]);
        }
        largest = quad_max(largest);
        const float top = top_of(largest), before = top_of(last);
        const float rest = rest_of(largest, top);
        const float drop = top == before ? 0.0f : fminf(top - before, LONGEST_DROP);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < Row::TILE / 4; i++) {
            float &score = scores[i / 2 * 4 + 2 * y + i % 2];
            score = ptx::exp2_fast(fmaf(score - largest, LOG2_E, rest));
            sum += score;
        }
        state.sum[y] = fmaf(state.sum[y], ptx::exp2_fast(-drop), sum);
        state.largest[y] = largest;
    }
}

/* The largest scale of the tile: each warp finds that of a group. */
template <typename Row, typename Shared>
__device__ void find_largest_scale(Shared &shared, int stage)
{
    const int warp = group_thread() / WARP, lane = group_thread() % WARP;
    if (warp >= Row::SCALES) return;
    float scales[2];
    load_run<float>(shared.scale[stage][warp], lane % (Row::TILE / 2) * 2, scales);
    const float largest = lanes_max<WARP>(fmaxf(fabsf(scales[0]), fabsf(scales[1])));
    if (lane == 0) shared.largest_scale[stage][warp] = largest;
}

/* Weights of a tile of the warpgroup's own, for both. */
template <typename Row, typename Shared>
__device__ void make_weights(const smla_attend &work, Shared &shared, unsigned tile,
                             row_state &state)
{
    const int stage = tile % Row::STAGES, own = tile % OWNERS;
    tile_numbers<Row> weights;
    multiply_scores<Row>(work, shared, stage, weights);
    weigh<Row>(work, shared.size[stage], weights, state);
    find_largest_scale<Row>(shared, stage);
    wait_warp(&shared.taken[own], (tile / OWNERS & 1) ^ 1);
#pragma unroll
    for (int j = 0; j < Row::TILE / 8; j++) {
        shared.weight[own][j][group_thread()] = make_float4(weights[4 * j], weights[4 * j + 1],
                                                            weights[4 * j + 2], weights[4 * j + 3]);
    }
    if (quad_column() == 0) {
        shared.top[own][group_row()] = top_of(state.largest[0]);
        shared.top[own][group_row() + 8] = top_of(state.largest[1]);
    }
    ptx::arrive(&shared.weighed[own]);
}

template <typename Row, typename Shared>
__device__ void take_weights(Shared &shared, unsigned tile, tile_numbers<Row> &weights,
                             float (&top)[2])
{
    const int owner = tile % OWNERS;
    wait_warp(&shared.weighed[owner], tile / OWNERS & 1);
#pragma unroll
    for (int j = 0; j < Row::TILE / 8; j++) {
        const float4 four = shared.weight[owner][j][group_thread()];
        weights[4 * j] = four.x;
        weights[4 * j + 1] = four.y;
        weights[4 * j + 2] = four.z;
        weights[4 * j + 3] = four.w;
    }
    top[0] = shared.top[owner][group_row()];
    top[1] = shared.top[owner][group_row() + 8];
    ptx::arrive(&shared.taken[owner]);
}

/* -------------------------------------------------------------------------- values */

/* A warpgroup's sums of values; of a thread's two rows the largest M so far, and B less that: M may
 * be so large that B as such would be M again. */
template <typename Row> struct value_sums {
    float sums[VALUE_GROUPS][64];
    float rise[Row::VALUE_SCALES][2];
    float top[2];
};

template <typename Row> __device__ void clear(value_sums<Row> &values)
{
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < 64; i++) values.sums[g][i] = 0.0f;
    }
#pragma unroll
    for (int y = 0; y < 2; y++) {
        values.top[y] = -CUDART_INF_F;
#pragma unroll
        for (int s = 0; s < Row::VALUE_SCALES; s++) values.rise[s][y] = -CUDART_INF_F;
    }
}

/* Takes M of a tile, and returns it less the largest. */
template <typename Row> __device__ float take_top(float top, int y, value_sums<Row> &values)
{
    const float above = top == values.top[y] ? 0.0f : top - values.top[y];
    if (above <= 0.0f) return above;
#pragma unroll
    for (int s = 0; s < Row::VALUE_SCALES; s++) values.rise[s][y] -= above;
    values.top[y] = top;
    return 0.0f;
}

/* The scales of entries 8 j + 2 column and the next. */
template <typename Shared>
__device__ float2 load_scales(const Shared &shared, int stage, int scale, int j)
{
    return *reinterpret_cast<const float2 *>(
        &shared.scale[stage][scale][8 * j + quad_column() * 2]);
}

/* The scales of a thread's entries of a chunk. */
struct chunk_scales {
    float2 of[CHUNK / 8];
};

template <typename Shared>
__device__ chunk_scales load_chunk_scales(const Shared &shared, int stage, int scale, int chunk)
{
    return {load_scales(shared, stage, scale, chunk * 2),
            load_scales(shared, stage, scale, chunk * 2 + 1)};
}

/* w of a chunk's entries, of one of their scales: the left operand of their values. `turns` is TURN
 * times the number of the thread's first entry. */
template <typename Row>
__device__ void round_weights(int chunk, const tile_numbers<Row> &weights,
                              const chunk_scales &scales, const float (&unit)[2], uint32_t turns,
                              uint32_t (&operand)[4])
{
    constexpr int CUT_BITS = 13; /* of a float32 fraction, that float16 does not have */
#pragma unroll
    for (int i = 0; i < CHUNK / 8; i++) {
        const int j = chunk * (CHUNK / 8) + i;
        const uint32_t first = turns + 8 * j * TURN;
        const uint32_t raise[2] = {first >> (32 - CUT_BITS), (first + TURN) >> (32 - CUT_BITS)};
        const auto raised = [&](float number, int x) {
            return __uint_as_float(__float_as_uint(number) + raise[x]);
        };
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const float *pair = &weights[4 * j + 2 * y];
            operand[2 * i + y] = ptx::cut(raised(pair[0] * scales.of[i].x * unit[y], 0),
                                          raised(pair[1] * scales.of[i].y * unit[y], 1));
        }
    }
}

constexpr float LARGEST_POWER = 0x1p126f; /* 2^(M - B), before B moves */

/* Whether w of the tile may be more than float16 is to hold, by the largest of the scales. */
__device__ bool may_move(float largest_scale, const float (&unit)[2])
{
    const float power = fmaxf(unit[0], unit[1]);
    return power > LARGEST_POWER || largest_scale * power > LARGEST_WEIGHT;
}

/* 2^(M - B), M being `below` the largest. */
template <typename Row>
__device__ void units_of(const value_sums<Row> &values, const float (&below)[2],
                         float (&unit)[Row::VALUE_SCALES][2])
{
#pragma unroll
    for (int s = 0; s < Row::VALUE_SCALES; s++) {
#pragma unroll
        for (int y = 0; y < 2; y++) unit[s][y] = ptx::exp2_fast(below[y] - values.rise[s][y]);
    }
}

/* Moves B, and the sums along, where w of the tile is more than float16 is to hold. */
template <typename Row, typename Shared>
__device__ void move_base(const Shared &shared, int stage, int first_scale,
                          const tile_numbers<Row> &weights, const float (&below)[2],
                          const float (&unit)[Row::VALUE_SCALES][2], value_sums<Row> &values)
{
#pragma unroll
    for (int s = 0; s < Row::VALUE_SCALES; s++) {
        float biggest[2] = {};
#pragma unroll
        for (int j = 0; j < Row::TILE / 8; j++) {
            const float2 scales = load_scales(shared, stage, first_scale + s, j);
#pragma unroll
            for (int y = 0; y < 2; y++) {
                biggest[y] = fmaxf(biggest[y], fmaxf(fabsf(weights[4 * j + 2 * y] * scales.x),
                                                     fabsf(weights[4 * j + 2 * y + 1] * scales.y)));
            }
        }
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const float largest = quad_max(biggest[y]), rise = values.rise[s][y];
            const int exponent = max(exponent_of(largest) - FRESH_WEIGHT, -126);
            if (unit[s][y] <= LARGEST_POWER && largest * unit[s][y] <= LARGEST_WEIGHT) continue;
            const float moved = fmaxf(rise, exponent + below[y]);
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

template <typename Row>
constexpr int TURNS = Row::CHUNKS * Row::VALUE_SCALES; /* operands of a tile */

/* Adds the values of a tile to `half` of the numbers of out. The products of one operand are under
 * way while the next is rounded; a chunk of the stage is given back when those of all of its
 * operands are done. */
template <typename Row, typename Shared>
__device__ void add_values(Shared &shared, unsigned tile, int half,
                           const tile_numbers<Row> &weights, const float (&top)[2],
                           value_sums<Row> &values)
{
    constexpr int SCALES = Row::VALUE_SCALES;
    const int stage = tile % Row::STAGES, first_scale = half * VALUE_GROUPS % Row::SCALES;
    const float below[2] = {take_top(top[0], 0, values), take_top(top[1], 1, values)};
    float unit[SCALES][2];
    units_of(values, below, unit);
    bool moves = false;
#pragma unroll
    for (int s = 0; s < SCALES; s++) {
        moves |= may_move(shared.largest_scale[stage][first_scale + s], unit[s]);
    }
    if (__any_sync(ALL_LANES, moves)) {
        move_base<Row>(shared, stage, first_scale, weights, below, unit, values);
        units_of(values, below, unit);
    }
    const ptx::operand cache = ptx::operand_across_k<Row::CACHE_BLOCK>(
        ptx::shared_address(shared.cache[stage][half * VALUE_GROUPS * GROUP_BLOCKS]));
    const uint32_t turns = (tile * Row::TILE + quad_column() * 2) * TURN;
    chunk_scales scales = load_chunk_scales(shared, stage, first_scale, 0);
    uint32_t operands[2][4];
#pragma unroll
    for (int turn = 0; turn < TURNS<Row>; turn++) {
        const int chunk = turn / SCALES, s = turn % SCALES, next = turn + 1;
        ptx::wait_products<1>();
        if (turn > SCALES && (turn - 1) % SCALES == 0) {
            ptx::arrive(&shared.empty[stage][(turn - 1) / SCALES - 1]);
        }
        round_weights<Row>(chunk, weights, scales, unit[s], turns, operands[turn % 2]);
        if (next < TURNS<Row>) {
            scales = load_chunk_scales(shared, stage, first_scale + next % SCALES, next / SCALES);
        }
        ptx::fence_products();
#pragma unroll
        for (int g = s; g < VALUE_GROUPS; g += SCALES) {
            ptx::multiply_across_k(
                values.sums[g], operands[turn % 2],
                cache.at(g * GROUP_BLOCKS * Row::CACHE_BLOCK + chunk * CHUNK * ROW_BYTES));
        }
        ptx::commit_products();
    }
    ptx::wait_products<0>();
#pragma unroll
    for (int chunk = (TURNS<Row> - 2) / SCALES; chunk < Row::CHUNKS; chunk++) {
        ptx::arrive(&shared.empty[stage][chunk]);
    }
}

/* The work of one of the two warpgroups that multiply. */
template <typename Row, typename Shared>
__device__ void multiply_tiles(const smla_attend &work, Shared &shared, int own, row_state &state,
                               value_sums<Row> &values)
{
    const auto size_of = [&](unsigned tile) {
        wait_warp(&shared.full[tile % Row::STAGES], tile / Row::STAGES & 1);
        return shared.size[tile % Row::STAGES];
    };
#pragma unroll 1
    for (unsigned tile = 0;;) {
        if (size_of(tile + own) > 0) make_weights<Row>(work, shared, tile + own, state);
#pragma unroll 1
        for (int i = 0; i < OWNERS; i++, tile++) {
            if (size_of(tile) == 0) return;
            tile_numbers<Row> weights;
            float top[2];
            take_weights<Row>(shared, tile, weights, top);
            add_values<Row>(shared, tile, own, weights, top, values);
        }
    }
}

/* -------------------------------------------------------------------------- results */

/* Largest score and sum of a thread's rows over the tiles of both warpgroups. Returns the factors
 * of the sums of values. */
template <typename Row, typename Shared>
__device__ void finish_heads(const smla_gpu_attend &launch, Shared &shared, int own,
                             const row_state &state, value_sums<Row> &values, float (&factor)[2])
{
    const smla_attend &work = launch.work;
    const piece &piece = shared.piece;
    const bool first = quad_column() == 0;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        float sum = state.sum[y];
        const float largest = state.largest[y];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (!first) continue;
        /* from weights relative to M to weights relative to the largest score */
        if (sum != 0.0f) sum *= ptx::exp2_fast(-rest_of(largest, top_of(largest)));
        shared.result[own][group_row() + 8 * y] = {largest, sum};
    }
    sync_roles(BARRIER_MULTIPLY, MULTIPLIERS);
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const int of_block = group_row() + 8 * y, head = piece.head + of_block;
        const head_result &first_result = shared.result[0][of_block];
        const head_result &second_result = shared.result[1][of_block];
        const float largest = fmaxf(first_result.largest, second_result.largest);
        float sum = 0.0f;
        for (const head_result &part : {first_result, second_result}) {
            if (part.sum != 0.0f) sum += part.sum * expf(part.largest - largest);
        }
        factor[y] = 0.0f;
        if (head >= work.heads) continue;
        const float top = top_of(largest);
        take_top(top, y, values);
        if (sum != 0.0f) factor[y] = ptx::exp2_fast(-rest_of(largest, top));
        if (launch.splits == 1) {
            factor[y] *= first && own == 0
                             ? finish_head(work, piece.batch, piece.query, head, largest, sum)
                             : output_factor(work, head, largest, sum);
        } else if (first && own == 0) {
            const int64_t at = (piece.split * (work.batch * work.s_q) + piece.row) * work.heads +
                               head;
            launch.part_max[at] = largest;
            launch.part_sum[at] = sum;
        }
    }
}

/* The warpgroup's value numbers, from number 0 of `row` on: four lanes side by side write whole
 * sectors. */
template <typename Row, typename Number, bool in_runs, typename Shared>
__device__ void store_values(const smla_gpu_attend &launch, const Shared &shared, int half,
                             const float (&factor)[2], const value_sums<Row> &values, void *data,
                             int64_t row, int64_t stride)
{
    using stored = cache_row<__nv_bfloat16, SMLA_DENSE, LATENT + ROPE>; /* the order of its sums */
    const int column = quad_column(), heads = launch.work.heads;
    const int run = column % 2 * 8 + column / 2 * 4;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const int head = shared.piece.head + group_row() + 8 * y;
#pragma unroll
        for (int g = 0; g < VALUE_GROUPS; g++) {
            const float power = factor[y] == 0.0f
                                    ? 0.0f
                                    : ptx::exp2_fast(values.rise[g % Row::VALUE_SCALES][y]);
            const int64_t element = row + head * stride + (half * VALUE_GROUPS + g) * 128 + run;
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
                for (int i = 0; i < RUN; i++) numbers[i] = numbers[i] * power * factor[y];
                if (head >= heads) continue;
                store_neighbours<Number, in_runs>(data, element + 8 * b, numbers);
            }
        }
    }
}

template <typename Row, typename Number, typename Shared>
__device__ void store_results(const smla_gpu_attend &launch, const Shared &shared, int half,
                              const float (&factor)[2], const value_sums<Row> &values, void *data,
                              int64_t row, int64_t stride)
{
    const uintptr_t first = reinterpret_cast<uintptr_t>(static_cast<Number *>(data) + row);
    if (first % (RUN * sizeof(Number)) == 0 && stride % RUN == 0) {
        store_values<Row, Number, true>(launch, shared, half, factor, values, data, row, stride);
    } else {
        store_values<Row, Number, false>(launch, shared, half, factor, values, data, row, stride);
    }
}

/* To out, or as a part of it to the workspace. */
template <typename Row, typename Shared>
__device__ void store_results(const smla_gpu_attend &launch, const Shared &shared, int half,
                              const float (&factor)[2], const value_sums<Row> &values)
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
        store_results<Row, float>(launch, shared, half, factor, values, data, row, stride);
    } else {
        store_results<Row, __nv_bfloat16>(launch, shared, half, factor, values, data, row, stride);
    }
}

/* -------------------------------------------------------------------------- the kernel */

template <typename Row, typename Shared> __device__ void init_barriers(Shared &shared)
{
    for (int stage = 0; stage < Row::STAGES; stage++) {
        ptx::init_phases(&shared.full[stage], COPY_WARPS * WARP);
        for (int chunk = 0; chunk < Row::CHUNKS; chunk++) {
            ptx::init_phases(&shared.empty[stage][chunk], MULTIPLIERS);
        }
    }
    for (int own = 0; own < OWNERS; own++) {
        ptx::init_phases(&shared.weighed[own], ptx::WARPGROUP);
        ptx::init_phases(&shared.taken[own], MULTIPLIERS);
    }
    for (int tile = 0; tile < KNOWN_TILES; tile++) {
        ptx::init_phases(&shared.known[tile], WARP);
        ptx::init_phases(&shared.read[tile], COPY_WARPS * WARP);
    }
    for (int warp = 0; warp < LOOK_UP_WARPS; warp++) ptx::init_phases(&shared.turn[warp], WARP);
}

template <int format, int d_qk, int shared_bytes>
__device__ void attend(const smla_gpu_attend &parameters)
{
    using Row = many_row<format, d_qk>;
    using Shared = shared_state<Row>;
    static_assert(sizeof(Shared) == shared_bytes, "sm90_many_heads_kernels.h");
    static_assert(shared_bytes + 1024 <= 227 * 1024, "what Hopper gives a block");
    extern __shared__ __align__(1024) unsigned char operands[];
    Shared &shared = *reinterpret_cast<Shared *>(operands);

    ptx::allow_next_launch();
    copy_parameters(parameters, shared.launch);
    if (threadIdx.x == 0) {
        shared.first_fault = ~0ull;
        shared.faults = 0;
        shared.found = 0;
        init_barriers<Row>(shared);
    }
    __syncthreads();
    const smla_gpu_attend &launch = shared.launch;
    const smla_attend &work = launch.work;
    const piece piece = piece_of_block(launch, blockIdx.x, HEADS);
    if (threadIdx.x == 0) shared.piece = piece;
    if (threadIdx.x < GATHERERS) {
        ptx::keep_registers<Row::GATHER_REGISTERS>();
        prefetch_first_indices(work, piece);
        fault_tally faults = {};
        open_rows(work, piece, shared.rows, faults);
        if (faults.count) note_fault(shared, faults.entry, faults.cause, faults.source);
        sync_roles(BARRIER_GATHER, GATHERERS);
        const int warp = threadIdx.x / WARP;
        if (warp < COPY_WARPS) {
            copy_tiles<Row>(shared);
        } else {
            look_up_tiles<Row>(launch, shared, warp - COPY_WARPS);
        }
    } else {
        ptx::take_registers<Row::MULTIPLY_REGISTERS>();
        const int own = __shfl_sync(ALL_LANES, (int)threadIdx.x / ptx::WARPGROUP, 0) -
                        GATHERERS / ptx::WARPGROUP;
        store_query<Row>(work, piece, shared);
        sync_roles(BARRIER_MULTIPLY, MULTIPLIERS);
        row_state state = {{-CUDART_INF_F, -CUDART_INF_F}, {0.0f, 0.0f}};
        value_sums<Row> values;
        clear(values);
        multiply_tiles<Row>(work, shared, own, state, values);
        float factor[2];
        finish_heads<Row>(launch, shared, own, state, values, factor);
        store_results<Row>(launch, shared, own, factor, values);
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
