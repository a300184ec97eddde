// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/coded_products.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/activation/coded_activation.hpp"
#include "kernels/language/linear/linear.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::CodeType;
using kernels::Scalar;

CodedProducts::Buffers::Buffers(const TransformerSettings& settings, const ParameterList& list,
                                model::StepArena& arena) {
  std::int64_t block = 0, elements = 0, widest = 0, last_outputs = 0, other_outputs = 0;
  for (std::size_t i = 0; i < list.products.size(); ++i) {
    const Product& product = list.products[i];
    while (product.block() != block_name(block)) ++block;
    if (!settings.codes(block)) continue;
    if (n++ == 0) first = i;
    is_last.push_back(product.writes_residual);
    elements += product.elements();
    widest = std::max({widest, product.inputs, product.outputs()});
    std::int64_t& outputs = product.writes_residual ? last_outputs : other_outputs;
    outputs = std::max(outputs, product.outputs());
    const auto add = [&](Scalar type, std::int64_t rows, std::int64_t columns, std::int64_t inner) {
      workspace = std::max(workspace, kernels::gemm_coded_workspace(arena.backend(), type, rows, columns, inner));
    };
    add(settings.type, settings.rows, product.outputs(), product.inputs);
    add(settings.type, settings.rows, product.inputs, product.outputs());
    add(Scalar::fp32, product.outputs(), product.inputs, settings.rows);
  }
  if (n == 0) return;
  const auto count = static_cast<std::int64_t>(n);
  arena.purpose("operands in 8 bits");
  kept = arena.take<std::int32_t>(2 * count);
  largest = arena.take<std::int32_t>(3 * count);
  scales = arena.take<float>(3 * count * kernels::kScaleStride);
  rows = arena.take<std::uint8_t>(settings.rows * widest);
  last_gradient = arena.take<std::uint8_t>(settings.rows * last_outputs);
  other_gradient = arena.take<std::uint8_t>(settings.rows * other_outputs);
  if (settings.architecture.model.has_biases()) {
    const std::int64_t blocks = (settings.rows + kernels::kCodeRows - 1) / kernels::kCodeRows;
    sums = {arena.take<float>(blocks * other_outputs).data, blocks, other_outputs, other_outputs};
  }
  weights = arena.take<std::uint8_t>(2 * elements);
}

CodedProducts::CodedProducts(const Context& context, const Buffers& buffers) : context_(context), buffers_(buffers) {
  if (!any()) return;
  if (const std::string why = kernels::coded_obstacle(context.execution.backend); !why.empty())
    throw collective_error(ExitCode::usage, "device.fp8 is not available ({}); leave it out", why);
  std::uint8_t* codes = buffers.weights.data;
  for (const Linear& linear : context.layers.linears().subspan(buffers.first, buffers.n)) {
    const std::int64_t outputs = linear.outputs(), inputs = linear.inputs(), elements = outputs * inputs;
    kept_.push_back({.input = {},
                     .weight = {codes, outputs, inputs, inputs},
                     .weight_transposed = {codes + elements, inputs, outputs, outputs}});
    codes += 2 * elements;
  }
  initialise();
}

void CodedProducts::initialise() {
  device::zero(context_.execution, buffers_.kept);
  device::zero(context_.execution, buffers_.largest);
  has_history_ = false;
}

void CodedProducts::state_loaded() {
  std::vector<std::int32_t> values(static_cast<std::size_t>(buffers_.kept.size));
  device::copy(context_.execution, values.data(), buffers_.kept.data, 4 * std::ssize(values),
               device::Direction::to_host);
  kernels::fence(context_.execution);
  has_history_ = std::any_of(values.begin(), values.end(), [](std::int32_t value) { return value > 0; });
}

void CodedProducts::keep_input(const Linear& linear, kernels::Array<std::uint8_t> memory) {
  if (has(linear)) kept(linear).input = memory;
}

void CodedProducts::begin_step() {
  if (!any()) return;
  context_.timers.phase("codes");
  const auto n = static_cast<std::int64_t>(buffers_.n);
  const auto form = [&](const std::int32_t* largest, Operand operand, CodeType type) {
    kernels::form_scales(context_.execution, {largest, n}, type,
                         scales_from(static_cast<std::int64_t>(operand) * n, n));
  };
  if (has_history_) {
    form(buffers_.kept.data, Operand::input, CodeType::e4m3);
    form(buffers_.kept.data + n, Operand::gradient, CodeType::e5m2);
  }
  const kernels::Array<std::int32_t> largest{buffers_.largest.data + 2 * n, n};
  device::zero(context_.execution, largest);
  const std::span<const Linear> linears = context_.layers.linears().subspan(buffers_.first, buffers_.n);
  for (const Linear& linear : linears)
    kernels::largest_magnitude(context_.execution, linear.matrix, largest.data + number(linear));
  form(largest.data, Operand::weight, CodeType::e4m3);
  for (const Linear& linear : linears) {
    const Kept& codes = kept(linear);
    kernels::code_matrix(context_.execution, linear.matrix,
                         {.type = CodeType::e4m3,
                          .codes = linear.transposed ? codes.weight_transposed : codes.weight,
                          .transposed = linear.transposed ? codes.weight : codes.weight_transposed,
                          .scale = scale(linear, Operand::weight)});
  }
}

/// Without a step before it, the scale of a matrix is its own.
void CodedProducts::form_scale(const Linear& linear, Operand operand, CodeType type, AnyMatrix from) {
  if (has_history_) return;
  const std::int64_t at = place(linear, operand);
  kernels::largest_magnitude(context_.execution, from, buffers_.largest.data + at);
  kernels::form_scales(context_.execution, {buffers_.largest.data + at, 1}, type, scales_from(at, 1));
}

kernels::Coding CodedProducts::input_coding(const Linear& linear, const AnyMatrix& x) const {
  return {.type = CodeType::e4m3,
          .codes = {buffers_.rows.data, x.rows, x.columns, x.columns},
          .transposed = {kept(linear).input.data, x.columns, x.rows, x.rows},
          .scale = scale(linear, Operand::input),
          .largest = buffers_.largest.data + place(linear, Operand::input)};
}

kernels::Coding CodedProducts::gradient_coding(const Linear& linear, const AnyMatrix& dy) const {
  kernels::Coding coding{.type = CodeType::e5m2,
                         .codes = {buffers_.rows.data, dy.rows, dy.columns, dy.columns},
                         .transposed = {gradient_memory(linear), dy.columns, dy.rows, dy.rows},
                         .scale = scale(linear, Operand::gradient),
                         .largest = buffers_.largest.data + place(linear, Operand::gradient)};
  // The norm after the last product of a sublayer leaves the sums of its gradient, in a training step without dropout.
  if (linear.bias != kNoParameter && !is_last(linear))
    coding.sums = {buffers_.sums.data, (dy.rows + kernels::kCodeRows - 1) / kernels::kCodeRows, dy.columns, dy.columns};
  return coding;
}

void CodedProducts::code_input(const Linear& linear, AnyMatrix x) {
  context_.timers.phase("codes");
  form_scale(linear, Operand::input, CodeType::e4m3, x);
  kernels::code_matrix(context_.execution, x, input_coding(linear, x));
}

void CodedProducts::code_activation(const Linear& linear, MlpActivation activation, AnyMatrix hidden,
                                    AnyMatrix activated) {
  context_.timers.phase("activation");
  if (has_history_)
    return kernels::code_activation(context_.execution, activation, hidden, activated, input_coding(linear, activated));
  kernels::mlp_activation(context_.execution, activation, hidden, activated);
  code_input(linear, activated);
}

void CodedProducts::multiply(const Linear& linear, const kernels::LinearWeights& weights, AnyMatrix y,
                             kernels::Array<std::byte> workspace) {
  context_.timers.phase("products");
  const std::int64_t inputs = linear.inputs();
  kernels::linear_coded(
      context_.execution, weights, {kept(linear).weight, CodeType::e4m3, scale(linear, Operand::weight)},
      {{buffers_.rows.data, y.rows, inputs, inputs}, CodeType::e4m3, scale(linear, Operand::input)}, y, workspace);
}

OutputGradient CodedProducts::propagate(const Linear& linear, AnyMatrix dy, AnyMatrix dx,
                                        kernels::Array<std::byte> workspace) {
  context_.timers.phase("codes");
  form_scale(linear, Operand::gradient, CodeType::e5m2, dy);
  const kernels::Coding coding = gradient_coding(linear, dy);
  kernels::code_matrix(context_.execution, dy, coding);
  return multiply_gradient(linear, dy, coding, dx, workspace);
}

OutputGradient CodedProducts::propagate_activation(const Linear& linear, MlpActivation activation, AnyMatrix hidden,
                                                   AnyMatrix gradient, AnyMatrix dx,
                                                   kernels::Array<std::byte> workspace) {
  context_.timers.phase("activation");
  if (!has_history_) {
    kernels::mlp_activation_backward(context_.execution, activation, hidden, gradient, hidden);
    return propagate(linear, hidden, dx, workspace);
  }
  const kernels::Coding coding = gradient_coding(linear, hidden);
  kernels::code_activation_backward(context_.execution, activation, hidden, gradient, hidden, coding);
  return multiply_gradient(linear, hidden, coding, dx, workspace);
}

OutputGradient CodedProducts::multiply_gradient(const Linear& linear, const AnyMatrix& dy,
                                                const kernels::Coding& coding, AnyMatrix dx,
                                                kernels::Array<std::byte> workspace) {
  context_.timers.phase("products");
  kernels::gemm_coded(context_.execution, {coding.codes, CodeType::e5m2, coding.scale},
                      {kept(linear).weight_transposed, CodeType::e4m3, scale(linear, Operand::weight)}, 0, dx, false,
                      workspace);
  const kernels::Matrix<float>& sums = coding.sums;
  return {.rows = dy, .sums = {sums.data, Scalar::fp32, sums.rows, sums.columns, sums.stride}};
}

model::CodedOperands CodedProducts::operands(const Linear& linear, std::int64_t rows,
                                             kernels::Array<std::byte> workspace) const {
  return {
      .inputs = {{kept(linear).input.data, linear.inputs(), rows, rows}, CodeType::e4m3, scale(linear, Operand::input)},
      .gradients = {{gradient_memory(linear), linear.outputs(), rows, rows},
                    CodeType::e5m2,
                    scale(linear, Operand::gradient)},
      .workspace = workspace};
}

void CodedProducts::end_step() {
  if (any()) kernels::keep_largest(context_.execution, largest(), buffers_.kept);
}

}  // namespace weft::language_model
