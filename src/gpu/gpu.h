/* The GPU backend: the same work as the CPU's, on tensors in device memory, through the driver that
 * is opened at run time. Everything may be called from any thread, without the GIL, and leaves the
 * thread's current context as it was.
 *
 * `device` is the driver's ordinal. Without a driver, without a GPU or without kernels in this
 * build every function that needs one fails with SMLA_ERROR_UNSUPPORTED and says which it is. */
#ifndef SMLA_GPU_H
#define SMLA_GPU_H

#include <stdbool.h>

#include "error.h"
#include "params.h"
#include "plan.h"

/* One embedded fatbin: the kernels of one file of cuda/. */
struct smla_gpu_image {
    const char *name; /* of the file, without its ending */
    const unsigned char *begin;
    const unsigned char *end;
    int32_t compute; /* 90: has code for compute capability 9.0 alone; 0: for all GPUs */
};

/* What was compiled into this build. */
struct smla_gpu_build {
    const char *compiler; /* nvcc's version; "" in a build without kernels */
    const char *targets;  /* "sm_80 … compute_120" */
    const struct smla_gpu_image *images;
    int32_t count;
};

extern const struct smla_gpu_build smla_gpu_build;

struct smla_gpu_device {
    int32_t id;
    int32_t major, minor; /* compute capability */
    int32_t multiprocessors;
    int32_t shared_bytes; /* that a block may have */
    int32_t l2_bytes;
    int64_t memory_bytes;
    bool sm90;     /* the kernels for compute capability 9.0 alone are loaded */
    bool overlaps; /* a launch can overlap with the one before it, in a capture, too (CUDA 12.3) */
    char name[96];
};

/* The highest CUDA version that the driver knows, 1000 * major + 10 * minor; 0 without a driver. */
int32_t smla_gpu_driver_version(void);

/* 0, and no error, without a driver or a GPU. */
enum smla_status smla_gpu_count(int32_t *count, struct smla_error *error);

enum smla_status smla_gpu_describe(int32_t device, struct smla_gpu_device *info,
                                   struct smla_error *error);

/* The same of a device that is loaded, or is now, without asking the driver again. */
enum smla_status smla_gpu_info(int32_t device, const struct smla_gpu_device **info,
                               struct smla_error *error);

/* The device that a pointer belongs to: CUDA managed memory does not say it otherwise. */
enum smla_status smla_gpu_pointer_device(const void *pointer, int32_t *device,
                                         struct smla_error *error);

/* Whether the kernels are loaded, at the price of one atomic load. */
bool smla_gpu_loaded(int32_t device);

/* Loads all kernels and sets their attributes, once per device. It takes a while, so better without
 * the GIL; every call that launches does it where it was not done. Safe during a stream capture of
 * this thread. */
enum smla_status smla_gpu_load(int32_t device, struct smla_error *error);

/* Waits for all work on the device; where no kernel is loaded, none of it is this library's, and
 * nothing is waited for. */
enum smla_status smla_gpu_synchronize(int32_t device, struct smla_error *error);

/* Which record a launch writes its faults to: one that the next call raises, or one that is only
 * looked at. */
enum smla_gpu_record {
    SMLA_GPU_DEFERRED,
    SMLA_GPU_RECORDED,
    SMLA_GPU_RECORDS /* how many */
};

/* Looks for a fault in a record, and takes it out, without a call of the driver. */
bool smla_gpu_has_fault(int32_t device, enum smla_gpu_record record);
bool smla_gpu_take_fault(int32_t device, enum smla_gpu_record record, struct smla_fault *fault);

/* Whether the stream is being captured into a graph. */
enum smla_status smla_gpu_capturing(int32_t device, uintptr_t stream, bool *capturing,
                                    struct smla_error *error);

/* The streams of one call, each a CUstream (0: legacy). */
struct smla_gpu_streams {
    uintptr_t launch;    /* where its kernels go */
    uintptr_t current;   /* where q's framework orders the memory that it hands out */
    uintptr_t others[4]; /* what the launch has to be ordered with */
    int32_t count;       /* of others */
    bool given;          /* `launch` is the caller's choice, and so is the order of the tensors */
    bool pooled;         /* q's framework cannot order a workspace with it: smla_gpu_borrow */
    bool join;           /* the others wait for the launch too */
    bool wait;           /* the host waits for the launch */
};

/* Before the launch: it waits for what is on the other streams. While `launch` is captured, only
 * for those of the same capture; a captured stream before a launch that is not is an error. */
enum smla_status smla_gpu_fork(struct smla_gpu_streams *streams, int32_t device,
                               struct smla_error *error);

/* After the launch: the others, and the host, wait for it where the streams say so. */
enum smla_status smla_gpu_join(const struct smla_gpu_streams *streams, int32_t device,
                               struct smla_error *error);

/* Memory of the driver's stream-ordered pool, for work on that stream. */
enum smla_status smla_gpu_borrow(int64_t bytes, int32_t device, uintptr_t stream, void **memory,
                                 struct smla_error *error);
enum smla_status smla_gpu_return(void *memory, int32_t device, uintptr_t stream,
                                 struct smla_error *error);

/* Memory that no stream owns. smla_gpu_free waits until the device has finished with it. */
enum smla_status smla_gpu_allocate(int64_t bytes, int32_t device, void **memory,
                                   struct smla_error *error);
void smla_gpu_free(void *memory, int32_t device);

/* The launches of `plan` on a stream (a CUstream; 0: legacy), without waiting for them. `workspace`
 * is plan->workspace_bytes of device memory that stay until they are done. work->record says
 * whether faults go to `record`. */
enum smla_status smla_gpu_attend(const struct smla_attend *work, const struct smla_plan *plan,
                                 int32_t device, uintptr_t stream, void *workspace,
                                 enum smla_gpu_record record, struct smla_error *error);

/* smla_cpu_check and smla_cpu_resolve on a stream; both wait for it. `scratch` is device memory for
 * the slots, `slots` host memory of the same size. */
enum smla_status smla_gpu_check(const struct smla_attend *work, int32_t device, uintptr_t stream,
                                struct smla_fault *fault, struct smla_error *error);
enum smla_status smla_gpu_resolve(const struct smla_attend *work, int which, int32_t device,
                                  uintptr_t stream, int64_t *scratch, int64_t *slots,
                                  struct smla_error *error);

/* smla_cpu_append and smla_cpu_unpack on a stream, without waiting for it. */
enum smla_status smla_gpu_append(const struct smla_append *work, int32_t device, uintptr_t stream,
                                 struct smla_error *error);
enum smla_status smla_gpu_unpack(const struct smla_source *source, enum smla_dtype dtype,
                                 int32_t width, float *numbers, int32_t device, uintptr_t stream,
                                 struct smla_error *error);

/* Fills memory with zeros on a stream. */
enum smla_status smla_gpu_clear(void *memory, int64_t bytes, int32_t device, uintptr_t stream,
                                struct smla_error *error);

/* Reads the rows of `cache` (its last dimension) that `indices` names and does nothing else, for
 * bench: `out` gets one word of each block, so it says how many blocks there are at most. Without
 * rows a kernel that does nothing is launched. Checks the tensors. */
enum smla_status smla_gpu_gather(const struct smla_tensor *cache, const struct smla_tensor *indices,
                                 const struct smla_tensor *out, uintptr_t stream,
                                 struct smla_error *error);

/* smla_cpu_merge on a stream (a CUstream; 0: legacy), without waiting for it. */
enum smla_status smla_gpu_merge(const struct smla_merge *work, int32_t device, uintptr_t stream,
                                struct smla_error *error);

#endif
