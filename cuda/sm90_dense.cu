/* The attend kernels for many heads over dense caches on Hopper: sm90_dense.cuh has all of them. */
#include "sm90_dense.cuh"

#define ATTEND(name, d_qk)                                                                         \
    extern "C" __global__ void __launch_bounds__(dense::THREADS, 1)                                \
        name(const __grid_constant__ smla_gpu_attend launch)                                       \
    {                                                                                              \
        dense::attend<d_qk, dense::name##_shared>(launch);                                         \
    }

ATTEND(sm90_bf16_576_64, 576)
ATTEND(sm90_bf16_512_64, 512)
