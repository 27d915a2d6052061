/* The attend kernels of sm80_attend.cuh: name, heads of a block, threads, bytes of dynamic shared
 * memory. Plain C, for the host's table of kernels; the kernels assert that it is right. The head
 * tiles of one kind follow one another: 16, 32, 64. */
#ifndef SMLA_SM80_KERNELS_H
#define SMLA_SM80_KERNELS_H

// clang-format off
/* sm80_dense.cu */
#define SMLA_SM80_DENSE_KERNELS(X)                                                                 \
    X(sm80_bf16_576_16, 16, 128, 81920)                                                            \
    X(sm80_bf16_576_32, 32, 128, 86720)                                                            \
    X(sm80_bf16_576_64, 64, 256, 98384)                                                            \
    X(sm80_bf16_512_16, 16, 128, 73728)                                                            \
    X(sm80_bf16_512_32, 32, 128, 78528)                                                            \
    X(sm80_bf16_512_64, 64, 256, 90192)                                                            \
    X(sm80_fp16_576_16, 16, 128, 82432)                                                            \
    X(sm80_fp16_576_32, 32, 128, 87744)                                                            \
    X(sm80_fp16_576_64, 64, 256, 100432)                                                            \
    X(sm80_fp16_512_16, 16, 128, 74240)                                                            \
    X(sm80_fp16_512_32, 32, 128, 79552)                                                            \
    X(sm80_fp16_512_64, 64, 256, 92240)

/* sm80_fp8.cu */
#define SMLA_SM80_FP8_KERNELS(X)                                                                   \
    X(sm80_bf16_fp8_ds_mla_16, 16, 128, 51312)                                                     \
    X(sm80_bf16_fp8_ds_mla_32, 32, 128, 58288)                                                     \
    X(sm80_bf16_fp8_ds_mla_64, 64, 256, 74304)                                                     \
    X(sm80_bf16_fp8_ds_mla_norope_16, 16, 128, 43120)                                              \
    X(sm80_bf16_fp8_ds_mla_norope_32, 32, 128, 50096)                                              \
    X(sm80_bf16_fp8_ds_mla_norope_64, 64, 256, 66112)                                              \
    X(sm80_bf16_fp8_tensor_16, 16, 128, 45488)                                                     \
    X(sm80_bf16_fp8_tensor_32, 32, 128, 50544)                                                     \
    X(sm80_bf16_fp8_tensor_64, 64, 256, 62720)                                                     \
    X(sm80_fp16_fp8_ds_mla_16, 16, 128, 55392)                                                     \
    X(sm80_fp16_fp8_ds_mla_32, 32, 128, 66464)                                                     \
    X(sm80_fp16_fp8_ds_mla_64, 64, 256, 90672)                                                     \
    X(sm80_fp16_fp8_ds_mla_norope_16, 16, 128, 45168)                                              \
    X(sm80_fp16_fp8_ds_mla_norope_32, 32, 128, 54192)                                              \
    X(sm80_fp16_fp8_ds_mla_norope_64, 64, 256, 74304)                                              \
    X(sm80_fp16_fp8_tensor_16, 16, 128, 46000)                                                     \
    X(sm80_fp16_fp8_tensor_32, 32, 128, 51568)                                                     \
    X(sm80_fp16_fp8_tensor_64, 64, 256, 64768)
// clang-format on

#define SMLA_SM80_KERNELS(X) SMLA_SM80_DENSE_KERNELS(X) SMLA_SM80_FP8_KERNELS(X)

#endif
