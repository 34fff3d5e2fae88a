// Shared by the C++ files of the fake CUDA runtime.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>
#include <string>

// One lock for all: PyTorch calls from several threads (autograd, loaders, NCCL's watchdog).
extern std::recursive_mutex global_lock;
#define LOCK std::lock_guard<std::recursive_mutex> locked(global_lock)

// For calls that wait, allocate or free: return an error if a thread may not make them during a capture.
#define NOT_WHILE_CAPTURING \
  LOCK;                     \
  if (cudaError_t error = forbidden_while_capturing(__func__)) return error;

// Define a function that writes its answers and returns 0, which is success.
#define SUCCEEDS(function, ...) \
  function {                    \
    __VA_ARGS__;                \
    return {};                  \
  }

// Record work of `amount` (threads, bytes, elements) on a stream; return an error if a GPU would refuse it.
cudaError_t work(cudaStream_t stream, const std::string& name, size_t amount);
// Whether work on the stream is captured into a graph instead of done.
bool is_capturing(cudaStream_t stream);
// Record that the host waits for the device.
void host_waits(const char* how);
// Record a call that a GPU would refuse or that would go wrong on one.
void violation(const std::string& what);
// Store an error for cudaGetLastError and return it.
cudaError_t failed(cudaError_t error);
cudaError_t forbidden_while_capturing(const char* call);
bool on_device(const void* pointer);
