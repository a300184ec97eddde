// SPDX-License-Identifier: Apache-2.0
//
// The results of `weft benchmark`: a table for the log, benchmark.json, benchmark.svg.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "commands/shared/benchmark_checkpoint.hpp"
#include "commands/shared/machine_limits.hpp"
#include "parallel/traffic.hpp"
#include "report/json.hpp"

namespace weft::commands {

struct Phase {
  std::string name;
  double ms = 0;                 ///< median over the steps of the mean over ranks
  double bytes = 0, flops = 0;   ///< of one rank
  double percent_of_limit = -1;  ///< time that the limit allows / time taken; < 0: no such limit
};

struct CaseResult {
  std::string name;
  std::string overrides;
  double ms_per_step = 0;  ///< median of the slowest rank
  double tokens_per_second = 0;
  std::int64_t peak_bytes = 0;    ///< all that the case allocated where the kernels run, at its highest; largest rank
  std::int64_t state_bytes = 0;   ///< parameters and moments; largest rank
  std::int64_t driver_bytes = 0;  ///< of a GPU: what the driver showed as taken while training, libraries included
  std::vector<Phase> phases;      ///< in the order of the step

  double row_bytes = 0;  ///< of a token in bf16 files, inputs and targets: what a reader must deliver for it

  /// With several ranks: each kind of exchange, one by one. On GPUs nothing else goes on then, and the wait for later
  /// ranks is not in it; between processes on the host it is.
  std::vector<parallel::ExchangeProfile> exchanges;
  /// In a step the computation stood still for exchanges: the mean over ranks; the rest was hidden. What the rank that
  /// waits least has less than that is waiting for slower ranks.
  double exposed_ms = 0;
  double exposed_least_ms = 0;
};

struct BenchmarkResult {
  MachineLimits machine;
  std::string device;
  int ranks = 1;
  std::int64_t data = 1, feature = 1;
  std::vector<CaseResult> cases;
  std::optional<CheckpointResult> checkpoint = {};
  report::Json profile = {};  ///< of --profile (profile.hpp); null: none
};

report::Json to_json(const BenchmarkResult&);
std::string to_table(const BenchmarkResult&);
/// Stacked bars, one a case, with every phase named: readable without a script.
std::string to_svg(const BenchmarkResult&);

/// One line for every case that both know; `slower`: whether some case takes more than `ratio` times the other's time.
/// Throws Error(usage) when the document is no benchmark.json or knows none of the cases.
struct Comparison {
  std::string text;
  bool slower = false;
};
Comparison compare(const BenchmarkResult&, const report::Json& reference, double ratio);

}  // namespace weft::commands
