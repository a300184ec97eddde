// SPDX-License-Identifier: Apache-2.0
//
// Low-rank adapters of products (step/adapters.hpp). With s = alpha / rank and M the mask of dropout:
//
//   forward    h = s (M x) Aᵀ       y += h Bᵀ
//   backward   g = s dy B           dx += M (g A)      dA = gᵀ (M x)      dB = dyᵀ h
//
// The backward pass forms h again: one thin product costs less than keeping the rows of all blocks. The A of query, key
// and value, and of gate and up, have one input: forward they are one product.
//
// On the tensor axis A is divided by its inputs where W is, and B by its outputs. h is then a sum over the ranks, or g
// is: both are thin. All ranks add the same rows to y, or to dx.
#include "kernels/convert/convert_rows.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/embedding/embedding.hpp"
#include "kernels/language/residual/residual.hpp"
#include "language_model/blocks/matrix_products.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Form;
using model::GradientRows;

namespace {

/// y = alpha x Wᵀ + beta y.
void multiply_forward(const kernels::Execution& execution, float alpha, AnyMatrix x,
                      const kernels::LinearWeights& weights, float beta, AnyMatrix y,
                      kernels::Array<std::byte> workspace) {
  const auto multiply = weights.by_row ? kernels::gemm_by_row : kernels::gemm;
  multiply(execution, alpha, x, Form::plain, weights.matrix, weights.transposed ? Form::plain : Form::transposed, beta,
           y, workspace);
}
/// Form of W in dy W.
Form backward_form(const kernels::LinearWeights& weights) {
  return weights.transposed ? Form::transposed : Form::plain;
}

}  // namespace

/// Applies dropout in place; each product has a separate mask. Sites after those of the residual stream.
void Products::drop_adapter(const Pass& pass, const Linear& linear, AnyMatrix x) {
  const auto site =
      1 + 2 * static_cast<std::uint32_t>(context_.model().layers) + static_cast<std::uint32_t>(linear.index);
  kernels::dropout(context_.execution, {site, static_cast<float>(lora().dropout), pass.tokens.first_row}, pass.step, x);
}

/// Input of the adapters, M x: a copy, or x itself without dropout.
AnyMatrix Products::adapter_input(const Pass& pass, const Linear& linear, AnyMatrix x) {
  if (!pass.drops() || lora().dropout == 0) return x;
  const AnyMatrix input = buffers_.adapter_input.rows_from(0, x.rows).columns_from(0, x.columns);
  kernels::copy_rows(context_.execution, x, input);
  drop_adapter(pass, linear, input);
  return input;
}

/// Contiguous memory for h or g of all parts.
AnyMatrix Products::thin_rows(AnyMatrix memory, const Linear& linear, std::int64_t rows) const {
  const std::int64_t columns = context_.layers.adapters()[linear.adapter].a.outputs();
  return {memory.data, memory.type, rows, columns, columns};
}

/// Rows h of all parts.
AnyMatrix Products::adapter_rows(const Pass& pass, const Linear& linear, AnyMatrix input) {
  const kernels::LinearWeights a = forward_weights(pass, context_.layers.adapters()[linear.adapter].a);
  const AnyMatrix rows = thin_rows(buffers_.adapter_rows, linear, input.rows);
  multiply_forward(context_.execution, lora().scale(), input, a, 0, rows, buffers_.workspace);
  if (linear.transposed) {
    context_.start_sum(rows);
    context_.await_sum(rows);
  }
  context_.timers.phase("adapters");
  return rows;
}

/// Adds the outputs of the adapters of a product to its outputs.
void Products::adapt(const Pass& pass, const Linear& linear, AnyMatrix x, AnyMatrix y) {
  if (!adapts(linear)) return;
  context_.await_sum(y);
  context_.timers.phase("adapters");
  const AnyMatrix rows = adapter_rows(pass, linear, adapter_input(pass, linear, x));
  const std::int64_t rank = lora().rank;
  std::int64_t column = 0;
  for (const Adapter::Part& part : context_.layers.adapters()[linear.adapter].parts) {
    multiply_forward(context_.execution, 1, rows.columns_from(column, rank), forward_weights(pass, part.b), 1,
                     y.columns_from(part.first_output, part.b.outputs()), buffers_.workspace);
    column += rank;
  }
}

/// Adds the gradient through the adapters to dx, and hands the rows of their gradients to the sink. dx is neither x nor
/// dy.
void Products::adapt_backward(const Pass& pass, const Linear& linear, AnyMatrix x, AnyMatrix dy, AnyMatrix dx) {
  if (!adapts(linear)) return;
  context_.await_sum(dx);
  context_.timers.phase("adapters");
  const Adapter& adapter = context_.layers.adapters()[linear.adapter];
  const std::int64_t rank = lora().rank;
  const AnyMatrix input = adapter_input(pass, linear, x), rows = adapter_rows(pass, linear, input);
  const AnyMatrix gradient = thin_rows(buffers_.adapter_gradient, linear, x.rows);
  std::int64_t column = 0;
  for (const Adapter::Part& part : adapter.parts) {
    const kernels::LinearWeights b = weights_of(part.b);
    const AnyMatrix of_outputs = dy.columns_from(part.first_output, part.b.outputs());
    kernels::gemm(context_.execution, lora().scale(), of_outputs, Form::plain, b.matrix, backward_form(b), 0,
                  gradient.columns_from(column, rank), buffers_.workspace);
    pass.sink->take({.form = GradientRows::Form::product,
                     .parameter = part.b.weight,
                     .inputs = rows.columns_from(column, rank),
                     .gradients = of_outputs,
                     .examples = context_.examples.of(x.rows)});
    column += rank;
  }
  if (!linear.transposed) {
    context_.start_sum(gradient);
    context_.await_sum(gradient);
  }
  context_.timers.phase("adapters");
  // One by one: the gradients of matrices that all ranks have do not follow one another (AccumulatingSink).
  for (std::size_t i = 0; i < adapter.a.count; ++i)
    pass.sink->take({.form = GradientRows::Form::product,
                     .parameter = adapter.a.weight + i,
                     .inputs = input,
                     .gradients = gradient.columns_from(static_cast<std::int64_t>(i) * rank, rank),
                     .examples = context_.examples.of(x.rows),
                     .inputs_stay = pass.rows_stay && input.data == x.data});
  const kernels::LinearWeights a = weights_of(adapter.a);
  const bool drops = input.data != x.data;
  kernels::gemm(context_.execution, 1, gradient, Form::plain, a.matrix, backward_form(a), drops ? 0 : 1,
                drops ? input : dx, buffers_.workspace);
  if (!drops) return;
  drop_adapter(pass, linear, input);
  kernels::add_rows(context_.execution, dx, input, dx);
}

}  // namespace weft::language_model
