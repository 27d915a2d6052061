/* A tensor as the core sees it: borrowed memory with a shape, whatever object it came from. */
#ifndef SMLA_TENSOR_H
#define SMLA_TENSOR_H

#include <stdbool.h>
#include <stdint.h>

#include "params.h"

enum { SMLA_MAX_NDIM = 5 };

enum smla_device_type {
    SMLA_CPU = 1, /* host memory, CUDA's pinned host memory included */
    SMLA_CUDA = 2,
};

struct smla_device {
    int32_t type; /* enum smla_device_type */
    int32_t id;
};

struct smla_tensor {
    const char *name; /* of the argument, for messages; a static string */
    void *data;       /* first element; may be NULL where there is none */
    int64_t shape[SMLA_MAX_NDIM];
    int64_t stride[SMLA_MAX_NDIM]; /* elements; meaningless for dimensions of size 0 and 1 */
    int32_t ndim;
    enum smla_dtype dtype; /* SMLA_DTYPE_NONE: the argument was not given */
    char dtype_name[24];   /* "bfloat16", "complex64", for messages */
    struct smla_device device;
    bool readonly;
};

static inline bool smla_given(const struct smla_tensor *tensor)
{
    return tensor->dtype != SMLA_DTYPE_NONE;
}

const char *smla_dtype_name(enum smla_dtype dtype); /* "bfloat16" */
int32_t smla_dtype_bytes(enum smla_dtype dtype);    /* of one element; 0 for NONE and OTHER */

/* "(4, 16, 576)" into `text`, which is returned. */
const char *smla_shape_text(const struct smla_tensor *tensor, char text[static 96]);

/* Elements; 0 where a dimension is 0. */
int64_t smla_elements(const struct smla_tensor *tensor);

/* Whether two elements of the tensor may share memory. Exact for nested strides, else true. */
bool smla_overlaps_itself(const struct smla_tensor *tensor);

/* Whether two tensors may share memory. Interleaved views of one buffer (equal pitch, disjoint
 * columns) are told apart; what cannot be decided counts as an overlap. */
bool smla_overlap(const struct smla_tensor *one, const struct smla_tensor *other);

#endif
