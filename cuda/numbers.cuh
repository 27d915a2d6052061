/* Runs of float32, float16 and bfloat16 numbers in global memory, read and written as float32, and
 * where in an array of results they lie. */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "params.h"

/* `count` neighbours that move in one instruction: their address is a multiple of their size. */
template <typename Number, int count> struct alignas(sizeof(Number) * count) number_run {
    Number number[count];
};

template <typename Number, int count>
__device__ void load_run(const void *data, int64_t element, float (&numbers)[count])
{
    using run = number_run<Number, count>;
    run loaded = *reinterpret_cast<const run *>(static_cast<const Number *>(data) + element);
#pragma unroll
    for (int i = 0; i < count; i++) numbers[i] = static_cast<float>(loaded.number[i]);
}

template <typename Number, int count>
__device__ void store_run(void *data, int64_t element, const float (&numbers)[count])
{
    using run = number_run<Number, count>;
    run stored;
#pragma unroll
    for (int i = 0; i < count; i++) stored.number[i] = static_cast<Number>(numbers[i]);
    *reinterpret_cast<run *>(static_cast<Number *>(data) + element) = stored;
}

template <int count>
__device__ void load_numbers(const void *data, int32_t dtype, int64_t element,
                             float (&numbers)[count])
{
    switch (dtype) {
    case SMLA_FLOAT32: load_run<float>(data, element, numbers); break;
    case SMLA_FLOAT16: load_run<__half>(data, element, numbers); break;
    default: load_run<__nv_bfloat16>(data, element, numbers); break;
    }
}

template <int count>
__device__ void store_numbers(void *data, int32_t dtype, int64_t element,
                              const float (&numbers)[count])
{
    switch (dtype) {
    case SMLA_FLOAT32: store_run<float>(data, element, numbers); break;
    case SMLA_FLOAT16: store_run<__half>(data, element, numbers); break;
    default: store_run<__nv_bfloat16>(data, element, numbers); break;
    }
}

__device__ inline int64_t element_of(const smla_output &array, int64_t batch, int64_t query,
                                     int64_t head)
{
    return batch * array.stride[0] + query * array.stride[1] + head * array.stride[2];
}
