#include "fault.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "slot.h"

void smla_tally_first(const struct smla_tally *tally, struct smla_fault *fault)
{
    *fault = tally->first;
    if (fault->cause == SMLA_VALID) return;
    const enum smla_checked array = smla_checked_array((enum smla_cause)fault->cause);
    const int source = array == SMLA_CHECKED_REQUESTS ? 0 : fault->source;
    fault->count = tally->faults[source][array];
    fault->total = tally->seen[source][array];
}

/* -------------------------------------------------------------------------- wording */

static const char *tensor_of(const struct smla_fault *fault)
{
    switch (fault->cause) {
    case SMLA_FAULT_REQUEST: return "request_ids";
    case SMLA_FAULT_BLOCK: return fault->source ? "extra_block_table" : "block_table";
    case SMLA_FAULT_TOPK: return fault->source ? "extra_topk_lens" : "topk_lens";
    case SMLA_FAULT_SEQ: return fault->source ? "extra_seq_lens" : "seq_lens";
    default: return fault->source ? "extra_indices" : "indices";
    }
}

/* What is wrong with the value, as the end of a sentence. */
static void reason(const struct smla_fault *fault, char text[static 96])
{
    const char *extra = fault->source ? "extra " : "", *prefix = fault->source ? "extra_" : "";
    switch (fault->cause) {
    case SMLA_FAULT_INDEX: snprintf(text, 96, "is negative and not the padding -1"); return;
    case SMLA_FAULT_SLOT:
        snprintf(text, 96, "is outside the %scache of %" PRId64 " slots", extra, fault->bound);
        return;
    case SMLA_FAULT_LOGICAL:
        snprintf(text, 96, "is past the %" PRId64 " positions of %sblock_table", fault->bound,
                 prefix);
        return;
    case SMLA_FAULT_BLOCK:
        snprintf(text, 96, "is outside the %scache of %" PRId64 " blocks", extra, fault->bound);
        return;
    case SMLA_FAULT_REQUEST:
        snprintf(text, 96, "is outside the %" PRId64 " requests of block_table", fault->bound);
        return;
    default: snprintf(text, 96, "is outside [0, %" PRId64 "]", fault->bound - 1);
    }
}

void smla_fault_describe(const struct smla_fault *fault, bool exact, struct smla_device device,
                         struct smla_fault_report *report)
{
    char where[96], why[96];
    memset(report, 0, sizeof *report);
    report->tensor = tensor_of(fault);
    report->ndim = fault->ndim;
    report->value = fault->value;
    report->bound = fault->bound;
    report->count = fault->count;
    report->exact = exact;
    report->device = device;
    reason(fault, why);
    int used = 0;
    for (int32_t i = 0; i < fault->ndim; i++) {
        report->position[i] = fault->position[i];
        used += snprintf(where + used, sizeof where - (size_t)used, "%s%" PRId64, i ? ", " : "",
                         fault->position[i]);
    }
    bool per_row = fault->cause >= SMLA_FAULT_REQUEST;
    snprintf(report->text, sizeof report->text,
             "%s[%s] = %" PRId64 " %s (%s%" PRId64 " of %" PRId64 " %s)", report->tensor, where,
             fault->value, why, exact ? "" : "at least ", fault->count, fault->total,
             per_row ? "rows" : "entries");
}

/* -------------------------------------------------------------------------- record */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct smla_fault_report recorded; /* count 0: none */

void smla_fault_record(const struct smla_fault_report *report)
{
    pthread_mutex_lock(&lock);
    if (recorded.count == 0)
        recorded = *report;
    else
        recorded.count += report->count;
    pthread_mutex_unlock(&lock);
}

bool smla_fault_take(struct smla_fault_report *report)
{
    pthread_mutex_lock(&lock);
    *report = recorded;
    recorded.count = 0;
    pthread_mutex_unlock(&lock);
    return report->count != 0;
}
