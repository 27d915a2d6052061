/* Several threads attend and merge at the same time, each over the pool of the CPU backend, and
 * every result must have the bits of the first. Made for ThreadSanitizer, which cannot be loaded
 * into a running Python; it needs the core alone. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/cpu.h"
#include "plan.h"
#include "problem.h"

enum { CALLERS = 3, CALLS = 6, ROWS = 3, HEADS = 20, D_QK = 96, D_V = 64, SLOTS = 400, TOPK = 700 };

static float q[ROWS * HEADS * D_QK];
static float cache[SLOTS * D_QK];
static int32_t indices[ROWS * TOPK];

struct result {
    float out[ROWS * HEADS * D_V];
    float lse[ROWS * HEADS];
    float merged[ROWS * HEADS * D_V];
};

static struct smla_tensor tensor(const char *name, void *data, enum smla_dtype dtype, int32_t ndim,
                                 const int64_t *shape)
{
    struct smla_tensor tensor = {.name = name, .data = data, .ndim = ndim, .dtype = dtype};
    tensor.device = (struct smla_device){SMLA_CPU, 0};
    int64_t stride = 1;
    for (int32_t i = ndim - 1; i >= 0; i--) {
        tensor.shape[i] = shape[i];
        tensor.stride[i] = stride;
        stride *= shape[i];
    }
    return tensor;
}

static enum smla_status attend(struct result *result, struct smla_error *error)
{
    const int64_t out_shape[] = {ROWS, HEADS, D_V};
    struct smla_attend_args args = {
        .q = tensor("q", q, SMLA_FLOAT32, 3, (const int64_t[]){ROWS, HEADS, D_QK}),
        .source[0] =
            {
                .kv_cache = tensor("kv_cache", cache, SMLA_FLOAT32, 2,
                                   (const int64_t[]){SLOTS, D_QK}),
                .indices = tensor("indices", indices, SMLA_INT32, 2, (const int64_t[]){ROWS, TOPK}),
            },
        .out = tensor("out", result->out, SMLA_FLOAT32, 3, out_shape),
        .lse = tensor("lse", result->lse, SMLA_FLOAT32, 2, out_shape),
        .softmax_scale = {0.1, true},
        .head_dim_v = D_V,
        .has_head_dim_v = true,
    };
    struct smla_attend work;
    const struct smla_target target = {.device = args.q.device};
    struct smla_plan plan;
    SMLA_TRY(smla_problem_attend(&args, &work, error));
    SMLA_TRY(smla_plan_attend(&work, &target, NULL, &plan, error));
    return smla_cpu_attend(&work, &plan, error);
}

static enum smla_status merge(struct result *result, struct smla_error *error)
{
    const int64_t shape[] = {ROWS, HEADS, D_V};
    float lse[ROWS * HEADS];
    struct smla_merge_args args = {
        .out = tensor("out", result->merged, SMLA_FLOAT32, 3, shape),
        .lse = tensor("lse", lse, SMLA_FLOAT32, 2, shape),
        .parts = 8,
    };
    for (int32_t i = 0; i < args.parts; i++) {
        args.outs[i] = tensor("outs", result->out, SMLA_FLOAT32, 3, shape);
        args.lses[i] = tensor("lses", result->lse, SMLA_FLOAT32, 2, shape);
    }
    struct smla_merge work;
    SMLA_TRY(smla_problem_merge(&args, &work, error));
    return smla_cpu_merge(&work, error);
}

static void *call(void *argument)
{
    struct result *results = argument;
    struct smla_error error;
    for (int i = 0; i < CALLS; i++) {
        if (attend(&results[i], &error) != SMLA_OK || merge(&results[i], &error) != SMLA_OK) {
            fprintf(stderr, "%s\n", error.text);
            exit(1);
        }
    }
    return NULL;
}

int main(void)
{
    for (int i = 0; i < ROWS * HEADS * D_QK; i++) q[i] = sinf((float)i);
    for (int i = 0; i < SLOTS * D_QK; i++) cache[i] = cosf((float)i);
    for (int i = 0; i < ROWS * TOPK; i++) indices[i] = i * 37 % (SLOTS + 1) - 1;

    struct result *results = calloc(CALLERS * CALLS, sizeof *results);
    pthread_t threads[CALLERS];
    if (!results) return 1;
    for (int i = 0; i < CALLERS; i++) {
        if (pthread_create(&threads[i], NULL, call, &results[i * CALLS])) return 1;
    }
    for (int i = 0; i < CALLERS; i++) pthread_join(threads[i], NULL);

    int different = 0;
    for (int i = 1; i < CALLERS * CALLS; i++) {
        different += memcmp(&results[i], &results[0], sizeof *results) != 0;
    }
    printf("%d results, %d different from the first\n", CALLERS * CALLS, different);
    free(results);
    return different != 0;
}
