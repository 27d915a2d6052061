/* The parts of rows that were split, merged in order, for d_v 512: what any_combine does, made so
 * that a row of many parts is read by many warps at once.
 *
 * A warp takes value numbers of one head of one row, in runs of 128: in sm80_combine, for few
 * splits, as many runs as loads can be under way at once, of all splits; in sm80_combine_many one,
 * of every eighth split, which the warps of a block then add up through shared memory. A part
 * without entries holds zeros. On GPUs that allow it the launch overlaps with the end of the one
 * that makes the parts. */
#include "attend.cuh"
#include "ptx.cuh"
#include "sm80_kernels.h"

namespace
{

constexpr int VALUES = 512;
constexpr int LANE_VALUES = 4;
constexpr int RUN_VALUES = LANE_VALUES * WARP;
constexpr int BLOCK_WARPS = SMLA_COMBINE_WARPS;
constexpr int LOADS = SMLA_COMBINE_LOADS; /* a warp's, under way at once */

__device__ void add_share(float (&total)[LANE_VALUES], float share,
                          const float (&part)[LANE_VALUES])
{
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) total[i] += share * part[i];
}

/* `warps` of a block share the splits of a head; a warp takes `runs` of its runs. */
template <int warps, int runs> __device__ void combine(const smla_gpu_attend &launch)
{
    constexpr int AT_ONCE = LOADS / runs; /* splits */
    constexpr int HEAD_UNITS = VALUES / RUN_VALUES / runs;
    constexpr int LANE_SPLITS = warps == 1 ? 1 : SMLA_MOST_SPLITS / WARP;
    static_assert(LOADS <= WARP && SMLA_MOST_SPLITS % WARP == 0, "a lane knows of one or two");
    const smla_attend &work = launch.work;
    ptx::allow_next_launch();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const bool is_cut = launch.cut_pieces > 0;
    const unsigned head_tile = launch.head_tile;
    const int64_t parts = is_cut ? (int64_t)launch.cut_pieces * head_tile
                                 : work.batch * work.s_q * work.heads; /* of one split */
    const int64_t unit = warps == 1 ? (int64_t)blockIdx.x * BLOCK_WARPS + warp : blockIdx.x;
    const int64_t part = unit / HEAD_UNITS;
    const int value = (int)(unit % HEAD_UNITS) * runs * RUN_VALUES + lane * LANE_VALUES;
    const int first = warps == 1 ? 0 : warp; /* split */
    if (part >= parts) return;
    /* as many as blocks at most */
    const unsigned piece = launch.whole + (unsigned)part / head_tile;
    const unsigned row = is_cut ? piece / launch.head_tiles : (unsigned)part / (unsigned)work.heads;
    const int head = is_cut
                         ? (int)(piece % launch.head_tiles * head_tile + (unsigned)part % head_tile)
                         : (int)((unsigned)part % (unsigned)work.heads);
    if (head >= work.heads) return;
    ptx::wait_for_last_launch();

    float total[runs][LANE_VALUES] = {}, loaded[AT_ONCE][runs][LANE_VALUES];
    const auto load = [&](int from) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int split = from + i * warps;
            if (split >= launch.splits) continue;
#pragma unroll
            for (int r = 0; r < runs; r++) {
                load_run<float>(launch.part_out,
                                (split * parts + part) * VALUES + value + r * RUN_VALUES,
                                loaded[i][r]);
            }
        }
    };
    load(first);
    float maximum[LANE_SPLITS], share[LANE_SPLITS], sum = 0.0f, largest = -CUDART_INF_F;
#pragma unroll
    for (int i = 0; i < LANE_SPLITS; i++) {
        const int split = i * WARP + lane;
        const bool is_there = split < launch.splits;
        maximum[i] = is_there ? launch.part_max[split * parts + part] : -CUDART_INF_F;
        share[i] = is_there ? launch.part_sum[split * parts + part] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < LANE_SPLITS; i++) largest = fmaxf(largest, maximum[i]);
    largest = warp_max(largest);
#pragma unroll
    for (int i = 0; i < LANE_SPLITS; i++) {
        const float factor = maximum[i] == largest ? 1.0f : expf(maximum[i] - largest);
        sum += share[i] * factor;
        share[i] = factor;
    }
    sum = warp_sum(sum);
    for (int from = first; from < launch.splits;) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int split = from + i * warps;
            if (split >= launch.splits) break;
            float of_split = share[0];
#pragma unroll
            for (int j = 1; j < LANE_SPLITS; j++) of_split = split < j * WARP ? of_split : share[j];
            of_split = __shfl_sync(ALL_LANES, of_split, split % WARP);
#pragma unroll
            for (int r = 0; r < runs; r++) add_share(total[r], of_split, loaded[i][r]);
        }
        from += AT_ONCE * warps;
        if (warps == 1) break; /* few splits are all under way at once */
        load(from);
    }

    if (warps > 1) {
        __shared__ float totals[BLOCK_WARPS][RUN_VALUES];
        store_run<float>(totals[warp], lane * LANE_VALUES, total[0]);
        __syncthreads();
        if (warp != 0) return;
#pragma unroll
        for (int w = 1; w < BLOCK_WARPS; w++) {
            float other[LANE_VALUES];
            load_run<float>(totals[w], lane * LANE_VALUES, other);
            add_share(total[0], 1.0f, other);
        }
    }

    const int64_t batch = row / (unsigned)work.s_q, query = row % (unsigned)work.s_q;
    const float factor = value == 0 ? finish_head(work, batch, query, head, largest, sum)
                                    : output_factor(work, head, largest, sum);
    const smla_output &out = work.out;
    const int bytes = out.dtype == SMLA_FLOAT32 ? 4 : 2;
#pragma unroll
    for (int r = 0; r < runs; r++) {
        const int64_t element = element_of(out, batch, query, head) + value + r * RUN_VALUES;
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) total[r][i] *= factor;
        if ((reinterpret_cast<uintptr_t>(out.data) + element * bytes) % (LANE_VALUES * bytes) ==
            0) {
            store_numbers(out.data, out.dtype, element, total[r]);
            continue;
        }
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++) {
            const float number[1] = {total[r][i]};
            store_numbers(out.data, out.dtype, element + i, number);
        }
    }
}

} // namespace

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS *WARP, 4)
    sm80_combine(const __grid_constant__ smla_gpu_attend launch)
{
    switch (SMLA_COMBINE_RUNS(launch.splits)) {
    case 4: combine<1, 4>(launch); break;
    case 2: combine<1, 2>(launch); break;
    default: combine<1, 1>(launch); break;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS *WARP, 4)
    sm80_combine_many(const __grid_constant__ smla_gpu_attend launch)
{
    combine<BLOCK_WARPS, 1>(launch);
}
