/* attend on Hopper for many heads over dense caches: bfloat16 queries, d_qk 576 or 512, d_v 512,
 * rows aligned to 16 bytes; a block of 64 heads to a multiprocessor.
 *
 * A block takes 64 heads of one row and one split of its entries, in tiles of 32 valid ones. Its
 * products are Hopper's, of whole warpgroups, with operands in shared memory, so that no number of
 * the cache passes through the registers of those that multiply. Of the four warpgroups
 *
 *   0, 1  gather. Two warps look entries up, by turns; six read their rows, half of them ahead into
 *         registers and half into shared memory, and write the numbers into one of three stages as
 *         the products want them: the latent numbers as float16, in rows of 64 numbers whose
 *         16-byte pieces are swapped, the rope numbers as they are;
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
 * Numbers, as in sm80_attend.cuh. A row's latent numbers become float16 ones by a power of two of
 * the row, whose undoing is the entry's scale, q's by one of each head. Rope numbers are multiplied
 * as the bfloat16 numbers that they are. Weights are 2^(score * log2(e) - M), M the running maximum
 * of the warpgroup's own tiles, rounded up to an integer. The values take
 * w = weight * scale * 2^(M - B), cut off to float16 by turns, where B is an integer of each head
 * that keeps w in float16's range: out is the sums times 2^B. */
#pragma once

#include "sm90_common.cuh"

namespace dense
{

using namespace sm90;

/* -------------------------------------------------------------------------- shapes */

constexpr int CHUNK = 16; /* entries, k of a value product */
constexpr int OWNERS = 2; /* warpgroups that multiply: tile t is that of number t % OWNERS */
constexpr int GATHERERS = 2 * ptx::WARPGROUP;
constexpr int MULTIPLIERS = 2 * ptx::WARPGROUP;
constexpr int THREADS = GATHERERS + MULTIPLIERS;
constexpr int COPY_WARPS = 6; /* of the gatherers; the others look entries up */
static_assert((COPY_WARPS + LOOK_UP_WARPS) * WARP == GATHERERS, "all of them");

#define SHARED_BYTES(name, heads, threads, bytes)                                                  \
    constexpr int name##_shared = bytes;                                                           \
    static_assert(heads == HEADS && threads == THREADS, "sm90_kernels.h");
SMLA_SM90_DENSE_KERNELS(SHARED_BYTES)
#undef SHARED_BYTES

constexpr int GROUP_BLOCKS = LATENT_BLOCKS / GROUPS;
constexpr int VALUE_GROUPS = GROUPS / 2; /* of a warpgroup, 128 numbers each */

/* How a row is stored and multiplied. */
template <int d_qk> struct dense_row {
    static constexpr bool HAS_ROPE = d_qk == LATENT + ROPE;
    static constexpr int BLOCKS = LATENT_BLOCKS + HAS_ROPE;
    static constexpr int LANES = 16; /* that read a row */
    static constexpr int PIECES = 4; /* of 16 latent bytes, of a lane */
    static constexpr int ROPE_LANES = HAS_ROPE ? 8 : 0;
    static constexpr int TILE = SMLA_SM90_DENSE_TILE;
    static constexpr int STAGES = 3;          /* of a tile each */
    static constexpr bool PREFETCHED = true;  /* into L2, when looked up */
    static constexpr bool NEIGHBOURS = false; /* whether a lane of the products has four of a row */
    static constexpr int GATHERERS = dense::GATHERERS;
    static constexpr int MULTIPLIERS = dense::MULTIPLIERS;
    static constexpr int CHUNKS = TILE / CHUNK;
    static constexpr int CACHE_BLOCK = TILE * ROW_BYTES; /* bytes of a block of an operand */
    static constexpr int PASS = WARP / LANES;            /* rows of a warp at once */
    static constexpr int PASSES = TILE / PASS;
    static constexpr int ROPE_AT = LATENT * 2; /* bytes */
    static constexpr int BYTES = ROPE_AT + (HAS_ROPE ? ROPE * 2 : 0);

    /* Registers of a thread, multiples of 8, of which there are 512 for four of them. */
    static constexpr int GATHER_REGISTERS = 64;
    static constexpr int MULTIPLY_REGISTERS = 256 - GATHER_REGISTERS;
};

/* A pass of rows on its way to a warp: every lane's own pieces, for which no other lane waits. */
template <typename Row> struct landing {
    uint4 latent[Row::PIECES][WARP];
    uint4 rope[Row::HAS_ROPE ? WARP : 1];
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
    float scale[Row::STAGES][Row::TILE]; /* undoes a row's power */
    union {
        float query_unit[HEADS];           /* undoes q's power */
        head_result result[OWNERS][HEADS]; /* of each owner's tiles, when all scores are made */
    };
    float largest_scale[Row::STAGES];               /* of the tile */
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

/* A phase of a barrier, see ptx::wait_phase. */
struct phase_of {
    uint64_t *barrier;
    unsigned parity;
};

/* -------------------------------------------------------------------------- copying */

/* A lane's share of what a warp reads at once: the row, and 16 bytes of every LANES * 16. */
struct lane_share {
    int row, part;
};

template <typename Row> __device__ lane_share share_of_lane()
{
    const int lane = threadIdx.x % WARP;
    return {lane / Row::LANES, lane % Row::LANES};
}

template <typename Row> struct row_pieces {
    uint4 latent[Row::PIECES];
    uint4 rope;
};

template <typename Row> __device__ bool has_rope(const lane_share &share)
{
    return Row::HAS_ROPE && share.part < Row::ROPE_LANES;
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
        pieces.rope = ptx::load_once(bytes + Row::ROPE_AT + share.part * 16,
                                     bytes && has_rope<Row>(share));
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
        ptx::copy_16<0, Row::ROPE_AT>(&landing.rope[threadIdx.x % WARP], bytes + share.part * 16,
                                      there);
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
    return pieces;
}

/* Writes the pieces of a row as the products want them. */
template <typename Row, typename Shared>
__device__ void store_row(Shared &shared, int stage, int pass, const lane_share &share,
                          const row_pieces<Row> &pieces)
{
    const int row = pass * Row::PASS + share.row;
    auto *blocks = shared.cache[stage];
    float largest = 0.0f;
#pragma unroll
    for (int p = 0; p < Row::PIECES; p++) {
        largest = fmaxf(largest, largest_of_piece(pieces.latent[p]));
    }
    float unit;
    const float factor = power_for(lanes_max<Row::LANES>(largest), unit);
    if (has_rope<Row>(share)) {
        store_piece(blocks[Row::BLOCKS - 1], row, share.part, pieces.rope);
    }
    if (share.part == 0) shared.scale[stage][row] = unit;
    constexpr int OF_BLOCK = 8; /* pieces */
    constexpr int PITCH = Row::LANES / OF_BLOCK * Row::CACHE_BLOCK;
    const int at = share.part / OF_BLOCK * Row::CACHE_BLOCK + swapped(row, share.part % OF_BLOCK);
    uint8_t *const to = &blocks[0][0][0];
#pragma unroll
    for (int p = 0; p < Row::PIECES; p++) {
        *reinterpret_cast<uint4 *>(to + at + p * PITCH) = scale_piece(pieces.latent[p], factor);
        ptx::keep_order();
    }
}

/* The work of the copying warps: of all passes of rows, laid end to end, each takes every sixth.
 * While it waits for room in a stage it has the rows of one in registers and those of the next
 * where they land. Where there is room for the next at once, it goes on before it asks for more.
 * Behind the last tile there is an empty one for each of the warpgroups that multiply. */
template <typename Row, typename Shared> __device__ void copy_tiles(Shared &shared)
{
    const lane_share share = share_of_lane<Row>();
    landing<Row> &landing = shared.landing[threadIdx.x / WARP];
    int ends = INT_MAX; /* the first tile that is empty */
    /* Whether a pass is the warp's last in its tile. */
    const auto is_last = [](unsigned pass) {
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
    ptx::fence_products();
#pragma unroll
    for (int step = 0; step < LATENT_BLOCKS * K_STEPS; step++) {
        const int block = step / K_STEPS, offset = step % K_STEPS * K_BYTES;
        ptx::multiply_along_k<__half>(part, query.at(block * QUERY_BLOCK + offset),
                                      cache.at(block * Row::CACHE_BLOCK + offset), step > 0);
    }
    ptx::commit_products();
    const float unit[2] = {shared.query_unit[row], shared.query_unit[row + 8]};
    ptx::wait_products<0>();
#pragma unroll
    for (int j = 0; j < Row::TILE / 8; j++) {
        float scales[2];
        load_run<float>(shared.scale[stage], 8 * j + 2 * column, scales);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            scores[4 * j + i] = part[4 * j + i] * unit[i / 2] * scales[i % 2];
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

/* The largest scale of the tile. */
template <typename Row, typename Shared>
__device__ void find_largest_scale(Shared &shared, int stage)
{
    const int warp = group_thread() / WARP, lane = group_thread() % WARP;
    if (warp > 0) return;
    float scales[2];
    load_run<float>(shared.scale[stage], lane % (Row::TILE / 2) * 2, scales);
    const float largest = lanes_max<WARP>(fmaxf(fabsf(scales[0]), fabsf(scales[1])));
    if (lane == 0) shared.largest_scale[stage] = largest;
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
struct value_sums {
    float sums[VALUE_GROUPS][64];
    float rise[2];
    float top[2];
};

__device__ void clear(value_sums &values)
{
#pragma unroll
    for (int g = 0; g < VALUE_GROUPS; g++) {
#pragma unroll
        for (int i = 0; i < 64; i++) values.sums[g][i] = 0.0f;
    }
#pragma unroll
    for (int y = 0; y < 2; y++) {
        values.top[y] = -CUDART_INF_F;
        values.rise[y] = -CUDART_INF_F;
    }
}

/* Takes M of a tile, and returns it less the largest. */
__device__ float take_top(float top, int y, value_sums &values)
{
    const float above = top == values.top[y] ? 0.0f : top - values.top[y];
    if (above <= 0.0f) return above;
    values.rise[y] -= above;
    values.top[y] = top;
    return 0.0f;
}

/* The scales of entries 8 j + 2 column and the next. */
template <typename Shared> __device__ float2 load_scales(const Shared &shared, int stage, int j)
{
    return *reinterpret_cast<const float2 *>(&shared.scale[stage][8 * j + quad_column() * 2]);
}

/* The scales of a thread's entries of a chunk. */
struct chunk_scales {
    float2 of[CHUNK / 8];
};

template <typename Shared>
__device__ chunk_scales load_chunk_scales(const Shared &shared, int stage, int chunk)
{
    return {load_scales(shared, stage, chunk * 2), load_scales(shared, stage, chunk * 2 + 1)};
}

/* w of a chunk's entries: the left operand of their values. `turns` is TURN times the number of the
 * thread's first entry. */
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
__device__ void units_of(const value_sums &values, const float (&below)[2], float (&unit)[2])
{
#pragma unroll
    for (int y = 0; y < 2; y++) unit[y] = ptx::exp2_fast(below[y] - values.rise[y]);
}

/* Moves B, and the sums along, where w of the tile is more than float16 is to hold. */
template <typename Row, typename Shared>
__device__ void move_base(const Shared &shared, int stage, const tile_numbers<Row> &weights,
                          const float (&below)[2], const float (&unit)[2], value_sums &values)
{
    float biggest[2] = {};
#pragma unroll
    for (int j = 0; j < Row::TILE / 8; j++) {
        const float2 scales = load_scales(shared, stage, j);
#pragma unroll
        for (int y = 0; y < 2; y++) {
            biggest[y] = fmaxf(biggest[y], fmaxf(fabsf(weights[4 * j + 2 * y] * scales.x),
                                                 fabsf(weights[4 * j + 2 * y + 1] * scales.y)));
        }
    }
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const float largest = quad_max(biggest[y]), rise = values.rise[y];
        const int exponent = max(exponent_of(largest) - FRESH_WEIGHT, -126);
        if (unit[y] <= LARGEST_POWER && largest * unit[y] <= LARGEST_WEIGHT) continue;
        const float moved = fmaxf(rise, exponent + below[y]);
        const float factor = ptx::exp2_fast(rise - moved);
        values.rise[y] = moved;
#pragma unroll
        for (int g = 0; g < VALUE_GROUPS; g++) {
#pragma unroll
            for (int i = 0; i < 32; i++) values.sums[g][i / 2 * 4 + 2 * y + i % 2] *= factor;
        }
    }
}

/* Adds the values of a tile to `half` of the numbers of out. The products of one chunk are under
 * way while the next is rounded; a chunk of the stage is given back when its own are done. */
template <typename Row, typename Shared>
__device__ void add_values(Shared &shared, unsigned tile, int half,
                           const tile_numbers<Row> &weights, const float (&top)[2],
                           value_sums &values)
{
    const int stage = tile % Row::STAGES;
    const float below[2] = {take_top(top[0], 0, values), take_top(top[1], 1, values)};
    float unit[2];
    units_of(values, below, unit);
    const bool moves = may_move(shared.largest_scale[stage], unit);
    if (__any_sync(ALL_LANES, moves)) {
        move_base<Row>(shared, stage, weights, below, unit, values);
        units_of(values, below, unit);
    }
    const ptx::operand cache = ptx::operand_across_k<Row::CACHE_BLOCK>(
        ptx::shared_address(shared.cache[stage][half * VALUE_GROUPS * GROUP_BLOCKS]));
    const uint32_t turns = (tile * Row::TILE + quad_column() * 2) * TURN;
    chunk_scales scales = load_chunk_scales(shared, stage, 0);
    uint32_t operands[2][4];
#pragma unroll
    for (int chunk = 0; chunk < Row::CHUNKS; chunk++) {
        const int next = chunk + 1;
        ptx::wait_products<1>();
        if (chunk > 1) ptx::arrive(&shared.empty[stage][chunk - 2]);
        round_weights<Row>(chunk, weights, scales, unit, turns, operands[chunk % 2]);
        if (next < Row::CHUNKS) scales = load_chunk_scales(shared, stage, next);
        ptx::fence_products();
#pragma unroll
        for (int g = 0; g < VALUE_GROUPS; g++) {
            ptx::multiply_across_k(
                values.sums[g], operands[chunk % 2],
                cache.at(g * GROUP_BLOCKS * Row::CACHE_BLOCK + chunk * CHUNK * ROW_BYTES));
        }
        ptx::commit_products();
    }
    ptx::wait_products<0>();
#pragma unroll
    for (int chunk = Row::CHUNKS - 2; chunk < Row::CHUNKS; chunk++) {
        ptx::arrive(&shared.empty[stage][chunk]);
    }
}

/* The work of one of the two warpgroups that multiply. */
template <typename Row, typename Shared>
__device__ void multiply_tiles(const smla_attend &work, Shared &shared, int own, row_state &state,
                               value_sums &values)
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
                             const row_state &state, value_sums &values, float (&factor)[2])
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
                             const float (&factor)[2], const value_sums &values, void *data,
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
            const float power = factor[y] == 0.0f ? 0.0f : ptx::exp2_fast(values.rise[y]);
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
                              const float (&factor)[2], const value_sums &values, void *data,
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
                              const float (&factor)[2], const value_sums &values)
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

template <int d_qk, int shared_bytes> __device__ void attend(const smla_gpu_attend &parameters)
{
    using Row = dense_row<d_qk>;
    using Shared = shared_state<Row>;
    static_assert(sizeof(Shared) == shared_bytes, "sm90_kernels.h");
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
        prefetch_first_indices<GATHERERS>(work, piece);
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
        value_sums values;
        clear(values);
        multiply_tiles<Row>(work, shared, own, state, values);
        float factor[2];
        finish_heads<Row>(launch, shared, own, state, values, factor);
        store_results<Row>(launch, shared, own, factor, values);
    }
    __syncthreads(); /* nobody leaves while others still wait at a barrier */
    report_noted(launch, shared);
}

} // namespace dense
