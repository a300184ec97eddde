// SPDX-License-Identifier: Apache-2.0
//
// Operands in 8 bits of the products of a transformer (device.fp8): those of all blocks but the first and the last one,
// in the passes of a training step. The head, other blocks, and passes without a step (evaluation, generation) multiply
// as without this.
//
//   y = x Wᵀ          x, W: e4m3
//   dx = dy W         dy: e5m2
//   dW += dyᵀ x       from the transposed codes of dy and x
//
// Scales (kernels/gemm/fp8.hpp). That of W follows from W; it is coded once per step. Those of x and dy of a product
// follow from their largest magnitudes in the last step, over all micro-batches and ranks; a step without any before it
// codes each matrix with its own. The magnitudes are state of the run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/gemm/fp8.hpp"
#include "kernels/language/activation/mlp_activation.hpp"
#include "language_model/blocks/context.hpp"

namespace weft::language_model {

class CodedProducts {
 public:
  struct Buffers {
    Buffers() = default;
    Buffers(const TransformerSettings&, const ParameterList&, model::StepArena&);

    // n products in codes: those with Linear::index from `first` on. Nothing is taken if there are none.
    std::size_t first = 0, n = 0;
    kernels::Array<std::int32_t> kept;     ///< [2 n] largest magnitudes of x, then of dy, in the last step; 0: none
    kernels::Array<std::int32_t> largest;  ///< [3 n] of x, dy and W in the present step
    kernels::Array<float> scales;          ///< [3 n * kScaleStride] likewise
    kernels::Array<std::uint8_t> rows;     ///< codes of x or dy of the next product
    /// Transposed codes of dy, of the last products of sublayers and of the others: a sublayer forms both before their
    /// gradients are given.
    kernels::Array<std::uint8_t> last_gradient, other_gradient;
    kernels::Matrix<float> sums;           ///< [blocks of rows, outputs] of dy, for the gradients of biases
    kernels::Array<std::uint8_t> weights;  ///< codes and transposed codes, one product after the other
    std::vector<bool> is_last;             ///< [n]
    std::int64_t workspace = 0;            ///< bytes that a product needs
  };

  /// The context must outlive this object. Throws a collective Error(usage) if the GPU has no products in 8 bits.
  CodedProducts(const Context&, const Buffers&);

  bool has(const Linear& linear) const {
    return linear.index >= buffers_.first && linear.index < buffers_.first + buffers_.n;
  }
  bool any() const { return buffers_.n > 0; }
  /// Memory of the transposed codes of x of a product: [inputs, rows of a micro-batch], unchanged from `code_input`
  /// until its gradient is formed.
  void keep_input(const Linear&, kernels::Array<std::uint8_t> memory);

  /// Begins a step: forms the scales and codes the weights, which must all be there.
  void begin_step();
  /// Codes x [rows, inputs], for the next product and for the gradient of W.
  void code_input(const Linear&, kernels::AnyMatrix x);
  /// Computes y = x Wᵀ + b, with x of the last `code_input`. The bias is that of `weights`.
  void multiply(const Linear&, const kernels::LinearWeights& weights, kernels::AnyMatrix y,
                kernels::Array<std::byte> workspace);
  /// Codes dy [rows, outputs] and computes dx = dy W. Returns dy; with its sums if the product, which is not the last
  /// one of its sublayer, has a bias: valid until the next such call.
  OutputGradient propagate(const Linear&, kernels::AnyMatrix dy, kernels::AnyMatrix dx,
                           kernels::Array<std::byte> workspace);

  /// As `code_input` for the activation of `hidden`; activated: its memory, in which it is formed, or not.
  void code_activation(const Linear&, MlpActivation, kernels::AnyMatrix hidden, kernels::AnyMatrix activated);
  /// As `propagate` for the dy that comes back through the activation from its gradient [rows, D]. It is formed in the
  /// place of `hidden`, or not.
  OutputGradient propagate_activation(const Linear&, MlpActivation, kernels::AnyMatrix hidden,
                                      kernels::AnyMatrix gradient, kernels::AnyMatrix dx,
                                      kernels::Array<std::byte> workspace);
  /// Operands of dW, after `propagate`.
  model::CodedOperands operands(const Linear&, std::int64_t rows, kernels::Array<std::byte> workspace) const;

  /// Largest magnitudes of the present step on this rank, to become those of all ranks before `end_step`.
  kernels::Array<std::int32_t> largest() const { return {buffers_.largest.data, buffers_.kept.size}; }
  /// Ends a step: keeps its magnitudes, but for those that are not finite or 0, for the scales of the next one.
  void end_step();

  /// State of the run.
  kernels::Array<std::int32_t> state() const { return buffers_.kept; }
  void initialise();
  /// To be called when the state has been loaded. Waits.
  void state_loaded();
  /// True if scales follow from an earlier step. The step that makes it so is submitted before `step_submitted`.
  bool has_history() const { return has_history_; }
  void step_submitted() { has_history_ = any(); }

 private:
  enum class Operand : std::int64_t { input, gradient, weight };  // in the order of `scales`
  std::int64_t number(const Linear& linear) const { return static_cast<std::int64_t>(linear.index - buffers_.first); }
  std::int64_t place(const Linear& linear, Operand operand) const {
    return static_cast<std::int64_t>(operand) * static_cast<std::int64_t>(buffers_.n) + number(linear);
  }
  const float* scale(const Linear& linear, Operand operand) const {
    return scales_from(place(linear, operand), 1).data;
  }
  kernels::Array<float> scales_from(std::int64_t at, std::int64_t count) const {
    return {buffers_.scales.data + at * kernels::kScaleStride, count * kernels::kScaleStride};
  }
  void form_scale(const Linear&, Operand, kernels::CodeType, kernels::AnyMatrix);
  kernels::Coding input_coding(const Linear&, const kernels::AnyMatrix& x) const;
  kernels::Coding gradient_coding(const Linear&, const kernels::AnyMatrix& dy) const;
  OutputGradient multiply_gradient(const Linear&, const kernels::AnyMatrix& dy, const kernels::Coding&,
                                   kernels::AnyMatrix dx, kernels::Array<std::byte> workspace);
  bool is_last(const Linear& linear) const { return buffers_.is_last[static_cast<std::size_t>(number(linear))]; }
  std::uint8_t* gradient_memory(const Linear& linear) const {
    return (is_last(linear) ? buffers_.last_gradient : buffers_.other_gradient).data;
  }

  struct Kept {
    kernels::Array<std::uint8_t> input;                       // memory of the transposed codes
    kernels::Matrix<std::uint8_t> weight, weight_transposed;  // [outputs, inputs], [inputs, outputs]
  };
  Kept& kept(const Linear& linear) { return kept_[static_cast<std::size_t>(number(linear))]; }
  const Kept& kept(const Linear& linear) const { return kept_[static_cast<std::size_t>(number(linear))]; }

  const Context& context_;
  const Buffers buffers_;
  std::vector<Kept> kept_;
  bool has_history_ = false;
};

}  // namespace weft::language_model
