// SPDX-License-Identifier: Apache-2.0
#include "transcoder/decoder/decoder.hpp"

namespace weft::transcoder {

void SparseDecoder::form(parallel::Range tokens, parallel::Range layers, kernels::AnyMatrix partial) const {
  kernels::decode_forward(execution_, lists_, tokens.begin, tokens.size(), model().decoder(), layers.begin, partial);
}

void SparseDecoder::take_workspace(const Sizes& sizes, std::int64_t entries, std::int64_t columns,
                                   model::StepArena& arena) {
  arena.purpose("backward pass");
  workspace_ = arena.take<std::byte>(
      kernels::decode_backward_workspace(arena.backend(), shape_.n_layers, largest_owned(shape_, sizes.grid), columns,
                                         entries, has_penalties(sizes.configuration.transcoder)));
}

void SparseDecoder::take_backward(const Sizes& sizes, const BackwardSizes& backward, model::StepArena& arena) {
  take_workspace(sizes, backward.entries, shape_.d_model, arena);
}

std::int64_t SparseDecoder::whole_rows(const Shape& shape) {
  return shape.decoder == Decoder::low_rank ? shape.decoder_begin(shape.n_layers) : 0;
}

std::int64_t SparseDecoder::largest_message(const Shape& shape, std::int64_t n_ranks) {
  return n_ranks * whole_rows(shape) * shape.d_model * static_cast<std::int64_t>(sizeof(float));
}

SparseDecoder::Prepared SparseDecoder::prepare(const Lists&, kernels::AnyMatrix gradient_rows, device::Event&,
                                               parallel::DeviceCommunicator&) {
  return {gradient_rows, {}};
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
