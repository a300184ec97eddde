// SPDX-License-Identifier: Apache-2.0
#include "bench/transcoder/dense.hpp"

#include "base/error.hpp"
#include "kernels/convert/convert_rows.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/transcoder/dense/dense_products.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "kernels/transcoder/loss/loss.hpp"
#include "optimizer/schedule.hpp"

namespace weft::bench {
namespace {

using kernels::AnyMatrix;
using kernels::Matrix;
using kernels::Scalar;

const transcoder::Configuration& checked(const transcoder::Configuration& configuration, const parallel::Grid& grid) {
  if (grid.world().size() > 1 || configuration.precision != transcoder::Precision::fp32 ||
      configuration.optimizer.state != kernels::StorageType::fp32 || configuration.optimizer.clip_norm > 0 ||
      configuration.transcoder.skip != transcoder::Skip::none ||
      configuration.transcoder.decoder != transcoder::Decoder::cross_layer || configuration.transcoder.auxk > 0 ||
      configuration.transcoder.ranking != transcoder::Ranking::value || configuration.transcoder.k_initial > 0)
    throw collective_error(
        ExitCode::usage,
        "the dense formulation supports one process, fp32, cross-layer decoders, no skip connection, no "
        "clipping, no auxk, no k_initial and ranking = \"value\" only (it is a baseline for benchmarks); correct the "
        "overrides of the case");
  return configuration;
}

/// A selection with a tile as large as a layer: one product per source layer.
transcoder::SelectionSpec selection_of(const transcoder::Configuration& configuration, const transcoder::Shape& shape,
                                       const parallel::Grid& grid, const kernels::Execution& execution) {
  transcoder::SelectionSpec spec = transcoder::selection_spec(configuration, shape, grid.shape(),
                                                              configuration.data.batch_tokens, execution.backend);
  spec.tile_bytes = spec.max_tokens * shape.n_features * 4;
  return spec;
}

AnyMatrix any(Matrix<float> matrix) { return {matrix.data, Scalar::fp32, matrix.rows, matrix.columns, matrix.stride}; }

Matrix<const float> weights(const kernels::ParameterRows& rows) {
  return {static_cast<const float*>(rows.weight), rows.rows, rows.columns, rows.columns};
}

}  // namespace

run::Work dense_work_of(std::string_view phase, const transcoder::StepSizes& s) {
  const auto number = [](std::int64_t n) { return static_cast<double>(n); };
  const double n = number(s.group_tokens), width = number(s.shape.width()), layers = number(s.shape.n_layers),
               features = number(s.n_features), encoder = layers * features * number(s.shape.d_model),
               decoder = encoder * (layers + 1) / 2, products = n * layers * features, weight = 4, moments = 8;
  if (phase == "biases") return {(n * width + products) * 4, 0};
  if (phase == "scatter") return {products * 4 + s.entries * 8, 0};
  if (phase == "decode") return {(products + decoder + n * width) * 4, 2 * n * decoder};
  if (phase == "decoder backward") return {2 * (products + decoder + n * width) * 4, 4 * n * decoder};
  if (phase == "mask") return {products * 12, 0};
  if (phase == "encoder backward") return {(products + encoder + n * width) * 4, 2 * n * encoder};
  if (phase == "optimizer") return {(encoder + decoder) * (2 * (weight + moments) + 4), 0};
  return transcoder::work_of(phase, s);
}

run::PhaseBytes dense_phase_bytes(const transcoder::StepSizes& sizes) {
  run::PhaseBytes all;
  for (const char* phase : {"normalise", "encode", "select", "scatter", "decode", "loss", "biases", "mask",
                            "decoder backward", "encoder backward", "optimizer"})
    all.emplace_back(phase, dense_work_of(phase, sizes).bytes);
  return all;
}

DenseTrainer::DenseTrainer(const transcoder::Configuration& configuration, const transcoder::Shape& shape,
                           const dataset::Normalisation& normalisation, const dataset::Statistics& statistics,
                           const parallel::Grid& grid, const kernels::Execution& execution)
    : configuration_(checked(configuration, grid)),
      execution_(execution),
      model_(shape, configuration.optimizer.state, grid, execution, transcoder::Moments::held),
      normalisation_(normalisation, statistics, execution),
      arena_(execution, grid) {
  const transcoder::SelectionSpec selection = selection_of(configuration, shape, grid, execution);
  selection_ = transcoder::make_selector(selection, transcoder::SelectionBuffers(selection, arena_), grid, execution);
  const std::int64_t n = configuration.data.batch_tokens, width = shape.width(), n_layers = shape.n_layers;
  for (device::Buffer<float>* rows : {&inputs_, &targets_, &reconstruction_, &gradient_rows_})
    *rows = device::Buffer<float>(n * width);
  activations_ = device::Buffer<float>(n_layers * n * shape.n_features);
  activation_gradient_ = device::Buffer<float>(n * shape.n_features);
  for (const kernels::ParameterRows& encoder : model_.encoder())
    encoder_gradient_.emplace_back(encoder.rows * encoder.columns);
  for (const kernels::ParameterRows& decoder : model_.decoder())
    decoder_gradient_.emplace_back(decoder.rows * decoder.columns);
  encoder_bias_gradient_ = device::Buffer<float>(n_layers * shape.n_features);
  decoder_bias_gradient_ = device::Buffer<float>(width);
  loss_sums_ = device::Buffer<double>(3 * n_layers);
  loss_workspace_ = device::Buffer<std::byte>(kernels::loss_workspace(n, n_layers));
  const transcoder::SelectionSizes& sizes = selection_->sizes();
  encode_workspace_ = device::Buffer<std::byte>(
      kernels::encode_workspace(execution.backend, sizes.tile_tokens, sizes.tile_features, shape.d_model, Scalar::fp32,
                                kernels::StorageType::fp32, Scalar::fp32));
  flag_ = device::Buffer<std::int32_t>(1);
  model_.add_to(registry_);
}

Matrix<float> DenseTrainer::activations(std::int64_t layer) const {
  const std::int64_t n_features = model_.shape().n_features;
  return {activations_.data() + layer * configuration_.data.batch_tokens * n_features, n_tokens_, n_features,
          n_features};
}

void DenseTrainer::step(const dataset::RawBatch& batch) {
  n_tokens_ = batch.n_tokens;
  adam_step_ = optimizer::adam_step(configuration_.optimizer, steps_done_ + 1, configuration_.run.steps,
                                    static_cast<std::uint64_t>(configuration_.run.seed),
                                    kernels::loss_factor(n_tokens_, model_.shape().d_model));
  encode(batch);
  decode_and_loss(batch);
  backward();
  update();
  timers_.stop();
  ++steps_done_;
}

void DenseTrainer::encode(const dataset::RawBatch& batch) {
  const std::int64_t d = model_.shape().d_model, width = model_.shape().width();
  timers_.phase("normalise");
  device::zero(execution_, flag_.data(), flag_.bytes());
  const Matrix<float> x = inputs_.matrix(n_tokens_, width), y = targets_.matrix(n_tokens_, width);
  kernels::normalise_rows(execution_, batch.inputs, normalisation_.input_mean.array(),
                          normalisation_.input_scale.array(), any(x), flag_.data());
  kernels::normalise_rows(execution_, batch.targets, normalisation_.target_mean.array(),
                          normalisation_.target_scale.array(), any(y), flag_.data());
  std::vector<kernels::Array<const float>> bias;
  for (const kernels::ParameterVector& vector : model_.encoder_bias()) bias.push_back(vector.weight);
  timers_.phase("select");
  selection_->select(
      n_tokens_, bias, [&](const kernels::Execution&, const kernels::TileRange& tile, AnyMatrix product) {
        timers_.phase("encode");
        kernels::encode_tile(execution_,
                             any(x).rows_from(tile.token_begin, tile.token_count).columns_from(tile.layer * d, d),
                             model_.encoder()[static_cast<std::size_t>(tile.layer)], tile.feature_begin, product,
                             encode_workspace_.array());
        timers_.phase("select");
      });
  timers_.phase("scatter");
  for (std::int64_t s = 0; s < model_.shape().n_layers; ++s)
    kernels::scatter_activations(execution_, selection_->activations(), selection_->activations().value, s,
                                 activations(s));
}

void DenseTrainer::decode_and_loss(const dataset::RawBatch& batch) {
  const std::int64_t n = model_.shape().n_layers, width = model_.shape().width();
  timers_.phase("decode");
  std::vector<Matrix<const float>> active, decoder;
  for (std::int64_t s = 0; s < n; ++s) {
    active.push_back(activations(s));
    decoder.push_back(weights(model_.decoder()[static_cast<std::size_t>(s)]));
  }
  const Matrix<float> reconstruction = reconstruction_.matrix(n_tokens_, width);
  kernels::dense_decode(execution_, active, decoder, reconstruction);
  timers_.phase("loss");
  const double values = static_cast<double>(batch.n_tokens) * static_cast<double>(model_.shape().d_model);
  const kernels::LossSums sums{{loss_sums_.data(), n}, {loss_sums_.data() + n, n}, {loss_sums_.data() + 2 * n, n}};
  kernels::residual_and_loss(execution_, any(reconstruction), 1, any(targets_.matrix(n_tokens_, width)),
                             model_.decoder_bias().weight, normalisation_.centre.array(),
                             normalisation_.standardise.array(), n,
                             static_cast<float>(kernels::loss_factor(batch.n_tokens, model_.shape().d_model)),
                             any(gradient_rows_.matrix(n_tokens_, width)), sums, loss_workspace_.array());
  loss_ = 0;
  for (std::int64_t t = 0; t < n; ++t) loss_ += loss_sums_.data()[t] / values;
}

void DenseTrainer::backward() {
  const transcoder::Shape& shape = model_.shape();
  const Matrix<float> g = gradient_rows_.matrix(n_tokens_, shape.width());
  const Matrix<float> x = inputs_.matrix(n_tokens_, shape.width());
  const Matrix<float> gradient = activation_gradient_.matrix(n_tokens_, shape.n_features);
  timers_.phase("biases");
  kernels::column_sums(execution_, any(g), decoder_bias_gradient_.array());
  for (std::int64_t s = 0; s < shape.n_layers; ++s) {
    const std::size_t layer = static_cast<std::size_t>(s);
    timers_.phase("decoder backward");
    kernels::dense_decoder_gradient(execution_, activations(s), g,
                                    decoder_gradient_[layer].matrix(shape.n_features, model_.decoder()[layer].columns));
    kernels::dense_activation_gradient(execution_, weights(model_.decoder()[layer]), g, gradient);
    timers_.phase("mask");
    kernels::mask_gradient(execution_, activations(s), gradient);
    timers_.phase("encoder backward");
    kernels::dense_encoder_gradient(execution_, gradient,
                                    {x.data + s * shape.d_model, n_tokens_, shape.d_model, x.stride},
                                    encoder_gradient_[layer].matrix(shape.n_features, shape.d_model));
    timers_.phase("biases");
    kernels::column_sums(execution_, any(gradient),
                         {encoder_bias_gradient_.data() + s * shape.n_features, shape.n_features});
  }
}

void DenseTrainer::update() {
  const transcoder::Shape& shape = model_.shape();
  timers_.phase("optimizer");
  for (std::size_t s = 0; s < encoder_gradient_.size(); ++s) {
    const kernels::ParameterRows &encoder = model_.encoder()[s], &decoder = model_.decoder()[s];
    kernels::adam_rows(execution_, encoder, 0, encoder_gradient_[s].matrix(shape.n_features, encoder.columns),
                       &adam_step_);
    kernels::adam_rows(execution_, decoder, 0, decoder_gradient_[s].matrix(shape.n_features, decoder.columns),
                       &adam_step_);
    kernels::adam_vector(
        execution_, model_.encoder_bias()[s],
        {encoder_bias_gradient_.data() + static_cast<std::int64_t>(s) * shape.n_features, shape.n_features},
        &adam_step_);
  }
  kernels::adam_vector(execution_, model_.decoder_bias(), decoder_bias_gradient_.array(), &adam_step_);
}

}  // namespace weft::bench
