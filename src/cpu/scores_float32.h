/* Scores in float32: the part of tile.c in which kernels with and without a bfloat16 dot product
 * differ. Queries and keys are float32; a key's first numbers are its values. */

static void load_query(const struct smla_tile *tile, int32_t head, int32_t first, int32_t width,
                       const uint8_t *numbers)
{
    convert_dense(tile->dtype, numbers, width,
                  (float *)tile->query + (ptrdiff_t)head * tile->pitch + first);
}

static void load_key(struct smla_tile *tile, const uint8_t *row, int32_t entry)
{
    convert_row(tile, row, tile->d_qk, tile->keys + (ptrdiff_t)entry * tile->pitch);
}

static void clear_key(struct smla_tile *tile, int32_t entry)
{
    memset(tile->keys + (ptrdiff_t)entry * tile->pitch, 0, (size_t)tile->depth * sizeof(float));
}

/* Queries [head, head + heads) times keys [entry, entry + SCORE_KEYS). */
INLINE void score_block(const struct smla_tile *tile, int32_t head, int32_t entry,
                        const int32_t heads)
{
    const ptrdiff_t pitch = tile->pitch;
    const float *query = (const float *)tile->query + head * pitch;
    const float *key = tile->keys + entry * pitch;
    vec sum[SCORE_HEADS][SCORE_KEYS];
    UNROLL (h, heads) {
        UNROLL (j, SCORE_KEYS) sum[h][j] = vec_zero();
    }
#pragma GCC unroll 2
    for (int32_t d = 0; d < tile->depth; d += LANES) {
        vec q[SCORE_HEADS];
        UNROLL (h, heads) q[h] = vec_load(query + h * pitch + d);
        UNROLL (j, SCORE_KEYS) {
            const vec k = vec_load(key + j * pitch + d);
            UNROLL (h, heads) sum[h][j] = vec_fma(q[h], k, sum[h][j]);
        }
    }
    UNROLL (h, heads)
        vec_sum4(sum[h][0], sum[h][1], sum[h][2], sum[h][3],
                 tile->scores + (head + h) * SMLA_TILE_ENTRIES + entry);
}

static void add_scores(const struct smla_tile *tile, int32_t count)
{
    for (int32_t head = 0, heads; head < tile->heads; head += heads) {
        heads = block_size(tile->heads - head, SCORE_HEADS);
#define CASE(n)                                                                                    \
    case n:                                                                                        \
        if (n <= SCORE_HEADS)                                                                      \
            for (int32_t j = 0; j < count; j += SCORE_KEYS) score_block(tile, head, j, n);         \
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

static double multiply(int32_t rounds)
{
    enum { CHAINS = SCORE_HEADS * SCORE_KEYS };
    volatile float start = 1.0f, factor = 0.5f;
    const vec a = vec_set(factor);
    vec sum[CHAINS];
    for (int32_t i = 0; i < CHAINS; i++) sum[i] = vec_set(start);
    for (int32_t round = 0; round < rounds; round++)
        _Pragma("GCC unroll 24") for (int32_t i = 0; i < CHAINS; i++)
            sum[i] = vec_fma(sum[i], a, a);
    for (int32_t i = 1; i < CHAINS; i++) sum[0] = vec_add(sum[0], sum[i]);
    start = vec_sum(sum[0]);
    return (double)rounds * CHAINS * LANES;
}

enum { PAIRS = false };
