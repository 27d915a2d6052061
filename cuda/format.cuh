/* The numbers of cache rows of any format, one at a time: for kernels without a specialisation.
 * What smla_decode_row and smla_encode_row in src/format.c do on the host, with the same bits. */
#pragma once

#include <cuda_fp8.h>
#include <math_constants.h>

#include "numbers.cuh"
#include "params.h"

namespace
{

__device__ float load_unaligned(const uint8_t *bytes)
{
    return __uint_as_float(bytes[0] | bytes[1] << 8 | bytes[2] << 16 | (unsigned)bytes[3] << 24);
}

__device__ void store_unaligned(uint8_t *bytes, float number)
{
    const unsigned bits = __float_as_uint(number);
    for (int i = 0; i < 4; i++) bytes[i] = (uint8_t)(bits >> 8 * i);
}

/* The bits of an e4m3 number stand for 2^-8 of its value when they are placed in a float16. */
__device__ float from_e4m3(uint8_t byte)
{
    if ((byte & 0x7F) == 0x7F) return CUDART_NAN_F;
    return __half2float(__ushort_as_half((byte & 0x80) << 8 | (byte & 0x7F) << 7)) * 256.0f;
}

/* Number d of a row. */
__device__ float row_number(const smla_layout &layout, float tensor_scale, const uint8_t *row,
                            int d)
{
    if (layout.dtype != SMLA_DTYPE_NONE) {
        float number[1];
        load_numbers(row, layout.dtype, d, number);
        return number[0];
    }
    if (d < layout.quantised) {
        const float scale = layout.scale_offset < 0
                                ? tensor_scale
                                : load_unaligned(row + layout.scale_offset + d / layout.group * 4);
        return from_e4m3(row[d]) * scale;
    }
    const uint8_t *rope = row + layout.rope_offset + 2 * (d - layout.quantised);
    return __uint_as_float((unsigned)(rope[0] | rope[1] << 8) << 16);
}

/* To nearest even; a NaN keeps its sign and what fits of its payload. */
__device__ uint16_t to_bfloat16(float number)
{
    const unsigned bits = __float_as_uint(number);
    if (isnan(number)) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

__device__ uint16_t to_half(float number)
{
    if (isnan(number)) return (uint16_t)(__float_as_uint(number) >> 16 & 0x8000) | 0x7E00;
    return __half_as_ushort(__float2half_rn(number));
}

/* Clamped to +-448, to nearest even, NaN as 0x7F. Under a scale of 0 everything is 0. */
__device__ uint8_t quantise(float number, float scale)
{
    if (isnan(number)) return 0x7F;
    return (uint8_t)__nv_cvt_float_to_fp8(scale == 0.0f ? 0.0f : number / scale, __NV_SATFINITE,
                                          __NV_E4M3);
}

} // namespace
