// SPDX-License-Identifier: Apache-2.0
#include "device/ranges.hpp"

#ifdef WEFT_ENABLE_CUDA
#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>

#include <string>
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

struct TimedRange {
  std::string name;
  cudaStream_t stream = nullptr;
  bool exchange = false, ended = false;
  cudaEvent_t begin = nullptr, end = nullptr;
};

struct Timing {
  kernels::Execution compute;
  cudaEvent_t origin = nullptr;
  trace::Clock::time_point origin_on_host;
  std::vector<TimedRange> ranges;
  std::size_t used = 0;
  std::vector<std::size_t> open;  // index of each open range, kNotTimed for one that is not timed
};

Timing* timing = nullptr;  // of the DeviceTrace that lives

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
  check(cudaEventRecord(range.begin, stream), "recording an event");
  timing->open.push_back(timing->used++);
}

void end_timed() {
  if (timing->open.empty()) return;  // it began before the DeviceTrace did
  const std::size_t index = timing->open.back();
  timing->open.pop_back();
  if (index == kNotTimed) return;
  TimedRange& range = timing->ranges[index];
  range.ended = !is_capturing(range.stream);
  if (range.ended) check(cudaEventRecord(range.end, range.stream), "recording an event");
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
  timing = new Timing{};
  timing->compute = compute;
  check(cudaEventCreate(&timing->origin), "making an event");
  timing->ranges.resize(kMostRanges);
  for (TimedRange& range : timing->ranges) {
    check(cudaEventCreate(&range.begin), "making an event");
    check(cudaEventCreate(&range.end), "making an event");
  }
}

DeviceTrace::~DeviceTrace() {
  for (const TimedRange& range : timing->ranges)
    for (const cudaEvent_t event : {range.begin, range.end})
      if (event != nullptr) cudaEventDestroy(event);
  cudaEventDestroy(timing->origin);
  delete timing;
  timing = nullptr;
}

void DeviceTrace::settle() {
  check(cudaDeviceSynchronize(), "waiting for the GPU");
  if (timing->used > 0) return;
  check(cudaEventRecord(timing->origin, static_cast<cudaStream_t>(timing->compute.stream)), "recording an event");
  check(cudaEventSynchronize(timing->origin), "waiting for the GPU");
  timing->origin_on_host = trace::Clock::now();
}

void DeviceTrace::collect() {
  check(cudaDeviceSynchronize(), "waiting for the GPU");
  const auto at = [](cudaEvent_t event) {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, timing->origin, event), "reading a clock");
    return timing->origin_on_host + std::chrono::nanoseconds(static_cast<std::int64_t>(1e6 * milliseconds));
  };
  for (std::size_t i = 0; i < timing->used; ++i) {
    const TimedRange& range = timing->ranges[i];
    if (!range.ended) continue;
    trace::record(range.exchange ? trace::Row::device_exchanges : trace::Row::device, range.name, at(range.begin),
                  at(range.end));
  }
  timing->used = 0;
}

#else

void begin_range(const char*, const kernels::Execution*) {}
void end_range() {}

DeviceTrace::DeviceTrace(const kernels::Execution&) {}
DeviceTrace::~DeviceTrace() = default;
void DeviceTrace::settle() {}
void DeviceTrace::collect() {}

#endif

}  // namespace weft::device
