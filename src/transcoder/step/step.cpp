// SPDX-License-Identifier: Apache-2.0
#include "transcoder/step/step.hpp"

#include "kernels/metrics/metric_sums.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "kernels/transcoder/loss/loss.hpp"

namespace weft::transcoder {

void Step::run() {
  kernels::AdamStep* const constants = runner_.constants();
  SparseDecoder& decoder = forward_.decoder();
  gradient_rows_.open();
  loss_.begin();
  data_axis_.start_weights(model_.decoder());  // weights of the last update, sent while this step encodes
  if (forward_.ranks_by_decoder()) data_axis_.await_weights(forward_.idle());

  // Encode, select, activate:  z = x~ W_enc^T + b,  the entries of z that the activation keeps,  a = f(z)
  ForwardRequest request;
  for (const auto& part : parts_) part->begin(request);
  forward_.encode(request.band, request.follower);
  if (!forward_.ranks_by_decoder()) data_axis_.await_weights(forward_.idle());

  // Decode, to the owners of the tokens:  y^_t = sum over s <= t of a_s W_dec[s->t]
  // Loss:  r = y^ + b_t - y,  g = d loss / d y^, to all ranks
  forward_.decode([&](const Forward::OwnPart& part) { loss_.add(part, request.error_weights); });
  loss_.finish();
  timers_.phase("exchange");
  gradient_rows_.send();
  for (const auto& part : parts_) part->on_loss();
  check_finite();

  // Backward, feature by feature over the tokens of the whole batch. Gradients that every rank forms whole overlap:
  // db_t = sum over tokens of g
  BackwardPass pass = whole_batch();
  timers_.phase("biases");
  rows_complete_.record(execution_);
  rows_complete_.hold_back(pass.communication);
  bias_.form(pass.communication, gradient_rows_.all());
  pass.whole.push_back(bias_.norm_row());
  for (const auto& part : parts_) part->before_backward(pass);
  whole_formed_.record(pass.communication);
  if (records_) {
    whole_formed_.hold_back(execution_);
    records_->keep(pass);
  }
  timers_.phase("decoder backward");
  decoder.prepare(pass.all, pass.gradient_rows, whole_formed_);

  if (records_) {  // c_b a, c_b da, and db_t = sum over records of c_b g + noise
    records_->clip(pass, decoder, bias_.gradient());
    pass.records = records_.get();
  }
  if (clipping_.active()) {
    whole_formed_.hold_back(execution_);
    bias_.form_norm();
    const auto form_squares = [&] {
      backward(pass);
      pass.first = false;
    };
    clipping_.before_update(pass.whole, form_squares, constants);
  }
  pass.step = constants;
  backward(pass);
  clipping_.after_update(constants);
  timers_.phase("biases");
  bias_.update(constants);
  timers_.phase("exchange");
  data_axis_.gather_weights(model_.encoder());
  for (const kernels::AnyMatrix& vectors : model_.feature_vectors()) data_axis_.gather_vectors(vectors);
  if (records_)
    records_->finish();  // which features fired is not counted: no noise protects it
  else
    count(pass);
}

/// Backward pass. With a step it updates decoder, encoder and the vectors of features in place; without a step it forms
/// squared norms by row.
void Step::backward(BackwardPass& pass) {
  SparseDecoder& decoder = forward_.decoder();
  timers_.phase("decoder backward");

  // Decoder:  da = <W_dec, g>,  dW_dec = a g,  Adam
  for (const auto& part : parts_) part->before_decoder(pass);
  timers_.phase("decoder backward");
  decoder.backward(pass.all, pass.gradient_rows,
                   {pass.step, pass.gradient, clipping_.decoder_rows(), pass.late, pass.row_factors, pass.new_norms,
                    records_ ? &records_->noise(RecordClipping::kDecoder) : nullptr});
  if (records_) records_->restore(pass.gradient);
  for (const auto& part : parts_) part->after_decoder(pass);

  // Encoder:  dz = da (f' = 1 where an entry is kept),  dW_enc = dz x~,  db = dz,  Adam
  timers_.phase("encoder backward");
  encoder_backward(pass);
  if (pass.step != nullptr) whole_formed_.hold_back(execution_);
  for (const auto& part : parts_) part->update(pass);
  timers_.phase("decoder backward");
  decoder.update_rest(pass.step, clipping_.encoder_rows());
}

void Step::encoder_backward(BackwardPass& pass) {
  if (model_.owned().size() == 0 || pass.encoder_is_formed) return;
  const kernels::SparseActivations& activations = pass.all.activations;
  if (records_)
    kernels::encode_backward_noisy(
        execution_, activations, pass.all.hits, pass.inputs, pass.gradient, model_.owned_encoder(),
        model_.owned_encoder_bias(), pass.step, clipping_.encoder_rows(), buffers_.encoder_workspace,
        records_->noise(RecordClipping::kEncoder), records_->noise(RecordClipping::kEncoderBias));
  else if (pass.step == nullptr)
    kernels::encode_backward_norm(execution_, activations, pass.all.hits, pass.inputs, pass.gradient,
                                  clipping_.encoder_rows(), buffers_.encoder_workspace);
  else
    kernels::encode_backward_update(execution_, activations, pass.all.hits, pass.inputs, pass.gradient,
                                    model_.owned_encoder(), model_.owned_encoder_bias(), pass.step,
                                    clipping_.encoder_rows(), buffers_.encoder_workspace);
}

/// Checks that the gradient rows are finite. A row that is not finite comes from a residual that is not, which the sum
/// of squares of its layer shows. Each rank checks its own tokens, so the ranks must agree; meanwhile the last gradient
/// rows are in transit.
void Step::check_finite() {
  timers_.phase("check");
  // A private step leaves out records that are not finite, and no others: whether it is withheld must not depend on
  // them.
  if (records_)
    device::zero(execution_, forward_.not_finite(), sizeof(std::int32_t));
  else
    kernels::flag_above(execution_, {loss_.sums().data, model_.shape().n_layers}, kLargestResidual * kLargestResidual,
                        forward_.not_finite());
  kernels::StepFlags* const flags = forward_.flags();
  static_assert(sizeof *flags == 2 * sizeof(std::int32_t));
  world_.maximum({&flags->not_finite, 2}, "flags");
  runner_.guard(flags);
}

/// Returns the lists and rows of this rank's backward pass. With a data axis, gathers those of the other groups.
BackwardPass Step::whole_batch() {
  Lists lists;
  if (data_axis_.active()) {
    timers_.phase("exchange");
    data_axis_.gather_lists(forward_.listed(), forward_.layout().total);
    data_axis_.gather_rows(forward_.all_inputs());
    timers_.phase("transpose");
    data_axis_.by_feature();
    lists = {data_axis_.activations(), data_axis_.hits()};
  } else {
    forward_.by_feature();
    lists = {forward_.listed(), forward_.hits()};
  }
  timers_.phase("exchange");
  kernels::LateRows late = gradient_rows_.await();
  return {.selected = lists,
          .all = lists,
          .inputs = forward_.all_inputs(),
          .gradient_rows = gradient_rows_.all(),
          .late = std::move(late),
          .active_offsets = lists.hits.offsets,
          .gradient = buffers_.activation_gradient,
          .communication = forward_.axis().communication};
}

/// Counts active entries by layer, and advances the clocks of features that did not fire.
void Step::count(const BackwardPass& pass) {
  timers_.phase("bookkeeping");
  const std::int64_t n = model_.shape().n_layers;
  kernels::accumulate_layer_counts(execution_, pass.active_offsets, model_.owned().size(),
                                   {loss_.sums().data + 3 * n, n});
  kernels::advance_clocks(execution_, {pass.active_offsets, {}, {}}, forward_.layout().total, runner_.constants(),
                          model_.clocks());
}

}  // namespace weft::transcoder
