// SPDX-License-Identifier: Apache-2.0
//
// Phases: named stretches of a step. One runs at a time: `phase("decode")` ends the one before it, so that the phases
// of a step add up to the step. Profilers (device/ranges.hpp) and --profile (base/trace.hpp) show them too.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "storage/json_file.hpp"

namespace weft::parallel {
class Communicator;
}

namespace weft::run {

class Timers {
 public:
  /// `before_switch` runs before the clock is read; a benchmark waits for the GPU there.
  explicit Timers(std::function<void()> before_switch = {}) : before_switch_(std::move(before_switch)) {}

  void before_switch(std::function<void()> action) { before_switch_ = std::move(action); }

  /// From now on these phases are counted by pass: phase("products") in the pass "forward" is "products, forward".
  void split(std::vector<std::string> phases) { split_ = std::move(phases); }
  /// The pass that the step is in; "": none. `name` must live as long as it is in use.
  void pass(std::string_view name) { pass_ = name; }

  /// Ends the current phase and begins `name`.
  void phase(std::string_view name);
  /// Ends the current phase; later time counts to none.
  void stop();

  /// A phase inside another one, which continues when the inner phase ends. The inner time is not counted to the outer
  /// phase.
  class Scope {
   public:
    Scope(Timers& timers, std::string_view name) : timers_(timers), outer_(timers.current_) { timers.phase(name); }
    Scope(const Scope&) = delete;
    ~Scope() { timers_.switch_to(outer_); }

   private:
    Timers& timers_;
    int outer_;
  };

  /// One phase until its end: phases named in between count to it.
  class Whole {
   public:
    Whole(Timers& timers, std::string_view name) : timers_(timers) {
      timers.phase(name);
      timers.held_ = true;
    }
    Whole(const Whole&) = delete;
    ~Whole() {
      timers_.held_ = false;
      timers_.stop();
    }

   private:
    Timers& timers_;
  };

  /// Seconds so far in `name` on this rank, 0 when there is no such phase.
  double seconds(std::string_view name) const;
  void reset();

  struct Statistics {
    std::string name;
    std::int64_t count = 0;                     ///< most visits of any rank
    double minimum = 0, mean = 0, maximum = 0;  ///< seconds in total, over the ranks; a rank without the phase has 0
  };
  /// Collective: every rank gets all phases of all ranks, in order of their first use (by rank). Ends the current
  /// phase.
  std::vector<Statistics> gather(const parallel::Communicator& ranks);

 private:
  struct Phase {
    std::string name;
    double seconds = 0;
    std::int64_t count = 0;
  };
  void switch_to(int phase);

  std::function<void()> before_switch_;
  std::vector<std::string> split_;
  std::string_view pass_;
  std::vector<Phase> phases_;
  int current_ = -1;   // index of the running phase, -1: none
  bool held_ = false;  // by a Whole
  Clock::time_point begin_;
};

/// {"encode": {"min": …, "mean": …, "max": …, "count": …}, …}, seconds: `timings` of run.json.
Json to_json(const std::vector<Timers::Statistics>& statistics);
/// A table for the log: phase, mean seconds, percent of all, min, max.
std::string to_table(const std::vector<Timers::Statistics>& statistics);

}  // namespace weft::run
