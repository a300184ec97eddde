// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/linear/linear.hpp"

#include "base/error.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/language/linear/few_rows_cuda.hpp"
#include "kernels/language/residual/residual.hpp"

namespace weft::kernels {
namespace {

/// Of W in x Wᵀ, and of W in dy W.
Form forward_form(const LinearWeights& weights) { return weights.transposed ? Form::plain : Form::transposed; }
Form backward_form(const LinearWeights& weights) { return weights.transposed ? Form::transposed : Form::plain; }

}  // namespace

void linear(const Execution& execution, const LinearWeights& weights, AnyMatrix x, AnyMatrix y,
            Array<std::byte> workspace) {
  if constexpr (kCudaBuild)
    if (execution.backend == Backend::cuda && cuda::fits_few_rows(weights, x, y))
      return cuda::multiply_few_rows(execution, weights, x, y, {});
  const Epilogue epilogue{.kind = Epilogue::Kind::bias, .bias = weights.rounded_bias.data};
  if (execution.backend == Backend::cuda && epilogue.bias != nullptr &&
      gemm_with_epilogue(execution, x, Form::plain, weights.matrix, forward_form(weights), y, epilogue, workspace))
    return;
  gemm(execution, 1, x, Form::plain, weights.matrix, forward_form(weights), 0, y, workspace);
  if (weights.bias.size > 0) add_bias(execution, y, weights.bias);
}

void linear_coded(const Execution& execution, const LinearWeights& weights, const CodedRows& weight, const CodedRows& x,
                  AnyMatrix y, Array<std::byte> workspace) {
  const Array<const bf16> bias = weights.rounded_bias;
  if (bias.data != nullptr && gemm_coded_with_bias(execution, x, weight, bias, y, workspace)) return;
  gemm_coded(execution, x, weight, y, workspace);
  if (weights.bias.size > 0) add_bias(execution, y, weights.bias);
}

bool linear_activated(const Execution& execution, const LinearWeights& weights, AnyMatrix x, AnyMatrix y,
                      MlpActivation activation, AnyMatrix activated) {
  if constexpr (kCudaBuild) {
    if (execution.backend != Backend::cuda || is_gated(activation) || !cuda::fits_few_rows(weights, x, y) ||
        !cuda::fits_few_rows(weights, x, activated))
      return false;
    cuda::multiply_few_rows(execution, weights, x, y, {.activation = activation, .activated = activated});
    return true;
  }
  return false;
}

bool linear_gelu(const Execution& execution, const LinearWeights& weights, AnyMatrix x, AnyMatrix activated,
                 Array<std::byte> workspace) {
  const Epilogue epilogue{.kind = Epilogue::Kind::bias_gelu, .bias = weights.rounded_bias.data};
  return execution.backend == Backend::cuda && epilogue.bias != nullptr &&
         gemm_with_epilogue(execution, x, Form::plain, weights.matrix, forward_form(weights), activated, epilogue,
                            workspace);
}

bool joins_norms(const Execution& execution, const LinearWeights& weights, std::int64_t rows, Scalar type) {
  if constexpr (kCudaBuild) {
    const std::int64_t outputs = weights.transposed ? weights.matrix.columns : weights.matrix.rows,
                       inputs = weights.transposed ? weights.matrix.rows : weights.matrix.columns;
    return execution.backend == Backend::cuda &&
           cuda::fits_few_rows(weights, {nullptr, type, rows, inputs, inputs}, {nullptr, type, rows, outputs, outputs});
  }
  return false;
}

void linear_of_norm(const Execution& execution, const JoinedNorm& norm, Array<const Moments> moments, AnyMatrix x,
                    AnyMatrix y, std::optional<MlpActivation> activation, const CachedAhead& ahead) {
  if constexpr (kCudaBuild)
    if (execution.backend == Backend::cuda && cuda::fits_few_rows(norm.weights, x, y)) {
      AnyMatrix product = y;
      if (activation) product.data = nullptr;
      return cuda::multiply_few_rows(
          execution, norm.weights, x, product,
          {.norm = &norm, .norm_moments = moments, .activation = activation, .activated = y, .ahead = ahead});
    }
  throw Error(ExitCode::internal, "linear_of_norm: no kernel for these operands");
}

void linear_added(const Execution& execution, const LinearWeights& weights, AnyMatrix x, AnyMatrix residual,
                  AnyMatrix sum, Array<Moments> moments, const CachedAhead& ahead) {
  if constexpr (kCudaBuild)
    if (execution.backend == Backend::cuda && cuda::fits_few_rows(weights, x, sum) &&
        cuda::fits_few_rows(weights, x, residual))
      return cuda::multiply_few_rows(execution, weights, x, sum,
                                     {.residual = residual, .moments = moments, .ahead = ahead});
  throw Error(ExitCode::internal, "linear_added: no kernel for these operands");
}

void linear_backward(const Execution& execution, const LinearWeights& weights, AnyMatrix dy, AnyMatrix dx,
                     Array<std::byte> workspace) {
  gemm(execution, 1, dy, Form::plain, weights.matrix, backward_form(weights), 0, dx, workspace);
}

bool linear_gelu_backward(const Execution& execution, const LinearWeights& weights, AnyMatrix dy, AnyMatrix hidden,
                          AnyMatrix dhidden, Array<std::byte> workspace) {
  const Epilogue epilogue{.kind = Epilogue::Kind::gelu_gradient, .hidden = hidden};
  return execution.backend == Backend::cuda && gemm_with_epilogue(execution, dy, Form::plain, weights.matrix,
                                                                  backward_form(weights), dhidden, epilogue, workspace);
}

}  // namespace weft::kernels
