// SPDX-License-Identifier: Apache-2.0
//
// Times the steps of any model, phase by phase, and compares them with the limits of the machine. A model implements
// BenchmarkSubject; cases, medians, exposed time and comparison with an earlier run are the same for all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bench/benchmark_report.hpp"
#include "checkpoint/registry.hpp"
#include "device/runtime.hpp"
#include "input/schema.hpp"
#include "kernels/execution.hpp"
#include "parallel/grid.hpp"
#include "parallel/traffic.hpp"
#include "parallel/world.hpp"
#include "run/profile.hpp"
#include "run/run_settings.hpp"
#include "run/timers.hpp"

namespace weft::bench {

/// The keys of table [benchmark] that every model has.
struct BenchmarkSettings {
  std::int64_t warmup = 20;                     ///< steps of training before the measured ones
  std::int64_t steps = 20;                      ///< measured; their median counts
  std::int64_t batches = 4;                     ///< resident batches, used in turn
  double zipf = 1.0;                            ///< exponent of the frequencies of what a batch consists of
  std::vector<std::string> cases = {"sparse"};  ///< "name" or "name: table.key=value, table.key=value"
  double compare_ratio = 1.1;
  bool checkpoint = false;  ///< also write and read a checkpoint of the state
};
/// benchmark.warmup, steps, batches and zipf. what: "planted features", for the help text of zipf.
void add_step_keys(input::Schema&, BenchmarkSettings&, std::string_view what);
/// benchmark.cases, compare_ratio and checkpoint. known: the names with a special meaning, for the help text.
void add_case_keys(input::Schema&, BenchmarkSettings&, std::string_view known);

/// One entry of benchmark.cases.
struct BenchmarkCase {
  std::string name;
  std::string overrides;             ///< overrides as given in the input
  std::vector<std::string> sets;     ///< one by one, "table.key=value": those, or what the name stands for
  std::vector<std::string> toggles;  ///< for a name that stands for optimisations: those that are on
  std::string left_out;              ///< optimisations that are not available on this machine, with the reason
  std::string obstacle;              ///< why the case cannot be measured on this machine; "": it can
};
BenchmarkCase parse_case(std::string_view text);

/// A model with batches in memory, in the configuration of one case. The constructor makes the batches, `build` the
/// model: only the memory of the latter counts.
class BenchmarkSubject {
 public:
  virtual ~BenchmarkSubject() = default;

  /// Allocates and initialises the model. Collective.
  virtual void build() = 0;
  /// One step on the next batch, as in training. Collective.
  virtual void step() = 0;
  virtual void wait() = 0;
  virtual run::Timers& timers() = 0;
  virtual checkpoint::Registry& registry() = 0;
  virtual const kernels::Execution& execution() const = 0;
  virtual parallel::Exchanges exchanges() const { return {}; }
  /// Time that the computation of the last step, which is over, waited for exchanges.
  virtual double step_exposed_seconds() const { return 0; }
  /// true: waits for the device between phases, so that each is timed by itself.
  virtual void time_phases(bool one_by_one) = 0;

  virtual std::int64_t tokens_per_step() const = 0;  ///< all ranks together
  virtual double row_bytes() const = 0;              ///< a token in the files that training reads
  virtual std::int64_t state_bytes() const = 0;      ///< parameters and moments on this rank
  /// Called once after the steps: what the counts below depend on. Collective.
  virtual void count_work() {}
  virtual run::Work work_of(std::string_view phase) const = 0;
  virtual run::PhaseBytes phase_bytes() const = 0;

  /// Loss of the last step, before its update; none if the step keeps none. Waits for the step. Collective.
  virtual std::optional<double> loss() = 0;
  /// Operations of forward and backward pass without recomputation. 0: the model has no convention for them.
  virtual ModelFlops flops_per_token() const { return {}; }
};

/// The model of an input of weft benchmark, or of one of its cases. The recipe (commands/shared/benchmark_command.cpp)
/// is the same for all.
class BenchmarkModel {
 public:
  virtual ~BenchmarkModel() = default;

  /// The keys of the input, bound to this object.
  virtual input::Schema keys() = 0;
  virtual const BenchmarkSettings& settings() const = 0;
  virtual const run::RunSettings& run() const = 0;
  virtual device::Settings device() const = 0;
  /// Sets the number of ranks of a model whose grid has no keys. Throws a collective Error(usage).
  virtual void use_ranks(const parallel::World&) {}
  /// Throws a collective Error(usage).
  virtual parallel::GridShape grid(const parallel::World&) const = 0;
  /// Reads what a case reads from files; before anything is timed. Throws a collective Error.
  virtual void check(const parallel::World&) const {}
  /// GFLOP/s of a product of the model's sizes. Collective.
  virtual double measure_product(const parallel::Grid&, const kernels::Execution&) const = 0;

  /// Gives a case of this input what its name stands for. Throws a collective Error(usage).
  virtual void resolve(BenchmarkCase&) const = 0;
  /// Why the case cannot be measured on this machine, "" if it can. `dry`: the device was not started. Collective.
  virtual std::string obstacle(const parallel::World&, bool dry) const = 0;
  /// What the case needs, for --dry-run.
  virtual std::string plan() const = 0;
  /// This object and the grid must outlive the subject. Collective.
  virtual std::unique_ptr<BenchmarkSubject> subject(const parallel::Grid&, const device::Runtime&,
                                                    const parallel::World&) const = 0;
  /// Changes the model to the one whose state benchmark.checkpoint writes and reads.
  virtual void take_checkpoint_case() = 0;
  /// Compares the cases, where they are comparable.
  virtual void judge(BenchmarkResult&) const = 0;
};

/// Measures a case, from fresh parameters to medians. Collective.
CaseResult measure(const BenchmarkCase&, BenchmarkSubject&, const BenchmarkSettings&, const run::MachineLimits&,
                   const parallel::World&);

/// Compares every case that has as many tokens per step as the one named `baseline` with it: loss_difference,
/// times_faster, and a problem if its loss is not finite or differs by more than `tolerance` (relative), or if the
/// baseline could not be measured. Where one of them has no loss, their speed alone. Does nothing if there is no case
/// of that name.
void judge(BenchmarkResult&, std::string_view baseline, double tolerance);

/// The benchmark.json of an earlier run. Throws Error(usage).
Json read_reference(const std::string& path);

}  // namespace weft::bench
