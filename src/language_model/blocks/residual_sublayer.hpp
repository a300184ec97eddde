// SPDX-License-Identifier: Apache-2.0
//
// A sublayer with what surrounds every sublayer of a model. With h the residual stream:
//
//   x = norm(h)      y = dropout(post_norm(sublayer(x)))      h += y
//
// Norms that the model does not have are left out (language_model.norm_position). The sum with y and the norm after it
// are one kernel: that of the next sublayer, or of the head. In a joined pass (Pass::moments) neither has a kernel: the
// last product of a sublayer forms h, and the first one of the next sublayer applies the norm.
//
// With language_model.residual = "parallel" x of the later sublayers of a block is the norm of h before the first one.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "language_model/blocks/model_norms.hpp"
#include "language_model/blocks/sublayer.hpp"

namespace weft::language_model {

/// Gradients that each sublayer overwrites, [rows, C].
struct GradientMemory {
  kernels::AnyMatrix input;   ///< of the input of a sublayer, or of the head
  kernels::AnyMatrix output;  ///< of the output of a sublayer
};

class ResidualSublayer {
 public:
  /// number: of the sublayer in the model. is_first, is_last: in its block.
  ResidualSublayer(std::unique_ptr<Sublayer> sublayer, std::int64_t number, bool is_first, bool is_last)
      : sublayer_(std::move(sublayer)), number_(number), is_first_(is_first), is_last_(is_last) {}

  std::int64_t block() const { return sublayer_->block(); }
  const Sublayer& sublayer() const { return *sublayer_; }
  bool is_first() const { return is_first_; }
  bool is_last() const { return is_last_; }
  // The norms, and what the last forward pass kept of them.
  const std::optional<NormLayer>& norm() const { return norm_; }
  const std::optional<NormLayer>& post_norm() const { return post_norm_; }
  const kernels::NormStatistics& statistics() const { return statistics_; }
  const kernels::NormStatistics& post_statistics() const { return post_statistics_; }
  /// [rows, C] of a micro-batch: h before the sublayer.
  const kernels::AnyMatrix& residual() const { return residual_; }

  void declare(ParameterList&, const ModelSettings&) const;
  /// later: as for Sublayer::take.
  void take(BlockMemory&, const ResidualSublayer* later);
  /// x is a norm of the residual stream before this sublayer, an earlier one of the block, which has taken its memory.
  void read_before(const ResidualSublayer& first) { source_ = first.residual_; }
  void bind(const Context&, Products&, const Norms&);

  // Forward pass, over the tokens of the pass. y [rows, C]: memory of the output of each sublayer; in a joined pass, of
  // h after the sublayer.
  /// Forms h from that before the last sublayer and its output, and x from h. Without addend h is there already. In a
  /// joined pass only the first sublayer of the model is entered.
  void enter(const Pass&, kernels::AnyMatrix before, kernels::AnyMatrix addend);
  /// Forms x from h.
  void enter(const Pass& pass) { enter(pass, {}, {}); }
  /// Computes the sublayer up to its last product.
  void forward(const Pass& pass) { sublayer_->forward(pass, input(pass)); }
  /// Starts the last product of the sublayer. next: in a joined pass the sublayer after it, or null.
  void start_output(const Pass& pass, kernels::AnyMatrix y, const ResidualSublayer* next = nullptr) {
    sublayer_->output(pass, output(pass, y, next));
  }
  /// Awaits it, and forms y. tap: gets x and the output of the sublayer; null: none.
  void finish_output(const Pass&, kernels::AnyMatrix y, const Tap* tap = nullptr);

  /// Forms again what memory.recompute = "activation" or "norm" does not keep.
  void recompute(const Pass&, Recompute plan);
  /// True if the backward pass reads the output of the sublayer.
  bool keeps_output() const { return post_norm_.has_value(); }

  /// The gradient of h before the sublayer, in `before`: the sum of `after` and what the sublayer adds. output: that of
  /// y. `before` may be `after`, and with sequential sublayers all three are gradients of h.
  OutputGradient backward(const Pass&, const OutputGradient& output, kernels::AnyMatrix after,
                          kernels::AnyMatrix before, const GradientMemory&);

 private:
  std::string norm_name(const char* norm) const { return block_name(block()) + sublayer_->kind() + norm; }
  kernels::AnyMatrix raw(const Pass& pass, kernels::AnyMatrix y) const {
    return post_norm_ ? pass.rows_of(raw_) : pass.rows_of(y);
  }
  kernels::LinearInput input(const Pass&) const;
  kernels::LinearOutput output(const Pass&, kernels::AnyMatrix y, const ResidualSublayer* next) const;
  std::uint32_t site() const { return 1 + static_cast<std::uint32_t>(number_); }
  OutputGradient output_gradient(const Pass&, const OutputGradient& after, const GradientMemory&) const;

  std::unique_ptr<Sublayer> sublayer_;
  std::int64_t number_;
  bool is_first_, is_last_;
  const Context* context_ = nullptr;
  const Norms* norms_ = nullptr;
  Products* products_ = nullptr;
  std::optional<NormLayer> norm_, post_norm_;
  /// [rows, C] what the norm reads: h, or that before the first sublayer of the block.
  const kernels::AnyMatrix& source() const { return source_.data != nullptr ? source_ : residual_; }

  kernels::AnyMatrix residual_;               // [rows, C] h
  kernels::AnyMatrix source_;                 // without data: residual_
  kernels::AnyMatrix input_;                  // [rows, C] x, or h without norm
  kernels::AnyMatrix raw_;                    // [rows, C] before the post norm
  kernels::Array<std::uint8_t> input_codes_;  // of x, transposed, of a block in codes
  kernels::NormStatistics statistics_, post_statistics_;
};

}  // namespace weft::language_model
