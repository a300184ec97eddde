// SPDX-License-Identifier: Apache-2.0
//
// The gradient of the linear skip connection (forward/skip.hpp) and its update:
//
//   dW_t = sum over tokens n of g[n, t] x~[n, t]^T
//
// Every rank holds all W_t and forms the gradients over the tokens of the whole batch, whose inputs and gradient rows
// it has; so no gradient is exchanged and every rank makes the same update.
#pragma once

#include <cstdint>

#include "transcoder/parts/part.hpp"

namespace weft::transcoder {

class SkipGradient final : public Part {
 public:
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);
    kernels::Array<float> gradient;  ///< [L * d, d]: dW_t of all layers, one after the other
    kernels::Array<std::byte> workspace;
  };

  static bool wanted(const Configuration&, const Shape& shape) { return shape.skip; }

  explicit SkipGradient(PartContext&);

  /// Forms the gradient while the backward pass runs.
  void before_backward(BackwardPass&) override;
  void update(BackwardPass&) override;

 private:
  const Model& model_;
  const Forward& forward_;
  const GradientRows& gradient_rows_;
  run::Timers& timers_;
  const kernels::Execution execution_;
  const Buffers buffers_;
  const kernels::Matrix<float> gradient_;
};

}  // namespace weft::transcoder
