/* Faults of index arrays and block tables: their wording, and the record that faults() returns. */
#ifndef SMLA_FAULT_H
#define SMLA_FAULT_H

#include <stdbool.h>
#include <stddef.h>

#include "params.h"
#include "tensor.h"

/* What an IndexFault says, taken apart. */
struct smla_fault_report {
    const char *tensor;  /* the argument's name */
    int64_t position[3]; /* index into that tensor */
    int32_t ndim;
    int64_t value;
    int64_t bound; /* the first value that is too large */
    int64_t count;
    bool exact; /* false: there were at least `count` */
    struct smla_device device;
    char text[256];
};

/* The first fault of a check with the count of all in the same array; cause SMLA_VALID: none. */
void smla_tally_first(const struct smla_tally *tally, struct smla_fault *fault);

/* `exact`: the count is of the whole call; else there were at least as many. */
void smla_fault_describe(const struct smla_fault *fault, bool exact, struct smla_device device,
                         struct smla_fault_report *report);

/* The record of the CPU: the first report since it was last taken, with the counts of all.
 * Thread-safe. A GPU's is written by its kernels: gpu/gpu.h. */
void smla_fault_record(const struct smla_fault_report *report);
bool smla_fault_take(struct smla_fault_report *report);

#endif
