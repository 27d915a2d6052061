#include "problem.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "format.h"
#include "slot.h"

enum { MAX_HEADS = 256, MAX_WIDTH = 16384 };

#define REQUIRE(condition, status, ...) SMLA_FAIL_IF(!(condition), error, status, __VA_ARGS__)

/* The rows of a call: q's shape before the heads. */
struct lead {
    int32_t ndim; /* 1: (tokens,); 2: (batch, s_q) */
    int64_t batch;
    int64_t s_q;
};

/* -------------------------------------------------------------------------- small checks */

/* A tensor's shape and a buffer to write it in, for the length of one message. */
#define SHAPE(tensor) smla_shape_text((tensor), (char[96]){0})

static const char *lead_text(const struct lead *lead, const char *rest, char text[static 96])
{
    if (lead->ndim == 2)
        snprintf(text, 96, "(%" PRId64 ", %" PRId64 "%s)", lead->batch, lead->s_q, rest);
    else
        snprintf(text, 96, "(%" PRId64 "%s)", lead->batch, *rest ? rest : ",");
    return text;
}

static enum smla_status check_int(const struct smla_tensor *tensor, struct smla_error *error)
{
    REQUIRE(tensor->dtype == SMLA_INT32 || tensor->dtype == SMLA_INT64, SMLA_ERROR_TYPE,
            "%s: expected int32 or int64, got %s", tensor->name, tensor->dtype_name);
    return SMLA_OK;
}

static enum smla_status check_ndim(const struct smla_tensor *tensor, int32_t ndim,
                                   const char *shape, struct smla_error *error)
{
    REQUIRE(tensor->ndim == ndim, SMLA_ERROR_VALUE, "%s: expected shape %s, got %s", tensor->name,
            shape, SHAPE(tensor));
    return SMLA_OK;
}

static enum smla_status check_contiguous(const struct smla_tensor *tensor, struct smla_error *error)
{
    int32_t last = tensor->ndim - 1;
    REQUIRE(tensor->shape[last] <= 1 || tensor->stride[last] == 1, SMLA_ERROR_VALUE,
            "%s: expected a contiguous last dimension, got stride %" PRId64, tensor->name,
            tensor->stride[last]);
    return SMLA_OK;
}

static bool is_float(enum smla_dtype dtype)
{
    return dtype == SMLA_FLOAT32 || dtype == SMLA_FLOAT16 || dtype == SMLA_BFLOAT16;
}

static enum smla_status check_float(const struct smla_tensor *tensor, struct smla_error *error)
{
    REQUIRE(is_float(tensor->dtype), SMLA_ERROR_TYPE,
            "%s: expected bfloat16, float16 or float32, got %s", tensor->name, tensor->dtype_name);
    return SMLA_OK;
}

static enum smla_status check_device(const struct smla_tensor *tensor,
                                     const struct smla_tensor *with, struct smla_error *error)
{
    static const char *const NAMES[] = {[SMLA_CPU] = "cpu", [SMLA_CUDA] = "cuda"};
    REQUIRE(!smla_given(tensor) ||
                (tensor->device.type == with->device.type && tensor->device.id == with->device.id),
            SMLA_ERROR_VALUE, "%s: expected a tensor on %s:%d as %s is, got one on %s:%d",
            tensor->name, NAMES[with->device.type], with->device.id, with->name,
            NAMES[tensor->device.type], tensor->device.id);
    return SMLA_OK;
}

/* A scalar that has to be finite as a double and as the float32 that kernels use. */
static enum smla_status check_finite(double value, const char *name, struct smla_error *error)
{
    REQUIRE(isfinite(value) && isfinite((float)value), SMLA_ERROR_VALUE,
            "%s: expected a finite number, got %g", name, value);
    return SMLA_OK;
}

static void set_array(struct smla_array *array, const struct smla_tensor *tensor)
{
    array->data = tensor->data;
    array->dtype = (int32_t)tensor->dtype;
    array->ndim = tensor->ndim;
    for (int32_t i = 0; i < tensor->ndim && i < 3; i++) array->stride[i] = tensor->stride[i];
}

/* An int array with an entry per row: q's leading shape, its flattening or, where `per_batch`, one
 * entry for all rows of a batch (array->ndim is 0 then). */
static enum smla_status set_per_row(struct smla_array *array, const struct smla_tensor *tensor,
                                    const struct lead *lead, bool per_batch,
                                    struct smla_error *error)
{
    if (!smla_given(tensor)) return SMLA_OK;
    SMLA_TRY(check_int(tensor, error));
    set_array(array, tensor);
    if (tensor->ndim == 2 && lead->ndim == 2 && tensor->shape[0] == lead->batch &&
        tensor->shape[1] == lead->s_q)
        return SMLA_OK;
    if (tensor->ndim == 1 && tensor->shape[0] == lead->batch * lead->s_q) {
        array->stride[0] = tensor->stride[0] * lead->s_q;
        array->stride[1] = tensor->stride[0];
        return SMLA_OK;
    }
    if (per_batch && tensor->ndim == 1 && tensor->shape[0] == lead->batch) {
        array->ndim = 0;
        return SMLA_OK;
    }
    char expected[96], flat[64] = "", batch[64] = "";
    if (lead->ndim == 2) {
        snprintf(flat, sizeof flat, " or (%" PRId64 ",)", lead->batch * lead->s_q);
        if (per_batch) snprintf(batch, sizeof batch, " or (%" PRId64 ",)", lead->batch);
    }
    return smla_fail(error, SMLA_ERROR_VALUE, "%s: expected shape %s%s%s, got %s", tensor->name,
                     lead_text(lead, "", expected), flat, batch, SHAPE(tensor));
}

/* -------------------------------------------------------------------------- a cache */

/* The geometry of a cache: (num_blocks, block_size[, 1], row) or (num_slots, row). */
static enum smla_status set_cache(struct smla_source *source, const struct smla_tensor *cache,
                                  struct smla_error *error)
{
    bool paged = cache->ndim == 3 || (cache->ndim == 4 && cache->shape[2] == 1);
    REQUIRE(paged || cache->ndim == 2, SMLA_ERROR_VALUE,
            "%s: expected shape (num_blocks, block_size, row), (num_blocks, block_size, 1, row) or "
            "(num_slots, row), got %s",
            cache->name, SHAPE(cache));
    SMLA_TRY(check_contiguous(cache, error));
    int64_t bytes = smla_dtype_bytes(cache->dtype), capacity;
    source->cache = cache->data;
    source->num_blocks = cache->shape[0];
    source->block_size = paged ? cache->shape[1] : 1;
    source->block_stride = cache->stride[0] * bytes;
    source->token_stride = paged ? cache->stride[1] * bytes : 0;
    source->shard_size = 1;
    source->shard_interleave = 1;
    REQUIRE(source->block_size >= 1, SMLA_ERROR_VALUE, "%s: expected a block_size >= 1, got %s",
            cache->name, SHAPE(cache));
    REQUIRE(!__builtin_mul_overflow(source->num_blocks, source->block_size, &capacity),
            SMLA_ERROR_VALUE, "%s: expected fewer than 2^63 slots, got %s", cache->name,
            SHAPE(cache));
    return SMLA_OK;
}

/* What the rows of a cache mean, and how many numbers one has. `dense` is the dtype that a dense
 * cache has to have, or NONE. */
static enum smla_status set_format(struct smla_source *source, const struct smla_tensor *cache,
                                   const char *name, enum smla_dtype dense, const char *prefix,
                                   int64_t *width, struct smla_error *error)
{
    const struct smla_format_info *format = name ? smla_format_named(name)
                                                 : smla_format(SMLA_DENSE);
    REQUIRE(format, SMLA_ERROR_VALUE, "%scache_format: expected one of %s, got '%s'", prefix,
            smla_format_names(), name);
    REQUIRE(name || is_float(cache->dtype), SMLA_ERROR_VALUE,
            "%scache_format: required for a %s of %s, one of %s", prefix, cache->name,
            cache->dtype_name, smla_format_names());
    int64_t row = cache->shape[cache->ndim - 1];
    source->format = (int32_t)format->format;
    if (format->scale == SMLA_SCALE_NONE) {
        SMLA_TRY(check_float(cache, error));
        REQUIRE(dense == SMLA_DTYPE_NONE || cache->dtype == dense, SMLA_ERROR_TYPE,
                "%s: expected q's dtype %s for cache_format 'dense', got %s", cache->name,
                smla_dtype_name(dense), cache->dtype_name);
        REQUIRE(row >= 1 && row <= MAX_WIDTH, SMLA_ERROR_VALUE,
                "%s: expected rows of 1 to %d numbers, got %s", cache->name, MAX_WIDTH,
                SHAPE(cache));
        *width = row;
        return SMLA_OK;
    }
    REQUIRE(cache->dtype == SMLA_UINT8 || cache->dtype == SMLA_E4M3, SMLA_ERROR_TYPE,
            "%s: expected bytes (uint8 or float8_e4m3fn) for cache_format '%s', got %s",
            cache->name, format->name, cache->dtype_name);
    REQUIRE(row == format->row_bytes, SMLA_ERROR_VALUE,
            "%s: expected rows of %d bytes for cache_format '%s', got %s", cache->name,
            format->row_bytes, format->name, SHAPE(cache));
    *width = format->d_qk;
    return SMLA_OK;
}

/* cache_scale: given where the format has one scale for the whole cache, and only there. */
static enum smla_status set_scale(struct smla_source *source, struct smla_number scale,
                                  const char *prefix, struct smla_error *error)
{
    const struct smla_format_info *format = smla_format(source->format);
    bool wanted = format->scale == SMLA_SCALE_TENSOR;
    REQUIRE(wanted || !scale.given, SMLA_ERROR_VALUE,
            "%scache_scale: expected none for cache_format '%s', got %g", prefix, format->name,
            scale.value);
    REQUIRE(!wanted || scale.given, SMLA_ERROR_VALUE,
            "%scache_scale: required for cache_format '%s', got none", prefix, format->name);
    source->scale = wanted ? (float)scale.value : 1.0f;
    REQUIRE(isfinite(source->scale), SMLA_ERROR_VALUE,
            "%scache_scale: expected a finite number, got %g", prefix, scale.value);
    return SMLA_OK;
}

enum smla_status smla_problem_cache(const struct smla_tensor *kv_cache, const char *cache_format,
                                    struct smla_number cache_scale, struct smla_source *source,
                                    int32_t *width, struct smla_error *error)
{
    int64_t numbers = 0;
    memset(source, 0, sizeof *source);
    SMLA_TRY(set_cache(source, kv_cache, error));
    SMLA_TRY(set_format(source, kv_cache, cache_format, SMLA_DTYPE_NONE, "", &numbers, error));
    SMLA_TRY(set_scale(source, cache_scale, "", error));
    *width = (int32_t)numbers;
    return SMLA_OK;
}

/* -------------------------------------------------------------------------- which entries count */

/* The largest length whose owned positions fit into max_blocks * block_size local ones. */
static int64_t longest(const struct smla_source *source)
{
    int64_t local = source->max_blocks * source->block_size; /* checked before: no overflow */
    if (source->shard_size == 1) return local;
    int64_t round = source->shard_interleave * source->shard_size, whole;
    if (__builtin_mul_overflow(local / source->shard_interleave, round, &whole) ||
        __builtin_add_overflow(
            whole, source->shard_rank * source->shard_interleave + local % source->shard_interleave,
            &whole))
        return INT64_MAX;
    return whole;
}

static enum smla_status check_shard(const struct smla_shard *shard, struct smla_error *error)
{
    REQUIRE(shard->size >= 1 && shard->rank >= 0 && shard->rank < shard->size &&
                shard->interleave >= 1 && shard->size <= INT32_MAX / shard->interleave,
            SMLA_ERROR_VALUE,
            "shard: expected (rank, size, interleave) with 0 <= rank < size, interleave >= 1 and "
            "size * interleave < 2^31, got (%" PRId64 ", %" PRId64 ", %" PRId64 ")",
            shard->rank, shard->size, shard->interleave);
    return SMLA_OK;
}

static enum smla_status set_table(struct smla_source *source, const struct smla_source_args *args,
                                  struct smla_error *error)
{
    const struct smla_tensor *table = &args->block_table;
    int64_t positions;
    SMLA_TRY(check_int(table, error));
    SMLA_TRY(check_ndim(table, 2, "(requests, max_blocks)", error));
    set_array(&source->block_table, table);
    source->requests = table->shape[0];
    source->max_blocks = table->shape[1];
    REQUIRE(!__builtin_mul_overflow(source->max_blocks, source->block_size, &positions),
            SMLA_ERROR_VALUE, "%s: expected fewer than 2^63 positions, got %s", table->name,
            SHAPE(table));
    if (smla_given(&args->seq_lens)) {
        SMLA_TRY(check_int(&args->seq_lens, error));
        REQUIRE(args->seq_lens.ndim == 1 && args->seq_lens.shape[0] == source->requests,
                SMLA_ERROR_VALUE, "%s: expected shape (%" PRId64 ",) as %s has requests, got %s",
                args->seq_lens.name, source->requests, table->name, SHAPE(&args->seq_lens));
        set_array(&source->seq_lens, &args->seq_lens);
    }
    return SMLA_OK;
}

/* The indices and lengths of one source; without indices every position of block_table. */
static enum smla_status set_entries(struct smla_source *source, const struct smla_source_args *args,
                                    const struct smla_attend_args *all, const struct lead *lead,
                                    struct smla_error *error)
{
    const struct smla_tensor *indices = &args->indices;
    bool main_source = args == &all->source[0];
    source->max_seq_len = longest(source);
    if (smla_given(indices)) {
        char expected[96];
        SMLA_TRY(check_int(indices, error));
        REQUIRE(indices->ndim == lead->ndim + 1 && indices->shape[0] == lead->batch &&
                    (lead->ndim == 1 || indices->shape[1] == lead->s_q),
                SMLA_ERROR_VALUE, "%s: expected shape %s, got %s", indices->name,
                lead_text(lead, ", topk", expected), SHAPE(indices));
        set_array(&source->indices, indices);
        if (lead->ndim == 1) {
            source->indices.stride[1] = 0;
            source->indices.stride[2] = indices->stride[1];
        }
        source->topk = indices->shape[indices->ndim - 1];
        REQUIRE(!main_source || !all->has_max_seq_len, SMLA_ERROR_VALUE,
                "max_seq_len: bounds a call without indices, got %" PRId64 " with indices",
                all->max_seq_len);
        return set_per_row(&source->topk_lens, &args->topk_lens, lead, true, error);
    }

    const char *prefix = main_source ? "" : "extra_";
    REQUIRE(smla_given(&args->block_table) && smla_given(&args->seq_lens), SMLA_ERROR_VALUE,
            "%sindices: None attends to every position and needs %sblock_table and %sseq_lens",
            prefix, prefix, prefix);
    REQUIRE(!smla_given(&args->topk_lens), SMLA_ERROR_VALUE,
            "%s: counts entries of %sindices, which are None", args->topk_lens.name, prefix);
    REQUIRE(!main_source || lead->s_q <= 1 || smla_given(&all->query_positions), SMLA_ERROR_VALUE,
            "query_positions: required with indices=None where s_q > 1, got none with s_q = "
            "%" PRId64,
            lead->s_q);
    if (main_source && all->has_max_seq_len) {
        REQUIRE(all->max_seq_len >= 0, SMLA_ERROR_VALUE, "max_seq_len: expected >= 0, got %" PRId64,
                all->max_seq_len);
        if (all->max_seq_len < source->max_seq_len) source->max_seq_len = all->max_seq_len;
    }
    source->topk = smla_owned(source, source->max_seq_len);
    return SMLA_OK;
}

/* Refuses what has no meaning without a block table or without an extra cache. */
static enum smla_status check_needs(const struct smla_attend_args *args, struct smla_error *error)
{
    const struct smla_source_args *extra = &args->source[1];
    const struct smla_tensor *const of_extra[] = {&extra->indices, &extra->topk_lens,
                                                  &extra->block_table, &extra->seq_lens};
    if (!smla_given(&extra->kv_cache)) {
        for (size_t i = 0; i < sizeof of_extra / sizeof *of_extra; i++)
            REQUIRE(!smla_given(of_extra[i]), SMLA_ERROR_VALUE, "%s: needs extra_kv_cache",
                    of_extra[i]->name);
        REQUIRE(!extra->cache_format, SMLA_ERROR_VALUE, "extra_cache_format: needs extra_kv_cache");
        REQUIRE(!extra->cache_scale.given, SMLA_ERROR_VALUE,
                "extra_cache_scale: needs extra_kv_cache");
    }
    for (int i = 0; i < 2; i++)
        REQUIRE(!smla_given(&args->source[i].seq_lens) || smla_given(&args->source[i].block_table),
                SMLA_ERROR_VALUE, "%s: needs %sblock_table", args->source[i].seq_lens.name,
                i ? "extra_" : "");
    bool table = smla_given(&args->source[0].block_table);
    REQUIRE(!smla_given(&args->query_positions) || table, SMLA_ERROR_VALUE,
            "query_positions: needs block_table");
    REQUIRE(!args->has_shard || table, SMLA_ERROR_VALUE, "shard: needs block_table");
    REQUIRE(!smla_given(&args->request_ids) || table || smla_given(&extra->block_table),
            SMLA_ERROR_VALUE, "request_ids: needs block_table");
    return SMLA_OK;
}

/* Everything of `work` that says which entries count, for rows of the shape `lead`. */
static enum smla_status set_sources(const struct smla_attend_args *args, const struct lead *lead,
                                    struct smla_attend *work, struct smla_error *error)
{
    SMLA_TRY(check_needs(args, error));
    work->batch = lead->batch;
    work->s_q = lead->s_q;
    work->sources = smla_given(&args->source[1].kv_cache) ? 2 : 1;
    SMLA_TRY(set_per_row(&work->request_ids, &args->request_ids, lead, false, error));
    SMLA_TRY(set_per_row(&work->query_positions, &args->query_positions, lead, false, error));
    for (int i = 0; i < work->sources; i++) {
        struct smla_source *source = &work->source[i];
        SMLA_TRY(set_cache(source, &args->source[i].kv_cache, error));
        if (smla_given(&args->source[i].block_table)) {
            SMLA_TRY(set_table(source, &args->source[i], error));
            REQUIRE(
                smla_given(&args->request_ids) || source->requests >= lead->batch, SMLA_ERROR_VALUE,
                "%s: expected a row for each of %" PRId64 " requests (or request_ids), got %s",
                args->source[i].block_table.name, lead->batch, SHAPE(&args->source[i].block_table));
        }
        if (i == 0 && args->has_shard) {
            SMLA_TRY(check_shard(&args->shard, error));
            source->shard_rank = args->shard.rank;
            source->shard_size = args->shard.size;
            source->shard_interleave = args->shard.interleave;
        }
        source->causal = i == 0 && smla_given(&args->query_positions);
        SMLA_TRY(set_entries(source, &args->source[i], args, lead, error));
    }
    REQUIRE(work->sources == 1 || !work->source[0].block_table.dtype ||
                !work->source[1].block_table.dtype ||
                work->source[0].requests == work->source[1].requests,
            SMLA_ERROR_VALUE,
            "extra_block_table: expected %" PRId64 " requests as block_table, got %s",
            work->source[0].requests, SHAPE(&args->source[1].block_table));
    return SMLA_OK;
}

enum smla_status smla_problem_check(const struct smla_attend_args *args, struct smla_attend *work,
                                    int32_t *row_ndim, struct smla_error *error)
{
    const struct smla_tensor *indices = &args->source[0].indices;
    const struct smla_tensor *per_row = smla_given(&args->query_positions) ? &args->query_positions
                                        : smla_given(&args->request_ids)
                                            ? &args->request_ids
                                            : &args->source[0].seq_lens;
    struct lead lead = {.ndim = 1, .batch = 0, .s_q = 1};
    memset(work, 0, sizeof *work);
    if (smla_given(indices)) {
        REQUIRE(indices->ndim == 2 || indices->ndim == 3, SMLA_ERROR_VALUE,
                "%s: expected shape (tokens, topk) or (batch, s_q, topk), got %s", indices->name,
                SHAPE(indices));
        lead.ndim = indices->ndim - 1;
        lead.batch = indices->shape[0];
        lead.s_q = lead.ndim == 2 ? indices->shape[1] : 1;
    } else if (smla_given(per_row)) {
        REQUIRE(per_row->ndim == 1 || per_row->ndim == 2, SMLA_ERROR_VALUE,
                "%s: expected shape (tokens,) or (batch, s_q), got %s", per_row->name,
                SHAPE(per_row));
        lead.ndim = per_row->ndim;
        lead.batch = per_row->shape[0];
        lead.s_q = lead.ndim == 2 ? per_row->shape[1] : 1;
    }
    *row_ndim = lead.ndim;
    SMLA_TRY(set_sources(args, &lead, work, error));
    for (int i = 0; i < work->sources; i++) {
        const struct smla_source_args *source = &args->source[i];
        int64_t width = 0;
        if (source->cache_format)
            SMLA_TRY(set_format(&work->source[i], &source->kv_cache, source->cache_format,
                                SMLA_DTYPE_NONE, i ? "extra_" : "", &width, error));
        const struct smla_tensor *const inputs[] = {&source->indices, &source->topk_lens,
                                                    &source->block_table, &source->seq_lens};
        for (size_t t = 0; t < sizeof inputs / sizeof *inputs; t++)
            SMLA_TRY(check_device(inputs[t], &args->source[0].kv_cache, error));
    }
    SMLA_TRY(check_device(&args->request_ids, &args->source[0].kv_cache, error));
    return check_device(&args->query_positions, &args->source[0].kv_cache, error);
}

/* -------------------------------------------------------------------------- attend */

static enum smla_status set_query(const struct smla_attend_args *args, struct smla_attend *work,
                                  struct lead *lead, struct smla_error *error)
{
    const struct smla_tensor *parts[2] = {&args->q, &args->q_rope};
    const struct smla_tensor *q = parts[0];
    SMLA_TRY(check_float(q, error));
    REQUIRE(q->ndim == 3 || q->ndim == 4, SMLA_ERROR_VALUE,
            "%s: expected shape (tokens, heads, d_qk) or (batch, s_q, heads, d_qk), got %s",
            q->name, SHAPE(q));
    lead->ndim = q->ndim - 2;
    lead->batch = q->shape[0];
    lead->s_q = lead->ndim == 2 ? q->shape[1] : 1;
    int64_t heads = q->shape[lead->ndim], width = 0;
    REQUIRE(heads >= 1 && heads <= MAX_HEADS, SMLA_ERROR_VALUE,
            "%s: expected 1 to %d heads, got %s", q->name, MAX_HEADS, SHAPE(q));
    for (int i = 0; i < 2 && smla_given(parts[i]); i++) {
        const struct smla_tensor *part = parts[i];
        REQUIRE(part->dtype == q->dtype, SMLA_ERROR_TYPE, "%s: expected %s's dtype %s, got %s",
                part->name, q->name, q->dtype_name, part->dtype_name);
        REQUIRE(part->ndim == q->ndim &&
                    !memcmp(part->shape, q->shape, sizeof *q->shape * (size_t)(q->ndim - 1)),
                SMLA_ERROR_VALUE, "%s: expected %s's leading shape, got %s and %s", part->name,
                q->name, SHAPE(part), SHAPE(q));
        SMLA_TRY(check_contiguous(part, error));
        int64_t last = part->shape[q->ndim - 1];
        REQUIRE(last >= 1 && (width += last) <= MAX_WIDTH, SMLA_ERROR_VALUE,
                "%s: expected 1 to %d numbers a head, got %s", part->name, MAX_WIDTH, SHAPE(part));
        work->q[i] = part->data;
        work->q_width[i] = (int32_t)last;
        work->q_stride[i][0] = part->stride[0];
        work->q_stride[i][1] = lead->ndim == 2 ? part->stride[1] : 0;
        work->q_stride[i][2] = part->stride[lead->ndim];
    }
    work->q_dtype = (int32_t)q->dtype;
    work->heads = (int32_t)heads;
    work->d_qk = (int32_t)width;
    return SMLA_OK;
}

static enum smla_status set_scalars(const struct smla_attend_args *args, struct smla_attend *work,
                                    struct smla_error *error)
{
    REQUIRE(args->softmax_scale.given, SMLA_ERROR_TYPE, "softmax_scale: required, got none");
    SMLA_TRY(check_finite(args->softmax_scale.value, "softmax_scale", error));
    work->softmax_scale = (float)args->softmax_scale.value;
    REQUIRE(work->softmax_scale > 0.0f, SMLA_ERROR_VALUE, "softmax_scale: expected > 0, got %g",
            args->softmax_scale.value);
    SMLA_TRY(check_finite(args->logit_cap.value, "logit_cap", error));
    work->logit_cap = (float)args->logit_cap.value;
    REQUIRE(work->logit_cap > 0.0f || args->logit_cap.value == 0.0, SMLA_ERROR_VALUE,
            "logit_cap: expected 0 (none) or more, got %g", args->logit_cap.value);
    work->empty_lse = -INFINITY;
    work->batch_invariant = args->batch_invariant;
    return SMLA_OK;
}

/* d_v, once d_qk is known to be the cache's. */
static enum smla_status set_value_width(const struct smla_attend_args *args,
                                        struct smla_attend *work, struct smla_error *error)
{
    int64_t d_v = args->head_dim_v;
    if (!args->has_head_dim_v) {
        REQUIRE(work->d_qk == 576 || work->d_qk == 512, SMLA_ERROR_VALUE,
                "head_dim_v: required where d_qk is neither 576 nor 512, got none with d_qk = %d",
                work->d_qk);
        d_v = 512;
    }
    REQUIRE(d_v >= 1 && d_v <= work->d_qk, SMLA_ERROR_VALUE,
            "head_dim_v: expected 1 to d_qk = %d, got %" PRId64, work->d_qk, d_v);
    work->d_v = (int32_t)d_v;
    return SMLA_OK;
}

static enum smla_status set_sink(struct smla_array *sink, const struct smla_tensor *tensor,
                                 int32_t heads, struct smla_error *error)
{
    if (!smla_given(tensor)) return SMLA_OK;
    REQUIRE(tensor->dtype == SMLA_FLOAT32, SMLA_ERROR_TYPE, "%s: expected float32, got %s",
            tensor->name, tensor->dtype_name);
    REQUIRE(tensor->ndim == 1 && tensor->shape[0] == heads, SMLA_ERROR_VALUE,
            "%s: expected shape (%d,), got %s", tensor->name, heads, SHAPE(tensor));
    set_array(sink, tensor);
    return SMLA_OK;
}

int32_t smla_output_shape(const struct smla_tensor *q, int32_t heads, int64_t last,
                          int64_t shape[static SMLA_MAX_NDIM])
{
    int32_t ndim = 0;
    for (; ndim < q->ndim - 2; ndim++) shape[ndim] = q->shape[ndim];
    shape[ndim++] = heads;
    if (last) shape[ndim++] = last;
    return ndim;
}

void smla_set_output(struct smla_output *output, const struct smla_tensor *tensor, bool has_last)
{
    int32_t ndim = tensor->ndim - (has_last ? 1 : 0); /* (batch[, s_q], heads) */
    output->data = tensor->data;
    output->dtype = (int32_t)tensor->dtype;
    output->stride[0] = tensor->stride[0];
    output->stride[1] = ndim == 3 ? tensor->stride[1] : 0;
    output->stride[2] = tensor->stride[ndim - 1];
}

/* A given output against the shape that it has to have: q's rows, heads and `last`. */
static enum smla_status check_output(const struct smla_tensor *output, const struct smla_tensor *q,
                                     int32_t heads, int64_t last, struct smla_error *error)
{
    struct smla_tensor expected = {.name = output->name};
    expected.ndim = smla_output_shape(q, heads, last, expected.shape);
    REQUIRE(
        output->ndim == expected.ndim &&
            !memcmp(output->shape, expected.shape, sizeof *expected.shape * (size_t)expected.ndim),
        SMLA_ERROR_VALUE, "%s: expected shape %s, got %s", output->name, SHAPE(&expected),
        SHAPE(output));
    if (last) SMLA_TRY(check_contiguous(output, error));
    REQUIRE(!output->readonly, SMLA_ERROR_VALUE,
            "%s: expected a writable tensor, got a read-only one", output->name);
    REQUIRE(!smla_overlaps_itself(output), SMLA_ERROR_VALUE,
            "%s: expected elements with memory of their own, got strides that overlap",
            output->name);
    return SMLA_OK;
}

/* Outputs share memory neither with one another nor with an input. */
static enum smla_status check_disjoint(const struct smla_tensor *const *outputs, int32_t wanted,
                                       const struct smla_tensor *const *inputs, int32_t given,
                                       struct smla_error *error)
{
    for (int32_t i = 0; i < wanted; i++) {
        if (!smla_given(outputs[i])) continue;
        for (int32_t k = 0; k < i + given; k++) {
            const struct smla_tensor *other = k < i ? outputs[k] : inputs[k - i];
            REQUIRE(!smla_given(other) || !smla_overlap(outputs[i], other), SMLA_ERROR_VALUE,
                    "%s: expected memory of its own, got an overlap with %s", outputs[i]->name,
                    other->name);
        }
    }
    return SMLA_OK;
}

static enum smla_status set_outputs(const struct smla_attend_args *args, struct smla_attend *work,
                                    struct smla_error *error)
{
    const struct smla_tensor *q = &args->q;
    const struct smla_tensor *const outputs[] = {&args->out, &args->lse, &args->max_logits};
    struct smla_output *const places[] = {&work->out, &work->lse, &work->max_logits};
    for (int i = 0; i < 3; i++) {
        if (!smla_given(outputs[i])) continue;
        bool has_last = i == 0;
        if (has_last)
            REQUIRE(outputs[i]->dtype == q->dtype || outputs[i]->dtype == SMLA_FLOAT32,
                    SMLA_ERROR_TYPE, "out: expected q's dtype %s or float32, got %s", q->dtype_name,
                    outputs[i]->dtype_name);
        else
            REQUIRE(outputs[i]->dtype == SMLA_FLOAT32, SMLA_ERROR_TYPE,
                    "%s: expected float32, got %s", outputs[i]->name, outputs[i]->dtype_name);
        SMLA_TRY(check_output(outputs[i], q, work->heads, has_last ? work->d_v : 0, error));
        smla_set_output(places[i], outputs[i], has_last);
    }
    return SMLA_OK;
}

enum smla_status smla_problem_attend(const struct smla_attend_args *args, struct smla_attend *work,
                                     struct smla_error *error)
{
    const struct smla_source_args *source = args->source;
    const struct smla_tensor *const outputs[] = {&args->out, &args->lse, &args->max_logits};
    const struct smla_tensor *const inputs[] = {
        &args->q,
        &args->q_rope,
        &source[0].kv_cache,
        &source[0].indices,
        &source[0].topk_lens,
        &source[0].block_table,
        &source[0].seq_lens,
        &source[1].kv_cache,
        &source[1].indices,
        &source[1].topk_lens,
        &source[1].block_table,
        &source[1].seq_lens,
        &args->request_ids,
        &args->query_positions,
        &args->attn_sink,
    };
    enum { OUTPUTS = sizeof outputs / sizeof *outputs, INPUTS = sizeof inputs / sizeof *inputs };
    struct lead lead;
    memset(work, 0, sizeof *work);
    SMLA_TRY(set_query(args, work, &lead, error));
    SMLA_TRY(set_scalars(args, work, error));
    SMLA_TRY(set_sources(args, &lead, work, error));
    for (int i = 0; i < work->sources; i++) {
        int64_t width = 0;
        const char *prefix = i ? "extra_" : "";
        SMLA_TRY(set_format(&work->source[i], &source[i].kv_cache, source[i].cache_format,
                            args->q.dtype, prefix, &width, error));
        SMLA_TRY(set_scale(&work->source[i], source[i].cache_scale, prefix, error));
        REQUIRE(width == work->d_qk, SMLA_ERROR_VALUE,
                "%s: expected rows of d_qk = %d numbers as q has, got %" PRId64,
                source[i].kv_cache.name, work->d_qk, width);
    }
    SMLA_TRY(set_value_width(args, work, error));
    SMLA_TRY(set_sink(&work->attn_sink, &args->attn_sink, work->heads, error));
    SMLA_TRY(set_outputs(args, work, error));
    for (int i = 0; i < INPUTS; i++) SMLA_TRY(check_device(inputs[i], &args->q, error));
    for (int i = 0; i < OUTPUTS; i++) SMLA_TRY(check_device(outputs[i], &args->q, error));
    return check_disjoint(outputs, OUTPUTS, inputs, INPUTS, error);
}

enum smla_status smla_problem_plan(const struct smla_attend *work, struct smla_error *error)
{
    REQUIRE(work->heads >= 1 && work->heads <= MAX_HEADS, SMLA_ERROR_VALUE,
            "heads: expected 1 to %d, got %d", MAX_HEADS, work->heads);
    REQUIRE(work->d_qk >= 1 && work->d_qk <= MAX_WIDTH, SMLA_ERROR_VALUE,
            "d_qk: expected 1 to %d, got %d", MAX_WIDTH, work->d_qk);
    REQUIRE(work->d_v >= 1 && work->d_v <= work->d_qk, SMLA_ERROR_VALUE,
            "d_v: expected 1 to d_qk = %d, got %d", work->d_qk, work->d_v);
    for (int i = 0; i < work->sources; i++) {
        const struct smla_format_info *format = smla_format(work->source[i].format);
        REQUIRE(!format->d_qk || format->d_qk == work->d_qk, SMLA_ERROR_VALUE,
                "d_qk: expected %d as rows of %scache_format '%s' have, got %d", format->d_qk,
                i ? "extra_" : "", format->name, work->d_qk);
    }
    return SMLA_OK;
}

/* -------------------------------------------------------------------------- append, merge */

enum smla_status smla_problem_append(const struct smla_append_args *args, struct smla_append *work,
                                     struct smla_error *error)
{
    const struct smla_tensor *cache = &args->kv_cache;
    const struct smla_tensor *parts[2] = {&args->latent, &args->rope};
    struct smla_source source;
    int32_t expected;
    int64_t width = 0;
    memset(work, 0, sizeof *work);
    SMLA_TRY(smla_problem_cache(cache, args->cache_format, args->cache_scale, &source, &expected,
                                error));
    REQUIRE(!cache->readonly, SMLA_ERROR_VALUE,
            "%s: expected a writable tensor, got a read-only one", cache->name);
    REQUIRE(!smla_overlaps_itself(cache), SMLA_ERROR_VALUE,
            "%s: expected rows with memory of their own, got strides that overlap", cache->name);
    for (int i = 0; i < 2 && smla_given(parts[i]); i++) {
        const struct smla_tensor *part = parts[i];
        SMLA_TRY(check_float(part, error));
        SMLA_TRY(check_ndim(part, 2, i ? "(tokens, rope)" : "(tokens, latent)", error));
        SMLA_TRY(check_contiguous(part, error));
        REQUIRE(part->shape[0] == parts[0]->shape[0], SMLA_ERROR_VALUE,
                "%s: expected %" PRId64 " tokens as %s has, got %s", part->name, parts[0]->shape[0],
                parts[0]->name, SHAPE(part));
        SMLA_TRY(check_device(part, cache, error));
        width += part->shape[1];
        work->part[i] = part->data;
        work->part_stride[i] = part->stride[0];
        work->part_width[i] = (int32_t)part->shape[1];
        work->part_dtype[i] = (int32_t)part->dtype;
    }
    REQUIRE(width == expected, SMLA_ERROR_VALUE, "%s: expected %d numbers a token%s, got %" PRId64,
            args->latent.name, expected, smla_given(&args->rope) ? " together with rope" : "",
            width);
    work->tokens = args->latent.shape[0];
    if (smla_given(&args->slots)) {
        SMLA_TRY(check_int(&args->slots, error));
        REQUIRE(args->slots.ndim == 1 && args->slots.shape[0] == work->tokens, SMLA_ERROR_VALUE,
                "slots: expected shape (%" PRId64 ",), got %s", work->tokens, SHAPE(&args->slots));
        SMLA_TRY(check_device(&args->slots, cache, error));
        set_array(&work->slots, &args->slots);
    }
    work->cache = (uint8_t *)cache->data;
    work->block_stride = source.block_stride;
    work->token_stride = source.token_stride;
    work->num_blocks = source.num_blocks;
    work->block_size = source.block_size;
    work->format = source.format;
    work->cache_dtype = (int32_t)cache->dtype;
    work->scale = source.scale;
    const struct smla_tensor *const inputs[] = {&args->slots, &args->latent, &args->rope};
    return check_disjoint(&cache, 1, inputs, 3, error);
}

/* (tokens, heads, d_v) or (batch, s_q, heads, d_v), read as q is. */
static enum smla_status set_part(const struct smla_tensor *out, const struct smla_tensor *lse,
                                 const struct smla_tensor *first, struct smla_output *part_out,
                                 struct smla_output *part_lse, struct smla_error *error)
{
    SMLA_TRY(check_float(out, error));
    REQUIRE(out->ndim == 3 || out->ndim == 4, SMLA_ERROR_VALUE,
            "%s: expected shape (tokens, heads, d_v) or (batch, s_q, heads, d_v), got %s",
            out->name, SHAPE(out));
    REQUIRE(out->ndim == first->ndim &&
                !memcmp(out->shape, first->shape, sizeof *out->shape * (size_t)out->ndim),
            SMLA_ERROR_VALUE, "%s: expected one shape for all, got %s and %s", out->name,
            SHAPE(first), SHAPE(out));
    REQUIRE(out->dtype == first->dtype, SMLA_ERROR_TYPE,
            "%s: expected one dtype for all, got %s and %s", out->name, first->dtype_name,
            out->dtype_name);
    SMLA_TRY(check_contiguous(out, error));
    REQUIRE(lse->dtype == SMLA_FLOAT32, SMLA_ERROR_TYPE, "%s: expected float32, got %s", lse->name,
            lse->dtype_name);
    REQUIRE(lse->ndim == out->ndim - 1 &&
                !memcmp(lse->shape, out->shape, sizeof *out->shape * (size_t)lse->ndim),
            SMLA_ERROR_VALUE, "%s: expected the shape of outs less d_v, got %s and %s", lse->name,
            SHAPE(lse), SHAPE(out));
    SMLA_TRY(check_device(out, first, error));
    SMLA_TRY(check_device(lse, first, error));
    smla_set_output(part_out, out, true);
    smla_set_output(part_lse, lse, false);
    return SMLA_OK;
}

enum smla_status smla_problem_merge(const struct smla_merge_args *args, struct smla_merge *work,
                                    struct smla_error *error)
{
    const struct smla_tensor *first = &args->outs[0];
    const struct smla_tensor *const outputs[] = {&args->out, &args->lse};
    const struct smla_tensor *inputs[2 * SMLA_MERGE_PARTS + 1];
    memset(work, 0, sizeof *work);
    for (int32_t i = 0; i < args->parts; i++) {
        SMLA_TRY(set_part(&args->outs[i], &args->lses[i], first, &work->part_out[i],
                          &work->part_lse[i], error));
        inputs[2 * i] = &args->outs[i];
        inputs[2 * i + 1] = &args->lses[i];
    }
    inputs[2 * args->parts] = &args->attn_sink;
    int64_t heads = first->shape[first->ndim - 2], d_v = first->shape[first->ndim - 1];
    REQUIRE(heads >= 1 && heads <= MAX_HEADS && d_v >= 1 && d_v <= MAX_WIDTH, SMLA_ERROR_VALUE,
            "outs: expected 1 to %d heads of 1 to %d numbers, got %s", MAX_HEADS, MAX_WIDTH,
            SHAPE(first));
    work->parts = args->parts;
    work->heads = (int32_t)heads;
    work->d_v = (int32_t)d_v;
    work->batch = first->shape[0];
    work->s_q = first->ndim == 4 ? first->shape[1] : 1;
    work->empty_lse = -INFINITY;
    SMLA_TRY(set_sink(&work->attn_sink, &args->attn_sink, work->heads, error));
    SMLA_TRY(check_device(&args->attn_sink, first, error));
    if (smla_given(&args->out)) {
        SMLA_TRY(check_float(&args->out, error));
        SMLA_TRY(check_output(&args->out, first, work->heads, d_v, error));
        SMLA_TRY(check_device(&args->out, first, error));
        smla_set_output(&work->out, &args->out, true);
    }
    if (smla_given(&args->lse)) {
        REQUIRE(args->lse.dtype == SMLA_FLOAT32, SMLA_ERROR_TYPE, "lse: expected float32, got %s",
                args->lse.dtype_name);
        SMLA_TRY(check_output(&args->lse, first, work->heads, 0, error));
        SMLA_TRY(check_device(&args->lse, first, error));
        smla_set_output(&work->lse, &args->lse, false);
    }
    return check_disjoint(outputs, 2, inputs, 2 * args->parts + 1, error);
}
