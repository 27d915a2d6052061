#include "gpu/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

typedef CUresult get_proc_address(const char *name, void **function, int version, uint64_t flags,
                                  int *found);

static struct smla_driver functions;
static struct smla_error failure; /* of opening; status SMLA_OK once the driver is usable */
static pthread_once_t opened = PTHREAD_ONCE_INIT;
static atomic_bool forked;

static void mark_forked(void)
{
    atomic_store_explicit(&forked, true, memory_order_relaxed);
}

/* POSIX lets an object pointer of dlsym be read as a function pointer; ISO C only through bytes. */
static void set_pointer(void *function, void *symbol)
{
    memcpy(function, &symbol, sizeof symbol);
}

static enum smla_status open_driver(struct smla_error *error)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    SMLA_FAIL_IF(!library, error, SMLA_ERROR_UNSUPPORTED, "there is no NVIDIA driver: %s",
                 dlerror());

    get_proc_address *get = NULL;
    set_pointer(&get, dlsym(library, "cuGetProcAddress_v2"));
    SMLA_FAIL_IF(!get, error, SMLA_ERROR_UNSUPPORTED,
                 "the NVIDIA driver is older than CUDA 12.0: it has no cuGetProcAddress_v2");

#define FIND(name, version, parameters)                                                            \
    do {                                                                                           \
        void *symbol = NULL;                                                                       \
        int found = 0;                                                                             \
        CUresult result = get(#name, &symbol, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &found); \
        SMLA_FAIL_IF(result != CUDA_SUCCESS || !symbol, error, SMLA_ERROR_UNSUPPORTED,             \
                     "the NVIDIA driver is too old: it has no %s of CUDA %d.%d", #name,            \
                     version / 1000, version % 1000 / 10);                                         \
        set_pointer(&functions.name, symbol);                                                      \
    } while (0);
    SMLA_DRIVER_FUNCTIONS(FIND)
#undef FIND

    CUresult result = functions.cuInit(0);
    SMLA_FAIL_IF(result == CUDA_ERROR_NO_DEVICE, error, SMLA_ERROR_UNSUPPORTED,
                 "the NVIDIA driver finds no GPU");
    if (result != CUDA_SUCCESS) return smla_driver_fail(&functions, result, "cuInit", error);
    pthread_atfork(NULL, NULL, mark_forked);
    return SMLA_OK;
}

static void open_once(void)
{
    open_driver(&failure);
}

enum smla_status smla_driver_open(const struct smla_driver **driver, struct smla_error *error)
{
    pthread_once(&opened, open_once);
    if (failure.status != SMLA_OK) {
        *error = failure;
        return failure.status;
    }
    if (atomic_load_explicit(&forked, memory_order_relaxed)) {
        smla_fail(error, SMLA_ERROR_CUDA,
                  "CUDA was in use when this process was forked and cannot be used after it: start "
                  "worker processes with the method \"spawn\" or \"forkserver\"");
        error->code = CUDA_ERROR_NOT_INITIALIZED;
        return SMLA_ERROR_CUDA;
    }
    *driver = &functions;
    return SMLA_OK;
}

/* Codes that a kernel leaves behind, which whatever call comes next returns. */
static bool is_asynchronous(CUresult result)
{
    switch (result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT: return true;
    default: return result >= CUDA_ERROR_ASSERT && result <= CUDA_ERROR_LAUNCH_FAILED;
    }
}

enum smla_status smla_driver_fail(const struct smla_driver *driver, CUresult result,
                                  const char *function, struct smla_error *error)
{
    const char *name = NULL;
    const char *text = NULL;
    driver->cuGetErrorName(result, &name);
    driver->cuGetErrorString(result, &text);
    smla_fail(error, SMLA_ERROR_CUDA, "%s failed: %s (%d): %s%s", function,
              name ? name : "unknown error", result, text ? text : "no description",
              is_asynchronous(result) ? "; work that was launched earlier, by this library or by "
                                        "another, may have caused it"
                                      : "");
    error->code = result;
    return SMLA_ERROR_CUDA;
}
