// SPDX-License-Identifier: Apache-2.0
//
// The head of a transformer: logits and losses from the hidden states. It is applied to chunks of rows, and the loss is
// part of the forward pass: of each chunk the logits, their gradient (in their place), the gradient of the hidden
// states and that of the head are formed before the next chunk. Logits of a whole micro-batch never exist.
#pragma once

#include <vector>

#include "kernels/language/head/cross_entropy.hpp"
#include "language_model/blocks/matrix_products.hpp"

namespace weft::language_model {

/// Rows of a chunk. By default equal chunks: products of a short last one are slow.
std::int64_t head_chunk(const TransformerSettings&);

class OutputHead {
 public:
  struct Buffers {
    Buffers(const TransformerSettings&, model::StepArena&);
    std::int64_t chunk = 0;     ///< rows
    kernels::AnyMatrix logits;  ///< [rows of a chunk or all, at least Linear::outputs of the head]
    kernels::Array<kernels::SoftmaxPart> softmax_parts;  ///< [rows of a chunk] of a part of the vocabulary
  };

  /// The references must outlive this object.
  OutputHead(const Context& context, Products& products, const Buffers& buffers)
      : context_(context), products_(products), buffers_(buffers) {}

  /// Forms the loss of each target, [rows], from the hidden states [rows, C].
  void losses(const Pass&, kernels::AnyMatrix hidden, kernels::Array<float> losses) const;
  /// Forms the losses, and in `gradient` the gradient of the hidden states; passes that of the head to the sink.
  void losses_and_gradient(const Pass&, kernels::AnyMatrix hidden, kernels::AnyMatrix gradient,
                           kernels::Array<float> losses) const;
  /// Logits of at most a chunk of rows, where the kernels run; not soft-capped. Valid until the next call.
  kernels::AnyMatrix logits(const Pass&, kernels::AnyMatrix hidden) const;
  /// Logits of the whole vocabulary: of a divided model gathered in `all` [rows, whole vocabulary], the same bits on
  /// all ranks; otherwise those of `logits`.
  kernels::AnyMatrix all_logits(const Pass&, kernels::AnyMatrix hidden, kernels::AnyMatrix all) const;

 private:
  const Linear& head() const { return context_.layers.head(); }
  kernels::CrossEntropy loss(const Tokens&) const;
  kernels::AnyMatrix logits_of(std::int64_t begin, std::int64_t count) const;
  template <class EachChunk>
  void each_chunk(const Pass&, kernels::AnyMatrix hidden, const EachChunk&) const;
  void truncate(const Tokens&, kernels::AnyMatrix logits, kernels::Array<const std::int32_t> targets) const;
  void cross_entropy(kernels::CrossEntropy, kernels::AnyMatrix logits, kernels::Array<const std::int32_t> targets,
                     kernels::Array<float> losses, bool gradient) const;

  const Context& context_;
  Products& products_;
  const Buffers buffers_;
};

}  // namespace weft::language_model
