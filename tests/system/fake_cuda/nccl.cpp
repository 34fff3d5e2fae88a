// NCCL between processes of one machine, over shared memory, and between the devices of one process. It records order,
// streams, captures and the end of communicators, and computes the collectives' results. A call waits for the other
// ranks immediately, not on its stream. A captured call is passed to Python (arithmetic.py), which repeats it at each
// replay.
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
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
  if (type == ncclFloat64 || type == ncclInt64 || type == ncclUint64) return 8;
  if (type == ncclFloat32 || type == ncclInt32 || type == ncclUint32) return 4;
  return type == ncclFloat16 || type == ncclBfloat16 ? 2 : 1;
}

// Reduce in rank order in the type Wide, and round at the end.
template <class Number, class Wide = Number>
void reduce_as(const std::vector<const char*>& all, char* to, size_t count, ncclRedOp_t operation) {
  for (size_t i = 0; i < count; i++) {
    Wide total = ((const Number*)all[0])[i];
    for (size_t rank = 1; rank < all.size(); rank++) {
      Wide value = ((const Number*)all[rank])[i];
      if (operation == ncclMax) total = std::max(total, value);
      else if (operation == ncclMin) total = std::min(total, value);
      else total += value;
    }
    if (operation == ncclAvg) total /= (Wide)all.size();
    ((Number*)to)[i] = total;
  }
}
void combine(const Call& call, const std::vector<const char*>& all, char* to, size_t count) {
  ncclRedOp_t operation = call.operation;
  bool known = operation == ncclSum || operation == ncclMax || operation == ncclMin || operation == ncclAvg;
  if (call.root >= 0) memmove(to, all[call.root], count * bytes_of(call.type));
  else if (known && call.type == ncclFloat32) reduce_as<float>(all, to, count, operation);
  else if (known && call.type == ncclFloat64) reduce_as<double>(all, to, count, operation);
  else if (known && call.type == ncclFloat16) reduce_as<_Float16, float>(all, to, count, operation);
  else if (known && call.type == ncclInt32) reduce_as<int32_t>(all, to, count, operation);
  else violation("a reduction that the fake NCCL does not support: type " + std::to_string(call.type));
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
// BROADCAST: from the root to all; REDUCE: to the root, or to all if it is -1; GATHER: a broadcast of each rank's part.
enum Kind { BROADCAST, REDUCE, GATHER };
ncclResult_t collective(const char* name, Kind kind, const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t operation, int root, ncclComm_t communicator, cudaStream_t stream) {
  if (from && !on_device(from)) violation(std::string(name) + " of host memory");
  if (work(stream, name, count * bytes_of(type))) return ncclUnhandledCudaError;
  auto* here = (Communicator*)communicator;
  Call call{here, (const char*)from, (char*)to, count, type, operation, kind == BROADCAST ? root : -1};
  if (kind == REDUCE && root >= 0 && root != here->rank) call.to = nullptr;
  if (kind != GATHER) perform(call, stream);
  else for (int rank = 0; rank < here->size; rank++) {
    call.to = (char*)to + rank * count * bytes_of(type), call.root = rank;
    perform(call, stream);
  }
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

SUCCEEDS(ncclResult_t ncclGetVersion(int* version), *version = NCCL_VERSION_CODE)
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  *id = {};
  snprintf(id->internal, sizeof id->internal, "/dev/shm/fake-nccl-%08x%08x", random(), random());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
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
ncclResult_t ncclCommInitAll(ncclComm_t* communicators, int size, const int*) {
  for (int rank = 0; rank < size; rank++) communicators[rank] = (ncclComm_t) new Communicator{rank, size};
  return ncclSuccess;
}
SUCCEEDS(ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error), *error = ncclSuccess)
const char* ncclGetErrorString(ncclResult_t) { return "an error of the fake NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclCommDestroy(ncclComm_t) { return end("ncclCommDestroy"); }
ncclResult_t ncclCommAbort(ncclComm_t) { return end("ncclCommAbort"); }
ncclResult_t ncclCommFinalize(ncclComm_t) { return end("ncclCommFinalize"); }

#define BUFFERS const void *from, void *to, size_t count, ncclDataType_t type
#define PLACE ncclComm_t ranks, cudaStream_t stream
ncclResult_t ncclAllReduce(BUFFERS, ncclRedOp_t operation, PLACE) {
  return collective("ncclAllReduce", REDUCE, from, to, count, type, operation, -1, ranks, stream);
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root, PLACE) {
  return collective("ncclBroadcast", BROADCAST, data, data, count, type, ncclSum, root, ranks, stream);
}
ncclResult_t ncclReduce(BUFFERS, ncclRedOp_t operation, int root, PLACE) {
  return collective("ncclReduce", REDUCE, from, to, count, type, operation, root, ranks, stream);
}
ncclResult_t ncclAllGather(BUFFERS, PLACE) {
  return collective("ncclAllGather", GATHER, from, to, count, type, ncclSum, -1, ranks, stream);
}
}
