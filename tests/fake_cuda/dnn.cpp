// cuDNN: convolutions and batch normalisations are recorded, not computed.
#include <cudnn.h>

#include <cstring>

#include "fake_cuda.h"

namespace {
struct Handle {
  cudaStream_t stream = nullptr;
};
cudnnStatus_t run(cudnnHandle_t handle, const char* name) {
  return work(((Handle*)handle)->stream, name, 1) ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}
}  // namespace

extern "C" {
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = (cudnnHandle_t) new Handle;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  ((Handle*)handle)->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  *stream = ((Handle*)handle)->stream;
  return CUDNN_STATUS_SUCCESS;
}
size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() { return 13000; }
cudnnStatus_t cudnnGetProperty(libraryPropertyType property, int* value) {
  *value = property == MAJOR_VERSION ? CUDNN_MAJOR : property == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return CUDNN_STATUS_SUCCESS;
}
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status ? "an error of the fake cuDNN" : "CUDNN_STATUS_SUCCESS";
}
void cudnnGetLastErrorString(char* text, size_t length) {
  if (length) *text = 0;
}

#define DESCRIPTOR(Kind)                                                               \
  cudnnStatus_t cudnnCreate##Kind##Descriptor(cudnn##Kind##Descriptor_t* descriptor) { \
    *descriptor = (cudnn##Kind##Descriptor_t) new char;                                \
    return CUDNN_STATUS_SUCCESS;                                                       \
  }
DESCRIPTOR(Tensor)
DESCRIPTOR(Activation)
DESCRIPTOR(Dropout)
DESCRIPTOR(Filter)
DESCRIPTOR(Convolution)
DESCRIPTOR(Pooling)

// ---- batch normalisation
cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, size_t* bytes) {
  *bytes = 4096;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t, size_t* bytes) {
  *bytes = 4096;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t, cudnnBatchNormMode_t,
                                                                   cudnnBatchNormOps_t,
                                                                   const cudnnActivationDescriptor_t,
                                                                   const cudnnTensorDescriptor_t, size_t* bytes) {
  *bytes = 0;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBatchNormalizationForwardTrainingEx(
    cudnnHandle_t handle, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const void*, const void*,
    const cudnnTensorDescriptor_t, const void*, const cudnnTensorDescriptor_t, const void*,
    const cudnnTensorDescriptor_t, void*, const cudnnTensorDescriptor_t, const void*, const void*, double, void*, void*,
    double, void*, void*, cudnnActivationDescriptor_t, void*, size_t, void*, size_t) {
  return run(handle, "cudnn batch norm");
}
cudnnStatus_t cudnnBatchNormalizationBackwardEx(
    cudnnHandle_t handle, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const void*, const void*, const void*, const void*,
    const cudnnTensorDescriptor_t, const void*, const cudnnTensorDescriptor_t, const void*,
    const cudnnTensorDescriptor_t, const void*, const cudnnTensorDescriptor_t, void*, const cudnnTensorDescriptor_t,
    void*, const cudnnTensorDescriptor_t, const void*, const void*, void*, void*, double, const void*, const void*,
    cudnnActivationDescriptor_t, void*, size_t, void*, size_t) {
  return run(handle, "cudnn batch norm backward");
}
cudnnStatus_t cudnnBatchNormalizationForwardInference(
    cudnnHandle_t handle, cudnnBatchNormMode_t, const void*, const void*, const cudnnTensorDescriptor_t, const void*,
    const cudnnTensorDescriptor_t, void*, const cudnnTensorDescriptor_t, const void*, const void*, const void*,
    const void*, double) {
  return run(handle, "cudnn batch norm inference");
}
cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t, size_t* bytes) {
  *bytes = 1024;
  return CUDNN_STATUS_SUCCESS;
}

// ---- convolutions, by backend descriptors
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t* descriptor) {
  *descriptor = (cudnnBackendDescriptor_t) new char;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t* count, void* values) {
  int64_t found = 0;
  if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {  // one engine
    found = 1;
  } else if (type == CUDNN_TYPE_INT64) {
    found = 1;
    if (values && wanted > 0) *(int64_t*)values = name == CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT;
  } else if (type == CUDNN_TYPE_CHAR) {  // a plan as JSON
    found = 3;
    if (values && wanted >= 3) memcpy(values, "{}", 3);
  }
  if (count) *count = found;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  return run(handle, "cudnn convolution");
}
}
