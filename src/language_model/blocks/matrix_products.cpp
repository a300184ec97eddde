// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/matrix_products.hpp"

#include <algorithm>
#include <map>
#include <string>

#include "base/error.hpp"
#include "device/memory.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/optimize/half_weights.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Scalar;
using model::GradientRows;

namespace {

/// Workspace of the products of a model, of its head and of its adapters.
std::int64_t product_workspace(const TransformerSettings& settings, const ParameterList& list, std::int64_t head_rows,
                               kernels::Backend backend) {
  const Architecture& a = settings.architecture;
  const Scalar type = settings.type;
  const auto weight_type = [&](const model::ParameterSpec& spec) {
    return type == Scalar::fp16 ? type
                                : model::planes_of(spec, settings.storage, backend, model::Moments::none).front().type;
  };
  // Matrices of the model are multiplied in the type of the embedding, those of adapters in theirs.
  const auto adapter = std::find_if(list.specs.begin(), list.specs.end(), is_adapter);
  const Scalar base = weight_type(list.specs.front()),
               of_adapters = adapter == list.specs.end() ? base : weight_type(*adapter);
  std::int64_t bytes = 0;
  const auto add_product = [&](Scalar weight, std::int64_t rows, std::int64_t outputs, std::int64_t inputs) {
    bytes = std::max({bytes, kernels::gemm_workspace(type, weight, type, rows, outputs, inputs),
                      kernels::gemm_workspace(type, weight, type, rows, inputs, outputs)});
  };
  const auto add = [&](std::int64_t rows, std::int64_t outputs, std::int64_t inputs) {
    add_product(of_adapters, rows, outputs, inputs);
  };
  add_product(base, head_rows, a.vocabulary, a.model.d_model);
  for (const Product& product : list.products) {
    add_product(base, settings.rows, product.outputs(), product.inputs);
    if (!settings.adapters) continue;
    for (const Outputs& part : product.parts) {
      if (!a.lora.adapts(part.name)) continue;
      for (std::int64_t parts = 1; parts <= kMostAdapters; ++parts)
        add(settings.rows, parts * a.lora.rank, product.inputs);
      add(settings.rows, part.width, a.lora.rank);
    }
  }
  return bytes;
}

/// Elements of all matrices that products read: of the head and all blocks, or the largest where they are gathered.
std::int64_t matrix_elements(const TransformerSettings& settings, const ParameterList& list) {
  const Architecture& a = settings.architecture;
  std::map<std::string, std::int64_t> of_block;
  for (const Product& product : list.products) {
    std::int64_t& elements = of_block[product.block()];
    elements += product.elements();
    for (const Outputs& part : product.parts)
      if (settings.adapters && a.lora.adapts(part.name)) elements += a.lora.rank * (part.width + product.inputs);
  }
  std::int64_t blocks = 0;
  for (const auto& [name, elements] : of_block)
    blocks = settings.gathers_weights ? std::max(blocks, elements) : blocks + elements;
  return aligned_columns(a.vocabulary) * a.model.d_model + blocks;
}

}  // namespace

Products::Buffers::Buffers(const TransformerSettings& settings, const ParameterList& list, std::int64_t head_rows,
                           model::StepArena& arena) {
  const LoraSettings& lora = settings.architecture.lora;
  const std::int64_t rows = settings.rows;
  const auto take = [&](std::int64_t columns) { return arena.take_matrix(settings.type, rows, columns); };
  std::int64_t widest = 0;
  for (const Product& product : list.products) widest = std::max(widest, product.inputs);
  if (lora.rank > 0 && settings.adapters) {
    arena.purpose("adapters");
    adapter_rows = take(kMostAdapters * lora.rank);
    if (settings.gradients) adapter_gradient = take(kMostAdapters * lora.rank);
    if (settings.gradients && lora.dropout > 0) adapter_input = take(widest);
  }
  arena.purpose("workspaces");
  std::int64_t bytes = product_workspace(settings, list, head_rows, arena.backend());
  coded = CodedProducts::Buffers(settings, list, arena);
  bytes = std::max(bytes, coded.workspace);
  arena.purpose("workspaces");
  workspace = arena.take<std::byte>(bytes);
  if (lora.packing() != kernels::Packing::none) {
    std::int64_t largest = 0;
    for (const Product& product : list.products) largest = std::max(largest, product.elements());
    arena.purpose("unpacked weights");
    unpacked_weights = arena.take<kernels::bf16>(largest);
    arena.purpose("workspaces");
  }
  half_weights = arena.take<kernels::half>(settings.type == Scalar::fp16 ? matrix_elements(settings, list) : 0);
  if (settings.joins_norms(arena.backend()) && settings.architecture.model.norm == Norm::layer)
    for (const Product& product : list.products)
      norm_terms.push_back(arena.take<float>(product.writes_residual ? 0 : 2 * aligned_columns(product.outputs())));
  if (!settings.rounds_biases(arena.backend())) return;
  std::int64_t biases = 0;
  for (const Product& product : list.products) biases += aligned_columns(product.outputs());
  rounded_biases = arena.take<kernels::bf16>(biases);
  bias_copies = arena.take<kernels::RoundedCopy>(std::ssize(list.products));
}

Products::Products(const Context& context, const Buffers& buffers)
    : context_(context), buffers_(buffers), coded_(context, buffers.coded) {
  if (context.settings.rounds_biases(context.execution.backend)) place_biases();
  if (context.settings.type == Scalar::fp16) place_half_weights();
}

void Products::place_biases() {
  rounded_biases_.resize(context_.layers.parameters().size());
  const device::HostBuffer<kernels::RoundedCopy> copies(buffers_.bias_copies.size);
  kernels::RoundedCopy* copy = copies.data();
  kernels::bf16* to = buffers_.rounded_biases.data;
  for (const Linear& linear : context_.layers.linears().first(context_.layers.n_block_products())) {
    const kernels::Array<const float> bias = linear.bias_values;
    *copy++ = {bias.data, to, bias.size};
    if (linear.bias != kNoParameter) rounded_biases_[linear.bias] = {to, bias.size};
    largest_bias_ = std::max(largest_bias_, bias.size);
    to += aligned_columns(bias.size);
  }
  device::copy(context_.execution, buffers_.bias_copies.data, copies.data(), copies.bytes(),
               device::Direction::to_device);
  kernels::fence(context_.execution);
}

void Products::place_half_weights() {
  // Rows beyond those of a parameter (row_multiple) are never written.
  device::zero(context_.execution, buffers_.half_weights);
  const Linear& head = context_.layers.head();
  const auto elements = [](const Linear& linear) { return linear.matrix.rows * linear.matrix.columns; };
  std::map<std::size_t, std::int64_t> end;  // of a unit, or of all
  for (const Linear& linear : context_.layers.linears()) {
    std::int64_t begin = 0;
    if (linear.index != head.index) {
      std::int64_t& place = end[context_.settings.gathers_weights ? unit_of(linear) : 0];
      begin = elements(head) + place;
      place += elements(linear);
    }
    half_weights_.push_back(
        {buffers_.half_weights.data + begin, linear.matrix.rows, linear.matrix.columns, linear.matrix.columns});
  }
}

void Products::form_half_weights(const Linear& linear) {
  kernels::half* to = half_weights_[linear.index].data;
  for (std::size_t part = 0; part < linear.count; ++part) {
    const kernels::ParameterRows& rows = context_.layers.parameters().matrix(linear.weight + part);
    kernels::weights_to_half(context_.execution, rows, {to, rows.rows, rows.columns, rows.columns});
    to += rows.rows * rows.columns;
  }
}

void Products::prepare_unit(std::size_t unit) {
  if (half_weights_.empty() || copies_at_once()) return;
  std::size_t& there = unit == unit_of(context_.layers.head()) ? half_head_ : half_block_;
  if (there == unit) return;
  there = unit;
  context_.timers.phase("products");
  for (const Linear& linear : context_.layers.linears())
    if (unit_of(linear) == unit) form_half_weights(linear);
}

void Products::prepare() {
  const std::span<const Linear> linears = context_.layers.linears();
  context_.timers.phase("products");
  if (copies_at_once())
    for (const Linear& linear : linears) form_half_weights(linear);
  half_head_ = half_block_ = kNoUnit;
  kernels::round_copies(context_.execution, buffers_.bias_copies, largest_bias_);
  has_norm_terms_ = false;
}

void Products::prepare_norms() {
  context_.timers.phase("products");
  for (const Linear& linear : context_.layers.linears().first(buffers_.norm_terms.size())) {
    if (!applies_norm(linear)) continue;
    const kernels::Array<float> terms = buffers_.norm_terms[linear.index];
    kernels::form_norm_terms(context_.execution, weights_of(linear), linear.norm->values,
                             {terms.data, linear.outputs()}, {terms.data + terms.size / 2, linear.outputs()});
  }
  has_norm_terms_ = true;
}

kernels::LinearWeights Products::weights_of(const Linear& linear) const {
  kernels::LinearWeights weights{.matrix = linear.matrix, .transposed = linear.transposed, .bias = linear.bias_values};
  // The products of all ranks with their parts of the inputs are added up: one rank adds the bias.
  if (linear.transposed && context_.settings.architecture.tensor_rank > 0) weights.bias = {};
  if (linear.index < half_weights_.size()) {
    const kernels::Matrix<kernels::half>& half = half_weights_[linear.index];
    weights.matrix = {half.data, Scalar::fp16, half.rows, half.columns, half.stride};
  }
  if (linear.is_packed()) {
    weights.packed = &linear.packed;
    weights.matrix.data = buffers_.unpacked_weights.data;
  }
  if (weights.bias.size > 0 && linear.bias < rounded_biases_.size())
    weights.rounded_bias = rounded_biases_[linear.bias];
  if (has_norm_terms_ && applies_norm(linear)) {
    const kernels::Array<float> terms = buffers_.norm_terms[linear.index];
    weights.norm_terms = {{terms.data, linear.outputs()}, {terms.data + terms.size / 2, linear.outputs()}};
  }
  return weights;
}

kernels::LinearWeights Products::forward_weights(const Pass& pass, const Linear& linear) const {
  kernels::LinearWeights weights = weights_of(linear);
  weights.by_row = pass.tokens.by_row && context_.settings.type == Scalar::fp32 && !context_.execution.tf32;
  return weights;
}

void Products::multiply(const Pass& pass, const Linear& linear, const kernels::LinearInput& x,
                        const kernels::LinearOutput& y) {
  if (is_coded(pass, linear)) return coded_.multiply(linear, weights_of(linear), y.rows, buffers_.workspace);
  context_.timers.phase("products");
  kernels::linear(context_.execution, forward_weights(pass, linear), x, y, buffers_.workspace);
  if (linear.transposed) context_.start_sum(y.rows);
  adapt(pass, linear, x.rows, y.rows);
}

void Products::activate(const Pass& pass, const Linear& linear, MlpActivation activation, AnyMatrix hidden,
                        AnyMatrix activated) {
  if (is_coded(pass, linear)) return coded_.code_activation(linear, activation, hidden, activated);
  context_.timers.phase("activation");
  kernels::mlp_activation(context_.execution, activation, hidden, activated);
}

void Products::multiply_activated(const Pass& pass, const Linear& linear, const Linear& next,
                                  const kernels::LinearInput& x, MlpActivation activation, AnyMatrix hidden,
                                  AnyMatrix activated) {
  context_.timers.phase("products");
  if (!pass.backward_follows && !adapts(linear))
    return kernels::linear_activated(context_.execution, forward_weights(pass, linear), x, hidden, activation,
                                     activated, buffers_.workspace);
  multiply(pass, linear, x, hidden);
  activate(pass, next, activation, hidden, activated);
}

OutputGradient Products::propagate(const Pass& pass, const Linear& linear, AnyMatrix x, AnyMatrix dy, AnyMatrix dx) {
  if (is_coded(pass, linear)) return coded_.propagate(linear, dy, dx, buffers_.workspace);
  context_.timers.phase("products");
  kernels::linear_backward(context_.execution, weights_of(linear), dy, dx, buffers_.workspace);
  if (!linear.transposed) context_.start_sum(dx);
  adapt_backward(pass, linear, x, dy, dx);
  return {.rows = dy};
}

AnyMatrix Products::propagate_activated(const Pass& pass, const Linear& linear, AnyMatrix activated, AnyMatrix dy,
                                        MlpActivation activation, AnyMatrix hidden, AnyMatrix gradient) {
  if (activation == MlpActivation::gelu && !adapts(linear)) {
    context_.timers.phase("products");
    kernels::linear_gelu_backward(context_.execution, weights_of(linear), dy, hidden, gradient, buffers_.workspace);
    return gradient;
  }
  propagate(pass, linear, activated, dy, gradient);
  context_.timers.phase("activation");
  kernels::mlp_activation_backward(context_.execution, activation, hidden, gradient, hidden);
  return hidden;
}

void Products::give_gradients(const Pass& pass, const Linear& linear, AnyMatrix x, const OutputGradient& dy,
                              std::int64_t first_row) const {
  context_.timers.phase("weight gradients");
  const std::int64_t first_example = context_.examples.number_of(first_row);
  const bool coded = is_coded(pass, linear);
  pass.sink->take({.form = GradientRows::Form::product,
                   .parameter = linear.weight,
                   .inputs = x,
                   .gradients = dy.rows,
                   .examples = context_.examples.of(dy.rows.rows),
                   .first_example = first_example,
                   .count = linear.count,
                   .inputs_stay = pass.rows_stay,
                   .gradients_stay = pass.rows_stay && dy.stays,
                   .coded = coded ? coded_.operands(linear, x.rows, buffers_.workspace) : model::CodedOperands{}});
  if (linear.bias == kNoParameter) return;
  const bool summed = dy.sums.data != nullptr;
  const AnyMatrix rows = summed ? dy.sums : dy.rows;
  pass.sink->take({.form = GradientRows::Form::column_sum,
                   .parameter = linear.bias,
                   .gradients = rows,
                   .examples = summed ? context_.examples.of(rows.rows, norm_blocks(context_.settings, 0).of_length())
                                      : context_.examples.of(rows.rows),
                   .first_example = first_example,
                   .count = linear.count});
}

}  // namespace weft::language_model
