/* Partial results over disjoint sets of entries, joined by their lse:
 *
 *     lse = log(sum_p exp(lse_p))        out = sum_p exp(lse_p - lse) * out_p
 *     with a sink:  out *= 1 / (1 + exp(sink - lse))
 *
 * A warp takes one head of one row, and each of its lanes the lse of one part, since a merge has at
 * most as many parts as a warp has lanes. A part whose lse is -inf has no entries: its out is not
 * read. Parts are added in their order, so that the same parts give the same bits. */
#include <math_constants.h>

#include "numbers.cuh"
#include "params.h"
#include "warp.cuh"

namespace
{

static_assert(SMLA_MERGE_PARTS <= WARP, "a lane for each part");

/* `width` is how many numbers a lane moves at once. */
template <int width> __device__ void merge(const smla_merge &work)
{
    const int lane = threadIdx.x % WARP;
    const int64_t warps = (int64_t)gridDim.x * (blockDim.x / WARP);
    const int64_t rows = work.batch * work.s_q * work.heads;

    for (int64_t row = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP; row < rows;
         row += warps) {
        const int64_t head = row % work.heads;
        const int64_t query = row / work.heads % work.s_q;
        const int64_t batch = row / work.heads / work.s_q;

        float part_lse = -CUDART_INF_F;
        if (lane < work.parts) {
            const smla_output &array = work.part_lse[lane];
            part_lse = static_cast<const float *>(
                array.data)[element_of(array, batch, query, head)];
        }
        const unsigned filled = __ballot_sync(ALL_LANES, part_lse != -CUDART_INF_F);
        const float maximum = warp_max(part_lse);
        float weight = part_lse == -CUDART_INF_F ? 0.0f
                       : part_lse == maximum     ? 1.0f /* two infinities would differ by NaN */
                                                 : expf(part_lse - maximum);
        const float sum = warp_sum(weight);

        if (lane == 0 && work.lse.dtype != SMLA_DTYPE_NONE) {
            static_cast<float *>(
                work.lse.data)[element_of(work.lse, batch, query, head)] = filled
                                                                               ? maximum + logf(sum)
                                                                               : work.empty_lse;
        }

        float denominator = sum;
        if (work.attn_sink.dtype != SMLA_DTYPE_NONE) {
            const float sink = static_cast<const float *>(
                work.attn_sink.data)[head * work.attn_sink.stride[0]];
            denominator += expf(sink - maximum);
        }
        weight /= denominator;

        for (int64_t begin = 0; begin < work.d_v; begin += WARP * width) {
            const int64_t d = begin + lane * width;
            float total[width] = {};
            for (unsigned rest = filled; rest; rest &= rest - 1) {
                const int part = __ffs(rest) - 1;
                const float share = __shfl_sync(ALL_LANES, weight, part);
                if (d >= work.d_v) continue;
                const smla_output &array = work.part_out[part];
                float numbers[width];
                load_numbers(array.data, array.dtype, element_of(array, batch, query, head) + d,
                             numbers);
#pragma unroll
                for (int i = 0; i < width; i++) total[i] += share * numbers[i];
            }
            if (d < work.d_v) {
                store_numbers(work.out.data, work.out.dtype,
                              element_of(work.out, batch, query, head) + d, total);
            }
        }
    }
}

} // namespace

extern "C" __global__ void __launch_bounds__(128) any_merge(const __grid_constant__ smla_merge work)
{
    merge<1>(work);
}

extern "C" __global__ void __launch_bounds__(128)
    any_merge_vector(const __grid_constant__ smla_merge work)
{
    merge<4>(work);
}
