/* The attend kernels for many heads over packed caches on Hopper: sm90_packed.cuh has all of them.
 */
#include "sm90_packed.cuh"

#define ATTEND(name, d_qk)                                                                         \
    extern "C" __global__ void __launch_bounds__(packed::THREADS, 1)                               \
        name(const __grid_constant__ smla_gpu_attend launch)                                       \
    {                                                                                              \
        packed::attend<d_qk, packed::name##_shared>(launch);                                       \
    }

ATTEND(sm90_bf16_fp8_ds_mla_64, 576)
ATTEND(sm90_bf16_fp8_ds_mla_norope_64, 512)
