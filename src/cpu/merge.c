/* Joining partial results over disjoint sets of entries by their lse:
 *
 *     lse = log(sum_i exp(lse_i))        out = sum_i exp(lse_i - lse) out_i
 *
 * A part whose lse is -inf has no entries: it has no weight, and its out is not looked at. The
 * sink is applied to the result, once. Weights are in double, sums in float32. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "cpu.h"
#include "format.h"
#include "pool.h"
#include "slot.h"
#include "tensor.h"

struct merge {
    const struct smla_merge *work;
    _Atomic int64_t next;
};

struct place {
    int64_t batch;
    int64_t query;
    int64_t head;
};

static void *at(const struct smla_output *array, struct place place)
{
    const int64_t element = place.batch * array->stride[0] + place.query * array->stride[1] +
                            place.head * array->stride[2];
    return (uint8_t *)array->data + element * smla_dtype_bytes((enum smla_dtype)array->dtype);
}

static float read_number(const void *numbers, int32_t dtype, int32_t d)
{
    switch (dtype) {
    case SMLA_FLOAT32: return ((const float *)numbers)[d];
    case SMLA_BFLOAT16: return smla_from_bfloat16(((const uint16_t *)numbers)[d]);
    default: return smla_from_half(((const uint16_t *)numbers)[d]);
    }
}

static void write_number(void *numbers, int32_t dtype, int32_t d, float number)
{
    switch (dtype) {
    case SMLA_FLOAT32: ((float *)numbers)[d] = number; return;
    case SMLA_BFLOAT16: ((uint16_t *)numbers)[d] = smla_to_bfloat16(number); return;
    default: ((uint16_t *)numbers)[d] = smla_to_half(number); return;
    }
}

/* exp(lse - largest); two equal infinities would differ by NaN. */
static double weight_of(double lse, double largest)
{
    if (lse == -INFINITY) return 0.0;
    return lse == largest ? 1.0 : exp(lse - largest);
}

static double lse_of(const struct smla_merge *work, int32_t part, struct place place)
{
    return *(const float *)at(&work->part_lse[part], place);
}

/* What each part's out is multiplied by. Returns the lse of all, -inf where no part has entries. */
static double weigh(const struct smla_merge *work, struct place place, float *weights)
{
    double largest = -INFINITY, sum = 0.0;
    for (int32_t i = 0; i < work->parts; i++)
        if (lse_of(work, i, place) > largest) largest = lse_of(work, i, place);
    for (int32_t i = 0; i < work->parts; i++) sum += weight_of(lse_of(work, i, place), largest);
    if (sum == 0.0) return -INFINITY;
    const double lse = largest + log(sum);
    double factor = 1.0 / sum;
    if (work->attn_sink.dtype) {
        const float *sink = work->attn_sink.data;
        factor /= 1.0 + exp(sink[place.head * work->attn_sink.stride[0]] - lse);
    }
    for (int32_t i = 0; i < work->parts; i++)
        weights[i] = (float)(weight_of(lse_of(work, i, place), largest) * factor);
    return lse;
}

static void merge_head(const struct smla_merge *work, struct place place)
{
    enum { SPAN = 64 };
    float weights[SMLA_MERGE_PARTS];
    const double lse = weigh(work, place, weights);
    void *out = at(&work->out, place);
    for (int32_t first = 0; first < work->d_v; first += SPAN) {
        const int32_t last = (int32_t)smla_clamp(first + SPAN, 0, work->d_v);
        float sums[SPAN] = {0};
        for (int32_t i = 0; i < work->parts; i++) {
            if (lse_of(work, i, place) == -INFINITY) continue;
            const void *part = at(&work->part_out[i], place);
            for (int32_t d = first; d < last; d++)
                sums[d - first] += weights[i] * read_number(part, work->part_out[i].dtype, d);
        }
        for (int32_t d = first; d < last; d++)
            write_number(out, work->out.dtype, d, sums[d - first]);
    }
    if (work->lse.dtype)
        *(float *)at(&work->lse, place) = lse == -INFINITY ? work->empty_lse : (float)lse;
}

static void merge_heads(void *context)
{
    enum { CHUNK = 16 };
    struct merge *merge = context;
    const struct smla_merge *work = merge->work;
    const int64_t all = work->batch * work->s_q * work->heads;
    for (;;) {
        const int64_t begin = atomic_fetch_add(&merge->next, CHUNK);
        if (begin >= all) return;
        const int64_t end = smla_clamp(begin + CHUNK, 0, all);
        for (int64_t i = begin; i < end; i++) {
            const int64_t row = i / work->heads;
            merge_head(work, (struct place){row / work->s_q, row % work->s_q, i % work->heads});
        }
    }
}

enum smla_status smla_cpu_merge(const struct smla_merge *work, struct smla_error *error)
{
    enum { WORTH_A_THREAD = 1 << 15 }; /* numbers to add */
    (void)error;
    struct merge merge = {.work = work};
    const int64_t numbers = work->batch * work->s_q * work->heads * work->d_v * work->parts;
    smla_pool_run(merge_heads, &merge,
                  (int32_t)smla_clamp(numbers / WORTH_A_THREAD, 1, smla_cpu_threads()));
    return SMLA_OK;
}
