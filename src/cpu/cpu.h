/* The CPU backend: the same work as the GPU's, on tensors in host memory. Safe to call from any
 * thread without the GIL; results do not depend on the number of threads. */
#ifndef SMLA_CPU_H
#define SMLA_CPU_H

#include <stdbool.h>

#include "error.h"
#include "params.h"
#include "plan.h"

/* The kernels, best first; a plan's kernel_id is a place in this table. `runs` asks cpuid and
 * xgetbv once, and Linux for the tile registers. cpu_amx serves bfloat16 queries of several heads
 * and does as cpu_avx512bf16 for others; that one serves bfloat16 queries and does as cpu_avx512
 * for others. */
struct smla_cpu_kernel {
    const char *name; /* cpu_amx, cpu_avx512bf16, cpu_avx512, cpu_avx2, cpu_plain */
    const char *isa;  /* for people: "AVX2 + FMA + F16C" */
    bool runs;
};
int32_t smla_cpu_kernels(const struct smla_cpu_kernel **kernels); /* returns how many */

/* Threads that a call may use: SPARSE_MLA_NUM_THREADS as it is at the first call, else the CPUs
 * that this process may run on. */
int32_t smla_cpu_threads(void);

/* Fills in splits, split_entries, head_tile, workspace_bytes for plan->kernel_id. */
void smla_cpu_split(const struct smla_attend *work, struct smla_plan *plan);

enum smla_status smla_cpu_attend(const struct smla_attend *work, const struct smla_plan *plan,
                                 struct smla_error *error);

/* Looks at every entry that smla_cpu_attend would. Leaves the first fault (lowest row, then
 * source, then lengths and request before entries, then lowest j) with the count of all faults in
 * the same array; cause SMLA_VALID where there is none. */
void smla_cpu_check(const struct smla_attend *work, struct smla_fault *fault);

/* The slot of every entry of one source into slots[(row * topk + j)], or -cause where masked
 * (entries past the row's own count are -SMLA_PAST_TOPK_LEN, of an empty row -row.cause). */
void smla_cpu_resolve(const struct smla_attend *work, int which, int64_t *slots);

enum smla_status smla_cpu_append(const struct smla_append *work, struct smla_error *error);

/* Every slot of a cache as float32: numbers[slot * width + d]. `dtype` is a dense cache's. */
enum smla_status smla_cpu_unpack(const struct smla_source *source, enum smla_dtype dtype,
                                 int32_t width, float *numbers, struct smla_error *error);

enum smla_status smla_cpu_merge(const struct smla_merge *work, struct smla_error *error);

/* float32 multiply-adds a second that one thread's best kernel reaches on registers alone, and the
 * same for the bfloat16 dot product that the kernel named uses: the ceiling that bench prints. */
double smla_cpu_peak(const char *kernel);

#endif
