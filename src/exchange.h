/* Python object -> struct smla_tensor, without a copy; and new tensors in the caller's framework.
 *
 * The only file beside module.c that knows Python. Every function sets a Python exception on
 * failure and must be called with the GIL (or an attached thread state). */
#ifndef SMLA_EXCHANGE_H
#define SMLA_EXCHANGE_H

#include <Python.h>

#include "gpu/gpu.h"
#include "tensor.h"

/* A borrowed tensor and what keeps it alive. Zero-initialise; smla_release may be called on any,
 * also twice. */
struct smla_import {
    struct smla_tensor tensor; /* dtype NONE until the import has succeeded */
    PyObject *object;          /* the caller's object, owned here */
    void *managed;             /* DLManagedTensor(Versioned) that release gives back, or NULL */
    bool versioned;
    uint8_t framework; /* exchange.c's own number of it */
};

/* Interned names, cached types. Returns 0, or -1 with an exception. */
int smla_exchange_init(void);

/* Takes `object` for the argument `name` (a static string). None leaves an absent tensor.
 * TypeError: no tensor. BufferError: cannot be exported (requires grad, negative bit, …).
 * ValueError: a layout that no kernel reads (byte-swapped, misaligned, more than SMLA_MAX_NDIM
 * dimensions, an extent past 2^47 bytes). Returns 0, or -1 with an exception and nothing held.
 *
 * Read-only are: arrays that say so, copies that a producer made for the export, JAX arrays, and
 * legacy capsules of everything but PyTorch and CuPy, since such a capsule cannot say it. */
int smla_import(PyObject *object, const char *name, struct smla_import *import);

void smla_release(struct smla_import *import);

/* A new, uninitialised, contiguous tensor of `like`'s framework on `like`'s device: returns the
 * object (new reference) and fills `import` for writing, or NULL with an exception (the
 * framework's own where its allocator failed). Where the framework's arrays are immutable (JAX)
 * the object is a buffer that smla_finish turns into one. */
PyObject *smla_empty(const struct smla_import *like, const char *name, enum smla_dtype dtype,
                     int32_t ndim, const int64_t *shape, struct smla_import *import);

/* What the caller gets for an object of smla_empty once it is written: itself, or a new array of
 * `like`'s framework. Steals `object`; returns a new reference or NULL with an exception. On a GPU
 * the streams of the call make the host wait for the launch before an immutable array is made. */
PyObject *smla_finish(const struct smla_import *like, PyObject *object);

/* The launch stream of a call: `stream` is what the caller passed or NULL/None, `like` is q. On CPU
 * tensors anything but None is a ValueError. Returns 0, or -1 with an exception.
 *
 * Without `stream` it is the one on which `like`'s framework works now. */
int smla_stream(PyObject *stream, const struct smla_import *like, struct smla_gpu_streams *streams);

/* Adds the streams on which the frameworks of more tensors work now. Tensors of `like`'s framework
 * cost nothing. With a given stream the order of tensors is the caller's, but for those that come
 * with a promise of their own: JAX's arrays, which must outlive the launch, and what an unknown
 * producer has ordered before the legacy stream. Returns 0, or -1 with an exception. */
int smla_order(struct smla_gpu_streams *streams, const struct smla_import *like,
               const struct smla_import *imports, int count);

/* Orders the launch after earlier uses of memory that smla_empty has just taken, and before later
 * ones: the framework hands it on by the order of its own stream, as soon as it is dropped. */
void smla_order_memory(struct smla_gpu_streams *streams);

#endif
