/* The extension `_core`: the method table and the calls people make. Each call runs top to bottom:
 * arguments, tensors (exchange.c), one checked struct (problem.c), a plan (plan.c), the kernel. */
#include <Python.h>

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "build_config.h"
#include "cpu/cpu.h"
#include "docs.h"
#include "exchange.h"
#include "fault.h"
#include "format.h"
#include "gpu/gpu.h"
#include "plan.h"
#include "problem.h"

/* -------------------------------------------------------------------------- parameters */

/* Every parameter name of every function; NAMES has the same order. */
enum parameter {
    P_Q,
    P_KV_CACHE,
    P_INDICES,
    P_SOFTMAX_SCALE,
    P_CACHE_FORMAT,
    P_HEAD_DIM_V,
    P_BLOCK_TABLE,
    P_REQUEST_IDS,
    P_SEQ_LENS,
    P_QUERY_POSITIONS,
    P_SHARD,
    P_MAX_SEQ_LEN,
    P_TOPK_LENS,
    P_ATTN_SINK,
    P_LOGIT_CAP,
    P_CACHE_SCALE,
    P_EXTRA_KV_CACHE,
    P_EXTRA_INDICES,
    P_EXTRA_TOPK_LENS,
    P_EXTRA_CACHE_FORMAT,
    P_EXTRA_CACHE_SCALE,
    P_EXTRA_BLOCK_TABLE,
    P_EXTRA_SEQ_LENS,
    P_OUT,
    P_LSE,
    P_MAX_LOGITS,
    P_VALIDATE,
    P_BATCH_INVARIANT,
    P_STREAM,
    P_OUTS,
    P_LSES,
    P_ROWS,
    P_BLOCK_SIZE,
    P_SLOTS,
    P_LATENT,
    P_ROPE,
    P_BATCH,
    P_S_Q,
    P_HEADS,
    P_TOPK,
    P_D_QK,
    P_D_V,
    P_DTYPE,
    P_EXTRA_TOPK,
    P_DEVICE,
    P_KERNEL,
    PARAMETERS,
};

static const char *const NAMES[PARAMETERS] = {
    "q",
    "kv_cache",
    "indices",
    "softmax_scale",
    "cache_format",
    "head_dim_v",
    "block_table",
    "request_ids",
    "seq_lens",
    "query_positions",
    "shard",
    "max_seq_len",
    "topk_lens",
    "attn_sink",
    "logit_cap",
    "cache_scale",
    "extra_kv_cache",
    "extra_indices",
    "extra_topk_lens",
    "extra_cache_format",
    "extra_cache_scale",
    "extra_block_table",
    "extra_seq_lens",
    "out",
    "lse",
    "max_logits",
    "validate",
    "batch_invariant",
    "stream",
    "outs",
    "lses",
    "rows",
    "block_size",
    "slots",
    "latent",
    "rope",
    "batch",
    "s_q",
    "heads",
    "topk",
    "d_qk",
    "d_v",
    "dtype",
    "extra_topk",
    "device",
    "kernel",
};

/* The parameters of one function: the first `positional` may be given by position, the first
 * `required` of `parameters` must be given. */
struct signature {
    const char *function;
    int positional;
    int required;
    int count;
    unsigned char parameters[32];
};

static struct {
    PyObject *names[PARAMETERS]; /* interned */
    PyObject *real;              /* numbers.Real */
    PyObject *integral;          /* numbers.Integral */
    PyObject *index_fault;
    PyObject *cuda_error;
    PyObject *unsupported_error;
} state;

static int find_parameter(const struct signature *signature, PyObject *name)
{
    for (int i = 0; i < signature->count; i++)
        if (state.names[signature->parameters[i]] == name) return signature->parameters[i];
    for (int i = 0; i < signature->count; i++) /* a name that was not interned */
        if (PyUnicode_CompareWithASCIIString(name, NAMES[signature->parameters[i]]) == 0)
            return signature->parameters[i];
    return -1;
}

/* Sorts a call's arguments into `given` (borrowed; NULL: not given). */
static int parse(const struct signature *signature, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames, PyObject *given[PARAMETERS])
{
    memset(given, 0, sizeof *given * PARAMETERS);
    if (nargs > signature->positional) {
        PyErr_Format(PyExc_TypeError, "%s() takes %d positional arguments but %zd were given",
                     signature->function, signature->positional, nargs);
        return -1;
    }
    for (Py_ssize_t i = 0; i < nargs; i++) given[signature->parameters[i]] = args[i];
    Py_ssize_t keywords = kwnames ? PyTuple_Size(kwnames) : 0;
    for (Py_ssize_t i = 0; i < keywords; i++) {
        PyObject *name = PyTuple_GetItem(kwnames, i);
        int parameter = find_parameter(signature, name);
        if (parameter < 0) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument '%U'",
                         signature->function, name);
            return -1;
        }
        if (given[parameter]) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%s'",
                         signature->function, NAMES[parameter]);
            return -1;
        }
        given[parameter] = args[nargs + i];
    }
    for (int i = 0; i < signature->required; i++) {
        int parameter = signature->parameters[i];
        if (!given[parameter]) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s'",
                         signature->function, NAMES[parameter]);
            return -1;
        }
    }
    return 0;
}

static bool is_given(PyObject *object)
{
    return object && object != Py_None;
}

static int wrong_type(enum parameter parameter, const char *expected, PyObject *object)
{
    PyObject *type = PyType_GetName(Py_TYPE(object));
    if (type)
        PyErr_Format(PyExc_TypeError, "%s: expected %s, got %U", NAMES[parameter], expected, type);
    Py_XDECREF(type);
    return -1;
}

/* Whether `object` is an instance of numbers.Real or numbers.Integral; a tensor is neither, and
 * reading one would synchronise. */
static int is_number(PyObject *object, PyObject *kind)
{
    if (PyBool_Check(object)) return 0;
    if (PyLong_Check(object) || (kind == state.real && PyFloat_Check(object))) return 1;
    return PyObject_IsInstance(object, kind);
}

static int get_number(PyObject *const *given, enum parameter parameter, struct smla_number *number)
{
    PyObject *object = given[parameter];
    if (!is_given(object)) return 0;
    int fits = is_number(object, state.real);
    if (fits < 0) return -1;
    if (!fits) return wrong_type(parameter, "a number", object);
    number->value = PyFloat_AsDouble(object);
    number->given = true;
    return number->value == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int as_int(PyObject *object, enum parameter parameter, int64_t *value)
{
    int fits = is_number(object, state.integral);
    if (fits < 0) return -1;
    if (!fits) return wrong_type(parameter, "an int", object);
    PyObject *integer = PyNumber_Index(object);
    if (!integer) return -1;
    *value = PyLong_AsLongLong(integer);
    Py_DECREF(integer);
    if (*value != -1 || !PyErr_Occurred()) return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s: expected an int of 64 bits, got %R", NAMES[parameter],
                 object);
    return -1;
}

static int get_int(PyObject *const *given, enum parameter parameter, int64_t *value, bool *has)
{
    if (!is_given(given[parameter])) return 0;
    if (has) *has = true;
    return as_int(given[parameter], parameter, value);
}

/* Like get_int for a size that the core keeps in 32 bits. */
static int get_size(PyObject *const *given, enum parameter parameter, int64_t least, int32_t *value)
{
    int64_t wide = *value;
    if (get_int(given, parameter, &wide, NULL) < 0) return -1;
    if (wide < least || wide > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: expected %lld to %d, got %lld", NAMES[parameter],
                     (long long)least, INT32_MAX, (long long)wide);
        return -1;
    }
    *value = (int32_t)wide;
    return 0;
}

static int get_bool(PyObject *const *given, enum parameter parameter, bool *value)
{
    PyObject *object = given[parameter];
    if (!object) return 0;
    if (!PyBool_Check(object)) return wrong_type(parameter, "True or False", object);
    *value = object == Py_True;
    return 0;
}

/* The text lives as long as the caller's object. */
static int get_text(PyObject *const *given, enum parameter parameter, const char **text)
{
    PyObject *object = given[parameter];
    if (!is_given(object)) return 0;
    if (!PyUnicode_Check(object)) return wrong_type(parameter, "a str", object);
    *text = PyUnicode_AsUTF8AndSize(object, NULL);
    return *text ? 0 : -1;
}

static int get_shard(PyObject *const *given, struct smla_attend_args *args)
{
    PyObject *object = given[P_SHARD];
    int64_t *const fields[] = {&args->shard.rank, &args->shard.size, &args->shard.interleave};
    if (!is_given(object)) return 0;
    if (!PyTuple_Check(object) && !PyList_Check(object))
        return wrong_type(P_SHARD, "(rank, size, interleave)", object);
    if (PySequence_Size(object) != 3) {
        PyErr_Format(PyExc_ValueError, "shard: expected (rank, size, interleave), got %R", object);
        return -1;
    }
    for (Py_ssize_t i = 0; i < 3; i++) {
        PyObject *item = PySequence_GetItem(object, i);
        int failed = !item || as_int(item, P_SHARD, fields[i]) < 0;
        Py_XDECREF(item);
        if (failed) return -1;
    }
    args->has_shard = true;
    return 0;
}

static int get_validate(PyObject *const *given, enum smla_validate *validate)
{
    static const char *const MODES[] = {"deferred", "raise", "record", "mask"};
    const char *text = MODES[0];
    if (get_text(given, P_VALIDATE, &text) < 0) return -1;
    for (int i = 0; i < 4; i++) {
        if (strcmp(text, MODES[i]) == 0) {
            *validate = (enum smla_validate)i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError,
                 "validate: expected 'deferred', 'raise', 'record' or 'mask', got '%s'", text);
    return -1;
}

/* 'cpu', 'cuda', 'cuda:1' or an object that prints so; absent: *any is set. */
static int get_device(PyObject *const *given, struct smla_device *device, bool *any)
{
    PyObject *object = given[P_DEVICE];
    *any = !is_given(object);
    *device = (struct smla_device){SMLA_CPU, 0};
    if (*any) return 0;
    PyObject *string = PyObject_Str(object);
    if (!string) return -1;
    const char *text = PyUnicode_AsUTF8AndSize(string, NULL);
    int id = 0, end = 0;
    bool valid = text != NULL;
    if (valid && strcmp(text, "cpu") != 0) {
        device->type = SMLA_CUDA;
        valid = strcmp(text, "cuda") == 0 ||
                (sscanf(text, "cuda:%d%n", &id, &end) == 1 && !text[end] && id >= 0);
        device->id = id;
    }
    if (!valid && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "device: expected 'cpu', 'cuda' or 'cuda:N', got '%s'",
                     text);
    Py_DECREF(string);
    return valid ? 0 : -1;
}

/* -------------------------------------------------------------------------- errors */

static PyObject *raise_error(const struct smla_error *error)
{
    PyObject *type = PyExc_ValueError, *exception;
    switch (error->status) {
    case SMLA_ERROR_TYPE: type = PyExc_TypeError; break;
    case SMLA_ERROR_BUFFER: type = PyExc_BufferError; break;
    case SMLA_ERROR_MEMORY: type = PyExc_MemoryError; break;
    case SMLA_ERROR_UNSUPPORTED: type = state.unsupported_error; break;
    case SMLA_ERROR_CUDA:
        exception = PyObject_CallFunction(state.cuda_error, "s", error->text);
        PyObject *code = PyLong_FromLong(error->code);
        if (exception && code && PyObject_SetAttrString(exception, "code", code) == 0)
            PyErr_SetObject(state.cuda_error, exception);
        Py_XDECREF(code);
        Py_XDECREF(exception);
        return NULL;
    default: break;
    }
    PyErr_SetString(type, error->text);
    return NULL;
}

static PyObject *device_text(struct smla_device device)
{
    return device.type == SMLA_CPU ? PyUnicode_FromString("cpu")
                                   : PyUnicode_FromFormat("cuda:%d", device.id);
}

/* Sets an attribute and steals `value`; false where either has failed. */
static bool set_attribute(PyObject *object, const char *name, PyObject *value)
{
    bool done = value && PyObject_SetAttrString(object, name, value) == 0;
    Py_XDECREF(value);
    return done;
}

/* A new IndexFault, or NULL with an exception. */
static PyObject *index_fault(const struct smla_fault_report *report)
{
    PyObject *fault = PyObject_CallFunction(state.index_fault, "s", report->text);
    PyObject *position = PyTuple_New(report->ndim);
    if (!fault || !position) goto fail;
    for (int32_t i = 0; i < report->ndim; i++) {
        PyObject *item = PyLong_FromLongLong(report->position[i]);
        if (!item || PyTuple_SetItem(position, i, item) < 0) goto fail;
    }
    Py_INCREF(position);
    if (set_attribute(fault, "position", position) &&
        set_attribute(fault, "tensor", PyUnicode_FromString(report->tensor)) &&
        set_attribute(fault, "value", PyLong_FromLongLong(report->value)) &&
        set_attribute(fault, "bound", PyLong_FromLongLong(report->bound)) &&
        set_attribute(fault, "count", PyLong_FromLongLong(report->count)) &&
        set_attribute(fault, "exact", PyBool_FromLong(report->exact)) &&
        set_attribute(fault, "device", device_text(report->device))) {
        Py_DECREF(position);
        return fault;
    }
fail:
    Py_XDECREF(position);
    Py_XDECREF(fault);
    return NULL;
}

static PyObject *raise_fault(const struct smla_fault_report *report)
{
    PyObject *fault = index_fault(report);
    if (fault) PyErr_SetObject(state.index_fault, fault);
    Py_XDECREF(fault);
    return NULL;
}

/* What a plan has to know of a device: 0, or -1 with an exception. */
static int get_target(struct smla_device device, struct smla_target *target)
{
    const struct smla_gpu_device *info;
    struct smla_error error;
    *target = (struct smla_target){.device = device};
    if (device.type == SMLA_CPU) return 0;
    if (smla_gpu_info(device.id, &info, &error) != SMLA_OK) {
        raise_error(&error);
        return -1;
    }
    target->multiprocessors = info->multiprocessors;
    target->shared_bytes = info->shared_bytes;
    target->sm90 = info->sm90;
    return 0;
}

/* -------------------------------------------------------------------------- attend */

/* The arguments of attend and resolve that are tensors, and where they go. q stands apart. */
static const struct {
    enum parameter parameter;
    size_t offset;
} TENSORS[] = {
    {P_KV_CACHE, offsetof(struct smla_attend_args, source[0].kv_cache)},
    {P_INDICES, offsetof(struct smla_attend_args, source[0].indices)},
    {P_TOPK_LENS, offsetof(struct smla_attend_args, source[0].topk_lens)},
    {P_BLOCK_TABLE, offsetof(struct smla_attend_args, source[0].block_table)},
    {P_SEQ_LENS, offsetof(struct smla_attend_args, source[0].seq_lens)},
    {P_EXTRA_KV_CACHE, offsetof(struct smla_attend_args, source[1].kv_cache)},
    {P_EXTRA_INDICES, offsetof(struct smla_attend_args, source[1].indices)},
    {P_EXTRA_TOPK_LENS, offsetof(struct smla_attend_args, source[1].topk_lens)},
    {P_EXTRA_BLOCK_TABLE, offsetof(struct smla_attend_args, source[1].block_table)},
    {P_EXTRA_SEQ_LENS, offsetof(struct smla_attend_args, source[1].seq_lens)},
    {P_REQUEST_IDS, offsetof(struct smla_attend_args, request_ids)},
    {P_QUERY_POSITIONS, offsetof(struct smla_attend_args, query_positions)},
    {P_ATTN_SINK, offsetof(struct smla_attend_args, attn_sink)},
    {P_OUT, offsetof(struct smla_attend_args, out)},
    {P_LSE, offsetof(struct smla_attend_args, lse)},
    {P_MAX_LOGITS, offsetof(struct smla_attend_args, max_logits)},
};
enum { TENSOR_COUNT = sizeof TENSORS / sizeof *TENSORS };

/* Everything that one call of attend or resolve holds. */
struct attend_call {
    struct smla_import q[2];
    struct smla_import tensors[TENSOR_COUNT];
    struct smla_attend_args args;
};

static void release_call(struct attend_call *call)
{
    for (int i = 0; i < 2; i++) smla_release(&call->q[i]);
    for (int i = 0; i < TENSOR_COUNT; i++) smla_release(&call->tensors[i]);
}

/* q is a tensor or a pair of the latent and the rope part. */
static int import_query(PyObject *q, struct attend_call *call)
{
    static const char *const PARTS[] = {"q[0]", "q[1]"};
    struct smla_tensor *const places[] = {&call->args.q, &call->args.q_rope};
    if (q == Py_None) return wrong_type(P_Q, "a tensor or a pair of tensors", q);
    bool pair = PyTuple_Check(q) || PyList_Check(q);
    if (!pair) {
        if (smla_import(q, "q", &call->q[0]) < 0) return -1;
        call->args.q = call->q[0].tensor;
        return 0;
    }
    if (PySequence_Size(q) != 2) {
        PyErr_Format(PyExc_ValueError, "q: expected a tensor or a pair (q_latent, q_rope), got %zd",
                     PySequence_Size(q));
        return -1;
    }
    for (Py_ssize_t i = 0; i < 2; i++) {
        PyObject *part = PySequence_GetItem(q, i);
        int failed = !part || smla_import(part, PARTS[i], &call->q[i]) < 0;
        if (!failed && !smla_given(&call->q[i].tensor))
            failed = wrong_type(P_Q, "two tensors", part);
        Py_XDECREF(part);
        if (failed) return -1;
        *places[i] = call->q[i].tensor;
    }
    return 0;
}

/* The tensors and scalars that attend and resolve share. */
static int import_call(PyObject *const *given, struct attend_call *call)
{
    struct smla_attend_args *args = &call->args;
    for (int i = 0; i < TENSOR_COUNT; i++) {
        enum parameter parameter = TENSORS[i].parameter;
        struct smla_tensor *place = (struct smla_tensor *)((char *)args + TENSORS[i].offset);
        place->name = NAMES[parameter];
        if (!is_given(given[parameter])) continue;
        if (smla_import(given[parameter], NAMES[parameter], &call->tensors[i]) < 0) return -1;
        *place = call->tensors[i].tensor;
    }
    if (!smla_given(&args->source[0].kv_cache)) return wrong_type(P_KV_CACHE, "a tensor", Py_None);
    if (get_text(given, P_CACHE_FORMAT, &args->source[0].cache_format) < 0 ||
        get_text(given, P_EXTRA_CACHE_FORMAT, &args->source[1].cache_format) < 0 ||
        get_int(given, P_MAX_SEQ_LEN, &args->max_seq_len, &args->has_max_seq_len) < 0)
        return -1;
    return get_shard(given, args);
}

/* Makes the outputs that were not given. The objects are new references also where they are the
 * caller's; on failure both are NULL. */
static int make_outputs(PyObject *const *given, struct attend_call *call, struct smla_attend *work,
                        struct smla_import made[2], PyObject *results[2])
{
    int64_t shape[SMLA_MAX_NDIM];
    struct smla_output *const outputs[] = {&work->out, &work->lse};
    for (int i = 0; i < 2; i++) {
        enum parameter parameter = i ? P_LSE : P_OUT;
        if (is_given(given[parameter])) {
            results[i] = Py_NewRef(given[parameter]);
            continue;
        }
        int32_t ndim = smla_output_shape(&call->args.q, work->heads, i ? 0 : work->d_v, shape);
        results[i] = smla_empty(&call->q[0], NAMES[parameter],
                                i ? SMLA_FLOAT32 : call->args.q.dtype, ndim, shape, &made[i]);
        if (!results[i]) return -1;
        smla_set_output(outputs[i], &made[i].tensor, i == 0);
    }
    return 0;
}

/* A fault stops "deferred" and "raise" before the first write; on the CPU both are known at once.
 * `report->count` is not 0 where one is to be raised. */
static enum smla_status run_cpu(const struct smla_attend *work, const struct smla_plan *plan,
                                enum smla_validate validate, struct smla_device device,
                                struct smla_fault_report *report, struct smla_error *error)
{
    struct smla_fault fault = {.cause = SMLA_VALID};
    if (validate != SMLA_VALIDATE_MASK) smla_cpu_check(work, &fault);
    if (fault.cause != SMLA_VALID) {
        smla_fault_describe(&fault, true, device, report);
        if (validate != SMLA_VALIDATE_RECORD) return SMLA_OK;
        smla_fault_record(report);
        report->count = 0;
    }
    return smla_cpu_attend(work, plan, error);
}

/* What has to be raised before a launch: a fault that an earlier launch has left, or, under
 * "raise", one of this call. Nothing is raised while the stream is captured. */
static enum smla_status check_gpu(const struct smla_attend *work, enum smla_validate validate,
                                  struct smla_device device, uintptr_t stream,
                                  struct smla_fault_report *report, struct smla_error *error)
{
    struct smla_fault fault;
    bool capturing = false;
    if (validate == SMLA_VALIDATE_RECORD || validate == SMLA_VALIDATE_MASK) return SMLA_OK;
    if (validate == SMLA_VALIDATE_RAISE || smla_gpu_has_fault(device.id, SMLA_GPU_DEFERRED))
        SMLA_TRY(smla_gpu_capturing(device.id, stream, &capturing, error));
    SMLA_FAIL_IF(capturing && validate == SMLA_VALIDATE_RAISE, error, SMLA_ERROR_VALUE,
                 "validate: 'raise' waits for the GPU, which a capture does not allow; expected "
                 "'deferred', 'record' or 'mask'");
    if (!capturing && smla_gpu_take_fault(device.id, SMLA_GPU_DEFERRED, &fault)) {
        smla_fault_describe(&fault, false, device, report);
        return SMLA_OK;
    }
    if (validate == SMLA_VALIDATE_RAISE) {
        SMLA_TRY(smla_gpu_check(work, device.id, stream, &fault, error));
        if (fault.cause != SMLA_VALID) smla_fault_describe(&fault, true, device, report);
    }
    return SMLA_OK;
}

/* The end of a call on a GPU: whoever has to waits for it. */
static enum smla_status join_streams(const struct smla_gpu_streams *streams, int32_t device,
                                     struct smla_error *error)
{
    enum smla_status status;
    if (!streams->wait) return smla_gpu_join(streams, device, error);
    Py_BEGIN_ALLOW_THREADS
    status = smla_gpu_join(streams, device, error);
    Py_END_ALLOW_THREADS
    return status;
}

/* The launches, with a workspace of q's framework or, on a stream that it does not know, of the
 * driver. Returns -1 where the framework has none and has set an exception. */
static int launch_attend(const struct smla_attend *work, const struct smla_plan *plan,
                         enum smla_gpu_record record, const struct smla_import *q,
                         const struct smla_gpu_streams *streams, enum smla_status *status,
                         struct smla_error *error)
{
    const int32_t device = q->tensor.device.id;
    const int64_t bytes = plan->workspace_bytes, floats = bytes / 4;
    struct smla_import taken = {0};
    void *workspace = NULL;
    PyObject *memory = NULL;
    *status = SMLA_OK;
    if (bytes && streams->pooled) {
        *status = smla_gpu_borrow(bytes, device, streams->launch, &workspace, error);
    } else if (bytes) {
        memory = smla_empty(q, "workspace", SMLA_FLOAT32, 1, &floats, &taken);
        if (!memory) return -1;
        workspace = taken.tensor.data;
    }
    if (*status == SMLA_OK)
        *status = smla_gpu_attend(work, plan, device, streams->launch, workspace, record, error);
    if (workspace && streams->pooled) {
        struct smla_error late;
        if (smla_gpu_return(workspace, device, streams->launch, &late) != SMLA_OK &&
            *status == SMLA_OK) {
            *status = late.status;
            *error = late;
        }
    }
    smla_release(&taken);
    Py_XDECREF(memory);
    return 0;
}

/* Runs a planned call. Returns 0, or -1 with an exception. */
static int run(struct smla_attend *work, const struct smla_plan *plan, enum smla_validate validate,
               const struct smla_import *q, struct smla_gpu_streams *streams)
{
    const struct smla_device device = q->tensor.device;
    struct smla_fault_report report = {.count = 0};
    struct smla_error error;
    enum smla_status status;
    if (device.type == SMLA_CPU) {
        Py_BEGIN_ALLOW_THREADS
        status = run_cpu(work, plan, validate, device, &report, &error);
        Py_END_ALLOW_THREADS
    } else {
        status = smla_gpu_fork(streams, device.id, &error);
        if (status == SMLA_OK)
            status = check_gpu(work, validate, device, streams->launch, &report, &error);
        if (status == SMLA_OK && report.count == 0) {
            work->record = validate != SMLA_VALIDATE_MASK;
            if (launch_attend(work, plan,
                              validate == SMLA_VALIDATE_RECORD ? SMLA_GPU_RECORDED
                                                               : SMLA_GPU_DEFERRED,
                              q, streams, &status, &error) < 0)
                return -1;
            if (status == SMLA_OK) status = join_streams(streams, device.id, &error);
        }
    }
    if (status != SMLA_OK)
        raise_error(&error);
    else if (report.count)
        raise_fault(&report);
    return status != SMLA_OK || report.count ? -1 : 0;
}

/* `empty_lse` is what a row without valid entries gets. */
static PyObject *call_attend(PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                             float empty_lse)
{
    static const struct signature SIGNATURE = {"attend",
                                               3,
                                               4,
                                               29,
                                               {P_Q,
                                                P_KV_CACHE,
                                                P_INDICES,
                                                P_SOFTMAX_SCALE,
                                                P_CACHE_FORMAT,
                                                P_HEAD_DIM_V,
                                                P_BLOCK_TABLE,
                                                P_REQUEST_IDS,
                                                P_SEQ_LENS,
                                                P_QUERY_POSITIONS,
                                                P_SHARD,
                                                P_MAX_SEQ_LEN,
                                                P_TOPK_LENS,
                                                P_ATTN_SINK,
                                                P_LOGIT_CAP,
                                                P_CACHE_SCALE,
                                                P_EXTRA_KV_CACHE,
                                                P_EXTRA_INDICES,
                                                P_EXTRA_TOPK_LENS,
                                                P_EXTRA_CACHE_FORMAT,
                                                P_EXTRA_CACHE_SCALE,
                                                P_EXTRA_BLOCK_TABLE,
                                                P_EXTRA_SEQ_LENS,
                                                P_OUT,
                                                P_LSE,
                                                P_MAX_LOGITS,
                                                P_VALIDATE,
                                                P_BATCH_INVARIANT,
                                                P_STREAM}};
    PyObject *given[PARAMETERS], *results[2] = {NULL, NULL}, *pair = NULL;
    struct attend_call call;
    struct smla_import made[2];
    struct smla_attend work;
    struct smla_target target;
    struct smla_plan plan;
    struct smla_error error;
    enum smla_validate validate;
    struct smla_gpu_streams streams;
    if (parse(&SIGNATURE, args, nargs, kwnames, given) < 0) return NULL;
    memset(&call, 0, sizeof call);
    memset(made, 0, sizeof made);

    if (import_query(given[P_Q], &call) < 0 || import_call(given, &call) < 0 ||
        get_number(given, P_SOFTMAX_SCALE, &call.args.softmax_scale) < 0 ||
        get_number(given, P_LOGIT_CAP, &call.args.logit_cap) < 0 ||
        get_number(given, P_CACHE_SCALE, &call.args.source[0].cache_scale) < 0 ||
        get_number(given, P_EXTRA_CACHE_SCALE, &call.args.source[1].cache_scale) < 0 ||
        get_int(given, P_HEAD_DIM_V, &call.args.head_dim_v, &call.args.has_head_dim_v) < 0 ||
        get_bool(given, P_BATCH_INVARIANT, &call.args.batch_invariant) < 0 ||
        get_validate(given, &validate) < 0 ||
        smla_stream(given[P_STREAM], &call.q[0], &streams) < 0 ||
        smla_order(&streams, &call.q[0], &call.q[1], 1) < 0 ||
        smla_order(&streams, &call.q[0], call.tensors, TENSOR_COUNT) < 0)
        goto done;
    if (smla_problem_attend(&call.args, &work, &error) != SMLA_OK) {
        raise_error(&error);
        goto done;
    }
    work.empty_lse = empty_lse;
    if (get_target(call.args.q.device, &target) < 0) goto done;
    if (smla_plan_attend(&work, &target, getenv("SPARSE_MLA_KERNEL"), &plan, &error) != SMLA_OK) {
        raise_error(&error);
        goto done;
    }
    if (make_outputs(given, &call, &work, made, results) < 0) goto done;
    if (made[0].object || made[1].object) smla_order_memory(&streams);
    if (run(&work, &plan, validate, &call.q[0], &streams) < 0) goto done;
    for (int i = 0; i < 2; i++) {
        if (!made[i].object) continue;
        results[i] = smla_finish(&call.q[0], results[i]);
        if (!results[i]) goto done;
    }
    pair = PyTuple_Pack(2, results[0], results[1]);
done:
    release_call(&call);
    for (int i = 0; i < 2; i++) {
        smla_release(&made[i]);
        Py_XDECREF(results[i]);
    }
    return pair;
}

static PyObject *attend(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
    (void)module;
    return call_attend(args, nargs, kwnames, -INFINITY);
}

static PyObject *attend_for_flash_mla(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                                      PyObject *kwnames)
{
    (void)module;
    return call_attend(args, nargs, kwnames, INFINITY);
}

/* -------------------------------------------------------------------------- resolve */

/* An int64 NumPy array of the rows' shape + (entries of a row,). */
static PyObject *empty_slots(const struct smla_attend *work, int which, int32_t row_ndim)
{
    const long long batch = work->batch, s_q = work->s_q, topk = work->source[which].topk;
    PyObject *numpy = PyImport_ImportModule("numpy"), *array = NULL;
    if (!numpy) return NULL;
    PyObject *shape = row_ndim == 2 ? Py_BuildValue("(LLL)", batch, s_q, topk)
                                    : Py_BuildValue("(LL)", batch, topk);
    if (shape) array = PyObject_CallMethod(numpy, "empty", "Os", shape, "int64");
    Py_XDECREF(shape);
    Py_DECREF(numpy);
    return array;
}

/* The slots of one source as a NumPy array, wherever the arrays live. */
static PyObject *resolve_source(const struct smla_attend *work, int which, int32_t row_ndim,
                                const struct attend_call *call,
                                const struct smla_gpu_streams *streams)
{
    const struct smla_import *cache = &call->tensors[0];
    const struct smla_device device = cache->tensor.device;
    const int64_t count = work->batch * work->s_q * work->source[which].topk;
    struct smla_import slots = {0}, scratch = {0};
    struct smla_error error;
    enum smla_status status = SMLA_OK;
    PyObject *memory = NULL;
    PyObject *array = empty_slots(work, which, row_ndim);
    if (!array || smla_import(array, "slots", &slots) < 0) goto fail;
    if (device.type == SMLA_CUDA) {
        memory = smla_empty(cache, "slots", SMLA_INT64, 1, &count, &scratch);
        if (!memory) goto fail;
    }
    Py_BEGIN_ALLOW_THREADS
    if (memory)
        status = smla_gpu_resolve(work, which, device.id, streams->launch, scratch.tensor.data,
                                  slots.tensor.data, &error);
    else
        smla_cpu_resolve(work, which, slots.tensor.data);
    Py_END_ALLOW_THREADS
    if (status == SMLA_OK) goto done;
    raise_error(&error);
fail:
    Py_CLEAR(array);
done:
    smla_release(&slots);
    smla_release(&scratch);
    Py_XDECREF(memory);
    return array;
}

static PyObject *resolve(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
    static const struct signature SIGNATURE = {
        "resolve",
        2,
        2,
        16,
        {P_KV_CACHE, P_INDICES, P_CACHE_FORMAT, P_BLOCK_TABLE, P_REQUEST_IDS, P_SEQ_LENS,
         P_QUERY_POSITIONS, P_SHARD, P_MAX_SEQ_LEN, P_TOPK_LENS, P_EXTRA_KV_CACHE, P_EXTRA_INDICES,
         P_EXTRA_TOPK_LENS, P_EXTRA_CACHE_FORMAT, P_EXTRA_BLOCK_TABLE, P_EXTRA_SEQ_LENS}};
    (void)module;
    PyObject *given[PARAMETERS], *result = NULL;
    struct attend_call call;
    struct smla_attend work;
    struct smla_gpu_streams streams;
    struct smla_error error;
    int32_t row_ndim;
    if (parse(&SIGNATURE, args, nargs, kwnames, given) < 0) return NULL;
    memset(&call, 0, sizeof call);
    if (import_call(given, &call) < 0) goto done;
    if (smla_problem_check(&call.args, &work, &row_ndim, &error) != SMLA_OK) {
        raise_error(&error);
        goto done;
    }
    if (smla_stream(NULL, &call.tensors[0], &streams) < 0 ||
        smla_order(&streams, &call.tensors[0], call.tensors, TENSOR_COUNT) < 0)
        goto done;
    if (smla_gpu_fork(&streams, call.tensors[0].tensor.device.id, &error) != SMLA_OK) {
        raise_error(&error);
        goto done;
    }
    result = PyTuple_New(work.sources);
    for (int i = 0; result && i < work.sources; i++) {
        PyObject *slots = resolve_source(&work, i, row_ndim, &call, &streams);
        if (!slots || PyTuple_SetItem(result, i, slots) < 0) Py_CLEAR(result);
    }
done:
    release_call(&call);
    return result;
}

/* -------------------------------------------------------------------------- merge */

/* The tensors of a list or tuple; returns how many, or -1 with an exception. */
static Py_ssize_t import_parts(PyObject *list, enum parameter parameter,
                               struct smla_import imports[SMLA_MERGE_PARTS])
{
    if (!PyTuple_Check(list) && !PyList_Check(list))
        return wrong_type(parameter, "a list or tuple of tensors", list);
    Py_ssize_t count = PySequence_Size(list);
    if (count < 1 || count > SMLA_MERGE_PARTS) {
        PyErr_Format(PyExc_ValueError, "%s: expected 1 to %d tensors, got %zd", NAMES[parameter],
                     SMLA_MERGE_PARTS, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        int failed = !item || smla_import(item, NAMES[parameter], &imports[i]) < 0;
        if (!failed && item == Py_None) failed = wrong_type(parameter, "tensors", item);
        Py_XDECREF(item);
        if (failed) return -1;
    }
    return count;
}

struct merge_call {
    struct smla_import outs[SMLA_MERGE_PARTS];
    struct smla_import lses[SMLA_MERGE_PARTS];
    struct smla_import rest[3]; /* attn_sink, out, lse */
    struct smla_merge_args args;
};

static int import_merge(PyObject *const *given, struct merge_call *call)
{
    struct smla_merge_args *args = &call->args;
    Py_ssize_t parts = import_parts(given[P_OUTS], P_OUTS, call->outs);
    if (parts < 0) return -1;
    Py_ssize_t lses = import_parts(given[P_LSES], P_LSES, call->lses);
    if (lses < 0) return -1;
    if (lses != parts) {
        PyErr_Format(PyExc_ValueError, "lses: expected %zd tensors as outs has, got %zd", parts,
                     lses);
        return -1;
    }
    static const enum parameter REST[] = {P_ATTN_SINK, P_OUT, P_LSE};
    struct smla_tensor *const places[] = {&args->attn_sink, &args->out, &args->lse};
    for (int i = 0; i < 3; i++) {
        PyObject *object = given[REST[i]];
        if (is_given(object) && smla_import(object, NAMES[REST[i]], &call->rest[i]) < 0) return -1;
        *places[i] = call->rest[i].tensor;
    }
    args->parts = (int32_t)parts;
    for (int32_t i = 0; i < args->parts; i++) {
        args->outs[i] = call->outs[i].tensor;
        args->lses[i] = call->lses[i].tensor;
    }
    return 0;
}

static enum smla_status run_merge(const struct smla_merge *work, struct smla_device device,
                                  struct smla_gpu_streams *streams, struct smla_error *error)
{
    enum smla_status status;
    if (device.type == SMLA_CUDA) {
        SMLA_TRY(smla_gpu_fork(streams, device.id, error));
        SMLA_TRY(smla_gpu_merge(work, device.id, streams->launch, error));
        return join_streams(streams, device.id, error);
    }
    Py_BEGIN_ALLOW_THREADS
    status = smla_cpu_merge(work, error);
    Py_END_ALLOW_THREADS
    return status;
}

static PyObject *merge(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const struct signature SIGNATURE = {
        "merge", 2, 2, 5, {P_OUTS, P_LSES, P_ATTN_SINK, P_OUT, P_LSE}};
    (void)module;
    PyObject *given[PARAMETERS], *results[2] = {NULL, NULL}, *pair = NULL;
    struct smla_import made[2];
    struct smla_merge work;
    struct smla_gpu_streams streams;
    struct smla_error error;
    if (parse(&SIGNATURE, args, nargs, kwnames, given) < 0) return NULL;
    struct merge_call *call = PyMem_Calloc(1, sizeof *call);
    if (!call) return PyErr_NoMemory();
    memset(made, 0, sizeof made);

    if (import_merge(given, call) < 0 || smla_stream(NULL, &call->outs[0], &streams) < 0 ||
        smla_order(&streams, &call->outs[0], call->outs, SMLA_MERGE_PARTS) < 0 ||
        smla_order(&streams, &call->outs[0], call->lses, SMLA_MERGE_PARTS) < 0 ||
        smla_order(&streams, &call->outs[0], call->rest, 3) < 0)
        goto done;
    const struct smla_tensor *first = &call->args.outs[0];
    if (smla_problem_merge(&call->args, &work, &error) != SMLA_OK) {
        raise_error(&error);
        goto done;
    }
    for (int i = 0; i < 2; i++) {
        enum parameter parameter = i ? P_LSE : P_OUT;
        if (is_given(given[parameter])) {
            results[i] = Py_NewRef(given[parameter]);
            continue;
        }
        results[i] = smla_empty(&call->outs[0], NAMES[parameter], i ? SMLA_FLOAT32 : first->dtype,
                                first->ndim - i, first->shape, &made[i]);
        if (!results[i]) goto done;
        smla_set_output(i ? &work.lse : &work.out, &made[i].tensor, i == 0);
    }

    if (run_merge(&work, first->device, &streams, &error) != SMLA_OK) {
        raise_error(&error);
        goto done;
    }
    for (int i = 0; i < 2; i++) {
        if (!made[i].object) continue;
        results[i] = smla_finish(&call->outs[0], results[i]);
        if (!results[i]) goto done;
    }
    pair = PyTuple_Pack(2, results[0], results[1]);
done:
    for (int i = 0; i < SMLA_MERGE_PARTS; i++) {
        smla_release(&call->outs[i]);
        smla_release(&call->lses[i]);
    }
    for (int i = 0; i < 3; i++) smla_release(&call->rest[i]);
    PyMem_Free(call);
    for (int i = 0; i < 2; i++) {
        smla_release(&made[i]);
        Py_XDECREF(results[i]);
    }
    return pair;
}

/* -------------------------------------------------------------------------- cache writers */

static enum smla_status run_append(const struct smla_append *work, struct smla_device device,
                                   struct smla_gpu_streams *streams, struct smla_error *error)
{
    enum smla_status status;
    if (device.type == SMLA_CUDA) {
        SMLA_TRY(smla_gpu_fork(streams, device.id, error));
        SMLA_TRY(smla_gpu_append(work, device.id, streams->launch, error));
        return join_streams(streams, device.id, error);
    }
    Py_BEGIN_ALLOW_THREADS
    status = smla_cpu_append(work, error);
    Py_END_ALLOW_THREADS
    return status;
}

static PyObject *append(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
    static const struct signature SIGNATURE = {
        "append",
        4,
        3,
        7,
        {P_KV_CACHE, P_SLOTS, P_LATENT, P_ROPE, P_CACHE_FORMAT, P_CACHE_SCALE, P_STREAM}};
    enum { CACHE, SLOTS, LATENT, ROPE, COUNT };
    (void)module;
    PyObject *given[PARAMETERS], *result = NULL;
    struct smla_import imports[COUNT];
    struct smla_append_args arguments;
    struct smla_append work;
    struct smla_gpu_streams streams;
    struct smla_error error;
    if (parse(&SIGNATURE, args, nargs, kwnames, given) < 0) return NULL;
    memset(imports, 0, sizeof imports);
    memset(&arguments, 0, sizeof arguments);
    const enum parameter parameters[COUNT] = {P_KV_CACHE, P_SLOTS, P_LATENT, P_ROPE};
    struct smla_tensor *const places[COUNT] = {&arguments.kv_cache, &arguments.slots,
                                               &arguments.latent, &arguments.rope};
    for (int i = 0; i < COUNT; i++) {
        PyObject *object = given[parameters[i]];
        if (i != ROPE && !is_given(object)) {
            wrong_type(parameters[i], "a tensor", object);
            goto done;
        }
        if (object && smla_import(object, NAMES[parameters[i]], &imports[i]) < 0) goto done;
        *places[i] = imports[i].tensor;
    }
    if (get_text(given, P_CACHE_FORMAT, &arguments.cache_format) < 0 ||
        get_number(given, P_CACHE_SCALE, &arguments.cache_scale) < 0 ||
        smla_stream(given[P_STREAM], &imports[CACHE], &streams) < 0 ||
        smla_order(&streams, &imports[CACHE], imports, COUNT) < 0)
        goto done;
    enum smla_status status = smla_problem_append(&arguments, &work, &error);
    if (status == SMLA_OK) status = run_append(&work, arguments.kv_cache.device, &streams, &error);
    if (status == SMLA_OK)
        result = Py_NewRef(Py_None);
    else
        raise_error(&error);
done:
    for (int i = 0; i < COUNT; i++) smla_release(&imports[i]);
    return result;
}

static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const struct signature SIGNATURE = {
        "pack", 1, 3, 4, {P_ROWS, P_CACHE_FORMAT, P_BLOCK_SIZE, P_CACHE_SCALE}};
    (void)module;
    PyObject *given[PARAMETERS], *cache = NULL;
    struct smla_import rows = {0}, made = {0};
    struct smla_append_args arguments;
    struct smla_append work;
    struct smla_gpu_streams streams;
    struct smla_error error;
    const char *name = NULL;
    int32_t block_size = 1;
    if (parse(&SIGNATURE, args, nargs, kwnames, given) < 0) return NULL;
    memset(&arguments, 0, sizeof arguments);
    if (given[P_ROWS] == Py_None) {
        wrong_type(P_ROWS, "a tensor", Py_None);
        return NULL;
    }
    if (smla_import(given[P_ROWS], "rows", &rows) < 0 ||
        get_text(given, P_CACHE_FORMAT, &name) < 0 ||
        get_size(given, P_BLOCK_SIZE, 1, &block_size) < 0 ||
        get_number(given, P_CACHE_SCALE, &arguments.cache_scale) < 0 ||
        smla_stream(NULL, &rows, &streams) < 0 || smla_order(&streams, &rows, &rows, 1) < 0)
        goto done;
    const struct smla_format_info *format = name ? smla_format_named(name) : NULL;
    if (!format) {
        PyErr_Format(PyExc_ValueError, "cache_format: expected one of %s, got '%s'",
                     smla_format_names(), name ? name : "None");
        goto done;
    }
    if (rows.tensor.ndim != 2) {
        char text[96];
        PyErr_Format(PyExc_ValueError, "rows: expected shape (n, d_qk), got %s",
                     smla_shape_text(&rows.tensor, text));
        goto done;
    }
    bool dense = format->scale == SMLA_SCALE_NONE;
    int64_t blocks = (rows.tensor.shape[0] + block_size - 1) / block_size;
    int64_t shape[] = {blocks, block_size, dense ? rows.tensor.shape[1] : format->row_bytes};
    cache = smla_empty(&rows, "kv_cache", dense ? rows.tensor.dtype : SMLA_UINT8, 3, shape, &made);
    if (!cache) goto done;
    arguments.kv_cache = made.tensor;
    arguments.latent = rows.tensor;
    arguments.cache_format = name;
    enum smla_status status = smla_problem_append(&arguments, &work, &error);
    int64_t bytes = smla_elements(&made.tensor) * smla_dtype_bytes(made.tensor.dtype);
    if (status == SMLA_OK && rows.tensor.device.type == SMLA_CUDA)
        status = smla_gpu_clear(made.tensor.data, bytes, rows.tensor.device.id, streams.launch,
                                &error);
    else if (status == SMLA_OK && bytes)
        memset(made.tensor.data, 0, (size_t)bytes);
    if (status == SMLA_OK) status = run_append(&work, rows.tensor.device, &streams, &error);
    if (status == SMLA_OK) {
        cache = smla_finish(&rows, cache);
    } else {
        raise_error(&error);
        Py_CLEAR(cache);
    }
done:
    smla_release(&rows);
    smla_release(&made);
    return cache;
}

static PyObject *unpack(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
    static const struct signature SIGNATURE = {
        "unpack", 1, 1, 3, {P_KV_CACHE, P_CACHE_FORMAT, P_CACHE_SCALE}};
    (void)module;
    PyObject *given[PARAMETERS], *rows = NULL;
    struct smla_import cache = {0}, made = {0};
    struct smla_source source;
    struct smla_number scale = {0};
    struct smla_gpu_streams streams;
    struct smla_error error;
    const char *name = NULL;
    int32_t width = 0;
    if (parse(&SIGNATURE, args, nargs, kwnames, given) < 0) return NULL;
    if (given[P_KV_CACHE] == Py_None) {
        wrong_type(P_KV_CACHE, "a tensor", Py_None);
        return NULL;
    }
    if (smla_import(given[P_KV_CACHE], "kv_cache", &cache) < 0 ||
        get_text(given, P_CACHE_FORMAT, &name) < 0 ||
        get_number(given, P_CACHE_SCALE, &scale) < 0 || smla_stream(NULL, &cache, &streams) < 0 ||
        smla_order(&streams, &cache, &cache, 1) < 0)
        goto done;
    enum smla_status status = smla_problem_cache(&cache.tensor, name, scale, &source, &width,
                                                 &error);
    if (status != SMLA_OK) {
        raise_error(&error);
        goto done;
    }
    int64_t shape[] = {source.num_blocks * source.block_size, width};
    rows = smla_empty(&cache, "rows", SMLA_FLOAT32, 2, shape, &made);
    if (!rows) goto done;
    if (cache.tensor.device.type == SMLA_CUDA) {
        const int32_t device = cache.tensor.device.id;
        status = smla_gpu_fork(&streams, device, &error);
        if (status == SMLA_OK)
            status = smla_gpu_unpack(&source, cache.tensor.dtype, width, made.tensor.data, device,
                                     streams.launch, &error);
        if (status == SMLA_OK) status = join_streams(&streams, device, &error);
    } else {
        Py_BEGIN_ALLOW_THREADS
        status = smla_cpu_unpack(&source, cache.tensor.dtype, width, made.tensor.data, &error);
        Py_END_ALLOW_THREADS
    }
    if (status == SMLA_OK) {
        rows = smla_finish(&cache, rows);
    } else {
        raise_error(&error);
        Py_CLEAR(rows);
    }
done:
    smla_release(&cache);
    smla_release(&made);
    return rows;
}

/* -------------------------------------------------------------------------- what there is */

static const char *const SCALE_NAMES[] = {
    [SMLA_SCALE_NONE] = "none",
    [SMLA_SCALE_TENSOR] = "tensor",
    [SMLA_SCALE_FLOAT32] = "float32",
};

static PyObject *cache_formats(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *formats = PyDict_New();
    for (int i = 0; formats && i < SMLA_FORMATS; i++) {
        const struct smla_format_info *format = smla_format((enum smla_format)i);
        PyObject *entry = Py_BuildValue("{s:i,s:i,s:i,s:s,s:s}", "row_bytes", format->row_bytes,
                                        "d_qk", format->d_qk, "d_v", format->d_v, "scale",
                                        SCALE_NAMES[format->scale], "layout", format->layout);
        if (!entry || PyDict_SetItemString(formats, format->name, entry) < 0) Py_CLEAR(formats);
        Py_XDECREF(entry);
    }
    return formats;
}

/* A source as shapes alone say it, for plan(). */
static int plan_source(PyObject *const *given, enum parameter topk, enum parameter cache_format,
                       struct smla_source *source)
{
    const char *name = "dense";
    int32_t entries = 0;
    if (get_size(given, topk, 0, &entries) < 0 || get_text(given, cache_format, &name) < 0)
        return -1;
    const struct smla_format_info *format = smla_format_named(name);
    if (!format) {
        PyErr_Format(PyExc_ValueError, "%s: expected one of %s, got '%s'", NAMES[cache_format],
                     smla_format_names(), name);
        return -1;
    }
    source->topk = entries;
    source->format = (int32_t)format->format;
    source->block_size = source->shard_size = source->shard_interleave = 1;
    return 0;
}

static int plan_dtype(PyObject *const *given, int32_t *dtype)
{
    const char *name = "bfloat16";
    if (get_text(given, P_DTYPE, &name) < 0) return -1;
    for (int i = SMLA_FLOAT32; i <= SMLA_BFLOAT16; i++) {
        if (strcmp(name, smla_dtype_name((enum smla_dtype)i)) == 0) {
            *dtype = i;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "dtype: expected 'bfloat16', 'float16' or 'float32', got '%s'",
                 name);
    return -1;
}

static PyObject *plan(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const struct signature SIGNATURE = {"plan",
                                               0,
                                               3,
                                               12,
                                               {P_BATCH, P_HEADS, P_TOPK, P_S_Q, P_D_QK, P_D_V,
                                                P_DTYPE, P_CACHE_FORMAT, P_EXTRA_TOPK,
                                                P_EXTRA_CACHE_FORMAT, P_BATCH_INVARIANT, P_DEVICE}};
    (void)module;
    PyObject *given[PARAMETERS];
    struct smla_attend work = {.s_q = 1, .d_qk = 576, .d_v = 512};
    struct smla_device device;
    struct smla_target target;
    struct smla_plan plan;
    struct smla_error error;
    int32_t batch = 0, s_q = 1;
    bool any, batch_invariant = false;
    if (parse(&SIGNATURE, args, nargs, kwnames, given) < 0 ||
        get_size(given, P_BATCH, 0, &batch) < 0 || get_size(given, P_S_Q, 0, &s_q) < 0 ||
        get_size(given, P_HEADS, 1, &work.heads) < 0 ||
        get_size(given, P_D_QK, 1, &work.d_qk) < 0 || get_size(given, P_D_V, 1, &work.d_v) < 0 ||
        plan_dtype(given, &work.q_dtype) < 0 ||
        plan_source(given, P_TOPK, P_CACHE_FORMAT, &work.source[0]) < 0 ||
        plan_source(given, P_EXTRA_TOPK, P_EXTRA_CACHE_FORMAT, &work.source[1]) < 0 ||
        get_bool(given, P_BATCH_INVARIANT, &batch_invariant) < 0 ||
        get_device(given, &device, &any) < 0)
        return NULL;
    work.batch = batch;
    work.s_q = s_q;
    work.batch_invariant = batch_invariant;
    work.sources = is_given(given[P_EXTRA_TOPK]) ? 2 : 1;
    if (work.sources == 1 && is_given(given[P_EXTRA_CACHE_FORMAT])) {
        PyErr_SetString(PyExc_ValueError, "extra_cache_format: needs extra_topk");
        return NULL;
    }
    if (smla_problem_plan(&work, &error) != SMLA_OK) return raise_error(&error);
    if (get_target(device, &target) < 0) return NULL;
    if (smla_plan_attend(&work, &target, getenv("SPARSE_MLA_KERNEL"), &plan, &error) != SMLA_OK)
        return raise_error(&error);
    return Py_BuildValue("{s:s,s:i,s:L,s:i,s:i,s:L}", "kernel", plan.kernel, "splits", plan.splits,
                         "split_entries", (long long)plan.split_entries, "head_tile",
                         plan.head_tile, "launches", plan.launches, "workspace_bytes",
                         (long long)plan.workspace_bytes);
}

static PyObject *cpu_kernels(void)
{
    const struct smla_cpu_kernel *kernels;
    int32_t count = smla_cpu_kernels(&kernels);
    PyObject *list = PyList_New(count);
    for (int32_t i = 0; list && i < count; i++) {
        PyObject *entry = Py_BuildValue("{s:s,s:s,s:O}", "name", kernels[i].name, "isa",
                                        kernels[i].isa, "runs",
                                        kernels[i].runs ? Py_True : Py_False);
        if (!entry || PyList_SetItem(list, i, entry) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *gpu_kernels(void)
{
    PyObject *list = PyList_New(smla_gpu_build.count);
    for (int32_t i = 0; list && i < smla_gpu_build.count; i++) {
        PyObject *name = PyUnicode_FromString(smla_gpu_build.images[i].name);
        if (!name || PyList_SetItem(list, i, name) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *build_info(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
#ifdef Py_LIMITED_API
    PyObject *stable_abi = Py_True;
#else
    PyObject *stable_abi = Py_False;
#endif
    return Py_BuildValue("{s:s,s:s,s:O,s:N,s:N,s:s,s:s}", "version", SMLA_VERSION, "compiler",
                         __VERSION__, "stable_abi", stable_abi, "cpu_kernels", cpu_kernels(),
                         "gpu_kernels", gpu_kernels(), "gpu_targets", smla_gpu_build.targets,
                         "gpu_compiler", smla_gpu_build.compiler);
}

/* -------------------------------------------------------------------------- devices */

static const struct smla_target THIS_CPU = {.device = {SMLA_CPU, 0}};

static PyObject *describe_cpu(void)
{
    const struct smla_attend work = {.s_q = 1, .heads = 1, .d_qk = 576, .d_v = 512, .sources = 1};
    struct smla_plan plan;
    struct smla_error error;
    /* A name that is none of the CPU's asks for a kernel of a GPU. */
    if (smla_plan_attend(&work, &THIS_CPU, getenv("SPARSE_MLA_KERNEL"), &plan, &error) != SMLA_OK &&
        smla_plan_attend(&work, &THIS_CPU, NULL, &plan, &error) != SMLA_OK)
        return raise_error(&error);
    const struct smla_cpu_kernel *kernels;
    smla_cpu_kernels(&kernels);
    return Py_BuildValue("{s:s,s:s,s:s,s:i}", "device", "cpu", "name", kernels[plan.kernel_id].isa,
                         "kernel", plan.kernel, "threads", smla_cpu_threads());
}

static PyObject *describe_gpu(int32_t id)
{
    struct smla_gpu_device info;
    struct smla_error error;
    if (smla_gpu_describe(id, &info, &error) != SMLA_OK) return raise_error(&error);
    return Py_BuildValue("{s:N,s:s,s:(ii),s:i,s:L}", "device",
                         device_text((struct smla_device){SMLA_CUDA, id}), "name", info.name,
                         "compute_capability", info.major, info.minor, "multiprocessors",
                         info.multiprocessors, "memory_bytes", (long long)info.memory_bytes);
}

static PyObject *devices(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    int32_t count;
    struct smla_error error;
    if (smla_gpu_count(&count, &error) != SMLA_OK) return raise_error(&error);
    PyObject *list = PyList_New(count + 1);
    for (int32_t i = 0; list && i <= count; i++) {
        PyObject *entry = i == 0 ? describe_cpu() : describe_gpu(i - 1);
        if (!entry || PyList_SetItem(list, i, entry) < 0) Py_CLEAR(list);
    }
    return list;
}

/* Calls `visit` for the GPU that `device` names, or for every GPU: those from *first to *end. The
 * CPU needs nothing. */
static PyObject *visit_gpus(const struct signature *signature, PyObject *const *args,
                            Py_ssize_t nargs, PyObject *kwnames,
                            enum smla_status (*visit)(int32_t, struct smla_error *), int32_t *first,
                            int32_t *end)
{
    PyObject *given[PARAMETERS];
    struct smla_device device;
    struct smla_error error;
    bool any;
    *first = *end = 0;
    if (parse(signature, args, nargs, kwnames, given) < 0 || get_device(given, &device, &any) < 0)
        return NULL;
    if (any && smla_gpu_count(end, &error) != SMLA_OK) return raise_error(&error);
    if (!any && device.type == SMLA_CUDA) {
        *first = device.id;
        *end = device.id + 1;
    }
    for (int32_t i = *first; i < *end; i++) {
        enum smla_status status;
        Py_BEGIN_ALLOW_THREADS
        status = visit(i, &error);
        Py_END_ALLOW_THREADS
        if (status != SMLA_OK) return raise_error(&error);
    }
    Py_RETURN_NONE;
}

static PyObject *load(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const struct signature SIGNATURE = {"load", 1, 0, 1, {P_DEVICE}};
    int32_t first, end;
    (void)module;
    return visit_gpus(&SIGNATURE, args, nargs, kwnames, smla_gpu_load, &first, &end);
}

static PyObject *synchronize(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames)
{
    static const struct signature SIGNATURE = {"synchronize", 1, 0, 1, {P_DEVICE}};
    (void)module;
    struct smla_fault fault;
    struct smla_fault_report report;
    int32_t first, end;
    PyObject *done = visit_gpus(&SIGNATURE, args, nargs, kwnames, smla_gpu_synchronize, &first,
                                &end);
    for (int32_t i = first; done && i < end; i++) {
        if (!smla_gpu_take_fault(i, SMLA_GPU_DEFERRED, &fault)) continue;
        smla_fault_describe(&fault, false, (struct smla_device){SMLA_CUDA, i}, &report);
        Py_DECREF(done);
        return raise_fault(&report);
    }
    return done;
}

static bool take_fault(struct smla_device device, struct smla_fault_report *report)
{
    struct smla_fault fault;
    if (device.type == SMLA_CPU) return smla_fault_take(report);
    if (!smla_gpu_take_fault(device.id, SMLA_GPU_RECORDED, &fault)) return false;
    smla_fault_describe(&fault, false, device, report);
    return true;
}

static PyObject *faults(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
    static const struct signature SIGNATURE = {"faults", 1, 0, 1, {P_DEVICE}};
    (void)module;
    PyObject *given[PARAMETERS];
    struct smla_device device;
    struct smla_fault_report report;
    struct smla_error error;
    bool any;
    if (parse(&SIGNATURE, args, nargs, kwnames, given) < 0 || get_device(given, &device, &any) < 0)
        return NULL;
    int32_t count = 0;
    if (any && smla_gpu_count(&count, &error) != SMLA_OK) return raise_error(&error);
    bool found = take_fault(device, &report);
    for (int32_t i = 0; i < count && !found; i++)
        found = take_fault((struct smla_device){SMLA_CUDA, i}, &report);
    if (found) return index_fault(&report);
    Py_RETURN_NONE;
}

static PyObject *cpu_peak(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames)
{
    static const struct signature SIGNATURE = {"cpu_peak", 1, 1, 1, {P_KERNEL}};
    (void)module;
    PyObject *given[PARAMETERS];
    const char *name = NULL;
    struct smla_error error;
    struct smla_attend work = {.s_q = 1, .heads = 1, .d_qk = 576, .d_v = 512, .sources = 1};
    struct smla_plan plan;
    double peak;
    if (parse(&SIGNATURE, args, nargs, kwnames, given) < 0 || get_text(given, P_KERNEL, &name) < 0)
        return NULL;
    if (smla_plan_attend(&work, &THIS_CPU, name, &plan, &error) != SMLA_OK)
        return raise_error(&error);
    Py_BEGIN_ALLOW_THREADS
    peak = smla_cpu_peak(plan.kernel);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(peak);
}

static PyObject *gather(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
    static const struct signature SIGNATURE = {
        "gather", 3, 3, 4, {P_KV_CACHE, P_INDICES, P_OUT, P_STREAM}};
    enum { COUNT = 3 };
    (void)module;
    PyObject *given[PARAMETERS], *result = NULL;
    struct smla_import imports[COUNT];
    struct smla_gpu_streams streams;
    struct smla_error error;
    if (parse(&SIGNATURE, args, nargs, kwnames, given) < 0) return NULL;
    memset(imports, 0, sizeof imports);
    for (int i = 0; i < COUNT; i++) {
        enum parameter parameter = (enum parameter)SIGNATURE.parameters[i];
        if (smla_import(given[parameter], NAMES[parameter], &imports[i]) < 0) goto done;
    }
    if (smla_stream(given[P_STREAM], &imports[0], &streams) < 0) goto done;
    if (smla_gpu_gather(&imports[0].tensor, &imports[1].tensor, &imports[2].tensor, streams.launch,
                        &error) == SMLA_OK)
        result = Py_NewRef(Py_None);
    else
        raise_error(&error);
done:
    for (int i = 0; i < COUNT; i++) smla_release(&imports[i]);
    return result;
}

/* -------------------------------------------------------------------------- module */

#define METHOD(name, doc)                                                                          \
    {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL | METH_KEYWORDS, doc}

static PyMethodDef METHODS[] = {
    METHOD(attend, SMLA_DOC_ATTEND),
    METHOD(attend_for_flash_mla, SMLA_DOC_ATTEND_FOR_FLASH_MLA),
    METHOD(merge, SMLA_DOC_MERGE),
    METHOD(pack, SMLA_DOC_PACK),
    METHOD(unpack, SMLA_DOC_UNPACK),
    METHOD(append, SMLA_DOC_APPEND),
    METHOD(resolve, SMLA_DOC_RESOLVE),
    METHOD(faults, SMLA_DOC_FAULTS),
    METHOD(synchronize, SMLA_DOC_SYNCHRONIZE),
    METHOD(plan, SMLA_DOC_PLAN),
    METHOD(load, SMLA_DOC_LOAD),
    METHOD(cpu_peak, SMLA_DOC_CPU_PEAK),
    METHOD(gather, SMLA_DOC_GATHER),
    {"cache_formats", cache_formats, METH_NOARGS, SMLA_DOC_CACHE_FORMATS},
    {"build_info", build_info, METH_NOARGS, SMLA_DOC_BUILD_INFO},
    {"devices", devices, METH_NOARGS, SMLA_DOC_DEVICES},
    {NULL, NULL, 0, NULL},
};

static PyObject *import_attribute(const char *module, const char *name)
{
    PyObject *imported = PyImport_ImportModule(module), *attribute = NULL;
    if (imported) attribute = PyObject_GetAttrString(imported, name);
    Py_XDECREF(imported);
    return attribute;
}

static int add_exception(PyObject *module, PyObject **type, const char *name, const char *doc,
                         PyObject *base)
{
    if (!*type) *type = PyErr_NewExceptionWithDoc(name, doc, base, NULL);
    return *type ? PyModule_AddObjectRef(module, strrchr(name, '.') + 1, *type) : -1;
}

static int execute(PyObject *module)
{
    /* the state above is the process's: at limited API 3.11 no slot says so */
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_ImportError, "sparse_mla: expected the main interpreter, "
                                           "got a subinterpreter");
        return -1;
    }
    for (int i = 0; i < PARAMETERS; i++) {
        if (state.names[i]) continue;
        state.names[i] = PyUnicode_InternFromString(NAMES[i]);
        if (!state.names[i]) return -1;
    }
    if (!state.real && !(state.real = import_attribute("numbers", "Real"))) return -1;
    if (!state.integral && !(state.integral = import_attribute("numbers", "Integral"))) return -1;
    if (add_exception(module, &state.index_fault, "sparse_mla.IndexFault", SMLA_DOC_INDEX_FAULT,
                      PyExc_IndexError) < 0 ||
        add_exception(module, &state.cuda_error, "sparse_mla.CudaError", SMLA_DOC_CUDA_ERROR,
                      PyExc_RuntimeError) < 0 ||
        add_exception(module, &state.unsupported_error, "sparse_mla.UnsupportedError",
                      SMLA_DOC_UNSUPPORTED_ERROR, PyExc_RuntimeError) < 0)
        return -1;
    if (PyModule_AddStringConstant(module, "__version__", SMLA_VERSION) < 0) return -1;
    return smla_exchange_init();
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, execute},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "sparse_mla._core", .m_doc = "The C core of sparse_mla.",
    .m_size = 0,           .m_methods = METHODS,         .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&MODULE);
}
