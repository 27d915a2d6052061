/* The tile kernel, compiled once for each instruction set with SMLA_TILE_KERNEL as the name of what
 * it exports.
 *
 * Rows are gathered and converted once for all heads of the tile. Scores are dot products of
 * SCORE_HEADS queries with SCORE_KEYS keys at a time; values are sums over the tile's entries of
 * VALUE_HEADS x VALUE_SPAN vectors at a time. Either block fills the registers, and what is read
 * again for the next one stays in the first-level cache. */
#include "rows.h"
#include "softmax.h"

/* How many of `left` rows the next block takes, of at most `most`: two middling blocks rather than
 * a full one and a small one. */
static inline int32_t block_size(int32_t left, int32_t most)
{
    if (left >= 2 * most) return most;
    return left > most ? (left + 1) / 2 : left;
}

/* -------------------------------------------------------------------------- cache row -> float32
 */

typedef vec reader(const uint8_t *bytes);

static inline vec read_float32(const uint8_t *bytes)
{
    vec numbers;
    memcpy(&numbers, bytes, sizeof numbers);
    return numbers;
}

/* `width` numbers of `size` bytes each; inlined, so that `read` is not a call. */
INLINE void convert(reader *read, int32_t size, const uint8_t *from, int32_t width, float scale,
                    bool scaled, float *to)
{
    const vec factor = vec_set(scale);
    int32_t d = 0;
    for (; d + LANES <= width; d += LANES) {
        const vec numbers = read(from + (ptrdiff_t)d * size);
        vec_store(to + d, scaled ? vec_mul(numbers, factor) : numbers);
    }
    if (d < width) {
        uint8_t rest[LANES * sizeof(float)] = {0};
        float numbers[LANES];
        memcpy(rest, from + (ptrdiff_t)d * size, (size_t)((width - d) * size));
        vec_store(numbers, scaled ? vec_mul(read(rest), factor) : read(rest));
        memcpy(to + d, numbers, (size_t)(width - d) * sizeof(float));
    }
}

static void convert_dense(enum smla_dtype dtype, const uint8_t *from, int32_t width, float *to)
{
    if (dtype == SMLA_FLOAT32)
        convert(read_float32, 4, from, width, 1.0f, false, to);
    else if (dtype == SMLA_BFLOAT16)
        convert(vec_from_bfloat16, 2, from, width, 1.0f, false, to);
    else
        convert(vec_from_half, 2, from, width, 1.0f, false, to);
}

/* One group of e4m3 numbers times its scale, each product rounded once. NaN, and scales that 2^8
 * times would be infinite, are rare: they are done one by one. */
static void convert_group(const uint8_t *from, int32_t width, float scale, bool any_nan, float *to)
{
    const float factor = scale * 256.0f;
    if (isfinite(factor) && !any_nan)
        convert(vec_from_e4m3, 1, from, width, factor, true, to);
    else
        for (int32_t d = 0; d < width; d++) to[d] = smla_from_e4m3(from[d]) * scale;
}

/* The first `width` numbers of a cache row, or some more. */
static void convert_row(const struct smla_tile *tile, const uint8_t *row, int32_t width, float *key)
{
    const struct smla_format_info *format = tile->format;
    if (format->scale == SMLA_SCALE_NONE) {
        convert_dense(tile->dtype, row, width, key);
        return;
    }
    const bool any_nan = any_nan_e4m3(row, format->quantised);
    for (int32_t group = 0; group * format->group < format->quantised; group++) {
        const int32_t d = group * format->group;
        convert_group(row + d, format->group, group_scale(tile, row, group), any_nan, key + d);
    }
    if (width > format->quantised)
        convert_dense(SMLA_BFLOAT16, row + format->rope_offset, format->rope,
                      key + format->quantised);
}

/* -------------------------------------------------------------------------- scores */

#if defined(__AVX512BF16__)
#include "scores_bfloat16.h"
#else
#include "scores_float32.h"
#endif

/* -------------------------------------------------------------------------- gather */

/* Rows that fill the last block of scores up are zero: they are multiplied, too. */
static void gather(struct smla_tile *tile, const uint8_t *const *rows, int32_t count, int32_t known)
{
    for (int32_t j = 0; j < count; j++) {
        prefetch_ahead(tile, rows, j, known);
        load_key(tile, rows[j], j);
    }
    for (int32_t j = count; j < round_up(count, SCORE_KEYS); j++) clear_key(tile, j);
}

/* -------------------------------------------------------------------------- values */

/* The sums so far are needed only at the end, but then at once: they are asked for here. */
INLINE void value_block(const struct smla_tile *tile, const struct smla_part *part, int32_t head,
                        int32_t first, int32_t count, const int32_t heads, const int32_t span)
{
    const float *value = tile->keys + first;
    const float *weights = tile->scores + head * SMLA_TILE_ENTRIES;
    vec sum[VALUE_HEADS][VALUE_SPAN];
    UNROLL (h, heads) {
        const float *values = part->values + (ptrdiff_t)(head + h) * tile->value_pitch + first;
        for (int32_t i = 0; i < span * LANES; i += 16) __builtin_prefetch(values + i, 1);
        UNROLL (i, span) sum[h][i] = vec_zero();
    }
#pragma GCC unroll 2
    for (int32_t j = 0; j < count; j++, value += tile->pitch) {
        vec v[VALUE_SPAN];
        UNROLL (i, span) v[i] = vec_load(value + i * LANES);
        UNROLL (h, heads) {
            const vec weight = vec_set(weights[h * SMLA_TILE_ENTRIES + j]);
            UNROLL (i, span) sum[h][i] = vec_fma(weight, v[i], sum[h][i]);
        }
    }
    UNROLL (h, heads) {
        float *values = part->values + (ptrdiff_t)(head + h) * tile->value_pitch + first;
        const vec decay = vec_set(tile->decay[head + h]);
        UNROLL (i, span) {
            vec total = sum[h][i];
            if (part->entries) total = vec_fma(vec_load(values + i * LANES), decay, total);
            vec_store(values + i * LANES, total);
        }
    }
}

INLINE void value_heads(const struct smla_tile *tile, const struct smla_part *part, int32_t first,
                        int32_t count, const int32_t span)
{
    for (int32_t head = 0, heads; head < tile->heads; head += heads) {
        heads = block_size(tile->heads - head, VALUE_HEADS);
#define CASE(n)                                                                                    \
    case n:                                                                                        \
        if (n <= VALUE_HEADS) value_block(tile, part, head, first, count, n, span);                \
        break
        switch (heads) {
            CASE(1);
            CASE(2);
            CASE(3);
            CASE(4);
            CASE(5);
            CASE(6);
        }
#undef CASE
    }
}

/* A slice of all entries' values is read again for every block of heads: it stays in the cache. */
static void add_values(const struct smla_tile *tile, const struct smla_part *part, int32_t count)
{
    for (int32_t first = 0, span; first < tile->value_depth; first += span * LANES) {
        span = block_size((tile->value_depth - first) / LANES, VALUE_SPAN);
#define CASE(n)                                                                                    \
    case n:                                                                                        \
        if (n <= VALUE_SPAN) value_heads(tile, part, first, count, n);                             \
        break
        switch (span) {
            CASE(1);
            CASE(2);
            CASE(3);
            CASE(4);
        }
#undef CASE
    }
}

static void attend(struct smla_tile *tile, struct smla_part *part, const uint8_t *const *rows,
                   int32_t count, int32_t known)
{
    gather(tile, rows, count, known);
    add_scores(tile, count);
    softmax(tile, part, count);
    add_values(tile, part, count);
    part->entries += count;
}

const struct smla_tile_kernel SMLA_TILE_KERNEL = {
    .granule = PAIRS ? 2 * LANES : LANES,
    .entries = SMLA_TILE_ENTRIES,
    .pairs = PAIRS,
    .query = load_query,
    .attend = attend,
    .fold = fold,
    .store = store,
    .multiply = multiply,
};
