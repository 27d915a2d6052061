/* The tile instructions (AMX), each wrapped once. A tile register, named by a literal 0 to 7, holds
 * 16 rows of 64 bytes: 16 float32 or 32 bfloat16 numbers each. Whatever touches memory tells the
 * compiler so: the registers themselves are nothing that it knows of. */
#ifndef SMLA_AMX_H
#define SMLA_AMX_H

#include <stdint.h>

struct tile_shapes {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

#define EIGHT(n) {n, n, n, n, n, n, n, n}

/* What a thread says before its first tile instruction: all eight registers in full size. */
static inline void tiles_begin(void)
{
    static const struct tile_shapes FULL = {
        .palette = 1, .row_bytes = EIGHT(64), .rows = EIGHT(16)};
    __asm__ volatile("ldtilecfg %0" ::"m"(FULL));
}

/* And after its last one: tiles that hold nothing are nothing to save in a context switch. */
static inline void tiles_end(void)
{
    __asm__ volatile("tilerelease");
}

#define tile_zero(tile) __asm__ volatile("tilezero %%tmm" #tile::)

/* Rows from `stride` bytes to `stride` bytes. */
#define tile_load(tile, from, stride)                                                              \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(from), "r"((int64_t)(stride))         \
                     : "memory")
#define tile_store(tile, to, stride)                                                               \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride))      \
                     : "memory")

/* sums[i][j] += left[i][2k] * right[k][2j] + left[i][2k + 1] * right[k][2j + 1], over k: bfloat16
 * products in float32. */
#define tile_dot(sums, left, right)                                                                \
    __asm__ volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sums::)

#endif
