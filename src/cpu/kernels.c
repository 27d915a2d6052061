/* The kernels that this build has, and which of them this CPU and this operating system run. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu.h"
#include "layout.h"
#include "tile.h"

enum {
#if defined(__x86_64__)
    AMX,
    AVX512BF16,
    AVX512,
    AVX2,
#endif
    PLAIN,
    KERNELS
};

enum { AMX_HEADS = 8 }; /* from which on tiles of 16 heads are the fastest */

static struct smla_cpu_kernel kernels[KERNELS] = {
#if defined(__x86_64__)
    [AMX] = {.name = "cpu_amx", .isa = "AMX TILE, BF16 and AVX-512 F, BW, VL, DQ, BF16"},
    [AVX512BF16] = {.name = "cpu_avx512bf16", .isa = "AVX-512 F, BW, VL, DQ, BF16"},
    [AVX512] = {.name = "cpu_avx512", .isa = "AVX-512 F, BW, VL, DQ"},
    [AVX2] = {.name = "cpu_avx2", .isa = "AVX2, FMA, F16C"},
#endif
    [PLAIN] = {.name = "cpu_plain", .isa = "plain C", .runs = true},
};

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The state that the operating system saves: bits of XCR0. */
static uint64_t saved_state(void)
{
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

static bool all_of(uint64_t bits, uint64_t wanted)
{
    return (bits & wanted) == wanted;
}

/* Tile registers are Linux's to grant, once for all threads of a process: it saves them in frames
 * of signal handlers, for which an alternate stack may be too small. */
static bool may_use_tiles(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

static void ask_cpu(void)
{
    enum { XMM_YMM = 0x06, OPMASK_ZMM = 0xE6, TILES = 0x60000 };
    uint32_t eax, ebx, ecx, edx, leaf7, leaf7_ecx, leaf7_edx, leaf7_1 = 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !all_of(ecx, bit_OSXSAVE)) return;
    const uint64_t state = saved_state();
    const bool fma = all_of(ecx, bit_AVX | bit_FMA | bit_F16C);
    if (!__get_cpuid_count(7, 0, &eax, &leaf7, &leaf7_ecx, &leaf7_edx)) return;
    if (eax >= 1) __get_cpuid_count(7, 1, &leaf7_1, &ebx, &ecx, &edx);

    const bool avx2 = fma && all_of(leaf7, bit_AVX2) && all_of(state, XMM_YMM);
    const bool avx512 = avx2 &&
                        all_of(leaf7, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ) &&
                        all_of(state, OPMASK_ZMM);
    kernels[AVX2].runs = avx2;
    kernels[AVX512].runs = avx512;
    kernels[AVX512BF16].runs = avx512 && all_of(leaf7_1, bit_AVX512BF16);
    kernels[AMX].runs = kernels[AVX512BF16].runs &&
                        all_of(leaf7_edx, bit_AMX_TILE | bit_AMX_BF16) && all_of(state, TILES) &&
                        may_use_tiles();
}
#else
static void ask_cpu(void)
{
}
#endif

int32_t smla_cpu_kernels(const struct smla_cpu_kernel **table)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, ask_cpu);
    *table = kernels;
    return KERNELS;
}

const struct smla_tile_kernel *smla_tile_kernel(int32_t kernel_id, enum smla_dtype q_dtype,
                                                int32_t heads)
{
    switch (kernel_id) {
#if defined(__x86_64__)
    case AMX:
        if (q_dtype == SMLA_BFLOAT16 && heads >= AMX_HEADS) return &smla_tile_amx;
        return smla_tile_kernel(AVX512BF16, q_dtype, heads);
    case AVX512BF16: /* its products take bfloat16 queries only */
        return q_dtype == SMLA_BFLOAT16 ? &smla_tile_avx512bf16 : &smla_tile_avx512;
    case AVX512: return &smla_tile_avx512;
    case AVX2: return &smla_tile_avx2;
#endif
    default: (void)q_dtype, (void)heads; return &smla_tile_plain;
    }
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int compare_rates(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* The median of a few attempts of some milliseconds each: what the machine gives at this time. */
static double measure(const struct smla_tile_kernel *kernel)
{
    enum { ATTEMPTS = 9, ROUNDS = 1 << 20 };
    double rates[ATTEMPTS];
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        const double begin = seconds();
        rates[attempt] = kernel->multiply(ROUNDS) / (seconds() - begin);
    }
    qsort(rates, ATTEMPTS, sizeof *rates, compare_rates);
    return rates[ATTEMPTS / 2];
}

double smla_cpu_peak(const char *kernel)
{
    for (int32_t id = 0; id < KERNELS; id++)
        if (!strcmp(kernel, kernels[id].name))
            return measure(smla_tile_kernel(id, SMLA_BFLOAT16, SMLA_TILE_HEADS));
    return 0.0;
}
