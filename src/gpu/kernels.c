#include "gpu/kernels.h"

#include <stddef.h>

#include "build_config.h"
#include "gpu/gpu.h"

#define DECLARE_IMAGE(name, compute)                                                               \
    extern const unsigned char smla_image_##name[], smla_image_##name##_end[];
#define IMAGE(name, compute) {#name, smla_image_##name, smla_image_##name##_end, compute},

SMLA_IMAGES(DECLARE_IMAGE)

static const struct smla_gpu_image images[] = {
    SMLA_IMAGES(IMAGE) /* none in a build without kernels */
    {"", NULL, NULL, 0},
};

const struct smla_gpu_build smla_gpu_build = {
    .compiler = SMLA_NVCC_VERSION,
    .targets = SMLA_IMAGE_TARGETS,
    .images = images,
    .count = sizeof images / sizeof *images - 1,
};

const struct smla_gpu_kernel_info smla_gpu_kernels[SMLA_GPU_KERNELS] = {
    [SMLA_KERNEL_MERGE] = {"any_merge", "any_merge", 128, 0},
    [SMLA_KERNEL_MERGE_VECTOR] = {"any_merge", "any_merge_vector", 128, 0},
    [SMLA_KERNEL_ATTEND] = {"any_attend", "any_attend", 128, SMLA_ANY_SHARED_BYTES},
    [SMLA_KERNEL_ATTEND_WIDE] = {"any_attend", "any_attend_wide", 128, SMLA_ANY_SHARED_BYTES},
    [SMLA_KERNEL_COMBINE] = {"any_attend", "any_combine", 128, 0},
    [SMLA_KERNEL_CHECK] = {"any_check", "any_check", 128, 0},
    [SMLA_KERNEL_CHECK_FIRST] = {"any_check", "any_check_first", 128, 0},
    [SMLA_KERNEL_RESOLVE] = {"any_check", "any_resolve", 128, 0},
    [SMLA_KERNEL_APPEND] = {"any_cache", "any_append", 128, 0},
    [SMLA_KERNEL_UNPACK] = {"any_cache", "any_unpack", 128, 0},
    [SMLA_KERNEL_GATHER] = {"any_gather", "any_gather", 128, 0},
    [SMLA_KERNEL_SM80_COMBINE] = {"sm80_combine", "sm80_combine", 256, 0, true},
    [SMLA_KERNEL_SM80_COMBINE_MANY] = {"sm80_combine", "sm80_combine_many", 256, 0, true},
#define IN(image, name, threads, shared_bytes, waits)                                              \
    [SMLA_KERNEL_##name] = {image, #name, threads, shared_bytes, waits},
#define SM80_DENSE(name, heads, threads, shared_bytes)                                             \
    IN("sm80_dense", name, threads, shared_bytes, false)
#define SM80_FP8(name, heads, threads, shared_bytes)                                               \
    IN("sm80_fp8", name, threads, shared_bytes, false)
#define SM90_DENSE(name, heads, threads, shared_bytes)                                             \
    IN("sm90_dense", name, threads, shared_bytes, true)
#define SM90_PACKED(name, heads, threads, shared_bytes)                                            \
    IN("sm90_packed", name, threads, shared_bytes, true)
    // clang-format off
    SMLA_SM80_DENSE_KERNELS(SM80_DENSE)
    SMLA_SM80_FP8_KERNELS(SM80_FP8)
    SMLA_SM90_DENSE_KERNELS(SM90_DENSE)
    SMLA_SM90_PACKED_KERNELS(SM90_PACKED)
    // clang-format on
};
