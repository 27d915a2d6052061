/* Vectors of float32 for the tile kernel: one type and a dozen operations, once for each
 * instruction set that the file which includes this is compiled for.
 *
 * vec_max(a, b) is b wherever a or b is NaN: a running maximum in b passes over a NaN in a, and a
 * constant in a leaves a NaN in b as it is. */
#ifndef SMLA_SIMD_H
#define SMLA_SIMD_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define UNROLL(i, count) _Pragma("GCC unroll 8") for (int32_t i = 0; i < (count); i++)
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)

enum { LANES = 16 };
/* Registers of a block: accumulators of HEADS x KEYS scores, of HEADS x SPAN vectors of values. */
enum { SCORE_HEADS = 6, SCORE_KEYS = 4, VALUE_HEADS = 6, VALUE_SPAN = 4 };

typedef __m512 vec;

#define vec_zero _mm512_setzero_ps
#define vec_set _mm512_set1_ps
#define vec_load _mm512_loadu_ps
#define vec_store _mm512_storeu_ps
#define vec_add _mm512_add_ps
#define vec_sub _mm512_sub_ps
#define vec_mul _mm512_mul_ps
#define vec_div _mm512_div_ps
#define vec_max _mm512_max_ps
#define vec_fma _mm512_fmadd_ps
#define vec_sum _mm512_reduce_add_ps

static inline float vec_largest(vec a)
{
    return _mm512_reduce_max_ps(a);
}

/* 2^n, for the n that sits in the low bits of a float (see vec_exp); 0 for n = -127. */
static inline vec vec_power(vec n)
{
    __m512i bits = _mm512_slli_epi32(_mm512_castps_si512(n), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(127 << 23)));
}

static inline vec vec_abs(vec a)
{
    return _mm512_abs_ps(a);
}

/* The magnitude of a, the sign of b. */
static inline vec vec_sign(vec a, vec b)
{
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(sign, _mm512_castps_si512(b), _mm512_castps_si512(a), 0xCA));
}

/* a where x < y, elsewhere b. */
static inline vec vec_less(vec x, vec y, vec a, vec b)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
}

/* The sums of four vectors into four numbers. */
static inline void vec_sum4(vec a, vec b, vec c, vec d, float *sums)
{
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44),
                                     _mm512_shuffle_ps(ab, cd, 0xEE));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

static inline vec vec_from_bfloat16(const uint8_t *bytes)
{
    const __m256i half = _mm256_loadu_si256((const __m256i *)bytes);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline vec vec_from_half(const uint8_t *bytes)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)bytes));
}

/* e4m3 numbers times 2^-8, but for 0x7F and 0xFF: a byte's bits one place from where a float16 of
 * that value has them, subnormals included. Shifted as a signed number it has its sign twice. */
static inline vec vec_from_e4m3(const uint8_t *bytes)
{
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)bytes));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(-0x4080));
    return _mm512_cvtph_ps(half);
}

#elif defined(__AVX2__)

enum { LANES = 8 };
enum { SCORE_HEADS = 3, SCORE_KEYS = 4, VALUE_HEADS = 4, VALUE_SPAN = 3 };

typedef __m256 vec;

#define vec_zero _mm256_setzero_ps
#define vec_set _mm256_set1_ps
#define vec_load _mm256_loadu_ps
#define vec_store _mm256_storeu_ps
#define vec_add _mm256_add_ps
#define vec_sub _mm256_sub_ps
#define vec_mul _mm256_mul_ps
#define vec_div _mm256_div_ps
#define vec_max _mm256_max_ps
#define vec_fma _mm256_fmadd_ps

static inline float vec_sum(vec a)
{
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

static inline float vec_largest(vec a)
{
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

/* 2^n, for the n that sits in the low bits of a float (see vec_exp); 0 for n = -127. */
static inline vec vec_power(vec n)
{
    __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(127 << 23)));
}

static inline vec vec_abs(vec a)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}

/* The magnitude of a, the sign of b. */
static inline vec vec_sign(vec a, vec b)
{
    return _mm256_blendv_ps(vec_abs(a), _mm256_or_ps(a, _mm256_set1_ps(-0.0f)), b);
}

/* a where x < y, elsewhere b. */
static inline vec vec_less(vec x, vec y, vec a, vec b)
{
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
}

/* The sums of four vectors into four numbers. */
static inline void vec_sum4(vec a, vec b, vec c, vec d, float *sums)
{
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

static inline vec vec_from_bfloat16(const uint8_t *bytes)
{
    const __m128i half = _mm_loadu_si128((const __m128i *)bytes);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

static inline vec vec_from_half(const uint8_t *bytes)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)bytes));
}

/* e4m3 numbers times 2^-8, but for 0x7F and 0xFF: a byte's bits one place from where a float16 of
 * that value has them, subnormals included. Shifted as a signed number it has its sign twice. */
static inline vec vec_from_e4m3(const uint8_t *bytes)
{
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)bytes));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(-0x4080));
    return _mm256_cvtph_ps(half);
}

#else /* the compiler's own vectors of 16 bytes: SSE2, NEON, or whatever else there is */

enum { LANES = 4 };
enum { SCORE_HEADS = 2, SCORE_KEYS = 4, VALUE_HEADS = 4, VALUE_SPAN = 2 };

typedef float vec __attribute__((vector_size(16)));
typedef uint32_t bits4 __attribute__((vector_size(16)));

static inline vec vec_set(float a)
{
    return (vec){a, a, a, a};
}

static inline vec vec_zero(void)
{
    return vec_set(0.0f);
}

static inline vec vec_load(const float *numbers)
{
    vec a;
    memcpy(&a, numbers, sizeof a);
    return a;
}

static inline void vec_store(float *numbers, vec a)
{
    memcpy(numbers, &a, sizeof a);
}

static inline vec vec_add(vec a, vec b)
{
    return a + b;
}

static inline vec vec_sub(vec a, vec b)
{
    return a - b;
}

static inline vec vec_mul(vec a, vec b)
{
    return a * b;
}

static inline vec vec_div(vec a, vec b)
{
    return a / b;
}

static inline vec vec_fma(vec a, vec b, vec c)
{
    return a * b + c;
}

/* a where x < y, elsewhere b. */
static inline vec vec_less(vec x, vec y, vec a, vec b)
{
    const bits4 mask = (bits4)(x < y);
    return (vec)((mask & (bits4)a) | (~mask & (bits4)b));
}

static inline vec vec_max(vec a, vec b)
{
    return vec_less(b, a, a, b);
}

static inline float vec_sum(vec a)
{
    return (a[0] + a[2]) + (a[1] + a[3]);
}

static inline float vec_largest(vec a)
{
    const float left = a[0] > a[2] ? a[0] : a[2];
    const float right = a[1] > a[3] ? a[1] : a[3];
    return left > right ? left : right;
}

/* 2^n, for the n that sits in the low bits of a float (see vec_exp); 0 for n = -127. */
static inline vec vec_power(vec n)
{
    return (vec)(((bits4)n << 23) + (127u << 23));
}

static inline vec vec_abs(vec a)
{
    return (vec)((bits4)a & 0x7FFFFFFFu);
}

/* The magnitude of a, the sign of b. */
static inline vec vec_sign(vec a, vec b)
{
    return (vec)(((bits4)a & 0x7FFFFFFFu) | ((bits4)b & 0x80000000u));
}

/* The sums of four vectors into four numbers. */
static inline void vec_sum4(vec a, vec b, vec c, vec d, float *sums)
{
    sums[0] = vec_sum(a);
    sums[1] = vec_sum(b);
    sums[2] = vec_sum(c);
    sums[3] = vec_sum(d);
}

static inline bits4 widen(const uint8_t *bytes)
{
    uint16_t half[LANES];
    memcpy(half, bytes, sizeof half);
    return (bits4){half[0], half[1], half[2], half[3]};
}

static inline vec vec_from_bfloat16(const uint8_t *bytes)
{
    return (vec)(widen(bytes) << 16);
}

/* The exponents of float16 and float32 differ by 112: the bits are placed, then multiplied. */
static inline vec vec_from_half(const uint8_t *bytes)
{
    const bits4 half = widen(bytes);
    const bits4 rest = (half & 0x7FFF) << 13;
    const bits4 special = (bits4)(rest >= 0x0F800000u) & 0x7F800000u; /* infinity and NaN */
    const vec number = (vec)rest * vec_set(0x1p112f);
    return (vec)((bits4)number | special | (half & 0x8000) << 16);
}

/* e4m3 numbers times 2^-8, but for 0x7F and 0xFF; the exponents differ by 120. */
static inline vec vec_from_e4m3(const uint8_t *bytes)
{
    const bits4 wide = {bytes[0], bytes[1], bytes[2], bytes[3]};
    const vec number = (vec)((wide & 0x7F) << 20) * vec_set(0x1p112f);
    return (vec)((bits4)number | (wide & 0x80) << 24);
}

#endif

/* Whether e4m3's NaN is among them. */
static inline bool any_nan_e4m3(const uint8_t *bytes, int32_t count)
{
    uint8_t any = 0;
    for (int32_t d = 0; d < count; d++) any |= (bytes[d] & 0x7F) == 0x7F;
    return any;
}

#endif
