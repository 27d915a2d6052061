/* libcuda, opened at run time: the few declarations of its API that are needed, since a build must
 * not need a CUDA toolkit, and its errors as ours. */
#ifndef SMLA_GPU_DRIVER_H
#define SMLA_GPU_DRIVER_H

#include <stddef.h>

#include "error.h"

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct CUfunc_st *CUfunction;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
    CUDA_ERROR_ECC_UNCORRECTABLE = 214,
    CUDA_ERROR_NVLINK_UNCORRECTABLE = 220,
    CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
    CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
    CUDA_ERROR_JIT_COMPILATION_DISABLED = 223,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_TIMEOUT = 702,
    CUDA_ERROR_ASSERT = 710,
    CUDA_ERROR_LAUNCH_FAILED = 719,
};

enum {
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
};

enum { CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9 };
enum { CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
enum { CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_STREAM_CAPTURE_MODE_RELAXED = 2, CU_STREAM_CAPTURE_STATUS_NONE = 0 };
enum { CU_MEMHOSTALLOC_PORTABLE = 1, CU_MEMHOSTALLOC_DEVICEMAP = 2 };
enum { CU_GET_PROC_ADDRESS_LEGACY_STREAM = 1 };

enum { CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6 };

typedef struct {
    int id;
    char padding[4];
    union {
        char bytes[64];
        int programmaticStreamSerializationAllowed;
    } value;
} CUlaunchAttribute;

typedef struct {
    unsigned int gridDimX, gridDimY, gridDimZ;
    unsigned int blockDimX, blockDimY, blockDimZ;
    unsigned int sharedMemBytes;
    CUstream hStream;
    CUlaunchAttribute *attrs;
    unsigned int numAttrs;
} CUlaunchConfig;

/* Name, the version of the API that is asked for, parameters. */
#define SMLA_DRIVER_FUNCTIONS(X)                                                                   \
    X(cuInit, 2000, (unsigned int flags))                                                          \
    X(cuDriverGetVersion, 2020, (int *version))                                                    \
    X(cuGetErrorName, 6000, (CUresult result, const char **name))                                  \
    X(cuGetErrorString, 6000, (CUresult result, const char **text))                                \
    X(cuDeviceGetCount, 2000, (int *count))                                                        \
    X(cuDeviceGet, 2000, (CUdevice * device, int ordinal))                                         \
    X(cuDeviceGetName, 2000, (char *name, int bytes, CUdevice device))                             \
    X(cuDeviceTotalMem, 3020, (size_t *bytes, CUdevice device))                                    \
    X(cuDeviceGetAttribute, 2000, (int *value, int attribute, CUdevice device))                    \
    X(cuDevicePrimaryCtxRetain, 7000, (CUcontext * context, CUdevice device))                      \
    X(cuCtxGetCurrent, 4000, (CUcontext * context))                                                \
    X(cuCtxPushCurrent, 4000, (CUcontext context))                                                 \
    X(cuCtxPopCurrent, 4000, (CUcontext * context))                                                \
    X(cuCtxSynchronize, 2000, (void))                                                              \
    X(cuStreamSynchronize, 2000, (CUstream stream))                                                \
    X(cuStreamIsCapturing, 10000, (CUstream stream, int *status))                                  \
    X(cuStreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned int flags))               \
    X(cuEventCreate, 2000, (CUevent * event, unsigned int flags))                                  \
    X(cuEventRecord, 2000, (CUevent event, CUstream stream))                                       \
    X(cuEventDestroy, 4000, (CUevent event))                                                       \
    X(cuMemAlloc, 3020, (CUdeviceptr * memory, size_t bytes))                                      \
    X(cuMemFree, 3020, (CUdeviceptr memory))                                                       \
    X(cuMemAllocAsync, 11020, (CUdeviceptr * memory, size_t bytes, CUstream stream))               \
    X(cuMemFreeAsync, 11020, (CUdeviceptr memory, CUstream stream))                                \
    X(cuMemHostAlloc, 2020, (void **memory, size_t bytes, unsigned int flags))                     \
    X(cuMemHostGetDevicePointer, 3020, (CUdeviceptr * device, void *host, unsigned int flags))     \
    X(cuMemsetD8Async, 3020,                                                                       \
      (CUdeviceptr memory, unsigned char value, size_t bytes, CUstream stream))                    \
    X(cuMemcpyDtoHAsync, 3020, (void *host, CUdeviceptr device, size_t bytes, CUstream stream))    \
    X(cuThreadExchangeStreamCaptureMode, 10010, (int *mode))                                       \
    X(cuPointerGetAttribute, 4000, (void *value, int attribute, CUdeviceptr pointer))              \
    X(cuLibraryLoadData, 12000,                                                                    \
      (CUlibrary * library, const void *code, int *jit_options, void **jit_values,                 \
       unsigned int jit_count, int *options, void **values, unsigned int count))                   \
    X(cuLibraryGetKernel, 12000, (CUkernel * kernel, CUlibrary library, const char *name))         \
    X(cuKernelSetAttribute, 12000, (int attribute, int value, CUkernel kernel, CUdevice device))   \
    X(cuLibraryGetGlobal, 12000,                                                                   \
      (CUdeviceptr * memory, size_t *bytes, CUlibrary library, const char *name))                  \
    X(cuKernelGetFunction, 12000, (CUfunction * function, CUkernel kernel))                        \
    X(cuLaunchKernelEx, 11060,                                                                     \
      (const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra))

struct smla_driver {
#define SMLA_DRIVER_MEMBER(name, version, parameters) CUresult(*name) parameters;
    SMLA_DRIVER_FUNCTIONS(SMLA_DRIVER_MEMBER)
#undef SMLA_DRIVER_MEMBER
};

/* Opens and initialises the driver at the first call of the process; the same answer afterwards.
 * SMLA_ERROR_UNSUPPORTED where there is no driver, an old one, or no GPU. */
enum smla_status smla_driver_open(const struct smla_driver **driver, struct smla_error *error);

/* The failure `result` of `function`, as SMLA_ERROR_CUDA. */
enum smla_status smla_driver_fail(const struct smla_driver *driver, CUresult result,
                                  const char *function, struct smla_error *error);

/* Calls a function of the driver and returns from the caller where it fails. */
#define SMLA_CUDA_TRY(driver, error, function, ...)                                                \
    do {                                                                                           \
        CUresult smla_try_result = (driver)->function(__VA_ARGS__);                                \
        if (smla_try_result != CUDA_SUCCESS)                                                       \
            return smla_driver_fail((driver), smla_try_result, #function, (error));                \
    } while (0)

#endif
