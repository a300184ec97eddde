// SPDX-License-Identifier: Apache-2.0
//
// Order between the host and the GPU's queues of work: queues, marks in them, and a step recorded once and replayed. On
// the host everything has happened when a call returns, so there these are empty.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "device/memory.hpp"
#include "kernels/execution.hpp"

namespace weft::device {

/// Whether work given to `execution` goes on after the call returns.
bool is_asynchronous(const kernels::Execution&);

/// A place in a queue.
class Event {
 public:
  Event();
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event();

  /// Marks what has been given to the execution so far.
  void record(const kernels::Execution&);
  /// The host waits until the mark is reached; at once when nothing was recorded.
  void wait() const;
  /// What is given to `later` from now on waits for the mark.
  void hold_back(const kernels::Execution& later) const;

 private:
  void* event_ = nullptr;  // cudaEvent_t
};

/// A queue of its own beside the computation's. Its work goes first where both have some: others may wait for it.
class Stream {
 public:
  explicit Stream(const kernels::Execution& like);
  Stream(const Stream&) = delete;
  ~Stream();
  const kernels::Execution& execution() const { return execution_; }

 private:
  kernels::Execution execution_;
};

/// How long a queue stood still at marked places of a step, waiting for others. A mark costs the queue next to nothing
/// and may be recorded: every replay measures anew.
class IdleClock {
 public:
  IdleClock() = default;
  IdleClock(const IdleClock&) = delete;
  ~IdleClock();

  /// A step begins: its places are those that are marked from now on.
  void restart() { used_ = 0; }
  /// Around what the queue waits for. Places are made on first use, which may not be while a step is recorded.
  void begin(const kernels::Execution&);
  void end(const kernels::Execution&);
  /// Of the last step. Its work must be done.
  double seconds() const;

 private:
  struct Place {
    void *begin = nullptr, *end = nullptr;  // cudaEvent_t
    double seconds = 0;                     // on the host
  };
  std::vector<Place> places_;
  std::size_t used_ = 0;
};

/// Work recorded once and replayed: one launch for the hundreds of kernels of a step.
class Graph {
 public:
  Graph() = default;
  Graph(const Graph&) = delete;
  ~Graph();

  /// Whether an execution can record at all: the hand-written kernels on a GPU.
  static bool possible(const kernels::Execution&);

  /// Records what `work` gives to the execution; nothing of it runs. The work may neither wait for the GPU nor
  /// allocate.
  void record(const kernels::Execution&, const std::function<void()>& work);
  bool recorded() const { return executable_ != nullptr; }
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
  /// The host waits until the batch has left its memory.
  void finish() const;

 private:
  Stream copies_;
  Slot slots_[2];
  Event arrived_[2], free_[2];
  int slot_ = 0;
};

}  // namespace weft::device
