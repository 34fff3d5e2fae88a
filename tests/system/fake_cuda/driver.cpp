// CUDA's driver, libcuda.so.1, as far as PyTorch, Inductor and Triton use it. It calls the runtime, which is loaded
// first.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>

#include "fake_cuda.h"

namespace {
template <typename Function>
Function runtime(const char* name) {
  return (Function)dlsym(RTLD_DEFAULT, name);
}
CUresult launch(CUfunction function, CUstream stream, size_t threads) {
  static auto work = runtime<int (*)(CUstream, const char*, size_t)>("fake_cuda_work");
  return (CUresult)work(stream, ((std::string*)function)->c_str(), threads);
}
}  // namespace

extern "C" {
SUCCEEDS(CUresult cuDeviceGet(CUdevice* device, int number), *device = number)
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);  // same numbers
}
SUCCEEDS(CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice), *context = (CUcontext)1)
SUCCEEDS(CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active), *flags = 0, *active = 1)
SUCCEEDS(CUresult cuCtxGetCurrent(CUcontext* context), *context = (CUcontext)1)
SUCCEEDS(CUresult cuCtxGetDevice(CUdevice* device), *device = 0)
SUCCEEDS(CUresult cuGetErrorString(CUresult, const char** text), *text = "an error of the fake CUDA runtime")
CUresult cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (!runtime<int (*)(const void*)>("fake_cuda_on_device")((void*)pointer)) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *(CUdeviceptr*)value = pointer;
  else
    *(unsigned*)value = attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? CU_MEMORYTYPE_DEVICE : 0;
  return CUDA_SUCCESS;
}

// ---- compiled kernels
SUCCEEDS(CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name),
         *function = (CUfunction) new std::string(std::string("triton ") + name))
SUCCEEDS(CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction),
         *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0)
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned, CUstream stream, void**, void**) {
  return launch(function, stream, (size_t)gx * gy * gz * bx * by * bz);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void**, void**) {
  size_t blocks = (size_t)c->gridDimX * c->gridDimY * c->gridDimZ;
  return launch(function, c->hStream, blocks * c->blockDimX * c->blockDimY * c->blockDimZ);
}
SUCCEEDS(CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t), *blocks = 2)
SUCCEEDS(CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*), *clusters = 66)
CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t,
                             CUdriverProcAddressQueryResult* result) {
  Dl_info own;
  dladdr((void*)cuGetProcAddress_v2, &own);
  void* library = dlopen(own.dli_fname, RTLD_LAZY);
  *function = dlsym(library, name);
  if (!*function) *function = dlsym(library, (std::string(name) + "_v2").c_str());
  if (result) *result = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return CUDA_SUCCESS;
}
}
