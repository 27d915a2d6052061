#include "tensor.h"

#include <inttypes.h>
#include <stdio.h>

static const struct {
    const char *name;
    int32_t bytes;
} DTYPES[] = {
    [SMLA_DTYPE_NONE] = {"none", 0},
    [SMLA_FLOAT32] = {"float32", 4},
    [SMLA_FLOAT16] = {"float16", 2},
    [SMLA_BFLOAT16] = {"bfloat16", 2},
    [SMLA_E4M3] = {"float8_e4m3fn", 1},
    [SMLA_UINT8] = {"uint8", 1},
    [SMLA_INT32] = {"int32", 4},
    [SMLA_INT64] = {"int64", 8},
    [SMLA_DTYPE_OTHER] = {"another dtype", 0},
};

const char *smla_dtype_name(enum smla_dtype dtype)
{
    return DTYPES[dtype].name;
}

int32_t smla_dtype_bytes(enum smla_dtype dtype)
{
    return DTYPES[dtype].bytes;
}

const char *smla_shape_text(const struct smla_tensor *tensor, char text[static 96])
{
    int used = snprintf(text, 96, "(");
    for (int32_t i = 0; i < tensor->ndim; i++)
        used += snprintf(text + used, 96 - (size_t)used, "%s%" PRId64, i ? ", " : "",
                         tensor->shape[i]);
    snprintf(text + used, 96 - (size_t)used, tensor->ndim == 1 ? ",)" : ")");
    return text;
}

int64_t smla_elements(const struct smla_tensor *tensor)
{
    int64_t elements = 1;
    for (int32_t i = 0; i < tensor->ndim; i++) elements *= tensor->shape[i];
    return elements;
}

/* -------------------------------------------------------------------------- overlap */

/* The bytes of a tensor: runs of `run` bytes whose starts differ by multiples of `pitch`. */
struct footprint {
    uintptr_t low, high; /* first byte, one past the last */
    int64_t run;
    int64_t pitch; /* 0: a single run */
};

static int64_t gcd(int64_t one, int64_t other)
{
    while (other) {
        int64_t rest = one % other;
        one = other;
        other = rest;
    }
    return one;
}

/* Dimensions of more than one element by falling |stride| in bytes; returns how many. */
static int32_t sorted_strides(const struct smla_tensor *tensor, int64_t stride[SMLA_MAX_NDIM],
                              int64_t size[SMLA_MAX_NDIM])
{
    int32_t count = 0;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] == 1) continue;
        int64_t bytes = tensor->stride[i] * smla_dtype_bytes(tensor->dtype);
        if (bytes < 0) bytes = -bytes;
        int32_t at = count++;
        for (; at > 0 && stride[at - 1] < bytes; at--) {
            stride[at] = stride[at - 1];
            size[at] = size[at - 1];
        }
        stride[at] = bytes;
        size[at] = tensor->shape[i];
    }
    return count;
}

bool smla_overlaps_itself(const struct smla_tensor *tensor)
{
    if (smla_elements(tensor) == 0) return false;
    int64_t stride[SMLA_MAX_NDIM], size[SMLA_MAX_NDIM];
    int64_t extent = smla_dtype_bytes(tensor->dtype);
    for (int32_t i = sorted_strides(tensor, stride, size); i-- > 0;) {
        if (stride[i] < extent) return true;
        extent += stride[i] * (size[i] - 1);
    }
    return false;
}

static struct footprint footprint_of(const struct smla_tensor *tensor)
{
    int64_t bytes = smla_dtype_bytes(tensor->dtype);
    struct footprint print = {(uintptr_t)tensor->data, (uintptr_t)tensor->data, bytes, 0};
    for (int32_t i = 0; i < tensor->ndim; i++) {
        int64_t reach = tensor->stride[i] * bytes * (tensor->shape[i] - 1);
        if (reach < 0)
            print.low += (uintptr_t)reach;
        else
            print.high += (uintptr_t)reach;
    }
    print.high += (uintptr_t)bytes;

    int64_t stride[SMLA_MAX_NDIM], size[SMLA_MAX_NDIM];
    for (int32_t i = sorted_strides(tensor, stride, size); i-- > 0;) {
        if (print.pitch == 0 && stride[i] <= print.run)
            print.run += stride[i] * (size[i] - 1);
        else
            print.pitch = gcd(print.pitch, stride[i]);
    }
    return print;
}

bool smla_overlap(const struct smla_tensor *one, const struct smla_tensor *other)
{
    if (smla_elements(one) == 0 || smla_elements(other) == 0) return false;
    struct footprint a = footprint_of(one), b = footprint_of(other);
    if (a.high <= b.low || b.high <= a.low) return false;

    int64_t pitch = gcd(a.pitch, b.pitch);
    if (pitch == 0 || a.run > pitch || b.run > pitch) return true;
    int64_t shift = (int64_t)(b.low - a.low) % pitch; /* where b's runs begin in a's period */
    if (shift < 0) shift += pitch;
    return shift < a.run || shift + b.run > pitch;
}
