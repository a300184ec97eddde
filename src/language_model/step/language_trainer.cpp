// SPDX-License-Identifier: Apache-2.0
#include "language_model/step/language_trainer.hpp"

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/optimize/loss_scale.hpp"
#include "language_model/step/clipping_shape.hpp"
#include "optimizer/schedule.hpp"

namespace weft::language_model {
namespace {

/// Largest loss that counts as finite.
constexpr float kLargestLoss = 1e30f;

model::StateStream::Buffers state_buffers(const Configuration& configuration,
                                          std::span<const model::ParameterSpec> specs, model::StepArena& arena) {
  model::StateStream::Buffers buffers;
  arena.purpose("optimizer state in transit");
  if (configuration.memory.offload_optimizer)
    buffers = model::StateStream::Buffers(specs, configuration.optimizer.state, arena);
  arena.purpose("workspaces");
  return buffers;
}

std::optional<model::TensorAxis> tensor_axis(const Configuration& configuration, const Architecture& architecture,
                                             const parallel::Grid& grid, const kernels::Execution& execution,
                                             model::StepArena& arena) {
  if (grid.size(parallel::kTensorAxis) == 1) return std::nullopt;
  return std::optional<model::TensorAxis>(std::in_place, grid, execution,
                                          Trainer::tensor_buffers(configuration, architecture, grid.shape(), arena),
                                          configuration.parallel.overlap);
}

}  // namespace

Trainer::Buffers::Buffers(const Configuration& configuration, const Architecture& part, model::StepArena& arena) {
  arena.purpose("tokens");
  losses = arena.take<float>(configuration.data.batch_tokens);
  flags = arena.take<kernels::StepFlags>(1);
  const bool scaled = configuration.precision == Precision::fp16;
  loss_scale = arena.take<kernels::LossScale>(scaled ? 1 : 0);
  loss_factor = arena.take<float>(scaled ? 1 : 0);
  runner = model::StepRunner::Buffers(arena);
  tuning = model::LearningRateTuning::Buffers(configuration.optimizer, configuration.data.batch_tokens, arena);
  if (configuration.privacy.enabled)
    clipping = privacy::ClippingBuffers(configuration.privacy, parameter_specs(part),
                                        clipping_shape(configuration, part), arena);
}

model::TensorAxis::Buffers Trainer::tensor_buffers(const Configuration& configuration, const Architecture& architecture,
                                                   const parallel::GridShape& grid, model::StepArena& arena) {
  const std::int64_t last = grid.ranks() - 1;
  std::int64_t gathered = 4 * model::AccumulatingSink::partial_elements(parameter_specs(architecture), grid, last);
  if (configuration.privacy.enabled) {
    const Architecture part = part_of(architecture, grid, last);
    gathered = std::max(gathered, privacy::gathered_bytes(configuration.privacy, parameter_specs(part),
                                                          clipping_shape(configuration, part)));
  }
  return language_model::tensor_buffers(transformer_settings(configuration, architecture, grid, last), grid, arena,
                                        gathered);
}

model::GatheredWeights gathered_weights(const Configuration& configuration) {
  return configuration.precision == Precision::fp16 ? model::GatheredWeights::all : model::GatheredWeights::upper_plane;
}

model::KeptGradients kept_gradients(const Configuration& configuration) {
  return configuration.shard() == parallel::Shard::state ? model::KeptGradients::of_held_rows
                                                         : model::KeptGradients::of_owned_rows;
}

model::StoredWeights stored_weights(const Configuration& configuration) {
  return configuration.shard() == parallel::Shard::full ? model::StoredWeights::of_owned_rows
                                                        : model::StoredWeights::of_held_rows;
}

/// Bytes that are gathered at a time: the losses of all tokens of a step, fp32, or a matrix.
std::int64_t gathered_bytes(const Configuration& configuration, const model::WeightSlots& slots) {
  return std::max(4 * configuration.data.batch_tokens, slots.largest());
}

model::WeightSlots weight_slots(const Configuration& configuration, std::span<const model::ParameterSpec> specs,
                                const parallel::GridShape& grid, std::int64_t rank, model::StepArena& arena) {
  if (stored_weights(configuration) == model::StoredWeights::of_held_rows) return {};
  return {specs,
          grid,
          rank,
          configuration.optimizer.state,
          gathered_weights(configuration),
          configuration.parallel.gathered_blocks,
          arena};
}

/// Settings of the model that is trained.
TransformerSettings trained_settings(const Configuration& configuration, const Architecture& architecture,
                                     const parallel::GridShape& grid, std::int64_t rank) {
  TransformerSettings settings = transformer_settings(configuration, architecture, grid, rank);
  settings.gathers_weights = stored_weights(configuration) == model::StoredWeights::of_owned_rows;
  return settings;
}

model::StepArena measure_step(const Configuration& configuration, const Architecture& architecture,
                              const parallel::GridShape& grid, kernels::Backend backend) {
  model::StepArena arena(backend);
  const std::vector<model::ParameterSpec> specs = parameter_specs(architecture);
  const Staging::Buffers staging(configuration.rank_tokens(), configuration.data.document_mask,
                                 configuration.privacy.enabled, arena);
  const std::int64_t last = grid.ranks() - 1;  // its parts are the largest
  const model::WeightSlots slots = weight_slots(configuration, specs, grid, last, arena);
  const model::TensorAxis::Buffers tensor = Trainer::tensor_buffers(configuration, architecture, grid, arena);
  const Transformer::Buffers transformer(trained_settings(configuration, architecture, grid, last), arena);
  const Architecture part = part_of(architecture, grid, last);
  const Trainer::Buffers trainer(configuration, part, arena);
  const model::KeptGradients kept = kept_gradients(configuration);
  const model::ParameterUpdate::Buffers update(
      model::AccumulatingSink::elements(specs, grid, last, kept), arena, state_buffers(configuration, specs, arena),
      model::DataParallel::Buffers(specs, grid, gathered_bytes(configuration, slots), arena, kept));
  arena.purpose("gradients");
  arena.count(model::StepArena::Where::device,
              model::AccumulatingSink::bytes(specs, grid, last, configuration.micro_tokens(), kept));
  if (configuration.privacy.enabled) {
    arena.count(model::StepArena::Where::device,
                privacy::own_bytes(configuration.privacy, specs, grid, clipping_shape(configuration, part)));
    arena.purpose("noise of earlier steps");
    arena.count(model::StepArena::Where::device,
                privacy::CorrelatedNoise::bytes(specs, configuration.privacy.bands, grid, last));
  }
  return arena;
}

Trainer::Trainer(const Configuration& configuration, const Architecture& architecture, const parallel::Grid& grid,
                 const kernels::Execution& execution)
    : configuration_(configuration),
      execution_(execution),
      arena_(execution, grid),
      slots_(weight_slots(configuration, parameter_specs(architecture), grid.shape(), grid.world().rank(), arena_)),
      model_(architecture, configuration.optimizer.state, grid.shape(), grid.world().rank(), execution,
             configuration.moments(), slots_.largest() > 0 ? &slots_ : nullptr),
      staging_(configuration.rank_tokens(), configuration.data.document_mask, execution, arena_,
               configuration.privacy.enabled),
      tensor_(tensor_axis(configuration, architecture, grid, execution, arena_)),
      transformer_(model_, trained_settings(configuration_, architecture, grid.shape(), grid.world().rank()), timers_,
                   arena_, tensor_ ? &*tensor_ : nullptr),
      sink_(model_.parameters(), execution, configuration.micro_tokens(), kept_gradients(configuration)),
      buffers_(configuration_, part_of(architecture, grid.shape(), grid.world().rank()), arena_),
      update_(model_.parameters(), sink_, configuration.optimizer, grid, execution,
              model::ParameterUpdate::Buffers(
                  model::AccumulatingSink::elements(model_.parameters().specs(), grid.shape(), grid.world().rank(),
                                                    kept_gradients(configuration)),
                  arena_, state_buffers(configuration, model_.parameters().specs(), arena_),
                  model::DataParallel::Buffers(model_.parameters().specs(), grid.shape(),
                                               gathered_bytes(configuration_, slots_), arena_,
                                               kept_gradients(configuration_))),
              configuration.parallel.overlap, tensor_ ? &*tensor_ : nullptr, gathered_weights(configuration),
              slots_.largest() > 0 ? &slots_ : nullptr),
      ranks_(grid.axis(parallel::kDataAxis)),
      runner_(runner_settings(), execution, timers_, buffers_.runner,
              [this] {
                return model::StepRunner::ExchangeGroups{update_.exchange().exchanges(),
                                                         tensor_ ? tensor_->exchanges() : parallel::Exchanges()};
              }),
      tuning_(configuration.optimizer, configuration.run.steps, execution, buffers_.tuning) {
  if (configuration_.privacy.enabled)
    private_.emplace(
        privacy::PrivateStep::Parts{*this, update_, runner_, timers_},
        privacy::ClippingContext{
            .parameters = model_.parameters(),
            .sum = sink_,
            .settings = configuration_.privacy,
            .shape = clipping_shape(configuration_, part_of(architecture, grid.shape(), grid.world().rank())),
            .execution = execution,
            .tensor = tensor_ ? &*tensor_ : nullptr,
            .timers = &timers_},
        configuration_.micro_tokens() / configuration_.data.sequence, "clipped sums", buffers_.flags,
        std::move(buffers_.clipping));
  model_.parameters().add_to(registry_);
  if (private_) private_->register_in(registry_, grid.world().rank() == 0);
  registry_.add({.name = "run/skipped_steps",
                 .type = kernels::Scalar::i64,
                 .shape = {1},
                 .held = {0, 1},
                 .owned = {0, grid.world().rank() == 0 ? 1 : 0},
                 .data = runner_.skipped(),
                 .on_device = true});
  tuning_.add_to(registry_, grid.world().rank());
  // device.precision and device.fp8 may change when a run is resumed.
  registry_.make_optional("optimizer/loss_scale");
  if (buffers_.loss_scale.size > 0)
    registry_.add({.name = "optimizer/loss_scale",
                   .type = kernels::Scalar::fp64,
                   .shape = {kernels::kLossScaleNumbers},
                   .held = {0, kernels::kLossScaleNumbers},
                   .owned = {0, grid.world().rank() == 0 ? kernels::kLossScaleNumbers : 0},
                   .data = buffers_.loss_scale.data,
                   .on_device = true});
  registry_.make_optional("products/largest_magnitudes");
  if (const kernels::Array<std::int32_t> state = transformer_.coded_products().state(); state.size > 0)
    registry_.add({.name = "products/largest_magnitudes",
                   .type = kernels::Scalar::fp32,
                   .shape = {state.size},
                   .held = {0, state.size},
                   .owned = {0, grid.world().rank() == 0 ? state.size : 0},
                   .data = state.data,
                   .on_device = true});
  reset_loss_scale();
  if (!update_.exchange().active()) return;
  transformer_.weights_from({.start =
                                 [this] {
                                   timers_.phase("exchange");
                                   update_.exchange().start_weights();
                                 },
                             .use =
                                 [this](std::size_t unit, std::size_t next) {
                                   timers_.phase("exchange");
                                   update_.exchange().use_weights(unit, next);
                                 },
                             .complete =
                                 [this] {
                                   timers_.phase("exchange");
                                   update_.exchange().await_weights();
                                 },
                             .gathers = slots_.largest() > 0});
}

void Trainer::initialise() {
  model_.initialise(static_cast<std::uint64_t>(configuration_.run.seed));
  tuning_.initialise();
  reset_loss_scale();
  transformer_.coded_products().initialise();
}

void Trainer::reset_loss_scale() {
  if (buffers_.loss_scale.size == 0) return;
  const kernels::LossScale first;
  device::copy(execution_, buffers_.loss_scale.data, &first, sizeof first, device::Direction::to_device);
  kernels::fence(execution_);
}

model::StepRunner::Settings Trainer::runner_settings() {
  const bool free = (!update_.exchange().active() || update_.exchange().leaves_the_host_free()) &&
                    (!tensor_ || tensor_->leaves_the_host_free());
  // The number of micro-batches of a private step changes from step to step.
  return {.capture = configuration_.device.graphs && free && !configuration_.privacy.enabled,
          .runs_ahead = free,
          .skip = configuration_.run.nonfinite == run::NonFinite::skip,
          .may_skip = !configuration_.privacy.enabled,
          .skip_at_most = configuration_.run.skip_at_most};
}

dataset::TokenBatch Trainer::next_batch() {
  const std::int64_t length = configuration_.data.length_at(steps_done() + 1);
  return staging_.next(sequences(length).size(), length, sequences(length).begin * length);
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
  std::int64_t counted = batch.counted;
  if (ranks_.size() > 1) ranks_.sum({&counted, 1});
  counted_ = std::max<std::int64_t>(1, counted);
  if (batch.length != length_) runner_.change();
  length_ = batch.length;
  runner_.begin(constants);
  staging_.send(batch, counted);
  runner_.run([this] { compute(); });
  transformer_.coded_products().step_submitted();
  end_exchanges();
  timers_.phase("waiting for the device");
  runner_.end([step = steps_done() + 1] { return fmt::format("batch of step {}", step); });
  timers_.stop();
}

void Trainer::private_step(std::int64_t examples, const Fill& fill) {
  private_step(std::vector<std::int64_t>(static_cast<std::size_t>(examples), 1), fill);
}

void Trainer::private_step(std::span<const std::int64_t> sequences, const Fill& fill) {
  timers_.phase("tokens");
  length_ = configuration_.data.sequence;
  fill_ = &fill;
  sequences_.assign(sequences.begin(), sequences.end());
  // A record is in one micro-batch: its norm is that of the gradient of all its sequences.
  const std::int64_t most = configuration_.micro_tokens() / length_;
  std::vector<std::int64_t> micro_batches;
  std::int64_t free = 0;
  for (const std::int64_t count : sequences) {
    if (count > most)
      throw error(ExitCode::internal, "a record of {} sequences does not fit a micro-batch of {}", count, most);
    if (micro_batches.empty() || count > free) {
      micro_batches.push_back(0);
      free = most;
    }
    ++micro_batches.back();
    free -= count;
  }
  private_->run(constants(), micro_batches);
}

/// Sequences of records of the present step on this rank.
parallel::Range Trainer::sequences_of(parallel::Range records) const {
  const auto at = [&](std::int64_t record) {
    return std::accumulate(sequences_.begin(), sequences_.begin() + record, std::int64_t{0});
  };
  return {at(records.begin), at(records.end)};
}

privacy::MicroBatch Trainer::load(std::int64_t first, std::int64_t count) {
  timers_.phase("tokens");
  // The copies from the slots that are filled next are over.
  if (++sent_ % Staging::kSlots == 0) kernels::fence(execution_);
  micro_batch_ = {first, first + count};
  const parallel::Range sequences = sequences_of(micro_batch_);
  const auto of_records =
      std::span(sequences_).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
  dataset::TokenBatch batch = staging_.next(sequences.size(), length_);
  (*fill_)(sequences.begin, batch);
  staging_.send_examples(batch, of_records);
  if (configuration_.privacy.joins_sequences()) transformer_.join_examples(of_records);
  const Tokens all = staging_.tokens(0, sequences.size(), length_);
  return {transformer_.examples(all), all.ids};
}

void Trainer::pass(parallel::Range examples, model::GradientSink& sink) {
  if (examples.size() == 0) return transformer_.pass_without_tokens(sink);
  const parallel::Range sequences =
      sequences_of({micro_batch_.begin + examples.begin, micro_batch_.begin + examples.end});
  const Tokens tokens = staging_.tokens(sequences.begin - sequences_of(micro_batch_).begin, sequences.size(), length_);
  transformer_.forward(tokens, runner_.constants());
  update_.exchange().await_reductions();
  transformer_.losses_and_gradient(tokens, {buffers_.losses.data, tokens.rows()}, sink);
  transformer_.backward(tokens, runner_.constants(), sink);
}

/// Exchanges of evaluations, between steps, do not count as idle time of a step.
void Trainer::begin_exchanges() {
  update_.exchange().begin_step();
  if (tensor_) tensor_->mark(&update_.exchange().idle());
}

void Trainer::end_exchanges() {
  update_.exchange().end_step();
  if (tensor_) tensor_->mark(nullptr);
}

void Trainer::add_objective(Objective objective) {
  if (static_cast<bool>(objective) != static_cast<bool>(objective_)) runner_.change();
  objective_ = std::move(objective);
}

/// Computes a step: everything between the tokens of a batch and the updated parameters.
void Trainer::compute() {
  begin_exchanges();
  const std::int64_t length = length_, sequences = this->sequences(length).size(),
                     micro = configuration_.micro_tokens() / length;
  const kernels::Array<float> losses = {buffers_.losses.data + this->sequences(length).begin * length,
                                        sequences * length};
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
  transformer_.prepare_step();
  model::DataParallel& exchange = update_.exchange();
  const auto start_reductions = [&] {
    sink_.when_complete([this](std::size_t parameter) {
      timers_.phase("exchange");
      update_.exchange().reduce_from(parameter);
    });
  };
  if (objective_) {
    if (exchange.active() && exchange.in_micro_batches()) start_reductions();
    objective_(runner_.constants(), sink_, [&] { exchange.await_reductions(); });
  }
  const std::int64_t most_sequences = parallel::largest_part(configuration_.data.batch_tokens / length, ranks_.size()),
                     end = exchange.in_micro_batches() ? most_sequences : sequences;
  for (std::int64_t first = 0; first < end; first += micro) {
    if (exchange.active() && (exchange.in_micro_batches() || first + micro >= end)) start_reductions();
    if (first >= sequences) {
      transformer_.pass_without_tokens(sink_);
      continue;
    }
    Tokens tokens = staging_.tokens(first, std::min(micro, sequences - first), length);
    tokens.scale = factor;
    transformer_.forward(tokens, runner_.constants());
    exchange.await_reductions();
    transformer_.losses_and_gradient(tokens, {losses.data + first * length, tokens.rows()}, sink_);
    transformer_.backward(tokens, runner_.constants(), sink_);
  }
  sink_.when_complete({});
  timers_.phase("check");
  if (CodedProducts& coded = transformer_.coded_products(); coded.any()) {
    if (exchange.active()) exchange.maximum(coded.largest(), "largest magnitudes");
    coded.end_step();
  }
  kernels::StepFlags* const flags = buffers_.flags.data;
  update_.reduce();
  update_.form_norm(flags);
  gather_losses(length);
  kernels::flag_beyond(execution_,
                       {buffers_.losses.data, kernels::Scalar::fp32, buffers_.losses.size / length, length, length},
                       kLargestLoss, &flags->not_finite);
  runner_.guard(flags, scale);
  timers_.phase("update");
  tuning_.apply(buffers_.losses, staging_.scale(), runner_.constants());
  update_.apply(runner_.constants(), scale);
  if (scale != nullptr) kernels::update_loss_scale(execution_, flags, scale);
}

/// Gathers the losses of the whole batch on all ranks, so that values derived from them are equal on all.
void Trainer::gather_losses(std::int64_t length) {
  if (ranks_.size() == 1) return;
  std::vector<std::int64_t> bytes;
  for (std::int64_t r = 0; r < ranks_.size(); ++r)
    bytes.push_back(4 * length * parallel::part(configuration_.data.batch_tokens / length, ranks_.size(), r).size());
  update_.exchange().all_gather(buffers_.losses.data, bytes, "losses");
}

parallel::Range Trainer::sequences(std::int64_t length) const {
  return parallel::part(configuration_.data.batch_tokens / length, ranks_.size(), ranks_.rank());
}

parallel::Exchanges Trainer::exchanges() const {
  parallel::Exchanges all;
  for (const parallel::Exchanges& group : runner_.exchanges()) all += group;
  return all;
}

/// The steps of a captured graph have scales from the steps before them, unless there are none.
void Trainer::resume_at(std::int64_t step) {
  runner_.resume_at(step);
  CodedProducts& coded = transformer_.coded_products();
  const bool had_history = coded.has_history();
  coded.state_loaded();
  if (coded.has_history() != had_history) runner_.change();
}

Trainer::Metrics Trainer::metrics() {
  runner_.wait();
  // Losses of a private step are not kept.
  std::vector<float> losses(static_cast<std::size_t>(private_ ? 0 : buffers_.losses.size));
  device::copy(execution_, losses.data(), buffers_.losses.data, 4 * std::ssize(losses), device::Direction::to_host);
  kernels::fence(execution_);
  double sum = 0;
  for (const float loss : losses) sum += static_cast<double>(loss);
  return {.loss = sum / static_cast<double>(counted_),
          .learning_rate = static_cast<double>(device::read(execution_, runner_.constants()).learning_rate),
          .gradient_norm = device::read(execution_, update_.norm()),
          .skipped_steps = device::read(execution_, runner_.skipped()),
          .loss_scale = buffers_.loss_scale.size > 0 ? device::read(execution_, buffers_.loss_scale.data).scale : 0,
          .clip_bound = private_ ? private_->clip_bound() : 0};
}

void Trainer::time_phases(bool one_by_one) {
  runner_.capture(!one_by_one);
  timers_.before_switch(one_by_one ? std::function<void()>([this] { kernels::fence(execution_); })
                                   : std::function<void()>());
}

}  // namespace weft::language_model
