// SPDX-License-Identifier: Apache-2.0
//
// The results of `weft benchmark`: a table for the log, benchmark.json, benchmark.svg.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "parallel/traffic.hpp"
#include "report/json.hpp"
#include "training/benchmark_checkpoint.hpp"
#include "training/machine_limits.hpp"

namespace weft::training {

struct Phase {
  std::string name;
  double ms = 0;                 ///< median over the steps of the mean over ranks
  double bytes = 0, flops = 0;   ///< of one rank
  double percent_of_limit = -1;  ///< time at the limit / measured time; < 0: no limit is known
};

struct CaseResult {
  std::string name;
  std::string overrides;
  double ms_per_step = 0;  ///< median of the slowest rank
  double tokens_per_second = 0;
  std::int64_t peak_bytes = 0;    ///< peak of what the case allocated where the kernels run; largest rank
  std::int64_t state_bytes = 0;   ///< parameters and moments; largest rank
  std::int64_t driver_bytes = 0;  ///< of a GPU: in use while training according to the driver, libraries included
  std::vector<Phase> phases;      ///< in the order of the step

  double row_bytes = 0;  ///< per token, inputs and targets in bf16: what a reader must deliver

  /// With several ranks: each kind of exchange. On GPUs it is timed alone and without waiting for later ranks; between
  /// processes on the host the waiting is included.
  std::vector<parallel::ExchangeProfile> exchanges;
  /// Exposed time of the exchanges per step, mean over ranks; the rest overlaps with computation. The difference to
  /// the rank that waits least is waiting for slower ranks.
  double exposed_ms = 0;
  double exposed_least_ms = 0;
};

struct BenchmarkResult {
  MachineLimits machine;
  std::string device;
  int ranks = 1;
  std::map<std::string, std::int64_t> grid;  ///< axis -> ranks along it
  std::vector<CaseResult> cases;
  std::optional<CheckpointResult> checkpoint = {};
  report::Json profile = {};  ///< of --profile (profile.hpp); null: none
};

report::Json to_json(const BenchmarkResult&);
std::string to_table(const BenchmarkResult&);
/// The phases of each case as stacked bars (report/chart.hpp).
std::string to_svg(const BenchmarkResult&);

/// One line per case that both have; `slower`: a case takes more than `ratio` times the reference's time. Throws
/// Error(usage) when the document is not a benchmark.json or has none of the cases.
struct Comparison {
  std::string text;
  bool slower = false;
};
Comparison compare(const BenchmarkResult&, const report::Json& reference, double ratio);

}  // namespace weft::training
