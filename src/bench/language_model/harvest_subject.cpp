// SPDX-License-Identifier: Apache-2.0
#include "bench/language_model/harvest_subject.hpp"

#include <array>
#include <cstddef>
#include <numeric>
#include <optional>
#include <span>

#include "bench/language_model/forward_subject.hpp"
#include "bench/language_model/generation_subject.hpp"
#include "kernels/random.hpp"
#include "language_model/run/pass_work.hpp"
#include "language_model/step/mlp_recorder.hpp"

namespace weft::bench {
namespace {

/// Rows of a forward pass: whole sequences.
std::int64_t rows_together(const language_model::Configuration& configuration) {
  return std::min(configuration.micro_tokens(), configuration.data.batch_tokens);
}

language_model::TextStream random_text(const language_model::Configuration& configuration,
                                       const language_model::Architecture& architecture) {
  std::vector<std::uint32_t> ids(static_cast<std::size_t>(configuration.data.batch_tokens));
  for (std::size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<std::uint32_t>(kernels::uniform_below(
        kernels::philox(static_cast<std::uint64_t>(configuration.run.seed), kernels::Purpose::benchmark, 0, i),
        static_cast<std::uint64_t>(architecture.vocabulary)));
  return language_model::TextStream({dataset::TokenSet("random ids", std::move(ids), architecture.vocabulary, 0)});
}

/// The forward passes of a harvest as a generation without new tokens: every id but one more passes the blocks.
language_model::GenerationSettings forward_passes(const language_model::Configuration& configuration,
                                                  const language_model::Architecture& architecture) {
  const std::int64_t sequences = configuration.data.batch_tokens / configuration.data.sequence;
  return {.architecture = architecture,
          .type = language_model::activation_type(configuration),
          .rows = sequences,
          .prompts = sequences,
          .longest_prompt = configuration.data.sequence + 1,
          .new_tokens = 0};
}

class HarvestSubject final : public ForwardSubject {
 public:
  HarvestSubject(const language_model::Configuration& configuration, const LanguageSettings& settings,
                 const language_model::Architecture& architecture, const parallel::Grid& grid,
                 const kernels::Execution& execution)
      : ForwardSubject(configuration, architecture, grid, execution),
        to_host_(settings.harvest == BenchmarkHarvest::host),
        text_(random_text(configuration, architecture)) {}

  void build() override {
    const std::int64_t rows = rows_together(configuration_);
    build_model(
        language_model::forward_settings(configuration_, architecture_, rows, grid_.shape(), grid_.world().rank()));
    staging_.emplace(rows, configuration_.data.document_mask, execution_, *arena_);
    transformer_->prepare_weights();
    recorder_.emplace(rows, language_model::activation_type(configuration_), configuration_.language_model,
                      *transformer_, *staging_, execution_);
    if (!to_host_) return;
    for (auto& side : host_) side = device::HostBuffer<std::byte>(2 * rows * recorder_->row_bytes());
  }
  void step() override {
    const std::int64_t length = configuration_.data.sequence, windows = configuration_.data.batch_tokens / length,
                       together = rows_together(configuration_) / length;
    for (std::int64_t first = 0; first < windows; first += together) {
      const std::int64_t count = std::min(together, windows - first);
      recorder_->record(text_, length, first, count);
      // Two batches in turn: one is copied while the next one is computed.
      const std::int64_t at = (first / together) % 2 * together * length * recorder_->row_bytes();
      if (to_host_) recorder_->copy(0, recorder_->rows(), host_[0].data() + at, host_[1].data() + at);
      if (to_host_ && first > 0) recorder_->finish_before_last();
    }
    if (to_host_) recorder_->finish();
    wait();
  }
  std::int64_t tokens_per_step() const override { return configuration_.data.batch_tokens; }
  run::Work work_of(std::string_view phase) const override {
    return language_model::generation_work(
        phase, configuration_,
        forward_passes(configuration_, language_model::part_of(architecture_, grid_.shape(), grid_.world().rank())));
  }
  run::PhaseBytes phase_bytes() const override {
    run::PhaseBytes all;
    for (const char* phase : {"embedding", "norms", "products", "attention", "activation"})
      all.emplace_back(phase, work_of(phase).bytes);
    return all;
  }
  /// There is no loss to compare: the mean byte of the inputs that were collected last, equal in all cases.
  std::optional<double> loss() override {
    device::HostBuffer<std::byte> rows(recorder_->rows() * recorder_->row_bytes());
    recorder_->copy(0, recorder_->rows(), rows.data(), nullptr);
    recorder_->finish();
    const std::span<const std::byte> bytes(rows.data(), static_cast<std::size_t>(rows.bytes()));
    return std::accumulate(bytes.begin(), bytes.end(), 0.0,
                           [](double sum, std::byte one) { return sum + std::to_integer<int>(one); }) /
           static_cast<double>(bytes.size());
  }

 private:
  const bool to_host_;
  const language_model::TextStream text_;
  std::optional<language_model::Staging> staging_;
  std::array<device::HostBuffer<std::byte>, 2> host_;  // inputs, targets: [2 batches, rows, layers * d_model]
  std::optional<language_model::MlpRecorder> recorder_;
};

}  // namespace

language_model::Plan harvest_plan(const language_model::Configuration& configuration, const LanguageSettings& settings,
                                  const language_model::Architecture& architecture) {
  const std::int64_t rows = rows_together(configuration),
                     recorded = language_model::MlpRecorder::bytes(rows, language_model::activation_type(configuration),
                                                                   configuration.language_model);
  language_model::Plan plan;
  plan.architecture = architecture;
  plan.parameters = model::elements_of(language_model::parameter_specs(architecture));
  plan.device = {{"model", language_model::forward_bytes(configuration, architecture, rows)},
                 {"recorded rows", recorded},
                 {"CUDA context and libraries", kernels::kCudaBuild ? language_model::kContextBytes : 0}};
  if (settings.harvest == BenchmarkHarvest::host) plan.host.emplace_back("recorded rows", recorded);
  return plan;
}

std::unique_ptr<BenchmarkSubject> harvest_subject(const language_model::Configuration& configuration,
                                                  const LanguageSettings& settings,
                                                  const language_model::Architecture& architecture,
                                                  const parallel::Grid& grid, const kernels::Execution& execution) {
  return std::make_unique<HarvestSubject>(configuration, settings, architecture, grid, execution);
}

}  // namespace weft::bench
