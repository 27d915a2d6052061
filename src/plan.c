#include "plan.h"

#include <stdio.h>
#include <string.h>

#include "cpu/cpu.h"
#include "gpu/kernels.h"

/* -------------------------------------------------------------------------- CPU */

/* The first kernel that runs here, or the one that was asked for by name. */
static enum smla_status plan_cpu(const struct smla_attend *work, const char *forced,
                                 struct smla_plan *plan, struct smla_error *error)
{
    const struct smla_cpu_kernel *kernels;
    int32_t count = smla_cpu_kernels(&kernels);
    char names[128] = "";
    for (int32_t i = 0; i < count; i++) {
        bool wanted = forced ? !strcmp(forced, kernels[i].name) : kernels[i].runs;
        if (wanted) {
            SMLA_FAIL_IF(!kernels[i].runs, error, SMLA_ERROR_UNSUPPORTED,
                         "SPARSE_MLA_KERNEL: %s needs %s, which this CPU does not have", forced,
                         kernels[i].isa);
            plan->kernel = kernels[i].name;
            plan->kernel_id = i;
            smla_cpu_split(work, plan);
            return SMLA_OK;
        }
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ", " : "",
                 kernels[i].name);
    }
    return smla_fail(error, SMLA_ERROR_VALUE,
                     "SPARSE_MLA_KERNEL: expected one of %s for tensors on the CPU, got '%s'",
                     names, forced);
}

/* -------------------------------------------------------------------------- GPU */

enum {
    INVARIANT_ENTRIES =
        512,          /* of a part under batch_invariant, where that makes few enough parts */
    ENTRY_STEP = 128, /* parts are multiples of what a block reads of the indices at once */
    MOST_SPLITS = 64,
};

static int64_t ceil_div(int64_t number, int64_t by)
{
    return (number + by - 1) / by;
}

/* Parts of a row: as many as fill the GPU `blocks_per_sm` deep, at least ENTRY_STEP entries each.
 * batch_invariant looks at the entries only. */
static void split_entries(const struct smla_attend *work, const struct smla_target *target,
                          int64_t blocks_per_sm, struct smla_plan *plan)
{
    int64_t entries = work->source[0].topk + (work->sources == 2 ? work->source[1].topk : 0);
    int64_t rows = work->batch * work->s_q, tiles = ceil_div(work->heads, plan->head_tile);
    int64_t blocks = rows * tiles;
    int64_t wanted = work->batch_invariant ? ceil_div(entries, INVARIANT_ENTRIES)
                     : blocks ? ceil_div(target->multiprocessors * blocks_per_sm, blocks)
                              : 1;
    int64_t most = ceil_div(entries, ENTRY_STEP);
    if (wanted > most) wanted = most;
    if (wanted > MOST_SPLITS) wanted = MOST_SPLITS;
    if (wanted < 1) wanted = 1;
    plan->split_entries = ceil_div(ceil_div(entries, wanted), ENTRY_STEP) * ENTRY_STEP;
    plan->splits = entries ? (int32_t)ceil_div(entries, plan->split_entries) : 1;
    plan->launches = plan->splits > 1 ? 2 : 1;
    if (plan->splits > 1)
        plan->workspace_bytes = plan->splits * rows * work->heads * (work->d_v + 2) * 4;
}

/* Any dtype, format and width: q and the sums of eight heads in shared memory, or of one. */
static enum smla_status plan_any(const struct smla_attend *work, const struct smla_target *target,
                                 struct smla_plan *plan, struct smla_error *error)
{
    int64_t a_head = (int64_t)(work->d_qk + work->d_v) * 4;
    bool wide = SMLA_ANY_FIXED_BYTES + SMLA_ANY_HEADS * a_head > SMLA_ANY_SHARED_BYTES;
    plan->kernel = "any";
    plan->kernel_id = wide ? SMLA_KERNEL_ATTEND_WIDE : SMLA_KERNEL_ATTEND;
    plan->head_tile = wide ? 1 : SMLA_ANY_HEADS;
    int64_t shared = SMLA_ANY_FIXED_BYTES + plan->head_tile * a_head;
    SMLA_FAIL_IF(
        shared > SMLA_ANY_SHARED_BYTES, error, SMLA_ERROR_UNSUPPORTED,
        "attend: on a GPU d_qk + d_v is at most %d, got %d + %d; tensors on the CPU may be "
        "wider",
        (SMLA_ANY_SHARED_BYTES - SMLA_ANY_FIXED_BYTES) / 4, work->d_qk, work->d_v);
    plan->shared_bytes = (int32_t)shared;
    split_entries(work, target, 4, plan);
    return SMLA_OK;
}

static enum smla_status plan_gpu(const struct smla_attend *work, const struct smla_target *target,
                                 const char *forced, struct smla_plan *plan,
                                 struct smla_error *error)
{
    SMLA_FAIL_IF(forced && strcmp(forced, "any") != 0, error, SMLA_ERROR_VALUE,
                 "SPARSE_MLA_KERNEL: expected 'any' for tensors on a GPU, got '%s'", forced);
    SMLA_TRY(plan_any(work, target, plan, error));
    int64_t blocks = work->batch * work->s_q * ceil_div(work->heads, plan->head_tile);
    SMLA_FAIL_IF(blocks > INT32_MAX / plan->splits, error, SMLA_ERROR_UNSUPPORTED,
                 "attend: a launch has at most 2^31 blocks, got %lld rows of %d heads; call it for "
                 "parts of them",
                 (long long)(work->batch * work->s_q), work->heads);
    return SMLA_OK;
}

enum smla_status smla_plan_attend(const struct smla_attend *work, const struct smla_target *target,
                                  const char *forced, struct smla_plan *plan,
                                  struct smla_error *error)
{
    memset(plan, 0, sizeof *plan);
    return target->device.type == SMLA_CPU ? plan_cpu(work, forced, plan, error)
                                           : plan_gpu(work, target, forced, plan, error);
}
