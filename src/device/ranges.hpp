// SPDX-License-Identifier: Apache-2.0
//
// Named ranges of time on the device. NVIDIA's profilers show them (NVTX) as what the host was doing when it launched
// work. While base/trace.hpp records, they are also timed on the device by events. Without either a range costs one
// call of an empty function; in builds without CUDA there are none.
#pragma once

#include "base/trace.hpp"
#include "kernels/execution.hpp"

namespace weft::device {

/// Ranges of one thread are nested: `end_range` ends the innermost one. With `execution` the range is an exchange on
/// that stream; without, a phase on the stream of the DeviceTrace.
void begin_range(const char* name, const kernels::Execution* execution = nullptr);
void end_range();

/// A range for the lifetime of this object.
class Range {
 public:
  explicit Range(const char* name, const kernels::Execution* execution = nullptr) { begin_range(name, execution); }
  Range(const Range&) = delete;
  ~Range() { end_range(); }
};

/// While it lives, ranges are timed on the device when steps are recorded. At most one; ranges must come from one
/// thread. Work inside a CUDA graph is not split: the graph's launch is one range.
class DeviceTrace {
 public:
  explicit DeviceTrace(const kernels::Execution& compute);
  DeviceTrace(const DeviceTrace&) = delete;
  ~DeviceTrace();

  /// Waits for the device and makes this moment the origin of its times. For trace::arm: the first call is before the
  /// first recorded step.
  void wait();
  /// Waits for the device and records its ranges (trace::record), to be called before trace::take.
  void collect();
};

}  // namespace weft::device
