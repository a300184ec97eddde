// SPDX-License-Identifier: Apache-2.0
//
// CUDA streams, events and graphs, and uploads of batches. In a build without CUDA all work is synchronous and these
// classes do nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "device/memory.hpp"
#include "kernels/execution.hpp"

namespace weft::device {

/// True if calls with this execution return before their work is complete.
bool is_asynchronous(const kernels::Execution&);

/// A CUDA event.
class Event {
 public:
  Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event();

  /// Marks the end of the work submitted to the execution so far.
  void record(const kernels::Execution&);
  /// Blocks the host until that work is complete. Returns at once if nothing was marked.
  void wait() const;
  /// Later work on `later` waits for this event.
  void hold_back(const kernels::Execution& later) const;

 private:
  void* event_ = nullptr;  // cudaEvent_t
};

/// A stream of higher priority than the compute stream, since other ranks may wait for its work.
class Stream {
 public:
  explicit Stream(const kernels::Execution& like);
  Stream(const Stream&) = delete;
  ~Stream();
  const kernels::Execution& execution() const { return execution_; }

 private:
  kernels::Execution execution_;
};

/// Measures the time that a stream waits at given points of a step. Cheap, and may be part of a captured graph: each
/// replay measures again.
class IdleClock {
 public:
  IdleClock() = default;
  IdleClock(const IdleClock&) = delete;
  ~IdleClock();

  /// Begins a step. Forgets the intervals of the last one.
  void restart() { used_ = 0; }
  /// Start and end of an interval in which the stream waits. The first step must not be captured: it creates the
  /// events.
  void begin(const kernels::Execution&);
  void end(const kernels::Execution&);
  /// Total of the last step in seconds. Its work must be complete.
  double seconds() const;

 private:
  struct Place {
    void *begin = nullptr, *end = nullptr;  // cudaEvent_t
    double seconds = 0;                     // on the host
  };
  std::vector<Place> places_;
  std::size_t used_ = 0;
};

/// A CUDA graph: the kernels of a step, captured once and replayed with one launch.
class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  ~Graph();

  /// True if work of this execution can be captured: backend cuda.
  static bool possible(const kernels::Execution&);

  /// Captures what `work` submits to the execution, without running it. `work` must neither wait for the GPU nor
  /// allocate device memory.
  void capture(const kernels::Execution&, const std::function<void()>& work);
  bool captured() const { return executable_ != nullptr; }
  void replay(const kernels::Execution&) const;

 private:
  void* executable_ = nullptr;  // cudaGraphExec_t
};

/// Copies one batch of host memory after the other to the GPU while it computes. Two slots: the batch that is computed
/// on and the next. On the host `bring` returns the memory itself.
class Upload {
 public:
  /// Two blocks of a batch (inputs and targets), where the kernels run.
  struct Slot {
    kernels::Array<std::byte> first, second;
  };
  struct Blocks {
    void *first, *second;
  };

  /// Slots large enough for every batch; not used on the host.
  Upload(const kernels::Execution&, const Slot& even, const Slot& odd);

  /// Starts to copy both blocks of a batch; later work on the execution waits for them. Returns where they will be.
  /// Throws Error(internal) when a slot is too small.
  Blocks bring(const kernels::Execution&, Blocks host, std::int64_t first_bytes, std::int64_t second_bytes);
  /// All work that reads the batch has been submitted to the execution.
  void consumed(const kernels::Execution&);
  /// Blocks the host until the batch was copied: host memory may then be reused.
  void finish() const;

 private:
  Stream copies_;
  Slot slots_[2];
  Event arrived_[2], free_[2];
  int slot_ = 0;
};

}  // namespace weft::device
