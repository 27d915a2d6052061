/* Scores from the bfloat16 dot product: what takes the place of scores_float32.h on CPUs with
 * AVX512_BF16, for bfloat16 queries. Products of two pairs are summed in float32.
 *
 * Queries and dense keys are taken as they are. A packed row's scales multiply each group's part of
 * a score in float32. Values stay float32: weights rounded to bfloat16 would err alike in all
 * copies of an entry that a row names several times. */

enum { PAIRS = true };

/* Heads of a block of packed rows, which needs registers for a group's sums beside the whole's. */
enum { PACKED_HEADS = 3 };

static uint16_t *query_of(const struct smla_tile *tile, int32_t head)
{
    return (uint16_t *)tile->query + (ptrdiff_t)head * tile->pair_pitch;
}

static uint16_t *pairs_of(const struct smla_tile *tile, int32_t entry)
{
    return tile->pairs + (ptrdiff_t)entry * tile->pair_pitch;
}

static void load_query(const struct smla_tile *tile, int32_t head, int32_t first, int32_t width,
                       const uint8_t *numbers)
{
    memcpy(query_of(tile, head) + first, numbers, (size_t)width * sizeof(uint16_t));
}

static void load_key(struct smla_tile *tile, const uint8_t *row, int32_t entry)
{
    convert_row(tile, row, tile->d_v, tile->keys + (ptrdiff_t)entry * tile->pitch);
    read_pairs(tile, row, pairs_of(tile, entry));
    if (tile->format->scale == SMLA_SCALE_NONE) return;
    for (int32_t group = 0; group < groups_of(tile); group++)
        tile->scales[group][entry] = scale_of(tile, row, group);
}

static void clear_key(struct smla_tile *tile, int32_t entry)
{
    memset(pairs_of(tile, entry), 0, (size_t)tile->depth * sizeof(uint16_t));
    for (int32_t group = 0; group < groups_of(tile); group++) tile->scales[group][entry] = 0.0f;
}

static inline __m512bh load_pairs(const uint16_t *numbers)
{
    return (__m512bh)_mm512_loadu_si512(numbers);
}

INLINE void clear_sums(vec sum[][SCORE_KEYS], const int32_t heads)
{
    UNROLL (h, heads) {
        UNROLL (j, SCORE_KEYS) sum[h][j] = vec_zero();
    }
}

/* Adds the products of numbers [first, end). */
INLINE void multiply_pairs(const struct smla_tile *tile, int32_t head, int32_t entry, int32_t first,
                           int32_t end, vec sum[][SCORE_KEYS], const int32_t heads)
{
    const ptrdiff_t pitch = tile->pair_pitch;
    const uint16_t *query = query_of(tile, head), *key = pairs_of(tile, entry);
    for (int32_t d = first; d < end; d += WIDE) {
        __m512bh k[SCORE_KEYS];
        UNROLL (j, SCORE_KEYS) k[j] = load_pairs(key + j * pitch + d);
        UNROLL (h, heads) {
            const __m512bh q = load_pairs(query + h * pitch + d);
            UNROLL (j, SCORE_KEYS) sum[h][j] = _mm512_dpbf16_ps(sum[h][j], q, k[j]);
        }
    }
}

INLINE void store_sums(const struct smla_tile *tile, int32_t head, int32_t entry,
                       vec sum[][SCORE_KEYS], const int32_t heads)
{
    UNROLL (h, heads)
        vec_sum4(sum[h][0], sum[h][1], sum[h][2], sum[h][3],
                 tile->scores + (head + h) * SMLA_TILE_ENTRIES + entry);
}

INLINE void dense_block(const struct smla_tile *tile, int32_t head, int32_t entry,
                        const int32_t heads)
{
    vec sum[SCORE_HEADS][SCORE_KEYS];
    clear_sums(sum, heads);
    multiply_pairs(tile, head, entry, 0, tile->depth, sum, heads);
    store_sums(tile, head, entry, sum, heads);
}

INLINE void packed_block(const struct smla_tile *tile, int32_t head, int32_t entry,
                         const int32_t heads)
{
    vec sum[PACKED_HEADS][SCORE_KEYS], part[PACKED_HEADS][SCORE_KEYS];
    clear_sums(sum, heads);
    for (int32_t group = 0, first = 0; group < groups_of(tile); group++) {
        const int32_t end = group_end(tile, group);
        clear_sums(part, heads);
        multiply_pairs(tile, head, entry, first, end, part, heads);
        UNROLL (j, SCORE_KEYS) {
            const vec scale = vec_set(tile->scales[group][entry + j]);
            UNROLL (h, heads) sum[h][j] = vec_fma(part[h][j], scale, sum[h][j]);
        }
        first = end;
    }
    store_sums(tile, head, entry, sum, heads);
}

static void add_dense(const struct smla_tile *tile, int32_t count)
{
    for (int32_t head = 0, heads; head < tile->heads; head += heads) {
        heads = block_size(tile->heads - head, SCORE_HEADS);
#define CASE(n)                                                                                    \
    case n:                                                                                        \
        for (int32_t j = 0; j < count; j += SCORE_KEYS) dense_block(tile, head, j, n);             \
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

static void add_packed(const struct smla_tile *tile, int32_t count)
{
    for (int32_t head = 0, heads; head < tile->heads; head += heads) {
        heads = block_size(tile->heads - head, PACKED_HEADS);
#define CASE(n)                                                                                    \
    case n:                                                                                        \
        for (int32_t j = 0; j < count; j += SCORE_KEYS) packed_block(tile, head, j, n);            \
        break
        switch (heads) {
            CASE(1);
            CASE(2);
            CASE(3);
        }
#undef CASE
    }
}

static void add_scores(const struct smla_tile *tile, int32_t count)
{
    if (tile->format->scale == SMLA_SCALE_NONE)
        add_dense(tile, count);
    else
        add_packed(tile, count);
}

static double multiply(int32_t rounds)
{
    enum { CHAINS = SCORE_HEADS * SCORE_KEYS };
    volatile float start = 1.0f, factor = 0.5f;
    const __m512bh a = (__m512bh)_mm512_castps_si512(vec_set(factor));
    vec sum[CHAINS];
    for (int32_t i = 0; i < CHAINS; i++) sum[i] = vec_set(start);
    for (int32_t round = 0; round < rounds; round++)
        _Pragma("GCC unroll 24") for (int32_t i = 0; i < CHAINS; i++)
            sum[i] = _mm512_dpbf16_ps(sum[i], a, a);
    for (int32_t i = 1; i < CHAINS; i++) sum[0] = vec_add(sum[0], sum[i]);
    start = vec_sum(sum[0]);
    return (double)rounds * CHAINS * WIDE;
}
