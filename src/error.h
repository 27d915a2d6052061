/* Errors of the Python-free core: a status code and a message in a buffer that the caller owns.
 *
 * Every fallible function takes a `struct smla_error *` and returns its status; the message names
 * the argument, what was expected and what came. Nothing is allocated. */
#ifndef SMLA_ERROR_H
#define SMLA_ERROR_H

#include <stdint.h>

enum smla_status {
    SMLA_OK = 0,
    SMLA_ERROR_TYPE,        /* TypeError: kind or dtype */
    SMLA_ERROR_VALUE,       /* ValueError: shape, stride or range */
    SMLA_ERROR_BUFFER,      /* BufferError: the object cannot be exported */
    SMLA_ERROR_MEMORY,      /* MemoryError */
    SMLA_ERROR_CUDA,        /* CudaError: `code` is the driver's */
    SMLA_ERROR_UNSUPPORTED, /* UnsupportedError: this GPU or this build cannot */
};

struct smla_error {
    enum smla_status status;
    int32_t code; /* CUresult of a SMLA_ERROR_CUDA */
    char text[512];
};

/* Fills `error` and returns `status`. A message that does not fit is cut. */
enum smla_status smla_fail(struct smla_error *error, enum smla_status status, const char *format,
                           ...) __attribute__((format(printf, 3, 4)));

#define SMLA_FAIL_IF(condition, error, status, ...)                                                \
    do {                                                                                           \
        if (condition) return smla_fail((error), (status), __VA_ARGS__);                           \
    } while (0)

#define SMLA_TRY(call)                                                                             \
    do {                                                                                           \
        enum smla_status smla_try_status = (call);                                                 \
        if (smla_try_status != SMLA_OK) return smla_try_status;                                    \
    } while (0)

#endif
