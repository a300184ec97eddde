// SPDX-License-Identifier: Apache-2.0
#include "transcoder/trainer.hpp"

#include <cmath>
#include <numeric>

#include "base/error.hpp"
#include "base/log.hpp"
#include "kernels/convert/convert.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/encode/encode.hpp"
#include "kernels/loss/loss.hpp"
#include "kernels/metrics/metrics.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/runtime.hpp"
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
      gather_(grid.feature_axis(), execution,
              parallel::largest_part(configuration.data.batch_tokens, grid.shape().data) * shape.width() *
                  kernels::bytes_of(scalar_of(configuration.precision))),
      exchange_(model_, grid, execution) {
  const std::int64_t group = parallel::largest_part(configuration.data.batch_tokens, grid.shape().data);
  const std::int64_t own = parallel::largest_part(group, grid.shape().feature),
                     n_keys = shape.n_layers * model_.n_local();
  targets_ = device::Buffer<float>(own * shape.width());
  gradient_rows_ =
      device::Buffer<std::byte>(group * shape.width() * kernels::bytes_of(scalar_of(configuration.precision)));
  activation_gradient_ = device::Buffer<float>(forward_.selection().sizes().capacity);
  if (configuration.optimizer.clip_norm > 0) squared_norm_ = device::Buffer<double>(2 * n_keys + 2 * n_keys / 4096 + 2);
  encoder_bias_gradient_ = device::Buffer<float>(exchange_.active() ? n_keys : 0);
  decoder_bias_gradient_ = device::Buffer<float>(shape.width());
  loss_sums_ = device::Buffer<double>(3 * shape.n_layers);
  loss_workspace_ = device::Buffer<std::byte>(kernels::loss_workspace(own, shape.n_layers));
  step_sums_ = device::Buffer<double>(4 * shape.n_layers);
  adam_step_ = device::Buffer<kernels::AdamStep>(1);
  flag_ = device::Buffer<std::int32_t>(1);
  count_ = device::Buffer<std::int64_t>(1);
  previous_norm_ = device::HostBuffer<double>(1);
  skipped_ = device::HostBuffer<std::int64_t>(1);
  previous_norm_.data()[0] = 0;
  skipped_.data()[0] = 0;
  device::zero(execution, step_sums_.data(), step_sums_.bytes());

  const int world_rank = grid.world().rank();
  model_.add_to(registry_, world_rank);
  const auto replicated = [&](const std::string& name, kernels::Scalar type, std::int64_t size, void* data) {
    registry_.add({.name = name,
                   .type = type,
                   .shape = {size},
                   .held = {0, size},
                   .owned = {0, world_rank == 0 ? size : 0},
                   .data = data,
                   .on_device = false});
  };
  const std::span<std::uint32_t> thresholds = forward_.selection().controller_state();
  if (!thresholds.empty())
    replicated("selection/threshold", kernels::Scalar::u32, static_cast<std::int64_t>(thresholds.size()),
               thresholds.data());
  replicated("optimizer/previous_gradient_norm", kernels::Scalar::fp64, 1, previous_norm_.data());
  replicated("run/skipped_steps", kernels::Scalar::i64, 1, skipped_.data());
}

void Trainer::initialise() { model_.initialise(static_cast<std::uint64_t>(configuration_.run.seed)); }

void Trainer::step(const dataset::RawBatch& batch) {
  host_step_ = optimizer::adam_step(configuration_.optimizer, steps_done_ + 1, configuration_.run.steps,
                                    static_cast<std::uint64_t>(configuration_.run.seed));
  forward_.encode(batch);
  forward_.by_feature();
  residual_and_loss(batch);
  gather_gradient_rows();
  if (update_is_safe(batch)) {
    clip();
    backward_and_update();
    timers_.region("bookkeeping");
    kernels::advance_clocks(execution_, forward_.hits(), batch.n_tokens, model_.clocks());
  }
  timers_.stop();
  ++steps_done_;
}

void Trainer::residual_and_loss(const dataset::RawBatch& batch) {
  timers_.region("normalise");
  const Shape& shape = model_.shape();
  const std::int64_t width = shape.width(), own_begin = forward_.layout().own.begin;
  device::zero(execution_, flag_.data(), flag_.bytes());
  const kernels::AnyMatrix targets{targets_.data(), kernels::Scalar::fp32, batch.targets.rows, width, width};
  kernels::normalise_rows(execution_, batch.targets, normalisation_.target_mean.array(),
                          normalisation_.target_scale.array(), targets, flag_.data());
  const float gradient_factor =
      static_cast<float>(2.0 / (static_cast<double>(batch.n_tokens) * static_cast<double>(shape.d_model)));
  const std::int64_t n = shape.n_layers;
  const kernels::LossSums sums{{loss_sums_.data(), n}, {loss_sums_.data() + n, n}, {loss_sums_.data() + 2 * n, n}};
  device::zero(execution_, step_sums_.data(), step_sums_.bytes());
  kernels::accumulate_layer_counts(execution_, forward_.hits().offsets, model_.n_local(),
                                   {step_sums_.data() + 3 * n, n});
  step_tokens_ = batch.n_tokens;
  forward_.decode([&](const Forward::OwnPart& part) {
    timers_.region("loss");
    kernels::residual_and_loss(
        execution_, part.partial, part.n_parts, targets.rows_from(part.begin, part.count), model_.decoder_bias().weight,
        normalisation_.centre.array(), normalisation_.standardise.array(), n, gradient_factor,
        gradient_rows().rows_from(own_begin + part.begin, part.count), sums, loss_workspace_.array());
    kernels::accumulate(execution_, loss_sums_.array(), {step_sums_.data(), 3 * n});
  });
}

kernels::AnyMatrix Trainer::gradient_rows() const {
  const std::int64_t width = model_.shape().width();
  return {gradient_rows_.data(), scalar_of(configuration_.precision), forward_.layout().group.size(), width, width};
}

void Trainer::gather_gradient_rows() {
  timers_.region("exchange");
  std::vector<std::int64_t> bytes;
  const std::int64_t row = model_.shape().width() * kernels::bytes_of(scalar_of(configuration_.precision));
  for (const parallel::Range& slice : forward_.layout().own_of_rank) bytes.push_back(slice.size() * row);
  gather_.all_gather(gradient_rows_.data(), bytes);
}

bool Trainer::update_is_safe(const dataset::RawBatch& batch) {
  timers_.region("check");
  // A loss that is not finite comes from a residual that is not, which is a gradient row; and all ranks of a feature
  // group hold the same rows, so they agree without a word. Ranks of the data axis hold other rows and must ask.
  device::zero(execution_, flag_.data(), flag_.bytes());
  kernels::flag_nonfinite(execution_, gradient_rows(), flag_.data());
  std::int64_t bad = read(execution_, flag_.data()) != 0 || !forward_.inputs_finite();
  if (exchange_.active()) grid_.world().maximum({&bad, 1});
  if (bad == 0) return true;
  const std::string what = fmt::format("the loss or its gradient is not finite at step {}, batch of {} tokens: {}",
                                       steps_done_ + 1, batch.n_tokens, locate_(batch));
  if (configuration_.run.nonfinite == NonFinite::stop)
    throw collective_error(ExitCode::numeric,
                           "{} (parameters are those of step {}, unharmed); look at these rows, lower "
                           "optimizer.learning_rate, or pass such batches over with run.nonfinite = \"skip\"",
                           what, steps_done_);
  if (++skipped_.data()[0] > configuration_.run.skip_at_most)
    throw collective_error(ExitCode::numeric, "{}; run.skip_at_most = {} such steps have been skipped already", what,
                           configuration_.run.skip_at_most);
  log::warning("{}: skipped", what);
  return false;
}

double Trainer::global_norm() {
  const std::int64_t n = 2 * model_.shape().n_layers * model_.n_local();
  double* const sum = squared_norm_.data() + n;
  kernels::total(execution_, {squared_norm_.data(), n}, {sum + 1, squared_norm_.size() - n - 1}, sum);
  double squared = read(execution_, sum);
  if (grid_.world().rank() == 0) squared += decoder_bias_squared_norm_;
  grid_.world().sum({&squared, 1});
  return std::sqrt(squared);
}

void Trainer::clip() {
  const double bound = configuration_.optimizer.clip_norm;
  decoder_bias_gradient();
  if (bound > 0 && configuration_.optimizer.clip_mode == optimizer::ClipMode::exact) {
    backward(nullptr);
    previous_norm_.data()[0] = global_norm();
  }
  const double norm = previous_norm_.data()[0];
  host_step_.gradient_scale = bound > 0 && norm > bound ? static_cast<float>(bound / norm) : 1.0f;
  device::copy(execution_, adam_step_.data(), &host_step_, sizeof host_step_, device::Direction::to_device);
}

void Trainer::decoder_bias_gradient() {
  timers_.region("biases");
  kernels::column_sums(execution_, gradient_rows(), decoder_bias_gradient_.array());
  exchange_.sum(decoder_bias_gradient_.array());
  if (configuration_.optimizer.clip_norm <= 0) return;
  double* const sum = squared_norm_.data() + 2 * model_.shape().n_layers * model_.n_local();
  device::zero(execution_, sum, sizeof *sum);
  kernels::add_row_norms(execution_, {decoder_bias_gradient_.data(), 1, model_.shape().width(), model_.shape().width()},
                         {sum, 1});
  decoder_bias_squared_norm_ = read(execution_, sum);
}

void Trainer::backward(const kernels::AdamStep* step) {
  const std::int64_t n = model_.shape().n_layers * model_.n_local();
  const bool norms = squared_norm_.size() > 0;
  const kernels::Array<double> decoder_norm =
      norms ? kernels::Array<double>{squared_norm_.data(), n} : kernels::Array<double>{};
  const kernels::Array<double> encoder_norm =
      norms ? kernels::Array<double>{squared_norm_.data() + n, n} : kernels::Array<double>{};
  const kernels::SparseActivations& activations = forward_.activations();
  const kernels::FeatureHits& hits = forward_.hits();
  // relu and both top-k rules pass the gradient where the activation is positive and nowhere else: dz = da on the
  // lists.
  const kernels::Array<float> gradient = activation_gradient_.array();
  timers_.region("decoder backward");
  if (exchange_.active()) {
    kernels::decode_backward_norm(execution_, activations, hits, gradient_rows(), model_.decoder(), gradient, {});
    exchange_.decoder(activations, hits, gradient_rows(), {step, decoder_norm});
    timers_.region("encoder backward");
    exchange_.encoder(activations, hits, forward_.inputs(), gradient, encoder_bias_gradient_.array(),
                      {step, encoder_norm});
    if (step != nullptr)
      kernels::adam_vector(execution_, model_.all_encoder_biases(), encoder_bias_gradient_.array(), step);
  } else if (step == nullptr) {
    kernels::decode_backward_norm(execution_, activations, hits, gradient_rows(), model_.decoder(), gradient,
                                  decoder_norm);
    timers_.region("encoder backward");
    kernels::encode_backward_norm(execution_, activations, hits, forward_.inputs(), gradient, encoder_norm);
  } else {
    kernels::decode_backward_update(execution_, activations, hits, gradient_rows(), model_.decoder(), step, gradient,
                                    decoder_norm);
    timers_.region("encoder backward");
    kernels::encode_backward_update(execution_, activations, hits, forward_.inputs(), gradient, model_.encoder(),
                                    model_.encoder_bias(), step, encoder_norm);
  }
}

void Trainer::backward_and_update() {
  backward(adam_step_.data());
  if (configuration_.optimizer.clip_norm > 0 && configuration_.optimizer.clip_mode == optimizer::ClipMode::previous) {
    // Fused kernels measured the clipped gradient; buckets of the data axis the unclipped one.
    const double scale = exchange_.active() ? 1.0 : static_cast<double>(host_step_.gradient_scale);
    decoder_bias_squared_norm_ *= scale * scale;
    previous_norm_.data()[0] = global_norm() / scale;
  }
  timers_.region("biases");
  kernels::adam_vector(execution_, model_.decoder_bias(), decoder_bias_gradient_.array(), adam_step_.data());
}

TrainingMetrics Trainer::metrics() {
  settle();
  const std::int64_t n = model_.shape().n_layers;
  std::vector<double> sums(static_cast<std::size_t>(4 * n + 1));
  device::copy(execution_, sums.data(), step_sums_.data(), step_sums_.bytes(), device::Direction::to_host);
  kernels::count_at_least(execution_, model_.clocks(), configuration_.transcoder.dead_window, count_.data());
  // Every rank of the data axis holds the same features: one of them counts.
  sums.back() = grid_.data_index() == 0 ? static_cast<double>(read(execution_, count_.data())) : 0.0;
  grid_.world().sum(std::span<double>(sums));

  const Shape& shape = model_.shape();
  TrainingMetrics metrics;
  const double tokens = static_cast<double>(std::max<std::int64_t>(1, step_tokens_));
  for (std::size_t t = 0; t < static_cast<std::size_t>(n); ++t) {
    const auto at = [&](std::int64_t row) { return sums[static_cast<std::size_t>(row * n) + t]; };
    metrics.layer_loss.push_back(at(0) / (tokens * static_cast<double>(shape.d_model)));
    metrics.nmse_standardised.push_back(at(2) > 0 ? at(1) / at(2) : 0);
    metrics.l0.push_back(at(3) / tokens);
    metrics.loss += metrics.layer_loss.back();
  }
  metrics.dead_fraction = sums.back() / static_cast<double>(shape.n_layers * shape.n_features);
  metrics.gradient_norm = previous_norm_.data()[0];
  metrics.skipped = skipped_.data()[0];
  return metrics;
}

void Trainer::settle() {
  if (grid_.shape().data == 1) return;
  // A feature has fired when it fired on any rank of the data axis: the youngest clock is right.
  std::vector<std::int64_t> clocks(static_cast<std::size_t>(model_.clocks().size));
  const std::int64_t bytes = model_.clocks().size * 8;
  device::copy(execution_, clocks.data(), model_.clocks().data, bytes, device::Direction::to_host);
  kernels::fence(execution_);
  grid_.data_axis().minimum(std::span<std::int64_t>(clocks));
  device::copy(execution_, model_.clocks().data, clocks.data(), bytes, device::Direction::to_device);
  kernels::fence(execution_);
}

parallel::Traffic Trainer::feature_traffic() const {
  const parallel::Traffic &a = forward_.traffic(), &b = gather_.traffic();
  return {a.bytes_sent + b.bytes_sent, a.seconds + b.seconds, a.calls + b.calls};
}

}  // namespace weft::transcoder
