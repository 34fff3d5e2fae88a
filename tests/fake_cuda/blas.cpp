// cuBLAS: products are recorded, not computed. Without its header, which needs parts of the toolkit that PyTorch's packages
// lack.
#include <library_types.h>

#include <cstring>

#include "fake_cuda.h"

namespace {
enum Status { SUCCESS = 0, EXECUTION_FAILED = 13 };
constexpr int TF32_MATH = 3;
struct Handle {
  cudaStream_t stream = nullptr;
  int math = 0, pointers = 0;
};
struct Algorithm {
  unsigned long data[8];
};
struct Choice {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

Status product(cudaStream_t stream, const std::string& kind, int m, int n, int k, int batch = 1) {
  std::string name = "cublas " + kind + " " + std::to_string(m) + "x" + std::to_string(n) + "x" + std::to_string(k);
  return work(stream, batch == 1 ? name : name + " x " + std::to_string(batch), 1) ? EXECUTION_FAILED : SUCCESS;
}
std::string name_type(int type) {
  switch (type) {
    case CUDA_R_32F: return "float32";
    case CUDA_R_16F: return "float16";
    case CUDA_R_16BF: return "bfloat16";
    case CUDA_R_64F: return "float64";
    default: return "type " + std::to_string(type);
  }
}
int new_descriptor(void** descriptor) {
  *descriptor = new char[512]();
  return SUCCESS;
}
}  // namespace

extern "C" {
int cublasCreate_v2(Handle** handle) {
  *handle = new Handle;
  return SUCCESS;
}
int cublasSetStream_v2(Handle* handle, cudaStream_t stream) {
  handle->stream = stream;
  return SUCCESS;
}
int cublasSetMathMode(Handle* handle, int math) {
  handle->math = math;
  return SUCCESS;
}
int cublasGetMathMode(Handle* handle, int* math) {
  *math = handle->math;
  return SUCCESS;
}
int cublasSetPointerMode_v2(Handle* handle, int pointers) {
  handle->pointers = pointers;
  return SUCCESS;
}
int cublasGetPointerMode_v2(Handle* handle, int* pointers) {
  *pointers = handle->pointers;
  return SUCCESS;
}
int cublasSgemm_v2(Handle* handle, int, int, int m, int n, int k, const float*, const float*, int, const float*, int,
                   const float*, float*, int) {
  return product(handle->stream, handle->math & TF32_MATH ? "tf32" : "float32", m, n, k);
}
int cublasGemmEx(Handle* handle, int, int, int m, int n, int k, const void*, const void*, int type, int, const void*, int,
                 int, const void*, void*, int, int, int, int) {
  return product(handle->stream, name_type(type), m, n, k);
}
int cublasGemmStridedBatchedEx(Handle* handle, int, int, int m, int n, int k, const void*, const void*, int type, int,
                               long long, const void*, int, int, long long, const void*, void*, int, int, long long,
                               int batch, int, int) {
  return product(handle->stream, name_type(type), m, n, k, batch);
}

// ---- cuBLASLt
size_t cublasLtGetVersion() { return 130100; }
int cublasLtMatmulDescCreate(void** descriptor, int, int) { return new_descriptor(descriptor); }
int cublasLtMatmulPreferenceCreate(void** descriptor) { return new_descriptor(descriptor); }
int cublasLtMatrixLayoutCreate(void** descriptor, int, unsigned long, unsigned long, long) {
  return new_descriptor(descriptor);
}
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, Choice* choices,
                                   int* found) {
  *found = wanted > 0;
  if (*found) choices[0] = {};
  return SUCCESS;
}
int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                   void*, void*, const Algorithm*, void*, size_t, cudaStream_t stream) {
  return product(stream, "lt", 0, 0, 0);
}
}
