/* The cache formats: what the bytes of one token's row mean. FORMATS in format.c is the table;
 * everything that reads or writes a packed row goes by it. */
#ifndef SMLA_FORMAT_H
#define SMLA_FORMAT_H

#include "error.h"
#include "params.h"

enum smla_scale_kind {
    SMLA_SCALE_NONE,   /* the numbers are stored as they are */
    SMLA_SCALE_TENSOR, /* one float32 for the whole cache: the argument cache_scale */
    SMLA_SCALE_FLOAT32 /* one float32 per group of a row, anywhere in the range of float32 */
};

/* A row is `quantised` e4m3 numbers in groups that share a scale, then `rope` bfloat16 numbers.
 * A dense row has neither: it is d_qk numbers of the query's dtype. */
struct smla_format_info {
    const char *name;
    const char *layout; /* one line for people */
    enum smla_format format;
    enum smla_scale_kind scale;
    int32_t row_bytes;    /* 0: d_qk numbers of the query's dtype */
    int32_t d_qk;         /* 0: any */
    int32_t d_v;          /* 0: any */
    int32_t quantised;    /* e4m3 numbers from byte 0 on */
    int32_t group;        /* of them share a scale */
    int32_t scale_offset; /* bytes from the row's start */
    int32_t rope;         /* bfloat16 numbers */
    int32_t rope_offset;  /* bytes from the row's start */
};

const struct smla_format_info *smla_format(enum smla_format format);

/* NULL where there is none of that name. */
const struct smla_format_info *smla_format_named(const char *name);

/* "dense, fp8_ds_mla, …" for messages. */
const char *smla_format_names(void);

/* One number from and to 32 bits; rounding is to nearest even. e4m3 clamps to ±448 first and maps
 * NaN to 0x7F. */
float smla_from_half(uint16_t half);
float smla_from_bfloat16(uint16_t bfloat);
float smla_from_e4m3(uint8_t byte);
uint16_t smla_to_half(float number);
uint16_t smla_to_bfloat16(float number);
uint8_t smla_to_e4m3(float number);

/* One row, exactly as its bytes say: value = e4m3 * scale in float32. `width` is d_qk of a dense
 * row; `dtype` its dtype. The bytes need no alignment. */
void smla_decode_row(const struct smla_format_info *format, const uint8_t *row,
                     enum smla_dtype dtype, int32_t width, float tensor_scale, float *numbers);

/* The inverse: the scale of a group is amax / 448 (0 for a group of zeros), amax over its finite
 * numbers. */
void smla_encode_row(const struct smla_format_info *format, const float *numbers,
                     enum smla_dtype dtype, int32_t width, float tensor_scale, uint8_t *row);

#endif
