// SPDX-License-Identifier: Apache-2.0
#include "language_model/step/transformer.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>

#include "kernels/bf16.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "language_model/blocks/model_parameters.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Scalar;
using model::GradientSink;

TransformerSettings transformer_settings(const Configuration& configuration, const Architecture& architecture,
                                         const parallel::GridShape& grid, std::int64_t rank) {
  AttentionKernels attention = configuration.attention;
  if (library_attention(configuration)) attention.implementation = configuration.attention_kernels;
  const bool book_keeping = configuration.privacy.enabled && configuration.privacy.mode == privacy::Mode::book_keeping;
  return {.architecture = part_of(architecture, grid, rank),
          .type = activation_type(configuration),
          .fp8 = configuration.fp8,
          .storage = configuration.optimizer.state,
          .rows = configuration.micro_tokens(),
          .length = configuration.data.sequence,
          .shortest = configuration.data.shortest(),
          .memory = configuration.memory,
          .examples = configuration.privacy.enabled,
          .joined_examples = configuration.privacy.enabled && configuration.privacy.joins_sequences(),
          // Sums that are formed when a block is left need no rows of it afterwards.
          .block_rows_stay = book_keeping && !configuration.privacy.sums_by_part(),
          .head_rows_stay = book_keeping && trains_head(architecture),
          .attention = attention};
}

model::TensorAxis::Buffers tensor_buffers(const TransformerSettings& settings, const parallel::GridShape& grid,
                                          model::StepArena& arena, std::int64_t gathered) {
  const Architecture& part = settings.architecture;
  const std::int64_t softmax = settings.rows * std::int64_t{sizeof(kernels::SoftmaxPart)},
                     logits = aligned_columns(part.largest_vocabulary()) * kernels::bytes_of(settings.type);
  return {grid,
          settings.type,
          settings.rows,
          std::max(part.model.d_model, kMostAdapters * part.lora.rank),
          std::max({softmax, logits, gathered}),
          arena};
}

namespace {

/// Number of the first sublayer of the block that has this one.
std::size_t first_of_block(const std::vector<ResidualSublayer>& sublayers, std::size_t number) {
  while (!sublayers[number].is_first()) --number;
  return number;
}

/// The sublayers of a model with their memory.
std::vector<ResidualSublayer> sublayers_in(model::StepArena& arena, const TransformerSettings& settings,
                                           ActivationSwap::Buffers& swap) {
  // The order in which a plan lists them.
  for (const char* purpose : {"activations", "head", "backward pass"}) arena.purpose(purpose);
  std::int64_t inner_columns = 0;
  for (const Product& product : declared_parameters(settings.architecture).products)
    if (product.writes_residual) inner_columns = std::max(inner_columns, product.inputs);
  BlockMemory memory(settings, inner_columns, swap, arena);
  std::vector<ResidualSublayer> sublayers = make_sublayers(settings.architecture);
  std::map<std::string, const ResidualSublayer*> later;  // by kind
  for (auto sublayer = sublayers.rbegin(); sublayer != sublayers.rend(); ++sublayer) {
    const ResidualSublayer*& of_kind = later[sublayer->sublayer().kind()];
    sublayer->take(memory, of_kind);
    of_kind = &*sublayer;
  }
  if (settings.architecture.model.residual == Residual::parallel)
    for (std::size_t i = 1; i < sublayers.size(); ++i)
      if (!sublayers[i].is_first()) sublayers[i].read_before(sublayers[first_of_block(sublayers, i)]);
  return sublayers;
}

}  // namespace

Transformer::Buffers::Buffers(const TransformerSettings& settings, model::StepArena& arena)
    : sublayers(sublayers_in(arena, settings, swap)),
      head(settings, arena),
      norms(settings, arena),
      examples(settings, arena),
      products(settings, declared_parameters(settings.architecture), head.chunk, arena) {
  const ModelSettings& model = settings.architecture.model;
  const auto take = [&] { return arena.take_matrix(settings.type, settings.rows, model.d_model); };
  arena.purpose("activations");
  output = take();
  final_residual = take();
  final_output = take();
  final_norm = {arena.take<float>(model.norm == Norm::layer ? settings.rows : 0), arena.take<float>(settings.rows)};
  if (settings.swaps()) swap.take_host(static_cast<std::size_t>(model.layers), arena);
  if (!settings.gradients) return;
  arena.purpose("backward pass");
  // Products before a norm have other gradients than those of the residual stream.
  // Parallel sublayers need the gradient after the block until the first one has read it.
  const std::size_t shared = model.residual == Residual::parallel ? 2 : 1,
                    residuals =
                        settings.keeps_block_rows() && !model.normalises_outputs() ? sublayers.size() + 1 : shared;
  while (residual_gradients.size() < residuals) residual_gradients.push_back(take());
  gradients.input = take();
  if (model.dropout > 0 || model.normalises_outputs()) gradients.output = take();
}

Transformer::Transformer(const Model& model, const TransformerSettings& settings, run::Timers& timers,
                         model::StepArena& arena, model::TensorAxis* tensor)
    : settings_(settings),
      buffers_(settings, arena),
      examples_(settings, model.execution(), buffers_.examples),
      context_{settings_, model.layers(), examples_, model.execution(), timers, tensor},
      embedding_(context_),
      products_(context_, buffers_.products),
      norms_(context_, buffers_.norms),
      final_norm_(*model.layers().norm("final_norm")),
      head_(context_, products_, buffers_.head) {
  for (ResidualSublayer& sublayer : buffers_.sublayers) {
    sublayer.bind(context_, products_, norms_);
    if (sublayer.is_first()) first_parameters_.push_back(model.layers().first_of(block_name(sublayer.block())));
  }
  first_parameters_.push_back(final_norm_.weight);
  const std::span<const model::ParameterSpec> specs = model.parameters().specs();
  while (first_trained_ < specs.size() && specs[first_trained_].frozen) ++first_trained_;
  units_.push_back(specs[model.layers().token_table()].unit);
  for (std::size_t block = 0; block + 1 < first_parameters_.size(); ++block)
    units_.push_back(specs[first_parameters_[block]].unit);
  units_.push_back(specs[model.layers().head().weight].unit);
  if (settings.swaps()) swap_.emplace(context_.execution, buffers_.swap);
}

void Transformer::prepare_weights() {
  context_.timers.pass("forward");
  if (source_.start) source_.start();
  if (products_.copies_weights() && source_.complete) source_.complete();
  products_.prepare();
}

void Transformer::prepare_step() {
  prepare_weights();
  if (!products_.coded().any()) return;
  if (source_.complete) source_.complete();
  products_.coded().begin_step();
}

void Transformer::complete_weights() {
  prepare_weights();
  if (source_.complete) source_.complete();
  if (!source_.gathers) products_.prepare_norms();
}

Pass Transformer::pass_over(const Tokens& tokens, const kernels::AdamStep* step) const {
  Pass pass{.tokens = tokens,
            .step = step,
            .micro_batch_rows = tokens.rows(),
            .backward_follows = settings_.gradients && !attention_hook_,
            .attention = attention_hook_ ? &attention_hook_ : nullptr};
  pass.coded = step != nullptr && pass.backward_follows && settings_.fp8;
  // A tap reads inputs and outputs of sublayers, which a joined pass does not form.
  if (!tap_ && products_.applies_norms()) pass.moments = norms_.joining(pass);
  return pass;
}

/// Halves of whole sequences where the sums over the ranks of one can overlap with the computation of the other: also
/// where they do not, for the same bits. Hooks get whole micro-batches; blocks are swapped as a whole.
std::vector<Pass> Transformer::parts(const Pass& pass) const {
  if (context_.tensor == nullptr || pass.tokens.sequences < 2 || tap_ || attention_hook_ || swap_) return {pass};
  std::vector<Pass> halves(2, pass);
  Tokens &first = halves[0].tokens, &second = halves[1].tokens;
  first.sequences = (pass.tokens.sequences + 1) / 2;
  second.sequences = pass.tokens.sequences - first.sequences;
  second.begin += first.rows();
  second.first_row += first.rows();
  for (Tokens* half : {&first, &second}) {
    const auto of_half = [&](auto& rows) {
      if (rows.size > 0) rows = {rows.data + half->begin, half->rows()};
    };
    of_half(half->ids);
    of_half(half->targets);
    of_half(half->positions);
    of_half(half->first_key);
    of_half(half->weights);
  }
  return halves;
}

// --- Forward --------------------------------------------------------------------------------------------------------

void Transformer::forward(const Tokens& tokens, const kernels::AdamStep* step, Until until) {
  std::vector<ResidualSublayer>& sublayers = buffers_.sublayers;
  const bool swaps = swap_.has_value() && step != nullptr;
  const Pass pass = pass_over(tokens, step);
  tokens_ = tokens;
  context_.timers.pass("forward");
  use_forward(0);
  embedding_.forward(pass, pass.rows_of(sublayers.front().residual()));
  const std::vector<Pass> parts = this->parts(pass);
  const auto finish = [&](ResidualSublayer& sublayer, const Pass& part) {
    sublayer.finish_output(part, buffers_.output, sublayer.is_last() ? &tap_ : nullptr);
    if (swaps && sublayer.is_last()) swap_->after_forward(static_cast<std::size_t>(sublayer.block()));  // one part
  };
  for (std::size_t i = 0; i < sublayers.size(); ++i) {
    ResidualSublayer& sublayer = sublayers[i];
    const auto block = static_cast<std::size_t>(sublayer.block());
    if (sublayer.is_first()) use_forward(block + 1);
    // The attention is the first sublayer of a block.
    const bool ends = until == Until::last_keys && sublayer.is_first() && block + 2 == first_parameters_.size();
    for (const Pass& part : parts) {
      if (i > 0) finish(sublayers[i - 1], part);
      if (swaps && sublayer.is_first()) swap_->before_forward(block);
      enter(i, part);
      sublayer.forward(part);
      if (!ends) start_output(i, part);
    }
    if (ends) return;
  }
  for (const Pass& part : parts) finish(sublayers.back(), part);
  use_forward(units_.size() - 1);
  leave(pass);
}

/// Forms the residual stream before a sublayer, with the output of the one before it, and its norm. In a joined pass
/// products have done and will do that, but for the embedding.
void Transformer::enter(std::size_t number, const Pass& part) {
  std::vector<ResidualSublayer>& sublayers = buffers_.sublayers;
  if (number == 0) return sublayers[number].enter(part);
  if (part.joined()) return;
  sublayers[number].enter(part, part.rows_of(sublayers[number - 1].residual()), part.rows_of(buffers_.output));
}

/// Starts the output of a sublayer, or in a joined pass the residual stream after it.
void Transformer::start_output(std::size_t number, const Pass& part) {
  const std::vector<ResidualSublayer>& sublayers = buffers_.sublayers;
  const ResidualSublayer* const next = number + 1 < sublayers.size() ? &sublayers[number + 1] : nullptr;
  buffers_.sublayers[number].start_output(part, part.joined() ? residual_after(number) : buffers_.output, next);
}

/// [rows, C] memory of the residual stream after a sublayer.
const AnyMatrix& Transformer::residual_after(std::size_t number) const {
  const bool last = number + 1 == buffers_.sublayers.size();
  return last ? buffers_.final_residual : buffers_.sublayers[number + 1].residual();
}

/// Forms the residual stream after the last sublayer, unless its product has done that, and the final norm.
void Transformer::leave(const Pass& pass) {
  const AnyMatrix h = pass.rows_of(buffers_.final_residual), y = pass.rows_of(buffers_.output),
                  before = pass.rows_of(buffers_.sublayers.back().residual());
  norms_.forward(final_norm_, pass.joined() ? h : before, pass.joined() ? AnyMatrix{} : y, h,
                 pass.rows_of(buffers_.final_output), pass.rows_of(buffers_.final_norm));
}

// --- Head -----------------------------------------------------------------------------------------------------------

void Transformer::losses(const Tokens& tokens, kernels::Array<float> losses) {
  head_.losses({tokens}, hidden_states(tokens), losses);
}

void Transformer::losses_and_gradient(const Tokens& tokens, kernels::Array<float> losses, GradientSink& sink) {
  const Pass pass{.tokens = tokens, .sink = &sink, .rows_stay = settings_.keeps_head_rows()};
  head_.losses_and_gradient(pass, hidden_states(tokens), pass.rows_of(buffers_.gradients.input), losses);
}

std::vector<float> Transformer::logits(std::int64_t row, bool capped) {
  const AnyMatrix logits =
      head_.logits({}, buffers_.final_output.rows_from(row, 1)).columns_from(0, settings_.architecture.vocabulary);
  context_.timers.stop();
  std::vector<float> values(static_cast<std::size_t>(logits.columns));
  std::vector<std::uint16_t> stored(logits.type == Scalar::fp32 ? 0 : values.size());
  void* const to = stored.empty() ? static_cast<void*>(values.data()) : stored.data();
  device::copy(context_.execution, to, logits.data, logits.columns * kernels::bytes_of(logits.type),
               device::Direction::to_host);
  kernels::fence(context_.execution);
  for (std::size_t i = 0; i < stored.size(); ++i)
    values[i] = logits.type == Scalar::bf16 ? float(kernels::bf16{stored[i]}) : float(kernels::half{stored[i]});
  if (const float cap = static_cast<float>(context_.model().logit_softcap); capped && cap > 0)
    for (float& value : values) value = cap * std::tanh(value / cap);
  return values;
}

// --- Backward -------------------------------------------------------------------------------------------------------

void Transformer::backward(const Tokens& tokens, const kernels::AdamStep* step, GradientSink& sink) {
  std::vector<ResidualSublayer>& sublayers = buffers_.sublayers;
  Pass pass = pass_over(tokens, step);
  pass.sink = &sink;
  pass.rows_stay = settings_.keeps_block_rows();
  context_.timers.pass("backward");
  OutputGradient gradient =
      norms_.backward(pass, final_norm_, pass.rows_of(buffers_.final_residual), pass.rows_of(buffers_.final_norm),
                      pass.rows_of(buffers_.gradients.input), {}, pass.rows_of(buffers_.residual_gradients.front()));
  const bool parallel = context_.model().residual == Residual::parallel,
             stay = buffers_.residual_gradients.size() > sublayers.size();
  OutputGradient after_block = gradient;
  std::size_t memory = 0;  // of the gradient
  for (std::size_t i = sublayers.size(); i-- > 0;) {
    const auto block = static_cast<std::size_t>(sublayers[i].block());
    if (sublayers[i].is_last()) {
      if (!trains_below(block + 1)) break;
      use_backward(block + 1);
      if (swap_) swap_->before_backward(block);
      recompute(i, pass);
    }
    // The gradient before a sublayer has memory of its own or that of the gradient after it, unless another sublayer of
    // the block reads that. Parallel sublayers have the same gradient of their outputs; the sums that the norm of one
    // has left are those of another gradient.
    if (sublayers[i].is_last()) after_block = gradient;
    if (stay)
      ++memory;
    else if (parallel && !sublayers[i].is_first())
      memory = 1 - memory;
    OutputGradient output = parallel ? after_block : gradient;
    if (parallel && !sublayers[i].is_last()) output.sums = {};
    gradient = sublayers[i].backward(pass, output, gradient.rows, pass.rows_of(buffers_.residual_gradients[memory]),
                                     buffers_.gradients);
    if (sublayers[i].is_first()) {
      if (swap_) swap_->after_backward(block);
      sink.complete_from(first_parameters_[block]);
    }
  }
  if (trains_below(0)) embedding_.backward(pass, gradient.rows);
  sink.end_micro_batch();
}

void Transformer::forward_without_tokens() {
  for (std::size_t number = 0; number < units_.size(); ++number) use_forward(number);
}

void Transformer::pass_without_tokens(GradientSink& sink) {
  forward_without_tokens();
  for (std::size_t block = first_parameters_.size() - 1; block-- > 0 && trains_below(block + 1);) {
    use_backward(block + 1);
    sink.complete_from(first_parameters_[block]);
  }
  sink.end_micro_batch();
}

/// Recomputes activations of the block that ends with sublayer `last` and that memory.recompute did not keep. Those of
/// the last block are still in memory.
void Transformer::recompute(std::size_t last, const Pass& pass) {
  std::vector<ResidualSublayer>& sublayers = buffers_.sublayers;
  const Recompute plan = settings_.memory.recompute;
  if (plan == Recompute::none || last + 1 == sublayers.size()) return;
  const std::size_t first = first_of_block(sublayers, last);
  if (plan != Recompute::block) {
    for (std::size_t i = first; i <= last; ++i) sublayers[i].recompute(pass, plan);
    return;
  }
  // Everything but the input of the block and, where nothing reads it, the last output.
  const std::vector<Pass> parts = this->parts(pass);
  sublayers[first].enter(pass);
  for (std::size_t i = first; i <= last; ++i)
    for (const Pass& part : parts) {
      if (i > first) {
        sublayers[i - 1].finish_output(part, buffers_.output);
        enter(i, part);
      }
      sublayers[i].forward(part);
      if (i < last || sublayers[i].keeps_output()) sublayers[i].start_output(part, buffers_.output);
    }
  if (sublayers[last].keeps_output())
    for (const Pass& part : parts) sublayers[last].finish_output(part, buffers_.output);
}

}  // namespace weft::language_model
