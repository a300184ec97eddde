// SPDX-License-Identifier: Apache-2.0
//
// Forward pass, head and operations; the backward pass: transformer_backward.cpp.
#include "language_model/transformer.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <utility>

#include "base/error.hpp"
#include "kernels/convert/convert_rows.hpp"
#include "kernels/gemm/fp8.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/language/residual/residual.hpp"
#include "kernels/optimize/half_weights.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Scalar;
using training::GradientSink;

namespace {

kernels::BlockChoice block_choice(const ModelSettings& model) { return {model.sparse_local, model.sparse_blocks}; }

}  // namespace

Transformer::Transformer(const Model& model, const TransformerSettings& settings, report::Timers& timers,
                         training::StepArena& arena, training::TensorAxis* tensor)
    : model_(model),
      settings_(settings),
      execution_(model.execution()),
      timers_(timers),
      buffers_(settings, arena),
      tensor_(tensor),
      linears_(model.linears()) {
  if (settings.rounds_biases(execution_.backend)) place_biases();
  if (settings.examples) place_examples();
  if (settings.swaps()) swap_.emplace(execution_, buffers_.swap);
  device::zero(execution_, buffers_.half_weights);  // rows beyond those of a parameter (row_multiple) are never written
  kernels::half* half = buffers_.half_weights.data;
  for (const Linear* linear : linears_) {
    if (settings.type != Scalar::fp16) break;
    const AnyMatrix& matrix = linear->matrix;
    half_weights_.push_back({half, matrix.rows, matrix.columns, matrix.columns});
    half += matrix.rows * matrix.columns;
  }
  if (!settings.fp8_forward) return;
  if (const std::string why = kernels::coded_obstacle(execution_.backend); !why.empty())
    throw collective_error(ExitCode::usage, "device.fp8_forward is not available ({}); leave it out", why);
  for (std::size_t i = 0; i < buffers_.coded_weights.size(); ++i)
    coded_weights_.push_back(
        kernels::coded_rows(buffers_.coded_weights[i], linears_[i]->outputs(), linears_[i]->inputs()));
}

void Transformer::place_biases() {
  rounded_biases_.resize(model_.parameters().size());
  const device::HostBuffer<kernels::RoundedCopy> copies(buffers_.bias_copies.size);
  kernels::RoundedCopy* copy = copies.data();
  kernels::bf16* to = buffers_.rounded_biases.data;
  for (const Block& block : model_.blocks())
    for (const Linear* linear : {&block.projection, &block.attention_output, &block.up, &block.down}) {
      const kernels::Array<const float> bias = linear->bias_values;
      *copy++ = {bias.data, to, bias.size};
      rounded_biases_[linear->bias] = {to, bias.size};
      largest_bias_ = std::max(largest_bias_, bias.size);
      to += aligned_columns(bias.size);
    }
  device::copy(execution_, buffers_.bias_copies.data, copies.data(), copies.bytes(), device::Direction::to_device);
  kernels::fence(execution_);
}

/// The rows of an example: one per token, per head of queries, per head of keys, per block of norm_backward. All
/// examples are of one length: the rest of a short one is padding with gradient 0.
std::array<std::int64_t, kExampleRows> Transformer::example_rows() const {
  return {settings_.length, settings_.length * settings().heads, settings_.length * settings().kv_heads,
          norm_blocks(settings_, 0).of_length()};
}

void Transformer::place_examples() {
  for (const std::int64_t rows : example_rows())
    for (std::int64_t e = 0; e < buffers_.examples.size / kExampleRows; ++e) examples_.push_back(e * rows);
  device::copy(execution_, buffers_.examples.data, examples_.data(), 8 * buffers_.examples.size,
               device::Direction::to_device);
  kernels::fence(execution_);
}

/// Examples of `rows` rows of whole sequences with of_example rows each, one of example_rows().
kernels::Examples Transformer::examples(std::int64_t rows, std::int64_t of_example) const {
  if (!settings_.examples) return {};
  const std::array<std::int64_t, kExampleRows> known = example_rows();
  const std::int64_t place = std::find(known.begin(), known.end(), of_example) - known.begin(),
                     begin = place * (buffers_.examples.size / kExampleRows), size = rows / of_example + 1;
  return {.offsets = std::span(examples_).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(size)),
          .device_offsets = {buffers_.examples.data + begin, size}};
}

// --- Forward --------------------------------------------------------------------------------------------------------

void Transformer::prepare_weights() {
  timers_.pass("forward");
  if (source_.start) source_.start();
  if (!half_weights_.empty() || !coded_weights_.empty()) await_weights(kNoParameter);
  timers_.phase("products");
  for (std::size_t i = 0; i < half_weights_.size(); ++i) {
    kernels::half* to = half_weights_[i].data;
    for (std::size_t part = 0; part < linears_[i]->count; ++part) {
      const kernels::ParameterRows& rows = model_.parameters().matrix(linears_[i]->weight + part);
      kernels::weights_to_half(execution_, rows, {to, rows.rows, rows.columns, rows.columns});
      to += rows.rows * rows.columns;
    }
  }
  for (std::size_t i = 0; i < coded_weights_.size(); ++i)
    kernels::code_rows(execution_, linears_[i]->matrix, linears_[i]->form(), coded_weights_[i]);
  kernels::round_copies(execution_, buffers_.bias_copies, largest_bias_);
}

void Transformer::forward(const Tokens& tokens, const kernels::AdamStep* step, Until until) {
  const bool swaps = swap_.has_value() && step != nullptr;
  first_row_ = tokens.first_row;
  step_ = step;
  rows_ = tokens.rows();
  timers_.pass("forward");
  await_weights(model_.blocks().front().first);
  embed(tokens, step);
  const std::vector<Tokens> parts = this->parts(tokens);
  const auto finish = [&](std::size_t layer, const Tokens& part) {
    finish_mlp(layer, part, step, tap_);
    if (swaps) swap_->after_forward(layer);  // one part
  };
  for (std::size_t layer = 0; layer < buffers_.blocks.size(); ++layer) {
    await_weights(layer + 1 < buffers_.blocks.size() ? model_.blocks()[layer + 1].first : model_.final_norm().weight);
    const bool ends = until == Until::last_keys && layer + 1 == buffers_.blocks.size();
    for (const Tokens& part : parts) {
      if (layer > 0) finish(layer - 1, part);
      if (swaps) swap_->before_forward(layer);
      enter(layer, part);
      attend(layer, part, step);
      if (!ends) start_attention_output(layer, part);
    }
    if (ends) return;
    for (const Tokens& part : parts) {
      finish_attention(layer, part, step);
      transform(layer, part);
      start_mlp_output(layer, part);
    }
  }
  for (const Tokens& part : parts) finish(buffers_.blocks.size() - 1, part);
  await_weights(kNoParameter);
  leave(tokens);
}

/// Halves of whole sequences where the sums over the ranks of one can overlap with the computation of the other: also
/// where they do not, for the same bits. Hooks get whole micro-batches; blocks are swapped as a
/// whole.
std::vector<Tokens> Transformer::parts(const Tokens& tokens) const {
  if (tensor_ == nullptr || tokens.sequences < 2 || tap_ || attention_hook_ || swap_) return {tokens};
  std::vector<Tokens> halves(2, tokens);
  halves[0].sequences = (tokens.sequences + 1) / 2;
  halves[1].sequences = tokens.sequences - halves[0].sequences;
  const std::int64_t begin = halves[0].rows();
  halves[1].begin += begin;
  halves[1].first_row += begin;
  for (Tokens& half : halves) {
    const auto of_half = [&](auto& rows) {
      if (rows.size > 0) rows = {rows.data + half.begin, half.rows()};
    };
    of_half(half.ids);
    of_half(half.targets);
    of_half(half.positions);
    of_half(half.first_key);
    of_half(half.weights);
  }
  return halves;
}

Transformer::Activations Transformer::activations(std::size_t layer, const Tokens& tokens) const {
  Activations part = buffers_.blocks[layer];
  for (AnyMatrix* each :
       {&part.residual, &part.attention_input, &part.projected, &part.attended_rows, &part.mixed, &part.attention_raw,
        &part.middle, &part.mlp_input, &part.hidden, &part.activated, &part.mlp_raw})
    *each = each->rows_from(tokens.begin, tokens.rows());
  const auto of_rows = [&](auto& numbers, std::int64_t per_row) {
    if (numbers.size > 0) numbers = {numbers.data + tokens.begin * per_row, tokens.rows() * per_row};
  };
  for (kernels::NormStatistics* each :
       {&part.attention_norm, &part.attention_post_norm, &part.mlp_norm, &part.mlp_post_norm}) {
    of_rows(each->mean, 1);
    of_rows(each->inverse, 1);
  }
  of_rows(part.inverse, model_.blocks()[layer].query_key.inverses_per_row());
  of_rows(part.log_sum, settings().heads);
  if (part.kept.size > 0) {
    kernels::Attention shape =
        attention_shape(settings(), tokens.begin / tokens.length, tokens.length, kernels::AttentionImplementation::own);
    part.kept.data += shape.block_pairs();
    shape.sequences = tokens.sequences;
    part.kept.size = shape.block_pairs();
  }
  return part;
}

void Transformer::embed(const Tokens& tokens, const kernels::AdamStep* step) {
  timers_.phase("embedding");
  const AnyMatrix out = buffers_.blocks.front().residual.rows_from(0, tokens.rows());
  const Architecture& part = settings_.architecture;
  kernels::embed(execution_, model_.token_embedding(), part.first_token, tokens.ids,
                 part.tensor_rank == 0 ? model_.position_embedding() : AnyMatrix{}, tokens.positions, out);
  start_sum(out);
  await_sum(out);
  scale_embedding(out);
  drop(kEmbedding, tokens, step, out);
}

/// Forms the residual stream at the entry of a block, with the output of the block before, and its norm.
void Transformer::enter(std::size_t layer, const Tokens& tokens) {
  const Activations block = activations(layer, tokens);
  const AnyMatrix before = layer == 0 ? block.residual : activations(layer - 1, tokens).middle,
                  addend = layer == 0 ? AnyMatrix{} : sublayer(tokens);
  timers_.phase("norms");
  if (const std::optional<NormLayer>& norm = model_.blocks()[layer].attention_norm)
    normalise(*norm, before, addend, block.residual, block.attention_input, block.attention_norm);
  else if (layer > 0)
    kernels::add_rows(execution_, before, addend, block.residual);
}

void Transformer::attend(std::size_t layer, const Tokens& tokens, const kernels::AdamStep* step) {
  const Activations block = activations(layer, tokens);
  multiply(model_.blocks()[layer].projection, block.attention_input, block.projected);
  const std::int64_t queries = settings_.architecture.query_width(), keys = settings_.architecture.key_width();
  const AnyMatrix packed = block.attended_rows;
  timers_.phase("attention");
  if (transforms_queries())
    kernels::query_key(execution_, query_key(layer, tokens), block.projected, packed, block.inverse);
  if (attention_hook_ && attention_hook_(static_cast<std::int64_t>(layer), packed, block.mixed)) return;
  const kernels::Attention shape = attention(layer, tokens, step);
  if (shape.kept.size > 0)
    kernels::select_key_blocks(execution_, shape, block_choice(settings()), packed.columns_from(0, queries),
                               packed.columns_from(queries, keys), block.kept, buffers_.attention_workspace);
  settings_.attention.forward(execution_, shape, packed.columns_from(0, queries), packed.columns_from(queries, keys),
                              packed.columns_from(queries + keys, keys), block.mixed, block.log_sum,
                              buffers_.attention_workspace);
}

/// Starts the output of a sublayer, which `finish_…` reads after the sum over the ranks.
void Transformer::start_attention_output(std::size_t layer, const Tokens& tokens) {
  const Activations block = activations(layer, tokens);
  const Block& parameters = model_.blocks()[layer];
  multiply(parameters.attention_output, block.mixed,
           parameters.attention_post_norm ? block.attention_raw : sublayer(tokens));
}

/// Adds the output of the attention to the residual stream and forms the norm of the sum.
void Transformer::finish_attention(std::size_t layer, const Tokens& tokens, const kernels::AdamStep* step) {
  const Activations block = activations(layer, tokens);
  const Block& parameters = model_.blocks()[layer];
  const AnyMatrix raw = parameters.attention_post_norm ? block.attention_raw : sublayer(tokens);
  await_sum(raw);
  finish_sublayer(parameters.attention_post_norm, raw, block.attention_post_norm, attention_site(layer), tokens, step);
  timers_.phase("norms");
  if (parameters.mlp_norm)
    normalise(*parameters.mlp_norm, block.residual, sublayer(tokens), block.middle, block.mlp_input, block.mlp_norm);
  else
    kernels::add_rows(execution_, block.residual, sublayer(tokens), block.middle);
}

void Transformer::transform(std::size_t layer, const Tokens& tokens) {
  const Activations block = activations(layer, tokens);
  const Linear& up = model_.blocks()[layer].up;
  timers_.phase("products");
  // Nothing reads `hidden` where no backward pass follows: there is none of what reads a cache.
  if ((!settings_.gradients || attention_hook_) && up.index >= coded_weights_.size() && !adapts(up))
    return kernels::linear_activated(execution_, weights_of(up), block.mlp_input, block.hidden, settings().mlp,
                                     block.activated, buffers_.product_workspace);
  multiply(up, block.mlp_input, block.hidden);
  timers_.phase("activation");
  kernels::mlp_activation(execution_, settings().mlp, block.hidden, block.activated);
}

void Transformer::start_mlp_output(std::size_t layer, const Tokens& tokens) {
  const Activations block = activations(layer, tokens);
  const Block& parameters = model_.blocks()[layer];
  multiply(parameters.down, block.activated, parameters.mlp_post_norm ? block.mlp_raw : sublayer(tokens));
}

void Transformer::finish_mlp(std::size_t layer, const Tokens& tokens, const kernels::AdamStep* step, const Tap& tap) {
  const Activations block = activations(layer, tokens);
  const Block& parameters = model_.blocks()[layer];
  const AnyMatrix raw = parameters.mlp_post_norm ? block.mlp_raw : sublayer(tokens);
  await_sum(raw);
  if (tap) tap(static_cast<std::int64_t>(layer), block.mlp_input, raw);
  finish_sublayer(parameters.mlp_post_norm, raw, block.mlp_post_norm, mlp_site(layer), tokens, step);
}

void Transformer::leave(const Tokens& tokens) {
  const std::int64_t n = tokens.rows();
  timers_.phase("norms");
  normalise(model_.final_norm(), buffers_.blocks.back().middle.rows_from(0, n), buffers_.sublayer.rows_from(0, n),
            buffers_.final_residual.rows_from(0, n), buffers_.final_output.rows_from(0, n), buffers_.final_norm);
}

/// Forms the addend of the residual stream in `sublayer` from the raw output of a sublayer.
void Transformer::finish_sublayer(const std::optional<NormLayer>& norm, AnyMatrix raw,
                                  const kernels::NormStatistics& statistics, std::uint32_t site, const Tokens& tokens,
                                  const kernels::AdamStep* step) {
  timers_.phase("norms");
  if (norm) normalise(*norm, raw, {}, {}, sublayer(tokens), statistics);
  drop(site, tokens, step, sublayer(tokens));
}

// --- Head -----------------------------------------------------------------------------------------------------------

/// Number of columns of the logits in the softmax.
std::int64_t Transformer::vocabulary_of(const Tokens& tokens) const {
  return tokens.vocabulary == 0 ? settings_.architecture.vocabulary : tokens.vocabulary;
}

/// Calls each(first row, logits of a chunk).
template <class EachChunk>
void Transformer::head(const Tokens& tokens, const EachChunk& each) {
  for (std::int64_t begin = 0; begin < tokens.rows(); begin += head_chunk()) {
    const std::int64_t count = std::min(head_chunk(), tokens.rows() - begin);
    const AnyMatrix logits = buffers_.logits.rows_from(settings_.keeps_head_rows() ? begin : 0, count)
                                 .columns_from(0, model_.head().outputs());
    timers_.pass("forward");
    multiply(model_.head(), buffers_.final_output.rows_from(begin, count), logits);
    each(begin, logits);
  }
}

void Transformer::losses(const Tokens& tokens, kernels::Array<float> losses) {
  head(tokens, [&](std::int64_t begin, const AnyMatrix& logits) {
    timers_.phase("loss");
    const kernels::CrossEntropy loss{.vocabulary = vocabulary_of(tokens),
                                     .softcap = static_cast<float>(settings().logit_softcap),
                                     .temperature = tokens.temperature};
    cross_entropy(loss, logits, {tokens.targets.data + begin, logits.rows}, {losses.data + begin, logits.rows}, false);
  });
}

void Transformer::losses_and_gradient(const Tokens& tokens, const float* scale, kernels::Array<float> losses,
                                      GradientSink& sink) {
  keeps_ = settings_.keeps_head_rows();
  head(tokens, [&](std::int64_t begin, const AnyMatrix& logits) {
    timers_.phase("loss");
    const kernels::CrossEntropy loss{
        .vocabulary = vocabulary_of(tokens),
        .softcap = static_cast<float>(settings().logit_softcap),
        .scale = scale,
        .weights = tokens.weights.size == 0 ? tokens.weights
                                            : kernels::Array<const float>{tokens.weights.data + begin, logits.rows},
        .temperature = tokens.temperature};
    cross_entropy(loss, logits, {tokens.targets.data + begin, logits.rows}, {losses.data + begin, logits.rows}, true);
    timers_.pass("backward");
    const AnyMatrix input = buffers_.final_output.rows_from(begin, logits.rows),
                    gradient = buffers_.input_gradient.rows_from(begin, logits.rows);
    propagate(model_.head(), input, logits, gradient, sink);
    if (!keeps_) give_gradients(model_.head(), input, logits, sink, begin);
    await_sum(gradient);
  });
  if (keeps_)
    give_gradients(model_.head(), buffers_.final_output.rows_from(0, tokens.rows()),
                   buffers_.logits.rows_from(0, tokens.rows()).columns_from(0, model_.head().outputs()), sink);
}

/// Cross entropy over the vocabulary of all ranks.
void Transformer::cross_entropy(kernels::CrossEntropy loss, AnyMatrix logits,
                                kernels::Array<const std::int32_t> targets, kernels::Array<float> losses,
                                bool gradient) {
  if (tensor_ != nullptr) {
    loss.first_token = settings_.architecture.first_token;
    const kernels::Array<kernels::SoftmaxPart> own{buffers_.softmax_parts.data, logits.rows};
    kernels::softmax_parts(execution_, loss, logits, targets, own);
    timers_.phase("exchange");
    loss.parts = tensor_->gather(own, "softmax");
    timers_.phase("loss");
  }
  kernels::cross_entropy(execution_, loss, logits, targets, losses, gradient);
}

AnyMatrix Transformer::logits(const Tokens& tokens) {
  const std::int64_t n = tokens.rows();
  if (n > buffers_.logits.rows)
    throw error(ExitCode::internal, "{} rows of logits do not fit a chunk of {}", n, buffers_.logits.rows);
  const AnyMatrix logits = buffers_.logits.rows_from(0, n).columns_from(0, model_.head().outputs());
  multiply(model_.head(), buffers_.final_output.rows_from(0, n), logits);
  return logits;
}

std::vector<float> Transformer::logits(std::int64_t row) {
  AnyMatrix logits = buffers_.logits.rows_from(0, 1).columns_from(0, model_.head().outputs());
  multiply(model_.head(), buffers_.final_output.rows_from(row, 1), logits);
  logits = logits.columns_from(0, settings_.architecture.vocabulary);
  timers_.stop();
  std::vector<float> values(static_cast<std::size_t>(logits.columns));
  std::vector<std::uint16_t> stored(logits.type == Scalar::fp32 ? 0 : values.size());
  void* const to = stored.empty() ? static_cast<void*>(values.data()) : stored.data();
  device::copy(execution_, to, logits.data, logits.columns * kernels::bytes_of(logits.type),
               device::Direction::to_host);
  kernels::fence(execution_);
  for (std::size_t i = 0; i < stored.size(); ++i)
    values[i] = logits.type == Scalar::bf16 ? float(kernels::bf16{stored[i]}) : float(kernels::half{stored[i]});
  if (const float cap = static_cast<float>(settings().logit_softcap); cap > 0)
    for (float& value : values) value = cap * std::tanh(value / cap);
  return values;
}

// --- Operations -----------------------------------------------------------------------------------------------------

kernels::NormStatistics Transformer::first_of(const kernels::NormStatistics& all, std::int64_t rows) {
  return {{all.mean.data, all.mean.size == 0 ? 0 : rows}, {all.inverse.data, rows}};
}

void Transformer::normalise(const NormLayer& norm, AnyMatrix x, AnyMatrix addend, AnyMatrix sum, AnyMatrix y,
                            const kernels::NormStatistics& statistics) {
  kernels::norm_forward(execution_, norm.values, x, addend, sum, y, first_of(statistics, x.rows));
}

kernels::LinearWeights Transformer::weights_of(const Linear& linear) const {
  kernels::LinearWeights weights{.matrix = linear.matrix, .transposed = linear.transposed, .bias = linear.bias_values};
  // The products of all ranks with their parts of the inputs are added up: one rank adds the bias.
  if (linear.transposed && settings_.architecture.tensor_rank > 0) weights.bias = {};
  if (linear.index < half_weights_.size()) {
    const kernels::Matrix<kernels::half>& half = half_weights_[linear.index];
    weights.matrix = {half.data, Scalar::fp16, half.rows, half.columns, half.stride};
  }
  if (weights.bias.size > 0 && linear.bias < rounded_biases_.size())
    weights.rounded_bias = rounded_biases_[linear.bias];
  return weights;
}

/// rows [n, C], to which each rank of the tensor axis contributes, are to become their sums: from await_sum on.
void Transformer::start_sum(AnyMatrix rows) {
  if (tensor_ == nullptr) return;
  timers_.phase("exchange");
  tensor_->start_sum(rows, "activations");
}
void Transformer::await_sum(AnyMatrix rows) {
  if (tensor_ == nullptr) return;
  timers_.phase("exchange");
  tensor_->await(rows);
}

/// Computes y = x Wᵀ + b. A matrix that is stored transposed is divided by its inputs: y is a sum over the ranks, to be
/// awaited.
void Transformer::multiply(const Linear& linear, AnyMatrix x, AnyMatrix y) {
  timers_.phase("products");
  if (linear.index >= coded_weights_.size()) {
    kernels::linear(execution_, weights_of(linear), x, y, buffers_.product_workspace);
    if (linear.transposed) start_sum(y);
  } else {
    const kernels::CodedRows rows = kernels::coded_rows(buffers_.coded_rows, x.rows, x.columns);
    kernels::code_rows(execution_, x, kernels::Form::plain, rows);
    kernels::linear_coded(execution_, weights_of(linear), coded_weights_[linear.index], rows, y,
                          buffers_.product_workspace);
  }
  adapt(linear, x, y);
}

/// Forward and backward pass. The factor is rounded to the type of the rows, as in the transformers library.
void Transformer::scale_embedding(AnyMatrix x) {
  auto factor = static_cast<float>(settings().embedding_scale);
  if (factor == 1) return;
  if (x.type == Scalar::bf16) factor = static_cast<float>(kernels::to_bf16(factor));
  if (x.type == Scalar::fp16) factor = static_cast<float>(kernels::to_half(factor));
  kernels::scale_rows(execution_, x, factor);
}

void Transformer::drop(std::uint32_t site, const Tokens& tokens, const kernels::AdamStep* step, AnyMatrix x) {
  if (!drops(step)) return;
  kernels::dropout(execution_, {site, static_cast<float>(settings().dropout), tokens.first_row}, step, x);
}

kernels::Attention Transformer::attention(std::size_t layer, const Tokens& tokens,
                                          const kernels::AdamStep* step) const {
  const std::int64_t shorter = settings_.length / tokens.length;
  const bool whole = settings_.gradients && rows_ == settings_.rows && settings_.length % tokens.length == 0 &&
                     std::has_single_bit(static_cast<std::uint64_t>(shorter));
  kernels::Attention attention =
      attention_shape(settings(), tokens.sequences, tokens.length,
                      whole ? settings_.attention.implementation : kernels::AttentionImplementation::own);
  attention.window = settings().window_of(static_cast<std::int64_t>(layer));
  attention.first_key = tokens.first_key;
  if (settings().sparse_blocks > 0) attention.kept = activations(layer, tokens).kept;
  if (step != nullptr && settings().attention_dropout > 0)
    attention.dropout = {static_cast<float>(settings().attention_dropout), static_cast<std::uint32_t>(layer),
                         tokens.first_row, settings_.architecture.first_head, step};
  return attention;
}

kernels::QueryKey Transformer::query_key(std::size_t layer, const Tokens& tokens) const {
  kernels::QueryKey transform = model_.blocks()[layer].query_key;
  transform.positions = tokens.positions;
  return transform;
}

}  // namespace weft::language_model
