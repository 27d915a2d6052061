/* Cache rows, as the tile kernels read them: the groups of numbers that share a scale, and, for
 * kernels with a bfloat16 dot product, a row's numbers in bfloat16.
 *
 * An e4m3 number is a bfloat16 number too, exactly; its group's scale could not go into it without
 * rounding, so it stays apart. */
#ifndef SMLA_ROWS_H
#define SMLA_ROWS_H

#include "simd.h"
#include "tile.h"

/* Rows ahead that are asked for while one is read: enough to hide memory's latency. */
enum { AHEAD = 2 };

/* `known` rows are there, of which `j` is read next. */
static inline void prefetch_ahead(const struct smla_tile *tile, const uint8_t *const *rows,
                                  int32_t j, int32_t known)
{
    if (j + AHEAD < known)
        for (int32_t at = 0; at < tile->row_bytes; at += 64)
            __builtin_prefetch(rows[j + AHEAD] + at);
}

static inline float group_scale(const struct smla_tile *tile, const uint8_t *row, int32_t group)
{
    if (tile->format->scale == SMLA_SCALE_TENSOR) return tile->tensor_scale;
    float scale;
    memcpy(&scale, row + tile->format->scale_offset + group * 4, sizeof scale);
    return scale;
}

/* The groups of a row, each under one scale: a dense row is one without, and what follows the e4m3
 * numbers of a packed row is one with scale 1. */
static inline int32_t groups_of(const struct smla_tile *tile)
{
    const struct smla_format_info *format = tile->format;
    if (format->scale == SMLA_SCALE_NONE) return 1;
    return format->quantised / format->group + (format->rope > 0);
}

static inline int32_t group_end(const struct smla_tile *tile, int32_t group)
{
    return group + 1 == groups_of(tile) ? tile->depth : (group + 1) * tile->format->group;
}

#if defined(__AVX512BF16__)

enum { WIDE = 2 * LANES }; /* bfloat16 numbers of a register */

/* The d_qk numbers of a row, without their scales. */
static inline void read_pairs(const struct smla_tile *tile, const uint8_t *row, uint16_t *pairs)
{
    const struct smla_format_info *format = tile->format;
    if (format->scale == SMLA_SCALE_NONE) {
        memcpy(pairs, row, (size_t)tile->d_qk * sizeof(uint16_t));
        return;
    }
    if (any_nan_e4m3(row, format->quantised)) {
        for (int32_t d = 0; d < format->quantised; d++)
            pairs[d] = smla_to_bfloat16(smla_from_e4m3(row[d]));
    } else {
        const vec factor = vec_set(256.0f);
        for (int32_t d = 0; d < format->quantised; d += WIDE)
            _mm512_storeu_si512(pairs + d, (__m512i)_mm512_cvtne2ps_pbh(
                                               vec_mul(vec_from_e4m3(row + d + LANES), factor),
                                               vec_mul(vec_from_e4m3(row + d), factor)));
    }
    memcpy(pairs + format->quantised, row + format->rope_offset,
           (size_t)format->rope * sizeof(uint16_t));
}

/* The scale of one of the groups_of(tile) groups. */
static inline float scale_of(const struct smla_tile *tile, const uint8_t *row, int32_t group)
{
    const struct smla_format_info *format = tile->format;
    return group * format->group < format->quantised ? group_scale(tile, row, group) : 1.0f;
}

#endif

#endif
