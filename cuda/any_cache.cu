/* Writing tokens into a cache of any format (any_append) and reading a whole cache as float32
 * (any_unpack): the counterpart of src/cpu/append.c, with the same bytes. A warp takes a token. */
#include "format.cuh"
#include "slot.h"
#include "warp.cuh"

namespace
{

constexpr int THREADS = 128;
constexpr float E4M3_MAX = 448.0f;

/* Number d of token t: of the latent or of the rope part. */
__device__ float token_number(const smla_append &work, int64_t t, int d)
{
    const int part = d < work.part_width[0] ? 0 : 1;
    if (part) d -= work.part_width[0];
    float number[1];
    load_numbers(work.part[part], work.part_dtype[part], t * work.part_stride[part] + d, number);
    return number[0];
}

/* Whether a later token has the same slot: of equal slots the last token is written, and alone. */
__device__ bool is_overwritten(const smla_append &work, int64_t t, int64_t slot)
{
    const int lane = threadIdx.x % WARP;
    for (int64_t first = t + 1; first < work.tokens; first += WARP) {
        const int64_t other = first + lane;
        const bool same = other < work.tokens &&
                          smla_load_int(&work.slots, other * work.slots.stride[0]) == slot;
        if (__any_sync(ALL_LANES, same)) return true;
    }
    return false;
}

__device__ float group_scale(const smla_append &work, int64_t t, int first, int count)
{
    float amax = 0.0f;
    for (int d = threadIdx.x % WARP; d < count; d += WARP) {
        const float number = fabsf(token_number(work, t, first + d));
        if (isfinite(number)) amax = fmaxf(amax, number);
    }
    return __fdiv_rn(warp_max(amax), E4M3_MAX);
}

__device__ void store_dense(uint8_t *row, int dtype, int d, float number)
{
    if (dtype == SMLA_FLOAT32) {
        reinterpret_cast<float *>(row)[d] = number;
    } else {
        reinterpret_cast<uint16_t *>(row)[d] = dtype == SMLA_BFLOAT16 ? to_bfloat16(number)
                                                                      : to_half(number);
    }
}

__device__ void store_packed(const smla_gpu_append &append, int64_t t, uint8_t *row)
{
    const smla_append &work = append.work;
    const smla_layout &layout = append.layout;
    const int lane = threadIdx.x % WARP;
    for (int first = 0; first < layout.quantised; first += layout.group) {
        float scale = work.scale;
        if (layout.scale_offset >= 0) {
            scale = group_scale(work, t, first, layout.group);
            if (lane == 0) {
                store_unaligned(row + layout.scale_offset + first / layout.group * 4, scale);
            }
        }
        for (int d = first + lane; d < first + layout.group; d += WARP) {
            row[d] = quantise(token_number(work, t, d), scale);
        }
    }
    for (int d = layout.quantised + lane; d < append.width; d += WARP) {
        const uint16_t bits = to_bfloat16(token_number(work, t, d));
        uint8_t *rope = row + layout.rope_offset + 2 * (d - layout.quantised);
        rope[0] = (uint8_t)bits;
        rope[1] = (uint8_t)(bits >> 8);
    }
}

} // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    any_append(const __grid_constant__ smla_gpu_append append)
{
    const smla_append &work = append.work;
    const int lane = threadIdx.x % WARP;
    const int64_t warps = (int64_t)gridDim.x * (THREADS / WARP);
    for (int64_t t = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP; t < work.tokens;
         t += warps) {
        int64_t slot = t;
        if (work.slots.dtype != SMLA_DTYPE_NONE) {
            slot = smla_load_int(&work.slots, t * work.slots.stride[0]);
            if (slot < 0 || slot / work.block_size >= work.num_blocks) continue;
            if (is_overwritten(work, t, slot)) continue;
        }
        uint8_t *row = work.cache + slot / work.block_size * work.block_stride +
                       slot % work.block_size * work.token_stride;
        if (append.layout.dtype == SMLA_DTYPE_NONE) {
            store_packed(append, t, row);
            continue;
        }
        for (int d = lane; d < append.width; d += WARP) {
            store_dense(row, work.cache_dtype, d, token_number(work, t, d));
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    any_unpack(const __grid_constant__ smla_gpu_unpack unpack)
{
    const smla_source &source = unpack.source;
    const int lane = threadIdx.x % WARP;
    const int64_t warps = (int64_t)gridDim.x * (THREADS / WARP);
    const int64_t slots = source.num_blocks * source.block_size;
    for (int64_t slot = (int64_t)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP; slot < slots;
         slot += warps) {
        const smla_place place = {slot / source.block_size, slot % source.block_size};
        const uint8_t *row = smla_token(&source, &place);
        for (int d = lane; d < unpack.width; d += WARP) {
            unpack.numbers[slot * unpack.width + d] = row_number(unpack.layout, source.scale, row,
                                                                 d);
        }
    }
}
