// cuDNN: convolutions and batch normalisations are recorded, not computed. Of its headers only the one for graphs, so
// that parameters of other functions that are not used can be omitted, as C's calling convention allows.
#include <cudnn_graph.h>

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
SUCCEEDS(cudnnStatus_t cudnnCreate(cudnnHandle_t* handle), *handle = (cudnnHandle_t) new Handle)
SUCCEEDS(cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream), ((Handle*)handle)->stream = stream)
SUCCEEDS(cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream), *stream = ((Handle*)handle)->stream)
size_t cudnnGetVersion() { return CUDNN_VERSION; }
SUCCEEDS(cudnnStatus_t cudnnGetProperty(libraryPropertyType property, int* value),
         *value = property == MAJOR_VERSION ? CUDNN_MAJOR : property == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL)
const char* cudnnGetErrorString(cudnnStatus_t) { return "an error of the fake cuDNN"; }
void cudnnGetLastErrorString(char* text, size_t) { *text = 0; }

// ---- batch normalisation
SUCCEEDS(int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int, int, void*, void*, void*, void*,
                                                                      void*, size_t* bytes),
         *bytes = 4096)
SUCCEEDS(int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int, int, void*, void*, void*, void*, void*,
                                                               void*, void*, size_t* bytes),
         *bytes = 4096)
SUCCEEDS(int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int, int, void*, void*, size_t* bytes),
         *bytes = 0)
int cudnnBatchNormalizationForwardTrainingEx(cudnnHandle_t handle) { return run(handle, "cudnn batch norm"); }
int cudnnBatchNormalizationBackwardEx(cudnnHandle_t handle) { return run(handle, "cudnn batch norm backward"); }
int cudnnBatchNormalizationForwardInference(cudnnHandle_t handle) { return run(handle, "cudnn batch norm inference"); }

// ---- convolutions, by backend descriptors
SUCCEEDS(cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t* descriptor),
         *descriptor = (cudnnBackendDescriptor_t) new char)
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t* count, void* values) {
  // one engine, and a plan as JSON
  int64_t found = type == CUDNN_TYPE_CHAR ? 3 : name == CUDNN_ATTR_ENGINEHEUR_RESULTS || type == CUDNN_TYPE_INT64;
  if (count) *count = found;
  if (!values || wanted < found) return CUDNN_STATUS_SUCCESS;
  if (type == CUDNN_TYPE_INT64) *(int64_t*)values = name == CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT;
  if (type == CUDNN_TYPE_CHAR) memcpy(values, "{}", 3);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  return run(handle, "cudnn convolution");
}
}
