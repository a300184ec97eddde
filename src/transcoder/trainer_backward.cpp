// SPDX-License-Identifier: Apache-2.0
//
// The second half of Trainer's step: from gradient rows to updated parameters.
#include <array>

#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/transcoder/decode/pair_bias.hpp"
#include "kernels/transcoder/encode/encode.hpp"
#include "kernels/transcoder/loss/loss.hpp"
#include "transcoder/skip.hpp"
#include "transcoder/trainer.hpp"

namespace weft::transcoder {

void Trainer::clip() {
  timers_.phase("decoder backward");
  decoder_.form_basis_gradient(backward_batch().of_decoder());
  whole_gradients();
  if (!norm_.clips()) return;
  if (norm_.is_exact()) {
    backward(nullptr);
    norm_.form(false, runner_.constants());
  }
  norm_.clip(runner_.constants());
}

/// Of the decoder bias and the skip connection. On the communication stream, overlapping the backward pass, where there
/// is one: every rank sums over all rows, so this does not shrink with more ranks.
void Trainer::whole_gradients() {
  timers_.phase("biases");
  const kernels::Execution& communication = forward_.axis().communication;
  rows_complete_.record(execution_);
  rows_complete_.hold_back(communication);
  kernels::column_sums(communication, all_gradient_rows(), buffers_.decoder_bias_gradient);
  if (model_.shape().skip) {
    timers_.phase("skip");
    skip_gradient(communication, forward_.all_inputs(), all_gradient_rows(), skip_gradient_rows(),
                  buffers_.skip_workspace);
  }
  whole_formed_.record(communication);
  if (!norm_.clips()) return;
  whole_formed_.hold_back(execution_);
  kernels::Array<const float> bias = buffers_.decoder_bias_gradient;
  if (buffers_.pair_bias.size > 0) {
    kernels::norm_of_pairs(execution_, bias, model_.shape().d_model, buffers_.pair_bias);
    bias = buffers_.pair_bias;
  }
  norm_.set_whole(std::array<kernels::Matrix<const float>, 3>{
      {{bias.data, 1, bias.size, bias.size}, skip_gradient_rows(), decoder_.basis_gradient()}});
}

/// [L * d, d]; no rows without a skip connection.
kernels::Matrix<float> Trainer::skip_gradient_rows() const {
  const std::int64_t d = model_.shape().d_model;
  return {buffers_.skip_gradient.data, buffers_.skip_gradient.size / d, d, d};
}

/// With a step: updates decoder, encoder, encoder biases and thresholds in place. Without: only squared norms by row.
void Trainer::backward(const kernels::AdamStep* step) {
  const kernels::Array<float> da = buffers_.activation_gradient;
  const kernels::Array<std::byte> workspace = buffers_.encoder_workspace;
  const bool some = n_keys() > 0;  // more ranks than features leave some without any
  const bool listed = jump_.window() != nullptr, jumps = some && jump_.active();
  kernels::LateRows late = late_rows();
  if (jump_.active() && !listed) {
    timers_.phase("exchange");
    if (late.wait) late.wait();
    late = {};
    timers_.phase("thresholds");
  }
  // A pass for the norm alone has formed the gradients of the thresholds and the penalties already.
  const bool first = step == nullptr || !norm_.clips() || !norm_.is_exact();
  const BackwardBatch all = backward_batch();
  if (first) {
    timers_.phase("decoder backward");
    if (model_.shape().decoder == Decoder::tied) whole_formed_.hold_back(execution_);  // of the rows as they were
    decoder_.prepare_rows(all.of_decoder());
  }
  if (first && penalties_.active()) penalties_.form(activations(), hits(), forward_.layout().total);
  if (jumps && !listed)
    jump_.run(forward_.all_inputs(), decoder_.rows(all_gradient_rows()), penalties_, first, step, norm_.encoder_rows());
  if (first && penalties_.active()) penalties_.complete();
  timers_.phase("decoder backward");
  decoder_.run(all.of_decoder(), step, da, norm_.decoder_rows(), late, penalties_.row_factors(),
               penalties_.next_norms());
  timers_.phase("encoder backward");
  penalties_.add_to(da, activations());
  if (jumps && listed) {
    timers_.phase("thresholds");
    jump_.form_listed(hits(), da);
    timers_.phase("encoder backward");
  }
  const bool sparse = some && !(jump_.active() && jump_.forms_encoder());
  if (sparse && step == nullptr)
    kernels::encode_backward_norm(execution_, all.activations, all.hits, all.inputs, da, norm_.encoder_rows(),
                                  workspace);
  else if (sparse)
    kernels::encode_backward_update(execution_, all.activations, all.hits, all.inputs, da, model_.owned_encoder(),
                                    model_.owned_encoder_bias(), step, norm_.encoder_rows(), workspace);
  if (jumps) {
    timers_.phase("thresholds");
    if (norm_.clips()) jump_.add_norms(step, norm_.encoder_rows());
    if (step != nullptr) jump_.update(step);
  }
  if (some && model_.shape().affine) {
    timers_.phase("decoder backward");
    if (norm_.clips()) decoder_.add_affine_norms(step, norm_.encoder_rows());
    if (step != nullptr) decoder_.update_affine(step);
  }
  if (step == nullptr || !data_axis_.active()) return;
  timers_.phase("exchange");
  data_axis_.gather_weights(model_.encoder());
  data_axis_.gather_vectors(model_.encoder_biases());
  if (jump_.active()) data_axis_.gather_vectors(model_.thresholds());
  if (model_.shape().affine)
    for (const kernels::Matrix<float>& of : {model_.affine().offset, model_.affine().scale})
      data_axis_.gather_vectors({of.data, kernels::Scalar::fp32, of.rows, of.columns, of.stride});
}

void Trainer::backward_and_update() {
  backward(runner_.constants());
  // Of the clipped gradient, as the update saw it.
  if (norm_.clips() && !norm_.is_exact()) norm_.form(true, runner_.constants());
  timers_.phase("biases");
  whole_formed_.hold_back(execution_);
  update_decoder_bias();
  decoder_.update_basis(runner_.constants());
  if (!model_.shape().skip) return;
  timers_.phase("skip");
  update_skip(execution_, model_.skip(), skip_gradient_rows(), runner_.constants());
}

void Trainer::update_decoder_bias() {
  const kernels::ParameterVector& bias = model_.decoder_bias();
  const kernels::Array<float> before = buffers_.pair_bias;
  if (before.size > 0)
    device::copy(execution_, before.data, bias.weight.data, before.size * static_cast<std::int64_t>(sizeof(float)),
                 device::Direction::on_device);
  kernels::adam_vector(execution_, bias, buffers_.decoder_bias_gradient, runner_.constants());
  if (before.size > 0) kernels::extend_update(execution_, before, model_.shape().d_model, bias.weight);
}

kernels::AnyMatrix Trainer::all_gradient_rows() const {
  const std::int64_t width = model_.shape().width();
  return {buffers_.gradient_rows.data(), scalar_of(configuration_.precision), forward_.layout().total, width, width};
}

kernels::AnyMatrix Trainer::auxiliary_rows() const {
  const kernels::AnyMatrix rows = all_gradient_rows();
  return rows.rows_from(rows.rows, rows.rows);
}

kernels::AnyMatrix Trainer::gradient_rows() const {
  const parallel::Range group = forward_.layout().group;
  return all_gradient_rows().rows_from(group.begin, group.size());
}

const kernels::SparseActivations& Trainer::listed() const {
  return data_axis_.active() ? data_axis_.activations() : forward_.listed();
}

const kernels::SparseActivations& Trainer::activations() const {
  return jump_.window() != nullptr ? jump_.activations() : listed();
}

kernels::Array<std::int64_t> Trainer::active_offsets() const {
  return jump_.window() != nullptr ? jump_.active_offsets() : hits().offsets;
}

Trainer::BackwardBatch Trainer::backward_batch() {
  if (!auxiliary_.active()) return {activations(), hits(), forward_.all_inputs(), all_gradient_rows()};
  const auto twice = [](kernels::AnyMatrix rows) { return rows.rows_from(0, 2 * rows.rows); };
  return {auxiliary_.joint(), auxiliary_.hits(), twice(forward_.all_inputs()), twice(all_gradient_rows())};
}

const kernels::FeatureHits& Trainer::hits() const { return data_axis_.active() ? data_axis_.hits() : forward_.hits(); }

}  // namespace weft::transcoder
