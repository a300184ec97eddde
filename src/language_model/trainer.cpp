// SPDX-License-Identifier: Apache-2.0
#include "language_model/trainer.hpp"

#include <algorithm>
#include <span>
#include <vector>

#include "kernels/optimize/adam.hpp"
#include "kernels/optimize/loss_scale.hpp"
#include "kernels/runtime.hpp"
#include "optimizer/schedule.hpp"

namespace weft::language_model {
namespace {

/// Largest loss that counts as finite.
constexpr float kLargestLoss = 1e30f;

training::StateStream::Buffers state_buffers(const Configuration& configuration,
                                             std::span<const training::ParameterSpec> specs,
                                             training::StepArena& arena) {
  training::StateStream::Buffers buffers;
  arena.purpose("optimizer state in transit");
  if (configuration.memory.offload_optimizer)
    buffers = training::StateStream::Buffers(specs, configuration.optimizer.state, arena);
  arena.purpose("workspaces");
  return buffers;
}

}  // namespace

Trainer::Buffers::Buffers(const Configuration& configuration, training::StepArena& arena) {
  arena.purpose("tokens");
  losses = arena.take<float>(configuration.data.batch_tokens);
  flags = arena.take<kernels::StepFlags>(1);
  const bool scaled = configuration.precision == Precision::fp16;
  loss_scale = arena.take<kernels::LossScale>(scaled ? 1 : 0);
  loss_factor = arena.take<float>(scaled ? 1 : 0);
  runner = training::StepRunner::Buffers(arena);
  tuning = training::LearningRateTuning::Buffers(configuration.optimizer, configuration.data.batch_tokens, arena);
}

training::StepArena measure_step(const Configuration& configuration, const Architecture& architecture,
                                 const parallel::GridShape& grid, kernels::Backend backend) {
  training::StepArena arena(backend);
  const std::vector<training::ParameterSpec> specs = parameter_specs(architecture);
  const Staging::Buffers staging(configuration.data.batch_tokens, configuration.data.document_mask, arena);
  const Transformer::Buffers transformer(transformer_settings(configuration, architecture), arena);
  const Trainer::Buffers trainer(configuration, arena);
  const training::ParameterUpdate::Buffers update(training::AccumulatingSink::elements(specs, grid, 0), arena,
                                                  state_buffers(configuration, specs, arena));
  arena.purpose("gradients");
  arena.count(training::StepArena::Where::device,
              training::AccumulatingSink::bytes(specs, grid, 0, configuration.micro_tokens()));
  return arena;
}

Trainer::Trainer(const Configuration& configuration, const Architecture& architecture, const parallel::Grid& grid,
                 const kernels::Execution& execution)
    : configuration_(configuration),
      execution_(execution),
      arena_(execution, grid),
      model_(architecture, configuration.optimizer.state, grid.shape(), grid.world().rank(), execution,
             configuration.moments()),
      staging_(configuration.data.batch_tokens, configuration.data.document_mask, execution, arena_),
      transformer_(model_, transformer_settings(configuration, architecture), timers_, arena_),
      sink_(model_.parameters(), execution, configuration.micro_tokens()),
      buffers_(configuration, arena_),
      update_(model_.parameters(), sink_, configuration.optimizer, execution,
              training::ParameterUpdate::Buffers(
                  training::AccumulatingSink::elements(model_.parameters().specs(), grid.shape(), grid.world().rank()),
                  arena_, state_buffers(configuration, model_.parameters().specs(), arena_))),
      runner_(runner_settings(), execution, timers_, buffers_.runner,
              [] { return training::StepRunner::ExchangeGroups{}; }),
      tuning_(configuration.optimizer, execution, buffers_.tuning) {
  model_.parameters().add_to(registry_);
  registry_.add({.name = "run/skipped_steps",
                 .type = kernels::Scalar::i64,
                 .shape = {1},
                 .held = {0, 1},
                 .owned = {0, grid.world().rank() == 0 ? 1 : 0},
                 .data = runner_.skipped(),
                 .on_device = true});
  tuning_.add_to(registry_, grid.world().rank());
  // device.precision may change when a run is resumed.
  registry_.make_optional("optimizer/loss_scale");
  if (buffers_.loss_scale.size > 0)
    registry_.add({.name = "optimizer/loss_scale",
                   .type = kernels::Scalar::fp64,
                   .shape = {kernels::kLossScaleNumbers},
                   .held = {0, kernels::kLossScaleNumbers},
                   .owned = {0, grid.world().rank() == 0 ? kernels::kLossScaleNumbers : 0},
                   .data = buffers_.loss_scale.data,
                   .on_device = true});
  reset_loss_scale();
}

void Trainer::initialise() {
  model_.initialise(static_cast<std::uint64_t>(configuration_.run.seed));
  tuning_.initialise();
  reset_loss_scale();
}

void Trainer::reset_loss_scale() {
  if (buffers_.loss_scale.size == 0) return;
  const kernels::LossScale first;
  device::copy(execution_, buffers_.loss_scale.data, &first, sizeof first, device::Direction::to_device);
  kernels::fence(execution_);
}

training::StepRunner::Settings Trainer::runner_settings() const {
  return {.record = configuration_.device.graphs,
          .runs_ahead = true,
          .skip = configuration_.run.nonfinite == training::NonFinite::skip,
          .skip_at_most = configuration_.run.skip_at_most};
}

dataset::TokenBatch Trainer::next_batch() {
  const std::int64_t length = configuration_.data.length_at(steps_done() + 1);
  return staging_.next(configuration_.data.batch_tokens / length, length);
}

kernels::AdamStep Trainer::constants() const {
  return optimizer::adam_step(configuration_.optimizer, steps_done() + 1, configuration_.run.steps,
                              static_cast<std::uint64_t>(configuration_.run.seed));
}

void Trainer::step(const dataset::TokenBatch& batch) { step(batch, constants()); }

void Trainer::step_at_rate(const dataset::TokenBatch& batch, double learning_rate) {
  kernels::AdamStep constants = this->constants();
  constants.learning_rate = static_cast<float>(learning_rate);
  step(batch, constants);
}

void Trainer::step(const dataset::TokenBatch& batch, const kernels::AdamStep& constants) {
  timers_.phase("tokens");
  counted_ = std::max<std::int64_t>(1, batch.counted);
  if (batch.length != length_) runner_.change();
  length_ = batch.length;
  runner_.begin(constants);
  staging_.send(batch);
  runner_.run([this] { compute(); });
  timers_.phase("waiting for the device");
  runner_.end([step = steps_done() + 1] { return fmt::format("batch of step {}", step); });
  timers_.stop();
}

/// The step: everything between the tokens of a batch and the updated parameters.
void Trainer::compute() {
  const std::int64_t length = length_, sequences = configuration_.data.batch_tokens / length,
                     micro = configuration_.micro_tokens() / length;
  timers_.phase("weight gradients");
  sink_.clear();
  device::zero(execution_, buffers_.flags);
  kernels::LossScale* const scale = buffers_.loss_scale.size > 0 ? buffers_.loss_scale.data : nullptr;
  const float* factor = staging_.scale();
  if (scale != nullptr) {
    device::copy(execution_, buffers_.loss_factor.data, factor, sizeof *factor, device::Direction::on_device);
    kernels::scale_loss(execution_, scale, buffers_.loss_factor.data);
    factor = buffers_.loss_factor.data;
  }
  for (std::int64_t first = 0; first < sequences; first += micro) {
    const Tokens tokens = staging_.tokens(first, std::min(micro, sequences - first), length);
    transformer_.forward(tokens, runner_.constants());
    transformer_.losses_and_gradient(tokens, factor, {buffers_.losses.data + first * length, tokens.rows()}, sink_);
    transformer_.backward(tokens, runner_.constants(), sink_);
  }
  timers_.phase("check");
  kernels::StepFlags* const flags = buffers_.flags.data;
  kernels::flag_beyond(execution_, {buffers_.losses.data, kernels::Scalar::fp32, sequences, length, length},
                       kLargestLoss, &flags->not_finite);
  update_.form_norm(flags);
  runner_.guard(flags, scale);
  timers_.phase("update");
  tuning_.apply(buffers_.losses, staging_.scale(), runner_.constants());
  update_.apply(runner_.constants(), scale);
  if (scale != nullptr) kernels::update_loss_scale(execution_, flags, scale);
}

Trainer::Metrics Trainer::metrics() {
  runner_.settle();
  std::vector<float> losses(static_cast<std::size_t>(buffers_.losses.size));
  device::copy(execution_, losses.data(), buffers_.losses.data, buffers_.losses.size * 4, device::Direction::to_host);
  kernels::fence(execution_);
  double sum = 0;
  for (const float loss : losses) sum += static_cast<double>(loss);
  return {.loss = sum / static_cast<double>(counted_),
          .learning_rate = static_cast<double>(device::read(execution_, runner_.constants()).learning_rate),
          .gradient_norm = device::read(execution_, update_.norm()),
          .skipped_steps = device::read(execution_, runner_.skipped()),
          .loss_scale = buffers_.loss_scale.size > 0 ? device::read(execution_, buffers_.loss_scale.data).scale : 0};
}

void Trainer::time_phases(bool one_by_one) {
  runner_.record(!one_by_one);
  timers_.before_switch(one_by_one ? std::function<void()>([this] { kernels::fence(execution_); })
                                   : std::function<void()>());
}

}  // namespace weft::language_model
