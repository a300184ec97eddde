// SPDX-License-Identifier: Apache-2.0
//
// The backward pass: from the gradient of the last norm's output to the rows from which the gradients of all parameters
// are formed (training/gradient_sink.hpp).
#include "kernels/convert/convert_rows.hpp"
#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/language/residual/residual.hpp"
#include "language_model/transformer.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Scalar;
using training::GradientRows;
using training::GradientSink;

namespace {

/// Sums of the blocks of `rows` rows.
kernels::AnyMatrix sums_of(const kernels::Matrix<float>& sums, const kernels::NormBlocks& blocks, std::int64_t rows) {
  return {sums.data, Scalar::fp32, blocks.count(rows), sums.columns, sums.stride};
}

}  // namespace

void Transformer::backward(const Tokens& tokens, const kernels::AdamStep* step, GradientSink& sink) {
  timers_.pass("backward");
  const std::int64_t n = tokens.rows();
  first_row_ = tokens.first_row;
  step_ = step;
  rows_ = n;
  residual_ = 0;
  normalise_backward(model_.final_norm(), buffers_.final_residual.rows_from(0, n), buffers_.final_norm,
                     buffers_.input_gradient.rows_from(0, n), {}, residual_gradient(n), sink);
  for (std::size_t layer = buffers_.blocks.size(); layer-- > 0;) {
    if (swap_) swap_->before_backward(layer);
    keeps_ = settings_.keeps_block_rows();
    recompute(layer, tokens, step);
    backward_mlp(layer, tokens, step, sink);
    backward_attention(layer, tokens, step, sink);
    if (swap_) swap_->after_backward(layer);
    sink.complete_from(model_.blocks()[layer].first);
  }
  backward_embedding(tokens, step, sink);
  sink.end_micro_batch();
}

/// Recomputes activations that memory.recompute did not keep. Those of the last block are still in memory.
void Transformer::recompute(std::size_t layer, const Tokens& tokens, const kernels::AdamStep* step) {
  const Recompute policy = settings_.memory.recompute;
  if (policy == Recompute::none || layer + 1 == buffers_.blocks.size()) return;
  if (policy == Recompute::block) return compute_again(layer, tokens, step);
  const Activations& block = buffers_.blocks[layer];
  const Block& parameters = model_.blocks()[layer];
  const std::int64_t n = tokens.rows();
  timers_.phase("norms");
  if (policy != Recompute::activation && parameters.attention_norm)
    normalise(*parameters.attention_norm, block.residual.rows_from(0, n), {}, {}, block.attention_input.rows_from(0, n),
              block.attention_norm);
  if (policy == Recompute::norm && parameters.mlp_norm)
    normalise(*parameters.mlp_norm, block.middle.rows_from(0, n), {}, {}, block.mlp_input.rows_from(0, n),
              block.mlp_norm);
  timers_.phase("activation");
  kernels::mlp_activation(execution_, settings().mlp, block.hidden.rows_from(0, n), block.activated.rows_from(0, n));
}

/// Recomputes everything of a block but its input.
void Transformer::compute_again(std::size_t layer, const Tokens& tokens, const kernels::AdamStep* step) {
  const Activations& block = buffers_.blocks[layer];
  const Block& parameters = model_.blocks()[layer];
  const std::int64_t n = tokens.rows();
  timers_.phase("norms");
  if (parameters.attention_norm)
    normalise(*parameters.attention_norm, block.residual.rows_from(0, n), {}, {}, block.attention_input.rows_from(0, n),
              block.attention_norm);
  const std::vector<Tokens> parts = this->parts(tokens);
  for (const Tokens& part : parts) {
    attend(layer, part, step);
    start_attention_output(layer, part);
  }
  for (const Tokens& part : parts) {
    finish_attention(layer, part, step);
    transform(layer, part);
    if (parameters.mlp_post_norm) start_mlp_output(layer, part);
  }
  if (parameters.mlp_post_norm)
    for (const Tokens& part : parts) finish_mlp(layer, part, step);
}

void Transformer::backward_mlp(std::size_t layer, const Tokens& tokens, const kernels::AdamStep* step,
                               GradientSink& sink) {
  const Activations& block = buffers_.blocks[layer];
  const Block& parameters = model_.blocks()[layer];
  const std::int64_t n = tokens.rows();
  const AnyMatrix output = sublayer_gradient(parameters.mlp_post_norm, block.mlp_raw, block.mlp_post_norm,
                                             mlp_site(layer), tokens, step, sink);
  const AnyMatrix input = buffers_.input_gradient.rows_from(0, n);
  timers_.phase("products");
  // The gradient before the activation: in memory of its own, or in place of `hidden`.
  AnyMatrix hidden = block.hidden.rows_from(0, n);
  const kernels::LinearWeights down = weights_of(parameters.down);
  if (settings().mlp == MlpActivation::gelu && !adapts(parameters.down)) {
    const AnyMatrix apart = block.hidden_gradient.rows_from(0, n);
    kernels::linear_gelu_backward(execution_, down, output, hidden, apart, buffers_.product_workspace);
    hidden = apart;
  } else {
    const AnyMatrix gradient = buffers_.wide_gradient.rows_from(0, n).columns_from(0, settings().d_mlp);
    kernels::linear_backward(execution_, down, output, gradient, buffers_.product_workspace);
    adapt_backward(parameters.down, block.activated.rows_from(0, n), output, gradient, sink);
    timers_.phase("activation");
    kernels::mlp_activation_backward(execution_, settings().mlp, hidden, gradient, hidden);
  }
  // Gradients of weights are formed while the ranks add up that of the input.
  const AnyMatrix mlp_input = block.mlp_input.rows_from(0, n);
  propagate(parameters.up, mlp_input, hidden, input, sink);
  give_gradients(parameters.down, block.activated.rows_from(0, n), output, sink);
  give_gradients(parameters.up, mlp_input, hidden, sink);
  await_sum(input);
  const AnyMatrix residual = residual_gradient(n), next = next_residual_gradient(n);
  if (parameters.mlp_norm)
    normalise_backward(*parameters.mlp_norm, block.middle.rows_from(0, n), block.mlp_norm, input, residual, next, sink);
  else
    kernels::add_rows(execution_, residual, input, next);
}

void Transformer::backward_attention(std::size_t layer, const Tokens& tokens, const kernels::AdamStep* step,
                                     GradientSink& sink) {
  const Activations& block = buffers_.blocks[layer];
  const Block& parameters = model_.blocks()[layer];
  const std::int64_t n = tokens.rows(), queries = settings_.architecture.query_width(),
                     keys = settings_.architecture.key_width();
  const AnyMatrix output = sublayer_gradient(parameters.attention_post_norm, block.attention_raw,
                                             block.attention_post_norm, attention_site(layer), tokens, step, sink);
  const AnyMatrix mixed = buffers_.mixed_gradient.rows_from(0, n);
  propagate(parameters.attention_output, block.mixed.rows_from(0, n), output, mixed, sink);

  timers_.phase("attention");
  const AnyMatrix packed = block.attended_rows.rows_from(0, n), gradient = block.projection_gradient.rows_from(0, n);
  settings_.attention.backward(execution_, attention(layer, tokens, step), packed.columns_from(0, queries),
                               packed.columns_from(queries, keys), packed.columns_from(queries + keys, keys),
                               block.mixed.rows_from(0, n), block.log_sum, mixed, gradient.columns_from(0, queries),
                               gradient.columns_from(queries, keys), gradient.columns_from(queries + keys, keys),
                               buffers_.attention_workspace);
  if (transforms_queries()) {
    // The weights of a norm of heads are shared by all of them: one row per head.
    const kernels::QueryKey transform = query_key(layer, tokens);
    const bool by_head = transform.norm == QueryKeyNorm::head, weighted = buffers_.query_rows.size > 0;
    const auto rows = [&](kernels::Array<float> memory, std::int64_t heads) -> kernels::Matrix<float> {
      const std::int64_t columns = (by_head ? 1 : heads) * transform.head_size;
      return {memory.data, weighted ? n * (by_head ? heads : 1) : 0, columns, columns};
    };
    const kernels::Matrix<float> query_rows = rows(buffers_.query_rows, transform.heads),
                                 key_rows = rows(buffers_.key_rows, transform.kv_heads),
                                 temperature_rows{buffers_.temperature_rows.data,
                                                  buffers_.temperature_rows.size > 0 ? n : 0, 1, 1};
    kernels::query_key_backward(execution_, transform, block.projected.rows_from(0, n), block.inverse, gradient,
                                query_rows, key_rows, temperature_rows);
    timers_.phase("weight gradients");
    const auto give = [&](std::size_t parameter, const kernels::Matrix<float>& values) {
      if (parameter == kNoParameter) return;
      if (settings_.examples)
        return sink.take({.form = GradientRows::Form::column_sum,
                          .parameter = parameter,
                          .gradients = {values.data, Scalar::fp32, values.rows, values.columns, values.stride},
                          .examples = examples(values.rows, values.rows / n * settings_.length)});
      // A sink that adds up takes at most n rows at a time.
      for (std::int64_t row = 0; row < values.rows; row += n)
        sink.take({.form = GradientRows::Form::column_sum,
                   .parameter = parameter,
                   .gradients = {values.row(row), Scalar::fp32, n, values.columns, values.stride}});
    };
    give(parameters.query_norm, query_rows);
    give(parameters.key_norm, key_rows);
    give(parameters.temperature, temperature_rows);
  }
  const AnyMatrix input = buffers_.input_gradient.rows_from(0, n),
                  attention_input = block.attention_input.rows_from(0, n);
  propagate(parameters.projection, attention_input, gradient, input, sink);
  give_gradients(parameters.attention_output, block.mixed.rows_from(0, n), output, sink);
  give_gradients(parameters.projection, attention_input, gradient, sink);
  await_sum(input);
  const AnyMatrix residual = residual_gradient(n), next = next_residual_gradient(n);
  if (parameters.attention_norm)
    normalise_backward(*parameters.attention_norm, block.residual.rows_from(0, n), block.attention_norm, input,
                       residual, next, sink);
  else
    kernels::add_rows(execution_, residual, input, next);
}

void Transformer::backward_embedding(const Tokens& tokens, const kernels::AdamStep* step, GradientSink& sink) {
  const AnyMatrix gradient = residual_gradient(tokens.rows());
  timers_.phase("embedding");
  drop(kEmbedding, tokens, step, gradient);
  scale_embedding(gradient);
  sink.take({.form = GradientRows::Form::lookup,
             .parameter = model_.token_table(),
             .gradients = gradient,
             .ids = tokens.ids,
             .examples = examples(tokens.rows()),
             .gradients_stay = true});
  if (model_.position_table() == kNoParameter) return;
  // Positions are not negative.
  sink.take({.form = GradientRows::Form::lookup,
             .parameter = model_.position_table(),
             .gradients = gradient,
             .ids = {reinterpret_cast<const std::uint32_t*>(tokens.positions.data), tokens.positions.size},
             .examples = examples(tokens.rows()),
             .gradients_stay = true});
}

/// The gradient of a sublayer's raw output from that of the residual stream.
AnyMatrix Transformer::sublayer_gradient(const std::optional<NormLayer>& norm, AnyMatrix raw,
                                         const kernels::NormStatistics& statistics, std::uint32_t site,
                                         const Tokens& tokens, const kernels::AdamStep* step, GradientSink& sink) {
  const std::int64_t n = tokens.rows();
  AnyMatrix gradient = residual_gradient(n);
  if (drops(step)) {
    const AnyMatrix dropped = (norm ? buffers_.input_gradient : buffers_.output_gradient).rows_from(0, n);
    timers_.phase("norms");
    kernels::copy_rows(execution_, gradient, dropped);
    drop(site, tokens, step, dropped);
    gradient = dropped;
  }
  if (!norm) return gradient;
  const AnyMatrix out = buffers_.output_gradient.rows_from(0, n);
  normalise_backward(*norm, raw.rows_from(0, n), statistics, gradient, {}, out, sink);
  return out;
}

// --- Operations -----------------------------------------------------------------------------------------------------

void Transformer::normalise_backward(const NormLayer& norm, AnyMatrix h, const kernels::NormStatistics& statistics,
                                     AnyMatrix dy, AnyMatrix addend, AnyMatrix dh, GradientSink& sink) {
  const kernels::NormStatistics of_rows = first_of(statistics, h.rows);
  if (model_.parameters().specs()[norm.weight].frozen) {
    summed_ = nullptr;
    timers_.phase("norms");
    return kernels::norm_backward(execution_, norm.values, h, of_rows, dy, addend, dh, {});
  }
  if (!sink.takes_sums()) {
    summed_ = nullptr;
    timers_.phase("weight gradients");
    sink.take({.form = GradientRows::Form::column_product,
               .parameter = norm.weight,
               .inputs = h,
               .gradients = dy,
               .examples = examples(h.rows),
               .row_shift = of_rows.mean,
               .row_scale = of_rows.inverse});
    if (norm.bias != kNoParameter)
      sink.take({.form = GradientRows::Form::column_sum,
                 .parameter = norm.bias,
                 .gradients = dy,
                 .examples = examples(h.rows)});
    timers_.phase("norms");
    kernels::norm_backward(execution_, norm.values, h, of_rows, dy, addend, dh, {});
    return;
  }
  timers_.phase("norms");
  kernels::NormSums sums = buffers_.norm_sums;
  sums.blocks = norm_blocks(settings_, h.rows);
  if (norm.bias == kNoParameter) sums.bias = {};
  if (!settings().bias) sums.input = {};
  kernels::norm_backward(execution_, norm.values, h, of_rows, dy, addend, dh, sums);
  summed_ = dh.data;
  const auto give = [&](std::size_t parameter, const kernels::Matrix<float>& values) {
    if (parameter == kNoParameter) return;
    const AnyMatrix rows = sums_of(values, sums.blocks, h.rows);
    sink.take({.form = GradientRows::Form::column_sum,
               .parameter = parameter,
               .gradients = rows,
               .examples = examples(rows.rows, sums.blocks.of_length())});
  };
  give(norm.weight, sums.weight);
  give(norm.bias, sums.bias);
}

/// Hands the rows of dW = dyᵀ x and db to the sink.
void Transformer::give_gradients(const Linear& linear, AnyMatrix x, AnyMatrix dy, GradientSink& sink,
                                 std::int64_t first_row) {
  timers_.phase("weight gradients");
  const std::int64_t first_example = settings_.examples ? first_row / settings_.length : 0;
  sink.take({.form = GradientRows::Form::product,
             .parameter = linear.weight,
             .inputs = x,
             .gradients = dy,
             .examples = examples(dy.rows),
             .first_example = first_example,
             .count = linear.count,
             .inputs_stay = keeps_,
             .gradients_stay = stays(dy)});
  if (linear.bias == kNoParameter) return;
  const kernels::NormBlocks blocks = norm_blocks(settings_, dy.rows);
  const bool summed = dy.data == summed_;
  const AnyMatrix rows = summed ? sums_of(buffers_.norm_sums.input, blocks, dy.rows) : dy;
  sink.take({.form = GradientRows::Form::column_sum,
             .parameter = linear.bias,
             .gradients = rows,
             .examples = examples(rows.rows, summed ? blocks.of_length() : settings_.length),
             .first_example = first_example,
             .count = linear.count});
}

/// Computes dx = dy W. A matrix that is divided by its outputs gives a sum over the ranks, to be awaited.
void Transformer::propagate(const Linear& linear, AnyMatrix x, AnyMatrix dy, AnyMatrix dx, GradientSink& sink) {
  timers_.phase("products");
  kernels::linear_backward(execution_, weights_of(linear), dy, dx, buffers_.product_workspace);
  if (!linear.transposed) start_sum(dx);
  adapt_backward(linear, x, dy, dx, sink);
}

/// True for gradients that stay; false for those that the next sublayer overwrites.
bool Transformer::stays(const AnyMatrix& gradient) const {
  return keeps_ && gradient.data != buffers_.input_gradient.data && gradient.data != buffers_.output_gradient.data;
}

AnyMatrix Transformer::residual_gradient(std::int64_t rows) const {
  const bool stay = buffers_.residual_gradients.size() > 1;
  return buffers_.residual_gradients[stay ? residual_ : 0].rows_from(0, rows);
}

AnyMatrix Transformer::next_residual_gradient(std::int64_t rows) {
  ++residual_;
  return residual_gradient(rows);
}

}  // namespace weft::language_model
