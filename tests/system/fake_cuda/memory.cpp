// Devices and memory. Device memory is host memory, committed only when touched, so 140 GB cost nothing.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "fake_cuda.h"

namespace {
constexpr size_t TOTAL = 150'000'000'000;  // of each device: an H200
thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;

int count_devices() {
  const char* number = getenv("FAKE_CUDA_DEVICES");
  return number ? atoi(number) : 1;
}

struct Block {
  size_t bytes;
  int device;
};
struct Blocks {
  std::map<char*, Block> blocks;
  std::map<int, size_t> totals;  // of each device

  const Block* find(const void* pointer) const {
    auto block = blocks.upper_bound((char*)pointer);
    bool inside = block != blocks.begin() && (char*)pointer < (--block)->first + block->second.bytes;
    return inside ? &block->second : nullptr;
  }
  bool hold(const void* pointer) const { return find(pointer); }
  cudaError_t take(void** pointer, size_t bytes) {
    size_t whole = bytes ? (bytes + 4095) / 4096 * 4096 : 4096;
    if (totals[device] + whole > TOTAL) return failed(cudaErrorMemoryAllocation);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    *pointer = mmap(nullptr, whole, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (*pointer == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    blocks[(char*)*pointer] = {whole, device};
    totals[device] += whole;
    return cudaSuccess;
  }
  cudaError_t give_back(void* pointer) {
    auto block = blocks.find((char*)pointer);
    if (block == blocks.end()) return failed(cudaErrorInvalidValue);
    munmap(pointer, block->second.bytes);
    totals[block->second.device] -= block->second.bytes;
    blocks.erase(block);
    return cudaSuccess;
  }
};
auto& on_gpu = *new Blocks;
auto& pinned = *new Blocks;

std::string describe_copy(const void* to, const void* from) {
  if (on_gpu.hold(to) && on_gpu.hold(from)) return "copy device to device";
  if (on_gpu.hold(to)) return pinned.hold(from) ? "copy to device" : "copy to device from pageable memory";
  if (on_gpu.hold(from)) return pinned.hold(to) ? "copy to host" : "copy to host into pageable memory";
  return "copy host to host";
}
}  // namespace

bool on_device(const void* pointer) {
  LOCK;
  return on_gpu.hold(pointer);
}

cudaError_t failed(cudaError_t error) {
  if (error) last_error = error;
  return error;
}

extern "C" {
int fake_cuda_on_device(const void* pointer) { return on_device(pointer); }  // for driver.cpp, another library

// ---- devices
SUCCEEDS(cudaError_t cudaGetDeviceCount(int* count), *count = count_devices())
SUCCEEDS(cudaError_t cudaGetDevice(int* number), *number = device)
cudaError_t cudaSetDevice(int number) {
  if (number < 0 || number >= count_devices()) return failed(cudaErrorInvalidDevice);
  device = number;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int number) {
  cudaDeviceProp& p = *properties;
  memset(&p, 0, sizeof p);
  strcpy(p.name, "fake CUDA runtime");
  memset(p.uuid.bytes, 0x11 + number, 16);
  p.major = 9, p.minor = 0, p.warpSize = 32, p.multiProcessorCount = 132, p.pciBusID = 1 + number;
  p.totalGlobalMem = TOTAL, p.totalConstMem = 65536, p.l2CacheSize = 62914560, p.memPitch = 2147483647;
  p.maxThreadsPerBlock = 1024, p.maxThreadsPerMultiProcessor = 2048, p.maxBlocksPerMultiProcessor = 32;
  p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024, p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = 2147483647, p.maxGridSize[1] = p.maxGridSize[2] = 65535;
  p.sharedMemPerBlock = 49152, p.sharedMemPerBlockOptin = 232448, p.sharedMemPerMultiprocessor = 233472;
  p.regsPerBlock = p.regsPerMultiprocessor = 65536, p.memoryBusWidth = 6144, p.asyncEngineCount = 3;
  p.concurrentKernels = p.streamPrioritiesSupported = p.unifiedAddressing = p.canMapHostMemory = 1;
  p.cooperativeLaunch = p.clusterLaunch = p.memoryPoolsSupported = p.managedMemory = p.hostRegisterSupported = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int number) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, number);
  static const std::map<int, int> known = {
      {cudaDevAttrMultiProcessorCount, p.multiProcessorCount}, {cudaDevAttrMaxRegistersPerBlock, p.regsPerBlock},
      {cudaDevAttrComputeCapabilityMajor, p.major}, {cudaDevAttrComputeCapabilityMinor, p.minor},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, p.sharedMemPerBlockOptin}, {cudaDevAttrWarpSize, p.warpSize},
      {cudaDevAttrGlobalMemoryBusWidth, p.memoryBusWidth}, {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMemoryClockRate, 3201000},
  };
  auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}
SUCCEEDS(cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest), *least = 0, *greatest = -5)
SUCCEEDS(cudaError_t cudaDeviceCanAccessPeer(int* can, int, int), *can = 1)
SUCCEEDS(cudaError_t cudaDeviceSynchronize(), NOT_WHILE_CAPTURING host_waits("cudaDeviceSynchronize"))
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t error) { return error ? "an error of the fake CUDA runtime" : "no error"; }
const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// ---- memory
cudaError_t cudaMalloc(void** pointer, size_t bytes) { NOT_WHILE_CAPTURING return on_gpu.take(pointer, bytes); }
cudaError_t cudaFree(void* pointer) { NOT_WHILE_CAPTURING return pointer ? on_gpu.give_back(pointer) : cudaSuccess; }
cudaError_t cudaHostAlloc(void** to, size_t bytes, unsigned) { NOT_WHILE_CAPTURING return pinned.take(to, bytes); }
cudaError_t cudaFreeHost(void* pointer) { NOT_WHILE_CAPTURING return pinned.give_back(pointer); }
SUCCEEDS(cudaError_t cudaMemGetInfo(size_t* available, size_t* all),
         LOCK; *all = TOTAL, *available = TOTAL - on_gpu.totals[device])
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  LOCK;
  *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, (void*)pointer};
  if (const Block* block = on_gpu.find(pointer))
    *attributes = {cudaMemoryTypeDevice, block->device, (void*)pointer, nullptr};
  if (const Block* block = pinned.find(pointer))
    *attributes = {cudaMemoryTypeHost, block->device, (void*)pointer, (void*)pointer};
  return cudaSuccess;
}

// ---- copies: done at once unless captured
SUCCEEDS(cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind),
         NOT_WHILE_CAPTURING host_waits("cudaMemcpy"); memmove(to, from, bytes))
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  LOCK;
  cudaError_t error = work(stream, describe_copy(to, from), bytes);
  if (!error && !is_capturing(stream)) memmove(to, from, bytes);
  return error;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  LOCK;
  cudaError_t error = work(stream, "memset", bytes);
  if (!error && !is_capturing(stream)) memset(to, value, bytes);
  return error;
}
}
