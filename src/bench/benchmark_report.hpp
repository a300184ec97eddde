// SPDX-License-Identifier: Apache-2.0
//
// The results of `weft benchmark`: a table for the log, benchmark.json, benchmark.csv.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bench/benchmark_checkpoint.hpp"
#include "parallel/traffic.hpp"
#include "run/machine_limits.hpp"
#include "storage/json_file.hpp"

namespace weft::bench {

struct Phase {
  std::string name;
  double ms = 0;                 ///< median over the steps of the mean over ranks
  double bytes = 0, flops = 0;   ///< work of one rank
  double percent_of_limit = -1;  ///< time at the limit / measured time; < 0: no limit is known
};

/// Floating-point operations per token of N parameters, L layers of width C, sequences of T: causal counts the scores
/// that are used, 6 N + 6 L C T (llm.c); full counts all scores, 6 N + 12 L C T (Chowdhery et al. 2022).
struct ModelFlops {
  double causal = 0, full = 0;
};

struct CaseResult {
  std::string name;
  std::string overrides;
  std::vector<std::string> toggles;          ///< BenchmarkCase::toggles
  std::string left_out;                      ///< BenchmarkCase::left_out
  std::map<std::string, std::int64_t> grid;  ///< axis -> ranks along it; {}: that of the input
  double ms_per_step = 0;                    ///< median of the slowest rank
  double fastest_ms = 0;                     ///< the shortest step of the slowest rank
  double interquartile_ms = 0;               ///< distance of the quartiles of the steps, first rank
  double tokens_per_second = 0;
  std::int64_t tokens_per_step = 0;
  std::int64_t peak_bytes = 0;    ///< peak of what the case allocated where the kernels run; largest rank
  std::int64_t state_bytes = 0;   ///< parameters and moments; largest rank
  std::int64_t driver_bytes = 0;  ///< memory of a GPU in use while training according to the driver, libraries included
  std::vector<Phase> phases;      ///< in the order of the step

  double row_bytes = 0;  ///< per token, inputs and targets in bf16: what a reader must deliver

  /// The kinds of exchange between several ranks. On GPUs it is timed alone and without waiting for later ranks;
  /// between processes on the host the waiting is included.
  std::vector<parallel::ExchangeProfile> exchanges;
  /// Exposed time of the exchanges per step, mean over ranks; the rest overlaps with computation. The difference to
  /// the rank that waits least is waiting for slower ranks.
  double exposed_ms = 0;
  double exposed_least_ms = 0;

  std::optional<double> loss;  ///< after the steps of warm-up and measurement; none: private training does not keep it
  ModelFlops flops = {};
  // Set by `judge`. A case with another number of tokens per step is another problem and is not compared.
  bool compared = false;
  std::optional<double> loss_difference;  ///< loss over that of the baseline, less 1; none if one has no loss
  double times_faster = 0;                ///< time of the baseline over that of the case
  std::string problem;                    ///< why the row is not valid; "": it is
};

/// A case that could not be measured on this machine.
struct NotMeasured {
  std::string name;
  std::string reason;
};

struct BenchmarkResult {
  run::MachineLimits machine;
  std::string device;
  std::string gpu;    ///< type of the GPU of the first rank; "": none
  std::string input;  ///< name of the input file without folder and suffix
  int ranks = 1;
  std::map<std::string, std::int64_t> grid;  ///< axis -> ranks along it
  std::int64_t steps = 0;  ///< steps of each case, those of warm-up included: after them the losses are compared
  std::vector<CaseResult> cases;
  std::vector<NotMeasured> not_measured;
  std::string baseline;    ///< the case that the others are compared with (`judge`); "": none
  double tolerance = 0;    ///< largest accepted loss_difference
  double peak_tflops = 0;  ///< peak of a rank's device, for the utilisation of models with ModelFlops; 0: not stated
  std::optional<CheckpointResult> checkpoint = {};
  Json profile = {};  ///< result of --profile (profile.hpp); null: none
};

Json to_json(const BenchmarkResult&);
std::string to_table(const BenchmarkResult&);
/// One line per case, measured or not (docs/numbers.md).
std::string to_csv(const BenchmarkResult&);

/// One line per case that both have; `slower`: a case takes more than `ratio` times the reference's time. `reference`:
/// a benchmark.json, or docs/reference_speeds.json, of which the cases of this type of GPU, input and number of ranks
/// count. Throws Error(usage) when the document is neither or has none of the cases.
struct Comparison {
  std::string text;
  bool slower = false;
};
Comparison compare(const BenchmarkResult&, const Json& reference, double ratio);

}  // namespace weft::bench
