// SPDX-License-Identifier: Apache-2.0
//
// Communication statistics by name of the exchange ("partial sums", "gradient rows", …): bytes, time and bus bandwidth
// per step.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"

namespace weft::parallel {

class Communicator;

/// Bytes and calls of one rank. Bytes are counted as the bus bandwidth of nccl-tests counts them, so that bytes /
/// seconds compares with its tables: bytes sent to other ranks; for a reduction those sent in a ring
/// (`bytes_of_reduction`).
struct Traffic {
  std::int64_t bytes_sent = 0;
  double seconds = 0;  ///< in the calls, if they are timed (DeviceCommunicator::is_timed)
  std::int64_t calls = 0;

  Traffic& operator+=(const Traffic& other);
  friend Traffic operator-(const Traffic& a, const Traffic& b) {
    return {a.bytes_sent - b.bytes_sent, a.seconds - b.seconds, a.calls - b.calls};
  }
};

/// Bytes that a rank sends in a ring: 2 (n - 1) / n of the values.
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
  /// The traffic since `earlier`.
  Exchanges since(const Exchanges& earlier) const;

 private:
  std::vector<Named> all_;
};

/// Counts one call: its bytes, and the lifetime of this object as its duration.
class TimedExchange {
 public:
  TimedExchange(Exchanges& exchanges, std::string_view name, std::int64_t bytes_sent);
  TimedExchange(const TimedExchange&) = delete;
  ~TimedExchange();

 private:
  Traffic& traffic_;
  std::string_view name_;  // name given by the caller, which outlives this object
  Clock::time_point begin_;
};

/// Means over the ranks, per step.
struct ExchangeProfile {
  std::string name;
  double bytes = 0, seconds = 0, calls = 0;
  /// Bus bandwidth; 0 if the exchange was not timed.
  double gb_per_second() const { return seconds > 0 ? 1e-9 * bytes / seconds : 0; }
};
/// Collective. The names are those of rank 0: each exchange of an axis includes all its ranks.
std::vector<ExchangeProfile> profile(const Exchanges&, std::int64_t n_steps, const Communicator& ranks);

}  // namespace weft::parallel
