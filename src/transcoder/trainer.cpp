// SPDX-License-Identifier: Apache-2.0
#include "transcoder/trainer.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "kernels/convert/convert.hpp"
#include "kernels/metrics/metrics.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/runtime.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "kernels/transcoder/encode/encode.hpp"
#include "kernels/transcoder/loss/loss.hpp"
#include "optimizer/schedule.hpp"

namespace weft::transcoder {
namespace {

double mean(const std::vector<double>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

template <class T>
T read(const kernels::Execution& execution, const T* device_value) {
  T value{};
  device::copy(execution, &value, device_value, sizeof value, device::Direction::to_host);
  kernels::fence(execution);
  return value;
}

/// A residual beyond this, in deviations of the data, is no longer a number to learn from: its square leaves fp32 soon.
constexpr float kLargestResidual = 1e18f;

/// How far the host runs ahead of a GPU: enough that it never waits for work.
constexpr std::int64_t kStepsAhead = 2;

std::int64_t norm_elements(std::int64_t n_keys) { return 2 * n_keys + 2 * n_keys / 4096 + 5; }

std::int64_t backward_workspace(kernels::Backend backend, const Shape& shape, std::int64_t n_local,
                                std::int64_t capacity) {
  return std::max(kernels::decode_backward_workspace(backend, shape.n_layers, n_local, shape.d_model, capacity),
                  kernels::encode_backward_workspace(backend, shape.n_layers, n_local, shape.d_model, capacity));
}

}  // namespace

double TrainingMetrics::nmse_standardised_mean() const { return mean(nmse_standardised); }
double TrainingMetrics::l0_mean() const { return mean(l0); }

Trainer::Trainer(const Configuration& configuration, const Shape& shape, const dataset::Normalisation& normalisation,
                 const dataset::Statistics& statistics, const parallel::Grid& grid, const kernels::Execution& execution,
                 Locate locate)
    : configuration_(configuration),
      locate_(std::move(locate)),
      grid_(grid),
      execution_(execution),
      model_(shape, configuration.optimizer.state, grid, execution, Moments::held),
      normalisation_(normalisation, statistics, execution),
      forward_(configuration, model_, normalisation_, grid, execution, timers_, configuration.data.batch_tokens),
      row_gather_(forward_.lane(), "gradient rows", grid.shape().largest_part(configuration.data.batch_tokens),
                  shape.width()),
      data_axis_(configuration, model_, grid, execution),
      world_(grid.all_on_an_axis(), execution, 0, configuration.parallel.manner.way),
      in_flight_(device::is_asynchronous(execution) && world_.leaves_the_host_free() ? kStepsAhead : 0),
      upload_(execution) {
  data_axis_.ranks().mark(&forward_.idle());
  const std::int64_t group = parallel::largest_part(configuration.data.batch_tokens, grid.size(parallel::kDataAxis));
  const std::int64_t own = parallel::largest_part(group, grid.size(parallel::kFeatureAxis));
  const std::int64_t entries = data_axis_.active() ? DataAxis::capacity(configuration, shape, grid.shape())
                                                   : forward_.selection().sizes().capacity;
  targets_ = device::Buffer<float>(own * shape.width());
  gradient_rows_ = {
      grid.axis(parallel::kFeatureAxis),
      configuration.data.batch_tokens * shape.width() * kernels::bytes_of(scalar_of(configuration.precision)),
      configuration.parallel.manner.way};
  activation_gradient_ = device::Buffer<float>(entries);
  if (configuration.optimizer.clip_norm > 0) squared_norm_ = device::Buffer<double>(norm_elements(n_keys()));
  decoder_bias_gradient_ = device::Buffer<float>(shape.width());
  loss_sums_ = device::Buffer<double>(3 * shape.n_layers);
  loss_workspace_ = device::Buffer<std::byte>(kernels::loss_workspace(own, shape.n_layers));
  backward_workspace_ =
      device::Buffer<std::byte>(backward_workspace(execution.backend, shape, model_.owned().size(), entries));
  step_sums_ = device::Buffer<double>(4 * shape.n_layers);
  adam_step_ = device::Buffer<kernels::AdamStep>(1);
  count_ = device::Buffer<std::int64_t>(1);
  gradient_norm_ = device::Buffer<double>(1);
  guard_ = device::Buffer<kernels::StepGuard>(1);
  host_steps_ = device::HostBuffer<kernels::AdamStep>(kRing);
  outcomes_ = device::HostBuffer<kernels::StepOutcome>(kRing);
  device::zero(execution, step_sums_.data(), step_sums_.bytes());
  device::zero(execution, gradient_norm_.data(), gradient_norm_.bytes());
  device::zero(execution, guard_.data(), guard_.bytes());

  const bool wait = configuration.parallel.manner.wait;
  forward_.lane().axis.block(wait);
  forward_.selection().block(wait);
  data_axis_.ranks().block(wait);
  data_axis_.beside().block(wait);
  world_.block(wait);

  const int world_rank = grid.world().rank();
  model_.add_to(registry_, world_rank);
  const auto replicated = [&](const std::string& name, kernels::Scalar type, std::int64_t size, void* data,
                              bool on_device) {
    registry_.add({.name = name,
                   .type = type,
                   .shape = {size},
                   .held = {0, size},
                   .owned = {0, world_rank == 0 ? size : 0},
                   .data = data,
                   .on_device = on_device});
  };
  const Selector::ControllerState thresholds = forward_.selection().controller_state();
  if (thresholds.keys.size > 0)
    replicated("selection/threshold", kernels::Scalar::u32, thresholds.keys.size, thresholds.keys.data,
               thresholds.on_device);
  replicated("optimizer/previous_gradient_norm", kernels::Scalar::fp64, 1, gradient_norm_.data(), true);
  replicated("run/skipped_steps", kernels::Scalar::i64, 1, &guard_.data()->skipped, true);
}

std::int64_t Trainer::bytes(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                            std::int64_t row_bytes, kernels::Backend backend) {
  const std::int64_t group = parallel::largest_part(configuration.data.batch_tokens, grid.size(parallel::kDataAxis));
  const std::int64_t own = parallel::largest_part(group, grid.size(parallel::kFeatureAxis)), width = shape.width();
  const std::int64_t owned = parallel::largest_part(
      parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis)), grid.size(parallel::kDataAxis));
  // With one rank on the data axis these are the entries of the selection.
  const std::int64_t entries = DataAxis::capacity(configuration, shape, grid);
  return own * width * 4 +
         configuration.data.batch_tokens * width * kernels::bytes_of(scalar_of(configuration.precision)) + entries * 4 +
         (configuration.optimizer.clip_norm > 0 ? 8 * norm_elements(shape.n_layers * owned) : 0) +
         kernels::loss_workspace(own, shape.n_layers) + backward_workspace(backend, shape, owned, entries) +
         (kernels::kCudaBuild ? 2 * 2 * own * row_bytes : 0) +  // two slots of raw rows on a GPU
         RowGather::bytes(own, width, exchange_blocks(configuration, shape.n_layers, grid),
                          scalar_of(configuration.precision));
}

void Trainer::initialise() { model_.initialise(static_cast<std::uint64_t>(configuration_.run.seed)); }

void Trainer::time_phases(bool one_by_one) {
  one_by_one_ = one_by_one;
  const bool wait = one_by_one && device::is_asynchronous(execution_);
  forward_.lane().axis.wait_for_each(wait);
  forward_.selection().wait_for_each(wait);
  data_axis_.ranks().wait_for_each(wait);
  data_axis_.beside().wait_for_each(wait);
  world_.wait_for_each(wait);
  timers_.before_switch(one_by_one ? std::function<void()>([this] {
    kernels::fence(forward_.lane().beside);
    kernels::fence(data_axis_.beside_execution());
    kernels::fence(execution_);
  })
                                   : nullptr);
}

/// Whether nothing between the first kernel of a step and its last waits for an answer: then it can be recorded.
bool Trainer::step_is_free_of_the_host() {
  return device::Graph::possible(execution_) && forward_.selection().sizes().on_gpu_bytes > 0 &&
         world_.leaves_the_host_free() && configuration_.parallel.manner.leaves_the_host_free();
}

void Trainer::step(const dataset::RawBatch& batch) {
  const std::int64_t step = steps_done_ + 1;
  const parallel::Traffic before_step = exchanges().total();
  load(batch);
  // The first step prepares what is prepared on first use; the second is recorded, and from then on replayed.
  if (configuration_.device.graphs && !one_by_one_ && steps_here_ > 0 && step_is_free_of_the_host()) {
    if (graph_.recorded()) {
      replayed_.feature += recorded_.feature;
      replayed_.data += recorded_.data;
      replayed_.others += recorded_.others;
    } else {
      const Traffics before = traffic();
      graph_.record(execution_, [this] { compute(); });
      const Traffics after = traffic();
      recorded_ = {after.feature.since(before.feature), after.data.since(before.data),
                   after.others.since(before.others)};
    }
    timers_.region("step");
    graph_.replay(execution_);
  } else {
    compute();
  }
  Pending& pending = pending_[step % kRing];
  pending.batch = batch;
  pending.done.record(execution_);
  timers_.region("waiting for the device");
  upload_.finish();
  learn_outcomes(step - in_flight_);
  timers_.stop();
  step_traffic_ = exchanges().total() - before_step;
  decoder_is_ahead_ = true;
  ++steps_done_;
  ++steps_here_;
}

/// Everything about a step that differs from the step before: its rows and its constants.
void Trainer::load(const dataset::RawBatch& batch) {
  timers_.region("normalise");
  const std::int64_t step = steps_done_ + 1, width = model_.shape().width();
  kernels::AdamStep& constants = host_steps_.data()[step % kRing];
  constants = optimizer::adam_step(configuration_.optimizer, step, configuration_.run.steps,
                                   static_cast<std::uint64_t>(configuration_.run.seed));
  learning_rate_ = static_cast<double>(constants.learning_rate);
  device::copy(execution_, adam_step_.data(), &constants, sizeof constants, device::Direction::to_device);

  dataset::RawBatch here = batch;
  if (!batch.resident) {
    const auto bytes = [](const kernels::AnyMatrix& m) { return m.rows * m.stride * kernels::bytes_of(m.type); };
    const device::Upload::Blocks blocks =
        upload_.bring(execution_, {batch.inputs.data, batch.targets.data}, bytes(batch.inputs), bytes(batch.targets));
    here.inputs.data = blocks.first;
    here.targets.data = blocks.second;
  }
  forward_.load(here);
  kernels::normalise_rows(
      execution_, here.targets, normalisation_.target_mean.array(), normalisation_.target_scale.array(),
      {targets_.data(), kernels::Scalar::fp32, here.targets.rows, width, width}, forward_.not_finite());
  if (!batch.resident) upload_.consumed(execution_);
}

void Trainer::compute() {
  gradient_rows_.close();
  gradient_rows_.open();
  if (data_axis_.active()) data_axis_.start_weights(model_.decoder());  // of the last update, while this step encodes
  forward_.encode();
  if (data_axis_.active()) data_axis_.await_weights(forward_.idle());
  residual_and_loss();
  order_by_feature();  // while the last gradient rows travel
  await_gradient_rows();
  guard();
  clip();
  backward_and_update();
  timers_.region("bookkeeping");
  kernels::advance_clocks(execution_, hits(), forward_.layout().total, adam_step_.data(), model_.clocks());
}

const kernels::SparseActivations& Trainer::activations() const {
  return data_axis_.active() ? data_axis_.activations() : forward_.activations();
}

const kernels::FeatureHits& Trainer::hits() const { return data_axis_.active() ? data_axis_.hits() : forward_.hits(); }

void Trainer::residual_and_loss() {
  const Shape& shape = model_.shape();
  const std::int64_t width = shape.width();
  const kernels::AnyMatrix targets{targets_.data(), kernels::Scalar::fp32, forward_.layout().own.size(), width, width};
  const std::int64_t n = shape.n_layers;
  device::zero(execution_, step_sums_.data(), step_sums_.bytes());
  const std::int64_t d = shape.d_model;
  forward_.decode([&](const Forward::OwnPart& part) {
    timers_.region("loss");
    const std::int64_t first = part.layers.begin * d, columns = part.layers.size() * d, m = part.layers.size();
    const auto of_layers = [&](const device::Buffer<float>& all) {
      return kernels::Array<const float>{all.data() + first, columns};
    };
    kernels::residual_and_loss(
        execution_, part.partial, part.n_parts, targets.rows_from(part.begin, part.count).columns_from(first, columns),
        {model_.decoder_bias().weight.data + first, columns}, of_layers(normalisation_.centre),
        of_layers(normalisation_.standardise), m, gradient_factor(),
        row_gather_.own(forward_.layout(), gradient_rows(), part.block).rows_from(part.begin, part.count),
        {{loss_sums_.data(), m}, {loss_sums_.data() + n, m}, {loss_sums_.data() + 2 * n, m}}, loss_workspace_.array());
    for (std::int64_t sum = 0; sum < 3; ++sum)
      kernels::accumulate(execution_, {loss_sums_.data() + sum * n, m},
                          {step_sums_.data() + sum * n + part.layers.begin, m});
  });
  // Only now, and the last layers first: partial sums are waited for before any gradient row is.
  timers_.region("exchange");
  for (std::size_t block = forward_.lane().blocks.size(); block-- > 0;)
    row_gather_.send(forward_.layout(), gradient_rows(), block);
}

/// Of preset `weft`: the derivative of the mean squared error by a residual, per unit of residual.
float Trainer::gradient_factor() const {
  return static_cast<float>(
      2.0 / (static_cast<double>(forward_.layout().total) * static_cast<double>(model_.shape().d_model)));
}

kernels::AnyMatrix Trainer::all_gradient_rows() const {
  const std::int64_t width = model_.shape().width();
  return {gradient_rows_.data(), scalar_of(configuration_.precision), forward_.layout().total, width, width};
}

kernels::AnyMatrix Trainer::gradient_rows() const {
  const parallel::Range group = forward_.layout().group;
  return all_gradient_rows().rows_from(group.begin, group.size());
}

/// With a data axis, what the ranks of the others have selected is brought first.
void Trainer::order_by_feature() {
  if (data_axis_.active()) {
    timers_.region("exchange");
    data_axis_.gather_lists(forward_.activations(), forward_.layout().total);
    data_axis_.gather_rows(forward_.all_inputs());
    timers_.region("transpose");
    data_axis_.by_feature();
  } else {
    forward_.by_feature();
  }
  const std::int64_t n = model_.shape().n_layers;
  kernels::accumulate_layer_counts(execution_, hits().offsets, model_.owned().size(), {step_sums_.data() + 3 * n, n});
}

/// Those of the last layers, with which the backward pass begins; those before them are awaited there.
void Trainer::await_gradient_rows() {
  timers_.region("exchange");
  row_gather_.wait(data_axis_.active() ? 0 : forward_.lane().blocks.size() - 1, execution_);
  if (data_axis_.active()) data_axis_.gather_rows(all_gradient_rows());
}

kernels::LateRows Trainer::late_rows() {
  if (data_axis_.active() || forward_.lane().blocks.size() == 1) return {};
  return {forward_.lane().blocks.back().begin, [this] { row_gather_.wait(0, execution_); }};
}

/// A loss that is not finite comes from a residual that is not, or whose square is not: a gradient row shows it. Each
/// rank looks at its own tokens, so all must ask.
void Trainer::guard() {
  timers_.region("check");
  const parallel::Range own = forward_.layout().own;
  kernels::flag_beyond(execution_, gradient_rows().rows_from(own.begin, own.size()),
                       kLargestResidual * gradient_factor(), forward_.not_finite());
  world_.maximum({forward_.not_finite(), 1}, "flags");
  const std::int64_t skip_at_most =
      configuration_.run.nonfinite == NonFinite::skip ? configuration_.run.skip_at_most : 0;
  kernels::guard_step(execution_, forward_.not_finite(), skip_at_most, guard_.data(), adam_step_.data(),
                      outcomes_.data());
}

/// Reads what became of the steps up to `last`, waiting for them.
void Trainer::learn_outcomes(std::int64_t last) {
  for (; steps_known_ < last; ++steps_known_) {
    const std::int64_t step = steps_known_ + 1;
    const Pending& pending = pending_[step % kRing];
    pending.done.wait();
    const kernels::StepOutcome outcome = outcomes_.data()[step % kRing];
    if (outcome.withheld == 0) continue;
    const std::string what = fmt::format("the loss or its gradient is not finite at step {}, batch of {} tokens: {}",
                                         step, pending.batch.n_tokens, locate_(pending.batch));
    if (outcome.halted != 0) refuse(what, step);
    log::warning("{}: skipped", what);
  }
}

void Trainer::refuse(const std::string& what, std::int64_t step) const {
  if (configuration_.run.nonfinite == NonFinite::skip)
    throw collective_error(ExitCode::numeric,
                           "{}; run.skip_at_most = {} such steps have been skipped already; look at these rows, lower "
                           "optimizer.learning_rate, or raise run.skip_at_most",
                           what, configuration_.run.skip_at_most);
  throw collective_error(ExitCode::numeric,
                         "{} (parameters are those of step {}, unharmed); look at these rows, lower "
                         "optimizer.learning_rate, or pass such batches over with run.nonfinite = \"skip\"",
                         what, step - 1);
}

void Trainer::form_norm(bool rows_are_scaled) {
  const std::int64_t n = 2 * n_keys();
  double* const rows = squared_norm_.data() + n;
  double *const bias = rows + 1, *const all = rows + 2;
  kernels::total(execution_, {squared_norm_.data(), n}, {rows + 3, squared_norm_.size() - n - 3}, rows);
  kernels::join_norms(execution_, rows, rows_are_scaled, bias, adam_step_.data(), all);
  world_.sum(kernels::Array<double>{all, 1}, "norms");
  kernels::keep_norm(execution_, all, adam_step_.data(), gradient_norm_.data());
}

void Trainer::clip() {
  decoder_bias_gradient();
  const double bound = configuration_.optimizer.clip_norm;
  if (bound <= 0) return;
  if (configuration_.optimizer.clip_mode == optimizer::ClipMode::exact) {
    backward(nullptr);
    form_norm(false);
  }
  kernels::clip_to_norm(execution_, gradient_norm_.data(), bound, adam_step_.data());
}

/// Beside the backward pass, where there is such a place: every rank sums all rows, so this does not shrink with more
/// of them.
void Trainer::decoder_bias_gradient() {
  timers_.region("biases");
  const kernels::Execution& beside = forward_.lane().beside;
  rows_complete_.record(execution_);
  rows_complete_.hold_back(beside);
  kernels::column_sums(beside, all_gradient_rows(), decoder_bias_gradient_.array());
  biases_formed_.record(beside);
  if (configuration_.optimizer.clip_norm <= 0) return;
  biases_formed_.hold_back(execution_);
  double* const sum = squared_norm_.data() + 2 * n_keys() + 1;
  device::zero(execution_, sum, sizeof *sum);
  // Every rank has the whole bias: one of them counts it.
  if (grid_.world().rank() == 0)
    kernels::add_row_norms(
        execution_, {decoder_bias_gradient_.data(), 1, model_.shape().width(), model_.shape().width()}, {sum, 1});
}

void Trainer::backward(const kernels::AdamStep* step) {
  const bool norms = squared_norm_.size() > 0;
  const kernels::Array<double> decoder_norm =
      norms ? kernels::Array<double>{squared_norm_.data(), n_keys()} : kernels::Array<double>{};
  const kernels::Array<double> encoder_norm =
      norms ? kernels::Array<double>{squared_norm_.data() + n_keys(), n_keys()} : kernels::Array<double>{};
  // relu and both top-k rules pass the gradient where the activation is positive and nowhere else: dz = da on the
  // lists.
  const kernels::Array<float> gradient = activation_gradient_.array();
  const kernels::Array<std::byte> workspace = backward_workspace_.array();
  const bool some = n_keys() > 0;  // more ranks than features leave some without any
  timers_.region("decoder backward");
  if (some && step == nullptr)
    kernels::decode_backward_norm(execution_, activations(), hits(), all_gradient_rows(), model_.owned_decoder(),
                                  gradient, decoder_norm, workspace, late_rows());
  else if (some)
    kernels::decode_backward_update(execution_, activations(), hits(), all_gradient_rows(), model_.owned_decoder(),
                                    step, gradient, decoder_norm, workspace, late_rows());
  timers_.region("encoder backward");
  if (some && step == nullptr)
    kernels::encode_backward_norm(execution_, activations(), hits(), forward_.all_inputs(), gradient, encoder_norm,
                                  workspace);
  else if (some)
    kernels::encode_backward_update(execution_, activations(), hits(), forward_.all_inputs(), gradient,
                                    model_.owned_encoder(), model_.owned_encoder_bias(), step, encoder_norm, workspace);
  if (step == nullptr || !data_axis_.active()) return;
  timers_.region("exchange");
  data_axis_.gather_weights(model_.encoder());
  data_axis_.gather_biases();
}

void Trainer::backward_and_update() {
  backward(adam_step_.data());
  if (configuration_.optimizer.clip_norm > 0 && configuration_.optimizer.clip_mode == optimizer::ClipMode::previous)
    form_norm(true);  // of the clipped gradient, as the update saw it
  timers_.region("biases");
  biases_formed_.hold_back(execution_);
  kernels::adam_vector(execution_, model_.decoder_bias(), decoder_bias_gradient_.array(), adam_step_.data());
}

TrainingMetrics Trainer::metrics() {
  learn_outcomes(steps_done_);
  const std::int64_t n = model_.shape().n_layers;
  std::vector<double> sums(static_cast<std::size_t>(4 * n + 1));
  device::copy(execution_, sums.data(), step_sums_.data(), step_sums_.bytes(), device::Direction::to_host);
  kernels::count_at_least(execution_, model_.clocks(), configuration_.transcoder.dead_window, count_.data());
  sums.back() = static_cast<double>(read(execution_, count_.data()));
  std::vector<double> entries(static_cast<std::size_t>(grid_.world().size()));
  const double own_entries = std::accumulate(sums.begin() + 3 * n, sums.begin() + 4 * n, 0.0);
  grid_.world().all_gather(&own_entries, entries.data(), sizeof own_entries);
  grid_.world().sum(std::span<double>(sums));

  const Shape& shape = model_.shape();
  TrainingMetrics metrics;
  const auto [fewest, most] = std::minmax_element(entries.begin(), entries.end());
  metrics.entries_per_rank = {*fewest, mean(entries), *most};
  const double tokens = static_cast<double>(steps_here_ == 0 ? 1 : forward_.layout().total);
  for (std::size_t t = 0; t < static_cast<std::size_t>(n); ++t) {
    const auto at = [&](std::int64_t row) { return sums[static_cast<std::size_t>(row * n) + t]; };
    metrics.layer_loss.push_back(at(0) / (tokens * static_cast<double>(shape.d_model)));
    metrics.nmse_standardised.push_back(at(2) > 0 ? at(1) / at(2) : 0);
    metrics.l0.push_back(at(3) / tokens);
    metrics.loss += metrics.layer_loss.back();
  }
  metrics.dead_fraction = sums.back() / static_cast<double>(shape.n_layers * shape.n_features);
  metrics.gradient_norm = read(execution_, gradient_norm_.data());
  metrics.skipped = read(execution_, &guard_.data()->skipped);
  return metrics;
}

void Trainer::settle() {
  learn_outcomes(steps_done_);
  // The last update's decoder weights would go to all ranks with the next step.
  if (!data_axis_.active() || !std::exchange(decoder_is_ahead_, false)) return;
  data_axis_.ranks().mark(nullptr);  // no part of a step
  data_axis_.gather_weights(model_.decoder());
  data_axis_.ranks().mark(&forward_.idle());
}

Trainer::Traffics Trainer::traffic() const {
  Traffics all = replayed_;
  all.feature += forward_.lane().axis.exchanges();
  all.data += data_axis_.ranks().exchanges();
  all.data += data_axis_.beside().exchanges();
  all.others += forward_.selection().exchanges();
  all.others += world_.exchanges();
  return all;
}

parallel::Exchanges Trainer::exchanges() const {
  const Traffics each = traffic();
  parallel::Exchanges all = each.feature;
  all += each.data;
  all += each.others;
  return all;
}

double Trainer::step_exposed_seconds() const {
  return traffic_is_timed() ? step_traffic_.seconds : forward_.idle().seconds();
}

}  // namespace weft::transcoder
