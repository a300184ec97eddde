// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/mlp_sublayer.hpp"

#include <fmt/format.h>

#include <utility>

namespace weft::language_model {

using kernels::AnyMatrix;

void MlpSublayer::declare(ParameterList& list) const {
  const std::int64_t unit = mlp_unit(model());
  std::vector<Outputs> parts;
  if (kernels::is_gated(model().mlp)) parts.push_back({"gate", model().d_mlp, unit});
  parts.push_back({"up", model().d_mlp, unit});
  list.product(prefix(), std::move(parts));
  list.output(prefix(), "down", model().d_mlp, unit);
  list.describe(fmt::format("d_mlp {}", model().d_mlp));
}

std::vector<SublayerWork> MlpSublayer::work(double /*length*/) const {
  const auto hidden = static_cast<double>(hidden_width()), mlp = static_cast<double>(model().d_mlp);
  // The product of the backward pass reads `hidden` where it applies the slope (kernels/language/linear/linear.hpp).
  const bool slope_in_product = model().mlp == MlpActivation::gelu && architecture().lora.rank == 0;
  return {{.phase = "activation",
           .forward = {hidden + mlp, 0},
           .backward = {slope_in_product ? 0 : 2 * hidden + mlp, 0},
           .again = Recompute::activation},
          {.phase = "products", .forward = {}, .backward = {slope_in_product ? hidden : 0, 0}}};
}

void MlpSublayer::take(BlockMemory& memory, const Sublayer* later) {
  hidden_ = memory.matrix(hidden_width(), BlockMemory::FormedAgain::block);
  const bool coded = memory.settings().codes(block());
  activated_ = memory.matrix(model().d_mlp,
                             coded ? BlockMemory::FormedAgain::forward_only : BlockMemory::FormedAgain::activation);
  gradient_ = memory.inner_gradient(model().d_mlp);
  if (coded)
    activated_codes_ =
        memory.array<std::uint8_t>(memory.settings().rows * model().d_mlp, BlockMemory::FormedAgain::activation);
  // Rows that stay lie where the later block, whose backward pass is complete, had its own.
  if (memory.settings().keeps_block_rows() && model().mlp == MlpActivation::gelu && later != nullptr)
    gradient_ = dynamic_cast<const MlpSublayer&>(*later).hidden_;
}

void MlpSublayer::bind(const Layers& layers, Products& products) {
  products_ = &products;
  up_ = &layers.product(prefix() + (kernels::is_gated(model().mlp) ? "gate" : "up"));
  down_ = &layers.product(prefix() + "down");
  products.keep_input(*down_, activated_codes_);
}

void MlpSublayer::forward(const Pass& pass, const kernels::LinearInput& x) {
  products_->multiply_activated(pass, *up_, *down_, x, model().mlp, pass.rows_of(hidden_), pass.rows_of(activated_));
}

void MlpSublayer::output(const Pass& pass, const kernels::LinearOutput& y) {
  products_->multiply(pass, *down_, pass.rows_of(activated_), y);
}

void MlpSublayer::recompute(const Pass& pass) {
  products_->activate(pass, *down_, model().mlp, pass.rows_of(hidden_), pass.rows_of(activated_));
}

void MlpSublayer::backward(const Pass& pass, AnyMatrix x, const OutputGradient& dy, AnyMatrix dx) {
  const AnyMatrix activated = pass.rows_of(activated_), hidden = pass.rows_of(hidden_),
                  gradient = pass.rows_of(gradient_);
  OutputGradient of_hidden;
  if (products_->is_coded(pass, *up_)) {
    products_->propagate(pass, *down_, activated, dy.rows, gradient);
    of_hidden = products_->propagate_coded(*up_, model().mlp, hidden, gradient, dx);
  } else {
    of_hidden.rows = products_->propagate_activated(pass, *down_, activated, dy.rows, model().mlp, hidden, gradient);
    products_->propagate(pass, *up_, x, of_hidden.rows, dx);
  }
  // Gradients of weights are formed while the ranks add up that of the input.
  products_->give_gradients(pass, *down_, activated, dy);
  products_->give_gradients(pass, *up_, x, of_hidden);
}

}  // namespace weft::language_model
