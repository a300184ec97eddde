// SPDX-License-Identifier: Apache-2.0
//
// The norms of a transformer: forward, backward, and the rows or sums of their gradients; and when products apply them.
#pragma once

#include <utility>

#include "kernels/language/norm/norm.hpp"
#include "language_model/blocks/context.hpp"

namespace weft::language_model {

class Norms {
 public:
  struct Buffers {
    Buffers(const TransformerSettings&, model::StepArena&);
    kernels::NormSums sums;  ///< of the last norm_backward, [blocks, C] each
    kernels::Array<kernels::Moments> moments;
  };

  /// The context must outlive this object.
  Norms(const Context& context, const Buffers& buffers) : context_(context), buffers_(buffers) {}

  /// Memory of Pass::moments if the pass can be a joined one, else empty. It is one of few rows, such as a step of
  /// generation, that forms nothing between a product and the residual stream and leaves nothing for a backward pass.
  kernels::Array<kernels::Moments> joining(const Pass&) const;
  void hook(NormHook hook) { hook_ = std::move(hook); }

  /// sum = x + addend, y = norm(sum); without addend, sum is not written.
  void forward(const NormLayer&, kernels::AnyMatrix x, kernels::AnyMatrix addend, kernels::AnyMatrix sum,
               kernels::AnyMatrix y, const kernels::NormStatistics&) const;
  /// dh = addend + the gradient of h from that of norm(h); hands the gradients of the parameters to the sink. dh may be
  /// dy. Sums of the result are valid until the next call.
  OutputGradient backward(const Pass&, const NormLayer&, kernels::AnyMatrix h, const kernels::NormStatistics&,
                          kernels::AnyMatrix dy, kernels::AnyMatrix addend, kernels::AnyMatrix dh) const;

 private:
  const Context& context_;
  const Buffers buffers_;
  NormHook hook_;
};

}  // namespace weft::language_model
