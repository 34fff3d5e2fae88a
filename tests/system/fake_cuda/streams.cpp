// Streams, events, captures and graphs, by the rules of the CUDA programming guide ("CUDA Graphs", "Stream Capture");
// kernel launches, which do nothing.
#include <chrono>
#include <map>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fake_cuda.h"

void note(const std::string& name, size_t amount);

namespace {
struct Node {
  std::string name;
  std::vector<int> dependencies;  // nodes that it waits for
};
struct Graph {
  std::vector<Node> nodes;
  bool has_nccl() const {
    for (auto& node : nodes)
      if (node.name.rfind("nccl", 0) == 0) return true;
    return false;
  }
};
cudaError_t refused(const std::string& what, cudaError_t error) {
  violation(what);
  return failed(error);
}
struct Stream;
struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Stream* origin;
  std::set<Stream*> streams;
  bool invalid = false;
  Graph* graph = new Graph;

  cudaError_t spoil(const std::string& why, cudaError_t error) {
    invalid = true;
    return refused(why, error);
  }
};
struct Stream {
  unsigned flags = 0;
  Capture* capture = nullptr;
  std::vector<int> last;  // nodes of the capture that the next one will wait for
};
struct Event {
  unsigned flags = 0;
  bool recorded = false;
  double milliseconds = 0;
  Capture* capture = nullptr;  // the capture in which it was recorded
  std::vector<int> last;
};

Stream legacy, per_thread;
auto& live = *new std::set<Capture*>;
auto& kernels = *new std::unordered_map<const void*, std::string>;
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;
int live_graphs_with_nccl = 0;

Stream* find(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) return &legacy;
  return stream == cudaStreamPerThread ? &per_thread : (Stream*)stream;
}
cudaStreamCaptureStatus status_of(const Capture* capture) {
  if (!capture) return cudaStreamCaptureStatusNone;
  return capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}
// The nodes in `last` and all that they depend on.
std::set<int> reach(const Graph& graph, std::vector<int> last) {
  std::set<int> seen;
  while (!last.empty()) {
    int node = last.back();
    last.pop_back();
    const auto& dependencies = graph.nodes[node].dependencies;
    if (seen.insert(node).second) last.insert(last.end(), dependencies.begin(), dependencies.end());
  }
  return seen;
}
}  // namespace

cudaError_t work(cudaStream_t handle, const std::string& name, size_t amount) {
  LOCK;
  Stream* stream = find(handle);
  Capture* capture = stream->capture;
  if (capture && capture->invalid) return failed(cudaErrorStreamCaptureInvalidated);
  if (capture) {
    capture->graph->nodes.push_back({name, stream->last});
    stream->last = {(int)capture->graph->nodes.size() - 1};
  }
  for (Capture* other : live) {
    if (capture) break;
    if (stream == &legacy)
      for (Stream* captured : other->streams)
        if (!(captured->flags & cudaStreamNonBlocking))
          return other->spoil("work on the legacy stream during the capture of a blocking stream: " + name,
                              cudaErrorStreamCaptureImplicit);
    if (other->thread == std::this_thread::get_id())
      violation("uncaptured work on another stream during a capture: " + name);
  }
  note(name, amount);
  return cudaSuccess;
}

bool is_capturing(cudaStream_t stream) { return find(stream)->capture; }

cudaError_t forbidden_while_capturing(const char* call) {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (Capture* capture : live) {
    bool own = capture->thread == std::this_thread::get_id();
    bool global = mode_of_thread == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (own ? capture->mode != cudaStreamCaptureModeRelaxed : global)
      return capture->spoil(std::string(call) + " during a capture", cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

extern "C" {
int fake_cuda_live_graphs_with_nccl() { return live_graphs_with_nccl; }
cudaError_t fake_cuda_work(cudaStream_t stream, const char* name, size_t amount) { return work(stream, name, amount); }

// ---- streams
SUCCEEDS(cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int),
         *stream = (cudaStream_t) new Stream{flags})
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  NOT_WHILE_CAPTURING
  Capture* capture = find(stream)->capture;
  return capture ? capture->spoil("query of a capturing stream", cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (cudaError_t error = cudaStreamQuery(stream)) return error;
  LOCK;
  host_waits("cudaStreamSynchronize");
  return cudaSuccess;
}
// ---- events
SUCCEEDS(cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags),
         *event = (cudaEvent_t) new Event{flags})
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
  LOCK;
  auto* event = (Event*)handle;
  event->recorded = true;
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  event->milliseconds = std::chrono::duration<double, std::milli>(now).count();
  event->capture = flags & cudaEventRecordExternal ? nullptr : find(stream)->capture;
  event->last = find(stream)->last;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  NOT_WHILE_CAPTURING
  Capture* capture = ((Event*)handle)->capture;
  if (!capture) return cudaSuccess;
  violation("query of an event that was recorded in a capture");
  if (live.count(capture)) capture->invalid = true;
  return failed(cudaErrorCapturedEvent);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (cudaError_t error = cudaEventQuery(event)) return error;
  LOCK;
  host_waits("cudaEventSynchronize");
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  LOCK;
  for (auto* event : {(Event*)from, (Event*)to}) {
    if (event->recorded && !event->capture && !(event->flags & cudaEventDisableTiming)) continue;
    return refused("elapsed time of an event that was not recorded, or recorded in a capture, or without timing",
                   cudaErrorInvalidResourceHandle);
  }
  *milliseconds = std::max(1e-3, ((Event*)to)->milliseconds - ((Event*)from)->milliseconds);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t what, unsigned flags) {
  LOCK;
  auto* event = (Event*)what;
  Stream* stream = find(handle);
  if (!event->recorded) return cudaSuccess;
  if (!event->capture) {
    if (!stream->capture || flags & cudaEventWaitExternal) return cudaSuccess;
    return stream->capture->spoil("a capturing stream waits for work outside the capture",
                                  cudaErrorStreamCaptureIsolation);
  }
  if (!live.count(event->capture))
    return refused("a stream waits for an event of a capture that has ended", cudaErrorCapturedEvent);
  if (stream == &legacy)
    return event->capture->spoil("the legacy stream waits for a capture", cudaErrorStreamCaptureImplicit);
  if (stream->capture && stream->capture != event->capture)
    return refused("a capturing stream waits for another capture", cudaErrorStreamCaptureMerge);
  stream->capture = event->capture;  // from now on its work is captured too
  stream->capture->streams.insert(stream);
  std::set<int> both(stream->last.begin(), stream->last.end());
  both.insert(event->last.begin(), event->last.end());
  stream->last.assign(both.begin(), both.end());
  return cudaSuccess;
}

// ---- captures
SUCCEEDS(cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode), std::swap(*mode, mode_of_thread))
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  LOCK;
  static unsigned long long captures = 0;
  Stream* stream = find(handle);
  if (stream == &legacy) return refused("a capture of the legacy stream", cudaErrorStreamCaptureUnsupported);
  if (stream->capture) return failed(cudaErrorIllegalState);
  stream->capture = new Capture{++captures, mode, std::this_thread::get_id(), stream, {stream}};
  stream->last.clear();
  live.insert(stream->capture);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  LOCK;
  *graph = nullptr;
  Stream* stream = find(handle);
  Capture* capture = stream->capture;
  if (!capture) return failed(cudaErrorIllegalState);
  if (capture->origin != stream) return failed(cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id())
    return failed(cudaErrorStreamCaptureWrongThread);
  std::set<int> joined = reach(*capture->graph, stream->last);
  std::string loose;
  for (Stream* member : capture->streams) {
    for (int node : member->last)
      if (!joined.count(node)) loose += " " + capture->graph->nodes[node].name;
    member->capture = nullptr;
    member->last.clear();
  }
  live.erase(capture);
  if (capture->invalid) return failed(cudaErrorStreamCaptureInvalidated);
  if (!loose.empty()) return refused("a capture ends with unjoined work:" + loose, cudaErrorStreamCaptureUnjoined);
  *graph = (cudaGraph_t)capture->graph;
  return cudaSuccess;
}
SUCCEEDS(cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status),
         LOCK; *status = status_of(find(stream)->capture))
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** last, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  LOCK;
  static thread_local std::vector<cudaGraphNode_t> handles;  // a node's handle is its number + 1
  handles.clear();
  Capture* capture = find(stream)->capture;
  *status = status_of(capture);
  if (capture) {
    if (id) *id = capture->id;
    if (graph) *graph = (cudaGraph_t)capture->graph;
    for (int node : find(stream)->last) handles.push_back((cudaGraphNode_t)(intptr_t)(node + 1));
  }
  if (last) *last = handles.data();
  if (edges) *edges = nullptr;
  if (count) *count = handles.size();
  return cudaSuccess;
}

// ---- graphs
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  LOCK;
  if (((Graph*)graph)->has_nccl()) live_graphs_with_nccl++;
  *executable = (cudaGraphExec_t)graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  LOCK;
  if (((Graph*)executable)->has_nccl()) live_graphs_with_nccl--;
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return work(stream, "graph", ((Graph*)executable)->nodes.size());
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  LOCK;
  size_t all = ((Graph*)graph)->nodes.size();
  for (size_t i = 0; nodes && i < std::min(*count, all); i++) nodes[i] = (cudaGraphNode_t)(intptr_t)(i + 1);
  if (!nodes) *count = all;
  return cudaSuccess;
}

// ---- kernels
void** __cudaRegisterFatBinary(void*) {
  static void* module[4];
  return module;
}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name) {
  LOCK;
  kernels[host] = name;
}
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local std::vector<Configuration> configurations;
SUCCEEDS(unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream),
         configurations.push_back({grid, block, shared, stream}))
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared, *(cudaStream_t*)stream = last.stream;
  return cudaSuccess;
}
SUCCEEDS(cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function), *kernel = (cudaKernel_t)function)
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  LOCK;
  size_t blocks = (size_t)grid.x * grid.y * grid.z, threads = (size_t)block.x * block.y * block.z;
  auto kernel = kernels.find(function);
  std::string name = kernel == kernels.end() ? "unknown kernel" : kernel->second;
  if (!blocks || !threads || threads > 1024 || grid.y > 65535 || grid.z > 65535)
    return refused("a launch with a grid that no GPU accepts: " + name, cudaErrorInvalidConfiguration);
  return work(stream, name, blocks * threads);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024, attributes->numRegs = 32, attributes->maxDynamicSharedSizeBytes = 232448;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
static int nothing() { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = (void*)nothing;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
