/* A libcuda.so.1 for Triton's own launcher: every call succeeds, and a launch goes to a callback. */
#include <stddef.h>
#include <stdint.h>

typedef struct {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
    void *stream, *attributes;
    unsigned num_attributes;
} Config;
typedef int (*Launch)(uint64_t function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned shared, void **);

static Launch launch;
static int shared_limit, processors, major, minor;
static uint64_t handles = 100;

void emulator_setup(Launch callback, int shared, int count, int capability) {
    launch = callback;
    shared_limit = shared;
    processors = count;
    major = capability / 10;
    minor = capability % 10;
}

int cuLaunchKernelEx(const Config *c, void *function, void **parameters, void **extra) {
    return launch((uint64_t)function, c->grid_x, c->grid_y, c->grid_z, c->block_x, c->shared, parameters);
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
        case 16: *value = processors; break;
        case 75: *value = major; break;
        case 76: *value = minor; break;
        case 81: case 97: *value = shared_limit; break;
        default: *value = 1;
    }
    return 0;
}

int cuFuncGetAttribute(int *value, int attribute, void *function) {
    *value = attribute == 0 ? 1024 : attribute == 4 ? 64 : 0;
    return 0;
}

int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)++handles; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return 0; }
int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) { *(uint64_t *)value = pointer; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "the emulator found a fault"; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }

#define SUCCEEDS(name) int name() { return 0; }
SUCCEEDS(cuInit)
SUCCEEDS(cuCtxGetDevice)
SUCCEEDS(cuCtxGetLimit)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuCtxSetLimit)
SUCCEEDS(cuDeviceGet)
SUCCEEDS(cuDeviceGetCount)
SUCCEEDS(cuDevicePrimaryCtxRetain)
SUCCEEDS(cuDriverGetVersion)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuOccupancyMaxActiveClusters)
SUCCEEDS(cuTensorMapEncodeTiled)
SUCCEEDS(cuTensorMapEncodeIm2col)
