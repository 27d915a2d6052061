/* The attend kernels for many heads over packed caches on Hopper: sm90_packed.cuh has all of them.
 */
#include "sm90_packed.cuh"

SMLA_SM90_ATTEND(packed, sm90_bf16_fp8_ds_mla_64, 576)
SMLA_SM90_ATTEND(packed, sm90_bf16_fp8_ds_mla_norope_64, 512)
