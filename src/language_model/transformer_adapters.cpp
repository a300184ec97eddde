// SPDX-License-Identifier: Apache-2.0
//
// Low-rank adapters of the products of a Transformer (adapters.hpp). With s = alpha / rank and M the mask of dropout:
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
#include "kernels/language/residual/residual.hpp"
#include "language_model/transformer.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Form;
using training::GradientRows;

namespace {

/// Form of W in x Wᵀ, or in dy W.
Form forward_form(const kernels::LinearWeights& weights) { return weights.transposed ? Form::plain : Form::transposed; }
Form backward_form(const kernels::LinearWeights& weights) {
  return weights.transposed ? Form::transposed : Form::plain;
}

}  // namespace

/// Applies dropout in place; each product has a separate mask. Sites after those of the residual stream.
void Transformer::drop_adapter(const Linear& linear, AnyMatrix x) {
  const auto site = 1 + 2 * static_cast<std::uint32_t>(settings().layers) + static_cast<std::uint32_t>(linear.index);
  kernels::dropout(execution_, {site, static_cast<float>(settings_.architecture.lora.dropout), first_row_}, step_, x);
}

/// Input of the adapters, M x: a copy, or x itself without dropout.
AnyMatrix Transformer::adapter_input(const Linear& linear, AnyMatrix x) {
  if (step_ == nullptr || settings_.architecture.lora.dropout == 0) return x;
  const AnyMatrix input = buffers_.adapter_input.rows_from(0, x.rows).columns_from(0, x.columns);
  kernels::copy_rows(execution_, x, input);
  drop_adapter(linear, input);
  return input;
}

/// Contiguous memory for h or g of all parts.
AnyMatrix Transformer::thin_rows(AnyMatrix memory, const Linear& linear, std::int64_t rows) const {
  const std::int64_t columns = model_.adapters()[linear.adapter].a.outputs();
  return {memory.data, memory.type, rows, columns, columns};
}

/// Rows h of all parts.
AnyMatrix Transformer::adapter_rows(const Linear& linear, AnyMatrix input) {
  const kernels::LinearWeights a = weights_of(model_.adapters()[linear.adapter].a);
  const AnyMatrix rows = thin_rows(buffers_.adapter_rows, linear, input.rows);
  kernels::gemm(execution_, settings_.architecture.lora.scale(), input, Form::plain, a.matrix, forward_form(a), 0, rows,
                buffers_.product_workspace);
  if (linear.transposed) {
    start_sum(rows);
    await_sum(rows);
  }
  timers_.phase("adapters");
  return rows;
}

/// Adds the outputs of the adapters of a product to its outputs.
void Transformer::adapt(const Linear& linear, AnyMatrix x, AnyMatrix y) {
  if (!adapts(linear)) return;
  await_sum(y);
  timers_.phase("adapters");
  const AnyMatrix rows = adapter_rows(linear, adapter_input(linear, x));
  const std::int64_t rank = settings_.architecture.lora.rank;
  std::int64_t column = 0;
  for (const Adapter::Part& part : model_.adapters()[linear.adapter].parts) {
    const kernels::LinearWeights b = weights_of(part.b);
    kernels::gemm(execution_, 1, rows.columns_from(column, rank), Form::plain, b.matrix, forward_form(b), 1,
                  y.columns_from(part.first_output, part.b.outputs()), buffers_.product_workspace);
    column += rank;
  }
}

/// Adds the gradient through the adapters to dx, and hands the rows of their gradients to the sink. dx is neither x nor
/// dy.
void Transformer::adapt_backward(const Linear& linear, AnyMatrix x, AnyMatrix dy, AnyMatrix dx,
                                 training::GradientSink& sink) {
  if (!adapts(linear)) return;
  await_sum(dx);
  timers_.phase("adapters");
  const Adapter& adapter = model_.adapters()[linear.adapter];
  const std::int64_t rank = settings_.architecture.lora.rank;
  const AnyMatrix input = adapter_input(linear, x), rows = adapter_rows(linear, input);
  const AnyMatrix gradient = thin_rows(buffers_.adapter_gradient, linear, x.rows);
  std::int64_t column = 0;
  for (const Adapter::Part& part : adapter.parts) {
    const kernels::LinearWeights b = weights_of(part.b);
    const AnyMatrix of_outputs = dy.columns_from(part.first_output, part.b.outputs());
    kernels::gemm(execution_, settings_.architecture.lora.scale(), of_outputs, Form::plain, b.matrix, backward_form(b),
                  0, gradient.columns_from(column, rank), buffers_.product_workspace);
    sink.take({.form = GradientRows::Form::product,
               .parameter = part.b.weight,
               .inputs = rows.columns_from(column, rank),
               .gradients = of_outputs});
    column += rank;
  }
  if (!linear.transposed) {
    start_sum(gradient);
    await_sum(gradient);
  }
  timers_.phase("adapters");
  // One by one: the gradients of matrices that all ranks have do not follow one another (AccumulatingSink).
  for (std::size_t i = 0; i < adapter.a.count; ++i)
    sink.take({.form = GradientRows::Form::product,
               .parameter = adapter.a.weight + i,
               .inputs = input,
               .gradients = gradient.columns_from(static_cast<std::int64_t>(i) * rank, rank)});
  const kernels::LinearWeights a = weights_of(adapter.a);
  const bool drops = input.data != x.data;
  kernels::gemm(execution_, 1, gradient, Form::plain, a.matrix, backward_form(a), drops ? 0 : 1, drops ? input : dx,
                buffers_.product_workspace);
  if (!drops) return;
  drop_adapter(linear, input);
  kernels::add_rows(execution_, dx, input, dx);
}

}  // namespace weft::language_model
