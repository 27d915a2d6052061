/* The attend kernels over packed caches on Hopper: sm90_packed.cuh has all of them. */
#include "sm90_packed.cuh"

SMLA_SM90_ATTEND(packed, sm90_bf16_fp8_ds_mla_16, 576)
SMLA_SM90_ATTEND(packed, sm90_bf16_fp8_ds_mla_32, 576)
SMLA_SM90_ATTEND(packed, sm90_bf16_fp8_ds_mla_64, 576)
SMLA_SM90_ATTEND(packed, sm90_bf16_fp8_ds_mla_norope_16, 512)
SMLA_SM90_ATTEND(packed, sm90_bf16_fp8_ds_mla_norope_32, 512)
SMLA_SM90_ATTEND(packed, sm90_bf16_fp8_ds_mla_norope_64, 512)
