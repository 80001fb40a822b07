// Stream capture and executable graphs. A captured graph is a list of nodes with dependencies; a launch
// queues every node on a hidden stream of its lane, with events for the dependencies between lanes, so that
// replay runs under the same scheduler and checkers as everything else.
#include <algorithm>

#include "tests/cudaemu/core.h"

struct CUgraph_st {
  struct Node {
    cudaemu::Op op;
    int lane;
    std::set<int> needs;
  };
  uint64_t id = 0;
  std::vector<Node> nodes;
  std::vector<CUstream_st*> streams;  ///< lane -> captured stream, the origin first
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  bool invalid = false;
};

struct CUgraphExec_st {
  std::vector<CUgraph_st::Node> nodes;
  std::vector<CUstream_st*> lanes;
  std::vector<std::shared_ptr<cudaemu::EventState>>
      done;  ///< of the nodes that another lane needs, else null
};

namespace cudaemu {
namespace {

std::vector<CUgraph_st*>& captures() {  // being captured now
  static auto* list = new std::vector<CUgraph_st*>;
  return *list;
}
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

int lane_of(const CUgraph_st& graph, const CUstream_st* stream) {
  const auto it = std::find(graph.streams.begin(), graph.streams.end(), stream);
  return static_cast<int>(it - graph.streams.begin());
}

bool find_capture(const CUgraph_st* graph) {
  return std::find(captures().begin(), captures().end(), graph) != captures().end();
}

cudaError_t invalidate(CUgraph_st* graph, cudaError_t error) {
  graph->invalid = true;
  return fail(error);
}

Op event_op(Op::Kind kind, const std::shared_ptr<EventState>& event) {
  Op op;
  op.name = kind == Op::kRecord ? "graph edge" : "wait for a graph edge";
  op.kind = kind;
  op.event = event;
  op.version = kind == Op::kRecord ? ++event->recorded : event->recorded;
  return op;
}

// All work must lead to the origin stream's tail.
bool joined(const CUgraph_st& graph) {
  std::set<int> loose;
  for (int i = 0; i < static_cast<int>(graph.nodes.size()); ++i) {
    for (int needed : graph.nodes[static_cast<size_t>(i)].needs) loose.erase(needed);
    loose.insert(i);
  }
  const auto& tail = graph.streams.front()->tail;
  return std::all_of(loose.begin(), loose.end(), [&](int node) { return tail.count(node) > 0; });
}

cudaError_t end_capture(CUstream_st* stream, cudaGraph_t* out) {
  CUgraph_st* graph = stream->capture;
  *out = nullptr;
  if (graph == nullptr) return fail(cudaErrorIllegalState);
  if (graph->streams.front() != stream) return invalidate(graph, cudaErrorStreamCaptureUnmatched);
  if (graph->mode != cudaStreamCaptureModeRelaxed && graph->thread != std::this_thread::get_id())
    return invalidate(graph, cudaErrorStreamCaptureWrongThread);
  const bool unjoined = !joined(*graph);
  for (CUstream_st* s : graph->streams) {
    s->capture = nullptr;
    s->tail.clear();
  }
  captures().erase(std::remove(captures().begin(), captures().end(), graph), captures().end());
  const cudaError_t error = graph->invalid ? cudaErrorStreamCaptureInvalidated
                            : unjoined     ? cudaErrorStreamCaptureUnjoined
                                           : cudaSuccess;
  if (error != cudaSuccess) {
    delete graph;
    return fail(error);
  }
  *out = graph;
  return cudaSuccess;
}

}  // namespace

cudaError_t unsafe_call() {
  for (CUgraph_st* graph : captures()) {
    const bool mine = graph->thread == std::this_thread::get_id();
    const bool strict = graph->mode == cudaStreamCaptureModeGlobal
                            ? thread_mode == cudaStreamCaptureModeGlobal || mine
                            : graph->mode == cudaStreamCaptureModeThreadLocal && mine;
    if (strict && thread_mode != cudaStreamCaptureModeRelaxed)
      return invalidate(graph, cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

bool capture_alive(const EventState& event) {
  return event.capture != nullptr && find_capture(event.capture) && event.capture->id == event.capture_id;
}

cudaError_t capture_op(CUstream_st* stream, Op op) {
  CUgraph_st* graph = stream->capture;
  if (graph->invalid) return fail(cudaErrorStreamCaptureInvalidated);
  const int node = static_cast<int>(graph->nodes.size());
  graph->nodes.push_back({std::move(op), lane_of(*graph, stream), stream->tail});
  stream->tail = {node};
  return cudaSuccess;
}

cudaError_t capture_record(CUstream_st* stream, EventState& event) {
  event.capture = stream->capture;
  event.capture_id = stream->capture->id;
  event.capture_nodes = stream->tail;
  return cudaSuccess;
}

cudaError_t capture_wait(CUstream_st* stream, EventState& event) {
  if (!capture_alive(event)) return invalidate(stream->capture, cudaErrorStreamCaptureIsolation);
  if (stream->capture != nullptr && stream->capture != event.capture)
    return invalidate(stream->capture, cudaErrorStreamCaptureMerge);
  if (stream->capture == nullptr) {
    stream->capture = event.capture;
    event.capture->streams.push_back(stream);
  }
  stream->tail.insert(event.capture_nodes.begin(), event.capture_nodes.end());
  return cudaSuccess;
}

}  // namespace cudaemu

using namespace cudaemu;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  Lock lock;
  static uint64_t next_id = 0;
  if (cudaError_t e = check_stream(stream, "cudaStreamBeginCapture")) return e;
  if (stream->capture != nullptr) return fail(cudaErrorIllegalState);
  auto* graph = new CUgraph_st;
  graph->id = ++next_id;
  graph->mode = mode;
  graph->thread = std::this_thread::get_id();
  graph->streams.push_back(stream);
  stream->capture = graph;
  stream->tail.clear();
  captures().push_back(graph);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  Lock lock;
  if (cudaError_t e = check_stream(stream, "cudaStreamEndCapture")) return e;
  return end_capture(stream, out);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock;
  if (cudaError_t e = check_stream(stream, "cudaStreamIsCapturing")) return e;
  *status = stream->capture == nullptr ? cudaStreamCaptureStatusNone
            : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  Lock lock;
  if (nodes != nullptr || edges != nullptr || count != nullptr) not_emulated("the nodes of a capture");
  if (cudaError_t e = cudaStreamIsCapturing(stream, status)) return e;
  if (id != nullptr) *id = stream->capture == nullptr ? 0 : stream->capture->id;
  if (graph != nullptr) *graph = stream->capture;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long flags) {
  Lock lock;
  if (flags != 0) not_emulated("cudaGraphInstantiate with flags");
  if (graph == nullptr || find_capture(graph)) return fail(cudaErrorInvalidValue);
  auto* exec = new CUgraphExec_st;
  exec->nodes = graph->nodes;
  exec->done.resize(exec->nodes.size());
  for (size_t i = 0; i < graph->streams.size(); ++i) exec->lanes.push_back(make_stream(true));
  for (const auto& node : exec->nodes) {
    if (node.op.graph_reference) node.op.graph_reference(1);
    for (int needed : node.needs) {
      const auto n = static_cast<size_t>(needed);
      if (exec->nodes[n].lane != node.lane && !exec->done[n]) exec->done[n] = std::make_shared<EventState>();
    }
  }
  *out = exec;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  Lock lock;
  if (exec == nullptr) return fail(cudaErrorInvalidValue);
  if (cudaError_t e = check_stream(stream, "cudaGraphLaunch")) return e;
  if (stream->capture != nullptr) not_emulated("a graph launch inside a capture");
  const auto begin = std::make_shared<EventState>();
  enqueue_now(stream, event_op(Op::kRecord, begin));
  for (CUstream_st* lane : exec->lanes) enqueue_now(lane, event_op(Op::kWait, begin));
  for (size_t i = 0; i < exec->nodes.size(); ++i) {
    const auto& node = exec->nodes[i];
    CUstream_st* lane = exec->lanes[static_cast<size_t>(node.lane)];
    for (int needed : node.needs)
      if (exec->nodes[static_cast<size_t>(needed)].lane != node.lane)
        enqueue_now(lane, event_op(Op::kWait, exec->done[static_cast<size_t>(needed)]));
    enqueue_now(lane, node.op);
    if (exec->done[i]) enqueue_now(lane, event_op(Op::kRecord, exec->done[i]));
  }
  for (CUstream_st* lane : exec->lanes) {
    const auto end = std::make_shared<EventState>();
    enqueue_now(lane, event_op(Op::kRecord, end));
    enqueue_now(stream, event_op(Op::kWait, end));
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  Lock lock;
  if (graph == nullptr || find_capture(graph)) return fail(cudaErrorInvalidValue);
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  Lock lock;
  if (exec == nullptr) return fail(cudaErrorInvalidValue);
  for (CUstream_st* lane : exec->lanes) {
    run_until([lane] { return lane->queue.empty(); }, lane);
    destroy_stream(lane);
  }
  for (const auto& node : exec->nodes)
    if (node.op.graph_reference) node.op.graph_reference(-1);
  delete exec;
  return cudaSuccess;
}

}  // extern "C"
