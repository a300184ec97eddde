// SPDX-License-Identifier: Apache-2.0
//
// Recorder of a time line: what each thread of this process did during a few steps (--profile). Off by default; then a
// call costs one relaxed atomic load. Armed, it lets kWarmupSteps steps pass, records the next kSteps steps into memory
// that was reserved before, and stops. run/trace_file.hpp writes the result.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "base/clock.hpp"

namespace weft::trace {

inline constexpr int kWarmupSteps = 3;  ///< the first prepares what is made on first use, the second captures a graph
inline constexpr int kSteps = 20;
inline constexpr std::size_t kMostEvents = 32768;  ///< per process; later ones are counted and dropped

/// Rows of a process in the time line. `device` are the phases on the compute stream of a GPU, `device_exchanges` its
/// exchanges, on whatever stream.
enum class Row : std::uint8_t { steps, host, exchanges, reader, writer, device, device_exchanges };
inline constexpr int kRows = 7;

struct Event {
  char name[40];  ///< cut off where longer
  Row row;
  std::int64_t begin, end;  ///< ns since the origin of the recording
};

struct Recording {
  std::vector<Event> events;     ///< in the order of their ends
  int steps = 0;                 ///< recorded steps
  std::int64_t nanoseconds = 0;  ///< from the first recorded step to the end of the last one
  double cpu_seconds = 0;        ///< processor time of all threads of the process, in that time
  std::int64_t dropped = 0;
};

namespace detail {
extern std::atomic<bool> on;
}

/// True while steps are recorded.
inline bool on() { return detail::on.load(std::memory_order_relaxed); }

/// Reserves the memory. `wait` is called when recording starts and when it ends, on the thread that runs the steps:
/// it waits for asynchronous work, so that whole steps are measured. Not thread-safe.
void arm(std::function<void()> wait = {});
/// Called before each step, and after the last one, by the thread that runs them. Does nothing when not armed.
void next_step();
void end_steps();
/// Ends recording and returns what was recorded. Not thread-safe against `arm`.
Recording take();
/// Ends recording without `wait` and drops what was recorded: after an error.
void disarm() noexcept;

/// Adds an event; ignored when not recording. From any thread.
void record(Row row, std::string_view name, Clock::time_point begin, Clock::time_point end);
/// The time from which an event's `begin` and `end` count.
Clock::time_point origin();

/// An event that lasts as long as this object. `name` must live as long.
class Scope {
 public:
  Scope(Row row, std::string_view name) : row_(row), on_(on()), name_(name) {
    if (on_) begin_ = Clock::now();
  }
  Scope(const Scope&) = delete;
  ~Scope() {
    if (on_) record(row_, name_, begin_, Clock::now());
  }

 private:
  Row row_;
  bool on_;
  std::string_view name_;
  Clock::time_point begin_;
};

}  // namespace weft::trace
