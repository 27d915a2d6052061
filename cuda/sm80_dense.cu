/* The attend kernels for dense caches: sm80_attend.cuh has all of them. `resident` is how many
 * blocks a multiprocessor is to hold at least where its shared memory allows it. */
#include "sm80_attend.cuh"

#define ATTEND(name, Query, d_qk, heads, stages, resident)                                         \
    extern "C" __global__ void __launch_bounds__(block_of<heads>::THREADS, resident)               \
        name##_##d_qk##_##heads(const __grid_constant__ smla_gpu_attend launch)                    \
    {                                                                                              \
        attend<Query, SMLA_DENSE, d_qk, block_of<heads>, stages,                                   \
               name##_##d_qk##_##heads##_shared>(launch);                                          \
    }
#define ATTEND_HEADS(name, Query, d_qk)                                                            \
    ATTEND(name, Query, d_qk, 16, 2, 2)                                                            \
    ATTEND(name, Query, d_qk, 32, 4, 2)                                                            \
    ATTEND(name, Query, d_qk, 64, 3, 1)

ATTEND_HEADS(sm80_bf16, __nv_bfloat16, 576)
ATTEND_HEADS(sm80_bf16, __nv_bfloat16, 512)
ATTEND_HEADS(sm80_fp16, __half, 576)
ATTEND_HEADS(sm80_fp16, __half, 512)
