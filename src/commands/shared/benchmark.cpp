// SPDX-License-Identifier: Apache-2.0
//
// weft benchmark INPUT: one step, phase by phase, against the limits of the machine that it runs on, for every case of
// the input. Batches lie in memory: neither files nor the loader are measured.
#include <algorithm>
#include <chrono>
#include <fstream>
#include <numeric>
#include <vector>

#include "base/log.hpp"
#include "commands/commands.hpp"
#include "commands/run_directory.hpp"
#include "commands/shared/algorithms.hpp"
#include "commands/shared/benchmark_report.hpp"
#include "commands/shared/benchmark_work.hpp"
#include "device/runtime.hpp"
#include "device/stream.hpp"
#include "kernels/limits/limits.hpp"
#include "kernels/runtime.hpp"
#include "kernels/transcoder/encode/encode.hpp"
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
using kernels::Scalar;

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

/// The best of several tries: a limit is what the machine can do, not what it does on average.
template <class Action>
double shortest(const kernels::Execution& execution, int tries, Action&& action) {
  double best = 0;
  for (int i = 0; i < tries; ++i) {
    const Clock::time_point begin = Clock::now();
    action();
    kernels::fence(execution);
    const double seconds = seconds_since(begin);
    if (i == 1 || (i > 1 && seconds < best)) best = seconds;  // the first try touches the memory
  }
  return best;
}

/// Collective; every rank measures at the same time, as in a step. The mean over ranks.
MachineLimits measure_limits(const kernels::Execution& execution, const transcoder::Shape& shape, std::int64_t n_tokens,
                             std::int64_t n_features, const parallel::Communicator& world) {
  double rates[2];
  {
    const std::int64_t bytes = std::int64_t{256} << 20;  // far beyond any cache
    const device::Buffer<std::byte> from(bytes), to(bytes);
    device::zero(execution, from.data(), bytes);
    world.barrier();
    rates[0] = 2e-9 * static_cast<double>(bytes) /
               shortest(execution, 8, [&] { kernels::copy_memory(execution, from.array(), to.array()); });
  }
  {
    const std::int64_t d = shape.d_model;
    // In bf16 on a GPU, as the step does it.
    const bool narrow = execution.backend == kernels::Backend::cuda;
    const Scalar type = narrow ? Scalar::bf16 : Scalar::fp32;
    const kernels::StatePolicy policy = narrow ? kernels::StatePolicy::bf16 : kernels::StatePolicy::fp32;
    const std::int64_t element = kernels::bytes_of(type);
    const device::Buffer<std::byte> x(n_tokens * d * element), weight(n_features * d * element),
        product(n_tokens * n_features * element);
    const device::Buffer<std::byte> workspace(
        kernels::encode_workspace(execution.backend, n_tokens, n_features, d, type, policy, type));
    device::zero(execution, x.data(), x.bytes());
    device::zero(execution, weight.data(), weight.bytes());
    const kernels::ParameterRows encoder{
        .policy = policy, .rows = n_features, .columns = d, .segment = d, .weight = weight.data()};
    world.barrier();
    rates[1] = 2e-9 * static_cast<double>(n_tokens) * static_cast<double>(n_features) * static_cast<double>(d) /
               shortest(execution, 8, [&] {
                 kernels::encode_tile(execution, {x.data(), type, n_tokens, d, d}, encoder, 0,
                                      {product.data(), type, n_tokens, n_features, n_features}, workspace.array());
               });
  }
  world.sum(std::span<double>(rates));
  return {rates[0] / world.size(), rates[1] / world.size()};
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
      // As in training: the host runs ahead, and once it does, a call takes as long as a step.
      const Clock::time_point begin = Clock::now();
      trainer.step(batch);
      seconds_.push_back(seconds_since(begin));
      return;
    }
    timed_step(trainer, batch);
  }

  /// A step with its phases one after the other.
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
      count_entries(trainer);
    } else {
#ifndef WEFT_ENABLE_CUDA
      transcoder::DenseTrainer trainer(configuration_, shape_, batches_.normalisation(), batches_.statistics(), grid_,
                                       execution_);
      measure(trainer, before);
      sizes_.entries = static_cast<double>(trainer.selection().statistics().entries);
#endif
    }
    describe_sizes();
    result_.phases = stopwatch_.phases(machine_, settings_.formulation, sizes_);
    return result_;
  }

 private:
  template <class AnyTrainer>
  void measure(AnyTrainer& trainer, std::int64_t before) {
    trainer.initialise();
    for (std::int64_t i = 0; i < settings_.warmup; ++i) trainer.step(batches_.next());
    parallel::Exchanges before_steps = exchanges_of(trainer);
    for (std::int64_t i = 0; i < settings_.steps; ++i) stopwatch_.step(trainer, batches_.next(), execution_);
    parallel::Exchanges exchanged = exchanges_of(trainer).since(before_steps);
    double exposed = exchanged.total().seconds / static_cast<double>(settings_.steps);
    // Where the host waits for nothing, only phases that are waited for show what an exchange takes.
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

  /// The median of some steps. The host looks only behind the last of a few: waiting for each would set ranks apart.
  double sample_exposed(transcoder::Trainer& trainer) {
    std::vector<double> seconds;
    for (int sample = 0; sample < 5; ++sample) {
      for (int i = 0; i < 3; ++i) trainer.step(batches_.next());
      trainer.settle();
      seconds.push_back(trainer.step_exposed_seconds());
    }
    return median(seconds);
  }

  /// Entries, and what they read of the decoder: the mean over ranks.
  void count_entries(transcoder::Trainer& trainer) {
    const std::vector<double> l0 = trainer.metrics().l0;
    const double tokens = static_cast<double>(configuration_.data.batch_tokens) / world_.size();
    for (std::size_t s = 0; s < l0.size(); ++s) {
      sizes_.entries += l0[s] * tokens;
      sizes_.entry_columns +=
          l0[s] * tokens * static_cast<double>(shape_.decoder_columns(static_cast<std::int64_t>(s)));
    }
  }
  void describe_sizes() {
    const std::int64_t tokens = configuration_.data.batch_tokens, columns = shape_.decoder_columns(0);
    const kernels::StatePolicy policy = configuration_.optimizer.state;
    sizes_.shape = shape_;
    sizes_.n_features = grid_.part(parallel::kFeatureAxis, shape_.n_features).size();
    sizes_.group_tokens = grid_.part(parallel::kDataAxis, tokens).size();
    sizes_.own_tokens = grid_.own_part(tokens).size();
    sizes_.row_bytes = kernels::bytes_of(transcoder::scalar_of(configuration_.precision));
    sizes_.weight_bytes = transcoder::weight_bytes(policy, 1, 1);
    sizes_.moments_bytes = static_cast<double>(transcoder::moment_bytes(policy, 1, columns, shape_.d_model)) /
                           static_cast<double>(columns);
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
  // 1. The input, once for itself and once for every case; what cannot be done is said before anything is timed.
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

  // 2. The machine, and what it can do.
  const device::Runtime runtime(transcoder::device_settings(configuration), world.node_rank(), world.node_size());
  parallel::nccl::allow_multicast(configuration.parallel.nvls);
  const parallel::Grid grid(world, shape);
  BenchmarkResult result{
      {}, runtime.description(), world.size(), shape.size(parallel::kDataAxis), shape.size(parallel::kFeatureAxis), {}};
  const transcoder::Shape model{input.benchmark.layers, input.benchmark.d_model, configuration.transcoder.features};
  log::info("{}; {} ranks, grid {}", result.device, world.size(), shape.text());
  result.machine =
      measure_limits(runtime.execution(), model, grid.part(parallel::kDataAxis, configuration.data.batch_tokens).size(),
                     grid.part(parallel::kFeatureAxis, model.n_features).size(), world.all());

  // 3. Every case. To tune, one step of each is enough: it makes the products that there are.
  use_recorded_algorithms(configuration, world);
  if (request.tune) {
    for (const std::unique_ptr<Case>& one : cases)
      if (obstacle(*one, world).empty())
        Measurement(*one, world, grid, runtime.execution(), runtime.threads(), result.machine).make_products();
    std::filesystem::create_directories(configuration.run.output);
    tune_algorithms(runtime.execution(), std::filesystem::path(configuration.run.output) / "algorithms.json");
    return 0;
  }
  for (const std::unique_ptr<Case>& one : cases) {
    if (const std::string reason = obstacle(*one, world); !reason.empty()) {
      log::info("case {} is passed over: {}", one->name, reason);
      continue;
    }
    result.cases.push_back(
        Measurement(*one, world, grid, runtime.execution(), runtime.threads(), result.machine).run());
    log::info("{}: {:.1f} ms a step", result.cases.back().name, result.cases.back().ms_per_step);
  }

  if (input.benchmark.checkpoint) result.checkpoint = measure_own_checkpoint(input, world, grid, runtime);

  // 4. Say it, keep it, compare it.
  log::info("{}", to_table(result));
  std::int64_t slower = 0;
  world.on_root([&]() -> std::string {
    const std::filesystem::path directory = configuration.run.output;
    std::filesystem::create_directories(directory);
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
