// SPDX-License-Identifier: Apache-2.0
//
// The curves of metrics.jsonl, whatever metrics the run has: each number of a record is a point of the metric of that
// name, and an array `layer_<name>` gives the extremes over layers of the metric <name>. Records are thinned while they
// are read, so that memory does not grow with the length of the run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace weft::commands {

/// One value per point; NaN where the records of the point have none that is finite.
struct Curve {
  std::string metric;
  std::vector<double> mean;
  std::vector<double> low, high;  ///< extremes over layers and records; all NaN when the metric is not by layer
};

struct Curves {
  std::vector<double> step;            ///< last step of each point
  std::vector<Curve> metrics;          ///< in the order in which they first appear
  std::int64_t records = 0;            ///< lines read
  std::int64_t unreadable = 0;         ///< lines that are not a record
  std::int64_t not_finite = 0;         ///< records whose loss is not finite
  std::int64_t records_per_point = 1;  ///< at most

  double last_step() const { return step.empty() ? 0 : step.back(); }
  const Curve* find(std::string_view metric) const;  ///< null when no record has it
};

/// Without points when the file does not exist.
Curves read_curves(const std::filesystem::path& metrics);

}  // namespace weft::commands
