/* Rows into a cache, and a cache into rows.
 *
 * Of several rows for one slot the last one wins, whole. append therefore lets every slot be
 * written by one thread only: thread w of n takes the slots with slot % n == w, in the order of
 * the rows. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "format.h"
#include "pool.h"
#include "slot.h"
#include "tensor.h"

enum { WORTH_A_THREAD = 1 << 15 }; /* numbers to convert */

static int32_t threads_for(int64_t rows, int32_t width)
{
    return (int32_t)smla_clamp(rows * width / WORTH_A_THREAD, 1, smla_cpu_threads());
}

struct append {
    const struct smla_append *work;
    const struct smla_format_info *format;
    float *numbers; /* (shares, width): a row in float32 */
    int32_t width;
    int32_t shares;
    _Atomic int32_t next;
};

static void read_part(const struct smla_append *work, int part, int64_t token, float *numbers)
{
    const uint16_t *halves = (const uint16_t *)work->part[part] + token * work->part_stride[part];
    const float *floats = (const float *)work->part[part] + token * work->part_stride[part];
    for (int32_t d = 0; d < work->part_width[part]; d++) {
        switch (work->part_dtype[part]) {
        case SMLA_FLOAT32: numbers[d] = floats[d]; break;
        case SMLA_BFLOAT16: numbers[d] = smla_from_bfloat16(halves[d]); break;
        default: numbers[d] = smla_from_half(halves[d]); break;
        }
    }
}

static void append_row(const struct append *append, int64_t token, int64_t slot, float *numbers)
{
    const struct smla_append *work = append->work;
    for (int part = 0, first = 0; part < 2; first += work->part_width[part++])
        if (work->part_width[part]) read_part(work, part, token, numbers + first);
    smla_encode_row(append->format, numbers, (enum smla_dtype)work->cache_dtype, append->width,
                    work->scale,
                    work->cache + slot / work->block_size * work->block_stride +
                        slot % work->block_size * work->token_stride);
}

static void append_shares(void *context)
{
    struct append *append = context;
    const struct smla_append *work = append->work;
    const int64_t capacity = work->num_blocks * work->block_size;
    for (;;) {
        const int32_t share = atomic_fetch_add(&append->next, 1);
        if (share >= append->shares) return;
        float *numbers = append->numbers + (size_t)share * (size_t)append->width;
        for (int64_t token = 0; token < work->tokens; token++) {
            const int64_t slot = work->slots.dtype
                                     ? smla_load_int(&work->slots, token * work->slots.stride[0])
                                     : token;
            if (slot >= 0 && slot < capacity && slot % append->shares == share)
                append_row(append, token, slot, numbers);
        }
    }
}

enum smla_status smla_cpu_append(const struct smla_append *work, struct smla_error *error)
{
    struct append append = {
        .work = work,
        .format = smla_format((enum smla_format)work->format),
        .width = work->part_width[0] + work->part_width[1],
    };
    append.shares = threads_for(work->tokens, append.width);
    append.numbers = malloc((size_t)append.shares * (size_t)append.width * sizeof(float));
    SMLA_FAIL_IF(!append.numbers, error, SMLA_ERROR_MEMORY, "append: no memory for %d rows",
                 append.shares);
    smla_pool_run(append_shares, &append, append.shares);
    free(append.numbers);
    return SMLA_OK;
}

/* -------------------------------------------------------------------------- unpack */

struct unpack {
    const struct smla_source *source;
    const struct smla_format_info *format;
    enum smla_dtype dtype;
    int32_t width;
    float *numbers;
    _Atomic int64_t next;
};

static void unpack_slots(void *context)
{
    enum { CHUNK = 64 };
    struct unpack *unpack = context;
    const struct smla_source *source = unpack->source;
    const int64_t slots = source->num_blocks * source->block_size;
    for (;;) {
        const int64_t begin = atomic_fetch_add(&unpack->next, CHUNK);
        if (begin >= slots) return;
        const int64_t end = smla_clamp(begin + CHUNK, 0, slots);
        for (int64_t slot = begin; slot < end; slot++) {
            const struct smla_place place = {slot / source->block_size, slot % source->block_size};
            smla_decode_row(unpack->format, smla_token(source, &place), unpack->dtype,
                            unpack->width, source->scale, unpack->numbers + slot * unpack->width);
        }
    }
}

enum smla_status smla_cpu_unpack(const struct smla_source *source, enum smla_dtype dtype,
                                 int32_t width, float *numbers, struct smla_error *error)
{
    (void)error;
    struct unpack unpack = {
        .source = source,
        .format = smla_format((enum smla_format)source->format),
        .dtype = dtype,
        .width = width,
        .numbers = numbers,
    };
    smla_pool_run(unpack_slots, &unpack,
                  threads_for(source->num_blocks * source->block_size, width));
    return SMLA_OK;
}
