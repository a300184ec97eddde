// SPDX-License-Identifier: Apache-2.0
//
// weft benchmark INPUT: the phases of a step compared with the limits of the machine, for every case of the input.
// Batches are in memory: neither files nor the loader are measured.
#include <algorithm>
#include <chrono>
#include <fstream>
#include <numeric>
#include <vector>

#include "base/log.hpp"
#include "base/trace.hpp"
#include "commands/commands.hpp"
#include "commands/run_directory.hpp"
#include "commands/shared/algorithms.hpp"
#include "commands/shared/benchmark_report.hpp"
#include "commands/shared/benchmark_work.hpp"
#include "commands/shared/machine_limits.hpp"
#include "commands/shared/profile.hpp"
#include "device/runtime.hpp"
#include "device/stream.hpp"
#include "kernels/runtime.hpp"
#include "parallel/nccl.hpp"
#include "storage/durable.hpp"
#include "transcoder/benchmark/data.hpp"
#include "transcoder/plan.hpp"
#include "transcoder/trainer.hpp"
#ifndef WEFT_ENABLE_CUDA
#include "transcoder/benchmark/dense.hpp"
#endif

namespace weft::commands {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

struct Case {
  std::string name;
  std::string overrides;  ///< as the input gives them
  Input input;
};

std::string trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t"), end = text.find_last_not_of(" \t");
  return begin == std::string_view::npos ? "" : std::string(text.substr(begin, end - begin + 1));
}

/// Reads the input once more with the overrides of one case: "name: table.key=value, table.key=value".
void read_case(const Request& request, const std::string& text, const parallel::World& world, Case& out) {
  const std::size_t colon = text.find(':');
  out.name = trimmed(text.substr(0, colon));
  out.overrides = colon == std::string::npos ? "" : trimmed(text.substr(colon + 1));
  Request own = request;
  if (out.name == "dense") own.sets.push_back("benchmark.formulation=dense");
  for (std::size_t begin = 0; begin < out.overrides.size();) {
    const std::size_t end = std::min(out.overrides.find(',', begin), out.overrides.size());
    own.sets.push_back(trimmed(out.overrides.substr(begin, end - begin)));
    begin = end + 1;
  }
  read_input(own, schema(out.input, request.command), world);
}

parallel::Exchanges exchanges_of(const transcoder::Trainer& trainer) { return trainer.exchanges(); }
#ifndef WEFT_ENABLE_CUDA
parallel::Exchanges exchanges_of(const transcoder::DenseTrainer&) { return {}; }
#endif

/// Times of every phase, step by step.
class Stopwatch {
 public:
  explicit Stopwatch(const parallel::Communicator& world) : world_(world) {}

  template <class AnyTrainer>
  void step(AnyTrainer& trainer, const dataset::RawBatch& batch, const kernels::Execution& execution) {
    if (device::is_asynchronous(execution)) {
      // As in training, the host runs ahead; then a call takes as long as a step.
      const Clock::time_point begin = Clock::now();
      trainer.step(batch);
      seconds_.push_back(seconds_since(begin));
      return;
    }
    timed_step(trainer, batch);
  }

  /// A step whose phases are timed one after the other.
  template <class AnyTrainer>
  void timed_step(AnyTrainer& trainer, const dataset::RawBatch& batch, bool whole = true) {
    trainer.timers().reset();
    world_.barrier();
    const Clock::time_point begin = Clock::now();
    trainer.step(batch);
    if (whole) seconds_.push_back(seconds_since(begin));
    for (const report::Timers::Statistics& phase : trainer.timers().gather(world_)) {
      auto known = std::find_if(phases_.begin(), phases_.end(), [&](const auto& p) { return p.first == phase.name; });
      if (known == phases_.end()) known = phases_.insert(known, {phase.name, {}});
      known->second.push_back(phase.mean);
    }
  }

  /// Of the slowest rank. Collective.
  double ms_per_step() const {
    std::int64_t nanoseconds = std::llround(median(seconds_) * 1e9);
    world_.maximum({&nanoseconds, 1});
    return static_cast<double>(nanoseconds) * 1e-6;
  }
  std::vector<Phase> phases(const MachineLimits& machine, Formulation formulation, const StepSizes& sizes) const {
    std::vector<Phase> all;
    for (const auto& [name, seconds] : phases_) {
      const Work work = work_of(name, formulation, sizes);
      Phase phase{name, 1e3 * median(seconds), work.bytes, work.flops, -1};
      const double possible =
          1e3 * std::max(work.bytes / (1e9 * machine.copy_gb_per_second), work.flops / (1e9 * machine.gemm_gflops));
      if (possible > 0 && phase.ms > 0) phase.percent_of_limit = 100 * possible / phase.ms;
      all.push_back(phase);
    }
    return all;
  }

 private:
  const parallel::Communicator& world_;
  std::vector<double> seconds_;
  std::vector<std::pair<std::string, std::vector<double>>> phases_;
};

/// One case, from fresh parameters to its medians.
class Measurement {
 public:
  Measurement(const Case& one, const parallel::World& world, const parallel::Grid& grid,
              const kernels::Execution& execution, int n_threads, const MachineLimits& machine)
      : case_(one),
        configuration_(one.input.configuration),
        settings_(one.input.benchmark),
        world_(world),
        grid_(grid),
        execution_{device::planned_backend(transcoder::device_settings(configuration_)), execution.stream},
        machine_(machine),
        shape_{settings_.layers, settings_.d_model, configuration_.transcoder.features},
        batches_(shape_, configuration_.data.batch_tokens, settings_.batches, settings_.zipf,
                 static_cast<std::uint64_t>(configuration_.run.seed), grid, execution, n_threads) {}

  /// One step.
  void make_products() {
    transcoder::Trainer trainer(configuration_, shape_, batches_.normalisation(), batches_.statistics(), grid_,
                                execution_, [](const dataset::RawBatch&) { return std::string("resident batch"); });
    trainer.initialise();
    trainer.step(batches_.next());
    trainer.settle();
  }

  CaseResult run() {
    const std::int64_t before = device::memory_use().device_bytes;
    device::reset_peak();
    if (settings_.formulation == Formulation::sparse) {
      transcoder::Trainer trainer(configuration_, shape_, batches_.normalisation(), batches_.statistics(), grid_,
                                  execution_, [](const dataset::RawBatch&) { return std::string("resident batch"); });
      measure(trainer, before);
      sizes_ = step_sizes(configuration_, shape_, grid_, trainer.metrics().l0);
    } else {
#ifndef WEFT_ENABLE_CUDA
      transcoder::DenseTrainer trainer(configuration_, shape_, batches_.normalisation(), batches_.statistics(), grid_,
                                       execution_);
      measure(trainer, before);
      sizes_ = step_sizes(configuration_, shape_, grid_, {});
      sizes_.entries = static_cast<double>(trainer.selection().statistics().entries);
#endif
    }
    result_.phases = stopwatch_.phases(machine_, settings_.formulation, sizes_);
    return result_;
  }

  /// After `run`.
  PhaseBytes bytes() const { return phase_bytes(settings_.formulation, sizes_); }

 private:
  template <class AnyTrainer>
  void measure(AnyTrainer& trainer, std::int64_t before) {
    trainer.initialise();
    for (std::int64_t i = 0; i < settings_.warmup; ++i) {
      trace::next_step();
      trainer.step(batches_.next());
    }
    parallel::Exchanges before_steps = exchanges_of(trainer);
    for (std::int64_t i = 0; i < settings_.steps; ++i) {
      trace::next_step();
      stopwatch_.step(trainer, batches_.next(), execution_);
    }
    trace::end_steps();
    parallel::Exchanges exchanged = exchanges_of(trainer).since(before_steps);
    double exposed = exchanged.total().seconds / static_cast<double>(settings_.steps);
    // Where the host does not wait, exchanges are timed in extra steps that wait after each phase.
    if constexpr (std::is_same_v<AnyTrainer, transcoder::Trainer>)
      if (device::is_asynchronous(execution_)) {
        result_.driver_bytes = device::driver_bytes();
        exposed = sample_exposed(trainer);
        trainer.time_phases(true);
        before_steps = exchanges_of(trainer);
        for (std::int64_t i = 0; i < settings_.steps; ++i) stopwatch_.timed_step(trainer, batches_.next(), false);
        exchanged = exchanges_of(trainer).since(before_steps);
        trainer.time_phases(false);
      }

    result_.name = case_.name;
    result_.overrides = case_.overrides;
    result_.ms_per_step = stopwatch_.ms_per_step();
    result_.tokens_per_second = 1e3 * static_cast<double>(configuration_.data.batch_tokens) / result_.ms_per_step;
    if (world_.size() > 1) {
      result_.exchanges = parallel::profile(exchanged, settings_.steps, world_.all());
      std::vector<double> of_rank(static_cast<std::size_t>(world_.size()));
      world_.all().all_gather(&exposed, of_rank.data(), sizeof exposed);
      result_.exposed_ms = 1e3 * std::accumulate(of_rank.begin(), of_rank.end(), 0.0) / world_.size();
      result_.exposed_least_ms = 1e3 * *std::min_element(of_rank.begin(), of_rank.end());
    }
    result_.row_bytes = 4 * static_cast<double>(shape_.width());
    std::int64_t memory[] = {device::memory_use().device_peak_bytes - before, trainer.model().state_bytes()};
    world_.all().maximum(memory);
    result_.peak_bytes = memory[0];
    result_.state_bytes = memory[1];
  }

  /// The median of some steps. The host waits only after the last of a few: waiting for each would desynchronise ranks.
  double sample_exposed(transcoder::Trainer& trainer) {
    std::vector<double> seconds;
    for (int sample = 0; sample < 5; ++sample) {
      for (int i = 0; i < 3; ++i) trainer.step(batches_.next());
      trainer.settle();
      seconds.push_back(trainer.step_exposed_seconds());
    }
    return median(seconds);
  }

  const Case& case_;
  const transcoder::Configuration& configuration_;
  const BenchmarkSettings& settings_;
  const parallel::World& world_;
  const parallel::Grid& grid_;
  kernels::Execution execution_;
  MachineLimits machine_;
  transcoder::Shape shape_;
  transcoder::ResidentBatches batches_;
  Stopwatch stopwatch_{world_.all()};
  StepSizes sizes_;
  CaseResult result_;
};

/// A checkpoint of the input's own state. Collective.
CheckpointResult measure_own_checkpoint(const Input& input, const parallel::World& world, const parallel::Grid& grid,
                                        const device::Runtime& runtime) {
  const kernels::Execution& execution = runtime.execution();
  const transcoder::Configuration& configuration = input.configuration;
  const transcoder::Shape shape{input.benchmark.layers, input.benchmark.d_model, configuration.transcoder.features};
  const transcoder::ResidentBatches batches(shape, configuration.data.batch_tokens, 1, input.benchmark.zipf,
                                            static_cast<std::uint64_t>(configuration.run.seed), grid, execution,
                                            runtime.threads());
  transcoder::Trainer trainer(configuration, shape, batches.normalisation(), batches.statistics(), grid, execution,
                              [](const dataset::RawBatch&) { return std::string("resident batch"); });
  trainer.initialise();
  return measure_checkpoint(std::filesystem::path(configuration.run.output) / "benchmark_checkpoint",
                            trainer.registry(), execution, world);
}

/// Why this case cannot run here; "" when it can.
std::string obstacle(const Case& one, const parallel::World& world) {
  if (one.input.benchmark.formulation == Formulation::sparse) return "";
#ifdef WEFT_ENABLE_CUDA
  static_cast<void>(world);
  return "the dense formulation is in builds without CUDA only";
#else
  return world.size() > 1 ? "the dense formulation is for one process" : "";
#endif
}

report::Json read_reference(const std::string& path) {
  std::ifstream file(path);
  const report::Json json = report::Json::parse(file, nullptr, false);
  if (!file.is_open() || json.is_discarded())
    throw error(ExitCode::usage, "--compare {}: cannot be read as JSON; give the benchmark.json of an earlier run",
                path);
  return json;
}

}  // namespace

int benchmark(const Request& request, const parallel::World& world) {
  // 1. The input, once for itself and once for every case; errors are reported before anything is timed.
  if (request.tune && !kernels::kCudaBuild)
    throw collective_error(
        ExitCode::usage,
        "--tune: nothing can be tuned here (the CPU's dense library offers no choice of algorithms); "
        "leave it out");
  Input input;
  read_input(request, schema(input, request.command), world);
  std::vector<std::unique_ptr<Case>> cases;
  for (const std::string& text : input.benchmark.cases)
    read_case(request, text, world, *cases.emplace_back(std::make_unique<Case>()));
  report::Json reference;
  if (!request.compare.empty())
    world.on_root([&]() -> std::string { return reference = read_reference(request.compare), ""; });
  const transcoder::Configuration& configuration = input.configuration;
  const parallel::GridShape shape =
      parallel::grid_shape(configuration.parallel.data, {"feature", configuration.parallel.feature}, world.size());
  require_usable_output(world, configuration.run.output);
  if (request.dry_run) return 0;
  world.on_root([&]() -> std::string {
    std::filesystem::create_directories(configuration.run.output);
    return {};
  });

  // 2. The machine and its limits.
  const device::Runtime runtime(transcoder::device_settings(configuration), world.node_rank(), world.node_size());
  parallel::nccl::allow_multicast(configuration.parallel.nvls);
  const parallel::Grid grid(world, shape);
  BenchmarkResult result{
      {}, runtime.description(), world.size(), shape.size(parallel::kDataAxis), shape.size(parallel::kFeatureAxis), {}};
  const transcoder::Shape model{input.benchmark.layers, input.benchmark.d_model, configuration.transcoder.features};
  log::info("{}; {} ranks, grid {}", result.device, world.size(), shape.text());
  result.machine = {
      measure_copy(runtime.execution(), world.all()),
      measure_product(runtime.execution(), grid.part(parallel::kDataAxis, configuration.data.batch_tokens).size(),
                      grid.part(parallel::kFeatureAxis, model.n_features).size(), model.d_model, world.all())};

  // 3. Every case. Tuning needs one step of each, which makes all products.
  use_recorded_algorithms(configuration, world);
  if (request.tune) {
    for (const std::unique_ptr<Case>& one : cases)
      if (obstacle(*one, world).empty())
        Measurement(*one, world, grid, runtime.execution(), runtime.threads(), result.machine).make_products();
    tune_algorithms(runtime.execution(), std::filesystem::path(configuration.run.output) / "algorithms.json");
    return 0;
  }
  Profile profile(request.profile, world, runtime);  // of the first case
  for (const std::unique_ptr<Case>& one : cases) {
    if (const std::string reason = obstacle(*one, world); !reason.empty()) {
      log::info("case {} is skipped: {}", one->name, reason);
      continue;
    }
    Measurement measurement(*one, world, grid, runtime.execution(), runtime.threads(), result.machine);
    result.cases.push_back(measurement.run());
    log::info("{}: {:.1f} ms/step", result.cases.back().name, result.cases.back().ms_per_step);
    if (profile.active()) result.profile = profile.conclude(configuration.run.output, measurement.bytes());
  }

  if (input.benchmark.checkpoint) result.checkpoint = measure_own_checkpoint(input, world, grid, runtime);

  // 4. Print, write, compare.
  log::info("{}", to_table(result));
  std::int64_t slower = 0;
  world.on_root([&]() -> std::string {
    const std::filesystem::path directory = configuration.run.output;
    report::write_json(directory / "benchmark.json", to_json(result));
    storage::write_text_atomically(directory / "benchmark.svg", to_svg(result));
    log::info("results in {}: benchmark.json, benchmark.svg", directory.string());
    if (request.compare.empty()) return {};
    const Comparison comparison = compare(result, reference, input.benchmark.compare_ratio);
    log::info("{}", comparison.text);
    slower = comparison.slower;
    return {};
  });
  world.all().broadcast(&slower, sizeof slower);
  if (slower != 0)
    throw collective_error(ExitCode::internal,
                           "slower than {} (benchmark.compare_ratio = {:.2f}); see which phase in benchmark.json",
                           request.compare, input.benchmark.compare_ratio);
  return 0;
}

}  // namespace weft::commands
