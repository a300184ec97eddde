// SPDX-License-Identifier: Apache-2.0
//
// What ranks send one another, by name ("partial sums", "gradient rows", …): bytes, time and bus bandwidth of every
// kind of exchange in a step.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace weft::parallel {

class Communicator;

/// Of one rank. Bytes are counted as nccl-tests count those of the bus, so that bytes over time compare with its
/// tables: what the rank sends to others; of a reduction what it would send in a ring (`bytes_of_reduction`).
struct Traffic {
  std::int64_t bytes_sent = 0;
  double seconds = 0;  ///< in the calls, where that can be seen (DeviceCommunicator)
  std::int64_t calls = 0;

  Traffic& operator+=(const Traffic& other);
  friend Traffic operator-(const Traffic& a, const Traffic& b) {
    return {a.bytes_sent - b.bytes_sent, a.seconds - b.seconds, a.calls - b.calls};
  }
};

/// 2 (n - 1) / n of the values.
constexpr std::int64_t bytes_of_reduction(std::int64_t bytes, int n_ranks) {
  return 2 * bytes * (n_ranks - 1) / n_ranks;
}

/// Traffic by name, in the order of first use.
class Exchanges {
 public:
  struct Named {
    std::string name;
    Traffic traffic;
  };

  Traffic& of(std::string_view name);
  Traffic total() const;
  const std::vector<Named>& all() const { return all_; }

  Exchanges& operator+=(const Exchanges& other);
  /// What came to `earlier`.
  Exchanges since(const Exchanges& earlier) const;

 private:
  std::vector<Named> all_;
};

/// Counts a call: its bytes, and its time until the end of this object's life.
class TimedExchange {
 public:
  TimedExchange(Exchanges& exchanges, std::string_view name, std::int64_t bytes_sent);
  TimedExchange(const TimedExchange&) = delete;
  ~TimedExchange();

 private:
  Traffic& traffic_;
  std::string_view name_;  // of the caller, that outlives this object
  std::chrono::steady_clock::time_point begin_;
};

/// Means over the ranks, in each of `n_steps` steps.
struct ExchangeProfile {
  std::string name;
  double bytes = 0, seconds = 0, calls = 0;
  /// Bus bandwidth; 0 when no time was seen.
  double gb_per_second() const { return seconds > 0 ? 1e-9 * bytes / seconds : 0; }
};
/// Collective. The names are those of rank 0: every kind of exchange has all ranks of an axis in it.
std::vector<ExchangeProfile> profile(const Exchanges&, std::int64_t n_steps, const Communicator& ranks);

}  // namespace weft::parallel
