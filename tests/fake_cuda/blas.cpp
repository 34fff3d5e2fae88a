// cuBLAS: products are recorded, not computed. Without its header, which needs parts of the toolkit that PyTorch's
// packages lack; parameters that are not used are omitted, as C's calling convention allows.
#include "fake_cuda.h"

namespace {
enum Status { SUCCESS = 0, EXECUTION_FAILED = 13 };
struct Handle {
  cudaStream_t stream = nullptr;
};
struct Choice {  // of an algorithm, in cuBLASLt's layout
  unsigned long algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

int product(cudaStream_t stream) { return work(stream, "cublas", 1) ? EXECUTION_FAILED : SUCCESS; }
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
int cublasSgemm_v2(Handle* handle) { return product(handle->stream); }
int cublasSgemmStridedBatched(Handle* handle) { return product(handle->stream); }
int cublasGemmEx(Handle* handle) { return product(handle->stream); }
int cublasGemmStridedBatchedEx(Handle* handle) { return product(handle->stream); }

// ---- cuBLASLt
size_t cublasLtGetVersion() { return 130100; }
int cublasLtMatmulDescCreate(void** descriptor) { return new_descriptor(descriptor); }
int cublasLtMatmulPreferenceCreate(void** descriptor) { return new_descriptor(descriptor); }
int cublasLtMatrixLayoutCreate(void** descriptor) { return new_descriptor(descriptor); }
int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int wanted, Choice* choices,
                                   int* found) {
  *found = wanted > 0;
  if (*found) choices[0] = {};
  return SUCCESS;
}
int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                   void*, void*, const void*, void*, size_t, cudaStream_t stream) {
  return product(stream);
}
}
