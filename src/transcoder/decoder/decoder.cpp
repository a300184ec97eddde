// SPDX-License-Identifier: Apache-2.0
#include "transcoder/decoder/decoder.hpp"

namespace weft::transcoder {

void SparseDecoder::form(parallel::Range tokens, parallel::Range layers, kernels::AnyMatrix partial) const {
  kernels::decode_forward(execution_, lists_, tokens.begin, tokens.size(), model().decoder(), layers.begin, partial);
}

void SparseDecoder::take_backward(const Sizes& sizes, const BackwardSizes& backward, model::StepArena& arena) {
  arena.purpose("backward pass");
  workspace_ = arena.take<std::byte>(kernels::decode_backward_workspace(
      arena.backend(), shape_.n_layers, largest_owned(shape_, sizes.grid), shape_.d_model, backward.entries,
      has_penalties(sizes.configuration.transcoder)));
}

void SparseDecoder::backward(const Lists& lists, kernels::AnyMatrix rows, const BackwardStep& of) {
  if (owned() == 0) return;  // possible if there are more ranks than features
  if (of.noise != nullptr)
    kernels::decode_backward_noisy(execution_, lists.activations, lists.hits, rows, model().owned_decoder(), of.step,
                                   of.gradient, of.squared_norm, workspace_, of.late, *of.noise);
  else if (of.step != nullptr)
    kernels::decode_backward_update(execution_, lists.activations, lists.hits, rows, model().owned_decoder(), of.step,
                                    of.gradient, of.squared_norm, workspace_, of.late, of.row_factors, of.new_norms);
  else
    kernels::decode_backward_norm(execution_, lists.activations, lists.hits, rows, model().owned_decoder(), of.gradient,
                                  of.squared_norm, workspace_, of.late, of.row_factors);
}

}  // namespace weft::transcoder
