// SPDX-License-Identifier: Apache-2.0
#include "run/pass.hpp"

#include <utility>

#include "base/format.hpp"
#include "base/log.hpp"
#include "base/progress.hpp"

namespace weft::run {

Pass::Pass(std::string what, std::int64_t total, std::string unit, double interval)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      total_(total),
      interval_(interval),
      start_(Clock::now()),
      logged_(start_) {}

void Pass::done(std::int64_t pieces) {
  note_progress();
  if (pieces <= 0 || pieces >= total_ || seconds_since(logged_) < interval_) return;
  logged_ = Clock::now();
  const double seconds = seconds_since(start_);
  log::info("{}: {} of {} {}, {} left", what_, format::grouped(pieces), format::grouped(total_), unit_,
            format::duration(seconds / static_cast<double>(pieces) * static_cast<double>(total_ - pieces)));
}

}  // namespace weft::run
