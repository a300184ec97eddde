// SPDX-License-Identifier: Apache-2.0
//
// Named regions of time. One region runs at a time: `region("decode")` ends the one before it, so that the regions of a
// step add up to the step. A profiler sees them too (device/ranges.hpp).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "report/json.hpp"

namespace weft::parallel {
class Communicator;
}

namespace weft::report {

class Timers {
 public:
  /// `before_switch` runs before the clock is read: a benchmark waits there for the GPU; training gives none.
  explicit Timers(std::function<void()> before_switch = {}) : before_switch_(std::move(before_switch)) {}

  void before_switch(std::function<void()> action) { before_switch_ = std::move(action); }

  /// Ends the present region and begins `name`.
  void region(std::string_view name);
  /// Ends the present region; time then runs into none.
  void stop();

  /// A region inside another: at its end the outer one goes on. The inner time is not counted to the outer.
  class Scope {
   public:
    Scope(Timers& timers, std::string_view name) : timers_(timers), outer_(timers.present_) { timers.region(name); }
    Scope(const Scope&) = delete;
    ~Scope() { timers_.switch_to(outer_); }

   private:
    Timers& timers_;
    int outer_;
  };

  /// Seconds so far in `name` on this rank, 0 when there is no such region.
  double seconds(std::string_view name) const;
  void reset();

  struct Statistics {
    std::string name;
    std::int64_t count = 0;                     ///< most visits of any rank
    double minimum = 0, mean = 0, maximum = 0;  ///< seconds in total, over the ranks; a rank without the region has 0
  };
  /// Collective: every rank gets all regions of all ranks, in order of their first use (by rank). Ends the present
  /// region.
  std::vector<Statistics> gather(const parallel::Communicator& ranks);

 private:
  struct Region {
    std::string name;
    double seconds = 0;
    std::int64_t count = 0;
  };
  using Clock = std::chrono::steady_clock;

  void switch_to(int region);

  std::function<void()> before_switch_;
  std::vector<Region> regions_;
  int present_ = -1;  // index of the running region, -1: none
  Clock::time_point begin_;
};

/// {"encode": {"min": …, "mean": …, "max": …, "count": …}, …}, seconds: `timings` of run.json.
Json to_json(const std::vector<Timers::Statistics>& statistics);
/// A table for the log: region, mean seconds, percent of all, min, max.
std::string to_table(const std::vector<Timers::Statistics>& statistics);

}  // namespace weft::report
