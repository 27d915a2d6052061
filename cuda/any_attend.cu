/* attend on any GPU, for every dtype, format and width: no tensor cores, no alignment beyond the
 * element's own. What the specialised kernels do not take comes here, and what they do is checked
 * against it.
 *
 * A block of four warps takes HEADS heads of one row and one split of its entries. It reads the
 * indices of 128 entries at a time and keeps the addresses of the valid ones, in order. Of these it
 * takes tiles of 32:
 *   scores   a warp takes an entry, its lanes the numbers of the row;
 *   softmax  a warp takes a head, a lane an entry: running maximum and sum;
 *   values   a thread takes numbers of V and adds up the 32 entries for all heads.
 * q and the sums of out stay in shared memory as float32. Of float32 queries, whose results are
 * held to 2^-21, also what each addition of a tile or a split loses in rounding: equal numbers err
 * alike, and there may be many. */
#include "attend.cuh"
#include "format.cuh"

/* Taken by the block that reports a fault; found by name when the kernels are loaded, for all of
 * them: there is one of it on a device. */
extern "C" __device__ uint32_t smla_fault_lock = 0;

namespace
{

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / WARP;
constexpr int TILE = WARP; /* entries: a lane each in the softmax */

/* A valid entry: the address of its row, and the source that says how to read it. */
struct entry {
    const uint8_t *row;
    int which;
};

/* A sum of many numbers, with what its additions have lost in rounding. */
struct exact_sum {
    float sum;
    float lost;
};

/* sum * rescale + number. The products of `rescale`, which is 1 but where a maximum moves, are
 * rounded; no compiler may join them with the additions. */
__device__ exact_sum add_exactly(exact_sum before, float rescale, float number)
{
    const float a = __fmul_rn(before.sum, rescale);
    const float b = __fadd_rn(__fmul_rn(before.lost, rescale), number);
    const float sum = __fadd_rn(a, b), of_b = __fsub_rn(sum, a);
    const float lost = __fadd_rn(__fsub_rn(a, __fsub_rn(sum, of_b)), __fsub_rn(b, of_b));
    return {sum, isfinite(lost) ? lost : 0.0f};
}

/* The block's shared memory: fixed arrays, then from `numbers` on q (HEADS, d_qk), the sums of out
 * (HEADS, d_v) and, for float32 queries, what these have lost (HEADS, d_v). */
template <int HEADS> struct shared_state {
    entry entries[THREADS];
    float weight[HEADS][TILE]; /* scores, then exp(score - largest) */
    float largest[HEADS];
    exact_sum sum[HEADS];
    float rescale[HEADS];
    int valid[WARPS];
    float numbers[1];
};
static_assert(sizeof(shared_state<SMLA_ANY_HEADS>) <= SMLA_ANY_FIXED_BYTES,
              "the host's arithmetic of shared memory");

template <int HEADS>
__device__ void load_query(const smla_attend &work, const piece &piece, float *q)
{
    for (int i = threadIdx.x; i < HEADS * work.d_qk; i += THREADS) {
        const int head = piece.head + i / work.d_qk;
        int d = i % work.d_qk;
        float number[1] = {0.0f};
        if (head < work.heads) {
            const int part = d < work.q_width[0] ? 0 : 1;
            if (part) d -= work.q_width[0];
            const int64_t *stride = work.q_stride[part];
            load_numbers(work.q[part], work.q_dtype,
                         piece.batch * stride[0] + piece.query * stride[1] + head * stride[2] + d,
                         number);
        }
        q[i] = number[0];
    }
}

/* The valid ones among THREADS entries from `begin` on, in order; returns how many. */
template <int HEADS>
__device__ int gather_entries(const smla_gpu_attend &launch, const piece &piece,
                              const smla_row (&rows)[2], int64_t begin, shared_state<HEADS> &shared,
                              fault_tally &faults)
{
    const smla_attend &work = launch.work;
    const int64_t entry = begin + threadIdx.x;
    const int which = entry >= work.source[0].topk;
    const int64_t j = entry - (which ? work.source[0].topk : 0);
    bool valid = false;
    smla_place place;
    if (entry < piece.end && j < rows[which].entries) {
        const smla_cause cause = smla_resolve(&work.source[which], &rows[which], j, &place);
        valid = cause == SMLA_VALID;
        tally(faults, entry, cause, which);
    }
    const unsigned votes = __ballot_sync(ALL_LANES, valid);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (lane == 0) shared.valid[warp] = __popc(votes);
    __syncthreads();
    int at = __popc(votes & ((1u << lane) - 1)), count = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) at += shared.valid[w];
        count += shared.valid[w];
    }
    if (valid) shared.entries[at] = {smla_token(&work.source[which], &place), which};
    __syncthreads();
    return count;
}

/* shared.weight = the scores of `count` entries. */
template <int HEADS>
__device__ void score_tile(const smla_gpu_attend &launch, const entry *entries, int count,
                           const float *q, shared_state<HEADS> &shared)
{
    const smla_attend &work = launch.work;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int i = warp; i < count; i += WARPS) {
        const entry entry = entries[i];
        float dot[HEADS] = {};
        for (int d = lane; d < work.d_qk; d += WARP) {
            const float k = row_number(launch.layout[entry.which], work.source[entry.which].scale,
                                       entry.row, d);
#pragma unroll
            for (int h = 0; h < HEADS; h++) dot[h] += q[h * work.d_qk + d] * k;
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float score = warp_sum(dot[h]) * work.softmax_scale;
            if (work.logit_cap > 0.0f) score = work.logit_cap * tanhf(score / work.logit_cap);
            if (lane == 0) shared.weight[h][i] = score;
        }
    }
}

/* shared.weight: scores -> exp(score - largest); the running maximum and sum move on. */
template <int HEADS> __device__ void weigh_tile(int count, shared_state<HEADS> &shared)
{
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int h = warp; h < HEADS; h += WARPS) {
        const float score = lane < count ? shared.weight[h][lane] : -CUDART_INF_F;
        const float before = shared.largest[h];
        const float largest = fmaxf(before, warp_max(score));
        const float weight = lane < count ? expf(score - largest) : 0.0f;
        const float rescale = before == -CUDART_INF_F ? 0.0f : expf(before - largest);
        const float sum = warp_sum(weight);
        __syncwarp();
        shared.weight[h][lane] = weight;
        if (lane == 0) {
            shared.largest[h] = largest;
            shared.sum[h] = add_exactly(shared.sum[h], rescale, sum);
            shared.rescale[h] = rescale;
        }
    }
}

template <int HEADS>
__device__ void add_values(const smla_gpu_attend &launch, const entry *entries, int count,
                           const shared_state<HEADS> &shared, float *out, float *lost)
{
    const smla_attend &work = launch.work;
    for (int d = threadIdx.x; d < work.d_v; d += THREADS) {
        float total[HEADS] = {};
        for (int i = 0; i < count; i++) {
            const entry entry = entries[i];
            const float v = row_number(launch.layout[entry.which], work.source[entry.which].scale,
                                       entry.row, d);
#pragma unroll
            for (int h = 0; h < HEADS; h++) total[h] += shared.weight[h][i] * v;
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const int at = h * work.d_v + d;
            if (!lost) {
                out[at] = out[at] * shared.rescale[h] + total[h];
                continue;
            }
            const exact_sum sum = add_exactly({out[at], lost[at]}, shared.rescale[h], total[h]);
            out[at] = sum.sum;
            lost[at] = sum.lost;
        }
    }
}

template <int HEADS>
__device__ void store_results(const smla_gpu_attend &launch, const piece &piece,
                              shared_state<HEADS> &shared, const float *out)
{
    const smla_attend &work = launch.work;
    const int heads = min(HEADS, work.heads - piece.head);
    if (launch.splits > 1) {
        const int64_t rows = work.batch * work.s_q;
        const int64_t first = (piece.split * rows + piece.row) * work.heads + piece.head;
        if (threadIdx.x < heads) {
            launch.part_max[first + threadIdx.x] = shared.largest[threadIdx.x];
            launch.part_sum[first + threadIdx.x] = shared.sum[threadIdx.x].sum;
        }
        for (int i = threadIdx.x; i < heads * work.d_v; i += THREADS) {
            launch.part_out[first * work.d_v + i] = out[i];
        }
        return;
    }
    if (threadIdx.x < heads) {
        const int h = threadIdx.x;
        shared.rescale[h] = finish_head(work, piece.batch, piece.query, piece.head + h,
                                        shared.largest[h], shared.sum[h].sum);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < heads * work.d_v; i += THREADS) {
        const int h = i / work.d_v;
        const float number[1] = {shared.sum[h].sum == 0.0f ? 0.0f : out[i] * shared.rescale[h]};
        store_numbers(work.out.data, work.out.dtype,
                      element_of(work.out, piece.batch, piece.query, piece.head + h) + i % work.d_v,
                      number);
    }
}

template <int HEADS> __device__ void attend(const smla_gpu_attend &launch)
{
    extern __shared__ __align__(16) unsigned char memory[];
    shared_state<HEADS> &shared = *reinterpret_cast<shared_state<HEADS> *>(memory);
    const smla_attend &work = launch.work;
    float *q = shared.numbers, *out = q + HEADS * work.d_qk;
    float *lost = work.q_dtype == SMLA_FLOAT32 ? out + HEADS * work.d_v : nullptr;
    const piece piece = piece_of_block(launch, blockIdx.x, HEADS);
    fault_tally faults = {};
    __shared__ smla_row rows[2];
    open_rows(work, piece, rows, faults);
    load_query<HEADS>(work, piece, q);
    for (int i = threadIdx.x; i < HEADS * work.d_v; i += THREADS) {
        out[i] = 0.0f;
        if (lost) lost[i] = 0.0f;
    }
    if (threadIdx.x < HEADS) {
        shared.largest[threadIdx.x] = -CUDART_INF_F;
        shared.sum[threadIdx.x] = {0.0f, 0.0f};
    }
    __syncthreads();
    for (int64_t begin = piece.begin; begin < piece.end; begin += THREADS) {
        const int valid = gather_entries(launch, piece, rows, begin, shared, faults);
        for (int first = 0; first < valid; first += TILE) {
            const entry *entries = shared.entries + first;
            const int count = min(TILE, valid - first);
            score_tile(launch, entries, count, q, shared);
            __syncthreads();
            weigh_tile(count, shared);
            __syncthreads();
            add_values(launch, entries, count, shared, out, lost);
            __syncthreads();
        }
    }
    store_results(launch, piece, shared, out);
    if (work.record && piece.head == 0) report_faults(launch, piece, rows, faults);
}

} // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    any_attend(const __grid_constant__ smla_gpu_attend launch)
{
    attend<SMLA_ANY_HEADS>(launch);
}

/* For rows so wide that q and the sums of eight heads do not fit. */
extern "C" __global__ void __launch_bounds__(THREADS, 8)
    any_attend_wide(const __grid_constant__ smla_gpu_attend launch)
{
    attend<1>(launch);
}

/* The parts of one head of one row, merged in order by a warp. */
static __device__ void combine(const smla_gpu_attend &launch, int64_t part)
{
    const smla_attend &work = launch.work;
    const int64_t parts = work.batch * work.s_q * work.heads;
    const int64_t row = part / work.heads, batch = row / work.s_q, query = row % work.s_q;
    const int head = (int)(part % work.heads), lane = threadIdx.x % WARP;

    float largest = -CUDART_INF_F;
    for (int s = lane; s < launch.splits; s += WARP) {
        largest = fmaxf(largest, launch.part_max[s * parts + part]);
    }
    largest = warp_max(largest);
    exact_sum sum = {0.0f, 0.0f};
    for (int s = 0; s < launch.splits; s++) {
        const float share = launch.part_sum[s * parts + part];
        if (share == 0.0f) continue;
        sum = add_exactly(sum, 1.0f, share * expf(launch.part_max[s * parts + part] - largest));
    }
    float factor = 0.0f;
    if (lane == 0) factor = finish_head(work, batch, query, head, largest, sum.sum);
    factor = __shfl_sync(ALL_LANES, factor, 0);

    for (int d = lane; d < work.d_v; d += WARP) {
        exact_sum total = {0.0f, 0.0f};
        for (int s = 0; s < launch.splits; s++) {
            if (launch.part_sum[s * parts + part] == 0.0f) continue;
            total = add_exactly(total, 1.0f,
                                launch.part_out[(s * parts + part) * work.d_v + d] *
                                    expf(launch.part_max[s * parts + part] - largest));
        }
        const float number[1] = {sum.sum == 0.0f ? 0.0f : total.sum * factor};
        store_numbers(work.out.data, work.out.dtype, element_of(work.out, batch, query, head) + d,
                      number);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 8)
    any_combine(const __grid_constant__ smla_gpu_attend launch)
{
    const int64_t parts = launch.work.batch * launch.work.s_q * launch.work.heads;
    for (int64_t part = (int64_t)blockIdx.x * WARPS + threadIdx.x / WARP; part < parts;
         part += (int64_t)gridDim.x * WARPS) {
        combine(launch, part);
    }
}
