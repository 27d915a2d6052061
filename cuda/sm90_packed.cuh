/* attend on Hopper over packed caches: bfloat16 queries, d_qk 576 or 512, d_v 512, rows of 512 e4m3
 * numbers, four scales and perhaps 64 rope numbers, aligned to 16 bytes; a block of 16, 32 or 64
 * heads to a multiprocessor.
 *
 * A block takes its heads of one row and one split of its entries, in tiles of 64 valid ones. Its
 * products are transposed: a tile's entries, and then the value numbers, are the rows of the left
 * operand, heads the columns of the right one. So the numbers of the cache, which the products want
 * as float16, never lie in shared memory as such: a row is copied as it is, and each of those that
 * multiply turns its bytes into operands in its registers, once for the scores and once,
 * transposed, for the values. q and the weights are the right operands, in shared memory. Of the
 * three warpgroups
 *
 *   0     gathers. Two warps look entries up, by turns; two copy the rows of half a tile each, the
 *         latent numbers and scales into one of three to five stages, the rope numbers into one of
 *         two or three;
 *   1, 2  multiply. Each makes scores and weights of every other tile, its own. Each keeps 256 of
 *         the 512 numbers of out, in registers, to which it adds the values of all tiles in order.
 *
 * While one of the latter weighs, the other's next scores are made: both are behind one tile's
 * values and before the next's. Products are two to a commit, and the next two's left operands are
 * made under them; those of the scores begin behind the values of the tile before, which end under
 * them. They hand things on by barriers in shared memory, at which every thread arrives:
 *
 *   turn        look-up -> look-up    the other warp's entries have their places
 *   known       look-up -> copying    the rows of a tile are known; a size of 0: there are no more
 *   read        copying -> look-up    and have been asked for: those of another tile may come
 *   full        copying -> products   the stage holds a tile; a size of 0: none
 *   empty       products -> copying   half of it has been read by both
 *   rope_empty  products -> copying   the rope numbers have been read by the tile's owner
 *   weighed     products -> products  the weights of the tile are there
 *   taken       products -> products  and have been multiplied by both: the next ones may come
 *   together    products -> products  all have come to the end of a step before or behind the tiles
 *
 * Numbers. e4m3 numbers become float16 ones exactly. q's latent numbers are brought into float16's
 * range by a power of two of each head; rope numbers are multiplied as the bfloat16 numbers that
 * they are. A weight is 2^(s - R), s being log2(e) times the score and R a reference of the head,
 * the largest s of the block's first tile. R moves only when an s has come that is SLACK above it.
 * The values take w = weight * scale * unit, cut off to float16 by turns as in sm80_attend.cuh, the
 * unit being a power of two of each group of 128 numbers that share a scale. Where scales of a
 * group are 0 or more than 2^8 apart, which is rare, each head gets units of its own, from its
 * largest w, at every tile anew: that is slower. out is the sums divided by the units. */
#pragma once

#include "sm90_common.cuh"

namespace packed
{

using namespace sm90;

/* -------------------------------------------------------------------------- shapes */

constexpr int TILE = SMLA_SM90_PACKED_TILE;
constexpr int CHUNK = 16; /* entries, k of a value product */
constexpr int CHUNKS = TILE / CHUNK;
constexpr int HALF = TILE / COPY_WARPS;       /* rows of a tile that a warp copies */
constexpr int SCALES_AT = LATENT;             /* bytes of a row, and of its place in a stage */
constexpr int PITCH = SCALES_AT + GROUPS * 4; /* of a stage: an odd number of 16-byte pieces */
constexpr int STEPS = LATENT / 16;            /* of the scores' products */
constexpr int OF_HALF = GROUPS / 2;           /* groups of value numbers that a warpgroup adds */
constexpr int WEIGHT_BLOCK = TILE * ROW_BYTES;
constexpr int WARPS = ptx::WARPGROUP / WARP;
constexpr float LARGEST_POWER = 0x1p126f; /* a unit before there are numbers */

/* What a kernel is made for. Fewer heads leave room for more stages, and registers to those that
 * gather. */
template <int d_qk, int heads> struct shape {
    static constexpr int HEADS = heads;
    static constexpr bool HAS_ROPE = d_qk == LATENT + ROPE;
    static constexpr int BLOCKS = LATENT_BLOCKS + HAS_ROPE;
    static constexpr int TILE = packed::TILE;
    static constexpr int ROPE_AT = PITCH;             /* bytes */
    static constexpr int BATCH = heads == 64 ? 8 : 4; /* rows that a warp copies at once */
    static constexpr int STAGES = heads == 64 ? 3 : heads == 32 ? 4 : 5;
    static constexpr int ROPE_STAGES = heads == 64 ? 2 : 3;
    static constexpr int LANE_HEADS = heads / QUAD; /* of a thread's tile_numbers */
    /* of a warp whose lanes have a head each */
    static constexpr unsigned HEAD_LANES = heads < WARP ? (1u << heads) - 1 : ALL_LANES;
    static constexpr int GROUPS_OF_BLOCK = COLUMNS / heads; /* whose weights lie side by side */
    /* registers of a thread, multiples of 8: 504 for three of them */
    static constexpr int GATHER_REGISTERS = heads == 64 ? 40 : 88;
    static constexpr int MULTIPLY_REGISTERS = (504 - GATHER_REGISTERS) / OWNERS / 8 * 8;
};

template <typename Shape> struct shared_state : Shape {
    using Shape::HEADS, Shape::STAGES;
    uint8_t query[Shape::BLOCKS][HEADS][ROW_BYTES];
    uint8_t weight[GROUPS / Shape::GROUPS_OF_BLOCK][TILE][ROW_BYTES];
    uint8_t rope[Shape::HAS_ROPE ? Shape::ROPE_STAGES : 0][TILE][ROW_BYTES];
    uint8_t latent[STAGES][TILE][PITCH];
    float query_unit[HEADS];      /* undoes q's power */
    float reference[HEADS];       /* R */
    float shift[HEADS];           /* of R, when it has moved */
    float drop[HEADS];            /* 2^-shift */
    float factor[GROUPS][HEADS];  /* of the sums, when R or a unit has moved */
    float unit[GROUPS][HEADS];    /* in w */
    float largest[WARPS][GROUPS]; /* scale of a warp's rows */
    float smallest[WARPS][GROUPS];
    float smallest_yet[GROUPS];                /* of the block's rows */
    unsigned fresh[(HEADS + WARP - 1) / WARP]; /* heads, as bits, that have no R */
    union {
        const uint8_t *entries[KNOWN_TILES][TILE]; /* rows */
        float part_sum[OWNERS * WARPS][HEADS];     /* when all rows have been copied */
    };
    uint64_t turn[LOOK_UP_WARPS];
    uint64_t known[KNOWN_TILES];
    uint64_t read[KNOWN_TILES];
    uint64_t full[STAGES];
    uint64_t empty[STAGES][COPY_WARPS];
    uint64_t rope_empty[Shape::ROPE_STAGES];
    uint64_t weighed;
    uint64_t taken;
    uint64_t together;
    smla_gpu_attend launch;
    piece piece;
    int64_t part; /* where its head 0 is in the workspace, in heads; -1: the block has all of it */
    smla_row rows[2];
    unsigned long long first_fault; /* packed by note_fault; the lowest wins */
    unsigned int faults;
    unsigned int found;          /* valid entries that have their places */
    int known_size[KNOWN_TILES]; /* entries of the tile; 0: there are no more tiles */
    int size[STAGES];
    int moved; /* whether the sums have to be multiplied by `factor` before the tile is added */
    int wild;  /* whether heads have units of their own */
};

/* -------------------------------------------------------------------------- places */

__device__ int group_thread()
{
    return ptx::thread() % ptx::WARPGROUP;
}

__device__ int warp_of_group()
{
    return group_thread() / WARP;
}

__device__ int lane_of_warp()
{
    return ptx::thread() % WARP;
}

/* Of a tile a thread has two rows, 8 apart, and of each two of every eight heads: number
 * 4 j + 2 y + x is of row first_row() + 8 y and head first_head() + 8 j + x. */
template <typename Shared> using tile_numbers = float[Shared::HEADS / 2];

__device__ int first_row()
{
    return warp_of_group() * 16 + lane_of_warp() / QUAD;
}

__device__ int first_head()
{
    return lane_of_warp() % QUAD * 2;
}

/* What is kept of heads, for a thread's pair j of them; `first` is that of first_head(). */
__device__ float2 load_pair(const float *first, int j)
{
    return *reinterpret_cast<const float2 *>(first + 8 * j);
}

/* The scales of a thread's row 0; scale_at has those of its row y. */
template <typename Shared>
__device__ const uint8_t *first_scales(const Shared &shared, unsigned tile)
{
    return &shared.latent[tile % Shared::STAGES][first_row()][SCALES_AT];
}

__device__ float scale_at(const uint8_t *first, int y, int group)
{
    return *reinterpret_cast<const float *>(first + y * 8 * PITCH + group * 4);
}

/* Numbers of each of a lane's heads are joined over the lanes of all rows by halves: a lane gets
 * those of joined_head() and the next. Of fewer than 64 heads several lanes get the same ones:
 * where two are left they stay, joined over the lanes of more rows. */
template <typename Shared> constexpr int SAME_HEADS = 2 * WARP / Shared::HEADS; /* lanes */

template <typename Shared> __device__ int joined_head()
{
    constexpr int SAME_LANES = QUAD * SAME_HEADS<Shared>;
    const int lane = lane_of_warp();
    return lane / SAME_LANES * 8 + lane % QUAD * 2;
}

template <typename Shared> __device__ bool is_first_of_same()
{
    return lane_of_warp() / QUAD % SAME_HEADS<Shared> == 0;
}

template <int mask = WARP / 2, int count, typename Join>
__device__ float2 join_rows(const float (&numbers)[count], const Join &join)
{
    if constexpr (mask < QUAD) {
        return make_float2(numbers[0], numbers[1]);
    } else {
        constexpr bool HALVES = count > 2;
        constexpr int LEFT = HALVES ? count / 2 : count;
        const bool upper = lane_of_warp() & mask;
        float joined[LEFT];
#pragma unroll
        for (int i = 0; i < LEFT; i++) {
            const float other = HALVES ? numbers[count / 2 + i] : numbers[i];
            joined[i] = join(upper ? other : numbers[i],
                             __shfl_xor_sync(ALL_LANES, upper ? numbers[i] : other, mask));
        }
        return join_rows<mask / 2>(joined, join);
    }
}

/* -------------------------------------------------------------------------- copying */

/* The rows of half a tile: all lanes copy the latent numbers of one after another, then each the
 * scales of its own, then eight lanes the rope numbers of a row. Zeros where there is no row. */
template <typename Shared>
__device__ void copy_rows(Shared &shared, unsigned tile, int half, int size)
{
    const int lane = lane_of_warp(), count = size - half * HALF;
    const uint8_t *const *rows = &shared.entries[tile % KNOWN_TILES][half * HALF];
    uint8_t *latent = shared.latent[tile % Shared::STAGES][half * HALF];
#pragma unroll 1
    for (int first = 0; first < HALF; first += Shared::BATCH) {
        const uint8_t *from[Shared::BATCH];
#pragma unroll
        for (int i = 0; i < Shared::BATCH; i++) from[i] = rows[first + i] + lane * 16;
#pragma unroll
        for (int i = 0; i < Shared::BATCH; i++) {
            ptx::copy_16(latent + (first + i) * PITCH + lane * 16, from[i],
                         first + i < count ? 16 : 0);
        }
    }
    ptx::copy_16<SCALES_AT, SCALES_AT>(latent + lane * PITCH, rows[lane], lane < count ? 16 : 0);
    if constexpr (Shared::HAS_ROPE) {
        constexpr int ROWS = WARP / 8; /* at once */
        uint8_t *rope = &shared.rope[tile % Shared::ROPE_STAGES][0][0];
        const int piece = lane % 8;
        const uint8_t *from[HALF / ROWS];
#pragma unroll
        for (int i = 0; i < HALF / ROWS; i++) from[i] = rows[ROWS * i + lane / 8] + piece * 16;
#pragma unroll
        for (int i = 0; i < HALF / ROWS; i++) {
            const int row = ROWS * i + lane / 8;
            ptx::copy_16<0, Shared::ROPE_AT>(rope + swapped(half * HALF + row, piece), from[i],
                                             row < count ? 16 : 0);
        }
    }
}

template <typename Shared> __device__ void copy_tiles(Shared &shared, int half)
{
    copy_all_tiles<Shared::STAGES>(
        shared, half, [] { return lane_of_warp() == 0; },
        [&](int tile, int size) {
            if constexpr (Shared::HAS_ROPE) {
                wait_warp(&shared.rope_empty[tile % Shared::ROPE_STAGES],
                          (tile / Shared::ROPE_STAGES & 1) ^ 1);
            }
            copy_rows(shared, tile, half, size);
        });
}

/* -------------------------------------------------------------------------- the query */

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
 * those of one step, all of which are asked for before the first is looked at. Since a lane of the
 * products has four neighbours of a step's e4m3 numbers, columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9
 * of the operand are numbers 4 c to 4 c + 3. */
template <bool aligned, typename Shared>
__device__ void store_heads(const smla_attend &work, const piece &piece, Shared &shared)
{
    constexpr int WARPS = MULTIPLIERS / WARP, OF_WARP = Shared::HEADS / WARPS;
    constexpr int ROPE_HEADS = WARP / 8; /* of a warp at once */
    constexpr int ROPE_TURNS = (OF_WARP + ROPE_HEADS - 1) / ROPE_HEADS;
    const int lane = threadIdx.x % WARP, warp = (threadIdx.x - GATHERERS) / WARP;
    uint4 pieces[OF_WARP][2], rope[ROPE_TURNS];
#pragma unroll
    for (int i = 0; i < OF_WARP; i++) {
        const int head = min(piece.head + i * WARPS + warp, work.heads - 1);
        const uint16_t *numbers = query_number(work, piece, head, lane * 16);
        pieces[i][0] = load_eight<aligned>(numbers);
        pieces[i][1] = load_eight<aligned>(numbers + 8);
    }
    if (Shared::HAS_ROPE) {
#pragma unroll
        for (int i = 0; i < ROPE_TURNS; i++) {
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
        const uint4 first = scale_piece(pieces[i][0], factor);
        const uint4 second = scale_piece(pieces[i][1], factor);
        store_piece(block, of_block, lane % 4 * 2,
                    make_uint4(first.x, first.z, second.x, second.z));
        store_piece(block, of_block, lane % 4 * 2 + 1,
                    make_uint4(first.y, first.w, second.y, second.w));
        if (lane == 0) shared.query_unit[of_block] = unit;
    }
    if (Shared::HAS_ROPE) {
#pragma unroll
        for (int i = 0; i < ROPE_TURNS; i++) {
            const int of_block = (i * WARPS + warp) * ROPE_HEADS + lane / 8;
            if (of_block >= Shared::HEADS) break;
            store_piece(shared.query[Shared::BLOCKS - 1], of_block, lane % 8, rope[i]);
        }
    }
}

template <typename Shared>
__device__ void store_query(const smla_attend &work, const piece &piece, Shared &shared)
{
    if (is_query_aligned(work, 16)) {
        store_heads<true>(work, piece, shared);
    } else {
        store_heads<false>(work, piece, shared);
    }
    ptx::publish_operands();
}

/* -------------------------------------------------------------------------- scores */

/* The left operands of two products, of their e4m3 numbers. Transposed, a word has two neighbours
 * of each of two entries: they change places, so that an operand's pairs are of one number and two
 * entries. */
template <bool transposed>
__device__ void convert(const uint32_t (&words)[4], uint32_t (&left)[2][4])
{
    constexpr int ROW = transposed ? 2 : 1, PAIR = transposed ? 1 : 2; /* steps to the next */
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int y = 0; y < 2; y++) {
            const uint32_t word = words[2 * i + y];
            uint32_t pairs[2];
            ptx::from_e4m3(pairs, transposed ? __byte_perm(word, 0, 0x3120) : word);
            left[i][y * ROW] = pairs[0];
            left[i][y * ROW + PAIR] = pairs[1];
        }
    }
}

/* Until the values of a tile have been added, behind which so many commits may be under way. */
template <int later, typename Shared> __device__ void end_values(Shared &shared, bool begun)
{
    ptx::wait_products<later>();
    if (begun) ptx::arrive(&shared.taken);
}

/* scores = k * q of a tile, by pairs of steps: the products of one are under way while the next
 * one's numbers become operands; a group's, which share a scale, are added up by themselves. The
 * values of the warpgroup's tile before, if they were begun, end behind the first pair. */
template <typename Shared>
__device__ void multiply_scores(Shared &shared, unsigned tile, bool begun,
                                tile_numbers<Shared> &scores)
{
    constexpr int PAIRS = STEPS / 2, OF_GROUP = PAIRS / GROUPS;
    constexpr int QUERY_BLOCK = sizeof shared.query[0];
    const int lane = lane_of_warp();
    const uint32_t rows = ptx::shared_address(shared.latent[tile % Shared::STAGES]) +
                          (warp_of_group() * 16 + lane % 16) * PITCH + lane / 16 * 16;
    const uint8_t *scales = first_scales(shared, tile);
    const ptx::operand query = ptx::operand_along_k(ptx::shared_address(shared.query));
    tile_numbers<Shared> part;
    uint32_t words[2][4], left[2][2][4]; /* bytes of two pairs; their numbers */
    ptx::load_matrices(words[0], rows);
    ptx::load_matrices(words[1], rows + 32);
    convert<false>(words[0], left[0]);
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
        const int group = pair / OF_GROUP, of_group = pair % OF_GROUP;
        ptx::fence_products();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int step = 2 * pair + i;
            ptx::multiply_left<__half, false>(
                part, left[pair % 2][i],
                query.at(step / K_STEPS * QUERY_BLOCK + step % K_STEPS * K_BYTES),
                of_group > 0 || i > 0);
        }
        ptx::commit_products();
        if (pair + 2 < PAIRS) ptx::load_matrices(words[pair % 2], rows + (pair + 2) * 32);
        if (pair + 1 < PAIRS) {
            if (pair == 0) {
                end_values<1>(shared, begun);
            } else if (of_group > 0) {
                ptx::wait_products<1>();
            }
            convert<false>(words[(pair + 1) % 2], left[(pair + 1) % 2]);
        }
        if (of_group + 1 < OF_GROUP) continue;
        const float scale[2] = {scale_at(scales, 0, group), scale_at(scales, 1, group)};
        ptx::wait_products<0>();
#pragma unroll
        for (int i = 0; i < Shared::HEADS / 2; i++) {
            scores[i] = group == 0 ? part[i] * scale[i / 2 % 2]
                                   : fmaf(part[i], scale[i / 2 % 2], scores[i]);
        }
    }
    if constexpr (Shared::HAS_ROPE) {
        const int lane = lane_of_warp(); /* anew: registers are short */
        const uint32_t first = ptx::shared_address(shared.rope[tile % Shared::ROPE_STAGES]) +
                               swapped(warp_of_group() * 16 + lane % 16, lane / 16);
        uint32_t rope[K_STEPS][4];
#pragma unroll
        for (int step = 0; step < K_STEPS; step++) {
            ptx::load_matrices(rope[step], first ^ step << 5);
        }
        ptx::fence_products();
#pragma unroll
        for (int step = 0; step < K_STEPS; step++) {
            ptx::multiply_left<__nv_bfloat16, false>(
                part, rope[step], query.at(LATENT_BLOCKS * QUERY_BLOCK + step * K_BYTES), step > 0);
        }
        ptx::commit_products();
        ptx::arrive(&shared.rope_empty[tile % Shared::ROPE_STAGES]);
        ptx::wait_products<0>();
    }
    ptx::keep_order();
    const float *units = &shared.query_unit[first_head()];
#pragma unroll
    for (int j = 0; j < Shared::HEADS / 8; j++) {
        const float2 unit = load_pair(units, j);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++) {
            const float of_head = i % 2 ? unit.y : unit.x;
            scores[i] = Shared::HAS_ROPE ? fmaf(scores[i], of_head, part[i]) : scores[i] * of_head;
        }
    }
}

/* -------------------------------------------------------------------------- R and the units */

constexpr float SLACK = 6.0f;              /* of s above R */
constexpr float LARGEST_SCALED = 512.0f;   /* scale * unit: with SLACK w stays below 2^15 */
constexpr float SMALLEST_SCALED = 0x1p-4f; /* where heads share units */

__device__ void sync_own(int own)
{
    sync_roles(BARRIER_MULTIPLY + own, ptx::WARPGROUP);
}

__device__ bool sync_own_or(int own, bool condition)
{
    __syncwarp();
    return ptx::sync_threads_or(BARRIER_MULTIPLY + own, ptx::WARPGROUP, condition);
}

/* The power of two that brings a number to 2^FRESH_WEIGHT or a little more. */
__device__ float unit_for(float number)
{
    return power_of_two(min(max(FRESH_WEIGHT - exponent_of(number), -126), 126));
}

/* The unit that makes up for R's shift, so that the sums may stay as they are. */
__device__ float raise_unit(float unit, float shift)
{
    return power_of_two(min(exponent_of(unit) + (int)fminf(shift, 256.0f), 126));
}

/* The factor of sums whose unit and R have changed. */
__device__ float factor_for(float before, float after, float shift)
{
    return ptx::exp2_fast((float)(exponent_of(after) - exponent_of(before)) - shift);
}

/* The largest number of each head, by warps. */
template <typename Shared, typename Number>
__device__ void store_largest(float (*largest)[Shared::HEADS], const Number &number)
{
    float numbers[Shared::LANE_HEADS];
#pragma unroll
    for (int i = 0; i < Shared::LANE_HEADS; i++) {
        numbers[i] = fmaxf(number(i / 2 * 4 + i % 2, 0), number(i / 2 * 4 + i % 2 + 2, 1));
    }
    const float2 pair = join_rows(numbers, [](float a, float b) { return fmaxf(a, b); });
    if (!is_first_of_same<Shared>()) return;
    *reinterpret_cast<float2 *>(&largest[warp_of_group()][joined_head<Shared>()]) = pair;
}

template <int heads> __device__ float largest_of_warps(const float (*largest)[heads], int head)
{
    float all = -CUDART_INF_F;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) all = fmaxf(all, largest[warp][head]);
    return all;
}

/* The largest and the smallest scale of each group, by warps. */
template <typename Shared>
__device__ void store_scale_range(Shared &shared, unsigned tile, int size)
{
    const uint8_t *scales = first_scales(shared, tile);
    const int lane = lane_of_warp(), row = first_row();
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float largest = 0.0f, smallest = CUDART_INF_F;
#pragma unroll
        for (int y = 0; y < 2; y++) {
            if (row + 8 * y >= size) continue;
            const float scale = fabsf(scale_at(scales, y, g));
            largest = fmaxf(largest, scale);
            smallest = fminf(smallest, scale);
        }
        largest = lanes_max<WARP>(largest);
        smallest = -lanes_max<WARP>(-smallest);
        if (lane == g) {
            shared.largest[warp_of_group()][g] = largest;
            shared.smallest[warp_of_group()][g] = smallest;
        }
    }
}

/* New Rs and units, where those before do not serve the tile; scores are relative to R. Nobody
 * multiplies weights meanwhile: their place is taken for what warps tell one another. */
template <typename Shared>
__device__ void move_references(Shared &shared, unsigned tile, int own, int size,
                                tile_numbers<Shared> &scores, float2 &sums)
{
    constexpr int HEADS = Shared::HEADS;
    const int warp = warp_of_group(), lane = lane_of_warp(), thread = group_thread();
    auto *const largest = reinterpret_cast<float (*)[WARPS][HEADS]>(shared.weight);
    store_largest<Shared>(largest[0], [&](int i, int) { return scores[i]; });
    store_scale_range(shared, tile, size);
    sync_own(own);

    float shift = 0.0f, smallest_yet[GROUPS], common[GROUPS]; /* units that heads would share */
    bool fresh = false, wild = shared.wild;
    if (thread < HEADS) {
        const float top = largest_of_warps(largest[0], thread), before = shared.reference[thread];
        fresh = shared.fresh[warp] >> lane & 1;
        const bool moves = top > (fresh ? -CUDART_INF_F : 0.0f);
        const unsigned still_fresh = __ballot_sync(Shared::HEAD_LANES, fresh && !moves);
        __syncwarp(Shared::HEAD_LANES); /* all have read what one writes */
        if (lane == 0) shared.fresh[warp] = still_fresh;
        if (moves) {
            shared.reference[thread] = before + top;
            shift = before + top - before;
        }
        shared.shift[thread] = shift;
        shared.drop[thread] = fresh ? 1.0f : ptx::exp2_fast(-shift); /* there is nothing to drop */
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            float largest_scale = 0.0f;
            smallest_yet[g] = shared.smallest_yet[g];
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                largest_scale = fmaxf(largest_scale, shared.largest[w][g]);
                smallest_yet[g] = fminf(smallest_yet[g], shared.smallest[w][g]);
            }
            common[g] = shared.unit[g][thread];
            if (largest_scale * common[g] > LARGEST_SCALED) common[g] = unit_for(largest_scale);
            wild |= smallest_yet[g] * common[g] < SMALLEST_SCALED;
        }
    }
    wild = sync_own_or(own, wild);
    if (thread == 0) {
        shared.wild = wild;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) shared.smallest_yet[g] = smallest_yet[g];
    }
    if (!wild && thread < HEADS) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const float unit = shared.unit[g][thread];
            shared.factor[g][thread] = fresh ? 1.0f : factor_for(unit, common[g], shift);
            shared.unit[g][thread] = common[g];
        }
    }
    const float2 drop = *reinterpret_cast<const float2 *>(&shared.drop[joined_head<Shared>()]);
    sums.x *= drop.x;
    sums.y *= drop.y;
    const float *shifts = &shared.shift[first_head()];
#pragma unroll
    for (int j = 0; j < Shared::HEADS / 8; j++) {
        const float2 of_heads = load_pair(shifts, j);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++) scores[i] -= i % 2 ? of_heads.y : of_heads.x;
    }
    if (wild) {
        const uint8_t *scales = first_scales(shared, tile);
#pragma unroll 1
        for (int g = 0; g < GROUPS; g++) {
            store_largest<Shared>(largest[1 + g], [&](int i, int y) {
                return ptx::exp2_fast(scores[i]) * fabsf(scale_at(scales, y, g));
            });
        }
        sync_own(own);
        if (thread < HEADS) {
#pragma unroll 1
            for (int g = 0; g < GROUPS; g++) {
                const float weight = largest_of_warps(largest[1 + g], thread);
                const float unit = shared.unit[g][thread];
                const float kept = fresh ? LARGEST_POWER : raise_unit(unit, shift);
                const float next = weight * kept > LARGEST_WEIGHT ? unit_for(weight) : kept;
                shared.unit[g][thread] = next;
                shared.factor[g][thread] = fresh ? 1.0f : factor_for(unit, next, shift);
            }
        }
    }
    sync_own(own);
}

/* -------------------------------------------------------------------------- weights */

/* Until both warpgroups have multiplied the weights of the tile before. */
template <typename Shared> __device__ void wait_for_values(Shared &shared, unsigned tile)
{
    wait_warp(&shared.taken, (tile & 1) ^ 1);
}

/* Where the weights of a group begin: in a block of their own, or beside those of others. */
template <typename Shared> __device__ constexpr int weights_at(int group)
{
    return group / Shared::GROUPS_OF_BLOCK * WEIGHT_BLOCK +
           group % Shared::GROUPS_OF_BLOCK * Shared::HEADS * 2;
}

/* w of a tile, an operand for each group. */
template <bool wild, typename Shared>
__device__ void store_weights(Shared &shared, unsigned tile, const tile_numbers<Shared> &weights)
{
    constexpr int CUT_BITS = 13; /* of a float32 fraction, that float16 does not have */
    const int lane = lane_of_warp(), warp = warp_of_group();
    const uint32_t turns = (tile * TILE + first_row()) * TURN;
    const uint32_t raise[2] = {turns >> (32 - CUT_BITS), (turns + 8 * TURN) >> (32 - CUT_BITS)};
    const uint32_t to = ptx::shared_address(shared.weight) +
                        swapped(warp * 16 + lane % 16, lane / 16);
    const uint8_t *scales = first_scales(shared, tile);
    const auto factor_of = [&](int y, int g) {
        return scale_at(scales, y, g) * (wild ? 1.0f : shared.unit[g][0]);
    };
    float next[2] = {factor_of(0, 0), factor_of(1, 0)};
#pragma unroll 1
    for (int g = 0; g < GROUPS; g++) {
        const float factor[2] = {next[0], next[1]};
        const float *units = &shared.unit[g][first_head()];
        const int place = weights_at<Shared>(g), piece = place % ROW_BYTES; /* swapped as well */
        next[0] = factor_of(0, (g + 1) % GROUPS);
        next[1] = factor_of(1, (g + 1) % GROUPS);
#pragma unroll
        for (int i = 0; i < Shared::HEADS / 16; i++) {
            uint32_t words[4];
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const int j = 2 * i + w / 2, y = w % 2;
                const float2 unit = wild ? load_pair(units, j) : float2{1.0f, 1.0f};
                const auto raised = [&](float number) {
                    return __uint_as_float(__float_as_uint(number) + raise[y]);
                };
                const float *pair = &weights[4 * j + 2 * y];
                words[w] = ptx::cut(
                    raised(wild ? pair[0] * factor[y] * unit.x : pair[0] * factor[y]),
                    raised(wild ? pair[1] * factor[y] * unit.y : pair[1] * factor[y]));
            }
            ptx::store_matrices((to ^ i << 5 ^ piece) + place - piece, words);
        }
    }
    ptx::publish_operands();
}

/* Scores -> weights of a tile of the warpgroup's own, for both. `sums` are those of weights of
 * joined_head() and the next over the warp's rows. */
template <typename Shared>
__device__ void weigh(const smla_attend &work, Shared &shared, unsigned tile, int own,
                      tile_numbers<Shared> &scores, float2 &sums)
{
    const int size = shared.size[tile % Shared::STAGES], row = first_row();
    float factor = work.softmax_scale * LOG2_E;
    if (__builtin_expect(work.logit_cap > 0.0f, false)) {
        const float inverse = work.softmax_scale / work.logit_cap;
#pragma unroll
        for (int i = 0; i < Shared::HEADS / 2; i++) {
            scores[i] = work.logit_cap * tanhf(scores[i] * inverse);
        }
        factor = LOG2_E;
    }
    if (size < TILE) {
#pragma unroll
        for (int i = 0; i < Shared::HEADS / 2; i++) {
            if (row + i / 2 % 2 * 8 >= size) scores[i] = -CUDART_INF_F;
        }
    }
    float largest = -CUDART_INF_F;
    const float *references = &shared.reference[first_head()];
#pragma unroll
    for (int j = 0; j < Shared::HEADS / 8; j++) {
        const float2 reference = load_pair(references, j);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++) {
            scores[i] = fmaf(scores[i], factor, -(i % 2 ? reference.y : reference.x));
            largest = fmaxf(largest, scores[i]);
        }
    }
    /* of a row's groups each lane of a quad looks at one */
    static_assert(GROUPS == QUAD, "one each");
    const int group = lane_of_warp() % QUAD;
    const uint8_t *scales = first_scales(shared, tile);
    const float unit = shared.unit[group][0];
    float largest_scale = 0.0f, smallest_scale = CUDART_INF_F;
#pragma unroll
    for (int y = 0; y < 2; y++) {
        const float scaled = fabsf(scale_at(scales, y, group)) * unit;
        largest_scale = fmaxf(largest_scale, scaled);
        smallest_scale = fminf(smallest_scale, row + 8 * y < size ? scaled : CUDART_INF_F);
    }
    /* max_logits are Rs, which then have to be the largest scores */
    const float slack = work.max_logits.dtype == SMLA_DTYPE_NONE ? SLACK : 0.0f;
    unsigned any_fresh = 0;
#pragma unroll
    for (const unsigned fresh : shared.fresh) any_fresh |= fresh;
    const bool moves = shared.wild || any_fresh != 0 || largest > slack ||
                       largest_scale > LARGEST_SCALED || smallest_scale < SMALLEST_SCALED;
    const bool moved = sync_own_or(own, moves);
    if (__builtin_expect(moved, false)) {
        wait_for_values(shared, tile);
        move_references(shared, tile, own, size, scores, sums);
    }
#pragma unroll
    for (int i = 0; i < Shared::HEADS / 2; i++) scores[i] = ptx::exp2_fast(scores[i]);
    wait_for_values(shared, tile);
    if (group_thread() == 0) shared.moved = moved;
    if (__builtin_expect(moved && shared.wild, false)) {
        store_weights<true>(shared, tile, scores);
    } else {
        store_weights<false>(shared, tile, scores);
    }
    ptx::arrive(&shared.weighed);
    float numbers[Shared::LANE_HEADS];
#pragma unroll
    for (int i = 0; i < Shared::LANE_HEADS; i++) {
        numbers[i] = scores[i / 2 * 4 + i % 2] + scores[i / 2 * 4 + i % 2 + 2];
    }
    const float2 sum = join_rows(numbers, [](float a, float b) { return a + b; });
    sums.x += sum.x;
    sums.y += sum.y;
}

/* -------------------------------------------------------------------------- values */

/* Block 2 g + s of the warpgroup's sums has the value numbers from 128 g + 32 * warp + 16 s on:
 * row y of a thread number 2 (lane / 4) + y of them. */
template <typename Shared> using value_sums = float[2 * OF_HALF][Shared::HEADS / 2];

/* The sums so far become ones of the new Rs and units. */
template <typename Shared>
__device__ void rescale(const Shared &shared, unsigned tile, int own, value_sums<Shared> &values,
                        float2 &sums)
{
#pragma unroll
    for (int g = 0; g < OF_HALF; g++) {
        const float *factors = &shared.factor[own * OF_HALF + g][first_head()];
#pragma unroll
        for (int j = 0; j < Shared::HEADS / 8; j++) {
            const float2 factor = load_pair(factors, j);
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; i++) {
                values[2 * g][i] *= i % 2 ? factor.y : factor.x;
                values[2 * g + 1][i] *= i % 2 ? factor.y : factor.x;
            }
        }
    }
    if (tile % OWNERS == own) return; /* whose sums of weights have been */
    const float2 drop = *reinterpret_cast<const float2 *>(&shared.drop[joined_head<Shared>()]);
    sums.x *= drop.x;
    sums.y *= drop.y;
}

/* Begins to add the values of a tile to the warpgroup's half of the numbers of out, a chunk's of
 * one group after another: the products of one are under way while the next one's numbers become
 * operands. Half of the stage is given back when its bytes have been read. */
template <typename Shared>
__device__ void begin_values(Shared &shared, unsigned tile, int own, value_sums<Shared> &values,
                             float2 &sums)
{
    constexpr int TURNS = CHUNKS * OF_HALF;
    const int stage = tile % Shared::STAGES, lane = lane_of_warp();
    wait_warp(&shared.weighed, tile & 1);
    if (__builtin_expect(shared.moved, false)) rescale(shared, tile, own, values, sums);
    const uint32_t rows = ptx::shared_address(shared.latent[stage]) + lane % 16 * PITCH +
                          own * (LATENT / OWNERS) + warp_of_group() * 32 + lane / 16 * 16;
    const ptx::operand weight = ptx::operand_across_k<WEIGHT_BLOCK>(
        ptx::shared_address(shared.weight) + weights_at<Shared>(own * OF_HALF));
    uint32_t words[2][4], left[2][2][4]; /* bytes of two turns; their numbers */
    ptx::load_transposed(words[0], rows);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        const int chunk = turn / OF_HALF, g = turn % OF_HALF, next = turn + 1;
        if (next < TURNS) {
            ptx::load_transposed(words[next % 2],
                                 rows + next / OF_HALF * (CHUNK * PITCH) + next % OF_HALF * 128);
        }
        if (turn >= 2) ptx::wait_products<1>();
        convert<true>(words[turn % 2], left[turn % 2]);
        ptx::fence_products();
#pragma unroll
        for (int i = 0; i < 2; i++) {
            ptx::multiply_left<__half, true>(
                values[2 * g + i], left[turn % 2][i],
                weight.at(weights_at<Shared>(g) + chunk * CHUNK * ROW_BYTES), true);
        }
        ptx::commit_products();
        if (next == TURNS / 2) ptx::arrive(&shared.empty[stage][0]);
    }
    ptx::arrive(&shared.empty[stage][1]);
}

/* The work of one of the two warpgroups that multiply, by pairs of tiles: one of the other's and
 * the next, its own, whose scores it makes while the other weighs. The values of its own tile end
 * behind the first products of the next pair. */
template <typename Shared>
__device__ void multiply_tiles(const smla_attend &work, Shared &shared, int own,
                               value_sums<Shared> &values, float2 &sums)
{
    const auto size_of = [&](unsigned tile) {
        wait_warp(&shared.full[tile % Shared::STAGES], tile / Shared::STAGES & 1);
        return shared.size[tile % Shared::STAGES];
    };
    tile_numbers<Shared> scores;
#pragma unroll 1
    for (int tile = own - 1;; tile += OWNERS) { /* the other's */
        const bool theirs = tile >= 0 && size_of(tile) > 0, mine = size_of(tile + 1) > 0;
        if (mine) {
            multiply_scores(shared, tile + 1, tile > 0, scores);
        } else {
            end_values<0>(shared, tile > 0);
        }
        if (theirs) {
            begin_values(shared, tile, own, values, sums);
            end_values<0>(shared, true);
        }
        if (!mine) break;
        weigh(work, shared, tile + 1, own, scores, sums);
        begin_values(shared, tile + 1, own, values, sums);
    }
}

/* -------------------------------------------------------------------------- results */

constexpr int OUT_PITCH = LATENT + 4; /* numbers: lanes of half a warp have banks of their own */

/* Sums of values and of weights go to shared memory, where the operands were. */
template <typename Shared>
__device__ void gather_sums(Shared &shared, int own, const value_sums<Shared> &values,
                            const float2 &sums)
{
    static_assert(Shared::HEADS * OUT_PITCH * 4 <= offsetof(Shared, query_unit), "operands");
    const int lane = lane_of_warp();
    float *const to = reinterpret_cast<float *>(&shared) + first_head() * OUT_PITCH +
                      own * (LATENT / OWNERS) + warp_of_group() * 32 + lane / QUAD * 2;
    if (is_first_of_same<Shared>()) {
        float *part_sum = shared.part_sum[own * WARPS + warp_of_group()];
        *reinterpret_cast<float2 *>(&part_sum[joined_head<Shared>()]) = sums;
    }
#pragma unroll
    for (int block = 0; block < 2 * OF_HALF; block++) {
#pragma unroll
        for (int i = 0; i < Shared::LANE_HEADS; i++) {
            const int first = i / 2 * 4 + i % 2;
            *reinterpret_cast<float2 *>(to + (i / 2 * 8 + i % 2) * OUT_PITCH + block / 2 * 128 +
                                        block % 2 * 16) = make_float2(values[block][first],
                                                                      values[block][first + 2]);
        }
    }
}

/* Largest score and sum of every head, and the factors of its sums of values. */
template <typename Shared>
__device__ void finish_heads(const smla_gpu_attend &launch, Shared &shared)
{
    constexpr float LN_2 = 0.693147180559945f;
    const int of_block = threadIdx.x - GATHERERS;
    if (of_block >= Shared::HEADS) return;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < OWNERS * WARPS; warp++) sum += shared.part_sum[warp][of_block];
    const float reference = shared.reference[of_block];
    const float largest = sum == 0.0f ? -CUDART_INF_F : reference * LN_2;
    /* from weights relative to R to weights relative to what of it a score can be */
    float factor = sum == 0.0f ? 0.0f : ptx::exp2_fast(fmaf(-largest, LOG2_E, reference));
    factor *= finish_head_of_block(launch, shared, of_block, largest, sum * factor);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        shared.factor[g][of_block] = factor * power_of_two(-exponent_of(shared.unit[g][of_block]));
    }
}

/* -------------------------------------------------------------------------- the kernel */

/* Until all threads that multiply have come here, as they have `times` times before. Not by a
 * numbered barrier: racecheck loses sight of threads at those, see docs/performance.md. */
template <int times, typename Shared> __device__ void sync_multipliers(Shared &shared)
{
    ptx::arrive(&shared.together);
    wait_warp(&shared.together, times % 2);
}

template <typename Shared> __device__ void init_barriers(Shared &shared)
{
    for (int stage = 0; stage < Shared::STAGES; stage++) {
        ptx::init_phases(&shared.full[stage], 2 * COPY_WARPS * WARP);
        for (int half = 0; half < COPY_WARPS; half++) {
            ptx::init_phases(&shared.empty[stage][half], MULTIPLIERS);
        }
    }
    for (int stage = 0; stage < Shared::ROPE_STAGES; stage++) {
        ptx::init_phases(&shared.rope_empty[stage], ptx::WARPGROUP);
    }
    ptx::init_phases(&shared.weighed, ptx::WARPGROUP);
    ptx::init_phases(&shared.taken, MULTIPLIERS);
    ptx::init_phases(&shared.together, MULTIPLIERS);
    init_look_up(shared);
}

/* No head has an R, no sum a unit. */
template <typename Shared> __device__ void init_references(Shared &shared)
{
    const int thread = threadIdx.x;
    if (thread < Shared::HEADS) {
        shared.reference[thread] = 0.0f;
        for (int g = 0; g < GROUPS; g++) shared.unit[g][thread] = LARGEST_POWER;
    }
    if (thread < sizeof shared.fresh / sizeof *shared.fresh) {
        shared.fresh[thread] = Shared::HEAD_LANES;
    }
    if (thread < GROUPS) shared.smallest_yet[thread] = CUDART_INF_F;
    if (thread == 0) shared.wild = 0;
}

template <int d_qk, int heads, int shared_bytes>
__device__ void attend(const smla_gpu_attend &parameters)
{
    using Shared = shared_state<shape<d_qk, heads>>;
    static_assert(sizeof(Shared) == shared_bytes, "sm90_kernels.h");
    static_assert(shared_bytes + 1024 <= 227 * 1024, "what Hopper gives a block");
    extern __shared__ __align__(1024) unsigned char operands[];
    Shared &shared = *reinterpret_cast<Shared *>(operands);

    ptx::allow_next_launch();
    copy_parameters(parameters, shared.launch);
    if (threadIdx.x == 0) init_barriers(shared);
    init_references(shared);
    __syncthreads();
    const smla_gpu_attend &launch = shared.launch;
    const smla_attend &work = launch.work;
    const block_piece taken = take_piece(launch, blockIdx.x, heads);
    const piece &piece = taken.piece;
    if (threadIdx.x == 0) {
        shared.piece = piece;
        shared.part = taken.part;
    }
    if (threadIdx.x < GATHERERS) {
        ptx::keep_registers<Shared::GATHER_REGISTERS>();
        gather<Shared>(launch, piece, shared, [&](int half) { copy_tiles(shared, half); });
    } else {
        ptx::take_registers<Shared::MULTIPLY_REGISTERS>();
        ptx::wait_for_last_launch(); /* it may still write q */
        const int own = __shfl_sync(ALL_LANES, (int)threadIdx.x / ptx::WARPGROUP, 0) - 1;
        store_query(work, piece, shared);
        sync_multipliers<0>(shared);
        float2 sums = {};
        value_sums<Shared> values;
#pragma unroll
        for (int block = 0; block < 2 * OF_HALF; block++) {
#pragma unroll
            for (int i = 0; i < heads / 2; i++) values[block][i] = 0.0f;
        }
        multiply_tiles(work, shared, own, values, sums);
        sync_multipliers<1>(shared);
        gather_sums(shared, own, values, sums);
        sync_multipliers<2>(shared);
        finish_heads(launch, shared);
        sync_multipliers<3>(shared);
        store_results<heads, OUT_PITCH>(
            launch, shared, [&](int group, int head) { return shared.factor[group][head]; });
    }
    __syncthreads(); /* nobody leaves while others still wait at a barrier */
    if (threadIdx.x == 0) report_noted(launch, shared);
}

} // namespace packed
