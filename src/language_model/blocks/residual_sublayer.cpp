// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/residual_sublayer.hpp"

#include "kernels/convert/convert_rows.hpp"
#include "kernels/language/residual/residual.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;

namespace {

constexpr const char *kNorm = "_norm", *kPostNorm = "_post_norm";

}  // namespace

void ResidualSublayer::declare(ParameterList& list, const ModelSettings& model) const {
  if (model.normalises_inputs()) list.norm(norm_name(kNorm));
  sublayer_->declare(list);
  if (model.normalises_outputs()) list.norm(norm_name(kPostNorm));
}

void ResidualSublayer::take(BlockMemory& memory, const ResidualSublayer* later) {
  using Again = BlockMemory::FormedAgain;
  const ModelSettings& model = memory.settings().architecture.model;
  const bool coded = memory.settings().codes(block());
  memory.begin(block(), sublayer_->kind() + " residual");
  // A block is formed again from the input of its first sublayer.
  residual_ = memory.matrix(model.d_model, is_first_ ? Again::never : Again::block);
  input_ = residual_;
  if (model.normalises_inputs()) {
    input_ = memory.matrix(model.d_model, coded ? Again::forward_only : Again::norm);
    statistics_ = memory.statistics();
  }
  if (model.normalises_outputs()) {
    raw_ = memory.matrix(model.d_model, Again::block);
    post_statistics_ = memory.statistics();
  }
  if (coded)
    input_codes_ = memory.array<std::uint8_t>(memory.settings().rows * model.d_model,
                                              model.normalises_inputs() ? Again::norm : Again::block);
  memory.begin(block(), sublayer_->kind());
  sublayer_->take(memory, later == nullptr ? nullptr : later->sublayer_.get());
}

void ResidualSublayer::bind(const Context& context, Products& products, const Norms& norms) {
  context_ = &context;
  norms_ = &norms;
  products_ = &products;
  norm_ = context.layers.norm(norm_name(kNorm));
  post_norm_ = context.layers.norm(norm_name(kPostNorm));
  sublayer_->bind(context.layers, products);
  products.keep_input(sublayer_->input_product(), input_codes_);
}

void ResidualSublayer::enter(const Pass& pass, AnyMatrix before, AnyMatrix addend) {
  context_->timers.phase("norms");
  const bool joins = norm_ && source_.data == nullptr && addend.data != nullptr;
  if (!joins && addend.data != nullptr) kernels::add_rows(context_->execution, before, addend, pass.rows_of(residual_));
  if (norm_)
    norms_->forward(*norm_, joins ? before : pass.rows_of(source()), joins ? addend : AnyMatrix{},
                    pass.rows_of(residual_), pass.rows_of(input_), pass.rows_of(statistics_));
  products_->code_input(pass, sublayer_->input_product(), pass.rows_of(input_));
}

/// x, or in a joined pass h with its norm; the memory of x then has what the last product has left for the norm.
kernels::LinearInput ResidualSublayer::input(const Pass& pass) const {
  const AnyMatrix x = pass.rows_of(input_);
  if (!pass.joined() || number_ == 0) return x;
  return {pass.rows_of(residual_), norm_->values, pass.moments, x, pass.rows_of(statistics_)};
}

/// The output, or in a joined pass h after it and what the norm of the next sublayer needs.
kernels::LinearOutput ResidualSublayer::output(const Pass& pass, AnyMatrix y, const ResidualSublayer* next) const {
  if (!pass.joined()) return raw(pass, y);
  kernels::ScaledRows scaled;
  if (next != nullptr) scaled = {next->norm_->values.weight, pass.rows_of(next->input_)};
  return {pass.rows_of(y), pass.rows_of(residual_), pass.moments, scaled};
}

void ResidualSublayer::finish_output(const Pass& pass, AnyMatrix y, const Tap* tap) {
  const AnyMatrix output = raw(pass, y);
  context_->await_sum(output);
  if (tap != nullptr && *tap) (*tap)(block(), pass.rows_of(input_), output);
  context_->timers.phase("norms");
  if (post_norm_) norms_->forward(*post_norm_, output, {}, {}, pass.rows_of(y), pass.rows_of(post_statistics_));
  context_->drop(site(), pass, pass.rows_of(y));
}

void ResidualSublayer::recompute(const Pass& pass, Recompute plan) {
  if (plan == Recompute::norm) enter(pass);
  sublayer_->recompute(pass);
}

OutputGradient ResidualSublayer::backward(const Pass& pass, const OutputGradient& output, AnyMatrix after,
                                          AnyMatrix before, const GradientMemory& memory) {
  const AnyMatrix dx = pass.rows_of(memory.input);
  sublayer_->backward(pass, pass.rows_of(input_), output_gradient(pass, output, memory), dx);
  context_->await_sum(dx);
  if (norm_)
    return norms_->backward(pass, *norm_, pass.rows_of(source()), pass.rows_of(statistics_), dx, after, before);
  kernels::add_rows(context_->execution, after, dx, before);
  return {before};
}

/// The gradient of the sublayer's raw output from that of the residual stream.
OutputGradient ResidualSublayer::output_gradient(const Pass& pass, const OutputGradient& after,
                                                 const GradientMemory& memory) const {
  OutputGradient gradient = after;
  if (context_->drops(pass)) {
    gradient = {.rows = pass.rows_of(post_norm_ ? memory.input : memory.output), .stays = false};
    context_->timers.phase("norms");
    kernels::copy_rows(context_->execution, after.rows, gradient.rows);
    context_->drop(site(), pass, gradient.rows);
  }
  if (!post_norm_) return gradient;
  gradient = norms_->backward(pass, *post_norm_, pass.rows_of(raw_), pass.rows_of(post_statistics_), gradient.rows, {},
                              pass.rows_of(memory.output));
  gradient.stays = false;
  return gradient;
}

}  // namespace weft::language_model
