/* The instructions that C++ has no word for, each wrapped once. What a GPU lacks is made of what it
 * has: a kernel needs no branch on the architecture of its own. */
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace ptx
{

__device__ inline uint32_t shared_address(const void *pointer)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/* A number of which the compiler cannot tell that it has seen it before: what follows from it is
 * worked out again where it is needed, instead of waiting in registers. */
__device__ inline int fresh(int number)
{
    asm volatile("" : "+r"(number));
    return number;
}

__device__ inline float fresh(float number)
{
    asm volatile("" : "+f"(number));
    return number;
}

/* threadIdx.x, read anew: it waits nowhere, neither in a register nor in local memory. */
__device__ inline unsigned thread()
{
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

/* What stands before it in the program is done before what stands behind, so that no registers wait
 * for both. */
__device__ inline void keep_order()
{
    asm volatile("" ::: "memory");
}

/* -------------------------------------------------------------------------- copies (8.0) */

/* 16 bytes from global to shared memory, so many bytes behind the two addresses; with `bytes` 0
 * nothing is read and zeros are written. */
template <int to_offset = 0, int from_offset = 0>
__device__ inline void copy_16(uint32_t to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16, %2;"
                 :
                 : "r"(to), "l"(from), "r"(bytes), "n"(to_offset), "n"(from_offset)
                 : "memory");
}

template <int to_offset = 0, int from_offset = 0>
__device__ inline void copy_16(void *to, const void *from, int bytes)
{
    copy_16<to_offset, from_offset>(shared_address(to), from, bytes);
}

/* Until all copies that this thread has started are complete. */
__device__ inline void wait_copies()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Whether there are bulk copies. */
#if __CUDA_ARCH__ >= 900
constexpr bool BULK_COPIES = true;
#else
constexpr bool BULK_COPIES = false;
#endif

/* Brings the 32 bytes around an address into L2. */
__device__ inline void prefetch(const void *pointer)
{
    asm volatile("prefetch.global.L2 [%0];" : : "l"(pointer));
}

/* -------------------------------------------------------------------------- barriers (8.0) */

/* Barriers of `threads` threads, whole warps, of the block: one of sixteen each, of which
 * __syncthreads takes number 0. */
__device__ inline void sync_threads(int barrier, int threads)
{
    asm volatile("bar.sync %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

/* Counts at the barrier as one that waits does, but goes on. */
__device__ inline void arrive_threads(int barrier, int threads)
{
    asm volatile("bar.arrive %0, %1;" : : "r"(barrier), "r"(threads) : "memory");
}

/* A barrier that tells whether the condition holds in any of the threads. */
__device__ inline bool sync_threads_or(int barrier, int threads, bool condition)
{
    int any;
    asm volatile("{\n\t"
                 ".reg .pred mine, all;\n\t"
                 "setp.ne.s32 mine, %3, 0;\n\t"
                 "bar.red.or.pred all, %1, %2, mine;\n\t"
                 "selp.s32 %0, 1, 0, all;\n\t"
                 "}"
                 : "=r"(any)
                 : "r"(barrier), "r"(threads), "r"((int)condition)
                 : "memory");
    return any;
}

/* A barrier in shared memory whose phases end when `count` arrivals have come. What a thread has
 * written before it arrives can be read by those that have waited. */
__device__ inline void init_phases(uint64_t *barrier, int count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;"
                 :
                 : "r"(shared_address(barrier)), "r"(count)
                 : "memory");
}

/* Before bulk copies meet barriers that this thread has made. */
__device__ inline void publish_phases()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ inline void arrive(uint64_t *barrier)
{
    asm volatile("{\n\t"
                 ".reg .b64 state;\n\t"
                 "mbarrier.arrive.shared.b64 state, [%0];\n\t"
                 "}"
                 :
                 : "r"(shared_address(barrier))
                 : "memory");
}

/* Arrives, and has the phase wait for so many bytes of bulk copies, too. */
__device__ inline void arrive_for_bulk(uint64_t *barrier, int bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 :
                 : "r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#else
    arrive(barrier);
#endif
}

/* Bulk copies (9.0): `bytes`, a multiple of 16 at addresses that are, by one thread. They end the
 * barrier's phase, not the thread's. */
__device__ inline void copy_bulk(void *to, const void *from, int bytes, uint64_t *barrier)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#endif
}

/* Arrives when all copies that this thread has started are complete. */
__device__ inline void arrive_after_copies(uint64_t *barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];"
                 :
                 : "r"(shared_address(barrier))
                 : "memory");
}

/* Whether the phase of this parity has ended. */
__device__ inline bool has_ended(uint64_t *barrier, unsigned parity)
{
    unsigned ended;
    asm volatile("{\n\t"
                 ".reg .pred ended;\n\t"
                 "mbarrier.test_wait.parity.shared.b64 ended, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, ended;\n\t"
                 "}"
                 : "=r"(ended)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
    return ended;
}

/* Until the phase of this parity (0 for the first, 1 for the second) has ended. */
__device__ inline void wait_phase(uint64_t *barrier, unsigned parity)
{
    unsigned ended;
    do {
#if __CUDA_ARCH__ >= 900
#define SMLA_TEST_PHASE "mbarrier.try_wait.parity.shared.b64"
#else
#define SMLA_TEST_PHASE "mbarrier.test_wait.parity.shared.b64"
#endif
        asm volatile("{\n\t"
                     ".reg .pred ended;\n\t" SMLA_TEST_PHASE " ended, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, ended;\n\t"
                     "}"
                     : "=r"(ended)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
#undef SMLA_TEST_PHASE
    } while (!ended);
}

/* -------------------------------------------------------------------------- matrices (8.0) */

/* Four (two) matrices of 8 rows of 16 bytes; lane l gives the address of row l % 8 of matrix l / 8
 * and receives, of each matrix, 4 bytes: of row l / 4 the word l % 4. */
__device__ inline void load_matrices(uint32_t (&words)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
}

__device__ inline void load_matrices(uint32_t (&words)[2], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(address));
}

/* The same, transposed in units of 2 bytes: of the rows 2 * (l % 4) and the next the unit l / 4. */
__device__ inline void load_transposed(uint32_t (&words)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address));
}

/* Writes four matrices (9.0); lane l gives the address of row l % 8 of matrix l / 8. */
__device__ inline void store_matrices(uint32_t address, const uint32_t (&words)[4])
{
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :
                 : "r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
#endif
}

/* sums (16 x 8) += a (16 x 16) * b (16 x 8). Lane 4 r + c holds
 *   sums  rows r and r + 8, columns 2 c and 2 c + 1;
 *   a     rows r and r + 8 of the pair of columns c, then of the pair c + 4;
 *   b     column r of the pair of rows c, then of the pair c + 4. */
template <typename Number>
__device__ inline void multiply(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ inline void multiply<__half>(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void multiply<__nv_bfloat16>(float (&sums)[4], const uint32_t (&a)[4],
                                               uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* -------------------------------------------------------------------------- numbers */

/* 2^x to 2^-22; 0 below 2^-126. */
__device__ inline float exp2_fast(float x)
{
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

/* Two floats rounded to 16 bits each, the first in the lower half. */
template <typename Number> __device__ inline uint32_t pack(float low, float high);

template <> __device__ inline uint32_t pack<__half>(float low, float high)
{
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t &>(pair);
}

template <> __device__ inline uint32_t pack<__nv_bfloat16>(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t &>(pair);
}

/* Two floats cut off to float16 numbers, the first in the lower half. */
__device__ inline uint32_t cut(float low, float high)
{
    uint32_t pair;
    asm("cvt.rz.f16x2.f32 %0, %2, %1;" : "=r"(pair) : "f"(low), "f"(high));
    return pair;
}

/* The float16 numbers that from_e4m3 makes are the e4m3 ones divided by E4M3_UNIT, exactly. There
 * is an instruction from 8.9 on. Before it the seven bits of an e4m3 number's size are put where a
 * float16 has the low bits of its exponent and the high ones of its fraction, which leaves only the
 * difference of the two biases; all seven set is a NaN, and becomes one by one more bit of the
 * exponent. */
#if __CUDA_ARCH__ >= 890
constexpr float E4M3_UNIT = 1.0f;
#else
constexpr float E4M3_UNIT = 256.0f;
#endif

/* Bytes 0 and 1 of `bytes` become the first word, bytes 2 and 3 the second. */
__device__ inline void from_e4m3(uint32_t (&pairs)[2], uint32_t bytes)
{
#if __CUDA_ARCH__ >= 890
    asm("{\n\t"
        ".reg .b16 low, high;\n\t"
        "mov.b32 {low, high}, %2;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n\t"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n\t"
        "}"
        : "=r"(pairs[0]), "=r"(pairs[1])
        : "r"(bytes));
#else
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t placed = __byte_perm(bytes, 0, i == 0 ? 0x1404 : 0x3424);
        const uint32_t size = placed & 0x7F007F00u;
        const uint32_t nan = (size + 0x01000100u) & 0x80008000u;
        pairs[i] = (placed & 0x80008000u) | (size | nan) >> 1;
    }
#endif
}

/* -------------------------------------------------------------------------- launches (9.0) */

/* Lets the next launch of the stream begin, if it was made to overlap with this one. */
__device__ inline void allow_next_launch()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Until the launches before this one are complete and what they wrote is visible. */
__device__ inline void wait_for_last_launch()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

} // namespace ptx
