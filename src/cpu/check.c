/* Looking at every entry of a call without attending: the first fault, and where each entry
 * leads. Both go by smla_open_row and smla_resolve, as the kernels do. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "cpu.h"
#include "fault.h"
#include "pool.h"
#include "slot.h"

struct check {
    const struct smla_attend *work;
    int64_t chunk; /* rows that a thread takes at a time */
    _Atomic int64_t next;
    pthread_mutex_t lock;
    struct smla_tally all;
};

static void meet(const struct smla_attend *work, int which, const struct smla_row *row, int64_t j,
                 enum smla_cause cause, struct smla_tally *tally)
{
    tally->faults[which][smla_checked_array(cause)]++;
    if (tally->first.cause == SMLA_VALID) smla_fault_at(work, which, row, j, cause, &tally->first);
}

static void check_source(const struct smla_attend *work, int which, const struct smla_row *row,
                         struct smla_tally *tally)
{
    const struct smla_source *source = &work->source[which];
    tally->seen[which][SMLA_CHECKED_TOPK_LENS]++;
    tally->seen[which][SMLA_CHECKED_SEQ_LENS]++;
    tally->seen[which][SMLA_CHECKED_INDICES] += row->entries;
    tally->seen[which][SMLA_CHECKED_TABLE] += row->entries;
    if (row->bad_topk) meet(work, which, row, 0, SMLA_FAULT_TOPK, tally);
    if (row->bad_seq) meet(work, which, row, 0, SMLA_FAULT_SEQ, tally);
    for (int64_t j = 0; j < row->entries; j++) {
        struct smla_place place;
        const enum smla_cause cause = smla_resolve(source, row, j, &place);
        if (cause >= SMLA_FAULT_INDEX) meet(work, which, row, j, cause, tally);
    }
}

static void check_row(const struct smla_attend *work, int64_t at, struct smla_tally *tally)
{
    tally->seen[0][SMLA_CHECKED_REQUESTS]++;
    for (int which = 0; which < work->sources; which++) {
        struct smla_row row;
        smla_open_row(work, which, at / work->s_q, at % work->s_q, &row);
        if (row.cause == SMLA_FAULT_REQUEST && which == 0) /* one array for both sources */
            meet(work, which, &row, 0, SMLA_FAULT_REQUEST, tally);
        check_source(work, which, &row, tally);
    }
}

static void add(struct smla_tally *all, const struct smla_tally *tally)
{
    for (int which = 0; which < 2; which++) {
        for (int array = 0; array < SMLA_CHECKED; array++) {
            all->seen[which][array] += tally->seen[which][array];
            all->faults[which][array] += tally->faults[which][array];
        }
    }
    const bool earlier = all->first.cause == SMLA_VALID || tally->first.row < all->first.row;
    if (tally->first.cause != SMLA_VALID && earlier) all->first = tally->first;
}

static void check_rows(void *context)
{
    struct check *check = context;
    const int64_t rows = check->work->batch * check->work->s_q;
    struct smla_tally tally;
    memset(&tally, 0, sizeof tally);
    for (;;) {
        const int64_t begin = atomic_fetch_add(&check->next, check->chunk);
        if (begin >= rows) break;
        const int64_t end = smla_clamp(begin + check->chunk, 0, rows);
        for (int64_t at = begin; at < end; at++) check_row(check->work, at, &tally);
    }
    pthread_mutex_lock(&check->lock);
    add(&check->all, &tally);
    pthread_mutex_unlock(&check->lock);
}

void smla_cpu_check(const struct smla_attend *work, struct smla_fault *fault)
{
    enum { WORTH_A_THREAD = 1 << 14 }; /* entries */
    int64_t entries = 1;
    for (int which = 0; which < work->sources; which++) entries += work->source[which].topk;
    const int64_t rows = work->batch * work->s_q;
    struct check check = {
        .work = work,
        .chunk = 1 + WORTH_A_THREAD / entries,
        .lock = PTHREAD_MUTEX_INITIALIZER,
    };
    const int64_t chunks = (rows + check.chunk - 1) / check.chunk;
    smla_pool_run(check_rows, &check, (int32_t)smla_clamp(chunks, 1, smla_cpu_threads()));

    smla_tally_first(&check.all, fault);
}

void smla_cpu_resolve(const struct smla_attend *work, int which, int64_t *slots)
{
    const struct smla_source *source = &work->source[which];
    for (int64_t at = 0; at < work->batch * work->s_q; at++, slots += source->topk) {
        struct smla_row row;
        smla_open_row(work, which, at / work->s_q, at % work->s_q, &row);
        for (int64_t j = 0; j < row.entries; j++) {
            struct smla_place place;
            const enum smla_cause cause = smla_resolve(source, &row, j, &place);
            slots[j] = cause == SMLA_VALID ? place.block * source->block_size + place.offset
                                           : -(int64_t)cause;
        }
        const int64_t rest = row.cause == SMLA_VALID ? SMLA_PAST_TOPK_LEN : row.cause;
        for (int64_t j = row.entries; j < source->topk; j++) slots[j] = -rest;
    }
}
