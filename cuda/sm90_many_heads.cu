/* The attend kernels for many heads on Hopper: sm90_many_heads.cuh has all of them. */
#include "sm90_many_heads.cuh"

#define ATTEND(name, format, d_qk)                                                                 \
    extern "C" __global__ void __launch_bounds__(many_heads::THREADS, 1)                           \
        name(const __grid_constant__ smla_gpu_attend launch)                                       \
    {                                                                                              \
        many_heads::attend<format, d_qk, many_heads::name##_shared>(launch);                       \
    }

ATTEND(sm90_bf16_576_64, SMLA_DENSE, 576)
ATTEND(sm90_bf16_512_64, SMLA_DENSE, 512)
ATTEND(sm90_bf16_fp8_ds_mla_64, SMLA_FP8_DS_MLA, 576)
ATTEND(sm90_bf16_fp8_ds_mla_norope_64, SMLA_FP8_DS_MLA_NOROPE, 512)
