/* Devices in use: the primary context, the loaded kernels, and the way to launch one. For the files
 * of gpu/ only. */
#ifndef SMLA_GPU_DEVICE_H
#define SMLA_GPU_DEVICE_H

#include <stdbool.h>

#include "error.h"
#include "gpu/driver.h"
#include "gpu/gpu.h"
#include "gpu/kernels.h"

/* Memory that a device keeps from loading on. */
struct smla_gpu_memory {
    struct smla_fault_slot *faults;    /* mapped host memory, by enum smla_gpu_record */
    struct smla_fault_slot *in_device; /* the same, as kernels see it */
    uint32_t *fault_lock;              /* device memory, 0 while no block writes */
    CUdeviceptr check;                 /* struct smla_tally, then the number of the first fault */
};

/* A device's primary context made current for a while. */
struct smla_gpu_scope {
    const struct smla_driver *driver;
    const CUfunction *functions; /* of the loaded kernels, by enum smla_gpu_kernel */
    const struct smla_gpu_memory *memory;
    bool overlaps; /* the device lets a launch begin before the one before it ends */
    bool pushed;
};

/* What a launch looks like, all along x. */
struct smla_gpu_grid {
    int64_t blocks;
    int32_t shared_bytes; /* dynamic shared memory of a block */
};

/* Loads the device's kernels where that was not done and makes its context current. Only after
 * success smla_gpu_leave must follow, on every path. */
enum smla_status smla_gpu_enter(int32_t device, struct smla_gpu_scope *scope,
                                struct smla_error *error);
void smla_gpu_leave(const struct smla_gpu_scope *scope);

/* Launches a kernel with one parameter, the struct that `work` points to. */
enum smla_status smla_gpu_launch(const struct smla_gpu_scope *scope, enum smla_gpu_kernel kernel,
                                 struct smla_gpu_grid grid, uintptr_t stream, const void *work,
                                 struct smla_error *error);

/* The grid for `warps` warps of work, of a kernel whose warps loop over the rest. */
struct smla_gpu_grid smla_gpu_grid_of(enum smla_gpu_kernel kernel, int64_t warps);

/* The memory of a device that is loaded, else NULL. */
const struct smla_gpu_memory *smla_gpu_memory(int32_t device);

#endif
