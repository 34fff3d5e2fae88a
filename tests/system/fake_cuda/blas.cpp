// cuBLAS: products are recorded, not computed. Without its header, which needs parts of the toolkit that PyTorch's
// packages lack; parameters that are not used are omitted, as C's calling convention allows.
#include "fake_cuda.h"

namespace {
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
const int EXECUTION_FAILED = 13;
int product(cudaStream_t stream) { return work(stream, "cublas", 1) ? EXECUTION_FAILED : 0; }
}  // namespace

extern "C" {
SUCCEEDS(int cublasCreate_v2(Handle** handle), *handle = new Handle)
SUCCEEDS(int cublasSetStream_v2(Handle* handle, cudaStream_t stream), handle->stream = stream)
int cublasSgemm_v2(Handle* handle) { return product(handle->stream); }
int cublasSgemmStridedBatched(Handle* handle) { return product(handle->stream); }
int cublasGemmEx(Handle* handle) { return product(handle->stream); }
int cublasGemmStridedBatchedEx(Handle* handle) { return product(handle->stream); }

// ---- cuBLASLt
SUCCEEDS(int cublasLtMatmulDescCreate(char** descriptor), *descriptor = new char[512]())
SUCCEEDS(int cublasLtMatmulPreferenceCreate(char** descriptor), *descriptor = new char[512]())
SUCCEEDS(int cublasLtMatrixLayoutCreate(char** descriptor), *descriptor = new char[512]())
SUCCEEDS(int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Choice* choices,
                                            int* found),
         *choices = {}, *found = 1)
int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                   void*, void*, const void*, void*, size_t, cudaStream_t stream) {
  return product(stream);
}
}
