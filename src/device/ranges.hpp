// SPDX-License-Identifier: Apache-2.0
//
// Named stretches of time for a profiler of NVIDIA's (NVTX): what the host was doing when it gave work to the GPU.
// Without a profiler beside the program a range costs a call of an empty function; in builds without CUDA there are
// none.
#pragma once

namespace weft::device {

/// Ranges of one thread lie inside one another: `end_range` ends the youngest.
void begin_range(const char* name);
void end_range();

/// A range for the life of this object.
class Range {
 public:
  explicit Range(const char* name) { begin_range(name); }
  Range(const Range&) = delete;
  ~Range() { end_range(); }
};

}  // namespace weft::device
