/* The kernels of the fatbins that are embedded in this build. A new kernel is a line in the enum
 * and a line in the table. */
#ifndef SMLA_GPU_KERNELS_H
#define SMLA_GPU_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "sm80_kernels.h"
#include "sm90_kernels.h"

enum smla_gpu_kernel {
    SMLA_KERNEL_MERGE,
    SMLA_KERNEL_MERGE_VECTOR,
    SMLA_KERNEL_ATTEND,
    SMLA_KERNEL_ATTEND_WIDE,
    SMLA_KERNEL_COMBINE,
    SMLA_KERNEL_CHECK,
    SMLA_KERNEL_CHECK_FIRST,
    SMLA_KERNEL_RESOLVE,
    SMLA_KERNEL_APPEND,
    SMLA_KERNEL_UNPACK,
    SMLA_KERNEL_GATHER,
    SMLA_KERNEL_SM80_COMBINE,
    SMLA_KERNEL_SM80_COMBINE_MANY,
#define SMLA_KERNEL(name, heads, threads, shared_bytes) SMLA_KERNEL_##name,
    SMLA_SM80_KERNELS(SMLA_KERNEL) SMLA_SM90_KERNELS(SMLA_KERNEL)
#undef SMLA_KERNEL
        SMLA_GPU_KERNELS /* how many */
};

struct smla_gpu_kernel_info {
    const char *image;    /* file of cuda/ */
    const char *name;     /* the symbol */
    int32_t threads;      /* of a block */
    int32_t shared_bytes; /* dynamic shared memory that a block may ask for */
    bool waits; /* itself for the launch before it, so that it may begin before that ends */
};

extern const struct smla_gpu_kernel_info smla_gpu_kernels[SMLA_GPU_KERNELS];

#endif
