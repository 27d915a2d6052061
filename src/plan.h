/* Which kernel runs a piece of work, and in how many parts: decided from shapes and the device
 * alone, never from the contents of an array. */
#ifndef SMLA_PLAN_H
#define SMLA_PLAN_H

#include "error.h"
#include "params.h"
#include "tensor.h"

/* The device as far as a plan depends on it. */
struct smla_target {
    struct smla_device device;
    int32_t multiprocessors; /* of a GPU */
    int32_t shared_bytes;    /* that a block of a GPU may have */
    bool sm90;               /* the kernels for Hopper are there */
};

struct smla_plan {
    const char *kernel;      /* "cpu_avx2", "sm90", "sm80", "any" */
    int64_t split_entries;   /* entries of a row that one part takes, of each source */
    int64_t workspace_bytes; /* partial results, in memory that the call takes and gives back */
    int64_t merged_heads;    /* of one split there */
    int32_t kernel_id;       /* the backend's own number for `kernel` */
    int32_t combine_id;      /* the same of the kernel that merges the splits on a GPU */
    int32_t splits;          /* parts of a row that are merged at the end; 1: none */
    int32_t head_tile;       /* heads that share one gather */
    int32_t launches;        /* kernels on the stream; 0 on the CPU */
    int32_t shared_bytes;    /* dynamic shared memory of a block */
    int32_t whole;           /* pieces that sm90 does not cut, see smla_gpu_attend */
    int32_t cut_pieces;      /* and those that it does, with one split or more; elsewhere 0 */
};

/* `forced` is the name of a kernel (SPARSE_MLA_KERNEL) or NULL. */
enum smla_status smla_plan_attend(const struct smla_attend *work, const struct smla_target *target,
                                  const char *forced, struct smla_plan *plan,
                                  struct smla_error *error);

#endif
