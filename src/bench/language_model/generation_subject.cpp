// SPDX-License-Identifier: Apache-2.0
#include "bench/language_model/generation_subject.hpp"

#include <fmt/format.h>

#include <optional>

#include "bench/language_model/forward_subject.hpp"
#include "kernels/random.hpp"
#include "language_model/run/pass_work.hpp"

namespace weft::bench {
namespace {

language_model::TransformerSettings transformer_case(const language_model::Configuration& configuration,
                                                     const language_model::GenerationSettings& generation) {
  language_model::TransformerSettings settings =
      language_model::transformer_settings(configuration, generation.architecture);  // of the part of a rank
  settings.gradients = false;
  settings.rows = generation.most_rows();
  settings.memory.head_chunk = generation.rows;
  return settings;
}

class GenerationSubject final : public ForwardSubject {
 public:
  GenerationSubject(const language_model::Configuration& configuration, const LanguageSettings& settings,
                    const language_model::Architecture& architecture, const parallel::Grid& grid,
                    const kernels::Execution& execution)
      : ForwardSubject(configuration, architecture, grid, execution),
        generation_(generation_case(configuration, settings,
                                    language_model::part_of(architecture, grid.shape(), grid.world().rank()),
                                    execution_.backend)) {
    for (std::int64_t i = 0; i < generation_.prompts * generation_.longest_prompt; ++i)
      ids_.push_back(static_cast<std::uint32_t>(
          kernels::uniform_below(kernels::philox(static_cast<std::uint64_t>(configuration.run.seed),
                                                 kernels::Purpose::benchmark, 0, static_cast<std::uint64_t>(i)),
                                 static_cast<std::uint64_t>(architecture.vocabulary))));
    const auto length = static_cast<std::size_t>(generation_.longest_prompt);
    for (std::int64_t row = 0; row < generation_.rows; ++row) {
      const std::int64_t prompt = row / settings.generate_samples;
      requests_.push_back({.prompt = std::span(ids_).subspan(static_cast<std::size_t>(prompt) * length, length),
                           .number = static_cast<std::uint32_t>(prompt),
                           .sample = static_cast<std::uint32_t>(row % settings.generate_samples)});
    }
  }

  void build() override {
    build_model(transformer_case(configuration_, generation_), generation_.gathered_bytes());
    generator_.emplace(generation_, *transformer_, execution_, timers_, *arena_);
  }
  void step() override {
    log_probability_ = 0;
    generator_->run(requests_, static_cast<std::uint64_t>(configuration_.run.seed), 0,
                    [this](std::size_t, const kernels::Drawn& drawn) {
                      log_probability_ += static_cast<double>(drawn.log_probability);
                      return true;
                    });
  }
  void time_phases(bool one_by_one) override {
    generator_->capture(!one_by_one);
    ForwardSubject::time_phases(one_by_one);
  }
  std::int64_t tokens_per_step() const override { return generation_.rows * generation_.new_tokens; }
  run::Work work_of(std::string_view phase) const override {
    return language_model::generation_work(phase, configuration_, generation_);
  }
  run::PhaseBytes phase_bytes() const override {
    run::PhaseBytes all;
    for (const char* phase : {"embedding", "norms", "products", "attention", "activation", "sampling"})
      all.emplace_back(phase, work_of(phase).bytes);
    return all;
  }
  /// Mean negative log probability of the generated tokens under the model that generated them.
  std::optional<double> loss() override { return -log_probability_ / static_cast<double>(tokens_per_step()); }

 private:
  const language_model::GenerationSettings generation_;
  std::vector<std::uint32_t> ids_;
  std::vector<language_model::GenerationRequest> requests_;
  std::optional<language_model::Generator> generator_;
  double log_probability_ = 0;
};

}  // namespace

std::string generation_case_obstacle(const language_model::Configuration& configuration,
                                     const LanguageSettings& settings) {
  if (std::string why = language_model::generation_obstacle(configuration.language_model, configuration.data.sequence);
      !why.empty())
    return why;
  if (settings.generate_prompt + settings.generate_tokens > configuration.data.sequence)
    return fmt::format("a prompt of {} and {} new tokens do not fit data.sequence = {}", settings.generate_prompt,
                       settings.generate_tokens, configuration.data.sequence);
  if (settings.generate_rows % settings.generate_samples != 0)
    return fmt::format("benchmark.generate_rows = {} is no multiple of generate_samples = {}", settings.generate_rows,
                       settings.generate_samples);
  return "";
}

language_model::GenerationSettings generation_case(const language_model::Configuration& configuration,
                                                   const LanguageSettings& settings,
                                                   const language_model::Architecture& architecture,
                                                   kernels::Backend backend) {
  return {.architecture = architecture,
          .type = language_model::activation_type(configuration),
          .rows = settings.generate_rows,
          .prompts = settings.generate_rows / settings.generate_samples,
          .longest_prompt = settings.generate_prompt,
          .new_tokens = settings.generate_tokens,
          .prefill_rows = backend == kernels::Backend::cuda ? language_model::kDevicePrefillRows : 0,
          .graphs = configuration.device.graphs};
}

language_model::Plan generation_plan(const language_model::Configuration& configuration,
                                     const LanguageSettings& settings,
                                     const language_model::Architecture& architecture) {
  const kernels::Backend backend = device::planned_backend(language_model::device_settings(configuration));
  const parallel::GridShape grid = language_model::one_copy(configuration.parallel.tensor);
  const language_model::GenerationSettings generation =
      generation_case(configuration, settings, language_model::part_of(architecture, grid, grid.ranks() - 1), backend);
  return language_model::forward_plan(configuration, architecture, transformer_case(configuration, generation),
                                      &generation);
}

std::unique_ptr<BenchmarkSubject> generation_subject(const language_model::Configuration& configuration,
                                                     const LanguageSettings& settings,
                                                     const language_model::Architecture& architecture,
                                                     const parallel::Grid& grid, const kernels::Execution& execution) {
  return std::make_unique<GenerationSubject>(configuration, settings, architecture, grid, execution);
}

}  // namespace weft::bench
