/* The attend kernels for many heads over dense caches on Hopper: sm90_dense.cuh has all of them. */
#include "sm90_dense.cuh"

SMLA_SM90_ATTEND(dense, sm90_bf16_576_64, 576)
SMLA_SM90_ATTEND(dense, sm90_bf16_512_64, 512)
