// Shared by the files of the fake CUDA runtime.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>
#include <string>

// One lock for all: PyTorch calls from several threads (autograd, loaders, NCCL's watchdog).
extern std::recursive_mutex everything;
#define LOCK std::lock_guard<std::recursive_mutex> locked(everything)

// A call that waits, allocates or frees: capturing threads may not make it. For functions that return a cudaError_t.
#define NOT_WHILE_CAPTURING \
  LOCK;                     \
  if (cudaError_t error = forbidden_while_capturing(__func__)) return error;

// Notes work of `amount` (threads, bytes, elements) on a stream; an error where a GPU would refuse it.
cudaError_t work(cudaStream_t stream, const std::string& name, size_t amount);
// Whether work on the stream is captured into a graph instead of done.
bool is_capturing(cudaStream_t stream);
// Notes that the host waits for the device.
void host_waits(const char* how);
// Notes what a GPU would refuse or what would go wrong on one.
void trouble(const std::string& what);
// Remembers an error for cudaGetLastError, and returns it.
cudaError_t failed(cudaError_t error);
cudaError_t forbidden_while_capturing(const char* call);
bool on_device(const void* pointer);
