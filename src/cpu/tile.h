/* What the driver in attend.c asks of an instruction set: one tile of entries under one tile of
 * heads at a time, and the joining of partial results. tile.c is that code. */
#ifndef SMLA_TILE_H
#define SMLA_TILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "format.h"
#include "params.h"

enum {
    SMLA_TILE_HEADS = 128,  /* heads that share a gather, at most */
    SMLA_TILE_ENTRIES = 32, /* entries of a tile of tile.c, at most: a multiple of every vector */
    SMLA_TILE_GROUPS = 16,  /* groups of a packed row that have a scale of their own, at most */
};

/* A softmax under way, or the result of one split: sums that are still to be divided. */
struct smla_part {
    float *values;   /* (heads, value_pitch): sum of exp(s - peak) * v */
    float *peak;     /* (heads): the largest score */
    float *sum;      /* (heads): sum of exp(s - peak) */
    int64_t entries; /* how many there were; 0: nothing above has been written */
};

/* One thread's working memory, with what a kernel needs to know of the call. */
struct smla_tile {
    int32_t heads; /* of this task */
    int32_t d_qk;
    int32_t d_v;
    int32_t depth;         /* d_qk up to whole vectors; the rest of a row is zero */
    int32_t value_depth;   /* d_v up to whole vectors, inside depth */
    int32_t pitch;         /* float32 from one key (and query) to the next */
    int32_t pair_pitch;    /* the same of bfloat16 queries and keys */
    int32_t value_pitch;   /* float32 from one head's value sums to the next */
    int32_t row_bytes;     /* of a cache row */
    enum smla_dtype dtype; /* of q and of a dense cache */
    float softmax_scale;
    float logit_cap; /* 0: none */
    float tensor_scale;
    const struct smla_format_info *format;
    void *query; /* (heads, pitch) float32, or (heads, pair_pitch) bfloat16 */
    float *keys; /* (SMLA_TILE_ENTRIES, pitch): the keys, or at least their values */
    uint16_t
        *pairs;    /* (SMLA_TILE_ENTRIES, pair_pitch): the keys in bfloat16, without their scales */
    float *scores; /* (heads, SMLA_TILE_ENTRIES), then the weights exp(score - base) */
    void *own;     /* what only this kernel keeps: own_bytes of it */
    float base[SMLA_TILE_HEADS];                       /* what is subtracted from a head's scores */
    float decay[SMLA_TILE_HEADS];                      /* what the sums so far are multiplied by */
    float scales[SMLA_TILE_GROUPS][SMLA_TILE_ENTRIES]; /* of the rows in `pairs` */
};

struct smla_tile_kernel {
    int32_t granule; /* numbers that depth and value_depth are a multiple of */
    int32_t entries; /* of a tile, at most */
    bool pairs;      /* works with bfloat16 queries and keys, for bfloat16 queries only */

    /* Bytes of memory that the kernel keeps for tile->heads heads instead of keys and scores; NULL:
     * none. */
    size_t (*own_bytes)(const struct smla_tile *tile);

    /* Numbers [first, first + width) of one head's query, as they lie in q. */
    void (*query)(const struct smla_tile *tile, int32_t head, int32_t first, int32_t width,
                  const uint8_t *numbers);

    /* All of a task's queries are there; NULL: nothing to be done about it. */
    void (*begin)(const struct smla_tile *tile);

    /* Adds `count` entries, 1 to `entries`, whose cache rows are given. The rows after them
     * up to `known` come next: worth a prefetch. */
    void (*attend)(struct smla_tile *tile, struct smla_part *part, const uint8_t *const *rows,
                   int32_t count, int32_t known);

    /* total += part, for that many heads; neither is empty. */
    void (*fold)(const struct smla_tile *tile, struct smla_part *total,
                 const struct smla_part *part, int32_t heads);

    /* numbers * factor into an output row. */
    void (*store)(const float *numbers, float factor, int32_t width, enum smla_dtype dtype,
                  void *out);

    /* Does multiply-adds on registers alone, `rounds` times as many as are under way at once, and
     * returns how many those were. */
    double (*multiply)(int32_t rounds);
};

extern const struct smla_tile_kernel smla_tile_plain;
extern const struct smla_tile_kernel smla_tile_avx2;
extern const struct smla_tile_kernel smla_tile_avx512;
extern const struct smla_tile_kernel smla_tile_avx512bf16;
extern const struct smla_tile_kernel smla_tile_amx;

#endif
