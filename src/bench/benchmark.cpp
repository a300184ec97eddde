// SPDX-License-Identifier: Apache-2.0
#include "bench/benchmark.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "base/trace.hpp"
#include "device/memory.hpp"
#include "device/stream.hpp"
#include "input/schema.hpp"
#include "model/step_runner.hpp"
#include "storage/durable.hpp"

namespace weft::bench {
namespace {

/// The value below which `part` of the values are, interpolated; part = 0.5: the median.
double quantile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double place = part * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(place);
  const double above = values[std::min(below + 1, values.size() - 1)];
  return values[below] + (place - static_cast<double>(below)) * (above - values[below]);
}

double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

std::string trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t"), end = text.find_last_not_of(" \t");
  return begin == std::string_view::npos ? "" : std::string(text.substr(begin, end - begin + 1));
}

/// Times of every phase, step by step.
class Stopwatch {
 public:
  explicit Stopwatch(const parallel::Communicator& world) : world_(world) {}

  void step(BenchmarkSubject& subject) {
    if (device::is_asynchronous(subject.execution())) {
      // The host runs ahead as in training; then a call takes as long as a step.
      const Clock::time_point begin = Clock::now();
      subject.step();
      seconds_.push_back(seconds_since(begin));
      return;
    }
    timed_step(subject, true);
  }

  /// Runs a step whose phases are timed separately. `whole`: also counts as a step.
  void timed_step(BenchmarkSubject& subject, bool whole) {
    subject.timers().reset();
    world_.barrier();
    const Clock::time_point begin = Clock::now();
    subject.step();
    if (whole) seconds_.push_back(seconds_since(begin));
    for (const run::Timers::Statistics& phase : subject.timers().gather(world_)) {
      auto known = std::find_if(phases_.begin(), phases_.end(), [&](const auto& p) { return p.first == phase.name; });
      if (known == phases_.end()) known = phases_.insert(known, {phase.name, {}});
      known->second.push_back(phase.mean);
    }
  }

  /// Median time of a step on the slowest rank. Collective.
  double ms_per_step() const {
    std::int64_t nanoseconds = std::llround(median(seconds_) * 1e9);
    world_.maximum({&nanoseconds, 1});
    return static_cast<double>(nanoseconds) * 1e-6;
  }

  /// The shortest step, of the slowest rank. Collective.
  double fastest_ms() const {
    std::int64_t nanoseconds = std::llround(1e9 * quantile(seconds_, 0));
    world_.maximum({&nanoseconds, 1});
    return static_cast<double>(nanoseconds) * 1e-6;
  }

  /// Distance of the quartiles of this rank.
  double interquartile_ms() const { return 1e3 * (quantile(seconds_, 0.75) - quantile(seconds_, 0.25)); }

  std::vector<Phase> phases(const run::MachineLimits& machine, const BenchmarkSubject& subject) const {
    std::vector<Phase> all;
    for (const auto& [name, seconds] : phases_) {
      const run::Work work = subject.work_of(name);
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

/// Fewest steps of warm-up on a GPU: before the host is as far ahead as it gets, a call takes less time than a step.
/// The first two steps are not replayed.
constexpr std::int64_t kFewestOnGpu = model::StepRunner::kStepsAhead + 2;

std::int64_t warmup_steps(const BenchmarkSettings& settings, const BenchmarkSubject& subject) {
  return device::is_asynchronous(subject.execution()) ? std::max(settings.warmup, kFewestOnGpu) : settings.warmup;
}

/// The median of some steps, fewer if they are long. The host waits only after the last of a few: waiting for each
/// would desynchronise ranks.
double sample_exposed(BenchmarkSubject& subject, double ms_per_step) {
  std::vector<double> seconds;
  const int samples = ms_per_step < 1000 ? 5 : 1;
  for (int sample = 0; sample < samples; ++sample) {
    for (int i = 0; i < 3; ++i) subject.step();
    subject.wait();
    seconds.push_back(subject.step_exposed_seconds());
  }
  return median(std::move(seconds));
}

}  // namespace

void add_step_keys(input::Schema& schema, BenchmarkSettings& b, std::string_view what) {
  schema
      .add("benchmark.warmup", b.warmup,
           fmt::format("steps of training before the measured ones; on a GPU at least {}", kFewestOnGpu))
      .in("steps")
      .at_least(0)
      .free();
  schema.add("benchmark.steps", b.steps, "measured steps; their median counts").in("steps").at_least(1).free();
  schema.add("benchmark.batches", b.batches, "batches in memory, used in turn").at_least(1).free();
  schema.add("benchmark.zipf", b.zipf, fmt::format("exponent of the frequencies of the {}; 0 = all equal", what))
      .at_least(0)
      .free();
}

void add_case_keys(input::Schema& schema, BenchmarkSettings& b, std::string_view known) {
  schema
      .add("benchmark.cases", b.cases,
           fmt::format("each \"name\" or \"name: table.key=value, table.key=value\"; {}", known))
      .free();
  schema
      .add("benchmark.compare_ratio", b.compare_ratio,
           "--compare: largest accepted ratio of a case's time to that of the earlier run")
      .more_than(0)
      .free();
  schema
      .add("benchmark.checkpoint", b.checkpoint,
           "also write and read a checkpoint of the state, and compare with plain files on the disk of run.output")
      .free();
}

BenchmarkCase parse_case(std::string_view text) {
  const std::size_t colon = text.find(':');
  BenchmarkCase one;
  one.name = trimmed(text.substr(0, colon));
  if (colon != std::string_view::npos) one.overrides = trimmed(text.substr(colon + 1));
  for (std::size_t begin = 0; begin < one.overrides.size();) {
    const std::size_t end = std::min(one.overrides.find(',', begin), one.overrides.size());
    one.sets.push_back(trimmed(std::string_view(one.overrides).substr(begin, end - begin)));
    begin = end + 1;
  }
  return one;
}

CaseResult measure(const BenchmarkCase& one, BenchmarkSubject& subject, const BenchmarkSettings& settings,
                   const run::MachineLimits& machine, const parallel::World& world) {
  const std::int64_t before = device::memory_use().device_bytes;
  device::reset_peak();
  subject.build();
  for (std::int64_t i = 0, warmup = warmup_steps(settings, subject); i < warmup; ++i) {
    trace::next_step();
    subject.step();
  }
  CaseResult result;
  Stopwatch stopwatch(world.all());
  parallel::Exchanges before_steps = subject.exchanges();
  for (std::int64_t i = 0; i < settings.steps; ++i) {
    trace::next_step();
    stopwatch.step(subject);
  }
  trace::end_steps();
  result.loss = subject.loss();
  parallel::Exchanges exchanged = subject.exchanges().since(before_steps);
  double exposed = exchanged.total().seconds / static_cast<double>(settings.steps);
  if (device::is_asynchronous(subject.execution())) {
    // Where the host does not wait, exchanges are timed in extra steps that wait after each phase.
    result.driver_bytes = device::driver_bytes();
    if (world.size() > 1) exposed = sample_exposed(subject, stopwatch.ms_per_step());
    subject.time_phases(true);
    before_steps = subject.exchanges();
    for (std::int64_t i = 0; i < settings.steps; ++i) stopwatch.timed_step(subject, false);
    exchanged = subject.exchanges().since(before_steps);
    subject.time_phases(false);
  }

  result.name = one.name;
  result.overrides = one.overrides;
  result.toggles = one.toggles;
  result.left_out = one.left_out;
  result.flops = subject.flops_per_token();
  result.interquartile_ms = stopwatch.interquartile_ms();
  result.ms_per_step = stopwatch.ms_per_step();
  result.fastest_ms = stopwatch.fastest_ms();
  result.tokens_per_step = subject.tokens_per_step();
  result.tokens_per_second = 1e3 * static_cast<double>(subject.tokens_per_step()) / result.ms_per_step;
  if (world.size() > 1) {
    result.exchanges = parallel::profile(exchanged, settings.steps, world.all());
    std::vector<double> of_rank(static_cast<std::size_t>(world.size()));
    world.all().all_gather(&exposed, of_rank.data(), sizeof exposed);
    result.exposed_ms = 1e3 * std::accumulate(of_rank.begin(), of_rank.end(), 0.0) / world.size();
    result.exposed_least_ms = 1e3 * *std::min_element(of_rank.begin(), of_rank.end());
  }
  result.row_bytes = subject.row_bytes();
  std::int64_t memory[] = {device::memory_use().device_peak_bytes - before, subject.state_bytes()};
  world.all().maximum(memory);
  result.peak_bytes = memory[0];
  result.state_bytes = memory[1];
  subject.count_work();
  result.phases = stopwatch.phases(machine, subject);
  return result;
}

void judge(BenchmarkResult& result, std::string_view baseline, double tolerance) {
  const auto found = std::find_if(result.cases.begin(), result.cases.end(),
                                  [&](const CaseResult& one) { return one.name == baseline; });
  const std::optional<CaseResult> reference =
      found == result.cases.end() ? std::nullopt : std::optional<CaseResult>(*found);
  const bool named = reference || std::any_of(result.not_measured.begin(), result.not_measured.end(),
                                              [&](const NotMeasured& one) { return one.name == baseline; });
  if (!named) return;
  result.baseline = baseline;
  result.tolerance = tolerance;
  for (CaseResult& one : result.cases) {
    if (!reference) {
      one.problem = fmt::format("\"{}\" could not be measured", baseline);
      continue;
    }
    one.compared = one.tokens_per_step == reference->tokens_per_step;
    if (!one.compared) continue;
    one.times_faster = reference->ms_per_step / one.ms_per_step;
    if (!one.loss || !reference->loss) continue;
    one.loss_difference = *one.loss / *reference->loss - 1;
    if (!(std::abs(*one.loss_difference) <= tolerance))  // NaN is no agreement
      one.problem = fmt::format("the loss is {:.5f}, that of \"{}\" {:.5f}: more than {:g} apart", *one.loss, baseline,
                                *reference->loss, tolerance);
  }
}

Json read_reference(const std::string& path) {
  constexpr std::int64_t kLargestFile = std::int64_t{64} << 20;
  const std::string text = storage::read_text(open_regular(path, ExitCode::usage), path, kLargestFile);
  const Json json = parse_json(text);
  if (json.is_discarded())
    throw error(ExitCode::usage, "--compare {}: cannot be read as JSON; give the benchmark.json of an earlier run",
                path);
  return json;
}

}  // namespace weft::bench
