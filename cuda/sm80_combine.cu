/* The parts of rows that were split, merged in order, for d_v 512: what any_combine does, made so
 * that a row of many parts is read by many warps at once.
 *
 * A warp takes 128 value numbers of one head of one row, and of the splits every WARPS-th one: all
 * of them in sm80_combine, for few splits; one in eight in sm80_combine_many, whose warps then add
 * up what they have through shared memory. A part without entries holds zeros. On GPUs that allow
 * it the launch overlaps with the end of the one that makes the parts. */
#include "attend.cuh"
#include "ptx.cuh"
#include "sm90_kernels.h"

namespace
{

constexpr int VALUES = 512;
constexpr int LANE_VALUES = 4;
constexpr int WARP_VALUES = LANE_VALUES * WARP;
constexpr int BLOCK_WARPS = 8;
constexpr int LOADS = 8; /* a warp's, under way at once */

__device__ void add_share(float (&total)[LANE_VALUES], float share,
                          const float (&part)[LANE_VALUES])
{
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) total[i] += share * part[i];
}

template <int warps> __device__ void combine(const smla_gpu_attend &launch)
{
    const smla_attend &work = launch.work;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool is_cut = launch.cut_pieces > 0;
    const int64_t parts = is_cut ? (int64_t)launch.cut_pieces * SMLA_SM90_HEADS
                                 : work.batch * work.s_q * work.heads; /* of one split */
    const int64_t unit = warps == 1 ? (int64_t)blockIdx.x * BLOCK_WARPS + warp : blockIdx.x;
    const int64_t part = unit / (VALUES / WARP_VALUES);
    const int value = (int)(unit % (VALUES / WARP_VALUES)) * WARP_VALUES + lane * LANE_VALUES;
    const int first = warps == 1 ? 0 : warp; /* split */
    if (part >= parts) return;
    /* as many as blocks at most */
    const unsigned piece = launch.whole + (unsigned)part / SMLA_SM90_HEADS;
    const unsigned row = is_cut ? piece / launch.head_tiles : (unsigned)part / (unsigned)work.heads;
    const int head = is_cut ? (int)(piece % launch.head_tiles * SMLA_SM90_HEADS +
                                    (unsigned)part % SMLA_SM90_HEADS)
                            : (int)((unsigned)part % (unsigned)work.heads);
    if (head >= work.heads) return;
    ptx::wait_for_last_launch();

    float total[LANE_VALUES] = {}, loaded[LOADS][LANE_VALUES];
    const auto load = [&](int from) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int split = from + i * warps;
            if (split < launch.splits) {
                load_run<float>(launch.part_out, (split * parts + part) * VALUES + value,
                                loaded[i]);
            }
        }
    };
    load(first);
    float largest = -CUDART_INF_F, sum = 0.0f;
    for (int s = lane; s < launch.splits; s += WARP) {
        largest = fmaxf(largest, launch.part_max[s * parts + part]);
    }
    largest = warp_max(largest);
    const auto share_of = [&](int split) {
        const float maximum = launch.part_max[split * parts + part];
        return maximum == largest ? 1.0f : expf(maximum - largest);
    };
    for (int s = lane; s < launch.splits; s += WARP) {
        sum += launch.part_sum[s * parts + part] * share_of(s);
    }
    sum = warp_sum(sum);
    for (int from = first; from < launch.splits; from += LOADS * warps) {
        if (from > first) load(from);
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int split = from + i * warps;
            if (split < launch.splits) add_share(total, share_of(split), loaded[i]);
        }
    }

    if (warps > 1) {
        __shared__ float totals[BLOCK_WARPS][WARP_VALUES];
        store_run<float>(totals[warp], lane * LANE_VALUES, total);
        __syncthreads();
        if (warp != 0) return;
#pragma unroll
        for (int w = 1; w < BLOCK_WARPS; w++) {
            float other[LANE_VALUES];
            load_run<float>(totals[w], lane * LANE_VALUES, other);
            add_share(total, 1.0f, other);
        }
    }

    const int64_t batch = row / (unsigned)work.s_q, query = row % (unsigned)work.s_q;
    const float factor = value == 0 ? finish_head(work, batch, query, head, largest, sum)
                                    : output_factor(work, head, largest, sum);
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) total[i] *= factor;
    const smla_output &out = work.out;
    const int64_t element = element_of(out, batch, query, head) + value;
    const int bytes = out.dtype == SMLA_FLOAT32 ? 4 : 2;
    if ((reinterpret_cast<uintptr_t>(out.data) + element * bytes) % (LANE_VALUES * bytes) == 0) {
        store_numbers(out.data, out.dtype, element, total);
        return;
    }
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) {
        const float number[1] = {total[i]};
        store_numbers(out.data, out.dtype, element + i, number);
    }
}

} // namespace

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS *WARP, 4)
    sm80_combine(const __grid_constant__ smla_gpu_attend launch)
{
    combine<1>(launch);
}

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS *WARP, 4)
    sm80_combine_many(const __grid_constant__ smla_gpu_attend launch)
{
    combine<BLOCK_WARPS>(launch);
}
