// SPDX-License-Identifier: Apache-2.0
#include "base/trace.hpp"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <mutex>
#include <utility>

namespace weft::trace {

std::atomic<bool> detail::on{false};

namespace {

enum class State { off, warming_up, recording, done };

// Other threads record events too.
std::mutex mutex;
Recording recording;
bool accepting = false;
Clock::time_point window_begin;

// Used by the thread that runs the steps only.
State state = State::off;
std::function<void()> wait;
int steps_seen = 0;
Clock::time_point step_begin;
double cpu_begin = 0;

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

std::int64_t since_origin(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time - window_begin).count();
}

void open_window() {
  if (wait) wait();
  cpu_begin = cpu_seconds();
  {
    const std::lock_guard lock(mutex);
    window_begin = step_begin = Clock::now();
    accepting = true;
  }
  state = State::recording;
  detail::on.store(true, std::memory_order_release);
}

void close_step(Clock::time_point now) {
  record(Row::steps, "step", step_begin, now);
  step_begin = now;
  ++recording.steps;
}

void close_window() {
  if (wait) wait();
  const Clock::time_point now = Clock::now();
  close_step(now);
  recording.nanoseconds = since_origin(now);
  recording.cpu_seconds = cpu_seconds() - cpu_begin;
  detail::on.store(false, std::memory_order_release);
  state = State::done;
}

}  // namespace

void arm(std::function<void()> settle_first) {
  recording = {};
  recording.events.reserve(kMostEvents);
  wait = std::move(settle_first);
  steps_seen = 0;
  state = State::warming_up;
}

void next_step() {
  if (state == State::warming_up && ++steps_seen > kWarmupSteps)
    open_window();
  else if (state == State::recording && recording.steps + 1 == kSteps)
    close_window();
  else if (state == State::recording)
    close_step(Clock::now());
}

void end_steps() {
  if (state == State::recording) close_window();
  if (state == State::warming_up) state = State::done;
}

Recording take() {
  end_steps();
  Recording done;
  {
    const std::lock_guard lock(mutex);
    done = std::exchange(recording, {});
  }
  disarm();
  return done;
}

void disarm() noexcept {
  detail::on.store(false, std::memory_order_release);
  state = State::off;
  wait = nullptr;
  const std::lock_guard lock(mutex);
  accepting = false;
  recording = {};
}

void record(Row row, std::string_view name, Clock::time_point begin, Clock::time_point end) {
  const std::lock_guard lock(mutex);
  if (!accepting) return;
  if (recording.events.size() == kMostEvents) {
    ++recording.dropped;
    return;
  }
  Event& event = recording.events.emplace_back();
  const std::size_t length = std::min(name.size(), sizeof event.name - 1);
  std::memcpy(event.name, name.data(), length);
  event.name[length] = '\0';
  event.row = row;
  event.begin = since_origin(begin);
  event.end = since_origin(end);
}

Clock::time_point origin() { return window_begin; }

}  // namespace weft::trace
