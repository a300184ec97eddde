// SPDX-License-Identifier: Apache-2.0
#include "bench/language_model/language_subject.hpp"

#include <optional>

#include "base/format.hpp"
#include "bench/language_model/generation_subject.hpp"
#include "bench/language_model/harvest_subject.hpp"
#include "bench/language_model/language_input.hpp"
#include "bench/language_model/matrix_attention.hpp"
#include "bench/language_model/named_cases.hpp"
#include "bench/language_model/resident_tokens.hpp"
#include "kernels/gemm/fp8.hpp"
#include "language_model/run/memory_plan.hpp"
#include "language_model/run/pass_work.hpp"
#include "language_model/run/private_plan.hpp"
#include "language_model/step/language_trainer.hpp"
#include "run/usable_memory.hpp"

namespace weft::bench {
namespace {

/// The configuration of a case: with its attention and sequences of full length, without what a benchmark does not
/// allocate.
language_model::Configuration configuration_of(language_model::Configuration configuration,
                                               const LanguageSettings& settings) {
  if (settings.attention == BenchmarkAttention::matrix) configuration.attention = matrix_attention();
  configuration.parallel.overlap = settings.overlap;
  configuration.privacy.overlap = settings.private_overlap;
  configuration.data.sequence_start = 0;
  configuration.checkpoint.staging = checkpoint::Staging::chunked;
  return configuration;
}

language_model::Architecture architecture_of(const language_model::Configuration& configuration,
                                             const LanguageSettings& settings) {
  return {.model = configuration.language_model,
          .vocabulary = settings.vocabulary,
          .positions = configuration.data.sequence,
          .lora = configuration.lora};
}

ResidentTokens batches(const language_model::Configuration& configuration, const LanguageSettings& settings) {
  const std::int64_t length = configuration.data.sequence, sequences = configuration.data.batch_tokens / length;
  if (!settings.data.empty()) return {settings.batches, sequences, length, dataset::TokenSet::open(settings.data)};
  return {settings.batches,    sequences,     length,
          settings.vocabulary, settings.zipf, static_cast<std::uint64_t>(configuration.run.seed)};
}

class LanguageSubject final : public BenchmarkSubject {
 public:
  LanguageSubject(const language_model::Configuration& configuration, const LanguageSettings& settings,
                  const parallel::Grid& grid, const kernels::Execution& execution)
      : configuration_(configuration_of(configuration, settings)),
        architecture_(architecture_of(configuration, settings)),
        grid_(grid),
        execution_{device::planned_backend(language_model::device_settings(configuration)), execution.stream,
                   language_model::device_settings(configuration).tf32},
        tokens_(batches(configuration, settings)) {}

  void build() override {
    trainer_.emplace(
        language_model::with_clipping_mode(configuration_, architecture_, grid_.shape(), execution_.backend),
        architecture_, grid_, execution_);
    trainer_->timers().split(language_model::phases_of_both_passes());
    trainer_->initialise();
    trainer_->set_noise({.key = {}, .multiplier = 1, .expected = static_cast<double>(sequences())});
  }
  void step() override {
    const std::int64_t first = trainer_->first_sequence();
    if (configuration_.privacy.enabled) {
      // Every step has as many examples as a private step has on average.
      const parallel::Communicator& ranks = grid_.axis(parallel::kDataAxis);
      return trainer_->private_step(
          parallel::part(sequences(), ranks.size(), ranks.rank()).size(),
          [&](std::int64_t at, dataset::TokenBatch& batch) { tokens_.fill(batch, first + at); });
    }
    dataset::TokenBatch batch = trainer_->next_batch();
    tokens_.fill(batch, first);
    trainer_->step(batch);
  }
  void wait() override { trainer_->wait(); }
  run::Timers& timers() override { return trainer_->timers(); }
  checkpoint::Registry& registry() override { return trainer_->registry(); }
  const kernels::Execution& execution() const override { return execution_; }
  parallel::Exchanges exchanges() const override { return trainer_->exchanges(); }
  double step_exposed_seconds() const override { return trainer_->step_exposed_seconds(); }
  void time_phases(bool one_by_one) override { trainer_->time_phases(one_by_one); }
  std::int64_t tokens_per_step() const override { return configuration_.data.batch_tokens; }
  double row_bytes() const override { return architecture_.vocabulary <= 1 << 16 ? 2 : 4; }  // an id in a token file
  std::int64_t state_bytes() const override {
    const model::StateBytes& bytes = trainer_->model().parameters().bytes();
    return bytes.weights + bytes.moments + bytes.host;
  }
  run::Work work_of(std::string_view phase) const override {
    return language_model::work_of(phase, configuration_, architecture_);
  }
  run::PhaseBytes phase_bytes() const override {
    return language_model::phase_bytes(configuration_, architecture_, true);
  }
  std::optional<double> loss() override {
    if (configuration_.privacy.enabled) return std::nullopt;
    return trainer_->metrics().loss;
  }
  ModelFlops flops_per_token() const override { return model_flops(architecture_, configuration_.data.sequence); }

 private:
  std::int64_t sequences() const { return configuration_.data.batch_tokens / configuration_.data.sequence; }

  const language_model::Configuration configuration_;
  const language_model::Architecture architecture_;
  const parallel::Grid& grid_;
  const kernels::Execution execution_;
  ResidentTokens tokens_;
  std::optional<language_model::Trainer> trainer_;
};

/// Why a case cannot be measured whatever the machine; "" if it can.
std::string obstacle_anywhere(const language_model::Configuration& configuration, const LanguageSettings& settings) {
  if (settings.generate_tokens > 0 && settings.harvest != BenchmarkHarvest::off)
    return "benchmark.generate_tokens and benchmark.harvest exclude each other";
  if (!settings.data.empty() && (settings.generate_tokens > 0 || settings.harvest != BenchmarkHarvest::off))
    return "benchmark.data has no effect on generation and harvest, which take random ids";
  if (settings.generate_tokens > 0) return generation_case_obstacle(configuration, settings);
  if (settings.attention == BenchmarkAttention::flash || configuration.language_model.attention_dropout == 0) return "";
  return "benchmark.attention = \"matrix\" has no language_model.attention_dropout";
}

/// Optimisations one by one and together are compared with a baseline without any. A row counts if the baseline was
/// measured and has the same loss after as many steps.
class LanguageBenchmark final : public BenchmarkModel {
 public:
  input::Schema keys() override { return language_keys(input_); }
  const BenchmarkSettings& settings() const override { return input_.benchmark; }
  const run::RunSettings& run() const override { return input_.configuration.run; }
  device::Settings device() const override { return device_settings(input_.configuration); }
  void use_ranks(const parallel::World& world) override {
    if (input_.configuration.parallel.plan == parallel::Division::automatic)
      throw collective_error(ExitCode::usage,
                             "weft benchmark with parallel.plan = \"auto\" (it measures one division); give "
                             "parallel.tensor and parallel.shard, as weft lm train --dry-run lists them");
    language_model::use_ranks(input_.configuration, world.size());
  }
  parallel::GridShape grid(const parallel::World&) const override { return grid_shape(input_.configuration); }
  void check(const parallel::World& world) const override {
    const std::int64_t length = input_.configuration.data.sequence;
    const LanguageSettings& settings = input_.benchmark;
    if (settings.data.empty()) return;
    const dataset::TokenSet set = dataset::open_tokens(world, settings.data);
    if (set.size() <= length)
      throw collective_error(
          ExitCode::usage,
          "benchmark.data = \"{}\": has {} ids, a sequence of data.sequence = {} tokens needs {}; take "
          "shorter sequences",
          settings.data, set.size(), length, length + 1);
    if (set.vocabulary() > settings.vocabulary)
      throw collective_error(ExitCode::usage,
                             "benchmark.data = \"{}\": its ids are below {} (benchmark.vocabulary is {}); set "
                             "benchmark.vocabulary = {}",
                             settings.data, set.vocabulary(), settings.vocabulary, set.vocabulary());
  }
  double measure_product(const parallel::Grid& grid, const kernels::Execution& execution) const override {
    const language_model::ModelSettings& model = input_.configuration.language_model;
    return run::measure_product(execution, input_.configuration.micro_tokens(), model.d_mlp, model.d_model,
                                grid.world());
  }
  void resolve(BenchmarkCase& one) const override {
    bench::resolve(input_.configuration, input_.benchmark.batch_tokens, one);
  }
  std::string obstacle(const parallel::World& world, bool dry) const override {
    const language_model::Configuration& configuration = input_.configuration;
    if (std::string reason = obstacle_anywhere(configuration, input_.benchmark); !reason.empty()) return reason;
    if (!dry && configuration.fp8) {
      const kernels::Backend backend = device::planned_backend(device_settings(configuration));
      if (std::string reason = kernels::coded_obstacle(backend); !reason.empty()) return reason;
    }
    const language_model::Plan needed = memory();
    const auto check = [](std::int64_t bytes, std::int64_t available, const std::string& memory) -> std::string {
      if (available == 0 || bytes <= available) return "";
      return fmt::format("it needs {} of {}, {} are available", format::binary_bytes_text(bytes), memory,
                         format::binary_bytes_text(available));
    };
    const run::HostShare host = run::usable_host_memory(world);
    const std::int64_t on_device =
        dry ? static_cast<std::int64_t>(configuration.device.memory * 1e9)
            : run::usable_device_bytes(configuration.device, language_model::kContextBytes, world);
    const std::string refused = check(needed.device_total(), on_device, "device memory");
    if (!refused.empty()) return refused;
    return check(needed.host_total() + (kernels::kCudaBuild ? 0 : needed.device_total()), host.bytes,
                 fmt::format("host memory ({})", host.limit));
  }
  std::string plan() const override {
    const language_model::Plan needed = memory();
    return fmt::format("{} parameters, {} where the kernels run, {} on the host", format::grouped(needed.parameters),
                       format::binary_bytes_text(needed.device_total()),
                       format::binary_bytes_text(needed.host_total()));
  }
  std::unique_ptr<BenchmarkSubject> subject(const parallel::Grid& grid, const device::Runtime& runtime,
                                            const parallel::World&) const override {
    const auto& [configuration, settings] = input_;
    const kernels::Execution& execution = runtime.execution();
    if (settings.generate_tokens > 0)
      return generation_subject(configuration, settings, architecture_of(configuration, settings), grid, execution);
    if (settings.harvest != BenchmarkHarvest::off)
      return harvest_subject(configuration, settings, architecture_of(configuration, settings), grid, execution);
    return std::make_unique<LanguageSubject>(configuration, settings, grid, execution);
  }
  void take_checkpoint_case() override { input_.benchmark.batches = 1; }
  void judge(BenchmarkResult& result) const override {
    result.peak_tflops = input_.benchmark.peak_tflops;
    bench::judge(result, kBaseline, input_.benchmark.loss_tolerance);
  }

 private:
  language_model::Plan memory() const {
    const auto& [configuration, settings] = input_;
    if (settings.generate_tokens > 0)
      return generation_plan(configuration, settings, architecture_of(configuration, settings));
    if (settings.harvest != BenchmarkHarvest::off)
      return harvest_plan(configuration, settings, architecture_of(configuration, settings));
    return language_model::plan(configuration_of(configuration, settings), architecture_of(configuration, settings), 0);
  }

  LanguageInput input_;
};

}  // namespace

ModelFlops model_flops(const language_model::Architecture& architecture, std::int64_t length) {
  const double causal = language_model::flops_per_token(architecture, length);
  const double attention =
      6.0 * static_cast<double>(architecture.model.layers) * static_cast<double>(length * architecture.query_width());
  return {.causal = causal, .full = causal + attention};
}

std::unique_ptr<BenchmarkModel> language_benchmark() { return std::make_unique<LanguageBenchmark>(); }

}  // namespace weft::bench
