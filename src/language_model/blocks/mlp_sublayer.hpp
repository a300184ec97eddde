// SPDX-License-Identifier: Apache-2.0
//
// The MLP: x -> activation(up x) -> down, or activation(gate x, up x) of gated activations.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/language/activation/mlp_activation.hpp"
#include "language_model/blocks/sublayer.hpp"

namespace weft::language_model {

class MlpSublayer final : public Sublayer {
 public:
  MlpSublayer(const Architecture& architecture, std::int64_t block) : Sublayer(architecture, block, "mlp") {}

  void declare(ParameterList&) const override;
  std::vector<SublayerWork> work(double length) const override;
  void take(BlockMemory&, const Sublayer* later) override;
  void bind(const Layers&, Products&) override;
  const Linear& input_product() const override { return *up_; }
  void forward(const Pass&, const kernels::LinearInput& x) override;
  void output(const Pass&, const kernels::LinearOutput& y) override;
  void recompute(const Pass&) override;
  void backward(const Pass&, kernels::AnyMatrix x, const OutputGradient& dy, kernels::AnyMatrix dx) override;

 private:
  std::int64_t hidden_width() const { return model().d_mlp * (kernels::is_gated(model().mlp) ? 2 : 1); }

  const Linear *up_ = nullptr, *down_ = nullptr;
  Products* products_ = nullptr;

  kernels::AnyMatrix hidden_;                     // [rows, D or 2 D] gate | up, or up
  kernels::AnyMatrix activated_;                  // [rows, D]
  kernels::Array<std::uint8_t> activated_codes_;  // transposed, of a block in codes
  /// [rows, D] of `activated_`; or before the activation, if one product forms it.
  kernels::AnyMatrix gradient_;
};

}  // namespace weft::language_model
