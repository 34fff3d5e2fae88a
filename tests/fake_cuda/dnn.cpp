// cuDNN: convolutions and batch normalisations are recorded with types, shapes and layouts, not computed.
#include <cudnn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "fake_cuda.h"

namespace {
struct Handle {
  cudaStream_t stream = nullptr;
};
cudnnStatus_t run(cudnnHandle_t handle, const std::string& name) {
  return work(((Handle*)handle)->stream, name, 1) ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}

std::string name_type(int type) {
  switch (type) {
    case CUDNN_DATA_FLOAT: return "float32";
    case CUDNN_DATA_DOUBLE: return "float64";
    case CUDNN_DATA_HALF: return "float16";
    case CUDNN_DATA_BFLOAT16: return "bfloat16";
    default: return "type " + std::to_string(type);
  }
}
// Whether dimensions in this order, innermost first, lie in memory without gaps.
bool dense(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, const std::vector<int>& order) {
  int64_t expected = 1;
  for (int i : order) {
    if (sizes[i] != 1 && strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}
std::string describe(int type, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  std::string text = name_type(type);
  for (size_t i = 0; i < sizes.size(); i++) text += (i ? "x" : " ") + std::to_string(sizes[i]);
  if (sizes.size() != 4) return text;
  bool last = dense(sizes, strides, {1, 3, 2, 0}), first = dense(sizes, strides, {3, 2, 1, 0});
  return text + (last && first ? "" : last ? " NHWC" : first ? " NCHW" : " strided");
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

// ---- batch normalisation, by the older descriptors
struct Tensor {
  int type = 0;
  std::vector<int64_t> sizes, strides;
};
static std::string describe_tensor(const void* tensor) {
  return describe(((Tensor*)tensor)->type, ((Tensor*)tensor)->sizes, ((Tensor*)tensor)->strides);
}
cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* tensor) {
  *tensor = (cudnnTensorDescriptor_t) new Tensor;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t tensor) {
  delete (Tensor*)tensor;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t tensor, cudnnDataType_t type, int count,
                                         const int sizes[], const int strides[]) {
  *(Tensor*)tensor = {type, {sizes, sizes + count}, {strides, strides + count}};
  return CUDNN_STATUS_SUCCESS;
}
#define DESCRIPTOR(Kind)                                                               \
  cudnnStatus_t cudnnCreate##Kind##Descriptor(cudnn##Kind##Descriptor_t* descriptor) { \
    *descriptor = (cudnn##Kind##Descriptor_t) new Tensor;                              \
    return CUDNN_STATUS_SUCCESS;                                                       \
  }
DESCRIPTOR(Activation)
DESCRIPTOR(Dropout)
DESCRIPTOR(Filter)
DESCRIPTOR(Convolution)
DESCRIPTOR(Pooling)
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
    const cudnnTensorDescriptor_t x, const void*, const cudnnTensorDescriptor_t, const void*,
    const cudnnTensorDescriptor_t y, void*, const cudnnTensorDescriptor_t, const void*, const void*, double, void*, void*,
    double, void*, void*, cudnnActivationDescriptor_t, void*, size_t, void*, size_t) {
  return run(handle, "cudnn batch norm " + describe_tensor(x) + " to " + describe_tensor(y));
}
cudnnStatus_t cudnnBatchNormalizationBackwardEx(
    cudnnHandle_t handle, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const void*, const void*, const void*, const void*,
    const cudnnTensorDescriptor_t x, const void*, const cudnnTensorDescriptor_t, const void*,
    const cudnnTensorDescriptor_t dy, const void*, const cudnnTensorDescriptor_t, void*, const cudnnTensorDescriptor_t dx,
    void*, const cudnnTensorDescriptor_t, const void*, const void*, void*, void*, double, const void*, const void*,
    cudnnActivationDescriptor_t, void*, size_t, void*, size_t) {
  std::string from = describe_tensor(x) + " and " + describe_tensor(dy);
  return run(handle, "cudnn batch norm backward " + from + " to " + describe_tensor(dx));
}
cudnnStatus_t cudnnBatchNormalizationForwardInference(cudnnHandle_t handle, cudnnBatchNormMode_t, const void*, const void*,
                                                      const cudnnTensorDescriptor_t x, const void*,
                                                      const cudnnTensorDescriptor_t, void*, const cudnnTensorDescriptor_t,
                                                      const void*, const void*, const void*, const void*, double) {
  return run(handle, "cudnn batch norm inference " + describe_tensor(x));
}
cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t, size_t* bytes) {
  *bytes = 1024;
  return CUDNN_STATUS_SUCCESS;
}

// ---- convolutions, by backend descriptors: typed attributes, some of them descriptors
struct Attribute {
  int64_t count = 0;
  std::vector<char> bytes;
};
struct Descriptor {
  int kind = 0;
  std::map<int, Attribute> attributes;

  Descriptor* child(int name, int which = 0) {
    auto found = attributes.find(name);
    if (found == attributes.end() || found->second.count <= which) return nullptr;
    return ((Descriptor**)found->second.bytes.data())[which];
  }
};
static size_t bytes_of(int type) {
  switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_FRACTION:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    default: return 4;
  }
}
static std::string describe_child(Descriptor* operation, int name) {
  Descriptor* tensor = operation->child(name);
  if (!tensor) return "nothing";
  auto numbers = [&](int attribute) {
    auto& values = tensor->attributes[attribute];
    return std::vector<int64_t>((int64_t*)values.bytes.data(), (int64_t*)values.bytes.data() + values.count);
  };
  return describe(*(int*)tensor->attributes[CUDNN_ATTR_TENSOR_DATA_TYPE].bytes.data(),
                  numbers(CUDNN_ATTR_TENSOR_DIMENSIONS), numbers(CUDNN_ATTR_TENSOR_STRIDES));
}
static std::string describe_operation(Descriptor* operation) {
  auto text = [&](const char* what, int from, int with, int to) {
    return std::string(what) + describe_child(operation, from) + " and " + describe_child(operation, with) + " to " +
           describe_child(operation, to);
  };
  switch (operation->kind) {
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
      return text(" convolution ", CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                  CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y);
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
      return text(" convolution backward by input ", CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX);
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
      return text(" convolution backward by weight ", CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW);
    default: return " operation " + std::to_string(operation->kind);
  }
}
cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t kind, cudnnBackendDescriptor_t* descriptor) {
  *descriptor = (cudnnBackendDescriptor_t) new Descriptor{kind};
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* values) {
  auto* bytes = (const char*)values;
  ((Descriptor*)descriptor)->attributes[name] = {count, {bytes, bytes + count * bytes_of(type)}};
  return CUDNN_STATUS_SUCCESS;
}
// The heuristic offers one engine, which holds the operations to run.
static void offer_engine(Descriptor* heuristic, Descriptor* configuration) {
  auto* engine = new Descriptor{CUDNN_BACKEND_ENGINE_DESCRIPTOR};
  engine->attributes[CUDNN_ATTR_ENGINE_OPERATION_GRAPH] = heuristic->attributes[CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH];
  cudnnBackendSetAttribute((cudnnBackendDescriptor_t)configuration, CUDNN_ATTR_ENGINECFG_ENGINE,
                           CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &engine);
}
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const handle, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t wanted, int64_t* count, void* values) {
  auto* descriptor = (Descriptor*)handle;
  int64_t ignored;
  int64_t& found = count ? *count : ignored;
  found = 0;
  auto attribute = descriptor->attributes.find(name);
  if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
    found = 1;
    if (values && wanted > 0) offer_engine(descriptor, *(Descriptor**)values);
  } else if (attribute != descriptor->attributes.end()) {
    found = attribute->second.count;
    auto& bytes = attribute->second.bytes;
    if (values && type == CUDNN_TYPE_BACKEND_DESCRIPTOR && wanted > 0)
      **(Descriptor**)values = **(Descriptor**)bytes.data();
    else if (values)
      memcpy(values, bytes.data(), std::min<size_t>(wanted * bytes_of(type), bytes.size()));
  } else if (type == CUDNN_TYPE_INT64) {
    found = 1;
    if (values && wanted > 0) *(int64_t*)values = name == CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT;
  } else if (type == CUDNN_TYPE_CHAR) {  // a plan as JSON
    found = 3;
    if (values && wanted >= 3) memcpy(values, "{}", 3);
  }
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t) {
  Descriptor* configuration = ((Descriptor*)plan)->child(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  Descriptor* engine = configuration ? configuration->child(CUDNN_ATTR_ENGINECFG_ENGINE) : nullptr;
  Descriptor* graph = engine ? engine->child(CUDNN_ATTR_ENGINE_OPERATION_GRAPH) : nullptr;
  std::string name = "cudnn";
  int64_t operations = graph ? graph->attributes[CUDNN_ATTR_OPERATIONGRAPH_OPS].count : 0;
  for (int64_t i = 0; i < operations; i++) name += describe_operation(graph->child(CUDNN_ATTR_OPERATIONGRAPH_OPS, i));
  return run(handle, name);
}
}
