// Devices and memory. Device memory is host memory, committed only when touched, so 140 GB cost nothing.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

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
cudaError_t cudaGetDeviceCount(int* count) {
  *count = count_devices();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* number) {
  *number = device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int number) {
  if (number < 0 || number >= count_devices()) return failed(cudaErrorInvalidDevice);
  device = number;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
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
      {cudaDevAttrMultiProcessorCount, p.multiProcessorCount},
      {cudaDevAttrComputeCapabilityMajor, p.major},
      {cudaDevAttrComputeCapabilityMinor, p.minor},
      {cudaDevAttrMaxThreadsPerBlock, p.maxThreadsPerBlock},
      {cudaDevAttrMaxThreadsPerMultiProcessor, p.maxThreadsPerMultiProcessor},
      {cudaDevAttrMaxBlocksPerMultiprocessor, p.maxBlocksPerMultiProcessor},
      {cudaDevAttrMaxSharedMemoryPerBlock, p.sharedMemPerBlock},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, p.sharedMemPerBlockOptin},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, p.sharedMemPerMultiprocessor},
      {cudaDevAttrMaxRegistersPerBlock, p.regsPerBlock},
      {cudaDevAttrMaxRegistersPerMultiprocessor, p.regsPerMultiprocessor},
      {cudaDevAttrWarpSize, p.warpSize},
      {cudaDevAttrMaxGridDimX, p.maxGridSize[0]},
      {cudaDevAttrMaxGridDimY, p.maxGridSize[1]},
      {cudaDevAttrMaxGridDimZ, p.maxGridSize[2]},
      {cudaDevAttrMaxBlockDimX, p.maxThreadsDim[0]},
      {cudaDevAttrMaxBlockDimY, p.maxThreadsDim[1]},
      {cudaDevAttrL2CacheSize, p.l2CacheSize},
      {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMemoryClockRate, 3201000},
      {cudaDevAttrGlobalMemoryBusWidth, p.memoryBusWidth},
      {cudaDevAttrCanMapHostMemory, 1},
      {cudaDevAttrUnifiedAddressing, 1},
      {cudaDevAttrCooperativeLaunch, 1},
      {cudaDevAttrMemoryPoolsSupported, 1},
  };
  auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0, *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int number) {
  snprintf(text, length, "0000:%02x:00.0", 1 + number);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  NOT_WHILE_CAPTURING
  host_waits("cudaDeviceSynchronize");
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) { return error ? "an error of the fake CUDA runtime" : "cudaSuccess"; }
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit: return "operation would make the legacy stream depend on a capturing stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    default: return "an error of the fake CUDA runtime";
  }
}

// ---- memory
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  NOT_WHILE_CAPTURING
  return on_gpu.take(pointer, bytes);
}
cudaError_t cudaFree(void* pointer) {
  NOT_WHILE_CAPTURING
  return pointer ? on_gpu.give_back(pointer) : cudaSuccess;
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  NOT_WHILE_CAPTURING
  return pinned.take(pointer, bytes);
}
cudaError_t cudaFreeHost(void* pointer) {
  NOT_WHILE_CAPTURING
  return pinned.give_back(pointer);
}
cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  NOT_WHILE_CAPTURING
  pinned.blocks[(char*)pointer] = {bytes, device};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* pointer) {
  NOT_WHILE_CAPTURING
  pinned.blocks.erase((char*)pointer);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* available, size_t* all) {
  LOCK;
  *all = TOTAL, *available = TOTAL - on_gpu.totals[device];
  return cudaSuccess;
}
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
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  NOT_WHILE_CAPTURING
  host_waits("cudaMemcpy");
  memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  LOCK;
  cudaError_t error = work(stream, describe_copy(to, from), bytes);
  if (!error && !is_capturing(stream)) memmove(to, from, bytes);
  return error;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t stream) {
  LOCK;
  cudaError_t error = work(stream, describe_copy(to, from), width * height);
  for (size_t row = 0; !error && !is_capturing(stream) && row < height; row++)
    memmove((char*)to + row * to_pitch, (char*)from + row * from_pitch, width);
  return error;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  NOT_WHILE_CAPTURING
  memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  LOCK;
  cudaError_t error = work(stream, "memset", bytes);
  if (!error && !is_capturing(stream)) memset(to, value, bytes);
  return error;
}
cudaError_t cudaGetSymbolAddress(void** pointer, const void*) {
  static char symbol[65536];
  *pointer = symbol;
  return cudaSuccess;
}
}
