// SPDX-License-Identifier: Apache-2.0
#include "language_model/benchmark/generation.hpp"

#include <fmt/format.h>

#include <optional>

#include "kernels/random.hpp"
#include "kernels/runtime.hpp"

namespace weft::language_model {
namespace {

TransformerSettings transformer_case(const Configuration& configuration, const GenerationSettings& generation) {
  TransformerSettings settings = transformer_settings(configuration, generation.architecture);
  settings.gradients = false;
  settings.rows = generation.most_rows();
  settings.memory.head_chunk = generation.rows;
  return settings;
}

class GenerationSubject final : public training::BenchmarkSubject {
 public:
  GenerationSubject(const Configuration& configuration, const BenchmarkSettings& settings,
                    const Architecture& architecture, const parallel::Grid& grid, const kernels::Execution& execution)
      : configuration_(configuration),
        grid_(grid),
        execution_{device::planned_backend(device_settings(configuration)), execution.stream,
                   device_settings(configuration).tf32},
        generation_(generation_case(configuration, settings, architecture, execution_.backend)) {
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
    arena_.emplace(execution_, grid_);
    model_.emplace(generation_.architecture, configuration_.optimizer.state, grid_.shape(), 0, execution_,
                   training::Moments::none);
    model_->initialise(static_cast<std::uint64_t>(configuration_.run.seed));
    model_->parameters().add_to(registry_);
    transformer_.emplace(*model_, transformer_case(configuration_, generation_), timers_, *arena_);
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
  void settle() override { kernels::fence(execution_); }
  report::Timers& timers() override { return timers_; }
  checkpoint::Registry& registry() override { return registry_; }
  const kernels::Execution& execution() const override { return execution_; }
  parallel::Exchanges exchanges() const override { return {}; }
  double step_exposed_seconds() const override { return 0; }
  void time_phases(bool one_by_one) override {
    generator_->record(!one_by_one);
    timers_.before_switch(one_by_one ? std::function<void()>([this] { kernels::fence(execution_); })
                                     : std::function<void()>());
  }
  std::int64_t tokens_per_step() const override { return generation_.rows * generation_.new_tokens; }
  double row_bytes() const override { return 0; }  // nothing is read
  std::int64_t state_bytes() const override { return model_->parameters().bytes().weights; }
  void count_work() override {}
  training::Work work_of(std::string_view phase) const override {
    return generation_work(phase, configuration_, generation_);
  }
  training::PhaseBytes phase_bytes() const override {
    training::PhaseBytes all;
    for (const char* phase : {"embedding", "norms", "products", "attention", "activation", "sampling"})
      all.emplace_back(phase, work_of(phase).bytes);
    return all;
  }
  /// Of the tokens that were written, under the model that wrote them.
  std::optional<double> loss() override { return -log_probability_ / static_cast<double>(tokens_per_step()); }

 private:
  const Configuration configuration_;
  const parallel::Grid& grid_;
  const kernels::Execution execution_;
  const GenerationSettings generation_;
  std::vector<std::uint32_t> ids_;
  std::vector<GenerationRequest> requests_;
  report::Timers timers_;
  checkpoint::Registry registry_;
  std::optional<training::StepArena> arena_;
  std::optional<Model> model_;
  std::optional<Transformer> transformer_;
  std::optional<Generator> generator_;
  double log_probability_ = 0;
};

}  // namespace

std::string generation_case_obstacle(const Configuration& configuration, const BenchmarkSettings& settings) {
  if (std::string why = generation_obstacle(configuration.language_model); !why.empty()) return why;
  if (settings.generate_prompt + settings.generate_tokens > configuration.data.sequence)
    return fmt::format("a prompt of {} and {} new tokens do not fit data.sequence = {}", settings.generate_prompt,
                       settings.generate_tokens, configuration.data.sequence);
  if (settings.generate_rows % settings.generate_samples != 0)
    return fmt::format("benchmark.generate_rows = {} is no multiple of generate_samples = {}", settings.generate_rows,
                       settings.generate_samples);
  return "";
}

GenerationSettings generation_case(const Configuration& configuration, const BenchmarkSettings& settings,
                                   const Architecture& architecture, kernels::Backend backend) {
  return {.architecture = architecture,
          .type = activation_type(configuration),
          .rows = settings.generate_rows,
          .prompts = settings.generate_rows / settings.generate_samples,
          .longest_prompt = settings.generate_prompt,
          .new_tokens = settings.generate_tokens,
          .prefill_rows = backend == kernels::Backend::cuda ? kDevicePrefillRows : 0,
          .graphs = configuration.device.graphs};
}

Plan generation_plan(const Configuration& configuration, const BenchmarkSettings& settings,
                     const Architecture& architecture) {
  const kernels::Backend backend = device::planned_backend(device_settings(configuration));
  const GenerationSettings generation = generation_case(configuration, settings, architecture, backend);
  const std::vector<training::ParameterSpec> specs = parameter_specs(architecture);
  const training::StateBytes state = training::largest_state_bytes(
      specs, single_process(), configuration.optimizer.state, backend, training::Moments::none);
  training::StepArena arena(backend);
  const Transformer::Buffers transformer(transformer_case(configuration, generation), arena);
  const Generator::Buffers generator(generation, arena);
  Plan plan;
  plan.architecture = architecture;
  plan.parameters = training::elements_of(specs);
  plan.device = {{"weights", state.weights},
                 {"conversion of weights", state.conversion},
                 {"rotary positions", 4 * rotary_elements(architecture)},
                 {"CUDA context and libraries", kernels::kCudaBuild ? kContextBytes : 0}};
  for (const training::StepArena::Bytes& bytes : arena.bytes()) {
    plan.device.emplace_back(bytes.purpose, bytes.device);
    plan.host.emplace_back(bytes.purpose, bytes.host);
  }
  return plan;
}

training::Work generation_work(std::string_view phase, const Configuration& configuration,
                               const GenerationSettings& generation) {
  const Architecture& a = generation.architecture;
  const auto number = [](std::int64_t value) { return static_cast<double>(value); };
  const double layers = number(a.model.layers), width = number(a.model.d_model), query = number(a.query_width()),
               key = number(a.key_width()), hidden = number(a.hidden_width()), mlp = number(a.model.d_mlp),
               vocabulary = number(a.vocabulary), rows = number(generation.rows), steps = number(generation.new_tokens),
               prefix = number(generation.longest_prompt - 1), prompts = number(generation.prompts);
  const double e = number(kernels::bytes_of(generation.type)),
               w = number(training::weight_bytes(configuration.optimizer.state, 1, 1));
  // Rows through the blocks: prompts once, then one row per sequence and step.
  const double through = prompts * prefix + rows * steps,
               passes = steps + (prefix > 0 ? 1 : 0);  // that read the weights, at least
  const double block = width * (query + 2 * key + query + hidden) + mlp * width, head = vocabulary * width;
  if (phase == "embedding") return {through * width * (w + e), 0};
  if (phase == "norms") return {through * e * width * 4 * (2 * layers + 1), 0};
  if (phase == "activation") return {through * e * (hidden + mlp) * layers, 0};
  if (phase == "products")
    return {(passes * layers * block + steps * head) * w +
                e * (through * layers * (4 * width + 2 * query + 2 * key + hidden + mlp) +
                     rows * steps * (width + vocabulary)),
            2 * (through * layers * block + rows * steps * head)};
  if (phase == "attention") {
    // Keys and values of all positions so far: prefix + 1, …, prefix + steps.
    const double positions = steps * prefix + steps * (steps + 1) / 2;
    return {layers * e * (rows * positions * 2 * key + through * (2 * query + 2 * key)),
            layers * 2 * query * (2 * rows * positions + prompts * prefix * prefix)};
  }
  if (phase == "sampling") return {rows * steps * vocabulary * e, 0};
  return {};
}

std::unique_ptr<training::BenchmarkSubject> generation_subject(const Configuration& configuration,
                                                               const BenchmarkSettings& settings,
                                                               const Architecture& architecture,
                                                               const parallel::Grid& grid,
                                                               const kernels::Execution& execution) {
  return std::make_unique<GenerationSubject>(configuration, settings, architecture, grid, execution);
}

}  // namespace weft::language_model
