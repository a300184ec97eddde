// SPDX-License-Identifier: Apache-2.0
//
// Low rank: W_dec[s->t] = U_s[t] V_t[s], with codes h_s[t] = a_s U_s[t] of `rank` columns.
//
//   forward    codes by the product over lists; then y^_t = sum over s <= t of h_s[t] V_t[s], dense
//   backward   dV_t[s] = h_s[t]^T g_t, and the gradient rows of the codes, g_t V_t[s]^T, with which dU is formed
//
// Every rank holds and updates all V_t; their gradients are summed over all ranks, in rank order.
#pragma once

#include "transcoder/decoder/decoder.hpp"

namespace weft::transcoder {

class LowRank final : public SparseDecoder {
 public:
  LowRank(const Sizes&, const ForwardSizes&, model::StepArena&);

  /// Number of columns of the codes: rank L (L + 1) / 2.
  static std::int64_t code_columns(const Shape& shape) { return shape.decoder_begin(shape.n_layers); }

  void form(parallel::Range tokens, parallel::Range layers, kernels::AnyMatrix partial) const override;
  void take_backward(const Sizes&, const BackwardSizes&, model::StepArena&) override;
  Prepared prepare(const Lists&, kernels::AnyMatrix gradient_rows, device::Event& read,
                   parallel::DeviceCommunicator& world) override;
  void update_rest(const kernels::AdamStep*, kernels::Array<double> squared_norm) override;

 private:
  kernels::AnyMatrix of_pair(kernels::AnyMatrix codes, std::int64_t source, std::int64_t target) const;
  void form_basis_gradient(const Lists&, kernels::AnyMatrix gradient_rows, kernels::AnyMatrix codes,
                           parallel::DeviceCommunicator& world);

  // Buffers of a chunk of the forward pass:
  kernels::Array<std::byte> codes_;      // [chunk, code_columns]
  kernels::Array<std::byte> of_target_;  // codes of one target, [chunk, rank L]
  kernels::Array<std::byte> workspace_of_target_;
  // Buffers of the backward pass:
  kernels::Array<std::byte> all_codes_;       // [n_tokens, code_columns], then their gradient rows
  kernels::Array<float> basis_gradients_;     // [ranks, code_columns * d]
  kernels::Array<float> basis_gradient_sum_;  // [code_columns * d]; with several ranks
  kernels::Array<std::byte> dense_workspace_;
  kernels::Matrix<float> basis_gradient_;  // [code_columns, d], result of the last `prepare`
};

}  // namespace weft::transcoder
