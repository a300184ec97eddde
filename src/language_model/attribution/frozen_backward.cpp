// SPDX-License-Identifier: Apache-2.0
#include "language_model/attribution/frozen_backward.hpp"

#include <algorithm>

#include "kernels/convert/convert_rows.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/language/decode/cached_attention.hpp"
#include "kernels/language/linear/linear.hpp"
#include "kernels/language/norm/frozen_norm.hpp"
#include "kernels/language/residual/residual.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Scalar;

namespace {

kernels::Matrix<float> floats(const AnyMatrix& matrix) {
  return {static_cast<float*>(matrix.data), matrix.rows, matrix.columns, matrix.stride};
}

}  // namespace

FrozenBackward::Buffers::Buffers(const ModelSettings& model, Scalar weight, std::int64_t tokens, std::int64_t targets,
                                 model::StepArena& arena) {
  arena.purpose("gradients of targets");
  const std::int64_t rows = tokens * targets, width = model.d_model, queries = model.heads * model.head_size(),
                     keys = model.kv_heads * model.head_size();
  outputs = arena.take<float>(rows * model.layers * width);
  stream = arena.take<float>(rows * width);
  input = arena.take<float>(rows * width);
  mixed = arena.take<float>(rows * queries);
  values = arena.take<float>(rows * keys);
  places = arena.take<std::int64_t>(targets);
  std::int64_t bytes = 0;
  for (const std::int64_t inner : {width, queries, keys})
    for (const std::int64_t columns : {width, queries, keys})
      for (const Scalar type : {weight, Scalar::fp32})
        bytes = std::max(bytes, kernels::gemm_workspace(Scalar::fp32, type, Scalar::fp32, rows, columns, inner));
  workspace = arena.take<std::byte>(bytes);
}

FrozenBackward::FrozenBackward(const FrozenText& text, const Layers& layers, std::int64_t tokens, std::int64_t targets,
                               std::span<const AnyMatrix> skip, const kernels::Execution& execution,
                               model::StepArena& arena)
    : text_(text),
      layers_(layers),
      skip_(skip.begin(), skip.end()),
      execution_(execution),
      buffers_(text.model(), layers.head().matrix.type, tokens, targets, arena) {}

AnyMatrix FrozenBackward::rows(const kernels::Array<float>& memory, std::int64_t columns) const {
  return {memory.data, Scalar::fp32, tokens_ * targets_, columns, columns};
}

AnyMatrix FrozenBackward::output_gradients(std::int64_t token) const {
  const std::int64_t width = text_.model().d_model;
  return rows(buffers_.outputs, text_.model().layers * width)
      .rows_from(token * targets_, targets_)
      .columns_from(0, blocks_ * width);
}

AnyMatrix FrozenBackward::embedding_gradients(std::int64_t token) const {
  return rows(buffers_.stream, text_.model().d_model).rows_from(token * targets_, targets_);
}

void FrozenBackward::run(const Targets& targets) {
  const bool parallel = text_.model().residual == Residual::parallel, final = targets.block == text_.model().layers;
  begin(targets);
  if (!parallel && !final) attention(targets.block);
  for (std::int64_t block = blocks_; block-- > 0;) {
    mlp(block);
    if (!parallel) skip(block);
    attention(block);
    if (parallel) skip(block);
  }
}

/// The gradient of the residual stream where the targets read it.
void FrozenBackward::begin(const Targets& targets) {
  blocks_ = targets.block;
  targets_ = targets.gradients.rows;
  tokens_ = 1 + *std::max_element(targets.tokens.begin(), targets.tokens.end());
  const std::int64_t width = text_.model().d_model;
  const AnyMatrix input = rows(buffers_.input, width), stream = rows(buffers_.stream, width);
  device::zero(execution_, input.data, input.rows * width * 4);
  device::zero(execution_, stream.data, stream.rows * width * 4);
  places_.clear();
  for (std::int64_t i = 0; i < targets_; ++i)
    places_.push_back(targets.tokens[static_cast<std::size_t>(i)] * targets_ + i);
  device::copy(execution_, buffers_.places.data, places_.data(), 8 * targets_, device::Direction::to_device);
  kernels::store_rows(execution_, targets.gradients, {buffers_.places.data, targets_}, input);
  const bool final = blocks_ == text_.model().layers;
  add_to_stream(final ? text_.final_norm() : text_.mlp(blocks_).input, input);
}

void FrozenBackward::mlp(std::int64_t block) {
  const std::int64_t width = text_.model().d_model;
  output_gradient(text_.mlp(block).output,
                  rows(buffers_.outputs, text_.model().layers * width).columns_from(block * width, width));
}

void FrozenBackward::skip(std::int64_t block) {
  if (skip_.empty()) return;
  const std::int64_t width = text_.model().d_model;
  const AnyMatrix input = rows(buffers_.input, width),
                  output = rows(buffers_.outputs, text_.model().layers * width).columns_from(block * width, width);
  kernels::linear_backward(execution_, {.matrix = skip_[static_cast<std::size_t>(block)]}, output, input,
                           buffers_.workspace);
  add_to_stream(text_.mlp(block).input, input);
}

void FrozenBackward::attention(std::int64_t block) {
  const ModelSettings& model = text_.model();
  const std::int64_t size = model.head_size(), queries = model.heads * size, keys = model.kv_heads * size,
                     group = model.heads / model.kv_heads;
  const AnyMatrix input = rows(buffers_.input, model.d_model), mixed = rows(buffers_.mixed, queries),
                  values = rows(buffers_.values, keys);
  const Linear &projection = layers_.product(block_name(block) + "attention/query"),
               &output = layers_.product(block_name(block) + "attention/output");
  AnyMatrix gradient = rows(buffers_.stream, model.d_model);
  if (const FrozenText::Norm norm = text_.attention(block).output; norm.exists()) {
    output_gradient(norm, input);
    gradient = input;
  }
  kernels::linear_backward(execution_, {.matrix = output.matrix, .transposed = output.transposed}, gradient, mixed,
                           buffers_.workspace);
  // One product per head and target: [keys, queries] [queries, size]. Heads that share values add up.
  for (std::int64_t head = 0; head < model.heads; ++head) {
    const auto of_target = [&](const AnyMatrix& all, std::int64_t number) -> AnyMatrix {
      return {static_cast<float*>(all.data) + number * size, Scalar::fp32, tokens_, size, targets_ * all.columns};
    };
    const AnyMatrix pattern = text_.pattern(block, head).rows_from(0, tokens_).columns_from(0, tokens_);
    kernels::gemm_batched(execution_, 1, pattern, kernels::Form::transposed, of_target(mixed, head),
                          kernels::Form::plain, head % group == 0 ? 0.0f : 1.0f, of_target(values, head / group),
                          {.count = targets_, .a = 0, .b = queries, .c = keys}, buffers_.workspace);
  }
  const AnyMatrix weights = projection.transposed ? projection.matrix.columns_from(queries + keys, keys)
                                                  : projection.matrix.rows_from(queries + keys, keys);
  kernels::linear_backward(execution_, {.matrix = weights, .transposed = projection.transposed}, values, input,
                           buffers_.workspace);
  add_to_stream(text_.attention(block).input, input);
}

void FrozenBackward::add_to_stream(const FrozenText::Norm& norm, AnyMatrix gradient) {
  const AnyMatrix stream = rows(buffers_.stream, text_.model().d_model);
  if (!norm.exists()) return kernels::add_rows(execution_, stream, gradient, stream);
  kernels::frozen_norm_backward(execution_, norm.weights, norm.inverse, targets_, floats(gradient), floats(stream),
                                floats(stream));
}

void FrozenBackward::output_gradient(const FrozenText::Norm& norm, AnyMatrix out) {
  const AnyMatrix stream = rows(buffers_.stream, text_.model().d_model);
  if (!norm.exists()) return kernels::copy_rows(execution_, stream, out);
  kernels::frozen_norm_backward(execution_, norm.weights, norm.inverse, targets_, floats(stream), {}, floats(out));
}

}  // namespace weft::language_model
