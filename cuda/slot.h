/* Where an index becomes a slot: the one place that decides whether an entry is valid, on the CPU
 * and on the GPU. An entry that is not valid never becomes an address.
 *
 * smla_open_row reads what the small arrays say about one row, smla_resolve turns entry j of that
 * row into a place in the cache or into the cause for which it is masked; smla_locate and smla_map
 * are what it does before and after it reads the block table. Values are compared in 64 bits before
 * anything is narrowed or multiplied. */
#ifndef SMLA_SLOT_H
#define SMLA_SLOT_H

#include "params.h"

#ifdef __CUDACC__
#define SMLA_SHARED static inline __host__ __device__
#else
#define SMLA_SHARED static inline
#endif

struct smla_row {
    int64_t batch;
    int64_t query;
    int64_t request;  /* row of block_table; meaningless where the row is empty */
    int64_t entries;  /* j runs from 0 to here */
    int64_t limit;    /* positions at or past it are masked */
    int64_t last;     /* positions after it are masked */
    int64_t indices;  /* element of `indices` where the row begins */
    int32_t cause;    /* SMLA_PADDING_ROW or SMLA_FAULT_REQUEST: entries is 0 */
    int32_t bad_topk; /* topk_lens was outside [0, topk] and is clamped */
    int32_t bad_seq;  /* seq_lens was outside [0, max_seq_len] and is clamped */
    int32_t reserved;
};

struct smla_place {
    int64_t block;
    int64_t offset; /* token inside the block */
};

SMLA_SHARED int64_t smla_load_int(const struct smla_array *array, int64_t element)
{
    return array->dtype == SMLA_INT64 ? ((const int64_t *)array->data)[element]
                                      : (int64_t)((const int32_t *)array->data)[element];
}

SMLA_SHARED int64_t smla_per_row(const struct smla_array *array, int64_t batch, int64_t query)
{
    return smla_load_int(array, batch * array->stride[0] + query * array->stride[1]);
}

SMLA_SHARED int64_t smla_clamp(int64_t value, int64_t low, int64_t high)
{
    return value < low ? low : value > high ? high : value;
}

/* How many of the positions [0, length) this shard owns; they are its local positions [0, n). */
SMLA_SHARED int64_t smla_owned(const struct smla_source *source, int64_t length)
{
    if (source->shard_size == 1) return length;
    int64_t round = source->shard_interleave * source->shard_size;
    int64_t rest = length % round - source->shard_rank * source->shard_interleave;
    return length / round * source->shard_interleave +
           smla_clamp(rest, 0, source->shard_interleave);
}

SMLA_SHARED void smla_open_row(const struct smla_attend *work, int which, int64_t batch,
                               int64_t query, struct smla_row *row)
{
    const struct smla_source *source = &work->source[which];
    row->batch = batch;
    row->query = query;
    row->request = batch;
    row->entries = source->topk;
    row->limit = source->seq_lens.dtype ? 0 : INT64_MAX;
    row->last = INT64_MAX;
    row->indices = batch * source->indices.stride[0] + query * source->indices.stride[1];
    row->cause = SMLA_VALID;
    row->bad_topk = 0;
    row->bad_seq = 0;
    row->reserved = 0;

    if (work->request_ids.dtype) {
        row->request = smla_per_row(&work->request_ids, batch, query);
        int64_t requests = work->source[source->block_table.dtype ? which : 1 - which].requests;
        if (row->request < 0 || row->request >= requests) {
            row->cause = row->request == -1 ? SMLA_PADDING_ROW : SMLA_FAULT_REQUEST;
            row->entries = 0;
            return;
        }
    }
    if (source->topk_lens.dtype) {
        int64_t length = smla_per_row(&source->topk_lens, batch, query);
        row->entries = smla_clamp(length, 0, source->topk);
        row->bad_topk = length != row->entries;
    }
    if (source->seq_lens.dtype) {
        int64_t length = smla_load_int(&source->seq_lens,
                                       row->request * source->seq_lens.stride[0]);
        row->limit = smla_clamp(length, 0, source->max_seq_len);
        row->bad_seq = length != row->limit;
    }
    if (source->causal) row->last = smla_per_row(&work->query_positions, batch, query);
    if (!source->indices.dtype) { /* every position that the row may see, in order */
        int64_t length = row->last < row->limit ? row->last + 1 : row->limit;
        row->entries = smla_clamp(smla_owned(source, length < 0 ? 0 : length), 0, source->topk);
    }
}

/* n / d, and what is left, for n >= 0 and d > 0: numbers of 64 bits are slow to divide, on GPUs by
 * far, and few are that large. */
SMLA_SHARED int64_t smla_divide(int64_t n, int64_t d, int64_t *rest)
{
    int64_t quotient = (n | d) >> 32 == 0 ? (uint32_t)n / (uint32_t)d : n / d;
    *rest = n - quotient * d;
    return quotient;
}

/* Of entry j, 0 <= j < row->entries, whose index is `position` where there are indices: the place,
 * or with a block table the block of the request, which is still to be looked up; or the cause for
 * which it is masked. */
SMLA_SHARED enum smla_cause smla_locate(const struct smla_source *source,
                                        const struct smla_row *row, int64_t j, int64_t position,
                                        struct smla_place *place)
{
    if (source->indices.dtype) {
        if (position < 0) return position == -1 ? SMLA_PADDING : SMLA_FAULT_INDEX;
        if (!source->block_table.dtype) {
            place->block = smla_divide(position, source->block_size, &place->offset);
            return place->block < source->num_blocks ? SMLA_VALID : SMLA_FAULT_SLOT;
        }
        if (position > row->last) return SMLA_AFTER_QUERY;
        if (position >= row->limit) return SMLA_PAST_SEQ_LEN;
        if (source->shard_size > 1) {
            int64_t in_chunk, of_shard;
            int64_t chunk = smla_divide(position, source->shard_interleave, &in_chunk);
            int64_t round = smla_divide(chunk, source->shard_size, &of_shard);
            if (of_shard != source->shard_rank) return SMLA_OTHER_SHARD;
            position = round * source->shard_interleave + in_chunk;
        }
    } else {
        position = j; /* local, and inside every bound by construction */
    }
    place->block = smla_divide(position, source->block_size, &place->offset);
    return place->block < source->max_blocks ? SMLA_VALID : SMLA_FAULT_LOGICAL;
}

/* The element of the block table that knows a located place's block. */
SMLA_SHARED int64_t smla_table_element(const struct smla_source *source, const struct smla_row *row,
                                       const struct smla_place *place)
{
    return row->request * source->block_table.stride[0] +
           place->block * source->block_table.stride[1];
}

/* The place in `block`, which the table has given. */
SMLA_SHARED enum smla_cause smla_map(const struct smla_source *source, int64_t block,
                                     struct smla_place *place)
{
    place->block = block;
    if (block < 0) return block == -1 ? SMLA_UNALLOCATED : SMLA_FAULT_BLOCK;
    return block < source->num_blocks ? SMLA_VALID : SMLA_FAULT_BLOCK;
}

/* The place of entry j, 0 <= j < row->entries, or the cause for which it is masked. */
SMLA_SHARED enum smla_cause smla_resolve(const struct smla_source *source,
                                         const struct smla_row *row, int64_t j,
                                         struct smla_place *place)
{
    const struct smla_array *indices = &source->indices, *table = &source->block_table;
    int64_t position = indices->dtype
                           ? smla_load_int(indices, row->indices + j * indices->stride[2])
                           : j;
    enum smla_cause cause = smla_locate(source, row, j, position, place);
    if (cause != SMLA_VALID || !table->dtype) return cause;
    return smla_map(source, smla_load_int(table, smla_table_element(source, row, place)), place);
}

/* Only for a place that smla_resolve called valid. */
SMLA_SHARED const uint8_t *smla_token(const struct smla_source *source,
                                      const struct smla_place *place)
{
    return source->cache + place->block * source->block_stride +
           place->offset * source->token_stride;
}

/* The array that a fault stands in. */
SMLA_SHARED enum smla_checked smla_checked_array(enum smla_cause cause)
{
    switch (cause) {
    case SMLA_FAULT_REQUEST: return SMLA_CHECKED_REQUESTS;
    case SMLA_FAULT_TOPK: return SMLA_CHECKED_TOPK_LENS;
    case SMLA_FAULT_SEQ: return SMLA_CHECKED_SEQ_LENS;
    case SMLA_FAULT_BLOCK: return SMLA_CHECKED_TABLE;
    default: return SMLA_CHECKED_INDICES;
    }
}

/* The position of a row in an array of the caller's shape: (batch, s_q), its flattening, or one
 * entry per batch (ndim 0). Returns its dimensions. */
SMLA_SHARED int32_t smla_row_position(const struct smla_row *row, int32_t ndim, int64_t s_q,
                                      int64_t position[3])
{
    position[0] = ndim == 1 ? row->batch * s_q + row->query : row->batch;
    position[1] = row->query;
    return ndim == 2 ? 2 : 1;
}

/* The position, value and bound of a fault that smla_open_row or, for entry j, smla_resolve met.
 * The counts are the caller's. */
SMLA_SHARED void smla_fault_at(const struct smla_attend *work, int which,
                               const struct smla_row *row, int64_t j, enum smla_cause cause,
                               struct smla_fault *fault)
{
    const struct smla_source *source = &work->source[which];
    const struct smla_array *per_row = cause == SMLA_FAULT_REQUEST ? &work->request_ids
                                       : cause == SMLA_FAULT_TOPK  ? &source->topk_lens
                                                                   : &source->indices;
    const struct smla_array *table = &source->block_table;
    fault->row = row->batch * work->s_q + row->query;
    fault->cause = cause;
    fault->source = which;
    fault->reserved = 0;
    switch (cause) {
    case SMLA_FAULT_REQUEST:
    case SMLA_FAULT_TOPK:
        fault->ndim = smla_row_position(row, per_row->ndim, work->s_q, fault->position);
        fault->value = smla_per_row(per_row, row->batch, row->query);
        fault->bound = cause == SMLA_FAULT_TOPK
                           ? source->topk + 1
                           : work->source[table->dtype ? which : 1 - which].requests;
        return;
    case SMLA_FAULT_SEQ:
        fault->ndim = 1;
        fault->position[0] = row->request;
        fault->value = smla_load_int(&source->seq_lens, row->request * source->seq_lens.stride[0]);
        fault->bound = source->max_seq_len + 1;
        return;
    case SMLA_FAULT_BLOCK: {
        int64_t position = j;
        if (source->indices.dtype) {
            position = smla_load_int(&source->indices,
                                     row->indices + j * source->indices.stride[2]);
            position = position / (source->shard_interleave * source->shard_size) *
                           source->shard_interleave +
                       position % source->shard_interleave;
        }
        fault->ndim = 2;
        fault->position[0] = row->request;
        fault->position[1] = position / source->block_size;
        fault->value = smla_load_int(table, row->request * table->stride[0] +
                                                fault->position[1] * table->stride[1]);
        fault->bound = source->num_blocks;
        return;
    }
    default: /* an entry of indices */
        fault->ndim = smla_row_position(row, per_row->ndim - 1, work->s_q, fault->position);
        fault->position[fault->ndim++] = j;
        fault->value = smla_load_int(per_row, row->indices + j * per_row->stride[2]);
        fault->bound = table->dtype ? source->max_seq_len : source->num_blocks * source->block_size;
    }
}

#endif
