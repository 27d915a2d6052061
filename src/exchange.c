/* Python objects <-> struct smla_tensor, without a copy: see exchange.h.
 *
 * An object is read by the fastest way that its type has, in this order: DLPack's C exchange API
 * (PyTorch), NumPy's C API, CuPy's attributes, __dlpack__ with a version, __dlpack__ without. No
 * framework is ever imported: a type can only be PyTorch's where PyTorch has been loaded. What was
 * found out about a type is kept, see struct kind.
 *
 * Sections: names, types, layout, the ways in, new tensors, streams. */
#include "exchange.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/ndarrayobject.h>

#include "dlpack.h"
#include "error.h"

_Static_assert(sizeof(npy_intp) == sizeof(int64_t), "exchange.c: NumPy's shapes are 64-bit");

/* ------------------------------------------------------------------------------ names */

static struct {
    /* Attributes and methods of tensors, interned. */
    PyObject *dlpack, *dlpack_device, *exchange_api, *cuda_stream;
    PyObject *requires_grad, *is_conj, *name;
    PyObject *data, *ptr, *device_id, *shape, *strides, *dtype;
    /* What __dlpack__ is called with: (), {}, {"stream": -1}, {"max_version": (1, 3)}, both. */
    PyObject *no_arguments;
    PyObject *plain, *plain_no_sync;
    PyObject *versioned, *versioned_no_sync;
    /* PyTorch's functions, from the first torch.Tensor on. */
    PyObject *is_grad_enabled, *is_neg;
    PyObject *hooks; /* the module _frameworks.py, from the first hook on */
} cached;

/* Guards what is found out once: `cached` and the table of types. */
#ifdef Py_GIL_DISABLED
static PyMutex mutex;
#define LOCK() PyMutex_Lock(&mutex)
#define UNLOCK() PyMutex_Unlock(&mutex)
#else
#define LOCK() ((void)0)
#define UNLOCK() ((void)0)
#endif

/* Fills a slot of `cached` once; later values are dropped. Steals `value`. */
static void keep_object(PyObject **slot, PyObject *value)
{
    LOCK();
    bool first = *slot == NULL;
    if (first) *slot = value;
    UNLOCK();
    if (!first) Py_DECREF(value);
}

static int intern(PyObject **name, const char *text)
{
    *name = PyUnicode_InternFromString(text);
    return *name ? 0 : -1;
}

int smla_exchange_init(void)
{
    if (cached.versioned_no_sync) return 0;
    if (intern(&cached.dlpack, "__dlpack__") ||
        intern(&cached.dlpack_device, "__dlpack_device__") ||
        intern(&cached.exchange_api, "__dlpack_c_exchange_api__") ||
        intern(&cached.cuda_stream, "__cuda_stream__") ||
        intern(&cached.requires_grad, "requires_grad") || intern(&cached.is_conj, "is_conj") ||
        intern(&cached.name, "name") || intern(&cached.data, "data") ||
        intern(&cached.ptr, "ptr") || intern(&cached.device_id, "device_id") ||
        intern(&cached.shape, "shape") || intern(&cached.strides, "strides") ||
        intern(&cached.dtype, "dtype"))
        return -1;
    cached.no_arguments = PyTuple_New(0);
    cached.plain = PyDict_New();
    cached.plain_no_sync = Py_BuildValue("{s:i}", "stream", -1);
    cached.versioned = Py_BuildValue("{s:(ii)}", "max_version", DLPACK_MAJOR_VERSION,
                                     DLPACK_MINOR_VERSION);
    cached.versioned_no_sync = Py_BuildValue("{s:(ii),s:i}", "max_version", DLPACK_MAJOR_VERSION,
                                             DLPACK_MINOR_VERSION, "stream", -1);
    bool made = cached.no_arguments && cached.plain && cached.plain_no_sync && cached.versioned &&
                cached.versioned_no_sync;
    return made ? 0 : -1;
}

/* Calls a function of _frameworks.py with arguments as Py_BuildValue makes them: a tuple. */
static PyObject *call_hook(const char *function, const char *format, ...)
{
    PyObject *hook = NULL, *result = NULL;
    va_list values;
    va_start(values, format);
    PyObject *arguments = Py_VaBuildValue(format, values);
    va_end(values);
    if (arguments && !cached.hooks) {
        PyObject *hooks = PyImport_ImportModule("sparse_mla._frameworks");
        if (hooks) keep_object(&cached.hooks, hooks);
    }
    if (arguments && cached.hooks) hook = PyObject_GetAttrString(cached.hooks, function);
    if (hook) result = PyObject_CallObject(hook, arguments);
    Py_XDECREF(hook);
    Py_XDECREF(arguments);
    return result;
}

/* Puts a BufferError "name: why" in the place of the exception that is set, which becomes its
 * cause. `why` NULL: the first line of what that exception says (PyTorch adds a C++ trace). */
static void cannot_export(const char *name, const char *why)
{
    PyObject *type, *cause, *error, *trace;
    PyErr_Fetch(&type, &cause, &trace);
    PyErr_NormalizeException(&type, &cause, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);

    PyObject *said = why ? PyUnicode_FromString(why) : PyObject_Str(cause);
    if (said) {
        Py_ssize_t length = PyUnicode_GetLength(said);
        Py_ssize_t end = PyUnicode_FindChar(said, '\n', 0, length, 1);
        PyObject *line = PyUnicode_Substring(said, 0, end < 0 ? length : end);
        if (line) PyErr_Format(PyExc_BufferError, "%s: %U", name, line);
        Py_XDECREF(line);
        Py_DECREF(said);
    }

    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyException_SetCause(error, cause); /* steals it */
    PyErr_Restore(type, error, trace);
}

static PyObject *type_name(PyObject *object)
{
    return PyType_GetName(Py_TYPE(object));
}

/* ------------------------------------------------------------------------------ types */

enum framework { UNKNOWN, PYTORCH, NUMPY, CUPY, JAX };

enum way { BY_DLPACK, BY_EXCHANGE_API, BY_NUMPY, BY_CUPY };

/* Which call of __dlpack__ a type understands: found out by the first one. */
enum form { UNTRIED, VERSIONED, PLAIN };

/* What is known about a type. Kinds are handed out as copies, so that none is in use while its
 * place in the table is given to another; the type itself lives as long as the object at hand. */
struct kind {
    PyTypeObject *type;
    const DLPackExchangeAPI *api;
    enum way way;
    enum framework framework;
    enum form form;
};

/* A program has a handful of tensor types. Where it has more, the oldest gives way. The table owns
 * a reference to each type. */
enum { KINDS = 16 };
static struct kind kinds[KINDS];
static int kinds_used, kinds_next;

static bool find_kind(PyTypeObject *type, struct kind *kind)
{
    bool found = false;
    LOCK();
    for (int i = 0; i < kinds_used && !found; i++) {
        found = kinds[i].type == type;
        if (found) *kind = kinds[i];
    }
    UNLOCK();
    return found;
}

static void keep_kind(const struct kind *kind)
{
    PyTypeObject *gone = NULL;
    LOCK();
    int i = 0;
    while (i < kinds_used && kinds[i].type != kind->type) i++;
    if (i == KINDS) {
        i = kinds_next;
        kinds_next = (kinds_next + 1) % KINDS;
    }
    if (i == kinds_used) kinds_used++;
    if (kinds[i].type != kind->type) {
        gone = kinds[i].type;
        Py_INCREF((PyObject *)kind->type);
    }
    kinds[i] = *kind;
    UNLOCK();
    Py_XDECREF((PyObject *)gone);
}

/* The attribute of a module that has been loaded already. Returns 1 and a new reference; 0 where
 * there is none (also while the module is being imported); -1 with an exception. */
static int find_loaded(const char *module_name, const char *attribute, PyObject **value)
{
    *value = NULL;
    PyObject *key = PyUnicode_FromString(module_name);
    if (!key) return -1;
    PyObject *module = PyImport_GetModule(key);
    Py_DECREF(key);
    if (!module) return PyErr_Occurred() ? -1 : 0;
    *value = PyObject_GetAttrString(module, attribute);
    Py_DECREF(module);
    if (*value) return 1;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    PyErr_Clear();
    return 0;
}

/* Whether `type` derives from a class of a loaded module: 1, 0, or -1 with an exception. */
static int derives_from(PyTypeObject *type, const char *module, const char *name)
{
    PyObject *base;
    int found = find_loaded(module, name, &base);
    if (found <= 0) return found;
    int derives = PyType_Check(base) && PyType_IsSubtype(type, (PyTypeObject *)base);
    Py_DECREF(base);
    return derives;
}

/* Whether `type` is that very class: 1, 0, or -1 with an exception. */
static int is_class(PyTypeObject *type, const char *module, const char *name)
{
    PyObject *found;
    if (find_loaded(module, name, &found) < 0) return -1;
    bool same = found == (PyObject *)type;
    Py_XDECREF(found);
    return same;
}

/* isinstance(object, module.name) for a loaded module: 1, 0, or -1 with an exception. */
static int is_instance(PyObject *object, const char *module, const char *name)
{
    PyObject *base;
    int found = find_loaded(module, name, &base);
    if (found <= 0) return found;
    int is = PyObject_IsInstance(object, base);
    Py_DECREF(base);
    return is;
}

/* The exchange API that a type offers, in the major version that dlpack.h describes. */
static int find_exchange_api(struct kind *kind)
{
    PyObject *capsule = PyObject_GetAttr((PyObject *)kind->type, cached.exchange_api);
    if (!capsule) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api")) {
        const DLPackExchangeAPIHeader *header = PyCapsule_GetPointer(capsule,
                                                                     "dlpack_exchange_api");
        while (header && header->version.major != DLPACK_MAJOR_VERSION) header = header->prev_api;
        kind->api = (const DLPackExchangeAPI *)header;
    }
    Py_DECREF(capsule);
    return 0;
}

/* The exchange API skips what PyTorch's __dlpack__ checks, and a subclass may mean anything by its
 * elements: it is for torch.Tensor and torch.nn.Parameter themselves. */
static int classify_pytorch(struct kind *kind)
{
    kind->framework = PYTORCH;
    int is_tensor = is_class(kind->type, "torch", "Tensor");
    if (is_tensor == 0) is_tensor = is_class(kind->type, "torch.nn.parameter", "Parameter");
    if (is_tensor <= 0) return is_tensor;

    PyObject *is_grad_enabled = NULL, *is_neg = NULL;
    if (find_exchange_api(kind)) return -1;
    if (!kind->api) return 0;
    if (find_loaded("torch", "is_grad_enabled", &is_grad_enabled) < 0) return -1;
    is_neg = PyObject_GetAttrString((PyObject *)kind->type, "is_neg");
    if (!is_grad_enabled || !is_neg) {
        Py_XDECREF(is_grad_enabled);
        Py_XDECREF(is_neg);
        return -1;
    }
    keep_object(&cached.is_grad_enabled, is_grad_enabled);
    keep_object(&cached.is_neg, is_neg);
    kind->way = BY_EXCHANGE_API;
    return 0;
}

static int classify_numpy(struct kind *kind, const char *name)
{
    int masked = derives_from(kind->type, "numpy.ma", "MaskedArray");
    if (masked < 0) return -1;
    if (masked) {
        PyErr_Format(
            PyExc_TypeError,
            "%s: a masked array has elements without a value; pass .filled(value) or .data", name);
        return -1;
    }
    kind->framework = NUMPY;
    kind->way = BY_NUMPY;
    return PyArray_ImportNumPyAPI();
}

/* CuPy's arrays say in their attributes what a capsule would, for less than half its price; those
 * of a subclass, and of AMD's GPUs, go by __dlpack__. */
static int classify_cupy(struct kind *kind)
{
    PyObject *is_hip;
    kind->framework = CUPY;
    int is_ndarray = is_class(kind->type, "cupy", "ndarray");
    if (is_ndarray <= 0) return is_ndarray;
    int found = find_loaded("cupy.cuda.runtime", "is_hip", &is_hip);
    if (found <= 0) return found;
    bool nvidia = is_hip == Py_False;
    Py_DECREF(is_hip);
    if (!nvidia) return 0;
    kind->way = BY_CUPY;
    return PyArray_ImportNumPyAPI();
}

static int classify_jax(struct kind *kind, PyObject *object, const char *name)
{
    int tracer = is_instance(object, "jax.core", "Tracer");
    if (tracer < 0) return -1;
    if (tracer) {
        PyErr_Format(
            PyExc_TypeError,
            "%s: a JAX tracer has no data to read; call this outside jax.jit, jax.grad and "
            "jax.vmap, or through jax.pure_callback",
            name);
        return -1;
    }
    kind->framework = JAX;
    return 0;
}

/* Finds out, once per type, which way an object goes. Objects that go by __dlpack__ are kept only
 * when that has worked: see call_dlpack. */
static int classify(PyObject *object, const char *name, struct kind *kind)
{
    PyTypeObject *type = Py_TYPE(object);
    if (find_kind(type, kind)) return 0;
    *kind = (struct kind){.type = type};

    int is = derives_from(type, "torch", "Tensor");
    if (is > 0) {
        if (classify_pytorch(kind)) return -1;
    } else if (is == 0 && (is = derives_from(type, "numpy", "ndarray")) > 0) {
        if (classify_numpy(kind, name)) return -1;
    } else if (is == 0 && (is = derives_from(type, "cupy", "ndarray")) > 0) {
        if (classify_cupy(kind)) return -1;
    } else if (is == 0 && (is = is_instance(object, "jax", "Array")) > 0) {
        if (classify_jax(kind, object, name)) return -1;
    }
    if (is < 0) return -1;
    if (kind->way != BY_DLPACK) keep_kind(kind);
    return 0;
}

/* ------------------------------------------------------------------------------ layout */

/* No machine maps more: what reaches further is a producer's mistake. */
static const int64_t MOST_BYTES = INT64_C(1) << 47;

static const struct {
    uint8_t code, bits;
    enum smla_dtype dtype;
} DTYPES[] = {
    {kDLBfloat, 16, SMLA_BFLOAT16},   {kDLFloat, 32, SMLA_FLOAT32}, {kDLInt, 32, SMLA_INT32},
    {kDLInt, 64, SMLA_INT64},         {kDLUInt, 8, SMLA_UINT8},     {kDLFloat, 16, SMLA_FLOAT16},
    {kDLFloat8_e4m3fn, 8, SMLA_E4M3},
};

/* By DLPack's code; those that have a number of bits in their name end before it. */
static const char *const CODE_NAMES[] = {
    [kDLInt] = "int",
    [kDLUInt] = "uint",
    [kDLFloat] = "float",
    [kDLOpaqueHandle] = "handle",
    [kDLBfloat] = "bfloat",
    [kDLComplex] = "complex",
    [kDLBool] = "bool",
    [kDLFloat8_e3m4] = "float8_e3m4",
    [kDLFloat8_e4m3] = "float8_e4m3",
    [kDLFloat8_e4m3b11fnuz] = "float8_e4m3b11fnuz",
    [kDLFloat8_e4m3fn] = "float8_e4m3fn",
    [kDLFloat8_e4m3fnuz] = "float8_e4m3fnuz",
    [kDLFloat8_e5m2] = "float8_e5m2",
    [kDLFloat8_e5m2fnuz] = "float8_e5m2fnuz",
    [kDLFloat8_e8m0fnu] = "float8_e8m0fnu",
    [kDLFloat6_e2m3fn] = "float6_e2m3fn",
    [kDLFloat6_e3m2fn] = "float6_e3m2fn",
    [kDLFloat4_e2m1fn] = "float4_e2m1fn",
};

static const char *const DEVICE_NAMES[] = {
    [kDLOpenCL] = "OpenCL",    [kDLVulkan] = "Vulkan", [kDLMetal] = "Metal",
    [kDLVPI] = "VPI",          [kDLROCM] = "ROCm",     [kDLROCMHost] = "ROCm host memory",
    [kDLExtDev] = "extension", [kDLOneAPI] = "oneAPI", [kDLWebGPU] = "WebGPU",
    [kDLHexagon] = "Hexagon",  [kDLMAIA] = "MAIA",     [kDLTrn] = "Trainium",
};

static void set_dtype_name(struct smla_tensor *tensor, const char *text)
{
    size_t length = strnlen(text, sizeof tensor->dtype_name - 1);
    memcpy(tensor->dtype_name, text, length);
    tensor->dtype_name[length] = '\0';
}

static void set_dtype(struct smla_tensor *tensor, DLDataType dtype)
{
    for (size_t i = 0; i < sizeof DTYPES / sizeof *DTYPES; i++)
        if (dtype.code == DTYPES[i].code && dtype.bits == DTYPES[i].bits) {
            tensor->dtype = DTYPES[i].dtype;
            set_dtype_name(tensor, smla_dtype_name(tensor->dtype));
            return;
        }

    tensor->dtype = SMLA_DTYPE_OTHER;
    const char *code = NULL;
    if (dtype.code < sizeof CODE_NAMES / sizeof *CODE_NAMES) code = CODE_NAMES[dtype.code];
    if (!code)
        snprintf(tensor->dtype_name, sizeof tensor->dtype_name, "DLPack dtype %d", dtype.code);
    else if (dtype.code < kDLBool)
        snprintf(tensor->dtype_name, sizeof tensor->dtype_name, "%s%d", code, dtype.bits);
    else
        set_dtype_name(tensor, code);
}

/* The device, which for managed memory only the driver knows. */
static int set_device(struct smla_tensor *tensor, DLDevice device, const void *data)
{
    tensor->device = (struct smla_device){SMLA_CPU, 0};
    unsigned type = (unsigned)device.device_type;
    if (type == kDLCPU || type == kDLCUDAHost) return 0;

    tensor->device = (struct smla_device){SMLA_CUDA, device.device_id};
    if (type == kDLCUDA) return 0;
    if (type == kDLCUDAManaged) {
        struct smla_error error;
        if (!data || !smla_gpu_pointer_device(data, &tensor->device.id, &error)) return 0;
        PyErr_Format(PyExc_BufferError, "%s: CUDA managed memory of an unknown device: %s",
                     tensor->name, error.text);
        return -1;
    }

    const char *known = NULL;
    if (type < sizeof DEVICE_NAMES / sizeof *DEVICE_NAMES) known = DEVICE_NAMES[type];
    PyErr_Format(PyExc_BufferError,
                 "%s: expected a tensor on the CPU or a CUDA device, got one on %s (DLPack device "
                 "type %u)",
                 tensor->name, known ? known : "an unknown device", type);
    return -1;
}

static int check_ndim(const struct smla_tensor *tensor, int64_t ndim)
{
    if (ndim >= 0 && ndim <= SMLA_MAX_NDIM) return 0;
    PyErr_Format(PyExc_ValueError, "%s: expected at most %d dimensions, got %lld", tensor->name,
                 SMLA_MAX_NDIM, (long long)ndim);
    return -1;
}

/* The strides in elements of a row-major tensor. Returns the elements, or -1 with a ValueError. */
static int64_t row_major(const char *name, int32_t ndim, const int64_t *shape, int64_t *stride)
{
    int64_t elements = 1;
    bool empty = false;
    for (int32_t i = ndim; i-- > 0;) {
        if (shape[i] < 0) {
            PyErr_Format(PyExc_ValueError, "%s: dimension %d has the negative size %lld", name, i,
                         (long long)shape[i]);
            return -1;
        }
        stride[i] = elements;
        if (shape[i] == 0)
            empty = true;
        else if (__builtin_mul_overflow(elements, shape[i], &elements)) {
            PyErr_Format(PyExc_ValueError, "%s: more than 2^63 elements", name);
            return -1;
        }
    }
    return empty ? 0 : elements;
}

/* Takes the strides of a tensor that has elements, of `bytes` bytes each. A dimension of size 1
 * gets the stride that fits its neighbour, since producers leave anything there. False where an
 * element lies more than MOST_BYTES away or at an address that does not exist. */
static bool take_strides(struct smla_tensor *tensor, const int64_t *stride, int64_t bytes)
{
    int64_t below = 0, above = 0; /* elements before and after the first */
    int64_t next = 1;             /* stride that continues the dimensions so far */
    for (int32_t i = tensor->ndim; i-- > 0;) {
        int64_t size = tensor->shape[i], reach = 0;
        if (size > 1) {
            if (__builtin_mul_overflow(size - 1, stride[i], &reach)) return false;
            if (reach > MOST_BYTES || reach < -MOST_BYTES) return false;
            next = stride[i];
        }
        tensor->stride[i] = next;
        next *= size;
        if (reach < 0)
            below -= reach;
        else
            above += reach;
    }
    return (below + above + 1) * bytes <= MOST_BYTES &&
           (uintptr_t)(below * bytes) <= (uintptr_t)tensor->data;
}

/* Data, shape and strides (in elements; NULL: row-major), checked. `bytes` an element, at least 1.
 */
static int set_layout(struct smla_tensor *tensor, void *data, int64_t bytes, int32_t ndim,
                      const int64_t *shape, const int64_t *stride)
{
    int64_t elements = row_major(tensor->name, ndim, shape, tensor->stride);
    if (elements < 0) return -1;
    tensor->data = data;
    tensor->ndim = ndim;
    for (int32_t i = 0; i < ndim; i++)
        tensor->shape[i] = shape[i]; /* of none there may be no array */
    if (elements == 0) return 0;

    if (!data) {
        PyErr_Format(PyExc_BufferError,
                     "%s: the tensor has a shape but no data (a meta or fake tensor?)",
                     tensor->name);
        return -1;
    }
    if (!take_strides(tensor, stride ? stride : tensor->stride, bytes)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: the shape and strides reach past 2^47 bytes, which no memory does",
                     tensor->name);
        return -1;
    }
    if ((uintptr_t)data % (uintptr_t)bytes && tensor->dtype != SMLA_DTYPE_OTHER) {
        PyErr_Format(PyExc_ValueError,
                     "%s: misaligned: the data of a %s tensor must begin at a multiple of %lld "
                     "bytes; pass a copy",
                     tensor->name, tensor->dtype_name, (long long)bytes);
        return -1;
    }
    return 0;
}

/* What a DLTensor says, checked: device, dtype, layout. */
static int set_tensor(struct smla_tensor *tensor, const DLTensor *from)
{
    if (set_device(tensor, from->device, from->data) || check_ndim(tensor, from->ndim)) return -1;
    set_dtype(tensor, from->dtype);
    if (from->dtype.lanes != 1) {
        PyErr_Format(PyExc_ValueError,
                     "%s: expected elements of one number, got vectors of %d (%s); pass a view of "
                     "uint8",
                     tensor->name, from->dtype.lanes, tensor->dtype_name);
        return -1;
    }
    if (from->ndim > 0 && !from->shape) {
        PyErr_Format(PyExc_ValueError, "%s: %d dimensions without a shape", tensor->name,
                     from->ndim);
        return -1;
    }
    char *data = from->data;
    if (data) {
        if (from->byte_offset > (uint64_t)MOST_BYTES) {
            PyErr_Format(PyExc_ValueError, "%s: a byte offset past 2^47", tensor->name);
            return -1;
        }
        data += from->byte_offset;
    }
    int64_t bytes = from->dtype.bits > 8 ? (from->dtype.bits + 7) / 8 : 1;
    return set_layout(tensor, data, bytes, from->ndim, from->shape, from->strides);
}

/* ------------------------------------------------------------------------------ the ways in */

/* Takes over a managed tensor, whose deleter smla_release calls, also when this fails. */
static int own_versioned(struct smla_import *import, DLManagedTensorVersioned *managed)
{
    import->managed = managed;
    import->versioned = true;
    if (managed->version.major == DLPACK_MAJOR_VERSION) return 0;
    PyErr_Format(PyExc_BufferError, "%s: expected DLPack 1.x, got a tensor of DLPack %u.%u",
                 import->tensor.name, managed->version.major, managed->version.minor);
    return -1;
}

/* A copy that the producer made is as good as any to read, but who writes it writes nothing. */
static bool is_readonly(const DLManagedTensorVersioned *managed)
{
    return managed->flags & (DLPACK_FLAG_BITMASK_READ_ONLY | DLPACK_FLAG_BITMASK_IS_COPIED);
}

/* PyTorch's exchange API refused: the exception that it set, with what to do about it. */
static int refused_by_pytorch(PyObject *object, const char *name)
{
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && !PyErr_ExceptionMatches(PyExc_BufferError))
        return -1;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *why = call_hook("why_not", "(O)", object);
    if (!why) goto fail;
    const char *text = NULL;
    if (why != Py_None && !(text = PyUnicode_AsUTF8AndSize(why, NULL))) goto fail;
    PyErr_Restore(type, value, trace);
    cannot_export(name, text);
    Py_DECREF(why);
    return -1;

fail:
    Py_XDECREF(why);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return -1;
}

/* The truth of an answer, which is stolen: 1, 0, or -1 where it is NULL or has none. */
static int truth(PyObject *answer)
{
    if (!answer) return -1;
    int is = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return is;
}

static int refuse_bit(const char *name, const char *bit, const char *remedy)
{
    PyErr_Format(PyExc_BufferError, "%s: the tensor's %s bit is set; pass %s.%s()", name, bit, name,
                 remedy);
    return -1;
}

/* What PyTorch's own __dlpack__ refuses and its exchange API does not: the elements of such a
 * tensor do not mean what the memory holds. Integers can be none of it. The negative bit is that of
 * a conjugated complex tensor's imaginary part: numbers of a dtype that no complex one consists of
 * cannot have it, and are not asked, since an answer takes as long as the tensor itself. */
static int check_pytorch(PyObject *object, const struct smla_tensor *tensor, DLDataType dtype)
{
    if (dtype.code == kDLInt || dtype.code == kDLUInt || dtype.code == kDLBool) return 0;

    int is = truth(PyObject_GetAttr(object, cached.requires_grad));
    if (is > 0) is = truth(PyObject_CallNoArgs(cached.is_grad_enabled));
    if (is > 0)
        PyErr_Format(PyExc_BufferError,
                     "%s: the tensor requires grad, and this function has no gradient; pass "
                     "%s.detach(), or call it under torch.no_grad()",
                     tensor->name, tensor->name);
    if (is) return -1;

    if (dtype.code != kDLFloat && dtype.code != kDLComplex) return 0;
    is = truth(PyObject_CallFunctionObjArgs(cached.is_neg, object, NULL));
    if (is) return is < 0 ? -1 : refuse_bit(tensor->name, "negative", "resolve_neg");
    if (dtype.code == kDLComplex) {
        is = truth(PyObject_CallMethodObjArgs(object, cached.is_conj, NULL));
        if (is) return is < 0 ? -1 : refuse_bit(tensor->name, "conjugate", "resolve_conj");
    }
    return 0;
}

/* Borrows the tensor where PyTorch lends it: the object keeps it alive. */
static int import_by_exchange_api(const struct kind *kind, PyObject *object,
                                  struct smla_import *import)
{
    const char *name = import->tensor.name;
    DLTensor lent;
    const DLTensor *tensor = &lent;
    if (kind->api->dltensor_from_py_object_no_sync) {
        if (kind->api->dltensor_from_py_object_no_sync(object, &lent))
            return refused_by_pytorch(object, name);
    } else {
        DLManagedTensorVersioned *managed = NULL;
        if (kind->api->managed_tensor_from_py_object_no_sync(object, &managed))
            return refused_by_pytorch(object, name);
        if (own_versioned(import, managed)) return -1;
        import->tensor.readonly = is_readonly(managed);
        tensor = &managed->dl_tensor;
    }
    if (set_tensor(&import->tensor, tensor)) return -1;
    return check_pytorch(object, &import->tensor, tensor->dtype);
}

/* The numbers that NumPy gave to the dtypes of ml_dtypes, once they have been met; 0 before. */
static atomic_int bfloat16_number, e4m3_number;

/* ml_dtypes' dtypes are told by the name of their scalar type. */
static enum smla_dtype ml_dtype(const PyArray_Descr *descr)
{
    int number = descr->type_num;
    if (!PyTypeNum_ISUSERDEF(number)) return SMLA_DTYPE_OTHER;
    if (number == atomic_load_explicit(&bfloat16_number, memory_order_relaxed))
        return SMLA_BFLOAT16;
    if (number == atomic_load_explicit(&e4m3_number, memory_order_relaxed)) return SMLA_E4M3;

    enum smla_dtype dtype = SMLA_DTYPE_OTHER;
    PyObject *type = PyType_GetName(descr->typeobj);
    if (!type) return SMLA_DTYPE_NONE;
    npy_intp bytes = PyDataType_ELSIZE(descr);
    if (bytes == 2 && PyUnicode_CompareWithASCIIString(type, "bfloat16") == 0) {
        atomic_store_explicit(&bfloat16_number, number, memory_order_relaxed);
        dtype = SMLA_BFLOAT16;
    } else if (bytes == 1 && PyUnicode_CompareWithASCIIString(type, "float8_e4m3fn") == 0) {
        atomic_store_explicit(&e4m3_number, number, memory_order_relaxed);
        dtype = SMLA_E4M3;
    }
    Py_DECREF(type);
    return dtype;
}

static enum smla_dtype numpy_dtype(const PyArray_Descr *descr)
{
    switch (descr->type_num) {
    case NPY_FLOAT: return SMLA_FLOAT32;
    case NPY_HALF: return SMLA_FLOAT16;
    case NPY_UBYTE: return SMLA_UINT8;
    case NPY_INT: return SMLA_INT32;
    case NPY_LONG: return SMLA_INT64;
    case NPY_LONGLONG: return SMLA_INT64;
    default: return ml_dtype(descr);
    }
}

/* The dtype and its name. Returns 0, or -1 with an exception. */
static int set_numpy_dtype(struct smla_tensor *tensor, PyArray_Descr *descr)
{
    enum smla_dtype dtype = numpy_dtype(descr);
    if (dtype == SMLA_DTYPE_NONE) return -1;
    if (dtype != SMLA_DTYPE_OTHER) {
        tensor->dtype = dtype;
        set_dtype_name(tensor, smla_dtype_name(dtype));
        return 0;
    }
    PyObject *name = PyObject_GetAttr((PyObject *)descr, cached.name);
    const char *text = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
    if (text) {
        tensor->dtype = dtype;
        set_dtype_name(tensor, text);
    }
    Py_XDECREF(name);
    return text ? 0 : -1;
}

/* Data, shape and strides in bytes; of a dtype that no argument takes the strides mean nothing. */
static int set_byte_layout(struct smla_tensor *tensor, void *data, int32_t ndim,
                           const int64_t *shape, const int64_t *byte_stride)
{
    int64_t stride[SMLA_MAX_NDIM];
    if (tensor->dtype == SMLA_DTYPE_OTHER) return set_layout(tensor, data, 1, ndim, shape, NULL);
    int64_t bytes = smla_dtype_bytes(tensor->dtype);
    for (int32_t i = 0; i < ndim; i++) {
        stride[i] = byte_stride[i] / bytes;
        if (shape[i] > 1 && byte_stride[i] % bytes) {
            PyErr_Format(PyExc_ValueError,
                         "%s: misaligned: dimension %d has a stride of %lld bytes, expected a "
                         "multiple of %lld; pass a copy",
                         tensor->name, i, (long long)byte_stride[i], (long long)bytes);
            return -1;
        }
    }
    return set_layout(tensor, data, bytes, ndim, shape, stride);
}

static int import_by_numpy(PyObject *object, struct smla_import *import)
{
    struct smla_tensor *tensor = &import->tensor;
    PyArrayObject *array = (PyArrayObject *)object;
    int32_t ndim = PyArray_NDIM(array);
    if (check_ndim(tensor, ndim) || set_numpy_dtype(tensor, PyArray_DESCR(array))) return -1;
    tensor->device = (struct smla_device){SMLA_CPU, 0};
    tensor->readonly = !PyArray_ISWRITEABLE(array);
    if (tensor->dtype != SMLA_DTYPE_OTHER && PyArray_ISBYTESWAPPED(array)) {
        PyErr_Format(PyExc_ValueError,
                     "%s: a byte-swapped array of %s; pass a copy in the machine's own byte order",
                     tensor->name, tensor->dtype_name);
        return -1;
    }
    return set_byte_layout(tensor, PyArray_DATA(array), ndim, PyArray_DIMS(array),
                           PyArray_STRIDES(array));
}

static int64_t integer_attribute(PyObject *object, PyObject *name)
{
    PyObject *number = PyObject_GetAttr(object, name);
    if (!number) return -1;
    int64_t value = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return value;
}

/* The integers of a tuple attribute: how many, or -1 with an exception. */
static int32_t tuple_attribute(const struct smla_tensor *tensor, PyObject *object, PyObject *name,
                               int64_t values[static SMLA_MAX_NDIM])
{
    PyObject *tuple = PyObject_GetAttr(object, name);
    if (!tuple) return -1;
    Py_ssize_t count = PyTuple_Size(tuple);
    if (count >= 0 && check_ndim(tensor, count)) count = -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (values[i] == -1 && PyErr_Occurred()) count = -1;
    }
    Py_DECREF(tuple);
    return (int32_t)count;
}

static int import_by_cupy(PyObject *object, struct smla_import *import)
{
    struct smla_tensor *tensor = &import->tensor;
    int64_t shape[SMLA_MAX_NDIM], stride[SMLA_MAX_NDIM];
    int32_t ndim = tuple_attribute(tensor, object, cached.shape, shape);
    if (ndim < 0 || tuple_attribute(tensor, object, cached.strides, stride) != ndim) return -1;

    PyObject *memory = PyObject_GetAttr(object, cached.data);
    if (!memory) return -1;
    int64_t pointer = integer_attribute(memory, cached.ptr);
    int64_t device = pointer == -1 ? -1 : integer_attribute(memory, cached.device_id);
    Py_DECREF(memory);
    if (PyErr_Occurred()) return -1;
    tensor->device = (struct smla_device){SMLA_CUDA, (int32_t)device};

    PyObject *dtype = PyObject_GetAttr(object, cached.dtype);
    if (!dtype) return -1;
    int failed = set_numpy_dtype(tensor, (PyArray_Descr *)dtype);
    Py_DECREF(dtype);
    return failed ? -1 : set_byte_layout(tensor, (void *)(uintptr_t)pointer, ndim, shape, stride);
}

/* Whether the object says that it is on a CUDA device: 1, 0, or -1 with an exception. */
static int is_on_cuda(PyObject *object)
{
    PyObject *device = PyObject_CallMethodObjArgs(object, cached.dlpack_device, NULL);
    if (!device) return -1;
    int is = -1;
    PyObject *first = PySequence_GetItem(device, 0);
    if (first) {
        long type = PyLong_AsLong(first);
        if (type != -1 || !PyErr_Occurred()) is = type == kDLCUDA || type == kDLCUDAManaged;
    }
    Py_XDECREF(first);
    Py_DECREF(device);
    return is;
}

static int not_a_tensor(PyObject *object, const char *name)
{
    PyObject *type = type_name(object);
    if (type)
        PyErr_Format(PyExc_TypeError,
                     "%s: expected a tensor (an object with __dlpack__ or a NumPy array), got %U",
                     name, type);
    Py_XDECREF(type);
    return -1;
}

/* Calls __dlpack__ and returns the capsule, or NULL with an exception.
 *
 * On a CUDA device the producer is asked not to synchronise where its framework has a current
 * stream that smla_stream can tell: the launch waits for that stream. Others get no stream, and
 * have ordered their work before the legacy stream, or finished it (JAX), when they return. */
static PyObject *call_dlpack(struct kind *kind, PyObject *object, const char *name)
{
    PyObject *capsule = NULL;
    PyObject *method = PyType_Check(object) ? NULL : PyObject_GetAttr(object, cached.dlpack);
    if (!method) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_AttributeError)) return NULL;
        PyErr_Clear();
        not_a_tensor(object, name);
        return NULL;
    }
    int no_sync = kind->framework == CUPY; /* whose arrays are nowhere else */
    if (kind->framework == PYTORCH) no_sync = is_on_cuda(object);
    if (no_sync < 0) goto done;

    PyObject *plain = no_sync ? cached.plain_no_sync : cached.plain;
    enum form form = kind->form;
    if (form != PLAIN) {
        capsule = PyObject_Call(method, cached.no_arguments,
                                no_sync ? cached.versioned_no_sync : cached.versioned);
        if (!capsule && form == UNTRIED && PyErr_ExceptionMatches(PyExc_TypeError)) {
            /* A producer of before DLPack 1.0 does not know max_version. */
            PyErr_Clear();
            form = PLAIN;
        } else {
            form = VERSIONED;
        }
    }
    if (form == PLAIN) capsule = PyObject_Call(method, cached.no_arguments, plain);

    if (capsule && kind->form == UNTRIED) {
        kind->form = form;
        keep_kind(kind);
    }
    if (!capsule && (PyErr_ExceptionMatches(PyExc_BufferError) ||
                     (kind->framework != UNKNOWN && PyErr_ExceptionMatches(PyExc_RuntimeError))))
        cannot_export(name, NULL);
done:
    Py_DECREF(method);
    return capsule;
}

/* Drops a capsule while an exception may be set: its destructor is the producer's code. */
static void drop_safely(PyObject *capsule)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_DECREF(capsule);
    PyErr_Restore(type, value, trace);
}

/* Takes the tensor out of a capsule. Until it is renamed the capsule owns the tensor and its
 * destructor calls the deleter; from then on smla_release does. */
static int open_capsule(const struct kind *kind, PyObject *capsule, struct smla_import *import)
{
    struct smla_tensor *tensor = &import->tensor;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        DLManagedTensorVersioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        /* Of another major version nothing but the deleter may be touched. */
        if (managed->version.major == DLPACK_MAJOR_VERSION) {
            if (set_tensor(tensor, &managed->dl_tensor)) return -1;
            tensor->readonly = kind->framework == JAX || is_readonly(managed);
        }
        if (PyCapsule_SetName(capsule, "used_dltensor_versioned")) return -1;
        return own_versioned(import, managed);
    }
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        DLManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
        if (set_tensor(tensor, &managed->dl_tensor)) return -1;
        /* It cannot say that it is read-only: only these frameworks have no such arrays. */
        tensor->readonly = kind->framework != PYTORCH && kind->framework != CUPY;
        if (PyCapsule_SetName(capsule, "used_dltensor")) return -1;
        import->managed = managed;
        return 0;
    }
    PyErr_Format(PyExc_BufferError,
                 "%s: expected __dlpack__ to return an unused DLPack capsule, got %R", tensor->name,
                 capsule);
    return -1;
}

static int import_by_dlpack(struct kind *kind, PyObject *object, struct smla_import *import)
{
    PyObject *capsule = call_dlpack(kind, object, import->tensor.name);
    if (!capsule) return -1;
    int failed = open_capsule(kind, capsule, import);
    drop_safely(capsule);
    return failed;
}

int smla_import(PyObject *object, const char *name, struct smla_import *import)
{
    *import = (struct smla_import){.tensor = {.name = name}};
    if (!object || object == Py_None) return 0;

    struct kind kind;
    if (classify(object, name, &kind)) return -1;
    int failed = -1;
    switch (kind.way) {
    case BY_EXCHANGE_API: failed = import_by_exchange_api(&kind, object, import); break;
    case BY_NUMPY: failed = import_by_numpy(object, import); break;
    case BY_CUPY: failed = import_by_cupy(object, import); break;
    case BY_DLPACK: failed = import_by_dlpack(&kind, object, import); break;
    }
    if (failed) {
        smla_release(import);
        return -1;
    }
    import->object = Py_NewRef(object);
    import->framework = (uint8_t)kind.framework;
    return 0;
}

/* The deleter is the producer's code: it may run Python, so that an exception on its way to the
 * caller is laid aside meanwhile. */
static void give_back(void *managed, bool versioned)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (versioned) {
        DLManagedTensorVersioned *tensor = managed;
        if (tensor->deleter) tensor->deleter(tensor);
    } else {
        DLManagedTensor *tensor = managed;
        if (tensor->deleter) tensor->deleter(tensor);
    }
    PyErr_Restore(type, value, trace);
}

void smla_release(struct smla_import *import)
{
    void *managed = import->managed;
    import->managed = NULL;
    import->tensor.dtype = SMLA_DTYPE_NONE;
    import->tensor.data = NULL;
    if (managed) give_back(managed, import->versioned);
    Py_CLEAR(import->object);
}

/* ------------------------------------------------------------------------------ new tensors */

static const DLDataType DLPACK_DTYPES[] = {
    [SMLA_FLOAT32] = {kDLFloat, 32, 1},   [SMLA_FLOAT16] = {kDLFloat, 16, 1},
    [SMLA_BFLOAT16] = {kDLBfloat, 16, 1}, [SMLA_E4M3] = {kDLFloat8_e4m3fn, 8, 1},
    [SMLA_UINT8] = {kDLUInt, 8, 1},       [SMLA_INT32] = {kDLInt, 32, 1},
    [SMLA_INT64] = {kDLInt, 64, 1},
};

/* What is wanted of a new tensor. */
struct wanted {
    enum smla_dtype dtype;
    int32_t ndim;
    const int64_t *shape;
};

/* By a function of _frameworks.py, in Python. */
static PyObject *empty_by_hook(const struct smla_import *like, const char *name,
                               const struct wanted *wanted, struct smla_import *import)
{
    PyObject *shape = PyTuple_New(wanted->ndim), *object = NULL;
    if (!shape) return NULL;
    for (int32_t i = 0; i < wanted->ndim; i++) {
        PyObject *size = PyLong_FromLongLong(wanted->shape[i]);
        if (!size || PyTuple_SetItem(shape, i, size)) goto done;
    }
    object = call_hook("empty", "(OOsO)", like->object, shape, smla_dtype_name(wanted->dtype),
                       like->tensor.device.type == SMLA_CPU ? Py_True : Py_False);
    if (object && smla_import(object, name, import)) Py_CLEAR(object);
done:
    Py_DECREF(shape);
    return object;
}

/* The allocator's error is not kept: the framework's own call, made next, raises its own. */
static void drop_error(void *context, const char *kind, const char *message)
{
    (void)context, (void)kind, (void)message;
}

/* Through the exchange API's allocator, without Python code on the way. */
static PyObject *empty_by_exchange_api(const struct kind *kind, const struct smla_import *like,
                                       const char *name, const struct wanted *wanted,
                                       struct smla_import *import)
{
    const struct smla_device *device = &like->tensor.device;
    DLTensor prototype = {
        .device = {device->type == SMLA_CUDA ? kDLCUDA : kDLCPU, device->id},
        .ndim = wanted->ndim,
        .dtype = DLPACK_DTYPES[wanted->dtype],
        .shape = (int64_t *)wanted->shape, /* only read */
    };
    DLManagedTensorVersioned *managed = NULL;
    if (kind->api->managed_tensor_allocator(&prototype, &managed, NULL, drop_error)) {
        PyErr_Clear();
        return empty_by_hook(like, name, wanted, import);
    }
    void *object = NULL;
    *import = (struct smla_import){.tensor = {.name = name}};
    if (set_tensor(&import->tensor, &managed->dl_tensor)) {
        give_back(managed, true);
    } else if (kind->api->managed_tensor_to_py_object_no_sync(managed, &object)) {
        object = NULL;
    }
    import->object = Py_XNewRef(object);
    if (!object) smla_release(import);
    return object;
}

/* A dtype's NumPy descriptor (new reference), from `like` where it has that dtype. */
static PyArray_Descr *numpy_descr(PyArrayObject *like, enum smla_dtype like_dtype,
                                  enum smla_dtype dtype)
{
    static const int NUMBERS[] = {
        [SMLA_FLOAT32] = NPY_FLOAT, [SMLA_FLOAT16] = NPY_HALF, [SMLA_UINT8] = NPY_UBYTE,
        [SMLA_INT32] = NPY_INT,     [SMLA_INT64] = NPY_INT64,
    };
    if (dtype == like_dtype) return (PyArray_Descr *)Py_NewRef((PyObject *)PyArray_DESCR(like));
    if (dtype != SMLA_BFLOAT16 && dtype != SMLA_E4M3) return PyArray_DescrFromType(NUMBERS[dtype]);

    PyObject *descr = call_hook("numpy_dtype", "(s)", smla_dtype_name(dtype));
    if (descr && !PyArray_DescrCheck(descr)) {
        PyErr_SetString(PyExc_TypeError, "numpy_dtype() did not return a NumPy dtype");
        Py_CLEAR(descr);
    }
    return (PyArray_Descr *)descr;
}

static PyObject *empty_by_numpy(const struct smla_import *like, const char *name,
                                const struct wanted *wanted, struct smla_import *import)
{
    PyArray_Descr *descr = numpy_descr((PyArrayObject *)like->object, like->tensor.dtype,
                                       wanted->dtype);
    if (!descr) return NULL;
    /* Steals the reference to the descriptor, also when it fails. */
    PyObject *object = PyArray_NewFromDescr(&PyArray_Type, descr, wanted->ndim, wanted->shape, NULL,
                                            NULL, 0, NULL);
    if (object && smla_import(object, name, import)) Py_CLEAR(object);
    return object;
}

/* Device memory that a JAX array is going to own. */
struct buffer {
    DLManagedTensor managed;
    int64_t shape[SMLA_MAX_NDIM];
};

/* DLPack's deleter, which may be called on any thread and without the GIL. */
static void free_buffer(DLManagedTensor *managed)
{
    smla_gpu_free(managed->dl_tensor.data, managed->dl_tensor.device.device_id);
    free(managed->manager_ctx);
}

static void drop_buffer(PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, "dltensor")) return; /* the consumer has it */
    DLManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
    managed->deleter(managed);
}

/* A capsule with device memory, which smla_finish hands to JAX. */
static PyObject *empty_buffer(const struct smla_import *like, const char *name,
                              const struct wanted *wanted, struct smla_import *import)
{
    struct smla_error error;
    const int32_t device = like->tensor.device.id;
    int64_t bytes = smla_dtype_bytes(wanted->dtype);
    struct buffer *buffer = calloc(1, sizeof *buffer);
    if (!buffer) return PyErr_NoMemory();
    for (int32_t i = 0; i < wanted->ndim; i++) {
        buffer->shape[i] = wanted->shape[i];
        bytes *= wanted->shape[i];
    }
    DLTensor *tensor = &buffer->managed.dl_tensor;
    *tensor = (DLTensor){.device = {kDLCUDA, device},
                         .ndim = wanted->ndim,
                         .dtype = DLPACK_DTYPES[wanted->dtype],
                         .shape = buffer->shape};
    buffer->managed.manager_ctx = buffer;
    buffer->managed.deleter = free_buffer;
    if (smla_gpu_allocate(bytes ? bytes : 1, device, &tensor->data, &error) != SMLA_OK) {
        PyErr_Format(PyExc_MemoryError, "%s: %lld bytes of GPU memory: %s", name, (long long)bytes,
                     error.text);
        free(buffer);
        return NULL;
    }
    PyObject *capsule = PyCapsule_New(&buffer->managed, "dltensor", drop_buffer);
    if (!capsule) {
        free_buffer(&buffer->managed);
        return NULL;
    }
    *import = (struct smla_import){.tensor = {.name = name}};
    if (set_tensor(&import->tensor, tensor)) Py_CLEAR(capsule);
    import->object = Py_XNewRef(capsule);
    return capsule;
}

PyObject *smla_empty(const struct smla_import *like, const char *name, enum smla_dtype dtype,
                     int32_t ndim, const int64_t *shape, struct smla_import *import)
{
    struct wanted wanted = {dtype, ndim, shape};
    struct kind kind;
    if (classify(like->object, name, &kind)) return NULL;
    switch (kind.way) {
    case BY_EXCHANGE_API: return empty_by_exchange_api(&kind, like, name, &wanted, import);
    case BY_NUMPY: return empty_by_numpy(like, name, &wanted, import);
    case BY_CUPY:
    case BY_DLPACK: break;
    }
    if (kind.framework == JAX && like->tensor.device.type == SMLA_CUDA)
        return empty_buffer(like, name, &wanted, import);
    return empty_by_hook(like, name, &wanted, import);
}

PyObject *smla_finish(const struct smla_import *like, PyObject *object)
{
    if (like->framework != JAX) return object;
    const char *hook = PyCapsule_CheckExact(object) ? "adopt" : "finish";
    PyObject *finished = call_hook(hook, "(OO)", like->object, object);
    Py_DECREF(object);
    return finished;
}

/* ------------------------------------------------------------------------------ streams */

/* A cudaStream_t as a Python integer: 0 and 1 are the legacy stream, 2 the per-thread one. */
static int handle_from_int(PyObject *number, uintptr_t *handle)
{
    _Static_assert(sizeof(unsigned long long) >= sizeof(uintptr_t), "a handle fits");
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return -1;
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError,
                     "stream: expected a cudaStream_t, which is not negative and "
                     "has 64 bits, got %R",
                     number);
        return -1;
    }
    *handle = value == 1 ? 0 : (uintptr_t)value;
    return 0;
}

/* __cuda_stream__() of an object: (0, handle), where 0 is the protocol's version. */
static int handle_from_protocol(PyObject *method, uintptr_t *handle)
{
    int failed = -1;
    long version;
    PyObject *number;
    PyObject *answer = PyCallable_Check(method) ? PyObject_CallNoArgs(method) : Py_NewRef(method);
    if (!answer) return -1;
    if (!PyTuple_Check(answer) ||
        !PyArg_ParseTuple(answer, "lO!", &version, &PyLong_Type, &number)) {
        PyErr_Format(PyExc_TypeError,
                     "stream: expected __cuda_stream__() to return (0, handle), got %R", answer);
    } else if (version != 0) {
        PyErr_Format(PyExc_ValueError,
                     "stream: expected version 0 of __cuda_stream__, got version %ld", version);
    } else {
        failed = handle_from_int(number, handle);
    }
    Py_DECREF(answer);
    return failed;
}

static int given_stream(PyObject *stream, uintptr_t *handle)
{
    if (PyLong_Check(stream) && !PyBool_Check(stream)) return handle_from_int(stream, handle);

    PyObject *method = PyObject_GetAttr(stream, cached.cuda_stream);
    if (!method) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        PyObject *type = type_name(stream);
        if (type)
            PyErr_Format(PyExc_TypeError,
                         "stream: expected an int (a cudaStream_t) or an object with "
                         "__cuda_stream__, got %U",
                         type);
        Py_XDECREF(type);
        return -1;
    }
    int failed = handle_from_protocol(method, handle);
    Py_DECREF(method);
    return failed;
}

/* The stream on which the framework of `import` works now; legacy where it has no notion of one. */
static int current_stream(const struct smla_import *import, uintptr_t *handle)
{
    const struct smla_device *device = &import->tensor.device;
    struct kind kind;
    *handle = 0;
    if (import->framework != PYTORCH && import->framework != CUPY) return 0;
    if (classify(import->object, import->tensor.name, &kind)) return -1;
    if (kind.api) {
        void *current = NULL;
        if (kind.api->current_work_stream(kDLCUDA, device->id, &current)) return -1;
        *handle = (uintptr_t)current;
        return 0;
    }
    const char *hook = import->framework == PYTORCH ? "torch_stream" : "cupy_stream";
    PyObject *number = call_hook(hook, "(i)", (int)device->id);
    if (!number) return -1;
    int failed = handle_from_int(number, handle);
    Py_DECREF(number);
    return failed;
}

int smla_stream(PyObject *stream, const struct smla_import *like, struct smla_gpu_streams *streams)
{
    bool given = stream && stream != Py_None;
    *streams = (struct smla_gpu_streams){.given = given, .join = !given};
    if (like->tensor.device.type == SMLA_CUDA) {
        if (current_stream(like, &streams->current)) return -1;
        streams->launch = streams->current;
        if (given && given_stream(stream, &streams->launch)) return -1;
        bool allocates = like->framework == PYTORCH || like->framework == CUPY;
        streams->pooled = !allocates || streams->launch != streams->current;
        streams->wait = like->framework == JAX;
        return 0;
    }
    if (!given) return 0;
    PyErr_Format(PyExc_ValueError,
                 "stream: expected None, since the tensors are on the CPU, got %R", stream);
    return -1;
}

static void add_stream(struct smla_gpu_streams *streams, uintptr_t stream)
{
    bool known = stream == streams->launch;
    for (int32_t i = 0; i < streams->count; i++) known |= stream == streams->others[i];
    if (!known) streams->others[streams->count++] = stream;
}

int smla_order(struct smla_gpu_streams *streams, const struct smla_import *like,
               const struct smla_import *imports, int count)
{
    _Static_assert(sizeof streams->others / sizeof *streams->others >= JAX, "one a framework");
    if (like->tensor.device.type != SMLA_CUDA) return 0;
    for (int i = 0; i < count; i++) {
        const struct smla_import *import = &imports[i];
        if (!import->object || import->tensor.device.type != SMLA_CUDA) continue;
        if (import->framework == JAX) {
            streams->wait = true;
        } else if (import->framework == UNKNOWN) {
            add_stream(streams, 0);
        } else if (import->framework != like->framework && !streams->given) {
            uintptr_t current;
            if (current_stream(import, &current)) return -1;
            add_stream(streams, current);
        }
    }
    return 0;
}

void smla_order_memory(struct smla_gpu_streams *streams)
{
    if (!streams->given) return;
    add_stream(streams, streams->current);
    streams->join = true;
}
