/* The work of one call, as plain structs: what src/ fills in and every kernel, on the CPU and on
 * the GPU, reads. Plain C, no pointer to a pointer, the same size for the host compiler and nvcc.
 *
 * Rows. A query row is (batch, query): q is (batch, s_q, heads, d_qk), and a q of three dimensions
 * is read as s_q = 1. Every array that has an entry per row carries one stride for each of the two,
 * so that any layout of the caller's is read in place. */
#ifndef SMLA_PARAMS_H
#define SMLA_PARAMS_H

#include <stdint.h>

enum smla_dtype {
    SMLA_DTYPE_NONE = 0, /* an absent array */
    SMLA_FLOAT32,
    SMLA_FLOAT16,
    SMLA_BFLOAT16,
    SMLA_E4M3, /* e4m3fn; also stands for a byte of a packed row */
    SMLA_UINT8,
    SMLA_INT32,
    SMLA_INT64,
    SMLA_DTYPE_OTHER, /* anything that no argument takes */
};

/* How a cache row is laid out: FORMATS in src/format.c has a line for each. */
enum smla_format {
    SMLA_DENSE = 0,
    SMLA_FP8_DS_MLA,
    SMLA_FP8_DS_MLA_NOROPE,
    SMLA_FP8_TENSOR,
    SMLA_FORMATS /* how many */
};

/* A small read-only array of int32, int64 or float32: strides in elements, 0 allowed. */
struct smla_array {
    const void *data;  /* NULL: absent, or without elements */
    int64_t stride[3]; /* per row: batch, query, entry; otherwise in the order of its dimensions */
    int32_t dtype;     /* enum smla_dtype; SMLA_DTYPE_NONE: absent */
    int32_t ndim;      /* of the caller's array, for messages */
};

/* An array that a kernel writes: strides in elements over (batch, query, head). */
struct smla_output {
    void *data;
    int64_t stride[3];
    int32_t dtype; /* SMLA_DTYPE_NONE: not wanted */
    int32_t reserved;
};

/* One paged cache and the entries that select from it. */
struct smla_source {
    struct smla_array indices;     /* (batch, query, topk) slots or positions; absent: all */
    struct smla_array topk_lens;   /* (batch, query) entries that count; absent: topk */
    struct smla_array block_table; /* (requests, max_blocks); absent: indices are slots */
    struct smla_array seq_lens;    /* (requests); absent: max_blocks * block_size */
    const uint8_t *cache;          /* first byte of slot 0 */
    int64_t block_stride;          /* bytes from a block to the next */
    int64_t token_stride;          /* bytes from a token to the next inside its block */
    int64_t num_blocks;
    int64_t block_size;
    int64_t max_blocks;  /* columns of block_table */
    int64_t requests;    /* rows of block_table */
    int64_t topk;        /* columns of indices; without indices the most entries a row has */
    int64_t max_seq_len; /* largest legal seq_lens, see smla_longest */
    int64_t shard_rank;  /* context parallelism; a size of 1 owns every position */
    int64_t shard_size;
    int64_t shard_interleave;
    int32_t format; /* enum smla_format */
    float scale;    /* of SMLA_FP8_TENSOR, else 1 */
    int32_t causal; /* query_positions bound this source */
    int32_t reserved;
};

struct smla_attend {
    struct smla_source source[2];      /* the cache, the extra cache */
    const void *q[2];                  /* latent and rope part, or all of q and nothing */
    int64_t q_stride[2][3];            /* elements: batch, query, head */
    struct smla_array request_ids;     /* (batch, query); absent: the request is the batch */
    struct smla_array query_positions; /* (batch, query); absent: no bound */
    struct smla_array attn_sink;       /* (heads) float32 */
    struct smla_output out;            /* (batch, query, head, d_v) */
    struct smla_output lse;            /* (batch, query, head) float32 */
    struct smla_output max_logits;     /* (batch, query, head) float32 */
    int64_t batch;
    int64_t s_q;
    int32_t sources; /* 1 or 2 */
    int32_t heads;
    int32_t q_width[2]; /* numbers of each part of q; they add up to d_qk */
    int32_t d_qk;
    int32_t d_v;
    int32_t q_dtype;
    int32_t batch_invariant;
    float softmax_scale;
    float logit_cap; /* 0: none */
    float empty_lse; /* what a row without valid entries gets: -inf */
    int32_t record;  /* report faults, see enum smla_validate in src/problem.h */
};

/* How the numbers of a cache row are stored: a line of FORMATS in src/format.c for a kernel that
 * has no specialisation of its own for the format. */
struct smla_layout {
    int32_t dtype;        /* of a dense row; SMLA_DTYPE_NONE: packed */
    int32_t quantised;    /* e4m3 numbers from byte 0 on, then bfloat16 ones */
    int32_t group;        /* of them share a scale */
    int32_t scale_offset; /* bytes from the row's start to the float32 scales; -1: source.scale */
    int32_t rope_offset;  /* bytes */
    int32_t reserved;
};

/* Rows to be written into a cache: append, and pack, which appends to slots 0, 1, 2, ... */
struct smla_append {
    uint8_t *cache;
    int64_t block_stride; /* bytes, as in smla_source */
    int64_t token_stride;
    int64_t num_blocks;
    int64_t block_size;
    struct smla_array slots; /* (tokens); absent: token t goes to slot t */
    const void *part[2];     /* latent and rope, or whole rows and nothing */
    int64_t part_stride[2];  /* elements from a token to the next */
    int32_t part_width[2];
    int32_t part_dtype[2];
    int64_t tokens;
    int32_t format;
    int32_t cache_dtype; /* of SMLA_DENSE */
    float scale;         /* of SMLA_FP8_TENSOR, else 1 */
    int32_t reserved;
};

/* append on a GPU. */
struct smla_gpu_append {
    struct smla_append work;
    struct smla_layout layout;
    int32_t width; /* numbers of a token */
    int32_t reserved;
};

/* unpack on a GPU: every slot as `width` float32. */
struct smla_gpu_unpack {
    struct smla_source source;
    struct smla_layout layout;
    float *numbers; /* (num_blocks * block_size, width) */
    int32_t width;
    int32_t reserved;
};

enum { SMLA_MERGE_PARTS = 32 };

/* Partial results over disjoint sets of entries, to be joined by their lse. */
struct smla_merge {
    struct smla_output part_out[SMLA_MERGE_PARTS]; /* (batch, query, head, d_v), only read */
    struct smla_output part_lse[SMLA_MERGE_PARTS]; /* (batch, query, head) float32, only read */
    struct smla_array attn_sink;                   /* (heads) float32, or absent */
    struct smla_output out;
    struct smla_output lse;
    int64_t batch;
    int64_t s_q;
    int32_t parts;
    int32_t heads;
    int32_t d_v;
    float empty_lse;
};

/* Why an entry is not attended. The order of the names is the order of the tests; everything from
 * SMLA_FAULT_INDEX on is a fault of the caller's, what stands before is ordinary masking. */
enum smla_cause {
    SMLA_VALID = 0,
    SMLA_PADDING,       /* index -1 */
    SMLA_PAST_TOPK_LEN, /* at or past topk_lens */
    SMLA_PAST_SEQ_LEN,  /* position at or past seq_lens */
    SMLA_AFTER_QUERY,   /* position after query_positions */
    SMLA_OTHER_SHARD,   /* position of another rank */
    SMLA_UNALLOCATED,   /* block -1 */
    SMLA_PADDING_ROW,   /* request -1 */
    SMLA_FAULT_INDEX,   /* index < -1 */
    SMLA_FAULT_SLOT,    /* slot at or past the capacity */
    SMLA_FAULT_LOGICAL, /* logical block at or past max_blocks */
    SMLA_FAULT_BLOCK,   /* block < -1 or >= num_blocks */
    SMLA_FAULT_REQUEST, /* request < -1 or >= requests: the row is empty */
    SMLA_FAULT_TOPK,    /* topk_lens outside [0, topk]: clamped */
    SMLA_FAULT_SEQ,     /* seq_lens outside [0, max_seq_len]: clamped */
    SMLA_CAUSES         /* how many */
};

/* A fault with its place, enough for a message without another look at the array. */
struct smla_fault {
    int64_t count;       /* faults in the same array: entries, or rows where a length is bad */
    int64_t total;       /* entries (rows) that were looked at */
    int64_t row;         /* batch * s_q + query where it was first met */
    int64_t position[3]; /* in the array of smla_fault_tensor, in the caller's dimensions */
    int64_t value;
    int64_t bound;  /* the first value that is too large */
    int32_t ndim;   /* of position */
    int32_t cause;  /* enum smla_cause; SMLA_VALID: no fault */
    int32_t source; /* 0 or 1 */
    int32_t reserved;
};

/* Where a GPU kernel reports a fault: in mapped host memory, so that the host polls it with plain
 * loads. Written by one block at a time, which fault_lock in device memory chooses. */
struct smla_fault_slot {
    struct smla_fault fault;
    uint32_t full; /* written last by the device, cleared by the host */
    uint32_t reserved;
};

/* Shared memory of a block of any_attend: fixed arrays, then q and the sums of out as float32 for
 * each head of the tile, the latter twice for float32 queries. Fits every GPU from compute
 * capability 8.0 on. */
enum {
    SMLA_ANY_HEADS = 8, /* 1 for rows so wide that 8 do not fit */
    SMLA_ANY_FIXED_BYTES = 4096,
    SMLA_ANY_SHARED_BYTES = 98304, /* at most */
};

/* What a check of a whole call counts, by the array that a fault stands in. */
enum smla_checked {
    SMLA_CHECKED_REQUESTS,
    SMLA_CHECKED_TOPK_LENS,
    SMLA_CHECKED_SEQ_LENS,
    SMLA_CHECKED_INDICES,
    SMLA_CHECKED_TABLE,
    SMLA_CHECKED /* how many */
};
struct smla_tally {
    int64_t seen[2][SMLA_CHECKED]; /* by source; requests count for the first */
    int64_t faults[2][SMLA_CHECKED];
    struct smla_fault first; /* cause SMLA_VALID: none */
};

/* The check of a whole call on a GPU. `work` says which entries there are; nothing else of it is
 * read. */
struct smla_gpu_check {
    struct smla_attend work;
    struct smla_tally *tally;     /* zero before the launch */
    unsigned long long *earliest; /* all ones before the launch: where the first fault is */
};

/* Where the entries of one source lead, on a GPU: see smla_cpu_resolve. */
struct smla_gpu_resolve {
    struct smla_attend work;
    int64_t *slots; /* (rows, topk) */
    int32_t which;
    int32_t reserved;
};

/* Reading rows of a cache and nothing else, on a GPU. Slots that are not there are left out. */
struct smla_gpu_gather {
    const uint8_t *cache;   /* (slots, 16 * pieces) bytes */
    const int32_t *indices; /* (rows) slots */
    uint32_t *sums;         /* of each block: the exclusive or of the words that it has read */
    uint32_t slots;         /* at most 2^31 */
    uint32_t rows;          /* less than 2^31 */
    uint32_t pieces;        /* of 16 bytes in a row */
    uint32_t reserved;
};

/* One launch of attend on a GPU: the work and how it is cut. A piece is a head tile of a row; piece
 * p is tile p % head_tiles of row p / head_tiles. The first `whole` pieces are a block's each, the
 * others are cut: block whole + x takes split x % splits of the piece whole + x / splits. With more
 * than one split the parts of the latter go to the workspace, which a second launch merges. sm90
 * alone knows of whole pieces; elsewhere there are none, and heads in the workspace are those of
 * all rows instead of all cut pieces. */
struct smla_gpu_attend {
    struct smla_attend work;
    struct smla_layout layout[2];
    float *part_out; /* (splits, heads, d_v), not yet divided by the sum */
    float *part_max; /* (splits, heads): the largest score; -inf: no entries */
    float *part_sum; /* (splits, heads): sum of exp(score - largest) */
    struct smla_fault_slot *fault;
    uint32_t *fault_lock;
    int64_t split_entries; /* of both sources together */
    int32_t splits;
    int32_t head_tile; /* heads of a piece */
    int32_t head_tiles;
    int32_t whole;
    int32_t cut_pieces; /* of sm90, otherwise 0 */
    int32_t reserved;
};

#ifdef __cplusplus
static_assert(sizeof(struct smla_array) == 40, "params.h: layout of smla_array");
static_assert(sizeof(struct smla_source) == 272, "params.h: layout of smla_source");
static_assert(sizeof(struct smla_attend) == 912, "params.h: layout of smla_attend");
static_assert(sizeof(struct smla_append) == 152, "params.h: layout of smla_append");
static_assert(sizeof(struct smla_merge) == 2712, "params.h: layout of smla_merge");
#else
_Static_assert(sizeof(struct smla_array) == 40, "params.h: layout of smla_array");
_Static_assert(sizeof(struct smla_source) == 272, "params.h: layout of smla_source");
_Static_assert(sizeof(struct smla_attend) == 912, "params.h: layout of smla_attend");
_Static_assert(sizeof(struct smla_append) == 152, "params.h: layout of smla_append");
_Static_assert(sizeof(struct smla_merge) == 2712, "params.h: layout of smla_merge");
#endif

#endif
