// SPDX-License-Identifier: Apache-2.0
//
// Log lines of a long pass over data, outside of training: "features: 1,200 of 4,000 batches, 0:01:20 left".
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.hpp"

namespace weft::run {

/// A pass of `total` pieces. Logs how far it is, at most every `interval` seconds: a short pass logs nothing.
class Pass {
 public:
  /// `what`: "evaluation"; `unit`: "batches".
  Pass(std::string what, std::int64_t total, std::string unit, double interval = 10);

  /// Reports that this many pieces are complete. Also counts as progress for the watchdog.
  void done(std::int64_t pieces);

 private:
  std::string what_, unit_;
  std::int64_t total_;
  double interval_;
  Clock::time_point start_, logged_;
};

}  // namespace weft::run
