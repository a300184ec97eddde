// SPDX-License-Identifier: Apache-2.0
//
// Forward and backward pass of a language model over one micro-batch:
//
//   embedding → sublayers: h += sublayer(norm(h)) → norm → head with the losses
//
// The formulas are those of the parts in blocks/; here is their order. The backward pass forms no gradients of
// parameters. Each operation hands the rows from which they follow to a GradientSink. Activations that memory.recompute
// does not keep are computed again from the input of the block or from those that are kept: by the same calls on the
// same values, so that gradients have the same bits.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "language_model/blocks/activation_swap.hpp"
#include "language_model/blocks/block_list.hpp"
#include "language_model/blocks/output_head.hpp"
#include "language_model/blocks/token_embedding.hpp"
#include "language_model/step/model_weights.hpp"
#include "model/data_parallel.hpp"

namespace weft::language_model {

/// Settings of a training run: of `rank` of a grid, by default of one process. `architecture`: of the whole model.
TransformerSettings transformer_settings(const Configuration&, const Architecture&, const parallel::GridShape& = {},
                                         std::int64_t rank = 0);

/// Memory of the exchanges of a transformer with these settings along the tensor axis, for sums of its rows and for
/// gathering up to `gathered` bytes of a rank, at least a row of logits; empty if the axis has one rank.
model::TensorAxis::Buffers tensor_buffers(const TransformerSettings&, const parallel::GridShape&, model::StepArena&,
                                          std::int64_t gathered = 0);

class Transformer {
 public:
  struct Buffers {
    Buffers(const TransformerSettings&, model::StepArena&);
    ActivationSwap::Buffers swap;
    std::vector<ResidualSublayer> sublayers;
    kernels::AnyMatrix output;          ///< [rows, C] output of the last sublayer, to be added to the residual stream
    kernels::AnyMatrix final_residual;  ///< [rows, C]
    kernels::AnyMatrix final_output;    ///< [rows, C] input of the head
    kernels::NormStatistics final_norm;
    /// [rows, C] of the residual stream: one that each sublayer overwrites, two in turn with parallel sublayers, or
    /// where rows stay one after each sublayer, from the last one on, and that of the embedding.
    std::vector<kernels::AnyMatrix> residual_gradients;
    GradientMemory gradients;
    OutputHead::Buffers head;
    Norms::Buffers norms;
    ExampleRows::Buffers examples;
    Products::Buffers products;
  };

  /// `model`, `timers`, the arena and `tensor` must outlive this object. tensor: the ranks that have the other parts of
  /// the model; null if this one has all of it. All calls that compute are then collective over them.
  Transformer(const Model&, const TransformerSettings&, run::Timers&, model::StepArena&,
              model::TensorAxis* tensor = nullptr);
  Transformer(const Transformer&) = delete;

  /// Weights that other ranks have updated and that may still be in transit.
  struct WeightSource {
    std::function<void()> start;  ///< called by `prepare_weights`: the parameters have changed
    /// Called before the weights of a unit are read (ParameterSpec::unit), with the unit after it. Other weights may no
    /// longer be there.
    std::function<void(std::size_t unit, std::size_t next)> use;
    std::function<void()> complete;  ///< later work finds all weights, as far as they are not gathered in every pass
    bool gathers = false;            ///< weights are gathered in every pass
  };
  void weights_from(WeightSource source) { source_ = std::move(source); }

  /// Forms what products read in place of the parameters: weights in fp16, biases in bf16. To be called after each
  /// change of the parameters, before `forward`: once per step, whatever the number of micro-batches.
  void prepare_weights();
  /// The same before the micro-batches of a step of training, whose products may be in 8 bits (coded_products()).
  void prepare_step();
  /// Calls prepare_weights and makes later work wait for all weights: for work between steps. Some ranks may have none,
  /// and a replayed graph contains no wait. Until the next prepare_weights, products of few rows apply the norms.
  void complete_weights();

  /// last_keys: a forward pass may end when the hook of the attention has the keys and values of the last layer.
  enum class Until { hidden_states, last_keys };
  /// Forms the hidden states before the head. step: draws the masks of dropout; null: no dropout and, with
  /// memory.swap_activations, no backward pass afterwards.
  void forward(const Tokens&, const kernels::AdamStep* step, Until until = Until::hidden_states);

  /// Input of the head after `forward`, [rows, C]. Valid until the next call of `forward`.
  kernels::AnyMatrix hidden_states(const Tokens& tokens) const {
    return buffers_.final_output.rows_from(0, tokens.rows());
  }
  /// Forms the loss of each target, [rows]. Call it after `forward`.
  void losses(const Tokens&, kernels::Array<float> losses);
  /// Forms the losses and the gradient of the hidden states; passes the gradient of the head to the sink.
  void losses_and_gradient(const Tokens&, kernels::Array<float> losses, model::GradientSink&);
  /// Backward pass of everything below the head, after `losses_and_gradient`. `step` as in `forward`.
  void backward(const Tokens&, const kernels::AdamStep* step, model::GradientSink&);

  /// The exchanges of `forward`, or of all passes over a micro-batch, in which other ranks have tokens and this one has
  /// none.
  void forward_without_tokens();
  void pass_without_tokens(model::GradientSink&);

  /// Logits of all rows after `forward`, at most head_chunk(), where the kernels run; not soft-capped. Valid until the
  /// next call of this object.
  kernels::AnyMatrix logits(const Tokens& tokens) { return head_.logits({tokens}, hidden_states(tokens)); }
  /// Logits of the whole vocabulary: of a divided model gathered in `all` [rows, whole vocabulary].
  kernels::AnyMatrix all_logits(const Tokens& tokens, kernels::AnyMatrix all) {
    return head_.all_logits({tokens}, hidden_states(tokens), all);
  }
  /// Logits of one row on the host, soft-capped or as they are before, after `forward`. Of a divided model those of
  /// this rank. Waits.
  std::vector<float> logits(std::int64_t row, bool capped = true);

  using Tap = language_model::Tap;
  /// Sets the tap, which recomputation does not call.
  void tap(Tap tap) { tap_ = std::move(tap); }
  /// Sets the hook of caches of keys and values, and that of all norms but those of queries and keys.
  void hook_attention(AttentionHook hook) { attention_hook_ = std::move(hook); }
  void hook_norms(NormHook hook) { norms_.hook(std::move(hook)); }
  /// The tokens of the present or last `forward`.
  const Tokens& tokens() const { return tokens_; }

  /// The products in 8 bits: to be told of the ends of steps, and of the state of the run.
  CodedProducts& coded_products() { return products_.coded(); }

  std::int64_t head_chunk() const { return buffers_.head.chunk; }
  /// True if no call waits on the host for other ranks: then a graph can contain it.
  bool leaves_the_host_free() const { return context_.tensor == nullptr || context_.tensor->leaves_the_host_free(); }

  // For passes that freeze what the last forward pass formed.
  const std::vector<ResidualSublayer>& sublayers() const { return buffers_.sublayers; }
  const NormLayer& final_norm() const { return final_norm_; }
  const kernels::NormStatistics& final_statistics() const { return buffers_.final_norm; }

  /// Each example of the next micro-batches has so many sequences; with TransformerSettings::joined_examples.
  void join_examples(std::span<const std::int64_t> sequences) { examples_.join(sequences); }
  /// The sequences of `tokens` as sinks get them. Empty without TransformerSettings::examples.
  kernels::Examples examples(const Tokens& tokens) const { return examples_.of(tokens.rows()); }

 private:
  /// Weights of the embedding (0), of block number - 1, or of the head (after the blocks), in forward and backward
  /// pass.
  void use_forward(std::size_t number) { use(number, number + 1 < units_.size() ? units_[number + 1] : kNoUnit); }
  void use_backward(std::size_t number) { use(number, number > 1 ? units_[number - 1] : kNoUnit); }
  void use(std::size_t number, std::size_t next) {
    if (source_.use) source_.use(units_[number], next);
    products_.prepare_unit(units_[number]);
  }
  /// The pass over the tokens of a micro-batch.
  Pass pass_over(const Tokens&, const kernels::AdamStep*) const;
  /// Parts of a micro-batch that are computed in turn: the whole, or its halves.
  std::vector<Pass> parts(const Pass&) const;
  const kernels::AnyMatrix& residual_after(std::size_t number) const;
  void enter(std::size_t number, const Pass& part);
  void start_output(std::size_t number, const Pass& part);
  void leave(const Pass&);
  void recompute(std::size_t last, const Pass&);

  /// True if the backward pass goes on below block number `block`, or below the head after the last one: parameters
  /// there are trained, or swapped activations are to come back.
  bool trains_below(std::size_t block) const { return swap_ || first_trained_ < first_parameters_[block]; }

  static constexpr std::size_t kNoUnit = model::DataParallel::kNoUnit;

  const TransformerSettings settings_;
  Buffers buffers_;
  ExampleRows examples_;
  const Context context_;
  const TokenEmbedding embedding_;
  Products products_;
  Norms norms_;
  const NormLayer final_norm_;
  const OutputHead head_;
  std::optional<ActivationSwap> swap_;
  std::vector<std::size_t> first_parameters_;  // by block, then of the final norm
  std::size_t first_trained_ = 0;              // parameter
  std::vector<std::size_t> units_;             // of the embedding, the blocks and the head
  Tap tap_;
  AttentionHook attention_hook_;
  Tokens tokens_;
  WeightSource source_;
};

}  // namespace weft::language_model
