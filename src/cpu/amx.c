/* The tile kernel of CPUs with AMX, for bfloat16 queries: both products by tile instructions, which
 * multiply 16 x 32 by 32 x 16 bfloat16 numbers into float32.
 *
 * Scores are keys times queries, so that a vector holds one entry's scores of 16 heads and the
 * softmax is vertical. Keys are gathered row by row, 32 at a time, and are a left operand as they
 * lie; queries, the right operand, have their numbers 2i and 2i + 1 of 16 heads side by side, once
 * for a task. Of packed rows, the scale of each group multiplies its part of a score in float32.
 *
 * The values of a block of entries are weights times values. Values, the right operand now, have
 * entries 2i and 2i + 1 side by side, once for all heads. One bfloat16 number would not do for a
 * weight: all copies of an entry that a row names several times would err alike. So a weight is the
 * sum of two, 16 bits, after it has been multiplied by the scale of the values' group.
 *
 * Tile instructions flush subnormal numbers. That loses at most what is smaller than 2^-126 in a
 * query, a key or a value, and the second term of a weight below 2^-118. */
#include "amx.h"

#include <float.h>

#include "rows.h"
#include "softmax.h"

enum {
    ENTRIES = 128, /* of a block: whole steps */
    STEP = 32,     /* bfloat16 numbers of a tile's row; entries that are gathered at once */
    STEPS = ENTRIES / STEP, /* of a block */
    SIDE = 16,              /* a tile's rows, and float32 numbers of its row; heads of a group */
    TILE = SIDE * STEP,     /* bfloat16 numbers of a tile */
    LINE = 64,              /* bytes of a tile's row */
};

/* What a thread keeps beside struct smla_tile; behind it lie arrays whose sizes follow from the
 * call: queries, values, scores. */
struct own {
    /* Left operands of two groups of heads: (16 heads, 32 entries), rounded down, and the rest. */
    uint16_t weights[SMLA_TILE_GROUPS][STEPS][2][2][TILE];
    float turned[SIDE][STEP];      /* weights by heads, then entries */
    float sums[2][4][SIDE * SIDE]; /* of two blocks: one is written, one is read */
    float scales[SMLA_TILE_GROUPS][ENTRIES];
};

static int32_t head_groups(const struct smla_tile *tile)
{
    return round_up(tile->heads, SIDE) / SIDE;
}

/* (groups, depth / 32) right operands: (16 pairs of numbers, 16 heads). */
static uint16_t *queries_of(const struct smla_tile *tile, int32_t group)
{
    return (uint16_t *)((struct own *)tile->own + 1) + (ptrdiff_t)group * SIDE * tile->depth;
}

/* (value_depth / 32, STEPS, 2) right operands: (16 pairs of entries, 16 numbers), in the order in
 * which they are read. */
static uint16_t *values_of(const struct smla_tile *tile, int32_t first)
{
    return queries_of(tile, head_groups(tile)) + (ptrdiff_t)first * ENTRIES;
}

/* (groups, ENTRIES, 16 heads), then the weights exp(score - base). */
static float *scores_of(const struct smla_tile *tile, int32_t group)
{
    return (float *)values_of(tile, tile->value_depth) + (ptrdiff_t)group * ENTRIES * SIDE;
}

static size_t own_bytes(const struct smla_tile *tile)
{
    const size_t heads = (size_t)head_groups(tile) * SIDE;
    return sizeof(struct own) + heads * (size_t)tile->depth * sizeof(uint16_t) +
           (size_t)ENTRIES * (size_t)tile->value_depth * sizeof(uint16_t) +
           heads * ENTRIES * sizeof(float);
}

/* -------------------------------------------------------------------------- queries */

static void load_query(const struct smla_tile *tile, int32_t head, int32_t first, int32_t width,
                       const uint8_t *numbers)
{
    memcpy((uint16_t *)tile->query + (ptrdiff_t)head * tile->pair_pitch + first, numbers,
           (size_t)width * sizeof(uint16_t));
}

/* Rows and columns of 16 x 16 numbers of 32 bits change places. */
INLINE void transpose(vec a[SIDE])
{
    vec b[SIDE];
    UNROLL (i, SIDE / 2) {
        b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    vec c[SIDE];
    UNROLL (i, SIDE / 2) {
        const int32_t at = i / 2 * 4 + i % 2;
        const __m512d left = _mm512_castps_pd(b[at]), right = _mm512_castps_pd(b[at + 2]);
        c[i / 2 * 4 + i % 2 * 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(left, right));
        c[i / 2 * 4 + i % 2 * 2 + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(left, right));
    }
    UNROLL (i, SIDE / 4) {
        const vec low = _mm512_shuffle_f32x4(c[i], c[4 + i], 0x44);
        const vec high = _mm512_shuffle_f32x4(c[i], c[4 + i], 0xEE);
        const vec next_low = _mm512_shuffle_f32x4(c[8 + i], c[12 + i], 0x44);
        const vec next_high = _mm512_shuffle_f32x4(c[8 + i], c[12 + i], 0xEE);
        a[i] = _mm512_shuffle_f32x4(low, next_low, 0x88);
        a[4 + i] = _mm512_shuffle_f32x4(low, next_low, 0xDD);
        a[8 + i] = _mm512_shuffle_f32x4(high, next_high, 0x88);
        a[12 + i] = _mm512_shuffle_f32x4(high, next_high, 0xDD);
    }
}

/* All heads of the task are there: pairs of their numbers become rows. Heads that fill the last
 * group up are zero. */
static void turn_queries(const struct smla_tile *tile)
{
    for (int32_t group = 0; group < head_groups(tile); group++) {
        uint16_t *to = queries_of(tile, group);
        for (int32_t d = 0; d < tile->depth; d += STEP, to += TILE) {
            vec pairs[SIDE];
            for (int32_t i = 0; i < SIDE; i++) {
                const int32_t head = group * SIDE + i;
                const uint16_t *from = (const uint16_t *)tile->query +
                                       (ptrdiff_t)head * tile->pair_pitch + d;
                pairs[i] = head < tile->heads ? _mm512_loadu_ps(from) : vec_zero();
            }
            transpose(pairs);
            UNROLL (i, SIDE) _mm512_storeu_ps(to + i * STEP, pairs[i]);
        }
    }
}

/* -------------------------------------------------------------------------- gather */

/* The keys of a step, whose first entry is the block's `first`; `count` are left of the block. Rows
 * that fill the step up are zero: they are multiplied, too. */
static void gather(const struct smla_tile *tile, const uint8_t *const *rows, int32_t first,
                   int32_t count, int32_t known)
{
    struct own *own = tile->own;
    const bool packed = tile->format->scale != SMLA_SCALE_NONE;
    const int32_t groups = packed ? groups_of(tile) : 0;
    uint16_t *key = tile->pairs;
    for (int32_t j = 0; j < STEP; j++, key += tile->pair_pitch) {
        if (j < count) {
            prefetch_ahead(tile, rows, j, known);
            read_pairs(tile, rows[j], key);
        } else {
            memset(key, 0, (size_t)tile->depth * sizeof(uint16_t));
        }
        for (int32_t group = 0; group < groups; group++)
            own->scales[group][first + j] = j < count ? scale_of(tile, rows[j], group) : 0.0f;
    }
}

/* The values of the keys, two entries side by side. */
static void pair_values(const struct smla_tile *tile, int32_t step)
{
    /* Unpacking works inside 16 bytes: so that it leaves the numbers in their order, their fours go
     * there by turns. */
    const __m512i turns = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
    for (int32_t i = 0; i < SIDE; i++) {
        const uint16_t *even = tile->pairs + (ptrdiff_t)2 * i * tile->pair_pitch;
        const uint16_t *odd = even + tile->pair_pitch;
        uint16_t *to = values_of(tile, 0) + (ptrdiff_t)step * 2 * TILE + i * STEP;
        for (int32_t d = 0; d < tile->value_depth; d += WIDE, to += STEPS * 2 * TILE) {
            const __m512i a = _mm512_permutexvar_epi64(turns, _mm512_loadu_si512(even + d));
            const __m512i b = _mm512_permutexvar_epi64(turns, _mm512_loadu_si512(odd + d));
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(a, b));
            _mm512_storeu_si512(to + TILE, _mm512_unpackhi_epi16(a, b));
        }
    }
}

/* -------------------------------------------------------------------------- scores */

/* Registers 0 to 3 become the products of numbers [first, end) of the 32 keys with those of one or
 * two groups of queries: the first 16 keys with each, then the others. */
INLINE void multiply_keys(const struct smla_tile *tile, int32_t group, int32_t first, int32_t end,
                          const bool two)
{
    const int64_t pitch = tile->pair_pitch * (int64_t)sizeof(uint16_t);
    const uint16_t *key = tile->pairs + first, *further = key + SIDE * tile->pair_pitch;
    const uint16_t *query = queries_of(tile, group) + (ptrdiff_t)first * SIDE;
    const uint16_t *next = queries_of(tile, group + 1) + (ptrdiff_t)first * SIDE;
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int32_t d = first; d < end; d += STEP) {
        tile_load(4, key, pitch);
        tile_load(6, query, LINE);
        tile_dot(0, 4, 6);
        tile_load(5, further, pitch);
        tile_dot(2, 5, 6);
        if (two) {
            tile_load(7, next, LINE);
            tile_dot(1, 4, 7);
            tile_dot(3, 5, 7);
        }
        key += STEP;
        further += STEP;
        query += TILE;
        next += TILE;
    }
}

/* Scores of entries [entry, entry + 32) of the block for one or two groups of heads. */
INLINE void dense_scores(const struct smla_tile *tile, int32_t group, int32_t entry, const bool two)
{
    float *scores = scores_of(tile, group) + entry * SIDE;
    multiply_keys(tile, group, 0, tile->depth, two);
    tile_store(0, scores, LINE);
    tile_store(2, scores + SIDE * SIDE, LINE);
    if (two) {
        tile_store(1, scores + ENTRIES * SIDE, LINE);
        tile_store(3, scores + (ENTRIES + SIDE) * SIDE, LINE);
    }
}

/* Scores of 16 entries, from `entry` on, and 16 heads += their part from one group of numbers. */
INLINE void add_part(const float *part, const float *scales, bool first, float *scores)
{
    UNROLL (j, SIDE) {
        const vec scaled = vec_mul(vec_load(part + j * SIDE), vec_set(scales[j]));
        const vec sum = first ? scaled : vec_add(vec_load(scores + j * SIDE), scaled);
        vec_store(scores + j * SIDE, sum);
    }
}

/* While one group of numbers is multiplied, the sums of the one before are read. */
INLINE void packed_scores(const struct smla_tile *tile, int32_t group, int32_t entry,
                          const bool two)
{
    struct own *own = tile->own;
    const int32_t parts = groups_of(tile);
    for (int32_t i = 0, first = 0; i <= parts; i++) {
        if (i < parts) {
            const int32_t end = group_end(tile, i);
            float (*sums)[SIDE * SIDE] = own->sums[i % 2];
            multiply_keys(tile, group, first, end, two);
            tile_store(0, sums[0], LINE);
            tile_store(2, sums[2], LINE);
            if (two) {
                tile_store(1, sums[1], LINE);
                tile_store(3, sums[3], LINE);
            }
            first = end;
        }
        if (i > 0) {
            float (*sums)[SIDE * SIDE] = own->sums[(i - 1) % 2];
            const float *scales = own->scales[i - 1] + entry;
            for (int32_t t = 0; t < 4; t++) {
                if (t % 2 && !two) continue;
                float *scores = scores_of(tile, group + t % 2) + (entry + t / 2 * SIDE) * SIDE;
                add_part(sums[t], scales + t / 2 * SIDE, i == 1, scores);
            }
        }
    }
}

static void add_scores(const struct smla_tile *tile, int32_t entry)
{
    const int32_t groups = head_groups(tile);
    const bool packed = tile->format->scale != SMLA_SCALE_NONE;
    for (int32_t group = 0; group < groups; group += 2) {
        const bool two = group + 1 < groups;
        if (packed && two)
            packed_scores(tile, group, entry, true);
        else if (packed)
            packed_scores(tile, group, entry, false);
        else if (two)
            dense_scores(tile, group, entry, true);
        else
            dense_scores(tile, group, entry, false);
    }
}

/* -------------------------------------------------------------------------- weights */

/* Scores of 16 heads -> exp(score - base) in their place, up to the end of the last step, with what
 * follows for `part` and tile->decay: softmax in softmax.h, for heads side by side. */
static void weigh(struct smla_tile *tile, struct smla_part *part, int32_t group, int32_t count)
{
    float *scores = scores_of(tile, group);
    const int32_t head = group * SIDE;
    const vec scale = vec_set(tile->softmax_scale), cap = vec_set(tile->logit_cap);
    const bool first = part->entries == 0;
    const vec before = first ? vec_set(-INFINITY) : vec_load(part->peak + head);
    vec peak = before;
    for (int32_t j = 0; j < count; j++) {
        vec score = vec_mul(vec_load(scores + j * SIDE), scale);
        if (tile->logit_cap > 0.0f) score = vec_mul(cap, vec_tanh(vec_div(score, cap)));
        vec_store(scores + j * SIDE, score);
        peak = vec_max(score, peak);
    }
    const vec base = vec_less(peak, vec_set(-FLT_MAX), vec_zero(), peak);
    const vec decay = vec_exp(vec_sub(before, base));
    vec sum = vec_zero();
    for (int32_t j = 0; j < count; j++) {
        const vec weight = vec_exp(vec_sub(vec_load(scores + j * SIDE), base));
        vec_store(scores + j * SIDE, weight);
        sum = vec_add(sum, weight);
    }
    for (int32_t j = count; j < round_up(count, STEP); j++)
        vec_store(scores + j * SIDE, vec_zero());
    vec_store(part->peak + head, peak);
    vec_store(tile->decay + head, decay);
    vec_store(part->sum + head, first ? sum : vec_fma(vec_load(part->sum + head), decay, sum));
}

/* A weight's upper bits, which are a bfloat16 number, and the rest. */
static inline vec upper_bits(vec weight)
{
    const __m512i mask = _mm512_set1_epi32((int32_t)0xFFFF0000);
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(weight), mask));
}

static inline void store_pairs(uint16_t *to, vec first, vec second)
{
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

/* Groups of numbers whose values have a scale of their own. */
static int32_t value_scales(const struct smla_tile *tile)
{
    const int32_t group = tile->format->group;
    return group ? round_up(tile->value_depth, group) / group : 1;
}

/* Weights of 16 heads -> left operands in two terms, for the first or the second group of heads of
 * a block. */
static void split_weights(const struct smla_tile *tile, int32_t group, int32_t steps)
{
    struct own *own = tile->own;
    const bool packed = tile->format->scale != SMLA_SCALE_NONE;
    const float *weights = scores_of(tile, group);
    for (int32_t step = 0; step < steps; step++, weights += STEP * SIDE) {
        for (int32_t half = 0; half < STEP; half += SIDE) {
            vec turned[SIDE];
            UNROLL (j, SIDE) turned[j] = vec_load(weights + (half + j) * SIDE);
            transpose(turned);
            UNROLL (h, SIDE) vec_store(own->turned[h] + half, turned[h]);
        }
        for (int32_t i = 0; i < value_scales(tile); i++) {
            uint16_t (*terms)[2][TILE] = own->weights[i][step];
            const float *scales = own->scales[i] + step * STEP;
            for (int32_t h = 0; h < SIDE; h++) {
                vec first = vec_load(own->turned[h]), second = vec_load(own->turned[h] + SIDE);
                if (packed) {
                    first = vec_mul(first, vec_load(scales));
                    second = vec_mul(second, vec_load(scales + SIDE));
                }
                const vec upper = upper_bits(first), next = upper_bits(second);
                store_pairs(terms[0][group % 2] + h * STEP, upper, next);
                store_pairs(terms[1][group % 2] + h * STEP, vec_sub(first, upper),
                            vec_sub(second, next));
            }
        }
    }
}

/* -------------------------------------------------------------------------- values */

/* Numbers [first, first + 32) of the values of one or two groups of heads, summed over the block:
 * (16 heads, 32 numbers) for each. */
INLINE void multiply_values(const struct smla_tile *tile, int32_t first, int32_t steps, float *sums,
                            const bool two)
{
    enum { PITCH = 2 * LINE };
    struct own *own = tile->own;
    const int32_t group = tile->format->group;
    uint16_t (*weights)[2][2][TILE] = own->weights[group ? first / group : 0];
    const uint16_t *value = values_of(tile, first);
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int32_t step = 0; step < steps; step++, value += 2 * TILE) {
        tile_load(6, value, LINE);
        tile_load(7, value + TILE, LINE);
        for (int32_t term = 0; term < 2; term++) {
            tile_load(4, weights[step][term][0], LINE);
            tile_dot(0, 4, 6);
            tile_dot(1, 4, 7);
            if (two) {
                tile_load(5, weights[step][term][1], LINE);
                tile_dot(2, 5, 6);
                tile_dot(3, 5, 7);
            }
        }
    }
    tile_store(0, sums, PITCH);
    tile_store(1, sums + SIDE, PITCH);
    if (two) {
        tile_store(2, sums + STEP * SIDE, PITCH);
        tile_store(3, sums + STEP * SIDE + SIDE, PITCH);
    }
}

/* Adds what multiply_values has summed to the heads from `head` on. */
static void add_sums(const struct smla_tile *tile, const struct smla_part *part, int32_t head,
                     int32_t first, const float *sums)
{
    const int32_t left = tile->heads - head, heads = left < 2 * SIDE ? left : 2 * SIDE;
    for (int32_t h = 0; h < heads; h++, sums += STEP) {
        float *values = part->values + (ptrdiff_t)(head + h) * tile->value_pitch + first;
        const vec decay = vec_set(tile->decay[head + h]);
        for (int32_t d = 0; d < STEP; d += LANES) {
            vec total = vec_load(sums + d);
            if (part->entries) total = vec_fma(vec_load(values + d), decay, total);
            vec_store(values + d, total);
        }
    }
}

/* While some numbers are multiplied, the sums of those before are added. */
INLINE void value_block(const struct smla_tile *tile, const struct smla_part *part, int32_t group,
                        int32_t steps, const bool two)
{
    struct own *own = tile->own;
    for (int32_t i = 0; i * STEP <= tile->value_depth; i++) {
        if (i * STEP < tile->value_depth)
            multiply_values(tile, i * STEP, steps, own->sums[i % 2][0], two);
        if (i > 0) add_sums(tile, part, group * SIDE, (i - 1) * STEP, own->sums[(i - 1) % 2][0]);
    }
}

/* -------------------------------------------------------------------------- the kernel */

static void attend(struct smla_tile *tile, struct smla_part *part, const uint8_t *const *rows,
                   int32_t count, int32_t known)
{
    const int32_t groups = head_groups(tile), steps = round_up(count, STEP) / STEP;
    tiles_begin();
    for (int32_t entry = 0; entry < count; entry += STEP) {
        gather(tile, rows + entry, entry, count - entry, known - entry);
        pair_values(tile, entry / STEP);
        add_scores(tile, entry);
    }
    for (int32_t group = 0; group < groups; group += 2) {
        const bool two = group + 1 < groups;
        for (int32_t i = group; i < group + 1 + two; i++) {
            weigh(tile, part, i, count);
            split_weights(tile, i, steps);
        }
        if (two)
            value_block(tile, part, group, steps, true);
        else
            value_block(tile, part, group, steps, false);
    }
    tiles_end();
    part->entries += count;
}

/* The unit is busy with a product for 16 cycles: fewer rounds take as long as other kernels' do. */
static double multiply(int32_t rounds)
{
    enum { CHAINS = 4, CYCLES = 16 };
    uint16_t numbers[TILE];
    for (int32_t i = 0; i < TILE; i++) numbers[i] = smla_to_bfloat16(0.5f);
    tiles_begin();
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    tile_load(4, numbers, LINE);
    tile_load(5, numbers, LINE);
    tile_load(6, numbers, LINE);
    tile_load(7, numbers, LINE);
    const int32_t repeats = rounds / CYCLES;
    for (int32_t i = 0; i < repeats; i++) {
        tile_dot(0, 4, 6);
        tile_dot(1, 4, 7);
        tile_dot(2, 5, 6);
        tile_dot(3, 5, 7);
    }
    tiles_end();
    return (double)repeats * CHAINS * TILE * SIDE;
}

const struct smla_tile_kernel smla_tile_amx = {
    .granule = WIDE,
    .entries = ENTRIES,
    .pairs = true,
    .own_bytes = own_bytes,
    .query = load_query,
    .begin = turn_queries,
    .attend = attend,
    .fold = fold,
    .store = store,
    .multiply = multiply,
};
