// SPDX-License-Identifier: Apache-2.0
#include "transcoder/trainer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/convert/convert.hpp"
#include "kernels/metrics/metrics.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/runtime.hpp"
#include "kernels/transcoder/encode/encode.hpp"
#include "kernels/transcoder/loss/loss.hpp"
#include "optimizer/schedule.hpp"
#include "transcoder/skip.hpp"

namespace weft::transcoder {
namespace {

/// Largest residual, in deviations of the data, that counts as finite: the square of a larger one would soon overflow
/// fp32. A sum of squares above its square has such a residual, or is no better.
constexpr double kLargestResidual = 1e18;

/// Of all ranks to one another.
std::int64_t largest_message(const Configuration& configuration, const Shape& shape, std::int64_t n_ranks) {
  return std::max(ErrorWeights::largest_message(configuration, shape, n_ranks),
                  DecoderBackward::largest_message(shape, n_ranks));
}

}  // namespace

Trainer::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                          std::int64_t row_bytes, training::StepArena& arena) {
  const FeatureAxisSizes sizes(configuration, shape, grid, configuration.data.batch_tokens);
  const std::int64_t owned = largest_owned(shape, grid);
  const bool auxiliary = Auxiliary::wanted(configuration);
  // With one rank on the data axis and no dead features these are the entries of the selection.
  const std::int64_t entries =
      auxiliary ? Auxiliary::capacity(configuration, shape, grid) : DataAxis::capacity(configuration, shape, grid);
  arena.purpose("backward pass");
  targets = arena.take<float>(sizes.own * sizes.width);
  gradient_rows =
      arena.exchange(parallel::kFeatureAxis,
                     (auxiliary ? 2 : 1) * sizes.bytes(configuration.data.batch_tokens * sizes.width), sizes.strategy);
  own_gradient_rows = RowGather::Buffers(sizes, arena);
  activation_gradient = arena.take<float>(entries);
  decoder_bias_gradient = arena.take<float>(sizes.width);
  if (configuration.transcoder.decoder_bias == DecoderBias::pair) pair_bias = arena.take<float>(sizes.width);
  skip_gradient = arena.take<float>(shape.skip ? sizes.width * shape.d_model : 0);
  arena.communicator(grid.ranks(), largest_message(configuration, shape, grid.ranks()));
  loss_sums = arena.take<double>(3 * shape.n_layers);
  step_sums = arena.take<double>(4 * shape.n_layers);
  dead = arena.take<std::int64_t>(1);
  loss_workspace = arena.take<std::byte>(kernels::loss_workspace(sizes.own, shape.n_layers));
  skip_workspace =
      arena.take<std::byte>(skip_gradient_workspace(configuration, shape, configuration.data.batch_tokens));
  encoder_workspace = arena.take<std::byte>(
      kernels::encode_backward_workspace(arena.backend(), shape.n_layers, owned, shape.d_model, entries));
  decoder = DecoderBackward::Buffers(configuration, shape, grid, (auxiliary ? 2 : 1) * configuration.data.batch_tokens,
                                     entries, arena);
  if constexpr (kernels::kCudaBuild)
    for (device::Upload::Slot& slot : raw_rows)
      slot = {arena.take<std::byte>(sizes.own * row_bytes), arena.take<std::byte>(sizes.own * row_bytes)};
  norm = GradientNorm::Buffers(configuration.optimizer, shape.n_layers * owned,
                               1 + (shape.skip ? sizes.width : 0) + DecoderBackward::basis_rows(shape), arena);
  runner = training::StepRunner::Buffers(arena);
}

training::StepArena measure_step(const Configuration& configuration, const Shape& shape,
                                 const parallel::GridShape& grid, std::int64_t row_bytes, kernels::Backend backend) {
  training::StepArena arena(backend);
  const Forward::Buffers forward(configuration, shape, grid, configuration.data.batch_tokens, arena);
  const Trainer::Buffers trainer(configuration, shape, grid, row_bytes, arena);
  const DataAxis::Buffers data_axis(configuration, shape, grid, arena);
  const Auxiliary::Buffers auxiliary(configuration, shape, grid, arena);
  const ErrorWeights::Buffers error_weights(configuration, shape, grid, arena);
  const Penalties::Buffers penalties(configuration, shape, grid, arena);
  const JumpBackward::Buffers jump(configuration, shape, grid, arena);
  const InitialBias::Buffers initial_bias(configuration, shape, grid, arena);
  const Resampling::Buffers resampling(configuration, shape, grid, arena);
  return arena;
}

Trainer::Trainer(const Configuration& configuration, const Shape& shape, const dataset::Normalisation& normalisation,
                 const dataset::Statistics& statistics, const parallel::Grid& grid, const kernels::Execution& execution,
                 std::int64_t row_bytes, Locate locate)
    : configuration_(configuration),
      locate_(std::move(locate)),
      grid_(grid),
      execution_(execution),
      arena_(execution, grid),
      model_(shape, configuration.optimizer.state, grid, execution, Moments::held),
      normalisation_(normalisation, statistics, execution),
      forward_(configuration, model_, normalisation_, grid, execution, timers_, configuration.data.batch_tokens,
               arena_),
      buffers_(configuration, shape, grid.shape(), row_bytes, arena_),
      gradient_gather_(forward_.axis(), "gradient rows", buffers_.own_gradient_rows),
      data_axis_(configuration, model_, grid, execution, arena_),
      auxiliary_(configuration, model_, forward_, data_axis_, grid, execution, arena_),
      world_(grid.all_on_an_axis(), execution, largest_message(configuration, shape, grid.world().size()),
             configuration.parallel.exchange),
      decoder_(model_, world_, execution, buffers_.decoder),
      error_weights_(configuration, shape, normalisation_, grid.shape(), world_, execution, arena_),
      norm_(configuration.optimizer, n_keys(), world_, execution, buffers_.norm),
      upload_(execution, buffers_.raw_rows[0], buffers_.raw_rows[1]),
      runner_(runner_settings(), execution, timers_, buffers_.runner, [this] { return counted_exchanges(); }),
      penalties_(configuration, model_, grid.shape(), execution, runner_.constants(), arena_),
      jump_(configuration, model_, grid.shape(), execution, runner_.constants(), arena_),
      initial_bias_(configuration, model_, grid.shape(), execution, arena_),
      resampling_(configuration, model_, grid.shape(), execution, arena_) {
  data_axis_.ranks().mark(&forward_.idle());
  runner_.explain_fault(
      [this](std::int64_t step) { forward_.require_valid_selections(fmt::format("of step {}", step)); });
  device::zero(execution, buffers_.step_sums);
  name_state();
}

training::StepRunner::Settings Trainer::runner_settings() const {
  const bool free = world_.leaves_the_host_free();
  return {.record = configuration_.device.graphs && free && configuration_.parallel.exchange.leaves_the_host_free() &&
                    forward_.selection().sizes().on_gpu_bytes > 0,
          .runs_ahead = free,
          .skip = configuration_.run.nonfinite == NonFinite::skip,
          .skip_at_most = configuration_.run.skip_at_most};
}

/// All state of a run, in the order of checkpoints.
void Trainer::name_state() {
  model_.add_to(registry_);
  const auto replicated = [&](const std::string& name, kernels::Scalar type, std::int64_t size, void* data,
                              bool on_device) {
    registry_.add({.name = name,
                   .type = type,
                   .shape = {size},
                   .held = {0, size},
                   .owned = {0, grid_.world().rank() == 0 ? size : 0},
                   .data = data,
                   .on_device = on_device});
  };
  // Any content gives the same selection. It depends on transcoder.activation and scope, which a resumed run may
  // change.
  registry_.make_optional("selection/threshold");
  const Selector::ControllerState thresholds = forward_.selection().controller_state();
  if (thresholds.keys.size > 0)
    replicated("selection/threshold", kernels::Scalar::u32, thresholds.keys.size, thresholds.keys.data,
               thresholds.on_device);
  replicated("optimizer/previous_gradient_norm", kernels::Scalar::fp64, 1, norm_.norm(), true);
  replicated("run/skipped_steps", kernels::Scalar::i64, 1, runner_.skipped(), true);
}

void Trainer::initialise() {
  model_.initialise(static_cast<std::uint64_t>(configuration_.run.seed));
  penalties_.decoder_changed();
}

void Trainer::step(const dataset::RawBatch& batch) {
  timers_.phase("normalise");
  const kernels::AdamStep constants =
      optimizer::adam_step(configuration_.optimizer, steps_done() + 1, configuration_.run.steps,
                           static_cast<std::uint64_t>(configuration_.run.seed), 2 / error_divisor(batch.n_tokens));
  learning_rate_ = static_cast<double>(constants.learning_rate);
  keep_k();
  runner_.begin(constants);
  load(batch);
  if (steps_done() == 0 && initial_bias_.active()) fit_biases();
  penalties_.prepare();
  runner_.run([this] { compute(); });
  if (resampling_.is_due(steps_done() + 1)) resample(steps_done() + 1);
  timers_.phase("waiting for the device");
  upload_.finish();
  runner_.end([this, batch, step = steps_done() + 1] {
    return fmt::format("batch of {} tokens: {}", batch.n_tokens, locate_(batch, step));
  });
  timers_.stop();
  decoder_is_ahead_ = true;
}

/// Encoder biases from the first batch, before its step.
void Trainer::fit_biases() {
  timers_.phase("initial biases");
  forward_.gather_inputs();
  if (data_axis_.active()) data_axis_.gather_rows(forward_.all_inputs());
  initial_bias_.fit(forward_.all_inputs());
}

/// Of dead features, from the rows of the step before. The decoder of other ranks of the data axis follows with the
/// next step.
void Trainer::resample(std::int64_t step) {
  timers_.phase("resampling");
  resampling_.run(forward_.all_inputs(), all_gradient_rows(), step);
  penalties_.decoder_changed();
  if (!data_axis_.active()) return;
  data_axis_.gather_weights(model_.encoder());
  data_axis_.gather_vectors(model_.encoder_biases());
  if (jump_.active()) data_axis_.gather_vectors(model_.thresholds());
}

/// Of the next step. Another budget is another graph.
void Trainer::keep_k() {
  const double k = k_at(configuration_.transcoder, steps_done() + 1, configuration_.run.steps);
  forward_.selection().keep(k);  // also after an evaluation
  if (k != std::exchange(k_, k)) runner_.change();
}

/// The rows of a batch, normalised: x~ of the own tokens, and their targets.
void Trainer::load(const dataset::RawBatch& batch) {
  dataset::RawBatch here = batch;
  if (!batch.resident) {
    const auto bytes = [](const kernels::AnyMatrix& m) { return m.rows * m.stride * kernels::bytes_of(m.type); };
    const device::Upload::Blocks blocks =
        upload_.bring(execution_, {batch.inputs.data, batch.targets.data}, bytes(batch.inputs), bytes(batch.targets));
    here.inputs.data = blocks.first;
    here.targets.data = blocks.second;
  }
  const std::int64_t width = model_.shape().width();
  forward_.load(here);
  kernels::normalise_rows(
      execution_, here.targets, normalisation_.target_mean.array(), normalisation_.target_scale.array(),
      {buffers_.targets.data, kernels::Scalar::fp32, here.targets.rows, width, width}, forward_.not_finite());
  if (!batch.resident) upload_.consumed(execution_);
}

/// The step: everything between the normalised rows of a batch and the updated parameters.
///
///   z = x~ W_encᵀ + b;  a = selection(z)         encode
///   ŷ_t = Σ_{s<=t} a_s W_dec[s->t] + b_t         residual_and_loss: partial sums to the owners of the tokens,
///   g = ∂loss/∂ŷ                                 whose gradient rows go to all
///   da = <W_dec, g>, dW_dec = a·g, Adam          backward_and_update, feature by feature
///   dz = da · f'(z), dW_enc = dz·x~, Adam
///
/// jumprelu: the gradients of the thresholds come first, from all tokens and features, or between those of decoder and
/// encoder, from lists (jump_backward.hpp).
///
/// Data for other ranks are sent as early as possible and awaited as late as possible.
void Trainer::compute() {
  // Memory of gradient rows is that of the last step until here.
  buffers_.gradient_rows.close();
  buffers_.gradient_rows.open();
  if (data_axis_.active()) data_axis_.start_weights(model_.decoder());  // of the last update, while this step encodes
  const bool before = forward_.ranks_by_decoder();
  if (data_axis_.active() && before) data_axis_.await_weights(forward_.idle());
  if (auxiliary_.active()) {
    timers_.phase("dead features");
    auxiliary_.begin();
  }
  forward_.encode(jump_.window(), auxiliary_.active() ? &auxiliary_.selector() : nullptr);
  if (data_axis_.active() && !before) data_axis_.await_weights(forward_.idle());
  if (auxiliary_.active()) {
    timers_.phase("dead features");
    auxiliary_.finish_selection();
  }
  residual_and_loss();
  if (auxiliary_.active()) auxiliary_loss();
  guard();  // and while the last gradient rows are in transit
  order_by_feature();
  await_gradient_rows();
  clip();
  backward_and_update();
  timers_.phase("bookkeeping");
  const std::int64_t n = model_.shape().n_layers;
  kernels::accumulate_layer_counts(execution_, active_offsets(), model_.owned().size(),
                                   {buffers_.step_sums.data + 3 * n, n});
  kernels::advance_clocks(execution_, {active_offsets(), {}, {}}, forward_.layout().total, runner_.constants(),
                          model_.clocks());
}

void Trainer::residual_and_loss() {
  const std::int64_t n = model_.shape().n_layers, d = model_.shape().d_model, width = model_.shape().width();
  const kernels::AnyMatrix targets{buffers_.targets.data, kernels::Scalar::fp32, forward_.layout().own.size(), width,
                                   width};
  double *const sums = buffers_.loss_sums.data, *const step_sums = buffers_.step_sums.data;
  device::zero(execution_, buffers_.step_sums);
  error_weights_.form(targets, forward_.layout().total);
  bool at_once = false;  // parts have all own tokens: each layer has one sum
  forward_.decode([&](const Forward::OwnPart& part) {
    timers_.phase("loss");
    const std::int64_t first = part.layers.begin * d, columns = part.layers.size() * d, m = part.layers.size();
    const auto of_layers = [&](const float* all) { return kernels::Array<const float>{all + first, columns}; };
    const kernels::AnyMatrix of_part = targets.rows_from(part.begin, part.count).columns_from(first, columns);
    const kernels::AnyMatrix rows =
        gradient_gather_.own(forward_.layout(), gradient_rows(), part.block).rows_from(part.begin, part.count);
    const kernels::Array<const float> bias = of_layers(model_.decoder_bias().weight.data),
                                      centre = of_layers(normalisation_.centre.data()),
                                      standardise = of_layers(normalisation_.standardise.data());
    double* const of_first = sums + part.layers.begin;
    const kernels::LossSums loss_sums{{of_first, m}, {of_first + n, m}, {of_first + 2 * n, m}};
    if (error_weights_.active())
      kernels::weighted_residual_and_loss(execution_, part.partial, part.n_parts, of_part, bias, centre, standardise,
                                          of_layers(error_weights_.weights().data), m, gradient_factor(), rows,
                                          loss_sums, buffers_.loss_workspace);
    else
      kernels::residual_and_loss(execution_, part.partial, part.n_parts, of_part, bias, centre, standardise, m,
                                 gradient_factor(), rows, loss_sums, buffers_.loss_workspace);
    at_once = part.count == forward_.layout().own.size();
    for (std::int64_t sum = 0; sum < 3 && !at_once; ++sum)
      kernels::accumulate(execution_, {of_first + sum * n, m}, {step_sums + sum * n + part.layers.begin, m});
  });
  if (at_once) kernels::accumulate(execution_, {sums, 3 * n}, {step_sums, 3 * n});
  // Only now: partial sums are needed before any gradient row is. The last layers first: the backward pass begins with
  // them, and those of the others arrive while it runs.
  timers_.phase("exchange");
  for (std::size_t block = forward_.axis().blocks.size(); block-- > 0;)
    gradient_gather_.send(forward_.layout(), gradient_rows(), block);
}

/// Of the dead features, for the error that residual_and_loss has left in the gradient rows.
void Trainer::auxiliary_loss() {
  timers_.phase("dead features");
  const parallel::Range group = forward_.layout().group;
  auxiliary_.form_rows(
      [&](const Forward::OwnPart& part) {
        return gradient_gather_.own(forward_.layout(), gradient_rows(), part.block).rows_from(part.begin, part.count);
      },
      gradient_factor(), auxiliary_rows().rows_from(group.begin, group.size()));
}

float Trainer::gradient_factor() const { return static_cast<float>(2 / error_divisor(forward_.layout().total)); }

double Trainer::error_divisor(std::int64_t n_tokens) const {
  return transcoder::error_divisor(configuration_.transcoder, n_tokens, model_.shape().n_layers,
                                   model_.shape().d_model);
}

/// With a data axis, the lists and inputs of the other groups are gathered first.
void Trainer::order_by_feature() {
  if (data_axis_.active()) {
    timers_.phase("exchange");
    data_axis_.gather_lists(forward_.listed(), forward_.layout().total);
    data_axis_.gather_rows(forward_.all_inputs());
    timers_.phase("transpose");
    data_axis_.by_feature();
  } else {
    forward_.by_feature();
  }
  if (jump_.window() != nullptr) jump_.activate(listed());
  if (auxiliary_.active()) {
    timers_.phase("dead features");
    auxiliary_.join(activations());
    const kernels::AnyMatrix x = forward_.all_inputs();
    kernels::copy_rows(execution_, x, x.rows_from(x.rows, x.rows));
  }
}

/// Those of the last layers, with which the backward pass begins; those before them are awaited there.
void Trainer::await_gradient_rows() {
  timers_.phase("exchange");
  gradient_gather_.wait(data_axis_.active() ? 0 : forward_.axis().blocks.size() - 1, execution_);
  if (data_axis_.active()) data_axis_.gather_rows(all_gradient_rows());
  if (!auxiliary_.active()) return;
  auxiliary_.await_rows();
  gradient_gather_.wait(0, execution_);
  if (data_axis_.active()) data_axis_.gather_rows(auxiliary_rows());
}

kernels::LateRows Trainer::late_rows() {
  if (data_axis_.active() || auxiliary_.active() || forward_.axis().blocks.size() == 1) return {};
  return {forward_.axis().blocks.back().begin, [this] { gradient_gather_.wait(0, execution_); }};
}

/// A gradient row that is not finite comes from a residual that is not, and the sum of squares of its layer shows it.
/// Each rank checks its own tokens, so the ranks must agree.
void Trainer::guard() {
  timers_.phase("check");
  const auto check = [&](const double* sums, std::int64_t n, double largest) {
    kernels::flag_above(execution_, {sums, n}, largest * largest, forward_.not_finite());
  };
  check(buffers_.step_sums.data, model_.shape().n_layers, kLargestResidual);
  if (auxiliary_.active())
    check(auxiliary_.sum_of_squares(), 1,
          kLargestResidual * static_cast<double>(gradient_factor()) * configuration_.transcoder.auxk);
  kernels::StepFlags* const flags = forward_.flags();
  static_assert(sizeof *flags == 2 * sizeof(std::int32_t));
  world_.maximum({&flags->not_finite, 2}, "flags");
  runner_.guard(flags);
}

TrainingMetrics Trainer::metrics() {
  runner_.settle();
  MetricSums own(model_.shape().n_layers);
  device::copy(execution_, own.sums.data(), buffers_.step_sums.data, buffers_.step_sums.size * 8,
               device::Direction::to_host);
  kernels::count_at_least(execution_, model_.clocks(), configuration_.transcoder.dead_window, buffers_.dead.data);
  own.dead = static_cast<double>(device::read(execution_, buffers_.dead.data));
  const std::int64_t n_tokens = runner_.steps_here() == 0 ? 1 : forward_.layout().total;
  TrainingMetrics metrics = reduce_metrics(own, model_.shape(), n_tokens, error_divisor(n_tokens), grid_.world());
  const auto [of_activations, of_preactivations] = penalties_.values();
  std::array<double, 3> penalties = {of_activations, of_preactivations,
                                     auxiliary_.active() ? auxiliary_.value(gradient_factor()) : 0};
  grid_.world().sum(std::span<double>(penalties));
  metrics.sparsity_penalty = penalties[0];
  metrics.preactivation_penalty = penalties[1];
  metrics.auxiliary_loss = penalties[2];
  metrics.gradient_norm = device::read(execution_, norm_.norm());
  metrics.skipped = device::read(execution_, runner_.skipped());
  return metrics;
}

void Trainer::settle() {
  runner_.settle();
  // The last update's decoder weights would go to all ranks with the next step.
  if (!data_axis_.active() || !std::exchange(decoder_is_ahead_, false)) return;
  data_axis_.ranks().mark(nullptr);  // not part of a step
  data_axis_.gather_weights(model_.decoder());
  data_axis_.ranks().mark(&forward_.idle());
}

void Trainer::time_phases(bool one_by_one) {
  static const parallel::IsolateExchange isolate;
  const parallel::ExchangeObserver* const observer =
      one_by_one && device::is_asynchronous(execution_) ? &isolate : configuration_.parallel.exchange.observer;
  forward_.axis().ranks.observe(observer);
  forward_.selection().observe(observer);
  if (auxiliary_.active()) auxiliary_.selector().observe(observer);
  data_axis_.ranks().observe(observer);
  data_axis_.overlapped().observe(observer);
  world_.observe(observer);
  runner_.record(!one_by_one);
  timers_.before_switch(one_by_one ? std::function<void()>([this] {
    kernels::fence(forward_.axis().communication);
    kernels::fence(data_axis_.communication());
    kernels::fence(execution_);
  })
                                   : nullptr);
}

training::StepRunner::ExchangeGroups Trainer::counted_exchanges() const {
  training::StepRunner::ExchangeGroups groups(3);
  groups[kFeature] = forward_.axis().ranks.exchanges();
  groups[kData] = data_axis_.ranks().exchanges();
  groups[kData] += data_axis_.overlapped().exchanges();
  groups[kOthers] = forward_.selection().exchanges();
  if (auxiliary_.active()) groups[kOthers] += auxiliary_.selector().exchanges();
  groups[kOthers] += world_.exchanges();
  return groups;
}

parallel::Exchanges Trainer::exchanges() const {
  parallel::Exchanges all;
  for (const parallel::Exchanges& group : runner_.exchanges()) all += group;
  return all;
}

double Trainer::step_exposed_seconds() const {
  return traffic_is_timed() ? runner_.step_traffic().seconds : forward_.idle().seconds();
}

}  // namespace weft::transcoder
