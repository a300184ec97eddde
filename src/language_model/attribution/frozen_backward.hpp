// SPDX-License-Identifier: Apache-2.0
//
// Gradients through a frozen text, of many targets at once: a target is a linear function of the input of one MLP, or
// of the hidden states before the head, at one token. With h the residual stream, g its gradient, block by block from
// the last one on, and n the backward pass of a norm with frozen denominators (kernels/language/norm/frozen_norm.hpp):
//
//   final norm   g  = n(dx)                     dx: gradient of the hidden states
//   MLP          G  = n_post(g)                 gradient of its output: features and errors read it; nothing passes
//                g += n(W_skipᵀ G)              only with a linear skip connection of the transcoder
//   attention    dv = Pᵀ (W_Oᵀ n_post(g))       per head: the patterns P are constants
//                g += n(W_Vᵀ dv)
//   embedding    E  = g
//
// A target at the MLP of block l begins with g = n(dx) before that MLP. Norms that a model does not have are left out;
// with parallel sublayers both read the norm of h before the block, and both are given the g after it.
//
// Rows of all matrices are ordered by token, then by target. Tokens after the last one of the targets have no rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "language_model/attribution/frozen_text.hpp"

namespace weft::language_model {

class FrozenBackward {
 public:
  struct Buffers {
    /// weight: the type in which products read the matrices of the model.
    Buffers(const ModelSettings&, kernels::Scalar weight, std::int64_t tokens, std::int64_t targets, model::StepArena&);
    kernels::Array<float> outputs;                       ///< G, [rows, L * C]
    kernels::Array<float> stream, input, mixed, values;  ///< [rows, C], [rows, C], [rows, H d], [rows, H_kv d]
    kernels::Array<std::int64_t> places;                 ///< rows of the targets
    kernels::Array<std::byte> workspace;
  };

  /// For texts of up to `tokens` tokens and `targets` targets at a time. skip: [C, C] by block (output, input), on raw
  /// activations; empty: none. References must outlive the object.
  FrozenBackward(const FrozenText&, const Layers&, std::int64_t tokens, std::int64_t targets,
                 std::span<const kernels::AnyMatrix> skip, const kernels::Execution&, model::StepArena&);

  struct Targets {
    std::int64_t block = 0;                ///< of the MLP; L: the hidden states
    std::span<const std::int64_t> tokens;  ///< of each target
    kernels::AnyMatrix gradients;          ///< dx, [targets, C]
  };
  void run(const Targets&);

  /// G of all blocks below that of the targets, [targets, block * C].
  kernels::AnyMatrix output_gradients(std::int64_t token) const;
  /// E, [targets, C].
  kernels::AnyMatrix embedding_gradients(std::int64_t token) const;

 private:
  kernels::AnyMatrix rows(const kernels::Array<float>& memory, std::int64_t columns) const;
  void begin(const Targets&);
  void mlp(std::int64_t block);
  void skip(std::int64_t block);
  void attention(std::int64_t block);
  /// stream += n(gradient), or the gradient itself without a norm.
  void add_to_stream(const FrozenText::Norm&, kernels::AnyMatrix gradient);
  /// out = n(stream), or the stream itself.
  void output_gradient(const FrozenText::Norm&, kernels::AnyMatrix out);

  const FrozenText& text_;
  const Layers& layers_;
  const std::vector<kernels::AnyMatrix> skip_;
  const kernels::Execution execution_;
  const Buffers buffers_;
  std::vector<std::int64_t> places_;  // of this run, with what follows
  std::int64_t blocks_ = 0, tokens_ = 0, targets_ = 0;
};

}  // namespace weft::language_model
