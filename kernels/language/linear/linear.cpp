// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/linear/linear.hpp"

#include "kernels/dispatch.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/language/linear/few_rows_cuda.hpp"
#include "kernels/language/linear/packed_rows_cuda.hpp"
#include "kernels/language/residual/residual.hpp"
#include "kernels/optimize/packed_weights.hpp"

namespace weft::kernels {
namespace {

/// Forms of W in x Wᵀ, and in dy W.
Form forward_form(const LinearWeights& weights) { return weights.transposed ? Form::plain : Form::transposed; }
Form backward_form(const LinearWeights& weights) { return weights.transposed ? Form::transposed : Form::plain; }

/// True if a product reads the codes of packed weights.
bool reads_codes(const Execution& execution, const LinearWeights& weights, const AnyMatrix& x, const AnyMatrix& y) {
  if constexpr (kCudaBuild)
    return execution.backend == Backend::cuda && weights.packed != nullptr && cuda::fits_packed_rows(weights, x, y);
  return false;
}

/// The same weights, unpacked if they were packed.
LinearWeights unpacked(const Execution& execution, LinearWeights weights) {
  if (weights.packed != nullptr) unpack_weights(execution, *weights.packed, 0, weights.matrix);
  weights.packed = nullptr;
  return weights;
}

/// Computes x Wᵀ with an epilogue that adds the bias. False if the dense library does not take it.
bool multiply_with_bias(const Execution& execution, const LinearWeights& weights, AnyMatrix x, AnyMatrix y,
                        Epilogue::Kind kind, Array<std::byte> workspace) {
  const Epilogue epilogue{.kind = kind, .bias = weights.rounded_bias.data};
  return execution.backend == Backend::cuda && epilogue.bias != nullptr &&
         gemm_with_epilogue(execution, x, Form::plain, weights.matrix, forward_form(weights), y, epilogue, workspace);
}

/// The rows of a product, where a norm of them has a kernel of its own.
AnyMatrix formed(const Execution& execution, const LinearInput& x) {
  if (x.norm == nullptr) return x.rows;
  norm_forward(execution, *x.norm, x.rows, {}, {}, x.normalised, x.statistics);
  return x.normalised;
}

/// Adds the residual rows, if there are any, to a product that has been formed.
void add_residual(const Execution& execution, const LinearOutput& y) {
  if (y.residual.data == nullptr) return;
  add_rows(execution, y.residual, y.rows, y.rows);
  form_moments(execution, y.rows, y.moments, y.scaled);
}

}  // namespace

void linear(const Execution& execution, const LinearWeights& weights, const LinearInput& x, const LinearOutput& y,
            Array<std::byte> workspace) {
  if (const AnyMatrix& rows = x.norm == nullptr ? x.rows : x.normalised;
      reads_codes(execution, weights, rows, y.rows)) {
    formed(execution, x);
    try_cuda<cuda::multiply_packed_rows>(execution, weights, rows, y.rows);
    return add_residual(execution, y);
  }
  if (weights.packed != nullptr) return linear(execution, unpacked(execution, weights), x, y, workspace);
  if (try_cuda<cuda::multiply_few_rows>(execution, weights, x, y)) return;
  if (y.residual.data != nullptr) {
    linear(execution, weights, x, y.rows, workspace);
    return add_residual(execution, y);
  }
  if (x.norm != nullptr) return linear(execution, weights, formed(execution, x), y, workspace);
  if (multiply_with_bias(execution, weights, x.rows, y.rows, Epilogue::Kind::bias, workspace)) return;
  const auto multiply = weights.by_row ? gemm_by_row : gemm;
  multiply(execution, 1, x.rows, Form::plain, weights.matrix, forward_form(weights), 0, y.rows, workspace);
  if (weights.bias.size > 0) add_bias(execution, y.rows, weights.bias);
}

bool joins_norms(const Execution& execution, Scalar type, std::int64_t rows, std::int64_t width) {
  return try_cuda<cuda::joins_norms>(execution, type, rows, width);
}

void linear_coded(const Execution& execution, const LinearWeights& weights, const CodedMatrix& weight,
                  const CodedMatrix& x, AnyMatrix y, Array<std::byte> workspace) {
  const Array<const bf16> bias = weights.rounded_bias;
  if (bias.data != nullptr && gemm_coded_with_bias(execution, x, weight, bias, y, workspace)) return;
  gemm_coded(execution, x, weight, 0, y, true, workspace);
  if (weights.bias.size > 0) add_bias(execution, y, weights.bias);
}

void linear_activated(const Execution& execution, const LinearWeights& weights, const LinearInput& x, AnyMatrix hidden,
                      MlpActivation activation, AnyMatrix activated, Array<std::byte> workspace) {
  if (reads_codes(execution, weights, x.norm == nullptr ? x.rows : x.normalised, hidden)) {
    linear(execution, weights, x, hidden, workspace);
    return mlp_activation(execution, activation, hidden, activated);
  }
  if (weights.packed != nullptr)
    return linear_activated(execution, unpacked(execution, weights), x, hidden, activation, activated, workspace);
  if (try_cuda<cuda::multiply_few_rows_activated>(execution, weights, x, activation, activated)) return;
  if (activation == MlpActivation::gelu && x.norm == nullptr &&
      multiply_with_bias(execution, weights, x.rows, activated, Epilogue::Kind::bias_gelu, workspace))
    return;
  linear(execution, weights, x, hidden, workspace);
  mlp_activation(execution, activation, hidden, activated);
}

void linear_backward(const Execution& execution, const LinearWeights& weights, AnyMatrix dy, AnyMatrix dx,
                     Array<std::byte> workspace) {
  gemm(execution, 1, dy, Form::plain, unpacked(execution, weights).matrix, backward_form(weights), 0, dx, workspace);
}

void linear_gelu_backward(const Execution& execution, const LinearWeights& weights, AnyMatrix dy, AnyMatrix hidden,
                          AnyMatrix dhidden, Array<std::byte> workspace) {
  if (weights.packed != nullptr)
    return linear_gelu_backward(execution, unpacked(execution, weights), dy, hidden, dhidden, workspace);
  const Epilogue epilogue{.kind = Epilogue::Kind::gelu_gradient, .hidden = hidden};
  if (execution.backend == Backend::cuda && gemm_with_epilogue(execution, dy, Form::plain, weights.matrix,
                                                               backward_form(weights), dhidden, epilogue, workspace))
    return;
  linear_backward(execution, weights, dy, dhidden, workspace);
  mlp_activation_backward(execution, MlpActivation::gelu, hidden, dhidden, dhidden);
}

}  // namespace weft::kernels
