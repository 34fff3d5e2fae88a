// CUDA's driver, libcuda.so.1, as far as PyTorch and Triton use it. It calls the runtime, which is loaded first.
#include <cuda.h>

#include "fake_cuda.h"

extern "C" {
int fake_cuda_on_device(const void* pointer);
cudaError_t fake_cuda_work(cudaStream_t stream, const char* name, size_t amount);

SUCCEEDS(CUresult cuDeviceGet(CUdevice* device, int number), *device = number)
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)attribute, device);  // same numbers
}
SUCCEEDS(CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active), *flags = 0, *active = 1)
SUCCEEDS(CUresult cuCtxGetCurrent(CUcontext* context), *context = (CUcontext)1)
SUCCEEDS(CUresult cuGetErrorString(CUresult, const char** text), *text = "an error of the fake CUDA runtime")
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  if (!fake_cuda_on_device((void*)pointer)) return CUDA_ERROR_INVALID_VALUE;
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
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void**, void**) {
  size_t blocks = (size_t)c->gridDimX * c->gridDimY * c->gridDimZ;
  size_t threads = blocks * c->blockDimX * c->blockDimY * c->blockDimZ;
  return (CUresult)fake_cuda_work(c->hStream, ((std::string*)function)->c_str(), threads);
}
}
