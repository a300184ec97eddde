// SPDX-License-Identifier: Apache-2.0
#include "device/ranges.hpp"

#ifdef WEFT_ENABLE_CUDA
#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.hpp"
#endif

namespace weft::device {

#ifdef WEFT_ENABLE_CUDA

namespace {

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw error(ExitCode::internal, "{} failed ({})", what, cudaGetErrorString(status));
}

/// Two events per range. Made before the first recorded step; ranges beyond them are not timed.
constexpr std::size_t kMostRanges = 4096;
constexpr std::size_t kNotTimed = kMostRanges;

struct Destroy {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, Destroy>;

Event make_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "making an event");
  return Event(event);
}

struct TimedRange {
  std::string name;
  cudaStream_t stream = nullptr;
  bool exchange = false, ended = false;
  Event begin = make_event(), end = make_event();
};

struct Timing {
  kernels::Execution compute;
  Event origin = make_event();
  Clock::time_point origin_on_host;
  std::vector<TimedRange> ranges = std::vector<TimedRange>(kMostRanges);
  std::size_t used = 0;
  std::vector<std::size_t> open;  // index of each open range, kNotTimed for one that is not timed
};

std::unique_ptr<Timing> timing;  // state of the present DeviceTrace; null: none

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "asking for the state of a stream");
  return status != cudaStreamCaptureStatusNone;
}

void begin_timed(const char* name, const kernels::Execution* execution) {
  const auto stream = static_cast<cudaStream_t>(execution != nullptr ? execution->stream : timing->compute.stream);
  if (!trace::on() || timing->used == kMostRanges || is_capturing(stream)) {
    timing->open.push_back(kNotTimed);
    return;
  }
  TimedRange& range = timing->ranges[timing->used];
  range.name = name;
  range.stream = stream;
  range.exchange = execution != nullptr;
  check(cudaEventRecord(range.begin.get(), stream), "recording an event");
  timing->open.push_back(timing->used++);
}

void end_timed() {
  if (timing->open.empty()) return;  // it began before the DeviceTrace did
  const std::size_t index = timing->open.back();
  timing->open.pop_back();
  if (index == kNotTimed) return;
  TimedRange& range = timing->ranges[index];
  range.ended = !is_capturing(range.stream);
  if (range.ended) check(cudaEventRecord(range.end.get(), range.stream), "recording an event");
}

}  // namespace

void begin_range(const char* name, const kernels::Execution* execution) {
  nvtxRangePushA(name);
  if (timing != nullptr) begin_timed(name, execution);
}

void end_range() {
  nvtxRangePop();
  if (timing != nullptr) end_timed();
}

DeviceTrace::DeviceTrace(const kernels::Execution& compute) {
  timing = std::make_unique<Timing>();
  timing->compute = compute;
}

DeviceTrace::~DeviceTrace() { timing.reset(); }

void DeviceTrace::wait() {
  check(cudaDeviceSynchronize(), "waiting for the GPU");
  if (timing->used > 0) return;
  check(cudaEventRecord(timing->origin.get(), static_cast<cudaStream_t>(timing->compute.stream)), "recording an event");
  check(cudaEventSynchronize(timing->origin.get()), "waiting for the GPU");
  timing->origin_on_host = Clock::now();
}

void DeviceTrace::collect() {
  check(cudaDeviceSynchronize(), "waiting for the GPU");
  const auto at = [](cudaEvent_t event) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, timing->origin.get(), event), "reading a clock");
    return timing->origin_on_host + std::chrono::nanoseconds(static_cast<std::int64_t>(1e6 * milliseconds));
  };
  for (std::size_t i = 0; i < timing->used; ++i) {
    const TimedRange& range = timing->ranges[i];
    if (!range.ended) continue;
    trace::record(range.exchange ? trace::Row::device_exchanges : trace::Row::device, range.name, at(range.begin.get()),
                  at(range.end.get()));
  }
  timing->used = 0;
}

#else

void begin_range(const char*, const kernels::Execution*) {}
void end_range() {}

DeviceTrace::DeviceTrace(const kernels::Execution&) {}
DeviceTrace::~DeviceTrace() = default;
void DeviceTrace::wait() {}
void DeviceTrace::collect() {}

#endif

}  // namespace weft::device
