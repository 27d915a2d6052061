/* Tensors and scalars -> struct smla_attend: everything that shapes, dtypes, strides and the
 * values of scalars can tell is checked here, once, for every backend. No array is read. */
#ifndef SMLA_PROBLEM_H
#define SMLA_PROBLEM_H

#include "error.h"
#include "params.h"
#include "tensor.h"

enum smla_validate {
    SMLA_VALIDATE_DEFERRED = 0, /* record the fault; the next call raises it (CPU: at once) */
    SMLA_VALIDATE_RAISE,        /* check first, wait, raise before anything is written */
    SMLA_VALIDATE_RECORD,       /* record, never raise: faults() returns it */
    SMLA_VALIDATE_MASK,         /* mask silently */
};

struct smla_shard {
    int64_t rank, size, interleave;
};

/* A number that may be absent. */
struct smla_number {
    double value;
    bool given;
};

/* The arguments of one cache. */
struct smla_source_args {
    struct smla_tensor kv_cache;
    struct smla_tensor indices;
    struct smla_tensor topk_lens;
    struct smla_tensor block_table;
    struct smla_tensor seq_lens;
    struct smla_number cache_scale;
    const char *cache_format; /* NULL: not given */
};

/* What attend was called with. Tensors that were not given have dtype SMLA_DTYPE_NONE. */
struct smla_attend_args {
    struct smla_tensor q;      /* all of q, or its latent part */
    struct smla_tensor q_rope; /* the second of a pair */
    struct smla_source_args source[2];
    struct smla_tensor request_ids;
    struct smla_tensor query_positions;
    struct smla_tensor attn_sink;
    struct smla_tensor out;
    struct smla_tensor lse;
    struct smla_tensor max_logits;
    struct smla_number softmax_scale;
    struct smla_number logit_cap;
    struct smla_shard shard;
    int64_t head_dim_v;  /* 0: not given */
    int64_t max_seq_len; /* 0: not given */
    bool has_shard;
    bool has_head_dim_v;
    bool has_max_seq_len;
    bool batch_invariant;
};

/* Checks the arguments and fills `work`. Outputs that were not given have dtype NONE in `work`;
 * the caller makes them in the shape of smla_output_shape and adds them with smla_set_output. */
enum smla_status smla_problem_attend(const struct smla_attend_args *args, struct smla_attend *work,
                                     struct smla_error *error);

/* The checks alone of the shapes that plan() gets: heads, widths, formats. */
enum smla_status smla_problem_plan(const struct smla_attend *work, struct smla_error *error);

/* q's leading shape + (heads,) and, where `last` is not 0, + (last,). Returns the dimensions. */
int32_t smla_output_shape(const struct smla_tensor *q, int32_t heads, int64_t last,
                          int64_t shape[static SMLA_MAX_NDIM]);

/* Makes `tensor`, whose shape has been checked, an output of (batch, s_q, heads[, …]). */
void smla_set_output(struct smla_output *output, const struct smla_tensor *tensor, bool has_last);

/* The checks alone of the arrays that say which entries count: for check(), without a query. The
 * rows have the shape of indices less its last dimension, or that of query_positions, request_ids
 * or seq_lens; *row_ndim is how many dimensions that is. */
enum smla_status smla_problem_check(const struct smla_attend_args *args, struct smla_attend *work,
                                    int32_t *row_ndim, struct smla_error *error);

struct smla_append_args {
    struct smla_tensor kv_cache;
    struct smla_tensor slots; /* absent: 0, 1, 2, … */
    struct smla_tensor latent;
    struct smla_tensor rope;
    struct smla_number cache_scale;
    const char *cache_format;
};
enum smla_status smla_problem_append(const struct smla_append_args *args, struct smla_append *work,
                                     struct smla_error *error);

/* A cache on its own, for unpack: fills the cache part of `source` and the numbers of a row. */
enum smla_status smla_problem_cache(const struct smla_tensor *kv_cache, const char *cache_format,
                                    struct smla_number cache_scale, struct smla_source *source,
                                    int32_t *width, struct smla_error *error);

struct smla_merge_args {
    struct smla_tensor outs[SMLA_MERGE_PARTS];
    struct smla_tensor lses[SMLA_MERGE_PARTS];
    struct smla_tensor attn_sink;
    struct smla_tensor out;
    struct smla_tensor lse;
    int32_t parts;
};
enum smla_status smla_problem_merge(const struct smla_merge_args *args, struct smla_merge *work,
                                    struct smla_error *error);

#endif
