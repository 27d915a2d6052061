/* A libcuda.so.1 that runs nothing: it counts calls, keeps the stack of contexts and the last
 * launch, and fails where it is told to, so that the driver's side of the extension can be tested
 * on a machine without a GPU. test_gpu_driver.py compiles it and reads its state through ctypes.
 *
 *     FAKE_CUDA_DEVICES=n           GPUs (2)
 *     FAKE_CUDA_COMPUTE=n           their compute capability, 10 * major + minor (75)
 *     FAKE_CUDA_FAIL=function=code  what that function returns
 *     FAKE_CUDA_LACKS=function      what cuGetProcAddress does not find */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/driver.h"

enum { DEVICES = 8, DEPTH = 8, NAMES = 128 };

static struct CUevent_st {
    unsigned long long stream; /* where it was recorded */
} events[64];

static struct CUctx_st {
    int device;
} contexts[DEVICES];

static struct CUkern_st {
    char name[64];
} kernels[NAMES];

static __thread CUcontext stack[DEPTH];
static __thread int depth;
static __thread int capture_mode;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char name[64];
    int calls;
} counts[NAMES];

/* What the tests read. */
struct {
    unsigned int blocks, threads;
    int device;
    unsigned long long stream;
    char kernel[64];
    int overlaps;
} fake_launch;
int fake_mode_at_load = -1;
unsigned long long fake_captured; /* a stream that is being captured; 0: none */
char fake_order[4096];            /* what streams were asked for, in words */
int fake_events;                  /* made and not destroyed */

int fake_depth(void)
{
    return depth;
}

int fake_mode(int mode)
{
    int before = capture_mode;
    capture_mode = mode;
    return before;
}

int fake_calls(const char *name)
{
    for (int i = 0; i < NAMES; i++) {
        if (strcmp(counts[i].name, name) == 0) return counts[i].calls;
    }
    return 0;
}

void fake_push(int device)
{
    stack[depth++] = device < 0 ? NULL : &contexts[device];
}

/* Counts a call and returns what it shall return. */
static CUresult called(const char *name)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < NAMES; i++) {
        if (!counts[i].name[0]) strcpy(counts[i].name, name);
        if (strcmp(counts[i].name, name) == 0) {
            counts[i].calls++;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    const char *fail = getenv("FAKE_CUDA_FAIL");
    size_t length = strlen(name);
    bool matches = fail && strncmp(fail, name, length) == 0 && fail[length] == '=';
    return matches ? atoi(fail + length + 1) : CUDA_SUCCESS;
}

static void note(const char *format, unsigned long long one, unsigned long long other)
{
    pthread_mutex_lock(&lock);
    size_t used = strlen(fake_order);
    snprintf(fake_order + used, sizeof fake_order - used, format, one, other);
    pthread_mutex_unlock(&lock);
}

#define CALLED()                                                                                   \
    do {                                                                                           \
        CUresult result = called(__func__);                                                        \
        if (result != CUDA_SUCCESS) return result;                                                 \
    } while (0)

static CUresult cuInit(unsigned int flags)
{
    CALLED();
    return (CUresult)flags;
}

static CUresult cuDriverGetVersion(int *version)
{
    CALLED();
    *version = 12040;
    return CUDA_SUCCESS;
}

static CUresult cuGetErrorName(CUresult result, const char **name)
{
    *name = result == CUDA_ERROR_NO_BINARY_FOR_GPU ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
                                                   : "CUDA_ERROR_FAKE";
    return CUDA_SUCCESS;
}

static CUresult cuGetErrorString(CUresult result, const char **text)
{
    (void)result;
    *text = "made up";
    return CUDA_SUCCESS;
}

static CUresult cuDeviceGetCount(int *count)
{
    CALLED();
    const char *devices = getenv("FAKE_CUDA_DEVICES");
    *count = devices ? atoi(devices) : 2;
    return CUDA_SUCCESS;
}

static CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CALLED();
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult cuDeviceGetName(char *name, int bytes, CUdevice device)
{
    CALLED();
    snprintf(name, (size_t)bytes, "Fake GPU %d", device);
    return CUDA_SUCCESS;
}

static CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    CALLED();
    *bytes = (size_t)(device + 1) << 30;
    return CUDA_SUCCESS;
}

static CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    CALLED();
    (void)device;
    const char *given = getenv("FAKE_CUDA_COMPUTE");
    const int compute = given ? atoi(given) : 75;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = compute / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = compute % 10; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: /* as Hopper has it, or Ada */
        *value = (compute == 90 ? 227 : 99) * 1024;
        break;
    default: *value = 100 + attribute;
    }
    return CUDA_SUCCESS;
}

static CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CALLED();
    contexts[device].device = device;
    *context = &contexts[device];
    return CUDA_SUCCESS;
}

static CUresult cuCtxGetCurrent(CUcontext *context)
{
    CALLED();
    *context = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

static CUresult cuCtxPushCurrent(CUcontext context)
{
    CALLED();
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult cuCtxPopCurrent(CUcontext *context)
{
    CALLED();
    *context = stack[--depth];
    return CUDA_SUCCESS;
}

static CUresult cuCtxSynchronize(void)
{
    CALLED();
    return CUDA_SUCCESS;
}

static CUresult cuStreamSynchronize(CUstream stream)
{
    CALLED();
    note("host waits for %llu\n", (uintptr_t)stream, 0);
    return CUDA_SUCCESS;
}

static CUresult cuStreamIsCapturing(CUstream stream, int *status)
{
    CALLED();
    bool captured = stream && (uintptr_t)stream == fake_captured;
    *status = captured ? !CU_STREAM_CAPTURE_STATUS_NONE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

static CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    CALLED();
    if (flags != CU_EVENT_DISABLE_TIMING) return 1;
    *event = &events[fake_events++];
    return CUDA_SUCCESS;
}

static CUresult cuEventDestroy(CUevent event)
{
    CALLED();
    (void)event;
    fake_events--;
    return CUDA_SUCCESS;
}

static CUresult cuEventRecord(CUevent event, CUstream stream)
{
    CALLED();
    event->stream = (uintptr_t)stream;
    return CUDA_SUCCESS;
}

static CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    CALLED();
    note("%llu waits for %llu\n", (uintptr_t)stream, event->stream);
    return (CUresult)flags;
}

/* Memory of the fake devices is host memory. */
static CUresult cuMemAlloc(CUdeviceptr *memory, size_t bytes)
{
    CALLED();
    *memory = (CUdeviceptr)(uintptr_t)calloc(1, bytes);
    return CUDA_SUCCESS;
}

static CUresult cuMemFree(CUdeviceptr memory)
{
    CALLED();
    free((void *)(uintptr_t)memory);
    return CUDA_SUCCESS;
}

static CUresult cuMemAllocAsync(CUdeviceptr *memory, size_t bytes, CUstream stream)
{
    CALLED();
    note("%llu takes memory\n", (uintptr_t)stream, 0);
    *memory = (CUdeviceptr)(uintptr_t)calloc(1, bytes);
    return CUDA_SUCCESS;
}

static CUresult cuMemFreeAsync(CUdeviceptr memory, CUstream stream)
{
    CALLED();
    note("%llu gives memory back\n", (uintptr_t)stream, 0);
    free((void *)(uintptr_t)memory);
    return CUDA_SUCCESS;
}

static CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned int flags)
{
    CALLED();
    (void)flags;
    *memory = malloc(bytes);
    return CUDA_SUCCESS;
}

static CUresult cuMemHostGetDevicePointer(CUdeviceptr *device, void *host, unsigned int flags)
{
    CALLED();
    (void)flags;
    *device = (CUdeviceptr)(uintptr_t)host;
    return CUDA_SUCCESS;
}

static CUresult cuMemsetD8Async(CUdeviceptr memory, unsigned char value, size_t bytes,
                                CUstream stream)
{
    CALLED();
    (void)stream;
    memset((void *)(uintptr_t)memory, value, bytes);
    return CUDA_SUCCESS;
}

static CUresult cuMemcpyDtoHAsync(void *host, CUdeviceptr device, size_t bytes, CUstream stream)
{
    CALLED();
    (void)stream;
    memcpy(host, (const void *)(uintptr_t)device, bytes);
    return CUDA_SUCCESS;
}

static CUresult cuLibraryGetGlobal(CUdeviceptr *memory, size_t *bytes, CUlibrary library,
                                   const char *name)
{
    static unsigned int global;
    CALLED();
    (void)bytes, (void)library, (void)name;
    *memory = (CUdeviceptr)(uintptr_t)&global;
    return CUDA_SUCCESS;
}

static CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    CALLED();
    *mode = fake_mode(*mode);
    return CUDA_SUCCESS;
}

static CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr pointer)
{
    CALLED();
    (void)pointer;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)value = 1;
    return CUDA_SUCCESS;
}

static CUresult cuLibraryLoadData(CUlibrary *library, const void *code, int *jit_options,
                                  void **jit_values, unsigned int jit_count, int *options,
                                  void **values, unsigned int count)
{
    CALLED();
    (void)jit_options, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    fake_mode_at_load = capture_mode;
    /* A fatbin begins with this number. */
    bool fatbin = memcmp(code, "\x50\xed\x55\xba", 4) == 0;
    *library = (CUlibrary)(uintptr_t)1;
    return fatbin ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

static CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    CALLED();
    (void)library;
    for (int i = 0; i < NAMES; i++) {
        if (!kernels[i].name[0]) strcpy(kernels[i].name, name);
        if (strcmp(kernels[i].name, name) == 0) {
            *kernel = &kernels[i];
            break;
        }
    }
    return CUDA_SUCCESS;
}

static CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice device)
{
    CALLED();
    (void)attribute, (void)value, (void)kernel, (void)device;
    return CUDA_SUCCESS;
}

static CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    CALLED();
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

static CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function,
                                 void **parameters, void **extra)
{
    CALLED();
    (void)parameters, (void)extra;
    fake_launch.blocks = config->gridDimX;
    fake_launch.threads = config->blockDimX;
    fake_launch.stream = (uintptr_t)config->hStream;
    fake_launch.device = depth ? stack[depth - 1]->device : -1;
    strcpy(fake_launch.kernel, ((CUkernel)function)->name);
    fake_launch.overlaps = 0;
    for (unsigned int i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttribute *attribute = &config->attrs[i];
        if (attribute->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            fake_launch.overlaps = attribute->value.programmaticStreamSerializationAllowed;
    }
    note("%llu runs\n", fake_launch.stream, 0);
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                             int *found)
{
    (void)version, (void)flags, (void)found;
    const char *lacks = getenv("FAKE_CUDA_LACKS");
    if (lacks && strcmp(lacks, name) == 0) return CUDA_SUCCESS;
#define FIND(function_name, function_version, parameters)                                          \
    if (strcmp(name, #function_name) == 0) {                                                       \
        *function = (void *)(uintptr_t)function_name;                                              \
        return function_version <= version ? CUDA_SUCCESS : 1;                                     \
    }
    SMLA_DRIVER_FUNCTIONS(FIND)
#undef FIND
    return 1;
}
