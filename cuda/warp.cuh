/* What the lanes of a warp do together: the same bits in every lane. */
#pragma once

namespace
{

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xFFFFFFFFu;

__device__ float warp_sum(float number)
{
    for (int step = WARP / 2; step > 0; step /= 2) {
        number += __shfl_xor_sync(ALL_LANES, number, step);
    }
    return number;
}

__device__ float warp_max(float number)
{
    for (int step = WARP / 2; step > 0; step /= 2) {
        number = fmaxf(number, __shfl_xor_sync(ALL_LANES, number, step));
    }
    return number;
}

} // namespace
