// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/model_norms.hpp"

#include <algorithm>

#include "kernels/language/linear/linear.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using model::GradientRows;

namespace {

/// Sums of the blocks of `rows` rows.
AnyMatrix sums_of(const kernels::Matrix<float>& sums, const kernels::NormBlocks& blocks, std::int64_t rows) {
  return {sums.data, kernels::Scalar::fp32, blocks.count(rows), sums.columns, sums.stride};
}

}  // namespace

Norms::Buffers::Buffers(const TransformerSettings& settings, model::StepArena& arena) {
  const std::int64_t width = settings.architecture.model.d_model;
  if (settings.joins_norms(arena.backend())) {
    arena.purpose("activations");
    moments =
        arena.take<kernels::Moments>(std::min(settings.rows, kernels::kMostFewRows) * kernels::moment_groups(width));
  }
  if (!settings.gradients) return;
  arena.purpose("backward pass");
  const std::int64_t blocks = settings.examples ? norm_blocks(settings, settings.rows).count(settings.rows)
                                                : kernels::NormBlocks::most(settings.rows);
  for (kernels::Matrix<float>* matrix : {&sums.weight, &sums.bias, &sums.input})
    *matrix = {arena.take<float>(blocks * width).data, blocks, width, width};
}

kernels::Array<kernels::Moments> Norms::joining(const Pass& pass) const {
  const TransformerSettings& settings = context_.settings;
  const ModelSettings& model = context_.model();
  const std::int64_t rows = pass.tokens.rows();
  if (hook_ || pass.backward_follows || context_.drops(pass) || !settings.joins_norms(context_.execution.backend) ||
      !kernels::joins_norms(context_.execution, settings.type, rows, model.d_model))
    return {};
  return {buffers_.moments.data, rows * kernels::moment_groups(model.d_model)};
}

void Norms::forward(const NormLayer& norm, AnyMatrix x, AnyMatrix addend, AnyMatrix sum, AnyMatrix y,
                    const kernels::NormStatistics& statistics) const {
  context_.timers.phase("norms");
  if (hook_) return hook_(norm.values, x, addend, sum, y, statistics);
  kernels::norm_forward(context_.execution, norm.values, x, addend, sum, y, statistics);
}

OutputGradient Norms::backward(const Pass& pass, const NormLayer& norm, AnyMatrix h,
                               const kernels::NormStatistics& statistics, AnyMatrix dy, AnyMatrix addend,
                               AnyMatrix dh) const {
  run::Timers& timers = context_.timers;
  const std::span<const model::ParameterSpec> specs = context_.layers.parameters().specs();
  const bool frozen = specs[norm.weight].frozen && (norm.bias == kNoParameter || specs[norm.bias].frozen);
  if (frozen || !pass.sink->takes_sums()) {
    if (!frozen) {
      timers.phase("weight gradients");
      pass.sink->take({.form = GradientRows::Form::column_product,
                       .parameter = norm.weight,
                       .inputs = h,
                       .gradients = dy,
                       .examples = context_.examples.of(h.rows),
                       .row_shift = statistics.mean,
                       .row_scale = statistics.inverse});
      if (norm.bias != kNoParameter)
        pass.sink->take({.form = GradientRows::Form::column_sum,
                         .parameter = norm.bias,
                         .gradients = dy,
                         .examples = context_.examples.of(h.rows)});
    }
    timers.phase("norms");
    kernels::norm_backward(context_.execution, norm.values, h, statistics, dy, addend, dh, {});
    return {.rows = dh};
  }
  timers.phase("norms");
  kernels::NormSums sums = buffers_.sums;
  sums.blocks = norm_blocks(context_.settings, h.rows);
  if (norm.bias == kNoParameter) sums.bias = {};
  if (!context_.model().has_biases()) sums.input = {};
  kernels::norm_backward(context_.execution, norm.values, h, statistics, dy, addend, dh, sums);
  const auto give = [&](std::size_t parameter, const kernels::Matrix<float>& values) {
    if (parameter == kNoParameter) return;
    const AnyMatrix rows = sums_of(values, sums.blocks, h.rows);
    pass.sink->take({.form = GradientRows::Form::column_sum,
                     .parameter = parameter,
                     .gradients = rows,
                     .examples = context_.examples.of(rows.rows, sums.blocks.of_length())});
  };
  give(norm.weight, sums.weight);
  give(norm.bias, sums.bias);
  return {.rows = dh, .sums = sums_of(sums.input, sums.blocks, h.rows)};
}

}  // namespace weft::language_model
