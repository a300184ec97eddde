// SPDX-License-Identifier: Apache-2.0
//
// The embedding, where the residual stream begins: h = dropout(scale (E[token] + P[position])).
#pragma once

#include "language_model/blocks/context.hpp"

namespace weft::language_model {

class TokenEmbedding {
 public:
  /// The context must outlive this object.
  explicit TokenEmbedding(const Context& context) : context_(context) {}

  /// Forms h [rows, C].
  void forward(const Pass&, kernels::AnyMatrix h) const;
  /// Hands the rows of the gradients of both tables to the sink. dh is overwritten.
  void backward(const Pass&, kernels::AnyMatrix dh) const;

 private:
  void scale(kernels::AnyMatrix) const;

  const Context& context_;
};

}  // namespace weft::language_model
