// SPDX-License-Identifier: Apache-2.0
#include "transcoder/private/example_pass.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "kernels/convert/convert_rows.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/transcoder/loss/loss.hpp"
#include "kernels/transcoder/rows/dense_rows.hpp"
#include "kernels/transcoder/select/selection_rule.hpp"
#include "transcoder/private/records.hpp"

namespace weft::transcoder {

using kernels::AnyMatrix;
using kernels::Array;
using kernels::Matrix;
using kernels::Scalar;
using parallel::Range;

namespace {

AnyMatrix any_rows(Matrix<float> matrix) {
  return {matrix.data, Scalar::fp32, matrix.rows, matrix.columns, matrix.stride};
}

}  // namespace

ExamplePass::Buffers::Buffers(const Shape& shape, std::int64_t rows, model::StepArena& arena) {
  const std::int64_t width = shape.width(), d = shape.d_model, features = shape.n_features;
  const std::int64_t columns = std::max(d, shape.decoder_columns(0));
  arena.purpose("rows of examples");
  inputs = arena.take<float>(rows * width);
  targets = arena.take<float>(rows * width);
  activations = arena.take<float>(rows * shape.n_layers * features);
  reconstruction = arena.take<float>(rows * width);
  gradients = arena.take<float>(rows * width);
  activation_gradient = arena.take<float>(rows * features);
  preactivations = shape.threshold ? arena.take<float>(rows * shape.n_layers * features) : activations;
  if (shape.threshold) threshold_gradient = arena.take<float>(rows * features);
  if (shape.threshold) bounds = arena.take<float>(features);
  weights = arena.take<float>(features * columns);
  loss_sums = arena.take<double>(3 * shape.n_layers);
  flag = arena.take<std::int32_t>(1);
  loss_workspace = arena.take<std::byte>(kernels::loss_workspace(rows, shape.n_layers));
  const auto product = [](std::int64_t n, std::int64_t m, std::int64_t inner) {
    return kernels::gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::fp32, n, m, inner);
  };
  product_workspace = arena.take<std::byte>(
      std::max({product(rows, features, d), product(rows, columns, features), product(rows, features, columns)}));
}

ExamplePass::ExamplePass(const Configuration& configuration, const Model& model,
                         const NormalisationOnDevice& normalisation, const kernels::Execution& execution,
                         model::StepArena& arena)
    : configuration_(configuration),
      model_(model),
      normalisation_(normalisation),
      execution_(execution),
      buffers_(model.shape(), private_micro_rows(configuration), arena) {}

void ExamplePass::load(AnyMatrix inputs, AnyMatrix targets) {
  const Range rows{0, inputs.rows};
  kernels::normalise_rows(execution_, inputs, normalisation_.input_mean.array(), normalisation_.input_scale.array(),
                          wide(buffers_.inputs, rows), buffers_.flag.data);
  kernels::normalise_rows(execution_, targets, normalisation_.target_mean.array(), normalisation_.target_scale.array(),
                          wide(buffers_.targets, rows), buffers_.flag.data);
}

void ExamplePass::run(Range rows, const kernels::Examples& examples, std::int64_t step, model::GradientSink& sink) {
  encode(rows, step);
  decode(rows);
  backward(rows, examples, step, sink);
  sink.end_micro_batch();
}

AnyMatrix ExamplePass::wide(const Array<float>& all, Range rows) const {
  const std::int64_t width = model_.shape().width();
  return {all.data + rows.begin * width, Scalar::fp32, rows.size(), width, width};
}

Matrix<float> ExamplePass::of_layer(const Array<float>& all, std::int64_t layer, Range rows) const {
  const std::int64_t features = model_.shape().n_features, stride = model_.shape().n_layers * features;
  return {all.data + rows.begin * stride + layer * features, rows.size(), features, stride};
}

AnyMatrix ExamplePass::weights_of(const kernels::ParameterRows& rows) {
  const Matrix<float> weights{buffers_.weights.data, rows.rows, rows.columns, rows.columns};
  kernels::weights_to_float(execution_, rows, 0, weights);
  return any_rows(weights);
}

kernels::JumpRule ExamplePass::jump_rule_at(std::int64_t step) const {
  const ModelSettings& settings = configuration_.transcoder;
  kernels::JumpRule rule = jump_rule(settings);
  if (settings.bandwidth_initial > 0)
    rule.bandwidth =
        kernels::Ramp{rule.bandwidth, 1, settings.bandwidth_end * static_cast<double>(configuration_.run.steps),
                      static_cast<float>(settings.bandwidth_initial)}
            .at(static_cast<std::uint64_t>(step));
  return rule;
}

void ExamplePass::encode(Range rows, std::int64_t step) {
  const std::int64_t n = model_.shape().n_layers, d = model_.shape().d_model;
  for (std::int64_t s = 0; s < n; ++s) {
    const auto layer = static_cast<std::size_t>(s);
    const Matrix<float> z = of_layer(buffers_.preactivations, s, rows);
    kernels::gemm(execution_, 1, wide(buffers_.inputs, rows).columns_from(s * d, d), kernels::Form::plain,
                  weights_of(model_.encoder()[layer]), kernels::Form::transposed, 0, any_rows(z),
                  buffers_.product_workspace);
    kernels::add_to_rows(execution_, model_.encoder_bias()[layer].weight, z);
    activate(s, rows, step);
  }
}

void ExamplePass::activate(std::int64_t layer, Range rows, std::int64_t step) {
  const ModelSettings& settings = configuration_.transcoder;
  const std::int64_t n = model_.shape().n_layers;
  const Matrix<float> z = of_layer(buffers_.preactivations, layer, rows),
                      a = of_layer(buffers_.activations, layer, rows);
  if (kernels::activation_keeps_k(settings.activation)) {
    const double k = k_at(settings, step, configuration_.run.steps);
    if (settings.scope == Scope::layer) return kernels::keep_largest(execution_, kernels::selection_budget(k, 1, 1), a);
    // The sum over all layers needs the last layer.
    if (layer + 1 == n)
      kernels::keep_largest(execution_, kernels::selection_budget(k, n, 1),
                            {of_layer(buffers_.activations, 0, rows).data, rows.size(), a.stride, a.stride});
    return;
  }
  Array<float> bounds;
  if (model_.shape().threshold) {
    bounds = buffers_.bounds;
    kernels::jump_bounds(execution_, jump_rule(settings),
                         model_.owned_thresholds()[static_cast<std::size_t>(layer)].weight, bounds);
  }
  kernels::keep_above(execution_, z, bounds, a);
}

void ExamplePass::decode(Range rows) {
  const Shape& shape = model_.shape();
  const AnyMatrix y = wide(buffers_.reconstruction, rows);
  device::zero(execution_, y.data, 4 * y.rows * y.columns);
  for (std::int64_t s = 0; s < shape.n_layers; ++s)
    kernels::gemm(execution_, 1, any_rows(of_layer(buffers_.activations, s, rows)), kernels::Form::plain,
                  weights_of(model_.decoder()[static_cast<std::size_t>(s)]), kernels::Form::plain, 1,
                  y.columns_from(s * shape.d_model, shape.decoder_columns(s)), buffers_.product_workspace);
  const std::int64_t n = shape.n_layers;
  double* const sums = buffers_.loss_sums.data;
  const double divisor = error_divisor(configuration_.transcoder, record_rows(configuration_), n, shape.d_model);
  kernels::residual_and_loss(execution_, y, 1, wide(buffers_.targets, rows), model_.decoder_bias().weight,
                             normalisation_.centre.array(), normalisation_.standardise.array(), n,
                             static_cast<float>(2 / divisor), wide(buffers_.gradients, rows),
                             {{sums, n}, {sums + n, n}, {sums + 2 * n, n}}, buffers_.loss_workspace);
}

void ExamplePass::backward(Range rows, const kernels::Examples& examples, std::int64_t step,
                           model::GradientSink& sink) {
  using Form = model::GradientRows::Form;
  const Shape& shape = model_.shape();
  const model::Parameters& parameters = model_.parameters();
  const std::int64_t d = shape.d_model, features = shape.n_features;
  const AnyMatrix g = wide(buffers_.gradients, rows);
  const auto take = [&](Form form, const std::string& name, AnyMatrix inputs, AnyMatrix gradients) {
    sink.take({.form = form,
               .parameter = parameters.index(name),
               .inputs = inputs,
               .gradients = gradients,
               .examples = examples});
  };
  take(Form::column_sum, "decoder_bias", {}, g);
  for (std::int64_t s = shape.n_layers; s-- > 0;) {
    const auto layer = static_cast<std::size_t>(s);
    const Matrix<float> a = of_layer(buffers_.activations, s, rows);
    const Matrix<float> dz{buffers_.activation_gradient.data, rows.size(), features, features};
    const AnyMatrix of_targets = g.columns_from(s * d, shape.decoder_columns(s));
    take(Form::product, fmt::format("decoder_{}/weight", s), of_targets, any_rows(a));
    kernels::gemm(execution_, 1, of_targets, kernels::Form::plain, weights_of(model_.decoder()[layer]),
                  kernels::Form::transposed, 0, any_rows(dz), buffers_.product_workspace);
    if (shape.threshold) {
      const Matrix<float> by_threshold{buffers_.threshold_gradient.data, rows.size(), features, features};
      kernels::jump_rows(execution_, jump_rule_at(step), of_layer(buffers_.preactivations, s, rows),
                         model_.owned_thresholds()[layer].weight, dz, by_threshold);
      take(Form::column_sum, fmt::format("encoder_{}/threshold", s), {}, any_rows(by_threshold));
    } else {
      kernels::mask_inactive(execution_, a, dz);
    }
    take(Form::column_sum, fmt::format("encoder_{}/bias", s), {}, any_rows(dz));
    take(Form::product, fmt::format("encoder_{}/weight", s), wide(buffers_.inputs, rows).columns_from(s * d, d),
         any_rows(dz));
  }
}

}  // namespace weft::transcoder
