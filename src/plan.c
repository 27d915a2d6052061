#include "plan.h"

#include <stdio.h>
#include <string.h>

#include "cpu/cpu.h"
#include "gpu/kernels.h"
#include "sm80_kernels.h"

/* -------------------------------------------------------------------------- CPU */

static enum smla_status fail_cpu_kernel(const struct smla_cpu_kernel *kernels, int32_t count,
                                        const char *forced, struct smla_error *error)
{
    char names[128] = "";
    for (int32_t i = 0; i < count; i++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", i ? ", " : "",
                 kernels[i].name);
    return smla_fail(error, SMLA_ERROR_VALUE,
                     "SPARSE_MLA_KERNEL: expected one of %s for tensors on the CPU, got '%s'",
                     names, forced);
}

/* The first kernel that runs here, or the one that was asked for by name. */
static enum smla_status plan_cpu(const struct smla_attend *work, const char *forced,
                                 struct smla_plan *plan, struct smla_error *error)
{
    const struct smla_cpu_kernel *kernels;
    int32_t count = smla_cpu_kernels(&kernels), i = 0;
    while (i < count && !(forced ? !strcmp(forced, kernels[i].name) : kernels[i].runs)) i++;
    if (i == count) return fail_cpu_kernel(kernels, count, forced, error);
    SMLA_FAIL_IF(!kernels[i].runs, error, SMLA_ERROR_UNSUPPORTED,
                 "SPARSE_MLA_KERNEL: %s needs %s, which this CPU does not have", forced,
                 kernels[i].isa);
    plan->kernel = kernels[i].name;
    plan->kernel_id = i;
    smla_cpu_split(work, plan);
    return SMLA_OK;
}

/* -------------------------------------------------------------------------- GPU */

static int64_t ceil_div(int64_t number, int64_t by)
{
    return (number + by - 1) / by;
}

static int64_t rows_of(const struct smla_attend *work)
{
    return work->batch * work->s_q;
}

static int64_t entries_of(const struct smla_attend *work)
{
    return work->source[0].topk + (work->sources == 2 ? work->source[1].topk : 0);
}

/* About `wanted` parts of a row, each a multiple of `step` entries, for so many heads of all rows.
 */
static void set_splits(const struct smla_attend *work, int64_t heads, int64_t wanted, int64_t step,
                       struct smla_plan *plan)
{
    int64_t entries = entries_of(work);
    if (wanted > SMLA_MOST_SPLITS) wanted = SMLA_MOST_SPLITS;
    if (wanted < 1) wanted = 1;
    plan->split_entries = ceil_div(ceil_div(entries, wanted), step) * step;
    plan->splits = entries ? (int32_t)ceil_div(entries, plan->split_entries) : 1;
    plan->launches = plan->splits > 1 ? 2 : 1;
    plan->merged_heads = heads;
    if (plan->splits > 1) plan->workspace_bytes = plan->splits * heads * (work->d_v + 2) * 4;
}

/* Any dtype, format and width: q and the sums of eight heads in shared memory, or of one. Rows are
 * cut until the GPU is filled four blocks deep; batch_invariant looks at the entries alone. */
static enum smla_status plan_any(const struct smla_attend *work, const struct smla_target *target,
                                 struct smla_plan *plan, struct smla_error *error)
{
    enum { ENTRY_STEP = 128, INVARIANT_ENTRIES = 512, DEPTH = 4 };
    int64_t sums = work->q_dtype == SMLA_FLOAT32 ? 2 : 1; /* and what they have lost */
    int64_t a_head = (work->d_qk + work->d_v * sums) * 4;
    bool wide = SMLA_ANY_FIXED_BYTES + SMLA_ANY_HEADS * a_head > SMLA_ANY_SHARED_BYTES;
    plan->kernel = "any";
    plan->kernel_id = wide ? SMLA_KERNEL_ATTEND_WIDE : SMLA_KERNEL_ATTEND;
    plan->combine_id = SMLA_KERNEL_COMBINE;
    plan->head_tile = wide ? 1 : SMLA_ANY_HEADS;
    int64_t shared = SMLA_ANY_FIXED_BYTES + plan->head_tile * a_head;
    SMLA_FAIL_IF(shared > SMLA_ANY_SHARED_BYTES, error, SMLA_ERROR_UNSUPPORTED,
                 "attend: on a GPU %s is at most %d, got d_qk %d and d_v %d; tensors on the CPU "
                 "may be wider",
                 sums == 1 ? "d_qk + d_v" : "d_qk + 2 * d_v (float32)",
                 (SMLA_ANY_SHARED_BYTES - SMLA_ANY_FIXED_BYTES) / 4, work->d_qk, work->d_v);
    plan->shared_bytes = (int32_t)shared;
    int64_t pieces = rows_of(work) * ceil_div(work->heads, plan->head_tile);
    int64_t wanted = work->batch_invariant ? ceil_div(entries_of(work), INVARIANT_ENTRIES)
                     : pieces              ? ceil_div(target->multiprocessors * DEPTH, pieces)
                                           : 1;
    int64_t most = ceil_div(entries_of(work), ENTRY_STEP);
    set_splits(work, rows_of(work) * work->heads, wanted < most ? wanted : most, ENTRY_STEP, plan);
    return SMLA_OK;
}

/* The tensor-core kernels, by what they are made for: `sm80`, and `sm90` of packed caches, are
 * followed by the ones for 32 and 64 heads, `sm90` of dense ones is for 64; 0: there is none. */
static const struct {
    enum smla_dtype dtype;
    enum smla_format format;
    int32_t d_qk;
    int32_t sm80;
    int32_t sm90;
} TENSOR_CORES[] = {
    {SMLA_BFLOAT16, SMLA_DENSE, 576, SMLA_KERNEL_sm80_bf16_576_16, SMLA_KERNEL_sm90_bf16_576_64},
    {SMLA_BFLOAT16, SMLA_DENSE, 512, SMLA_KERNEL_sm80_bf16_512_16, SMLA_KERNEL_sm90_bf16_512_64},
    {SMLA_BFLOAT16, SMLA_FP8_DS_MLA, 576, SMLA_KERNEL_sm80_bf16_fp8_ds_mla_16,
     SMLA_KERNEL_sm90_bf16_fp8_ds_mla_16},
    {SMLA_BFLOAT16, SMLA_FP8_DS_MLA_NOROPE, 512, SMLA_KERNEL_sm80_bf16_fp8_ds_mla_norope_16,
     SMLA_KERNEL_sm90_bf16_fp8_ds_mla_norope_16},
    {SMLA_BFLOAT16, SMLA_FP8_TENSOR, 576, SMLA_KERNEL_sm80_bf16_fp8_tensor_16, 0},
    {SMLA_FLOAT16, SMLA_DENSE, 576, SMLA_KERNEL_sm80_fp16_576_16, 0},
    {SMLA_FLOAT16, SMLA_DENSE, 512, SMLA_KERNEL_sm80_fp16_512_16, 0},
    {SMLA_FLOAT16, SMLA_FP8_DS_MLA, 576, SMLA_KERNEL_sm80_fp16_fp8_ds_mla_16, 0},
    {SMLA_FLOAT16, SMLA_FP8_DS_MLA_NOROPE, 512, SMLA_KERNEL_sm80_fp16_fp8_ds_mla_norope_16, 0},
    {SMLA_FLOAT16, SMLA_FP8_TENSOR, 576, SMLA_KERNEL_sm80_fp16_fp8_tensor_16, 0},
};

static bool is_aligned(const struct smla_source *source)
{
    return (uintptr_t)source->cache % 16 == 0 && source->block_stride % 16 == 0 &&
           source->token_stride % 16 == 0;
}

/* The line of TENSOR_CORES that takes the work, or -1. */
static int32_t find_tensor_cores(const struct smla_attend *work)
{
    const struct smla_source *source = work->source;
    if (work->d_v != 512 || (work->q_width[0] != 512 && work->q_width[1] != 0)) return -1;
    for (int i = 0; i < work->sources; i++)
        if (source[i].format != source[0].format || !is_aligned(&source[i])) return -1;
    for (int32_t i = 0; i < (int32_t)(sizeof TENSOR_CORES / sizeof *TENSOR_CORES); i++)
        if ((int32_t)TENSOR_CORES[i].dtype == work->q_dtype &&
            (int32_t)TENSOR_CORES[i].format == source[0].format &&
            TENSOR_CORES[i].d_qk == work->d_qk)
            return i;
    return -1;
}

/* Heads of a block: as few tiles as share the gather, but one of 16 heads each while there are so
 * few rows that blocks are wanted more than shared reads. */
static int32_t sm80_heads(const struct smla_attend *work)
{
    enum { FEW_PIECES = 16 };
    bool few = !work->batch_invariant && rows_of(work) * ceil_div(work->heads, 16) <= FEW_PIECES;
    return work->heads <= 16 || few ? 16 : work->heads <= 32 ? 32 : 64;
}

/* Which of a format's kernels is for so many heads. */
static int32_t kernel_of_heads(int64_t head_tile)
{
    return head_tile == 16 ? 0 : head_tile == 32 ? 1 : 2;
}

/* How a kernel cuts the work: what the cost of splits depends on, and the splits. */
struct split_shape {
    int64_t pieces; /* rows times head tiles */
    int64_t heads;  /* of a tile */
    int64_t multiprocessors;
    int64_t resident; /* blocks that one of them holds */
    int64_t cut;      /* pieces that are cut */
    int64_t entries;  /* of a row */
    int64_t tile;     /* entries of one */
    int64_t tiles;    /* of a row */
    int64_t splits;   /* the cheapest, or, for batch_invariant, by the entries alone */
    double cost;      /* of the cheapest */
};

typedef double split_cost(const struct split_shape *shape, int64_t splits);

/* What `splits` parts of a row cost, in the time of a tile: every round of blocks its longest part
 * and a block's start and end, all of it slower where blocks share a multiprocessor, and a little
 * for the merging. */
static double sm80_cost(const struct split_shape *shape, int64_t splits)
{
    const double start_and_end = 5.0, sharing = 0.6, merging = 0.035;
    int64_t merged = shape->pieces < 8 ? shape->pieces : 8;
    int64_t deep = ceil_div(shape->pieces * splits, shape->multiprocessors);
    int64_t beside = deep < shape->resident ? deep : shape->resident;
    return (double)ceil_div(deep, shape->resident) * (1.0 + sharing * (double)(beside - 1)) *
               ((double)ceil_div(shape->tiles, splits) + start_and_end) +
           merging * (double)(splits * merged);
}

/* The splits of the least cost, the fewest of equals. Of those whose longest part has the same
 * length the fewest cost the least, so that only these are looked at: some 20 instead of 64. */
static void find_cheapest(struct split_shape *shape, split_cost *cost_of)
{
    int64_t longest = shape->tiles;
    shape->splits = 1;
    shape->cost = cost_of(shape, 1);
    while (longest > 1) {
        int64_t splits = ceil_div(shape->tiles, longest - 1);
        if (splits > SMLA_MOST_SPLITS) break;
        double cost = cost_of(shape, splits);
        if (cost < shape->cost) {
            shape->cost = cost;
            shape->splits = splits;
        }
        longest = ceil_div(shape->tiles, splits);
    }
}

static void choose_splits(const struct smla_attend *work, struct split_shape *shape,
                          split_cost *cost_of)
{
    enum { INVARIANT_ENTRIES = 256 }; /* of a split, at most, for batch_invariant */
    if (work->batch_invariant)
        shape->splits = ceil_div(shape->entries, INVARIANT_ENTRIES);
    else
        find_cheapest(shape, cost_of);
}

static void set_combine(struct smla_plan *plan)
{
    plan->combine_id = plan->splits <= SMLA_COMBINE_LOADS ? SMLA_KERNEL_SM80_COMBINE
                                                          : SMLA_KERNEL_SM80_COMBINE_MANY;
}

static int32_t sm80_kernel(int32_t line, int64_t heads)
{
    return TENSOR_CORES[line].sm80 + kernel_of_heads(heads);
}

static struct split_shape sm80_shape(const struct smla_attend *work,
                                     const struct smla_target *target, int32_t line)
{
    enum { RESERVED_BYTES = 1024 };
    int64_t heads = sm80_heads(work);
    int64_t tile = heads == 16 ? 32 : 16; /* see block_of in cuda/sm80_attend.cuh */
    int64_t bytes = smla_gpu_kernels[sm80_kernel(line, heads)].shared_bytes;
    int64_t resident = heads == 64 ? 1 : 2; /* that the registers hold */
    int64_t room = (target->shared_bytes + RESERVED_BYTES) / (bytes + RESERVED_BYTES);
    if (room < resident) resident = room < 1 ? 1 : room;
    struct split_shape shape = {
        .pieces = rows_of(work) * ceil_div(work->heads, heads),
        .heads = heads,
        .multiprocessors = target->multiprocessors,
        .resident = resident,
        .entries = entries_of(work),
        .tile = tile,
        .tiles = ceil_div(entries_of(work), tile),
    };
    choose_splits(work, &shape, sm80_cost);
    return shape;
}

static void plan_sm80(const struct smla_attend *work, int32_t line, const struct split_shape *shape,
                      struct smla_plan *plan)
{
    plan->kernel = "sm80";
    plan->head_tile = (int32_t)shape->heads;
    plan->kernel_id = sm80_kernel(line, shape->heads);
    plan->shared_bytes = smla_gpu_kernels[plan->kernel_id].shared_bytes;
    set_splits(work, rows_of(work) * work->heads, shape->splits, shape->tile, plan);
    set_combine(plan);
}

/* What `splits` parts of the last pieces cost, in the time of an entry: the rounds of whole pieces
 * before them, their own, every block's start and end, and the merging. Measured, see
 * docs/performance.md. */
static double sm90_cost(const struct split_shape *shape, int64_t splits)
{
    const bool few = shape->heads <= 32; /* whose entries take less */
    const double start_and_end = few ? 290.0 : 170.0, merging_start = few ? 120.0 : 100.0;
    const double merging = 1.0; /* a part */
    const double many = splits > SMLA_COMBINE_LOADS && !few ? 96.0 : 0.0;
    int64_t part = splits > 1 ? ceil_div(shape->tiles, splits) * shape->tile : shape->entries;
    int64_t whole_rounds = ceil_div(shape->pieces - shape->cut, shape->multiprocessors);
    int64_t cut_rounds = ceil_div(shape->cut * splits, shape->multiprocessors);
    return (double)whole_rounds * ((double)shape->entries + start_and_end) +
           (double)cut_rounds * ((double)part + start_and_end) +
           (splits > 1 ? merging_start + many + merging * (double)(shape->cut * splits) : 0.0);
}

static bool is_dense(const struct smla_attend *work)
{
    return work->source[0].format == SMLA_DENSE;
}

static int32_t sm90_heads(const struct smla_attend *work)
{
    return is_dense(work)      ? SMLA_SM90_DENSE_HEADS
           : work->heads <= 16 ? 16
           : work->heads <= 32 ? 32
                               : 64;
}

/* The pieces that fill rounds of blocks stay whole; the others, or all where there are fewer than
 * multiprocessors, are cut as costs the least. */
static struct split_shape sm90_shape(const struct smla_attend *work,
                                     const struct smla_target *target)
{
    int64_t tile = is_dense(work) ? SMLA_SM90_DENSE_TILE : SMLA_SM90_PACKED_TILE;
    int64_t heads = sm90_heads(work), pieces = rows_of(work) * ceil_div(work->heads, heads);
    struct split_shape shape = {
        .pieces = pieces,
        .heads = heads,
        .multiprocessors = target->multiprocessors,
        .cut = work->batch_invariant ? pieces : pieces % target->multiprocessors,
        .entries = entries_of(work),
        .tile = tile,
        .tiles = ceil_div(entries_of(work), tile),
    };
    choose_splits(work, &shape, sm90_cost);
    return shape;
}

/* Hopper's own products. */
static void plan_sm90(const struct smla_attend *work, int32_t line, const struct split_shape *shape,
                      struct smla_plan *plan)
{
    plan->kernel = "sm90";
    plan->head_tile = (int32_t)shape->heads;
    plan->kernel_id = TENSOR_CORES[line].sm90 +
                      (is_dense(work) ? 0 : kernel_of_heads(shape->heads));
    plan->shared_bytes = smla_gpu_kernels[plan->kernel_id].shared_bytes;
    set_splits(work, shape->cut * shape->heads, shape->splits, shape->tile, plan);
    int64_t cut = plan->splits == 1 ? shape->pieces : shape->cut;
    plan->whole = (int32_t)(shape->pieces - cut);
    plan->cut_pieces = (int32_t)cut;
    set_combine(plan);
}

/* Whether Hopper's own products may pay at all: not for very short rows. Where a row's bits must
 * not depend on the number of rows, all take sm80. */
static bool sm90_may_pay(const struct smla_attend *work)
{
    enum { FEW_ENTRIES = 512 };
    return !work->batch_invariant && entries_of(work) >= FEW_ENTRIES;
}

/* Whether both are close: for up to 16 heads over packed caches, from a few rows on. */
static bool are_close(const struct smla_attend *work)
{
    enum { FEW_ROWS = 8 };
    return !is_dense(work) && work->heads <= 16 && rows_of(work) >= FEW_ROWS;
}

/* Of 16 heads. Measured, see docs/performance.md. */
static bool sm90_costs_less(const struct split_shape *sm90, const struct split_shape *sm80)
{
    const double entry = 0.0235, tile_alone = 1.33, tile_beside = 1.1; /* microseconds */
    bool alone = sm80->pieces * sm80->splits <= sm80->multiprocessors;
    return entry * sm90->cost < (alone ? tile_alone : tile_beside) * sm80->cost;
}

/* sm90 where it has to be or pays: wherever sm80 would have blocks of more than 16 heads, and where
 * both are close and it costs less. */
static void plan_tensor_cores(const struct smla_attend *work, const struct smla_target *target,
                              int32_t line, bool must_sm90, bool can_sm90, struct smla_plan *plan)
{
    bool may_sm90 = can_sm90 && sm90_may_pay(work);
    if (must_sm90 || (may_sm90 && sm80_heads(work) > 16)) {
        const struct split_shape sm90 = sm90_shape(work, target);
        plan_sm90(work, line, &sm90, plan);
        return;
    }
    const struct split_shape sm80 = sm80_shape(work, target, line);
    if (may_sm90 && are_close(work)) {
        const struct split_shape sm90 = sm90_shape(work, target);
        if (sm90_costs_less(&sm90, &sm80)) {
            plan_sm90(work, line, &sm90, plan);
            return;
        }
    }
    plan_sm80(work, line, &sm80, plan);
}

/* The tensor-core kernels where they take the work, the kernel for any shape where they do not. */
static enum smla_status plan_gpu(const struct smla_attend *work, const struct smla_target *target,
                                 const char *forced, struct smla_plan *plan,
                                 struct smla_error *error)
{
    bool sm90 = forced && !strcmp(forced, "sm90"), sm80 = forced && !strcmp(forced, "sm80");
    bool any = forced && !strcmp(forced, "any");
    SMLA_FAIL_IF(forced && !sm90 && !sm80 && !any, error, SMLA_ERROR_VALUE,
                 "SPARSE_MLA_KERNEL: expected 'any', 'sm80' or 'sm90' for tensors on a GPU, got "
                 "'%s'",
                 forced);
    int32_t line = any ? -1 : find_tensor_cores(work);
    bool can_sm90 = line >= 0 && TENSOR_CORES[line].sm90 && target->sm90;
    SMLA_FAIL_IF(sm80 && line < 0, error, SMLA_ERROR_UNSUPPORTED,
                 "SPARSE_MLA_KERNEL: sm80 takes bfloat16 and float16 queries of d_qk 576 or 512 "
                 "(as a pair: 512 and the rest), d_v 512, caches of one format whose rows are "
                 "aligned to 16 bytes");
    SMLA_FAIL_IF(sm90 && !can_sm90, error, SMLA_ERROR_UNSUPPORTED,
                 "SPARSE_MLA_KERNEL: sm90 takes what sm80 takes of bfloat16 queries, but "
                 "fp8_tensor, on GPUs of compute capability 9.0");
    if (line < 0)
        SMLA_TRY(plan_any(work, target, plan, error));
    else
        plan_tensor_cores(work, target, line, sm90, can_sm90 && !sm80, plan);
    int64_t blocks = rows_of(work) * ceil_div(work->heads, plan->head_tile);
    SMLA_FAIL_IF(blocks > INT32_MAX / plan->splits || rows_of(work) * work->heads > INT32_MAX / 4,
                 error, SMLA_ERROR_UNSUPPORTED,
                 "attend: a launch has at most 2^31 blocks, got %lld rows of %d heads; call it for "
                 "parts of them",
                 (long long)rows_of(work), work->heads);
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
