#include "layout.h"

#include <string.h>

#include "cpu.h"

/* Entries of a split, and how many splits, follow from shapes alone: a row's bits depend on them.
 * Heads of a tile and the workspace also follow from the number of threads: no bit does. */
enum {
    ENOUGH_PARTS = SMLA_MOST_SPLITS,         /* of all rows, from which on none is split */
    PART_HEADS = 32,                         /* heads of a part, when they are counted */
    LEAST_SPLIT = 4 * SMLA_TILE_ENTRIES,     /* entries that are worth a part of their own */
    INVARIANT_SPLIT = 8 * SMLA_TILE_ENTRIES, /* the same with batch_invariant: many rows pay it */
    INVARIANT_SPLITS = 16,                   /* at most */
    LEAST_HEADS = 16,                        /* heads that are worth a gather of their own */
    TASKS_A_THREAD = 4,                      /* so that threads finish at about the same time */
    MOST_WORKSPACE = 128 << 20,              /* bytes */
};

static int64_t ceil_div(int64_t number, int64_t by)
{
    return (number + by - 1) / by;
}

static int64_t round_up(int64_t number, int64_t multiple)
{
    return ceil_div(number, multiple) * multiple;
}

static int64_t at_least(int64_t number, int64_t least)
{
    return number < least ? least : number;
}

size_t smla_aligned(size_t bytes)
{
    return (bytes + SMLA_ALIGNMENT - 1) / SMLA_ALIGNMENT * SMLA_ALIGNMENT;
}

/* Float32 results are held to 2^-21, and equal numbers that are added one after another err alike:
 * tiles of few entries, runs of few tiles, and runs joined in pairs make the chain of additions
 * short. Other results need no runs. */
enum { EXACT_TILE = 16, EXACT_RUN = 8 * EXACT_TILE };

/* Whole tiles. With batch_invariant the number of rows has no say; without it, few rows are split
 * until there is work for many cores. */
static int64_t share_of_split(const struct smla_attend *work, int64_t entries)
{
    if (work->batch_invariant) {
        const int64_t share = ceil_div(entries, INVARIANT_SPLITS);
        return round_up(at_least(share, INVARIANT_SPLIT), SMLA_TILE_ENTRIES);
    }
    const int64_t parts = work->batch * work->s_q * ceil_div(work->heads, PART_HEADS);
    const int64_t splits = ceil_div(ENOUGH_PARTS, at_least(parts, 1));
    return round_up(at_least(ceil_div(entries, splits), LEAST_SPLIT), SMLA_TILE_ENTRIES);
}

/* As many heads as leave tasks enough, since every tile of heads gathers the entries anew. */
static int32_t head_tile(const struct smla_attend *work, int64_t splits)
{
    const int64_t tasks = work->batch * work->s_q * splits;
    int64_t most = SMLA_TILE_HEADS;
    while (most > LEAST_HEADS &&
           tasks * ceil_div(work->heads, most) < TASKS_A_THREAD * smla_cpu_threads())
        most /= 2;
    return (int32_t)ceil_div(work->heads, ceil_div(work->heads, most));
}

void smla_cpu_split(const struct smla_attend *work, struct smla_plan *plan)
{
    int64_t entries = 0;
    for (int which = 0; which < work->sources; which++)
        entries = at_least(entries, work->source[which].topk);
    plan->split_entries = share_of_split(work, entries);
    plan->splits = (int32_t)at_least(ceil_div(entries, plan->split_entries), 1);
    plan->head_tile = head_tile(work, plan->splits);
    plan->launches = 0;

    struct smla_cpu_layout layout;
    smla_cpu_lay_out(work, plan, &layout);
    plan->workspace_bytes = (int64_t)(layout.parts * layout.part_bytes);
}

/* Numbers from a row of `depth` numbers to the next, of which `line` fill a cache line: an odd
 * number of lines, so that the rows of a tile do not fall into the same sets of the first-level
 * cache. */
static int32_t pitch_of(int32_t depth, int32_t line)
{
    return (int32_t)(ceil_div(depth, line) | 1) * line;
}

static void set_shape(const struct smla_attend *work, const struct smla_tile_kernel *kernel,
                      struct smla_tile *shape)
{
    memset(shape, 0, sizeof *shape);
    shape->d_qk = work->d_qk;
    shape->d_v = work->d_v;
    shape->depth = (int32_t)round_up(work->d_qk, kernel->granule);
    shape->value_depth = (int32_t)round_up(work->d_v, kernel->granule);
    shape->pitch = pitch_of(shape->depth, 16);
    shape->value_pitch = pitch_of(shape->value_depth, 16);
    shape->pair_pitch = kernel->pairs ? pitch_of(shape->depth, 32) : 0;
    shape->dtype = (enum smla_dtype)work->q_dtype;
    shape->softmax_scale = work->softmax_scale;
    shape->logit_cap = work->logit_cap;
}

/* Levels on which `count` results are joined in pairs: the last one needs none of its own. */
static int32_t levels_for(int64_t count)
{
    int32_t levels = 0;
    for (int64_t rest = count - 1; rest > 0; rest /= 2) levels++;
    return levels;
}

/* Peaks and sums are padded so that the sums begin on a cache line of their own. */
static int32_t padded_heads(const struct smla_cpu_layout *layout)
{
    return (int32_t)round_up(layout->head_tile, 16);
}

void smla_cpu_lay_out(const struct smla_attend *work, const struct smla_plan *plan,
                      struct smla_cpu_layout *layout)
{
    memset(layout, 0, sizeof *layout);
    const struct smla_tile_kernel *kernel = smla_tile_kernel(
        plan->kernel_id, (enum smla_dtype)work->q_dtype, work->heads);
    set_shape(work, kernel, &layout->shape);
    layout->rows = work->batch * work->s_q;
    layout->head_tile = plan->head_tile;
    layout->tiles = (int32_t)ceil_div(work->heads, plan->head_tile);
    layout->splits = plan->splits;
    layout->split_entries = plan->split_entries;
    const bool exact = work->q_dtype == SMLA_FLOAT32;
    layout->tile_entries = exact ? EXACT_TILE : kernel->entries;
    layout->run_entries = exact ? EXACT_RUN : INT64_MAX;
    if (exact)
        layout->run_levels = levels_for(work->sources * ceil_div(plan->split_entries, EXACT_RUN));
    const size_t heads = (size_t)plan->head_tile;
    const size_t pitch = (size_t)layout->shape.pitch * sizeof(float);
    const size_t pair_pitch = (size_t)layout->shape.pair_pitch * sizeof(uint16_t);
    const size_t value_pitch = (size_t)layout->shape.value_pitch * sizeof(float);
    layout->query_bytes = smla_aligned(heads * (pair_pitch ? pair_pitch : pitch));
    layout->pairs_bytes = smla_aligned(SMLA_TILE_ENTRIES * pair_pitch);
    if (kernel->own_bytes) {
        layout->shape.heads = plan->head_tile;
        layout->own_bytes = smla_aligned(kernel->own_bytes(&layout->shape));
    } else {
        layout->keys_bytes = smla_aligned(SMLA_TILE_ENTRIES * pitch);
        layout->scores_bytes = smla_aligned(heads * SMLA_TILE_ENTRIES * sizeof(float));
    }
    layout->part_bytes = smla_aligned(heads * value_pitch +
                                      2 * (size_t)padded_heads(layout) * sizeof(float));

    const size_t units = (size_t)layout->rows * (size_t)layout->tiles;
    const size_t parts = units * (size_t)plan->splits;
    layout->apart = plan->splits > 1 && units < TASKS_A_THREAD * (size_t)smla_cpu_threads() &&
                    parts * layout->part_bytes <= MOST_WORKSPACE;
    layout->parts = layout->apart ? parts : 0;
    layout->split_levels = layout->apart ? 0 : levels_for(plan->splits);
}

struct smla_part smla_part_at(const struct smla_cpu_layout *layout, uint8_t *memory)
{
    float *values = (float *)memory;
    float *peak = values + (size_t)layout->head_tile * (size_t)layout->shape.value_pitch;
    return (struct smla_part){values, peak, peak + padded_heads(layout), 0};
}
