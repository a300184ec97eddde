// SPDX-License-Identifier: Apache-2.0
//
// Tied: a feature of layer s writes one vector to all layers from s on.
//
//   forward    the product per layer, then sums over the sources up to a target
//   backward   the gradient rows of the targets from a source on are summed before the products, in place
#pragma once

#include "transcoder/decoder/decoder.hpp"

namespace weft::transcoder {

class Tied final : public SparseDecoder {
 public:
  explicit Tied(const Shape& shape) : SparseDecoder(shape) {}

  void form(parallel::Range tokens, parallel::Range layers, kernels::AnyMatrix partial) const override;
  void prepare(const Lists&, kernels::AnyMatrix gradient_rows, device::Event& read) override;
};

}  // namespace weft::transcoder
