// SPDX-License-Identifier: Apache-2.0
//
// Attention: x -> query | key | value -> norm and rotation -> softmax(q kᵀ) v -> output.
#pragma once

#include <vector>

#include "kernels/language/attention/attention.hpp"
#include "language_model/blocks/sublayer.hpp"

namespace weft::language_model {

/// The attention of a block, without what depends on the tokens.
kernels::Attention attention_shape(const ModelSettings&, std::int64_t sequences, std::int64_t length,
                                   kernels::AttentionImplementation);
/// Every shape of the attention over a full micro-batch.
std::vector<kernels::Attention> attention_shapes(const TransformerSettings&);

class AttentionSublayer final : public Sublayer {
 public:
  AttentionSublayer(const Architecture& architecture, std::int64_t block)
      : Sublayer(architecture, block, "attention") {}

  void declare(ParameterList&) const override;
  std::vector<SublayerWork> work(double length) const override;
  void take(BlockMemory&, const Sublayer* later) override;
  void bind(const Layers&, Products&) override;
  const Linear& input_product() const override { return *projection_; }
  void forward(const Pass&, const kernels::LinearInput& x) override;
  void output(const Pass&, const kernels::LinearOutput& y) override;
  void recompute(const Pass&) override {}
  void backward(const Pass&, kernels::AnyMatrix x, const OutputGradient& dy, kernels::AnyMatrix dx) override;

 private:
  struct Heads {
    Outputs query, key;
  };
  Heads heads() const;
  bool transforms_queries() const {
    return model().qk_norm != QueryKeyNorm::none || model().rotary_table_of(block()) >= 0;
  }
  kernels::Attention attention(const Pass&) const;
  kernels::Array<std::uint8_t> kept_of(const Pass&) const;
  void transform_backward(const Pass&, kernels::AnyMatrix gradient);

  // Parameters.
  const Linear *projection_ = nullptr, *output_ = nullptr;
  std::size_t query_norm_ = kNoParameter, key_norm_ = kNoParameter, temperature_ = kNoParameter;
  kernels::QueryKey query_key_;  // without positions
  Products* products_ = nullptr;

  // Rows of the forward pass that the backward pass reads.
  kernels::AnyMatrix projected_;              // [rows, (H + 2 H_kv) d] queries | keys | values
  kernels::AnyMatrix packed_;                 // the same after norm and rotation, in place without a norm
  kernels::AnyMatrix mixed_;                  // [rows, H d] output of the attention
  kernels::Array<std::uint8_t> mixed_codes_;  // of it, transposed, of a block in codes
  kernels::Array<float> inverse_;             // of the norm of queries and keys
  kernels::Array<float> log_sum_;             // [sequences * H * length]
  kernels::Array<std::uint8_t> kept_;         // blocks of keys of sparse attention, [sequences * H * blocks * blocks]
  // Gradients, and rows from which those of the parameters are formed.
  kernels::AnyMatrix mixed_gradient_, projection_gradient_;
  kernels::Array<float> query_rows_, key_rows_, temperature_rows_;
  kernels::Array<std::byte> workspace_;
};

}  // namespace weft::language_model
