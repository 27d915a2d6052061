/* The attend kernels for caches of e4m3 numbers: sm80_attend.cuh has all of them. `resident` is how
 * many blocks a multiprocessor is to hold at least where its shared memory allows it. */
#include "sm80_attend.cuh"

#define ATTEND(name, Query, format, d_qk, heads, stages, resident)                                 \
    extern "C" __global__ void __launch_bounds__(block_of<heads>::THREADS, resident)               \
        name##_##heads(const __grid_constant__ smla_gpu_attend launch)                             \
    {                                                                                              \
        attend<Query, format, d_qk, block_of<heads>, stages, name##_##heads##_shared>(launch);     \
    }
#define ATTEND_HEADS(name, Query, format, d_qk)                                                    \
    ATTEND(name, Query, format, d_qk, 16, 3, 2)                                                    \
    ATTEND(name, Query, format, d_qk, 32, 4, 2)                                                    \
    ATTEND(name, Query, format, d_qk, 64, 4, 1)

ATTEND_HEADS(sm80_bf16_fp8_ds_mla, __nv_bfloat16, SMLA_FP8_DS_MLA, 576)
ATTEND_HEADS(sm80_bf16_fp8_ds_mla_norope, __nv_bfloat16, SMLA_FP8_DS_MLA_NOROPE, 512)
ATTEND_HEADS(sm80_bf16_fp8_tensor, __nv_bfloat16, SMLA_FP8_TENSOR, 576)
ATTEND_HEADS(sm80_fp16_fp8_ds_mla, __half, SMLA_FP8_DS_MLA, 576)
ATTEND_HEADS(sm80_fp16_fp8_ds_mla_norope, __half, SMLA_FP8_DS_MLA_NOROPE, 512)
ATTEND_HEADS(sm80_fp16_fp8_tensor, __half, SMLA_FP8_TENSOR, 576)
