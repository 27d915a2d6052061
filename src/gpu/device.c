#include "gpu/device.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "gpu/gpu.h"

enum { MAX_DEVICES = 64, MAX_IMAGES = 32 };

struct device {
    CUcontext context; /* primary; retained for the life of the process */
    CUfunction functions[SMLA_GPU_KERNELS];
    struct smla_gpu_memory memory;
    struct smla_gpu_device info;
    atomic_bool ready;
};

static struct device devices[MAX_DEVICES];
static CUlibrary libraries[MAX_IMAGES]; /* as smla_gpu_build.images; for all devices */
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

int32_t smla_gpu_driver_version(void)
{
    const struct smla_driver *driver;
    struct smla_error error;
    int version = 0;
    if (smla_driver_open(&driver, &error) != SMLA_OK) return 0;
    return driver->cuDriverGetVersion(&version) == CUDA_SUCCESS ? version : 0;
}

enum smla_status smla_gpu_count(int32_t *count, struct smla_error *error)
{
    const struct smla_driver *driver;
    *count = 0;
    enum smla_status status = smla_driver_open(&driver, error);
    if (status == SMLA_ERROR_UNSUPPORTED) return SMLA_OK;
    if (status != SMLA_OK) return status;
    SMLA_CUDA_TRY(driver, error, cuDeviceGetCount, count);
    return SMLA_OK;
}

static enum smla_status find_device(const struct smla_driver *driver, int32_t id, CUdevice *device,
                                    struct smla_error *error)
{
    int count = 0;
    SMLA_CUDA_TRY(driver, error, cuDeviceGetCount, &count);
    SMLA_FAIL_IF(count == 0, error, SMLA_ERROR_UNSUPPORTED, "the NVIDIA driver finds no GPU");
    SMLA_FAIL_IF(id < 0 || id >= count || id >= MAX_DEVICES, error, SMLA_ERROR_VALUE,
                 "device: expected cuda:0 to cuda:%d, the GPUs of this process, got cuda:%d",
                 count - 1, id);
    SMLA_CUDA_TRY(driver, error, cuDeviceGet, device, id);
    return SMLA_OK;
}

enum smla_status smla_gpu_describe(int32_t id, struct smla_gpu_device *info,
                                   struct smla_error *error)
{
    const struct smla_driver *driver;
    CUdevice device;
    SMLA_TRY(smla_driver_open(&driver, error));
    SMLA_TRY(find_device(driver, id, &device, error));

    *info = (struct smla_gpu_device){.id = id};
    const struct {
        int attribute;
        int32_t *value;
    } attributes[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &info->major},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &info->minor},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, &info->multiprocessors},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, &info->shared_bytes},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, &info->l2_bytes},
    };
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        SMLA_CUDA_TRY(driver, error, cuDeviceGetAttribute, attributes[i].value,
                      attributes[i].attribute, device);
    }
    size_t bytes = 0;
    SMLA_CUDA_TRY(driver, error, cuDeviceTotalMem, &bytes, device);
    info->memory_bytes = (int64_t)bytes;
    SMLA_CUDA_TRY(driver, error, cuDeviceGetName, info->name, sizeof info->name, device);
    return SMLA_OK;
}

enum smla_status smla_gpu_pointer_device(const void *pointer, int32_t *device,
                                         struct smla_error *error)
{
    const struct smla_driver *driver;
    SMLA_TRY(smla_driver_open(&driver, error));
    SMLA_CUDA_TRY(driver, error, cuPointerGetAttribute, device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                  (CUdeviceptr)(uintptr_t)pointer);
    return SMLA_OK;
}

/* Whether the failure of loading an image is that nothing in it fits the GPU. */
static bool fits_nothing(CUresult result)
{
    switch (result) {
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILATION_DISABLED: return true;
    default: return false;
    }
}

/* The failure of loading an image, in words where the fault is that nothing in it fits. */
static enum smla_status fail_loading(const struct smla_driver *driver, CUresult result,
                                     const char *function, int32_t id, struct smla_error *error)
{
    smla_driver_fail(driver, result, function, error);
    if (!fits_nothing(result)) return error->status;
    struct smla_gpu_device info;
    struct smla_error ignored;
    const char *name = NULL;
    int32_t version = smla_gpu_driver_version();
    if (smla_gpu_describe(id, &info, &ignored) != SMLA_OK) return error->status;
    driver->cuGetErrorName(result, &name);
    return smla_fail(error, SMLA_ERROR_UNSUPPORTED,
                     "%s (compute capability %d.%d, driver for CUDA %d.%d) can run none of the "
                     "kernels of this build (%s, by nvcc %s): %s; what would: a newer driver, or a "
                     "build whose gpu_archs name this GPU",
                     info.name, info.major, info.minor, version / 1000, version % 1000 / 10,
                     smla_gpu_build.targets, smla_gpu_build.compiler,
                     name ? name : "unknown error");
}

/* One library per image, for all devices that it has code for. An image for one compute capability
 * alone may be of no use even there (CUDA_FORCE_PTX_JIT): other kernels do its work. */
static enum smla_status load_images(const struct smla_driver *driver, int32_t id, int32_t compute,
                                    struct smla_error *error)
{
    for (int32_t i = 0; i < smla_gpu_build.count; i++) {
        const struct smla_gpu_image *image = &smla_gpu_build.images[i];
        if (libraries[i] || (image->compute && image->compute != compute)) continue;
        CUresult result = driver->cuLibraryLoadData(&libraries[i], image->begin, NULL, NULL, 0,
                                                    NULL, NULL, 0);
        if (result == CUDA_SUCCESS) continue;
        libraries[i] = NULL;
        if (!image->compute || !fits_nothing(result))
            return fail_loading(driver, result, "cuLibraryLoadData", id, error);
    }
    return SMLA_OK;
}

/* The number of an image of this build, or -1. */
static int32_t find_image(const char *name)
{
    for (int32_t i = 0; i < smla_gpu_build.count; i++)
        if (strcmp(smla_gpu_build.images[i].name, name) == 0) return i;
    return -1;
}

/* Taking a kernel's function loads its code, which a first launch would otherwise do, perhaps
 * inside a capture. */
static CUresult take_function(const struct smla_driver *driver, CUlibrary library,
                              const struct smla_gpu_kernel_info *info, CUdevice handle,
                              CUfunction *function, const char **call)
{
    CUkernel kernel;
    *call = "cuLibraryGetKernel";
    CUresult result = driver->cuLibraryGetKernel(&kernel, library, info->name);
    if (result != CUDA_SUCCESS) return result;
    *call = "cuKernelSetAttribute";
    result = driver->cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                          info->shared_bytes, kernel, handle);
    if (result != CUDA_SUCCESS) return result;
    *call = "cuKernelGetFunction";
    return driver->cuKernelGetFunction(function, kernel);
}

/* With the device's context current. */
static enum smla_status load_kernels(const struct smla_driver *driver, int32_t id, CUdevice handle,
                                     int32_t compute, struct smla_error *error)
{
    for (int32_t k = 0; k < SMLA_GPU_KERNELS; k++) {
        const struct smla_gpu_kernel_info *info = &smla_gpu_kernels[k];
        const int32_t i = find_image(info->image);
        const int32_t only = i < 0 ? 0 : smla_gpu_build.images[i].compute;
        if (i < 0 || !libraries[i] || (only && only != compute)) continue;
        const char *call;
        CUresult result = take_function(driver, libraries[i], info, handle,
                                        &devices[id].functions[k], &call);
        if (result == CUDA_SUCCESS) {
            devices[id].info.sm90 |= only == 90;
        } else if (!only || !fits_nothing(result)) {
            return fail_loading(driver, result, call, id, error);
        }
    }
    return SMLA_OK;
}

/* The fault slots and the room for a check, once per device. The lock is a variable of the
 * any_attend image, so that it is zero without a memset, which a capture would not allow. */
static enum smla_status take_memory(const struct smla_driver *driver, int32_t id,
                                    struct smla_error *error)
{
    struct smla_gpu_memory *memory = &devices[id].memory;
    size_t bytes = sizeof(struct smla_fault_slot) * SMLA_GPU_RECORDS;
    void *host = NULL;
    CUdeviceptr device = 0;
    if (memory->faults) return SMLA_OK;
    SMLA_CUDA_TRY(driver, error, cuLibraryGetGlobal, &device, NULL,
                  libraries[find_image("any_attend")], "smla_fault_lock");
    memory->fault_lock = (uint32_t *)(uintptr_t)device;
    SMLA_CUDA_TRY(driver, error, cuMemAlloc, &memory->check,
                  sizeof(struct smla_tally) + sizeof(unsigned long long));
    SMLA_CUDA_TRY(driver, error, cuMemHostAlloc, &host, bytes,
                  CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    memset(host, 0, bytes);
    SMLA_CUDA_TRY(driver, error, cuMemHostGetDevicePointer, &device, host, 0);
    memory->in_device = (struct smla_fault_slot *)(uintptr_t)device;
    memory->faults = host;
    return SMLA_OK;
}

static enum smla_status load_device(const struct smla_driver *driver, int32_t id, CUdevice handle,
                                    struct smla_error *error)
{
    struct device *device = &devices[id];
    if (!device->context) {
        SMLA_CUDA_TRY(driver, error, cuDevicePrimaryCtxRetain, &device->context, handle);
    }
    SMLA_TRY(smla_gpu_describe(id, &device->info, error));
    device->info.overlaps = device->info.major >= 9 && smla_gpu_driver_version() >= 12030;
    const int32_t compute = 10 * device->info.major + device->info.minor;
    SMLA_TRY(load_images(driver, id, compute, error));
    SMLA_CUDA_TRY(driver, error, cuCtxPushCurrent, device->context);
    enum smla_status status = load_kernels(driver, id, handle, compute, error);
    if (status == SMLA_OK) status = take_memory(driver, id, error);
    CUcontext popped;
    driver->cuCtxPopCurrent(&popped);
    return status;
}

bool smla_gpu_loaded(int32_t id)
{
    return id >= 0 && id < MAX_DEVICES &&
           atomic_load_explicit(&devices[id].ready, memory_order_acquire);
}

static enum smla_status load_once(const struct smla_driver *driver, int32_t id,
                                  struct smla_error *error)
{
    if (smla_gpu_loaded(id)) return SMLA_OK;
    CUdevice handle;
    SMLA_TRY(find_device(driver, id, &handle, error));

    enum smla_status status = SMLA_OK;
    pthread_mutex_lock(&loading);
    if (!smla_gpu_loaded(id)) {
        int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        driver->cuThreadExchangeStreamCaptureMode(&mode);
        status = load_device(driver, id, handle, error);
        driver->cuThreadExchangeStreamCaptureMode(&mode);
        atomic_store_explicit(&devices[id].ready, status == SMLA_OK, memory_order_release);
    }
    pthread_mutex_unlock(&loading);
    return status;
}

enum smla_status smla_gpu_load(int32_t id, struct smla_error *error)
{
    const struct smla_driver *driver;
    SMLA_FAIL_IF(
        smla_gpu_build.count == 0, error, SMLA_ERROR_UNSUPPORTED,
        "this build has no GPU kernels, since nvcc was not there when it was made; tensors "
        "in CPU memory work");
    SMLA_TRY(smla_driver_open(&driver, error));
    return load_once(driver, id, error);
}

enum smla_status smla_gpu_enter(int32_t id, struct smla_gpu_scope *scope, struct smla_error *error)
{
    SMLA_TRY(smla_gpu_load(id, error));
    SMLA_TRY(smla_driver_open(&scope->driver, error));
    const struct device *device = &devices[id];
    CUcontext current = NULL;
    SMLA_CUDA_TRY(scope->driver, error, cuCtxGetCurrent, &current);
    scope->functions = device->functions;
    scope->memory = &device->memory;
    scope->overlaps = device->info.overlaps;
    scope->pushed = current != device->context;
    if (scope->pushed) SMLA_CUDA_TRY(scope->driver, error, cuCtxPushCurrent, device->context);
    return SMLA_OK;
}

void smla_gpu_leave(const struct smla_gpu_scope *scope)
{
    CUcontext popped;
    if (scope->pushed) scope->driver->cuCtxPopCurrent(&popped);
}

enum smla_status smla_gpu_launch(const struct smla_gpu_scope *scope, enum smla_gpu_kernel kernel,
                                 struct smla_gpu_grid grid, uintptr_t stream, const void *work,
                                 struct smla_error *error)
{
    CUlaunchAttribute overlap = {
        .id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        .value.programmaticStreamSerializationAllowed = 1,
    };
    const CUlaunchConfig config = {
        .gridDimX = (unsigned int)grid.blocks,
        .gridDimY = 1,
        .gridDimZ = 1,
        .blockDimX = (unsigned int)smla_gpu_kernels[kernel].threads,
        .blockDimY = 1,
        .blockDimZ = 1,
        .sharedMemBytes = (unsigned int)grid.shared_bytes,
        .hStream = (CUstream)stream,
        .attrs = &overlap,
        .numAttrs = smla_gpu_kernels[kernel].waits && scope->overlaps,
    };
    void *parameters[] = {(void *)(uintptr_t)work}; /* the driver copies it and writes nothing */
    SMLA_CUDA_TRY(scope->driver, error, cuLaunchKernelEx, &config, scope->functions[kernel],
                  parameters, NULL);
    return SMLA_OK;
}

struct smla_gpu_grid smla_gpu_grid_of(enum smla_gpu_kernel kernel, int64_t warps)
{
    enum { WARP = 32, MOST = 1 << 16 }; /* blocks enough to fill any GPU */
    const int64_t per_block = smla_gpu_kernels[kernel].threads / WARP;
    const int64_t blocks = (warps + per_block - 1) / per_block;
    return (struct smla_gpu_grid){.blocks = blocks < MOST ? blocks : MOST};
}

const struct smla_gpu_memory *smla_gpu_memory(int32_t id)
{
    return smla_gpu_loaded(id) ? &devices[id].memory : NULL;
}

enum smla_status smla_gpu_info(int32_t id, const struct smla_gpu_device **info,
                               struct smla_error *error)
{
    SMLA_TRY(smla_gpu_load(id, error));
    *info = &devices[id].info;
    return SMLA_OK;
}

enum smla_status smla_gpu_synchronize(int32_t id, struct smla_error *error)
{
    if (!smla_gpu_loaded(id)) {
        const struct smla_driver *driver;
        CUdevice device;
        SMLA_TRY(smla_driver_open(&driver, error));
        return find_device(driver, id, &device, error);
    }
    struct smla_gpu_scope scope;
    SMLA_TRY(smla_gpu_enter(id, &scope, error));
    CUresult result = scope.driver->cuCtxSynchronize();
    if (result != CUDA_SUCCESS) {
        smla_driver_fail(scope.driver, result, "cuCtxSynchronize", error);
    }
    smla_gpu_leave(&scope);
    return result == CUDA_SUCCESS ? SMLA_OK : SMLA_ERROR_CUDA;
}
