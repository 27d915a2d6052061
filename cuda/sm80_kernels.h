/* The attend kernels of sm80_attend.cuh: name, heads of a block, threads, bytes of dynamic shared
 * memory. Plain C, for the host's table of kernels; the kernels assert that it is right. The head
 * tiles of one kind follow one another: 16, 32, 64. */
#ifndef SMLA_SM80_KERNELS_H
#define SMLA_SM80_KERNELS_H

// clang-format off
/* sm80_dense.cu */
#define SMLA_SM80_DENSE_KERNELS(X)                                                                 \
    X(sm80_bf16_576_16, 16, 192, 88800)                                                            \
    X(sm80_bf16_576_32, 32, 128, 91552)                                                            \
    X(sm80_bf16_576_64, 64, 256, 89280)                                                            \
    X(sm80_bf16_512_16, 16, 192, 78576)                                                            \
    X(sm80_bf16_512_32, 32, 128, 79296)                                                            \
    X(sm80_bf16_512_64, 64, 256, 74976)                                                            \
    X(sm80_fp16_576_16, 16, 192, 89888)                                                            \
    X(sm80_fp16_576_32, 32, 128, 92576)                                                            \
    X(sm80_fp16_576_64, 64, 256, 91328)                                                           \
    X(sm80_fp16_512_16, 16, 192, 79664)                                                            \
    X(sm80_fp16_512_32, 32, 128, 80320)                                                            \
    X(sm80_fp16_512_64, 64, 256, 77024)

/* sm80_fp8.cu */
#define SMLA_SM80_FP8_KERNELS(X)                                                                   \
    X(sm80_bf16_fp8_ds_mla_16, 16, 192, 80944)                                                     \
    X(sm80_bf16_fp8_ds_mla_32, 32, 128, 63120)                                                     \
    X(sm80_bf16_fp8_ds_mla_64, 64, 256, 83920)                                                     \
    X(sm80_bf16_fp8_ds_mla_norope_16, 16, 192, 66624)                                              \
    X(sm80_bf16_fp8_ds_mla_norope_32, 32, 128, 50864)                                              \
    X(sm80_bf16_fp8_ds_mla_norope_64, 64, 256, 67568)                                              \
    X(sm80_bf16_fp8_tensor_16, 16, 192, 71408)                                                     \
    X(sm80_bf16_fp8_tensor_32, 32, 128, 55376)                                                     \
    X(sm80_bf16_fp8_tensor_64, 64, 256, 72336)                                                     \
    X(sm80_fp16_fp8_ds_mla_16, 16, 192, 87344)                                                     \
    X(sm80_fp16_fp8_ds_mla_32, 32, 128, 71312)                                                     \
    X(sm80_fp16_fp8_ds_mla_64, 64, 256, 100304)                                                     \
    X(sm80_fp16_fp8_ds_mla_norope_16, 16, 192, 70976)                                              \
    X(sm80_fp16_fp8_ds_mla_norope_32, 32, 128, 54960)                                              \
    X(sm80_fp16_fp8_ds_mla_norope_64, 64, 256, 75760)                                              \
    X(sm80_fp16_fp8_tensor_16, 16, 192, 72496)                                                     \
    X(sm80_fp16_fp8_tensor_32, 32, 128, 56400)                                                     \
    X(sm80_fp16_fp8_tensor_64, 64, 256, 74384)
// clang-format on

#define SMLA_SM80_KERNELS(X) SMLA_SM80_DENSE_KERNELS(X) SMLA_SM80_FP8_KERNELS(X)

/* Splits of a row at most. */
enum { SMLA_MOST_SPLITS = 64 };

/* sm80_combine, for few splits: warps of a block, loads of a warp that are under way at once, the
 * runs of 128 value numbers of a head, and how many of them a warp takes. */
enum { SMLA_COMBINE_WARPS = 8, SMLA_COMBINE_LOADS = 8, SMLA_COMBINE_ALL_RUNS = 4 };
#define SMLA_COMBINE_RUNS(splits) ((splits) <= 2 ? 4 : (splits) <= 4 ? 2 : 1)

#endif
