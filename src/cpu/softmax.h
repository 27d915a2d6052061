/* What a tile kernel does once it has scores: the exponentials, the running maximum and sum, the
 * joining of two partial results, and the output's rounding.
 *
 * One tile changes a head's state (peak m, sum l, values o) to
 *     m' = max(m, max_j s_j)    decay = exp(m - m')    l' = l * decay + sum_j exp(s_j - m')
 * A peak of -inf, which only scores that overflowed can leave, is replaced by 0 where it would be
 * subtracted. A NaN score passes by the maximum and reaches the sum and the values through its
 * exponential. */
#ifndef SMLA_SOFTMAX_H
#define SMLA_SOFTMAX_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>

#include "simd.h"
#include "tile.h"

static inline int32_t round_up(int32_t number, int32_t multiple)
{
    return (number + multiple - 1) / multiple * multiple;
}

/* exp(x) for x <= 0 to within 1 unit in the last place; 0 from -88 on, where it is subnormal. */
static inline vec vec_exp(vec x)
{
    const vec round = vec_set(0x1.8p23f); /* adding it leaves an integer in the low bits */
    x = vec_max(vec_set(-88.0f), x);
    const vec top = vec_fma(x, vec_set(0x1.715476p+0f), round);
    const vec n = vec_sub(top, round);
    /* x - n ln 2, with ln 2 in two pieces of which n times the first is exact */
    vec r = vec_fma(n, vec_set(-0x1.62e4p-1f), x);
    r = vec_fma(n, vec_set(-0x1.7f7d1cp-20f), r);
    vec p = vec_set(0x1.6a234ep-10f);
    p = vec_fma(p, r, vec_set(0x1.123a6cp-7f));
    p = vec_fma(p, r, vec_set(0x1.5558f4p-5f));
    p = vec_fma(p, r, vec_set(0x1.55549p-3f));
    p = vec_fma(p, r, vec_set(0x1.fffffcp-2f));
    p = vec_fma(vec_mul(p, r), r, r);
    return vec_mul(vec_add(p, vec_set(1.0f)), vec_power(top));
}

/* tanh(x) to 2^-22 relative: an odd polynomial near 0, elsewhere from exp(-2|x|). */
static inline vec vec_tanh(vec x)
{
    const vec magnitude = vec_abs(x);
    const vec square = vec_mul(x, x);
    vec p = vec_set(-0x1.6970f2p-8f);
    p = vec_fma(p, square, vec_set(0x1.4f5eeep-6f));
    p = vec_fma(p, square, vec_set(-0x1.b7cffp-5f));
    p = vec_fma(p, square, vec_set(0x1.1103f2p-3f));
    p = vec_fma(p, square, vec_set(-0x1.555524p-2f));
    const vec near = vec_fma(vec_mul(p, square), x, x);
    const vec e = vec_exp(vec_mul(magnitude, vec_set(-2.0f)));
    const vec one = vec_set(1.0f);
    const vec far = vec_sign(vec_div(vec_sub(one, e), vec_add(one, e)), x);
    return vec_less(magnitude, vec_set(0.625f), near, far);
}

/* Scores as dot products -> scaled, capped, -inf past `count`. Returns their maximum. */
static inline float finish_scores(const struct smla_tile *tile, float *scores, int32_t count)
{
    const vec scale = vec_set(tile->softmax_scale);
    const vec cap = vec_set(tile->logit_cap);
    const int32_t vectors = round_up(count, LANES);
    for (int32_t j = 0; j < vectors; j += LANES)
        vec_store(scores + j, vec_mul(vec_load(scores + j), scale));
    if (tile->logit_cap > 0.0f)
        for (int32_t j = 0; j < vectors; j += LANES)
            vec_store(scores + j, vec_mul(cap, vec_tanh(vec_div(vec_load(scores + j), cap))));
    for (int32_t j = count; j < vectors; j++) scores[j] = -INFINITY;

    vec largest = vec_set(-INFINITY);
    for (int32_t j = 0; j < vectors; j += LANES) largest = vec_max(vec_load(scores + j), largest);
    return vec_largest(largest);
}

/* Scores -> exp(score - base) in their place, with what follows for `part` and tile->decay. */
static inline void softmax(struct smla_tile *tile, struct smla_part *part, int32_t count)
{
    const bool first = part->entries == 0;
    for (int32_t h = 0; h < tile->heads; h++) {
        const float before = first ? -INFINITY : part->peak[h];
        const float here = finish_scores(tile, tile->scores + h * SMLA_TILE_ENTRIES, count);
        const float peak = here > before ? here : before;
        part->peak[h] = peak;
        tile->base[h] = peak == -INFINITY ? 0.0f : peak;
        tile->decay[h] = before - tile->base[h];
    }
    for (int32_t h = 0; h < tile->heads; h += LANES)
        vec_store(tile->decay + h, vec_exp(vec_load(tile->decay + h)));

    for (int32_t h = 0; h < tile->heads; h++) {
        float *weights = tile->scores + h * SMLA_TILE_ENTRIES;
        const vec base = vec_set(tile->base[h]);
        vec sum = vec_zero();
        for (int32_t j = 0; j < count; j += LANES) {
            const vec weight = vec_exp(vec_sub(vec_load(weights + j), base));
            vec_store(weights + j, weight);
            sum = vec_add(sum, weight);
        }
        part->sum[h] = first ? vec_sum(sum) : part->sum[h] * tile->decay[h] + vec_sum(sum);
    }
}

static void fold(const struct smla_tile *tile, struct smla_part *total,
                 const struct smla_part *part, int32_t heads)
{
    for (int32_t h = 0; h < heads; h++) {
        const float peak = part->peak[h] > total->peak[h] ? part->peak[h] : total->peak[h];
        const float base = peak == -INFINITY ? 0.0f : peak;
        float factors[LANES] = {total->peak[h] - base, part->peak[h] - base};
        vec_store(factors, vec_exp(vec_load(factors)));
        const vec ours = vec_set(factors[0]), theirs = vec_set(factors[1]);
        float *values = total->values + (ptrdiff_t)h * tile->value_pitch;
        const float *others = part->values + (ptrdiff_t)h * tile->value_pitch;
        for (int32_t d = 0; d < tile->value_depth; d += LANES)
            vec_store(values + d,
                      vec_fma(vec_load(values + d), ours, vec_mul(vec_load(others + d), theirs)));
        total->sum[h] = total->sum[h] * factors[0] + part->sum[h] * factors[1];
        total->peak[h] = peak;
    }
    total->entries += part->entries;
}

/* -------------------------------------------------------------------------- output */

static inline uint16_t round_bfloat16(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    const uint32_t rounded = bits + 0x7FFF + (bits >> 16 & 1);
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16 | 0x40) : rounded >> 16);
}

static void store(const float *numbers, float factor, int32_t width, enum smla_dtype dtype,
                  void *out)
{
    if (dtype == SMLA_FLOAT32) {
        float *to = out;
        for (int32_t d = 0; d < width; d++) to[d] = numbers[d] * factor;
    } else if (dtype == SMLA_BFLOAT16) {
        uint16_t *to = out;
        for (int32_t d = 0; d < width; d++) to[d] = round_bfloat16(numbers[d] * factor);
    } else {
        uint16_t *to = out;
        int32_t d = 0;
#if defined(__F16C__)
        for (; d + 8 <= width; d += 8)
            _mm_storeu_si128(
                (__m128i *)(to + d),
                _mm256_cvtps_ph(_mm256_mul_ps(_mm256_loadu_ps(numbers + d), _mm256_set1_ps(factor)),
                                _MM_FROUND_TO_NEAREST_INT));
#endif
        for (; d < width; d++) to[d] = smla_to_half(numbers[d] * factor);
    }
}

#endif
