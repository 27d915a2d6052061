#include "format.h"

#include <math.h>
#include <string.h>

/* A format is a line here; a new kind of scale or place is a case in read_scales below. */
static const struct smla_format_info FORMATS[SMLA_FORMATS] = {
    [SMLA_DENSE] = {.name = "dense",
                    .layout = "d_qk numbers of q's dtype",
                    .format = SMLA_DENSE,
                    .scale = SMLA_SCALE_NONE},
    [SMLA_FP8_DS_MLA] = {.name = "fp8_ds_mla",
                         .layout = "512 e4m3 | 4 float32 scales, one per 128 | 64 bfloat16 rope",
                         .format = SMLA_FP8_DS_MLA,
                         .scale = SMLA_SCALE_FLOAT32,
                         .row_bytes = 656,
                         .d_qk = 576,
                         .d_v = 512,
                         .quantised = 512,
                         .group = 128,
                         .scale_offset = 512,
                         .rope = 64,
                         .rope_offset = 528},
    [SMLA_FP8_DS_MLA_NOROPE] = {.name = "fp8_ds_mla_norope",
                                .layout = "512 e4m3 | 4 float32 scales, one per 128",
                                .format = SMLA_FP8_DS_MLA_NOROPE,
                                .scale = SMLA_SCALE_FLOAT32,
                                .row_bytes = 528,
                                .d_qk = 512,
                                .d_v = 512,
                                .quantised = 512,
                                .group = 128,
                                .scale_offset = 512},
    [SMLA_FP8_TENSOR] = {.name = "fp8_tensor",
                         .layout = "576 e4m3; one scale for the cache: cache_scale",
                         .format = SMLA_FP8_TENSOR,
                         .scale = SMLA_SCALE_TENSOR,
                         .row_bytes = 576,
                         .d_qk = 576,
                         .d_v = 512,
                         .quantised = 576,
                         .group = 576},
};

static const float E4M3_MAX = 448.0f;

const struct smla_format_info *smla_format(enum smla_format format)
{
    return &FORMATS[format];
}

const struct smla_format_info *smla_format_named(const char *name)
{
    for (int i = 0; i < SMLA_FORMATS; i++)
        if (strcmp(FORMATS[i].name, name) == 0) return &FORMATS[i];
    return NULL;
}

const char *smla_format_names(void)
{
    static char names[256];
    if (!names[0]) {
        char text[sizeof names] = "";
        for (int i = 0; i < SMLA_FORMATS; i++) {
            if (i) strcat(text, ", ");
            strcat(text, FORMATS[i].name);
        }
        memcpy(names, text, sizeof names);
    }
    return names;
}

/* -------------------------------------------------------------------------- one number */

static float from_bits(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static uint32_t to_bits(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

float smla_from_bfloat16(uint16_t bfloat)
{
    return from_bits((uint32_t)bfloat << 16);
}

float smla_from_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t rest = half & 0x7FFF;
    if (rest >= 0x7C00) return from_bits(sign | 0x7F800000 | (rest & 0x3FF) << 13);
    /* the exponents of the two differ by 112: place the bits, then multiply by 2^112 exactly */
    return from_bits(sign | to_bits(from_bits(rest << 13) * 0x1p112f));
}

float smla_from_e4m3(uint8_t byte)
{
    uint32_t sign = (uint32_t)(byte & 0x80) << 24;
    uint32_t rest = byte & 0x7F;
    if (rest == 0x7F) return from_bits(sign | 0x7FC00000);
    return from_bits(sign | to_bits(from_bits(rest << 20) * 0x1p120f));
}

/* Rounds a finite, positive number to `mantissa` bits below the leading one, to nearest even, with
 * a smallest exponent under which the step stays the same. */
static float round_to(float number, int mantissa, int smallest)
{
    int exponent;
    frexpf(number, &exponent);
    exponent -= 1;
    if (exponent < smallest) exponent = smallest;
    float step = ldexpf(1.0f, exponent - mantissa);
    return rintf(number / step) * step;
}

uint16_t smla_to_bfloat16(float number)
{
    uint32_t bits = to_bits(number);
    if (isnan(number)) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

uint16_t smla_to_half(float number)
{
    uint16_t sign = (uint16_t)(to_bits(number) >> 16 & 0x8000);
    if (isnan(number)) return sign | 0x7E00;
    number = fabsf(number);
    if (number >= 65520.0f) return sign | 0x7C00;
    return sign | (uint16_t)(to_bits(round_to(number, 10, -14) * 0x1p-112f) >> 13);
}

uint8_t smla_to_e4m3(float number)
{
    if (isnan(number)) return 0x7F;
    uint8_t sign = (uint8_t)(to_bits(number) >> 24 & 0x80);
    number = fminf(fabsf(number), E4M3_MAX);
    return sign | (uint8_t)(to_bits(round_to(number, 3, -6) * 0x1p-120f) >> 20);
}

/* -------------------------------------------------------------------------- one row */

static float load_number(const uint8_t *bytes, enum smla_dtype dtype)
{
    uint16_t half;
    float number;
    if (dtype == SMLA_FLOAT32) {
        memcpy(&number, bytes, sizeof number);
        return number;
    }
    memcpy(&half, bytes, sizeof half);
    return dtype == SMLA_BFLOAT16 ? smla_from_bfloat16(half) : smla_from_half(half);
}

static void store_number(uint8_t *bytes, enum smla_dtype dtype, float number)
{
    if (dtype == SMLA_FLOAT32) {
        memcpy(bytes, &number, sizeof number);
        return;
    }
    uint16_t half = dtype == SMLA_BFLOAT16 ? smla_to_bfloat16(number) : smla_to_half(number);
    memcpy(bytes, &half, sizeof half);
}

static int32_t groups(const struct smla_format_info *format)
{
    return format->quantised / format->group;
}

static float read_scale(const struct smla_format_info *format, const uint8_t *row, int32_t group,
                        float tensor_scale)
{
    if (format->scale == SMLA_SCALE_TENSOR) return tensor_scale;
    float scale;
    memcpy(&scale, row + format->scale_offset + group * (int32_t)sizeof scale, sizeof scale);
    return scale;
}

void smla_decode_row(const struct smla_format_info *format, const uint8_t *row,
                     enum smla_dtype dtype, int32_t width, float tensor_scale, float *numbers)
{
    if (format->scale == SMLA_SCALE_NONE) {
        int32_t bytes = dtype == SMLA_FLOAT32 ? 4 : 2;
        for (int32_t d = 0; d < width; d++) numbers[d] = load_number(row + d * bytes, dtype);
        return;
    }
    for (int32_t g = 0; g < groups(format); g++) {
        float scale = read_scale(format, row, g, tensor_scale);
        for (int32_t d = g * format->group; d < (g + 1) * format->group; d++)
            numbers[d] = smla_from_e4m3(row[d]) * scale;
    }
    for (int32_t d = 0; d < format->rope; d++)
        numbers[format->quantised + d] = load_number(row + format->rope_offset + 2 * d,
                                                     SMLA_BFLOAT16);
}

static float group_scale(const float *numbers, int32_t count)
{
    float amax = 0.0f;
    for (int32_t d = 0; d < count; d++)
        if (isfinite(numbers[d])) amax = fmaxf(amax, fabsf(numbers[d]));
    return amax / E4M3_MAX;
}

/* A scale of 0 has only zeros under it (or numbers so small that their scale is 0). */
static uint8_t quantise(float number, float scale)
{
    return scale == 0.0f ? smla_to_e4m3(isnan(number) ? number : 0.0f)
                         : smla_to_e4m3(number / scale);
}

void smla_encode_row(const struct smla_format_info *format, const float *numbers,
                     enum smla_dtype dtype, int32_t width, float tensor_scale, uint8_t *row)
{
    if (format->scale == SMLA_SCALE_NONE) {
        int32_t bytes = dtype == SMLA_FLOAT32 ? 4 : 2;
        for (int32_t d = 0; d < width; d++) store_number(row + d * bytes, dtype, numbers[d]);
        return;
    }
    for (int32_t g = 0; g < groups(format); g++) {
        const float *group = numbers + g * format->group;
        float scale = tensor_scale;
        if (format->scale == SMLA_SCALE_FLOAT32) {
            scale = group_scale(group, format->group);
            memcpy(row + format->scale_offset + g * (int32_t)sizeof scale, &scale, sizeof scale);
        }
        for (int32_t d = 0; d < format->group; d++)
            row[g * format->group + d] = quantise(group[d], scale);
    }
    for (int32_t d = 0; d < format->rope; d++)
        store_number(row + format->rope_offset + 2 * d, SMLA_BFLOAT16,
                     numbers[format->quantised + d]);
}
