/* attend on Hopper for many heads over dense caches: bfloat16 queries, d_qk 576 or 512, d_v 512,
 * rows aligned to 16 bytes; a block of 64 heads to a multiprocessor.
 *
 * A block takes 64 heads of one row and one split of its entries, in tiles of 32 valid ones. q and
 * the rows of the cache lie in shared memory as the products want them, and are multiplied as the
 * bfloat16 numbers that they are: no number of the cache passes through a register. Of the three
 * warpgroups
 *
 *   0     gathers. Two warps look entries up, by turns; two copy the rows of half a tile each into
 *         one of four stages;
 *   1, 2  multiply. Each makes scores and weights of every other tile, its own. Each keeps 256 of
 *         the 512 numbers of out, in registers, to which it adds the values of all tiles in order.
 *
 * The latter leave no gap between their products: those of a tile's values are under way while the
 * scores of the next one become weights, and the scores of the one after that are asked for behind
 * them. All hand things on by barriers in shared memory, at which every thread arrives:
 *
 *   turn     look-up -> look-up    the other warp's entries have their places
 *   known    look-up -> copying    the rows of a tile are known; a size of 0: there are no more
 *   read     copying -> look-up    and have been asked for: those of another tile may come
 *   full     copying -> products   the stage holds a tile; a size of 0: none
 *   empty    products -> copying   half of it has been read by both
 *   weighed  products -> products  the weights of the tile are there
 *
 * What the owner of a tile hands to the other warpgroup, a thread hands to the one of the same
 * place there, and a warp to the same warp: tiles go to and fro, so that whoever writes has read
 * what was written there before.
 *
 * Numbers. A weight is 2^(s - R), s being log2(e) times the score and R a reference of the head,
 * the largest s of the block's first tile. R moves only when an s has come that is SLACK above it.
 * A weight is cut off to 16 bits of fraction, of which 8 are one bfloat16 number and the rest
 * another: the values are multiplied by both. */
#pragma once

#include "sm90_common.cuh"

namespace dense
{

using namespace sm90;

/* -------------------------------------------------------------------------- shapes */

constexpr int TILE = SMLA_SM90_DENSE_TILE;
constexpr int HEADS = SMLA_SM90_DENSE_HEADS;
constexpr int QUERY_BLOCK = HEADS * ROW_BYTES; /* bytes */
constexpr int CHUNK = 16;                      /* entries, k of a value product */
constexpr int CHUNKS = TILE / CHUNK;
constexpr int HALF = TILE / COPY_WARPS; /* rows of a tile that a warp copies */
static_assert(HALF == CHUNK, "given back by chunks");
constexpr int OF_ROW = ROW_BYTES / 16; /* pieces of a row of a block */
constexpr int BLOCKS_AT_ONCE = WARP / OF_ROW;
static_assert(LATENT_BLOCKS == 2 * BLOCKS_AT_ONCE, "two copies a row");
constexpr int STAGES = 4;

/* Registers of a thread, multiples of 8: 504 for three of them. */
constexpr int GATHER_REGISTERS = 88;
constexpr int MULTIPLY_REGISTERS = (504 - GATHER_REGISTERS) / OWNERS;

constexpr int CACHE_BLOCK = TILE * ROW_BYTES;      /* bytes of a block of an operand */
constexpr int OWN_BLOCKS = LATENT_BLOCKS / OWNERS; /* whose values a warpgroup adds */
constexpr int WARPS = ptx::WARPGROUP / WARP;
constexpr int PAIRS = TILE / 4; /* of a thread's weights of a tile */

template <int d_qk> struct dense_row {
    static constexpr bool HAS_ROPE = d_qk == LATENT + ROPE;
    static constexpr int BLOCKS = LATENT_BLOCKS + HAS_ROPE;
    static constexpr int TILE = dense::TILE;
};

template <typename Row> struct shared_state {
    uint8_t query[Row::BLOCKS][HEADS][ROW_BYTES];
    uint8_t cache[STAGES][Row::BLOCKS][TILE][ROW_BYTES];
    uint4 high[PAIRS / 4][ptx::WARPGROUP]; /* weights of a tile, as threads have them */
    uint4 rest[PAIRS / 8][ptx::WARPGROUP];
    float reference[HEADS];       /* R; -inf: none yet */
    float factor[HEADS];          /* of the sums, when R has moved, and to out */
    float2 result[OWNERS][HEADS]; /* largest s and sum of weights of an owner's tiles */
    alignas(16) const uint8_t *entries[KNOWN_TILES][TILE]; /* rows */
    uint64_t turn[LOOK_UP_WARPS];
    uint64_t known[KNOWN_TILES];
    uint64_t read[KNOWN_TILES];
    uint64_t full[STAGES];
    uint64_t empty[STAGES][CHUNKS];
    uint64_t weighed;
    smla_gpu_attend launch;
    piece piece;
    int64_t part; /* where its head 0 is in the workspace, in heads; -1: the block has all of it */
    smla_row rows[2];
    unsigned long long first_fault; /* packed by note_fault; the lowest wins */
    unsigned int faults;
    unsigned int found;          /* valid entries that have their places */
    int known_size[KNOWN_TILES]; /* entries of the tile; 0: there are no more tiles */
    int size[STAGES];
    int4 moved; /* the last tile before which a warp's heads have dropped sums */
};

/* -------------------------------------------------------------------------- places */

__device__ int group_thread()
{
    return threadIdx.x % ptx::WARPGROUP;
}

__device__ int warp_of_group()
{
    return group_thread() / WARP;
}

/* Of a warpgroup's heads a thread has two, 8 apart, and of each every fourth pair of entries or
 * numbers: number 4 j + 2 y + x is of head first_head() + 8 y and entry 8 j + 2 column + x. */
using tile_numbers = float[TILE / 2];

__device__ int first_head()
{
    return warp_of_group() * 16 + threadIdx.x % WARP / QUAD;
}

__device__ int quad_column()
{
    return threadIdx.x % QUAD;
}

/* -------------------------------------------------------------------------- copying */

/* What of a stage a lane copies to: the first latent row, and the first rope row. */
struct copy_lane {
    int latent, rope; /* bytes from the first of the warp's rows on */
    int piece;        /* bytes into a row */
    int row;          /* of those that are copied together, for rope numbers */
};

/* The rows of half a tile: all lanes copy the latent numbers of one after another, then eight lanes
 * the rope numbers of a row. Zeros where there is no row. */
template <typename Row, bool whole>
__device__ void copy_rows(const uint8_t *const *rows, uint32_t to, const copy_lane &lane, int count)
{
    constexpr int ROWS = WARP / OF_ROW; /* of rope numbers at once */
    const uint32_t latent = to + lane.latent;
    const uint8_t *from[HALF];
#pragma unroll
    for (int i = 0; i < HALF; i += 2) {
        const ulonglong2 two = *reinterpret_cast<const ulonglong2 *>(&rows[i]);
        from[i] = reinterpret_cast<const uint8_t *>(two.x) + lane.piece;
        from[i + 1] = reinterpret_cast<const uint8_t *>(two.y) + lane.piece;
    }
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const int bytes = whole || i < count ? 16 : 0;
        const uint32_t place = (latent ^ i % 8 << 4) + i * ROW_BYTES;
        ptx::copy_16(place, from[i], bytes);
        ptx::copy_16<BLOCKS_AT_ONCE * CACHE_BLOCK, WARP * 16>(place, from[i], bytes);
    }
    if constexpr (Row::HAS_ROPE) {
        const uint32_t rope = to + lane.rope;
        const uint8_t *from[HALF / ROWS];
#pragma unroll
        for (int i = 0; i < HALF / ROWS; i++) {
            from[i] = rows[ROWS * i + lane.row] + lane.piece % ROW_BYTES;
        }
#pragma unroll
        for (int i = 0; i < HALF / ROWS; i++) {
            const int bytes = whole || ROWS * i + lane.row < count ? 16 : 0;
            ptx::copy_16<0, LATENT * 2>((rope ^ i % 2 << 6) + i * ROWS * ROW_BYTES, from[i], bytes);
        }
    }
}

template <typename Row, typename Shared> __device__ void copy_tiles(Shared &shared, int half)
{
    const int lane = threadIdx.x % WARP;
    const copy_lane place = {
        ptx::fresh(lane / OF_ROW * CACHE_BLOCK + swapped(0, lane % OF_ROW)),
        ptx::fresh(LATENT_BLOCKS * CACHE_BLOCK + swapped(lane / OF_ROW, lane % OF_ROW)),
        ptx::fresh(lane * 16), ptx::fresh(lane / OF_ROW)};
    copy_all_tiles<STAGES>(
        shared, half, [&] { return lane == 0; },
        [&](int tile, int size) {
            const uint8_t *const *rows = &shared.entries[tile % KNOWN_TILES][half * HALF];
            const uint32_t to = ptx::shared_address(shared.cache[tile % STAGES][0][half * HALF]);
            if (size == TILE) {
                copy_rows<Row, true>(rows, to, place, HALF);
            } else {
                copy_rows<Row, false>(rows, to, place, size - half * HALF);
            }
        });
}

/* -------------------------------------------------------------------------- the query */

template <typename Row, bool aligned, typename Shared>
__device__ void store_heads(const smla_attend &work, const piece &piece, Shared &shared)
{
    constexpr int ROWS = MULTIPLIERS / OF_ROW; /* at once */
    const int thread = threadIdx.x - GATHERERS;
#pragma unroll
    for (int i = 0; i < HEADS / ROWS; i++) {
        const int of_block = i * ROWS + thread / OF_ROW;
        const int head = min(piece.head + of_block, work.heads - 1);
#pragma unroll
        for (int block = 0; block < Row::BLOCKS; block++) {
            const uint16_t *numbers = query_number(work, piece, head,
                                                   block * COLUMNS + thread % OF_ROW * 8);
            if constexpr (aligned) {
                ptx::copy_16(&shared.query[block][0][0] + swapped(of_block, thread % OF_ROW),
                             numbers, 16);
            } else {
                store_piece(shared.query[block], of_block, thread % OF_ROW,
                            load_eight<false>(numbers));
            }
        }
    }
}

/* q as the left operand of the scores, as it is. */
template <typename Row, typename Shared>
__device__ void store_query(const smla_attend &work, const piece &piece, Shared &shared)
{
    if (is_query_aligned(work, 16)) {
        store_heads<Row, true>(work, piece, shared);
        ptx::wait_copies();
    } else {
        store_heads<Row, false>(work, piece, shared);
    }
    ptx::publish_operands();
}

/* -------------------------------------------------------------------------- scores */

/* Begins scores = q * k of a tile. */
template <typename Row, typename Shared>
__device__ void multiply_scores(const Shared &shared, unsigned tile, tile_numbers &scores)
{
    const ptx::operand query = ptx::operand_along_k(ptx::shared_address(shared.query));
    const ptx::operand cache = ptx::operand_along_k(
        ptx::shared_address(shared.cache[tile % STAGES]));
    ptx::fence_products();
    ptx::begin_along_k(scores, query.at(0), cache.at(0));
#pragma unroll
    for (int step = 1; step < Row::BLOCKS * K_STEPS; step++) {
        const int block = step / K_STEPS, offset = step % K_STEPS * K_BYTES;
        ptx::multiply_along_k(scores, query.at(block * QUERY_BLOCK + offset),
                              cache.at(block * CACHE_BLOCK + offset));
    }
    ptx::commit_products();
}

/* -------------------------------------------------------------------------- weights */

/* Weights of a thread, by pairs: pair 2 j + y is of head y and entries 8 j + 2 column and the next.
 * They are of 16 bits of fraction, the upper half of a float32 number and a byte. Of entries
 * 16 c on, pairs 4 c to 4 c + 3 are the left operand of their values. */
struct tile_weights {
    uint32_t high[PAIRS];     /* the upper halves */
    uint32_t rest[PAIRS / 2]; /* the bytes of two pairs */
};

/* Words that a thread leaves for the one of the same place in the other warpgroup. */
template <int fours, int words>
__device__ void store_words(uint4 (&to)[fours][ptx::WARPGROUP], const uint32_t (&word)[words])
{
    static_assert(words == 4 * fours, "all of them");
#pragma unroll
    for (int i = 0; i < fours; i++) {
        const uint32_t *four = &word[4 * i];
        to[i][group_thread()] = make_uint4(four[0], four[1], four[2], four[3]);
    }
}

template <int fours, int words>
__device__ void load_words(const uint4 (&from)[fours][ptx::WARPGROUP], uint32_t (&word)[words])
{
    static_assert(words == 4 * fours, "all of them");
#pragma unroll
    for (int i = 0; i < fours; i++) {
        const uint4 four = from[i][group_thread()];
        word[4 * i] = four.x;
        word[4 * i + 1] = four.y;
        word[4 * i + 2] = four.z;
        word[4 * i + 3] = four.w;
    }
}

/* What the upper halves of a pair leave, as bfloat16 numbers. The byte stands behind itself in the
 * float32 number that it is taken from: what that adds is below the difference's last place. */
__device__ uint32_t low_pair(const tile_weights &weights, int pair)
{
    const uint32_t high = weights.high[pair], bytes = weights.rest[pair / 2];
    const int first = pair % 2 * 2;
    const float all[2] = {
        __uint_as_float(__byte_perm(bytes, high, 0x5400 | first << 4 | first)),
        __uint_as_float(__byte_perm(bytes, high, 0x7600 | (first + 1) << 4 | (first + 1)))};
    const float low[2] = {all[0] - __uint_as_float(high << 16),
                          all[1] - __uint_as_float(high & 0xFFFF0000u)};
    return __byte_perm(__float_as_uint(low[0]), __float_as_uint(low[1]), 0x7632);
}

constexpr float SLACK = 32.0f; /* of s above R: sums of weights times values stay far below 2^127 */

/* Of a thread's two heads. */
struct head_state {
    float sum[2];     /* of the thread's weights */
    float largest[2]; /* s of its own tiles, in the thread's columns */
};

/* Moves R of those of a warp's heads that have an s above it, `largest` being those of a thread's
 * heads in the tile, relative to R. Returns through `base` what s is relative to from now on, and
 * through `drop` what to multiply sums with; by itself, whether any is not 1. */
template <typename Shared>
__device__ bool move_references(Shared &shared, const float (&largest)[2], float (&base)[2],
                                float (&drop)[2])
{
    bool drops = false;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const int head = first_head() + 8 * y;
        const bool fresh = shared.reference[head] == -CUDART_INF_F;
        const float top = quad_max(largest[y]);
        __syncwarp(); /* all have read what one of a quad writes */
        if (top > (fresh ? -CUDART_INF_F : 0.0f)) {
            const float moved = base[y] + top;
            if (!fresh) drop[y] = ptx::exp2_fast(base[y] - moved);
            base[y] = moved;
            if (quad_column() == 0) shared.reference[head] = moved;
            drops |= !fresh;
        }
        if (quad_column() == 0) shared.factor[head] = drop[y];
    }
    return __any_sync(ALL_LANES, drops);
}

/* Scores -> weights of a tile of the warpgroup's own, for both. Returns through `drop` what to
 * multiply sums of values with, if it returns true. */
template <typename Shared>
__device__ bool weigh(const smla_attend &work, Shared &shared, unsigned tile,
                      const tile_numbers &products, head_state &heads, tile_weights &weights,
                      float (&drop)[2])
{
    const int size = shared.size[tile % STAGES];
    tile_numbers scores;
#pragma unroll
    for (int i = 0; i < TILE / 2; i++) scores[i] = products[i];
    float factor = work.softmax_scale * LOG2_E;
    if (__builtin_expect(work.logit_cap > 0.0f, false)) {
        const float inverse = work.softmax_scale / work.logit_cap;
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) scores[i] = work.logit_cap * tanhf(scores[i] * inverse);
        factor = LOG2_E;
    }
    if (size < TILE) {
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            if (i / 4 * 8 + 2 * quad_column() + i % 2 >= size) scores[i] = -CUDART_INF_F;
        }
    }
    float base[2], largest[2] = {-CUDART_INF_F, -CUDART_INF_F};
    bool moves = false;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const float reference = shared.reference[first_head() + 8 * y];
        const bool fresh = reference == -CUDART_INF_F;
        base[y] = fresh ? 0.0f : reference;
#pragma unroll
        for (int i = 0; i < TILE / 4; i++) {
            largest[y] = fmaxf(largest[y],
                               fmaf(scores[i / 2 * 4 + 2 * y + i % 2], factor, -base[y]));
        }
        heads.largest[y] = fmaxf(heads.largest[y], base[y] + largest[y]);
        moves |= largest[y] > (fresh ? -CUDART_INF_F : SLACK);
    }
    drop[0] = drop[1] = 1.0f;
    bool drops = false;
    if (__builtin_expect(__any_sync(ALL_LANES, moves), false)) {
        drops = move_references(shared, largest, base, drop);
        heads.sum[0] *= drop[0];
        heads.sum[1] *= drop[1];
    }
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        const int y = pair % 2;
        uint32_t bits[2];
#pragma unroll
        for (int x = 0; x < 2; x++) {
            const float weight = ptx::exp2_fast(fmaf(scores[2 * pair + x], factor, -base[y]));
            bits[x] = __float_as_uint(weight) & 0xFFFFFF00u;
            heads.sum[y] += __uint_as_float(bits[x]);
        }
        weights.high[pair] = __byte_perm(bits[0], bits[1], 0x7632);
        const uint32_t bytes = __byte_perm(bits[0], bits[1], 0x5151);
        weights.rest[pair / 2] = pair % 2 ? __byte_perm(weights.rest[pair / 2], bytes, 0x5410)
                                          : bytes;
    }
    store_words(shared.high, weights.high);
    store_words(shared.rest, weights.rest);
    if (drops && group_thread() % WARP == 0) (&shared.moved.x)[warp_of_group()] = tile;
    ptx::arrive(&shared.weighed);
    return drops;
}

/* A warpgroup's sums of values: number 4 j + 2 y + x of a thread is of its head y and value number
 * 8 j + 2 column + x of the warpgroup's half. */
using value_sums = float[LATENT / OWNERS / 2];

__device__ void rescale(value_sums &values, const float (&drop)[2])
{
#pragma unroll
    for (int i = 0; i < LATENT / OWNERS / 2; i++) values[i] *= drop[i / 2 % 2];
}

/* Waits for the other warpgroup's weights of a tile. Returns whether sums have to be dropped before
 * it is added: all threads of the warpgroup get the same answer. */
template <typename Shared> __device__ bool wait_for_weights(Shared &shared, int tile)
{
    wait_warp(&shared.weighed, tile & 1);
    const int4 moved = shared.moved;
    return moved.x == tile || moved.y == tile || moved.z == tile || moved.w == tile;
}

/* The sums so far become ones relative to the R of the other's tile. */
template <typename Shared>
__device__ void drop_sums(const Shared &shared, int tile, head_state &heads, value_sums &values)
{
    if ((&shared.moved.x)[warp_of_group()] != tile) return;
    const float drop[2] = {shared.factor[first_head()], shared.factor[first_head() + 8]};
    heads.sum[0] *= drop[0];
    heads.sum[1] *= drop[1];
    rescale(values, drop);
}

template <typename Shared> __device__ void take_weights(const Shared &shared, tile_weights &weights)
{
    load_words(shared.high, weights.high);
    load_words(shared.rest, weights.rest);
    __syncwarp(); /* all have read what lanes will write for the next tile */
}

/* -------------------------------------------------------------------------- values */

/* Begins to add the values of a tile to the warpgroup's half of the numbers of out: the products of
 * upper halves are under way while lower ones are made. */
template <typename Row, typename Shared>
__device__ void begin_values(Shared &shared, unsigned tile, int own, const tile_weights &weights,
                             uint32_t (&low)[CHUNKS][4], value_sums &values)
{
    const ptx::operand cache = ptx::operand_across_k<CACHE_BLOCK>(
        ptx::shared_address(shared.cache[tile % STAGES][own * OWN_BLOCKS]));
    constexpr int CHUNK_BYTES = CHUNK * ROW_BYTES;
    ptx::fence_products();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
        ptx::multiply_across_k(values, &weights.high[4 * chunk], cache.at(chunk * CHUNK_BYTES));
    }
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
#pragma unroll
        for (int i = 0; i < 4; i++) low[chunk][i] = low_pair(weights, 4 * chunk + i);
        ptx::fence_products();
        ptx::multiply_across_k(values, low[chunk], cache.at(chunk * CHUNK_BYTES));
        ptx::commit_products();
    }
}

/* Half of the stage is given back when its products are done, behind which so many commits may be
 * under way. */
template <int later, typename Shared>
__device__ void end_values(Shared &shared, unsigned tile, bool begun)
{
    const int stage = tile % STAGES;
    ptx::wait_products<later + 1>();
    if (begun) ptx::arrive(&shared.empty[stage][0]);
    ptx::wait_products<later>();
    if (begun) ptx::arrive(&shared.empty[stage][1]);
    static_assert(CHUNKS == 2, "waited for one by one");
}

/* The work of one of the two warpgroups that multiply, by pairs of tiles: one of the other's and
 * the next, its own. The products of its own scores are under way when a pair begins; those of
 * the other's values while it weighs; those of its own values while the next pair's scores are
 * asked for. Where sums are to be dropped nothing may be under way, and the scores are asked for
 * once more. What was copied is seen by the products of those who have waited for it and then
 * published it. */
template <typename Row, typename Shared>
__device__ void multiply_tiles(const smla_attend &work, Shared &shared, int own, value_sums &values,
                               head_state &heads)
{
    const auto size_of = [&](unsigned tile) {
        wait_warp(&shared.full[tile % STAGES], tile / STAGES & 1);
        return shared.size[tile % STAGES];
    };
    int tile = own - 1; /* the other's */
    bool theirs = tile >= 0 && size_of(tile) > 0, mine = size_of(tile + 1) > 0, dropped = false;
    ptx::publish_operands();
    while (mine) {
        tile_numbers scores;
        multiply_scores<Row>(shared, tile + 1, scores);
#pragma unroll 1
        for (;;) {
            tile_weights weights, own_weights;
            uint32_t low[CHUNKS][4], own_low[CHUNKS][4];
            float drop[2];
            if (theirs) {
                if (__builtin_expect(wait_for_weights(shared, tile) && !dropped, false)) {
                    ptx::wait_products<0>();
                    drop_sums(shared, tile, heads, values);
                    dropped = true;
                    break;
                }
                take_weights(shared, weights);
            }
            ptx::wait_products<0>();
            if (theirs) begin_values<Row>(shared, tile, own, weights, low, values);
            const bool drops = weigh(work, shared, tile + 1, scores, heads, own_weights, drop);
            end_values<0>(shared, tile, theirs);
            if (__builtin_expect(drops, false)) rescale(values, drop);
            tile += OWNERS;
            begin_values<Row>(shared, tile - 1, own, own_weights, own_low, values);
            const bool ready = __all_sync(
                ALL_LANES,
                ptx::has_ended(&shared.full[(tile + 1) % STAGES], (tile + 1) / STAGES & 1));
            if (!ready) end_values<0>(shared, tile - 1, true);
            theirs = size_of(tile) > 0;
            mine = size_of(tile + 1) > 0;
            dropped = false;
            ptx::publish_operands();
            if (!mine) {
                end_values<0>(shared, tile - 1, ready);
                break;
            }
            multiply_scores<Row>(shared, tile + 1, scores);
            end_values<1>(shared, tile - 1, ready);
        }
    }
    if (theirs) {
        tile_weights weights;
        uint32_t low[CHUNKS][4];
        if (wait_for_weights(shared, tile)) drop_sums(shared, tile, heads, values);
        take_weights(shared, weights);
        begin_values<Row>(shared, tile, own, weights, low, values);
        end_values<0>(shared, tile, true);
    }
    ptx::wait_products<0>();
}

/* -------------------------------------------------------------------------- results */

constexpr int OUT_PITCH = LATENT + 8; /* numbers: lanes of half a warp have banks of their own */

/* Largest s and sum of a thread's heads over the warpgroup's tiles. */
template <typename Shared>
__device__ void join_columns(Shared &shared, int own, const head_state &heads)
{
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const float largest = quad_max(heads.largest[y]);
        float sum = heads.sum[y];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        if (quad_column() == 0) {
            shared.result[own][first_head() + 8 * y] = make_float2(largest, sum);
        }
    }
}

/* Sums of values go to shared memory, where the operands were. */
template <typename Shared>
__device__ void gather_sums(Shared &shared, int own, const value_sums &values)
{
    static_assert(HEADS * OUT_PITCH * 4 <= offsetof(Shared, high), "operands");
    float *const to = reinterpret_cast<float *>(&shared) + first_head() * OUT_PITCH +
                      own * (LATENT / OWNERS) + quad_column() * 2;
#pragma unroll
    for (int i = 0; i < LATENT / OWNERS / 4; i++) {
        *reinterpret_cast<float2 *>(to + i % 2 * 8 * OUT_PITCH +
                                    i / 2 * 8) = make_float2(values[2 * i], values[2 * i + 1]);
    }
}

/* Largest score and sum of every head over all tiles, and the factor of its sums of values. */
template <typename Shared>
__device__ void finish_heads(const smla_gpu_attend &launch, Shared &shared)
{
    constexpr float LN_2 = 0.693147180559945f;
    const int of_block = threadIdx.x - GATHERERS;
    if (of_block >= HEADS) return;
    const float2 even = shared.result[0][of_block], odd = shared.result[1][of_block];
    const float sum = even.y + odd.y, reference = shared.reference[of_block];
    const float largest = sum == 0.0f ? -CUDART_INF_F : fmaxf(even.x, odd.x) * LN_2;
    /* from weights relative to R to weights relative to the largest score, as it is given */
    const float factor = sum == 0.0f ? 0.0f : ptx::exp2_fast(fmaf(-largest, LOG2_E, reference));
    shared.factor[of_block] = factor *
                              finish_head_of_block(launch, shared, of_block, largest, sum * factor);
}

/* -------------------------------------------------------------------------- the kernel */

template <typename Shared> __device__ void init_barriers(Shared &shared)
{
    for (int stage = 0; stage < STAGES; stage++) {
        ptx::init_phases(&shared.full[stage], 2 * COPY_WARPS * WARP);
        for (int chunk = 0; chunk < CHUNKS; chunk++) {
            ptx::init_phases(&shared.empty[stage][chunk], MULTIPLIERS);
        }
    }
    ptx::init_phases(&shared.weighed, ptx::WARPGROUP);
    init_look_up(shared);
}

template <int d_qk, int block_heads, int shared_bytes>
__device__ void attend(const smla_gpu_attend &parameters)
{
    using Row = dense_row<d_qk>;
    using Shared = shared_state<Row>;
    static_assert(block_heads == HEADS && sizeof(Shared) == shared_bytes, "sm90_kernels.h");
    static_assert(shared_bytes + 1024 <= 227 * 1024, "what Hopper gives a block");
    extern __shared__ __align__(1024) unsigned char operands[];
    Shared &shared = *reinterpret_cast<Shared *>(operands);

    ptx::allow_next_launch();
    copy_parameters(parameters, shared.launch);
    if (threadIdx.x == 0) {
        init_barriers(shared);
        shared.moved = make_int4(-1, -1, -1, -1);
    }
    if (threadIdx.x < HEADS) shared.reference[threadIdx.x] = -CUDART_INF_F;
    __syncthreads();
    const smla_gpu_attend &launch = shared.launch;
    const smla_attend &work = launch.work;
    const block_piece taken = take_piece(launch, blockIdx.x, HEADS);
    const piece &piece = taken.piece;
    if (threadIdx.x == 0) {
        shared.piece = piece;
        shared.part = taken.part;
    }
    if (threadIdx.x < GATHERERS) {
        ptx::keep_registers<GATHER_REGISTERS>();
        gather<Row>(launch, piece, shared, [&](int half) { copy_tiles<Row>(shared, half); });
    } else {
        ptx::take_registers<MULTIPLY_REGISTERS>();
        ptx::wait_for_last_launch(); /* it may still write q */
        const int own = __shfl_sync(ALL_LANES, (int)threadIdx.x / ptx::WARPGROUP, 0) - 1;
        store_query<Row>(work, piece, shared);
        sync_roles(BARRIER_MULTIPLY, MULTIPLIERS);
        head_state heads = {{0.0f, 0.0f}, {-CUDART_INF_F, -CUDART_INF_F}};
        value_sums values = {};
        multiply_tiles<Row>(work, shared, own, values, heads);
        join_columns(shared, own, heads);
        sync_roles(BARRIER_MULTIPLY, MULTIPLIERS);
        gather_sums(shared, own, values);
        finish_heads(launch, shared);
        sync_roles(BARRIER_MULTIPLY, MULTIPLIERS);
        store_results<HEADS, OUT_PITCH>(launch, shared,
                                        [&](int, int head) { return shared.factor[head]; });
    }
    __syncthreads(); /* nobody leaves while others still wait at a barrier */
    if (threadIdx.x == 0) report_noted(launch, shared);
}

} // namespace dense
