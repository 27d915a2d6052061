/* What the kernels of Hopper's own products have in common: which piece of the work a block takes,
 * how threads wait for one another, operands in shared memory, the looking up of rows, results and
 * faults. Each of these kernels has blocks of three warpgroups. One gathers: two of its warps look
 * the valid entries of the block's split up, two copy their rows. Two multiply. */
#pragma once

#include "sm80_attend.cuh"
#include "sm90_kernels.h"
#include "wgmma.cuh"

namespace sm90
{

constexpr int OWNERS = 2; /* warpgroups that multiply: tile t is that of number t % OWNERS */
constexpr int GATHERERS = ptx::WARPGROUP;
constexpr int MULTIPLIERS = OWNERS * ptx::WARPGROUP;
constexpr int THREADS = GATHERERS + MULTIPLIERS;
constexpr int LOOK_UP_WARPS = 2;
constexpr int COPY_WARPS = 2;
static_assert((COPY_WARPS + LOOK_UP_WARPS) * WARP == GATHERERS, "all of them");
constexpr int LOOK_UP_STRIDE = LOOK_UP_WARPS * WARP; /* entries */
constexpr int KNOWN_TILES = 4;                       /* whose rows are looked up ahead */

constexpr int COLUMNS = 64;                     /* of a block of an operand */
constexpr int ROW_BYTES = COLUMNS * 2;          /* of it */
constexpr int LATENT_BLOCKS = LATENT / COLUMNS; /* the rope numbers are one more */
constexpr int K_STEPS = COLUMNS / 16;           /* of a block, along its rows */
constexpr int K_BYTES = 16 * 2;                 /* of such a step */

/* What the host takes every kernel to be. */
#define KERNEL_SIZES(name, heads, threads, bytes)                                                  \
    constexpr int name##_heads = heads, name##_shared = bytes;                                     \
    static_assert(threads == THREADS, "sm90_kernels.h");
SMLA_SM90_KERNELS(KERNEL_SIZES)
#undef KERNEL_SIZES

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

/* -------------------------------------------------------------------------- pieces */

/* What a block takes, of a piece that is cut or whole: so many heads of a row. */
struct block_piece {
    piece piece;
    int64_t part; /* where its head 0 is in the workspace, in heads; -1: the block has all of it */
};

__device__ block_piece take_piece(const smla_gpu_attend &launch, unsigned block, int heads)
{
    const smla_attend &work = launch.work;
    const unsigned whole = launch.whole, splits = launch.splits, s_q = (unsigned)work.s_q;
    const bool is_cut = block >= whole && splits > 1;
    const unsigned number = block < whole ? block : whole + (block - whole) / splits;
    const unsigned row = number / launch.head_tiles;
    block_piece taken;
    taken.piece.head = (int)(number % launch.head_tiles) * heads;
    taken.piece.row = row;
    taken.piece.batch = row / s_q;
    taken.piece.query = row % s_q;
    taken.piece.split = is_cut ? (int)((block - whole) % splits) : 0;
    const int64_t entries = work.source[0].topk + (work.sources == 2 ? work.source[1].topk : 0);
    taken.piece.begin = taken.piece.split * launch.split_entries;
    taken.piece.end = is_cut ? min(taken.piece.begin + launch.split_entries, entries) : entries;
    taken.part = is_cut ? ((int64_t)taken.piece.split * launch.cut_pieces + number - whole) * heads
                        : -1;
    return taken;
}

/* -------------------------------------------------------------------------- looking up */

/* A source of slots whose tokens follow one another at the same distance throughout: every slot
 * is a block of its own. What an index means is then known without a look at memory, and without
 * a division, so that only the indices have to be there in time. */
__device__ bool is_plain(const smla_source &source)
{
    return !source.block_table.dtype &&
           (source.num_blocks <= 1 ||
            source.block_stride == source.block_size * source.token_stride);
}

__device__ smla_source plain_source(const smla_source &source)
{
    smla_source plain = {};
    plain.indices.dtype = SMLA_INT64; /* as they are passed on */
    plain.cache = source.cache;
    plain.block_stride = source.token_stride;
    plain.num_blocks = source.num_blocks * source.block_size;
    plain.block_size = 1;
    return plain;
}

/* A source of int32 positions whose int32 block table has the blocks of all of them. */
__device__ bool is_mapped(const smla_source &source)
{
    return source.indices.dtype == SMLA_INT32 && source.block_table.dtype == SMLA_INT32 &&
           source.shard_size == 1 && source.block_size <= INT32_MAX &&
           source.max_blocks <= INT32_MAX && source.num_blocks <= INT32_MAX;
}

/* What of it is the same for all of them as constants, sizes in 32 bits: it has to stay in
 * registers. */
__device__ smla_source mapped_source(const smla_source &source)
{
    smla_source mapped = {};
    mapped.indices.dtype = SMLA_INT32;
    mapped.block_table = source.block_table;
    mapped.block_table.dtype = SMLA_INT32;
    mapped.shard_size = 1;
    mapped.cache = source.cache;
    mapped.block_stride = source.block_stride;
    mapped.token_stride = source.token_stride;
    mapped.num_blocks = (int32_t)source.num_blocks;
    mapped.max_blocks = (int32_t)source.max_blocks;
    mapped.block_size = (int32_t)source.block_size;
    return mapped;
}

/* The indices of the only source: of entry `begin` of the split on, `count` of them. */
template <typename Index> struct split_indices {
    const uint8_t *first;
    int64_t pitch; /* bytes */
    int64_t count;

    /* -1 behind the last. */
    __device__ Index load(int64_t i) const
    {
        return i < count ? *reinterpret_cast<const Index *>(first + i * pitch) : -1;
    }

    __device__ void prefetch(int64_t i) const
    {
        if (i < count) ptx::prefetch(first + i * pitch);
    }
};

template <typename Index, typename Shared>
__device__ split_indices<Index> indices_of(const smla_attend &work, const Shared &shared)
{
    const smla_array &indices = work.source[0].indices;
    const int64_t begin = shared.piece.begin, pitch = indices.stride[2];
    const int64_t end = min(shared.piece.end, shared.rows[0].entries);
    return {index_at(indices, shared.rows[0].indices + begin * pitch),
            pitch * (int64_t)sizeof(Index), end - begin};
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

/* Brings the first indices of the split into L2 before anybody knows how many of them count. */
__device__ void prefetch_first_indices(const smla_attend &work, const piece &piece)
{
#pragma unroll
    for (int first = 0; first < AHEAD; first += GATHERERS) {
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

/* How many entries of the split there are up to the last that may count. */
template <typename Shared>
__device__ int64_t entries_of_split(const smla_attend &work, const Shared &shared)
{
    const bool has_second = work.sources == 2 && shared.rows[1].entries > 0;
    const int64_t end = has_second ? work.source[0].topk + shared.rows[1].entries
                                   : shared.rows[0].entries;
    return max(min(shared.piece.end, end) - shared.piece.begin, (int64_t)0);
}

/* The rows of the valid entries of the split, for look-up warp `warp`: every other round of 32.
 * next_row(i) gives that of the lane's entry i of the split, in order: it is known before its turn
 * comes to be given a place. */
template <typename Row, typename Shared, typename NextRow>
__device__ void look_up_rounds(const smla_attend &work, Shared &shared, int warp,
                               const NextRow &next_row)
{
    const int rounds = (int)((entries_of_split(work, shared) + WARP - 1) / WARP);
    for (int round = warp; round <= rounds; round += LOOK_UP_WARPS) {
        const uint8_t *row = next_row((int64_t)round * WARP + threadIdx.x % WARP);
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

/* Of slots, an entry's index is loaded a round ahead. */
template <typename Row, typename Index, typename Shared>
__device__ void look_up_plain(const smla_attend &work, Shared &shared, int warp)
{
    const split_indices<Index> indices = indices_of<Index>(work, shared);
    const smla_source source = plain_source(work.source[0]);
    const smla_row row = {};
    Index index = indices.load(warp * WARP + threadIdx.x % WARP);
    look_up_rounds<Row>(work, shared, warp, [&](int64_t i) {
        indices.prefetch(i + AHEAD);
        smla_place place;
        const smla_cause cause = smla_locate(&source, &row, i, index, &place);
        if (cause >= SMLA_FAULT_INDEX) note_fault(shared, shared.piece.begin + i, cause, 0);
        index = indices.load(i + LOOK_UP_STRIDE);
        return cause == SMLA_VALID ? smla_token(&source, &place) : nullptr;
    });
}

/* Of positions, an entry's index is loaded two rounds ahead, and its block one. */
template <typename Row, typename Shared>
__device__ void look_up_mapped(const smla_attend &work, Shared &shared, int warp)
{
    const split_indices<int32_t> indices = indices_of<int32_t>(work, shared);
    const smla_source source = mapped_source(work.source[0]);
    const smla_row row = shared.rows[0];
    struct {
        const uint8_t *token; /* of block 0 */
        int32_t block;
        smla_cause cause;
    } next;
    int32_t index; /* of the entry behind `next` */
    const auto locate = [&](int64_t i) {
        smla_place place;
        next.cause = smla_locate(&source, &row, i, index, &place);
        if (next.cause != SMLA_VALID) return;
        next.block = static_cast<const int32_t *>(
            source.block_table.data)[smla_table_element(&source, &row, &place)];
        place.block = 0;
        next.token = smla_token(&source, &place);
    };
    const int64_t first = warp * WARP + threadIdx.x % WARP;
    index = indices.load(first);
    locate(first);
    index = indices.load(first + LOOK_UP_STRIDE);
    look_up_rounds<Row>(work, shared, warp, [&](int64_t i) -> const uint8_t * {
        const auto located = next;
        indices.prefetch(i + AHEAD);
        locate(i + LOOK_UP_STRIDE);
        index = indices.load(i + 2 * LOOK_UP_STRIDE);
        smla_place place;
        smla_cause cause = located.cause;
        if (cause == SMLA_VALID) cause = smla_map(&source, located.block, &place);
        if (cause >= SMLA_FAULT_INDEX) note_fault(shared, shared.piece.begin + i, cause, 0);
        return cause == SMLA_VALID ? located.token + place.block * source.block_stride : nullptr;
    });
}

/* Of any sources: one entry at a time. */
template <typename Row, typename Shared>
__device__ void look_up_any(const smla_attend &work, Shared &shared, int warp)
{
    look_up_rounds<Row>(work, shared, warp, [&](int64_t i) -> const uint8_t * {
        const int64_t entry = shared.piece.begin + i;
        const uint8_t *ahead = index_address(work, shared, entry + AHEAD);
        if (ahead) ptx::prefetch(ahead);
        return look_up(work, shared, entry);
    });
}

/* The work of look-up warp `warp`. */
template <typename Row, typename Shared>
__device__ void look_up_tiles(const smla_attend &work, Shared &shared, int warp)
{
    const smla_source &source = work.source[0];
    const bool is_only = work.sources == 1 && source.indices.dtype;
    if (is_only && is_plain(source) && source.indices.dtype == SMLA_INT32) {
        look_up_plain<Row, int32_t>(work, shared, warp);
    } else if (is_only && is_plain(source)) {
        look_up_plain<Row, int64_t>(work, shared, warp);
    } else if (is_only && is_mapped(source)) {
        look_up_mapped<Row>(work, shared, warp);
    } else {
        look_up_any<Row>(work, shared, warp);
    }
}

/* What looking up begins with: barriers, nothing found. */
template <typename Shared> __device__ void init_look_up(Shared &shared)
{
    shared.first_fault = ~0ull;
    shared.faults = 0;
    shared.found = 0;
    for (int tile = 0; tile < KNOWN_TILES; tile++) {
        ptx::init_phases(&shared.known[tile], WARP);
        ptx::init_phases(&shared.read[tile], COPY_WARPS * WARP);
    }
    for (int warp = 0; warp < LOOK_UP_WARPS; warp++) ptx::init_phases(&shared.turn[warp], WARP);
}

/* The rows of q and where their indices are, for the gathering warps. Bringing indices into L2
 * reads nothing: it may come before what they are is written. */
template <typename Shared>
__device__ void open_block(const smla_attend &work, const piece &piece, Shared &shared)
{
    prefetch_first_indices(work, piece);
    ptx::wait_for_last_launch();
    fault_tally faults = {};
    open_rows(work, piece, shared.rows, faults);
    if (faults.count) note_fault(shared, faults.entry, faults.cause, faults.source);
    sync_roles(BARRIER_GATHER, GATHERERS);
}

/* Until the rows of a tile are known. Returns how many they are. */
template <typename Shared> __device__ int wait_for_tile(Shared &shared, unsigned tile)
{
    wait_warp(&shared.known[tile % KNOWN_TILES], tile / KNOWN_TILES & 1);
    return shared.known_size[tile % KNOWN_TILES];
}

/* -------------------------------------------------------------------------- copying */

/* The work of a copying warp: copy(tile, size) asks for its half of a tile's rows; whether a lane
 * is the first is asked as the kernel has registers for it. Behind the last tile there is an empty
 * one for each of the warpgroups that multiply. */
template <int stages, typename Shared, typename FirstLane, typename Copy>
__device__ void copy_all_tiles(Shared &shared, int half, const FirstLane &is_first_lane,
                               const Copy &copy)
{
    int ends = INT_MAX; /* the first tile that is empty */
#pragma unroll 1
    for (int tile = 0; tile < ends || tile - ends < OWNERS; tile++) {
        const int stage = tile % stages;
        const int size = tile < ends ? wait_for_tile(shared, tile) : 0;
        wait_warp(&shared.empty[stage][half], (tile / stages & 1) ^ 1);
        if (size > 0) {
            copy(tile, size);
            ptx::arrive(&shared.read[tile % KNOWN_TILES]);
        } else if (tile < ends) {
            ends = tile;
        }
        if (half == 0 && is_first_lane()) shared.size[stage] = size;
        ptx::arrive_after_copies(&shared.full[stage]);
        ptx::arrive(&shared.full[stage]);
    }
}

/* The work of the warps that gather; copy(half) is that of those that copy. */
template <typename Row, typename Shared, typename Copy>
__device__ void gather(const smla_gpu_attend &launch, const piece &piece, Shared &shared,
                       const Copy &copy)
{
    open_block(launch.work, piece, shared);
    const int warp = threadIdx.x / WARP;
    if (warp < LOOK_UP_WARPS) {
        look_up_tiles<Row>(launch.work, shared, warp);
    } else {
        copy(warp - LOOK_UP_WARPS);
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

/* -------------------------------------------------------------------------- results */

/* Largest score and sum of weights, relative to that, of a head of the block. Returns the factor of
 * its sums of values. */
template <typename Shared>
__device__ float finish_head_of_block(const smla_gpu_attend &launch, const Shared &shared,
                                      int of_block, float largest, float sum)
{
    const smla_attend &work = launch.work;
    const piece &piece = shared.piece;
    const int head = piece.head + of_block;
    if (head >= work.heads) return 0.0f;
    if (shared.part < 0) return finish_head(work, piece.batch, piece.query, head, largest, sum);
    launch.part_max[shared.part + of_block] = largest;
    launch.part_sum[shared.part + of_block] = sum;
    return 1.0f;
}

/* Value numbers of the block's heads, the first from number `to` on, out of shared memory, where a
 * head's sums are `pitch` numbers behind those of the one before. A warp writes a group of a head.
 */
template <typename Number, bool in_runs, int pitch, typename Factor>
__device__ void store_values(int heads, const float *sums, const Factor &factor_of, void *data,
                             int64_t to, int64_t stride)
{
    constexpr int AT_ONCE = MULTIPLIERS / WARP / GROUPS; /* heads */
    const int lane = threadIdx.x % WARP, warp = (threadIdx.x - GATHERERS) / WARP;
    const int group = warp % GROUPS, d = group * 128 + lane * RUN;
#pragma unroll 4
    for (int head = warp / GROUPS; head < heads; head += AT_ONCE) {
        const float factor = factor_of(group, head);
        float numbers[RUN];
        load_run<float>(sums, head * pitch + d, numbers);
#pragma unroll
        for (int i = 0; i < RUN; i++) numbers[i] *= factor;
        store_neighbours<Number, in_runs>(data, to + head * stride + d, numbers);
    }
}

/* To out, or as a part of it to the workspace, by the threads that multiply. factor_of(group, head)
 * is what sums are multiplied with. */
template <int block_heads, int pitch, typename Shared, typename Factor>
__device__ void store_results(const smla_gpu_attend &launch, const Shared &shared,
                              const Factor &factor_of)
{
    const piece &piece = shared.piece;
    const float *sums = reinterpret_cast<const float *>(&shared);
    const smla_output &out = launch.work.out;
    const int heads = min(block_heads, launch.work.heads - piece.head);
    if (shared.part >= 0) {
        store_values<float, true, pitch>(heads, sums, factor_of, launch.part_out,
                                         shared.part * LATENT, LATENT);
        return;
    }
    const int64_t to = element_of(out, piece.batch, piece.query, piece.head);
    const auto store_as = [&](auto number) {
        using Number = decltype(number);
        const uintptr_t first = reinterpret_cast<uintptr_t>(static_cast<Number *>(out.data) + to);
        if (first % (RUN * sizeof(Number)) == 0 && out.stride[2] % RUN == 0) {
            store_values<Number, true, pitch>(heads, sums, factor_of, out.data, to, out.stride[2]);
        } else {
            store_values<Number, false, pitch>(heads, sums, factor_of, out.data, to, out.stride[2]);
        }
    };
    if (out.dtype == SMLA_FLOAT32) {
        store_as(float{});
    } else {
        store_as(__nv_bfloat16{});
    }
}

/* -------------------------------------------------------------------------- faults */

/* What note_fault has kept goes to the host: by one thread, after the last of them has noted one.
 */
template <typename Shared>
__device__ void report_noted(const smla_gpu_attend &launch, const Shared &shared)
{
    if (!launch.work.record || shared.piece.head != 0 || !shared.faults) return;
    fault_tally faults = {};
    faults.entry = (int64_t)(shared.first_fault >> 8) - 1;
    faults.cause = (int)(shared.first_fault >> 1 & 127);
    faults.source = (int)(shared.first_fault & 1);
    send_fault(launch, shared.rows, faults, shared.faults);
}

} // namespace sm90

/* A kernel, as its file of kernels names it. */
#define SMLA_SM90_ATTEND(kernels, name, d_qk)                                                      \
    extern "C" __global__ void __launch_bounds__(sm90::THREADS, 1)                                 \
        name(const __grid_constant__ smla_gpu_attend launch)                                       \
    {                                                                                              \
        kernels::attend<d_qk, sm90::name##_heads, sm90::name##_shared>(launch);                    \
    }
