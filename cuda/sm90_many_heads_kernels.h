/* The attend kernels of sm90_many_heads.cuh: name, heads of a block, threads, bytes of dynamic
 * shared memory. Plain C, for the host's table of kernels; the kernels assert that it is right. */
#ifndef SMLA_SM90_MANY_HEADS_KERNELS_H
#define SMLA_SM90_MANY_HEADS_KERNELS_H

/* Heads of a block, and entries of a tile: measured, see docs/performance.md. */
enum { SMLA_SM90_HEADS = 64, SMLA_SM90_DENSE_TILE = 32, SMLA_SM90_PACKED_TILE = 48 };

// clang-format off
#define SMLA_SM90_MANY_HEADS_KERNELS(X)                                                            \
    X(sm90_bf16_576_64, 64, 512, 220560)                                                           \
    X(sm90_bf16_512_64, 64, 512, 197104)                                                           \
    X(sm90_bf16_fp8_ds_mla_64, 64, 512, 230704)                                                    \
    X(sm90_bf16_fp8_ds_mla_norope_64, 64, 512, 207248)
// clang-format on

#endif
