/* Hopper's warpgroup instructions (9.0a), each wrapped once.
 *
 * A warpgroup is four warps that follow one another, the first of them a multiple of four. Its
 * products run behind its back: fence_products before the first of some and after registers that
 * they use were written, the products, commit_products, and wait_products before their registers or
 * the shared memory that they read are touched again. */
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace ptx
{

constexpr int WARPGROUP = 128; /* threads */

/* -------------------------------------------------------------------------- registers */

/* Gives registers of every thread of the warpgroup back, or takes them from what others gave. */
template <int registers> __device__ inline void keep_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(registers));
}

template <int registers> __device__ inline void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(registers));
}

/* -------------------------------------------------------------------------- shared memory */

/* What the thread has written to shared memory can be read by products of those that learn of it
 * from now on. */
__device__ inline void publish_operands()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* 16 bytes that are read once, or zeros where there is nothing. In the order of the program: loads
 * that are to be under way together stay together. */
__device__ inline uint4 load_once(const void *pointer, bool present)
{
    uint4 words;
    asm volatile("{\n\t"
                 ".reg .pred present;\n\t"
                 "setp.ne.b32 present, %5, 0;\n\t"
                 "mov.b32 %0, 0;\n\t"
                 "mov.b32 %1, 0;\n\t"
                 "mov.b32 %2, 0;\n\t"
                 "mov.b32 %3, 0;\n\t"
                 "@present ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n\t"
                 "}"
                 : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
                 : "l"(pointer), "r"((int)present));
    return words;
}

/* Operands lie in shared memory as columns of blocks: a block has rows of 64 numbers of two bytes,
 * 128 bytes each, whose 16-byte pieces are swapped: piece p of row r stands at p ^ (r % 8). A block
 * starts at a multiple of 1024 bytes, and `pitch` bytes behind it the block of the next 64 numbers
 * of the same rows.
 *
 * The descriptor of what begins at an address. Along k, rows are what the operand's m or n counts
 * and the instruction reads 32 bytes of each; across, rows are its k, and 64 numbers or those of
 * several blocks its n. */
struct operand {
    uint32_t first, second;

    /* Of what begins so many bytes behind. */
    __device__ uint64_t at(int bytes) const
    {
        return (uint64_t)second << 32 | (first + (bytes >> 4));
    }
};

constexpr uint32_t SWAPPED = 1u << 30 | 1024 >> 4; /* and eight rows are 1024 bytes */

__device__ inline operand operand_along_k(uint32_t address)
{
    return {1u << 16 | address >> 4, SWAPPED};
}

template <int pitch> __device__ inline operand operand_across_k(uint32_t address)
{
    return {uint32_t{pitch >> 4} << 16 | address >> 4, SWAPPED};
}

/* -------------------------------------------------------------------------- products */

__device__ inline void fence_products()
{
    asm volatile("wgmma.fence.sync.aligned;");
}

__device__ inline void commit_products()
{
    asm volatile("wgmma.commit_group.sync.aligned;");
}

/* Until at most so many of the thread's last commits are under way. */
template <int commits> __device__ inline void wait_products()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(commits));
}

/* sums (64 x n) = a (64 x 16) * b (16 x n), added to what they are if `accumulate`. Lane 4 r + c of
 * warp w holds
 *   sums  rows 16 w + r and that + 8: number 4 j + 2 y + x is in row 16 w + r + 8 y, column
 *         8 j + 2 c + x;
 *   a     where it is in registers: rows 16 w + r and that + 8 of the pair of columns c, then of
 *         the pair c + 4.
 *
 * bfloat16, both operands in shared memory, along k: the first step, and those that are added. */
__device__ inline void begin_along_k(float (&sums)[16], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "%16, %17, 0, 1, 1, 0, 0;"
                 : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3]), "=f"(sums[4]),
                   "=f"(sums[5]), "=f"(sums[6]), "=f"(sums[7]), "=f"(sums[8]), "=f"(sums[9]),
                   "=f"(sums[10]), "=f"(sums[11]), "=f"(sums[12]), "=f"(sums[13]), "=f"(sums[14]),
                   "=f"(sums[15])
                 : "l"(a), "l"(b));
}

__device__ inline void multiply_along_k(float (&sums)[16], uint64_t a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "%16, %17, 1, 1, 1, 0, 0;"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]),
                   "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]),
                   "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]),
                   "+f"(sums[15])
                 : "l"(a), "l"(b));
}

/* bfloat16, a from registers, b across k, of 256 columns; always added. */
__device__ inline void multiply_across_k(float (&sums)[128], const uint32_t *a, uint64_t b)
{
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
                 "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
                 "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
                 "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "
                 "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "
                 "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, "
                 "%106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "
                 "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                 "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]),
                   "+f"(sums[5]), "+f"(sums[6]), "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]),
                   "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]),
                   "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
                   "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]),
                   "+f"(sums[25]), "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]),
                   "+f"(sums[30]), "+f"(sums[31]), "+f"(sums[32]), "+f"(sums[33]), "+f"(sums[34]),
                   "+f"(sums[35]), "+f"(sums[36]), "+f"(sums[37]), "+f"(sums[38]), "+f"(sums[39]),
                   "+f"(sums[40]), "+f"(sums[41]), "+f"(sums[42]), "+f"(sums[43]), "+f"(sums[44]),
                   "+f"(sums[45]), "+f"(sums[46]), "+f"(sums[47]), "+f"(sums[48]), "+f"(sums[49]),
                   "+f"(sums[50]), "+f"(sums[51]), "+f"(sums[52]), "+f"(sums[53]), "+f"(sums[54]),
                   "+f"(sums[55]), "+f"(sums[56]), "+f"(sums[57]), "+f"(sums[58]), "+f"(sums[59]),
                   "+f"(sums[60]), "+f"(sums[61]), "+f"(sums[62]), "+f"(sums[63]), "+f"(sums[64]),
                   "+f"(sums[65]), "+f"(sums[66]), "+f"(sums[67]), "+f"(sums[68]), "+f"(sums[69]),
                   "+f"(sums[70]), "+f"(sums[71]), "+f"(sums[72]), "+f"(sums[73]), "+f"(sums[74]),
                   "+f"(sums[75]), "+f"(sums[76]), "+f"(sums[77]), "+f"(sums[78]), "+f"(sums[79]),
                   "+f"(sums[80]), "+f"(sums[81]), "+f"(sums[82]), "+f"(sums[83]), "+f"(sums[84]),
                   "+f"(sums[85]), "+f"(sums[86]), "+f"(sums[87]), "+f"(sums[88]), "+f"(sums[89]),
                   "+f"(sums[90]), "+f"(sums[91]), "+f"(sums[92]), "+f"(sums[93]), "+f"(sums[94]),
                   "+f"(sums[95]), "+f"(sums[96]), "+f"(sums[97]), "+f"(sums[98]), "+f"(sums[99]),
                   "+f"(sums[100]), "+f"(sums[101]), "+f"(sums[102]), "+f"(sums[103]),
                   "+f"(sums[104]), "+f"(sums[105]), "+f"(sums[106]), "+f"(sums[107]),
                   "+f"(sums[108]), "+f"(sums[109]), "+f"(sums[110]), "+f"(sums[111]),
                   "+f"(sums[112]), "+f"(sums[113]), "+f"(sums[114]), "+f"(sums[115]),
                   "+f"(sums[116]), "+f"(sums[117]), "+f"(sums[118]), "+f"(sums[119]),
                   "+f"(sums[120]), "+f"(sums[121]), "+f"(sums[122]), "+f"(sums[123]),
                   "+f"(sums[124]), "+f"(sums[125]), "+f"(sums[126]), "+f"(sums[127])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

/* a from registers, b along k or across k, of 64, 32 or 16 columns; added if `accumulate`. The
 * macros number the instruction's operands: sums, a and b, `accumulate`, `across`. */
template <typename Number, bool across, int count>
__device__ inline void multiply_left(float (&sums)[count], const uint32_t (&a)[4], uint64_t b,
                                     bool accumulate);

#define SMLA_LEFT(Number, type, across, columns, sums_at, rest_at, accumulate_at, across_at, ...)  \
    template <>                                                                                    \
    __device__ inline void multiply_left<Number, across>(                                          \
        float (&sums)[columns / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate)           \
    {                                                                                              \
        asm volatile("{\n\t"                                                                       \
                     ".reg .pred accumulate;\n\t"                                                  \
                     "setp.ne.b32 accumulate, " accumulate_at ", 0;\n\t"                           \
                     "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " "     \
                     "{" sums_at "}, " rest_at ", accumulate, 1, 1, " across_at ";\n\t"            \
                     "}"                                                                           \
                     : __VA_ARGS__                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate),   \
                       "n"((int)across));                                                          \
    }

#define SMLA_LEFT_16(Number, type, across)                                                         \
    SMLA_LEFT(Number, type, across, 16, "%0, %1, %2, %3, %4, %5, %6, %7",                          \
              "{%8, %9, %10, %11}, %12", "%13", "%14", "+f"(sums[0]), "+f"(sums[1]),               \
              "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),           \
              "+f"(sums[7]))

#define SMLA_LEFT_32(Number, type, across)                                                         \
    SMLA_LEFT(Number, type, across, 32,                                                            \
              "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",              \
              "{%16, %17, %18, %19}, %20", "%21", "%22", "+f"(sums[0]), "+f"(sums[1]),             \
              "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),           \
              "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),         \
              "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]))

#define SMLA_LEFT_64(Number, type, across)                                                         \
    SMLA_LEFT(Number, type, across, 64,                                                            \
              "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "   \
              "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",              \
              "{%32, %33, %34, %35}, %36", "%37", "%38", "+f"(sums[0]), "+f"(sums[1]),             \
              "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),           \
              "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]),         \
              "+f"(sums[12]), "+f"(sums[13]), "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]),      \
              "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]), "+f"(sums[20]), "+f"(sums[21]),      \
              "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]), "+f"(sums[26]),      \
              "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31]))

#define SMLA_LEFTS(Number, type, across)                                                           \
    SMLA_LEFT_16(Number, type, across)                                                             \
    SMLA_LEFT_32(Number, type, across) SMLA_LEFT_64(Number, type, across)

SMLA_LEFTS(__half, "f16", false)
SMLA_LEFTS(__half, "f16", true)
SMLA_LEFTS(__nv_bfloat16, "bf16", false)
#undef SMLA_LEFTS
#undef SMLA_LEFT_16
#undef SMLA_LEFT_32
#undef SMLA_LEFT_64
#undef SMLA_LEFT

} // namespace ptx
