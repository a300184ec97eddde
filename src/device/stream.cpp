// SPDX-License-Identifier: Apache-2.0
#include "device/stream.hpp"

#include <chrono>

#include "base/clock.hpp"
#include "base/error.hpp"

#ifdef WEFT_ENABLE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace weft::device {

#ifdef WEFT_ENABLE_CUDA

namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw error(ExitCode::internal, "{} failed ({})", what, cudaGetErrorString(status));
}
cudaStream_t stream_of(const kernels::Execution& execution) { return static_cast<cudaStream_t>(execution.stream); }
cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }

}  // namespace

bool is_asynchronous(const kernels::Execution&) { return true; }

Event::Event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  event_ = event;
}
Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(event_of(event_));
}
void Event::record(const kernels::Execution& execution) {
  check(cudaEventRecord(event_of(event_), stream_of(execution)), "recording an event");
}
void Event::wait() const { check(cudaEventSynchronize(event_of(event_)), "waiting for the GPU"); }
void Event::hold_back(const kernels::Execution& later) const {
  check(cudaStreamWaitEvent(stream_of(later), event_of(event_)), "ordering two streams");
}

Stream::Stream(const kernels::Execution& like) : execution_(like) {
  cudaStream_t stream = nullptr;
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "creating a stream");
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "creating a stream");
  execution_.stream = stream;
}
Stream::~Stream() { cudaStreamDestroy(stream_of(execution_)); }

IdleClock::~IdleClock() {
  for (const Place& place : places_)
    for (void* event : {place.begin, place.end})
      if (event != nullptr) cudaEventDestroy(event_of(event));
}

namespace {

void mark(const kernels::Execution& execution, void*& event) {
  if (event == nullptr) {
    cudaEvent_t made = nullptr;
    check(cudaEventCreate(&made), "creating an event");
    event = made;
  }
  // In a captured graph only external events can be read by the host.
  cudaStreamCaptureStatus recording = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream_of(execution), &recording), "recording an event");
  check(cudaEventRecordWithFlags(
            event_of(event), stream_of(execution),
            recording == cudaStreamCaptureStatusNone ? cudaEventRecordDefault : cudaEventRecordExternal),
        "recording an event");
}

}  // namespace

void IdleClock::begin(const kernels::Execution& execution) {
  if (used_ == places_.size()) places_.emplace_back();
  mark(execution, places_[used_].begin);
}
void IdleClock::end(const kernels::Execution& execution) { mark(execution, places_[used_++].end); }

double IdleClock::seconds() const {
  double total = 0;
  for (std::size_t i = 0; i < used_; ++i) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, event_of(places_[i].begin), event_of(places_[i].end)),
          "reading the time between events");
    total += 1e-3 * static_cast<double>(milliseconds);
  }
  return total;
}

Graph::~Graph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_));
}

bool Graph::possible(const kernels::Execution& execution) { return execution.backend == kernels::Backend::cuda; }

void Graph::capture(const kernels::Execution& execution, const std::function<void()>& work) {
  check(cudaStreamBeginCapture(stream_of(execution), cudaStreamCaptureModeThreadLocal), "beginning to record a step");
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    // Discard the incomplete graph and report the error of `work`.
    if (cudaStreamEndCapture(stream_of(execution), &graph) == cudaSuccess && graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  check(cudaStreamEndCapture(stream_of(execution), &graph), "recording a step");
  cudaGraphExec_t executable = nullptr;
  // Each kernel keeps the priority of the stream that it was captured on. Without this flag all have that of the stream
  // the graph is launched into, and a barrier between ranks queues behind the blocks of a large kernel.
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, cudaGraphInstantiateFlagUseNodePriority);
  cudaGraphDestroy(graph);
  check(status, "instantiating a recorded step");
  executable_ = executable;
}

void Graph::replay(const kernels::Execution& execution) const {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), stream_of(execution)), "replaying a step");
}

#else

bool is_asynchronous(const kernels::Execution&) { return false; }

Event::Event() = default;
Event::~Event() = default;
void Event::record(const kernels::Execution&) {}
void Event::wait() const {}
void Event::hold_back(const kernels::Execution&) const {}

Stream::Stream(const kernels::Execution& like) : execution_(like) {}
Stream::~Stream() = default;

namespace {

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

}  // namespace

IdleClock::~IdleClock() = default;
void IdleClock::begin(const kernels::Execution&) {
  if (used_ == places_.size()) places_.emplace_back();
  places_[used_].seconds = -now();
}
void IdleClock::end(const kernels::Execution&) { places_[used_++].seconds += now(); }
double IdleClock::seconds() const {
  double total = 0;
  for (std::size_t i = 0; i < used_; ++i) total += places_[i].seconds;
  return total;
}

Graph::~Graph() = default;
bool Graph::possible(const kernels::Execution&) { return false; }
void Graph::capture(const kernels::Execution&, const std::function<void()>&) {
  throw error(ExitCode::internal, "recording a step requires a GPU");
}
void Graph::replay(const kernels::Execution&) const {}

#endif

Upload::Upload(const kernels::Execution& execution, const Slot& even, const Slot& odd)
    : copies_(execution), slots_{even, odd} {}

Upload::Blocks Upload::bring(const kernels::Execution& execution, Blocks host, std::int64_t first_bytes,
                             std::int64_t second_bytes) {
  if (!is_asynchronous(execution)) return host;
  slot_ = 1 - slot_;
  const Slot& slot = slots_[slot_];
  if (first_bytes > slot.first.size || second_bytes > slot.second.size)
    throw error(ExitCode::internal, "a batch of {} and {} bytes does not fit into an upload slot of {} and {}",
                first_bytes, second_bytes, slot.first.size, slot.second.size);
  free_[slot_].hold_back(copies_.execution());
  copy(copies_.execution(), slot.first.data, host.first, first_bytes, Direction::to_device);
  copy(copies_.execution(), slot.second.data, host.second, second_bytes, Direction::to_device);
  arrived_[slot_].record(copies_.execution());
  arrived_[slot_].hold_back(execution);
  return {slot.first.data, slot.second.data};
}

void Upload::consumed(const kernels::Execution& execution) { free_[slot_].record(execution); }

void Upload::finish() const { arrived_[slot_].wait(); }

}  // namespace weft::device
