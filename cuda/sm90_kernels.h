/* The attend kernels of sm90_dense.cuh and sm90_packed.cuh: name, heads of a block, threads, bytes
 * of dynamic shared memory. Plain C, for the host's table of kernels; the kernels assert that it is
 * right. */
#ifndef SMLA_SM90_KERNELS_H
#define SMLA_SM90_KERNELS_H

/* Heads of a block of dense caches, and entries of a tile: measured, see docs/performance.md. */
enum { SMLA_SM90_DENSE_HEADS = 64, SMLA_SM90_DENSE_TILE = 32, SMLA_SM90_PACKED_TILE = 64 };

// clang-format off
/* sm90_dense.cu */
#define SMLA_SM90_DENSE_KERNELS(X)                                                                 \
    X(sm90_bf16_576_64, 64, 384, 231376)                                                           \
    X(sm90_bf16_512_64, 64, 384, 206800)

/* sm90_packed.cu */
#define SMLA_SM90_PACKED_KERNELS(X)                                                                \
    X(sm90_bf16_fp8_ds_mla_16, 16, 384, 224672)                                                    \
    X(sm90_bf16_fp8_ds_mla_32, 32, 384, 218240)                                                    \
    X(sm90_bf16_fp8_ds_mla_64, 64, 384, 231008)                                                    \
    X(sm90_bf16_fp8_ds_mla_norope_16, 16, 384, 198048)                                             \
    X(sm90_bf16_fp8_ds_mla_norope_32, 32, 384, 189568)                                             \
    X(sm90_bf16_fp8_ds_mla_norope_64, 64, 384, 206432)
// clang-format on

#define SMLA_SM90_KERNELS(X) SMLA_SM90_DENSE_KERNELS(X) SMLA_SM90_PACKED_KERNELS(X)

#endif
