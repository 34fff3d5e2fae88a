// NCCL between processes of one machine, over shared memory, and between the devices of one process. It records order,
// streams, captures and the end of communicators, and computes the collectives' results. A call waits for the other ranks
// immediately, not on its stream. A captured call is passed to Python (arithmetic.py), which repeats it at each replay.
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "fake_cuda.h"

extern "C" int fake_cuda_live_graphs_with_nccl();

namespace {
const size_t PIECE = 1 << 20;  // bytes per rank at a time

struct Meeting {  // in shared memory; all zero at first
  std::atomic<int> arrived, round;
  char pieces[];  // PIECE bytes of each rank
};
struct Communicator {
  int rank, size;
  Meeting* meeting = nullptr;  // null: all ranks are devices of this process

  void wait_for_all() {
    int round = meeting->round;
    if (++meeting->arrived == size) {
      meeting->arrived = 0;
      meeting->round++;
    }
    while (meeting->round == round) usleep(20);
  }
  char* piece(int of) { return meeting->pieces + of * PIECE; }
};
struct Call {
  Communicator* communicator;
  const char* from;
  char* to;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t operation;
  int root;  // rank whose data all get; -1: the reduction of all
};
auto& captured = *new std::vector<Call>;
void (*on_capture)(size_t) = nullptr;  // called with the index of a captured call

size_t bytes_of(ncclDataType_t type) {
  switch (type) {
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 1;
  }
}

struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  Bfloat16& operator=(float value) {  // to nearest even
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = std::isnan(value) ? 0x7fc0 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
    return *this;
  }
};
// Reduce in rank order in the type Wide, and round at the end.
template <class Number, class Wide = Number>
void reduce_as(const std::vector<const char*>& all, char* to, size_t count, ncclRedOp_t operation) {
  for (size_t i = 0; i < count; i++) {
    Wide total = ((const Number*)all[0])[i];
    for (size_t rank = 1; rank < all.size(); rank++) {
      Wide value = ((const Number*)all[rank])[i];
      if (operation == ncclProd) total *= value;
      else if (operation == ncclMax) total = std::max(total, value);
      else if (operation == ncclMin) total = std::min(total, value);
      else total += value;
    }
    if (operation == ncclAvg) total /= (Wide)all.size();
    ((Number*)to)[i] = total;
  }
}
void combine(const Call& call, const std::vector<const char*>& all, char* to, size_t count) {
  if (call.root >= 0) memmove(to, all[call.root], count * bytes_of(call.type));
  else if (call.operation > ncclAvg) violation("a reduction that the fake NCCL does not support");
  else switch (call.type) {
    case ncclFloat16: return reduce_as<_Float16, float>(all, to, count, call.operation);
    case ncclBfloat16: return reduce_as<Bfloat16, float>(all, to, count, call.operation);
    case ncclFloat32: return reduce_as<float>(all, to, count, call.operation);
    case ncclFloat64: return reduce_as<double>(all, to, count, call.operation);
    case ncclInt32: return reduce_as<int32_t>(all, to, count, call.operation);
    case ncclUint32: return reduce_as<uint32_t>(all, to, count, call.operation);
    case ncclInt64: return reduce_as<int64_t>(all, to, count, call.operation);
    case ncclUint64: return reduce_as<uint64_t>(all, to, count, call.operation);
    case ncclInt8: return reduce_as<int8_t>(all, to, count, call.operation);
    default: return reduce_as<uint8_t>(all, to, count, call.operation);
  }
}

void meet(const Call& call) {  // with the other processes
  Communicator& here = *call.communicator;
  if (here.size == 1) {
    if (call.from && call.to) memmove(call.to, call.from, call.count * bytes_of(call.type));
    return;
  }
  std::vector<const char*> all;
  for (int rank = 0; rank < here.size; rank++) all.push_back(here.piece(rank));
  size_t width = bytes_of(call.type), at_once = PIECE / width;
  for (size_t done = 0; done < call.count; done += at_once) {
    size_t count = std::min(at_once, call.count - done);
    if (call.from) memcpy(here.piece(here.rank), call.from + done * width, count * width);
    here.wait_for_all();
    if (call.to) combine(call, all, call.to + done * width, count);
    here.wait_for_all();
  }
}
void meet_on_devices(const Call& call) {  // the last call of a group computes the results of all
  static thread_local std::vector<Call> group;
  group.push_back(call);
  if ((int)group.size() < call.communicator->size) return;
  std::vector<const char*> all;
  for (Call& each : group) all.push_back(each.from);
  std::vector<char> result(call.count * bytes_of(call.type));
  combine(call, all, result.data(), call.count);
  for (Call& each : group)
    if (each.to) memcpy(each.to, result.data(), result.size());
  group.clear();
}

void perform(const Call& call, cudaStream_t stream) {
  if (is_capturing(stream)) {
    if (!on_capture) return;
    captured.push_back(call);
    on_capture(captured.size() - 1);
  } else if (call.communicator->size == 1 || call.communicator->meeting) {
    meet(call);
  } else {
    meet_on_devices(call);
  }
}
// BROADCAST: from the root to all; REDUCE: to the root, or to all if it is -1; GATHER and SCATTER: the same for each
// rank's part.
enum Kind { BROADCAST, REDUCE, GATHER, SCATTER };
ncclResult_t collective(const char* name, Kind kind, const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t operation, int root, ncclComm_t communicator, cudaStream_t stream) {
  if (from && !on_device(from)) violation(std::string(name) + " of host memory");
  if (work(stream, name, count * bytes_of(type))) return ncclUnhandledCudaError;
  auto* here = (Communicator*)communicator;
  Call call{here, (const char*)from, (char*)to, count, type, operation, kind == BROADCAST ? root : -1};
  if (kind == REDUCE && root >= 0 && root != here->rank) call.to = nullptr;
  if (kind == BROADCAST || kind == REDUCE) perform(call, stream);
  else for (int rank = 0; rank < here->size; rank++) {
    size_t offset = rank * count * bytes_of(type);
    if (kind == GATHER) call.to = (char*)to + offset, call.root = rank;
    if (kind == SCATTER) call.from = (const char*)from + offset, call.to = rank == here->rank ? (char*)to : nullptr;
    perform(call, stream);
  }
  return ncclSuccess;
}
ncclResult_t create(ncclComm_t* communicator, int size, int rank, const ncclUniqueId& id) {
  auto* here = new Communicator{rank, size};
  *communicator = (ncclComm_t)here;
  if (size == 1) return ncclSuccess;
  size_t bytes = sizeof(Meeting) + size * PIECE;
  int file = open(id.internal, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, bytes)) return ncclSystemError;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return ncclSystemError;
  here->meeting = (Meeting*)memory;
  here->wait_for_all();
  if (rank == 0) unlink(id.internal);  // it lives as long as a rank has it mapped
  return ncclSuccess;
}
ncclResult_t end(const char* call) {
  if (fake_cuda_live_graphs_with_nccl())
    violation(std::string(call) + " while a graph that captured NCCL is alive: NCCL would wait for it forever");
  return ncclSuccess;
}
}  // namespace

extern "C" {
// Python repeats each captured call at each replay.
void fake_cuda_on_captured_collective(void (*function)(size_t)) { on_capture = function; }
void fake_cuda_repeat_collective(size_t number) { meet(captured[number]); }

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  *id = {};
  snprintf(id->internal, sizeof id->internal, "/dev/shm/fake-nccl-%08x%08x", random(), random());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int size, ncclUniqueId id, int rank) {
  return create(communicator, size, rank, id);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return create(communicator, size, rank, id);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* communicator, int size, int rank, int, ncclUniqueId* ids,
                                      ncclConfig_t*) {
  return create(communicator, size, rank, ids[0]);
}
ncclResult_t ncclCommInitAll(ncclComm_t* communicators, int size, const int*) {
  for (int rank = 0; rank < size; rank++) communicators[rank] = (ncclComm_t) new Communicator{rank, size};
  return ncclSuccess;
}
ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) {
  violation("the fake NCCL does not split communicators");
  return ncclInvalidUsage;
}
ncclResult_t ncclCommCount(const ncclComm_t communicator, int* count) {
  *count = ((Communicator*)communicator)->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int* rank) {
  *rank = ((Communicator*)communicator)->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "an error of the fake NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclCommDestroy(ncclComm_t) { return end("ncclCommDestroy"); }
ncclResult_t ncclCommAbort(ncclComm_t) { return end("ncclCommAbort"); }
ncclResult_t ncclCommFinalize(ncclComm_t) { return end("ncclCommFinalize"); }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) {
  *operation = (ncclRedOp_t)10;
  return ncclSuccess;
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                           ncclComm_t communicator, cudaStream_t stream) {
  return collective("ncclAllReduce", REDUCE, from, to, count, type, operation, -1, communicator, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t communicator, cudaStream_t stream) {
  return collective("ncclBroadcast", BROADCAST, from, to, count, type, ncclSum, root, communicator, stream);
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, ncclComm_t communicator,
                       cudaStream_t stream) {
  return collective("ncclBroadcast", BROADCAST, data, data, count, type, ncclSum, root, communicator, stream);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation, int root,
                        ncclComm_t communicator, cudaStream_t stream) {
  return collective("ncclReduce", REDUCE, from, to, count, type, operation, root, communicator, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                               ncclComm_t communicator, cudaStream_t stream) {
  return collective("ncclReduceScatter", SCATTER, from, to, count, type, operation, -1, communicator, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t communicator,
                           cudaStream_t stream) {
  return collective("ncclAllGather", GATHER, from, to, count, type, ncclSum, -1, communicator, stream);
}
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  violation("the fake NCCL has no point-to-point messages");
  return ncclInvalidUsage;
}
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  violation("the fake NCCL has no point-to-point messages");
  return ncclInvalidUsage;
}
}
