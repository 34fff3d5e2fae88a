// NCCL whose ranks never speak: each gets back what it sent. Shows order, streams, captures and the end of communicators.
#include <nccl.h>

#include <cstring>

#include "stand_in.h"

extern "C" int stand_in_live_graphs_with_nccl();

namespace {
struct Communicator {
  int rank, size;
};
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
ncclResult_t collective(const char* name, const void* from, void* to, size_t count, ncclDataType_t type,
                        cudaStream_t stream, int copies = 1) {
  if (from && !on_device(from)) trouble(std::string(name) + " of host memory");
  size_t bytes = count * bytes_of(type);
  if (work(stream, name, bytes)) return ncclUnhandledCudaError;
  for (int i = 0; from && to && !is_capturing(stream) && i < copies; i++) memmove((char*)to + i * bytes, from, bytes);
  return ncclSuccess;
}
ncclResult_t create(ncclComm_t* communicator, int size, int rank) {
  *communicator = (ncclComm_t) new Communicator{rank, size};
  return ncclSuccess;
}
ncclResult_t end(const char* call) {
  if (stand_in_live_graphs_with_nccl())
    trouble(std::string(call) + " while a graph that captured NCCL is alive: NCCL would wait for it without end");
  return ncclSuccess;
}
}  // namespace

extern "C" {
ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 7, sizeof *id);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t* communicator, int size, ncclUniqueId, int rank) {
  return create(communicator, size, rank);
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int size, ncclUniqueId, int rank, ncclConfig_t*) {
  return create(communicator, size, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* communicator, int size, int rank, int, ncclUniqueId*, ncclConfig_t*) {
  return create(communicator, size, rank);
}
ncclResult_t ncclCommInitAll(ncclComm_t* communicators, int size, const int*) {
  for (int rank = 0; rank < size; rank++) create(&communicators[rank], size, rank);
  return ncclSuccess;
}
ncclResult_t ncclCommSplit(ncclComm_t whole, int, int, ncclComm_t* part, ncclConfig_t*) {
  return create(part, ((Communicator*)whole)->size, ((Communicator*)whole)->rank);
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
const char* ncclGetErrorString(ncclResult_t) { return "an error of the NCCL stand-in"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclCommDestroy(ncclComm_t) { return end("ncclCommDestroy"); }
ncclResult_t ncclCommAbort(ncclComm_t) { return end("ncclCommAbort"); }
ncclResult_t ncclCommFinalize(ncclComm_t) { return end("ncclCommFinalize"); }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void*, ncclDataType_t, ncclScalarResidence_t, ncclComm_t) {
  *operation = (ncclRedOp_t)10;
  return ncclSuccess;
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t, ncclComm_t,
                           cudaStream_t stream) {
  return collective("ncclAllReduce", from, to, count, type, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int, ncclComm_t,
                           cudaStream_t stream) {
  return collective("ncclBroadcast", from, to, count, type, stream);
}
ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int, ncclComm_t, cudaStream_t stream) {
  return collective("ncclBroadcast", data, data, count, type, stream);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t, int, ncclComm_t,
                        cudaStream_t stream) {
  return collective("ncclReduce", from, to, count, type, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t, ncclComm_t,
                               cudaStream_t stream) {
  return collective("ncclReduceScatter", from, to, count, type, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t communicator,
                           cudaStream_t stream) {
  return collective("ncclAllGather", from, to, count, type, stream, ((Communicator*)communicator)->size);
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int, ncclComm_t, cudaStream_t stream) {
  return collective("ncclSend", from, nullptr, count, type, stream);
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int, ncclComm_t, cudaStream_t stream) {
  return collective("ncclRecv", nullptr, to, count, type, stream);
}
}
