/* One call of attend on the CPU.
 *
 * The work is cut into tasks, in this order: a row, a tile of heads, and a split of the row's
 * entries. A task walks the entries of its split in each source (smla_resolve), keeps the rows of
 * the valid ones, and hands them to the tile kernel, a tile at a time, which carries the softmax
 * on: attend_split. The splits of a row are then joined: fold. At last the sums are divided, scaled
 * by the sink and stored: finish.
 *
 * Splits are joined in pairs, and pairs in pairs, as are the runs of entries that a split of a
 * float32 row is made of: errors of rounding grow with the logarithm of their number.
 *
 * Where rows and head tiles alone are tasks enough, a task runs all splits of its row one after
 * the other; where they are few, splits are tasks of their own, their results wait in a workspace
 * and a second round of tasks joins them. Both do the same arithmetic in the same order. Only the
 * splits decide bits, and they follow from shapes; head tiles and threads do not show. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "layout.h"
#include "pool.h"
#include "slot.h"
#include "tensor.h"

enum {
    LISTED_ROWS = 128, /* cache rows that are resolved before they are read: whole tiles */
    FOLD_HEADS = 4,    /* heads of one task of the second round */
};

/* What all threads of a call share: the work, and the counters that they take theirs from. */
struct call {
    const struct smla_attend *work;
    const struct smla_tile_kernel *kernel;
    struct smla_cpu_layout layout;
    uint8_t *scratch;       /* of thread t from t * scratch_bytes() on */
    uint8_t *parts;         /* of (row, head tile, split), where splits lie apart */
    int64_t *split_entries; /* valid entries of each of those */
    int64_t tasks;
    _Atomic int64_t next_task;
    _Atomic int32_t next_thread;
};

/* Some heads of a row. */
struct place {
    int64_t batch;
    int64_t query;
    int32_t head;
    int32_t heads;
};

static int32_t smaller(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* `unit` numbers rows and, inside them, head tiles. */
static struct place place_of(const struct call *call, int64_t unit)
{
    const struct smla_cpu_layout *layout = &call->layout;
    const int64_t row = unit / layout->tiles;
    const int32_t head = (int32_t)(unit % layout->tiles) * layout->head_tile;
    return (struct place){row / call->work->s_q, row % call->work->s_q, head,
                          smaller(call->work->heads - head, layout->head_tile)};
}

/* -------------------------------------------------------------------------- joining */

/* Results in the order in which they came: level i holds the sum of 2^i of them where bit i of
 * `count` is set. */
struct ladder {
    int64_t count;
    struct smla_part level[SMLA_MOST_LEVELS];
};

/* total += part. A first result is taken as it is: an empty total has nothing to fold into. */
static void fold(const struct call *call, struct smla_part *total, const struct smla_part *part,
                 int32_t heads)
{
    if (part->entries == 0) return;
    if (total->entries) {
        call->kernel->fold(&call->layout.shape, total, part, heads);
        return;
    }
    const size_t floats = (size_t)heads * (size_t)call->layout.shape.value_pitch;
    memcpy(total->values, part->values, floats * sizeof(float));
    memcpy(total->peak, part->peak, (size_t)heads * sizeof(float));
    memcpy(total->sum, part->sum, (size_t)heads * sizeof(float));
    total->entries = part->entries;
}

/* Puts `part`, after which others come, on the ladder and makes it empty. */
static void climb(const struct call *call, struct ladder *ladder, struct smla_part *part,
                  int32_t heads)
{
    const struct smla_part *sum = part;
    int32_t i = 0;
    for (; ladder->count >> i & 1; sum = &ladder->level[i++])
        fold(call, &ladder->level[i], sum, heads);
    ladder->level[i].entries = 0;
    fold(call, &ladder->level[i], sum, heads);
    ladder->count++;
    part->entries = 0;
}

/* Makes `part`, the last one, the sum of all, and empties the ladder. */
static void come_down(const struct call *call, struct ladder *ladder, struct smla_part *part,
                      int32_t heads)
{
    const struct smla_part *sum = part;
    for (int32_t i = 0; ladder->count >> i; i++) {
        if (!(ladder->count >> i & 1)) continue;
        fold(call, &ladder->level[i], sum, heads);
        sum = &ladder->level[i];
    }
    ladder->count = 0;
    if (sum == part) return;
    part->entries = 0;
    fold(call, part, sum, heads);
}

/* -------------------------------------------------------------------------- memory of a thread */

struct scratch {
    struct smla_tile tile;
    struct smla_part part; /* the split under way, where splits do not lie apart */
    struct ladder runs;    /* of the split under way */
    struct ladder splits;  /* of the row under way */
    const uint8_t *rows[LISTED_ROWS];
};

static size_t scratch_bytes(const struct smla_cpu_layout *layout)
{
    return smla_aligned(sizeof(struct scratch)) + layout->query_bytes + layout->keys_bytes +
           layout->pairs_bytes + layout->scores_bytes + layout->own_bytes +
           (size_t)(1 + layout->run_levels + layout->split_levels) * layout->part_bytes;
}

static uint8_t *take_levels(const struct smla_cpu_layout *layout, struct ladder *ladder,
                            int32_t levels, uint8_t *memory)
{
    ladder->count = 0;
    for (int32_t i = 0; i < levels; i++, memory += layout->part_bytes)
        ladder->level[i] = smla_part_at(layout, memory);
    return memory;
}

/* The next thread's scratch. What lies past d_qk in a query or key is never written again. */
static struct scratch *take_scratch(struct call *call)
{
    const struct smla_cpu_layout *layout = &call->layout;
    const size_t thread = (size_t)atomic_fetch_add(&call->next_thread, 1);
    uint8_t *memory = call->scratch + thread * scratch_bytes(layout);
    struct scratch *scratch = (struct scratch *)memory;
    memory += smla_aligned(sizeof *scratch);
    scratch->tile = layout->shape;
    scratch->tile.query = memory;
    memory += layout->query_bytes;
    scratch->tile.keys = (float *)memory;
    memory += layout->keys_bytes;
    scratch->tile.pairs = (uint16_t *)memory;
    memory += layout->pairs_bytes;
    scratch->tile.scores = (float *)memory;
    memory += layout->scores_bytes;
    scratch->tile.own = memory;
    memory += layout->own_bytes;
    scratch->part = smla_part_at(layout, memory);
    memory += layout->part_bytes;
    memory = take_levels(layout, &scratch->runs, layout->run_levels, memory);
    take_levels(layout, &scratch->splits, layout->split_levels, memory);
    if (layout->shape.depth != layout->shape.d_qk)
        memset(scratch->tile.query, 0,
               layout->query_bytes + layout->keys_bytes + layout->pairs_bytes);
    return scratch;
}

/* -------------------------------------------------------------------------- one split */

static void load_query(const struct call *call, struct smla_tile *tile, struct place at)
{
    const struct smla_attend *work = call->work;
    const int64_t bytes = smla_dtype_bytes((enum smla_dtype)work->q_dtype);
    tile->heads = at.heads;
    for (int32_t part = 0, first = 0; part < 2; first += work->q_width[part++]) {
        if (!work->q_width[part]) continue;
        const int64_t *stride = work->q_stride[part];
        for (int32_t h = 0; h < at.heads; h++) {
            const int64_t element = at.batch * stride[0] + at.query * stride[1] +
                                    (at.head + h) * stride[2];
            call->kernel->query(tile, h, first, work->q_width[part],
                                (const uint8_t *)work->q[part] + element * bytes);
        }
    }
    if (call->kernel->begin) call->kernel->begin(tile);
}

/* The run that `part` is ends before these rows, if it has entries enough. */
static void attend_rows(const struct call *call, struct scratch *scratch, struct smla_part *part,
                        int32_t count)
{
    const int32_t step = call->layout.tile_entries;
    if (count && part->entries >= call->layout.run_entries)
        climb(call, &scratch->runs, part, scratch->tile.heads);
    for (int32_t done = 0; done < count; done += step)
        call->kernel->attend(&scratch->tile, part, scratch->rows + done,
                             smaller(count - done, step), count - done);
}

/* Makes `part` the attention over entries [split * split_entries, ...) of the row, of each
 * source. */
static void attend_split(const struct call *call, struct scratch *scratch, struct place at,
                         int32_t split, struct smla_part *part)
{
    const struct smla_attend *work = call->work;
    struct smla_tile *tile = &scratch->tile;
    part->entries = 0;
    for (int which = 0; which < work->sources; which++) {
        const struct smla_source *source = &work->source[which];
        struct smla_row row;
        smla_open_row(work, which, at.batch, at.query, &row);
        tile->format = smla_format((enum smla_format)source->format);
        tile->tensor_scale = source->scale;
        tile->row_bytes = tile->format->row_bytes ? tile->format->row_bytes
                                                  : work->d_qk * smla_dtype_bytes(tile->dtype);
        const int64_t first = split * call->layout.split_entries;
        const int64_t last = smla_clamp(row.entries, first, first + call->layout.split_entries);
        int32_t listed = 0;
        for (int64_t j = first; j < last; j++) {
            struct smla_place place;
            if (smla_resolve(source, &row, j, &place) != SMLA_VALID) continue;
            scratch->rows[listed++] = smla_token(source, &place);
            if (listed == LISTED_ROWS) {
                attend_rows(call, scratch, part, listed);
                listed = 0;
            }
        }
        attend_rows(call, scratch, part, listed);
    }
    come_down(call, &scratch->runs, part, at.heads);
}

/* -------------------------------------------------------------------------- storing */

static int64_t element_of(const struct smla_output *output, struct place at, int32_t h)
{
    return at.batch * output->stride[0] + at.query * output->stride[1] +
           (at.head + h) * output->stride[2];
}

static float sink_of(const struct smla_attend *work, int32_t head)
{
    return ((const float *)work->attn_sink.data)[head * work->attn_sink.stride[0]];
}

/* Emptiness is by count: a row of valid entries whose scores are all -inf is not empty. */
static void finish(const struct call *call, const struct smla_part *part, struct place at)
{
    const struct smla_attend *work = call->work;
    const bool empty = part->entries == 0;
    for (int32_t h = 0; h < at.heads; h++) {
        const double lse = empty ? work->empty_lse : part->peak[h] + log(part->sum[h]);
        uint8_t *out = (uint8_t *)work->out.data +
                       element_of(&work->out, at, h) *
                           smla_dtype_bytes((enum smla_dtype)work->out.dtype);
        if (empty) {
            memset(out, 0,
                   (size_t)work->d_v * (size_t)smla_dtype_bytes((enum smla_dtype)work->out.dtype));
        } else {
            double factor = 1.0 / part->sum[h];
            if (work->attn_sink.dtype) factor /= 1.0 + exp(sink_of(work, at.head + h) - lse);
            call->kernel->store(part->values + (size_t)h * (size_t)call->layout.shape.value_pitch,
                                (float)factor, work->d_v, (enum smla_dtype)work->out.dtype, out);
        }
        if (work->lse.dtype) ((float *)work->lse.data)[element_of(&work->lse, at, h)] = (float)lse;
        if (work->max_logits.dtype)
            ((float *)
                 work->max_logits.data)[element_of(&work->max_logits, at, h)] = empty ? -INFINITY
                                                                                : isnan(lse)
                                                                                    ? (float)lse
                                                                                    : part->peak[h];
    }
}

/* -------------------------------------------------------------------------- tasks */

/* The arrays of one split's part, in the workspace, from `head` of its head tile on. */
static struct smla_part stored_part(const struct call *call, int64_t unit, int32_t split,
                                    int32_t head)
{
    const int64_t index = unit * call->layout.splits + split;
    struct smla_part part = smla_part_at(&call->layout,
                                         call->parts + (size_t)index * call->layout.part_bytes);
    part.values += (size_t)head * (size_t)call->layout.shape.value_pitch;
    part.peak += head;
    part.sum += head;
    part.entries = call->split_entries[index];
    return part;
}

static void attend_unit(const struct call *call, struct scratch *scratch, struct place at)
{
    struct smla_part *part = &scratch->part;
    attend_split(call, scratch, at, 0, part);
    for (int32_t split = 1; split < call->layout.splits; split++) {
        climb(call, &scratch->splits, part, at.heads);
        attend_split(call, scratch, at, split, part);
    }
    come_down(call, &scratch->splits, part, at.heads);
    finish(call, part, at);
}

/* First round: rows, head tiles and, where they lie apart, splits. */
static void run_splits(void *context)
{
    struct call *call = context;
    const int32_t splits = call->layout.apart ? call->layout.splits : 1;
    struct scratch *scratch = NULL;
    for (;;) {
        const int64_t task = atomic_fetch_add(&call->next_task, 1);
        if (task >= call->tasks) return;
        if (!scratch) scratch = take_scratch(call);
        const struct place at = place_of(call, task / splits);
        load_query(call, &scratch->tile, at);
        if (!call->layout.apart) {
            attend_unit(call, scratch, at);
            continue;
        }
        const int32_t split = (int32_t)(task % splits);
        struct smla_part part = stored_part(call, task / splits, split, 0);
        attend_split(call, scratch, at, split, &part);
        call->split_entries[task] = part.entries;
    }
}

static int32_t fold_pieces(const struct call *call)
{
    return (call->layout.head_tile + FOLD_HEADS - 1) / FOLD_HEADS;
}

/* Second round: a few heads of a row, whose splits are joined in the memory of the first. */
static void run_folds(void *context)
{
    struct call *call = context;
    const int32_t pieces = fold_pieces(call), splits = call->layout.splits;
    for (;;) {
        const int64_t task = atomic_fetch_add(&call->next_task, 1);
        if (task >= call->tasks) return;
        const int64_t unit = task / pieces;
        const int32_t head = (int32_t)(task % pieces) * FOLD_HEADS;
        struct place at = place_of(call, unit);
        if (head >= at.heads) continue;
        at.head += head;
        at.heads = smaller(at.heads - head, FOLD_HEADS);
        struct smla_part parts[SMLA_MOST_SPLITS];
        for (int32_t split = 0; split < splits; split++)
            parts[split] = stored_part(call, unit, split, head);
        for (int32_t step = 1; step < splits; step *= 2)
            for (int32_t split = 0; split + step < splits; split += 2 * step)
                fold(call, &parts[split], &parts[split + step], at.heads);
        finish(call, &parts[0], at);
    }
}

/* Work that takes less time than waking a thread is done by the caller. */
static int32_t threads_for(const struct smla_attend *work, int64_t tasks)
{
    double products = 0.0;
    for (int which = 0; which < work->sources; which++)
        products += (double)work->source[which].topk;
    products *= (double)work->batch * (double)work->s_q * work->heads * (work->d_qk + work->d_v);
    const int32_t threads = products < 1e6 ? 1 : smla_cpu_threads();
    return tasks < threads ? (int32_t)tasks : threads;
}

enum smla_status smla_cpu_attend(const struct smla_attend *work, const struct smla_plan *plan,
                                 struct smla_error *error)
{
    if (work->batch == 0 || work->s_q == 0) return SMLA_OK;
    struct call call = {
        .work = work,
        .kernel = smla_tile_kernel(plan->kernel_id, (enum smla_dtype)work->q_dtype, work->heads),
    };
    smla_cpu_lay_out(work, plan, &call.layout);
    const int64_t units = call.layout.rows * call.layout.tiles;
    call.tasks = call.layout.apart ? units * plan->splits : units;

    const int32_t threads = threads_for(work, call.tasks);
    const size_t scratch = (size_t)threads * scratch_bytes(&call.layout);
    const size_t parts = call.layout.parts * call.layout.part_bytes;
    const size_t counts = call.layout.parts * sizeof(int64_t);
    const size_t bytes = scratch + parts + smla_aligned(counts);
    uint8_t *memory = aligned_alloc(SMLA_ALIGNMENT, bytes);
    SMLA_FAIL_IF(!memory, error, SMLA_ERROR_MEMORY,
                 "attend: no memory for a workspace of %zu bytes", bytes);
    call.scratch = memory;
    call.parts = memory + scratch;
    call.split_entries = (int64_t *)(call.parts + parts);

    smla_pool_run(run_splits, &call, threads);
    if (call.layout.apart) {
        call.tasks = units * fold_pieces(&call);
        call.next_task = 0;
        smla_pool_run(run_folds, &call, threads);
    }
    free(memory);
    return SMLA_OK;
}
