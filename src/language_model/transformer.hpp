// SPDX-License-Identifier: Apache-2.0
//
// Forward and backward pass of a language model over one micro-batch.
//
// The head is applied to chunks of rows, and the loss is part of the forward pass: of each chunk the logits, their
// gradient (in their place), the gradient of the hidden states and that of the head are formed before the next chunk.
// Logits of a whole micro-batch never exist.
//
// The backward pass forms no gradients of parameters. Each operation hands the rows from which they follow to a
// GradientSink. Activations that memory.recompute does not keep are computed again from the input of the block or from
// those that are kept: by the same calls on the same values, so that gradients have the same bits.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "kernels/bf16.hpp"
#include "kernels/language/attention/attention.hpp"
#include "kernels/language/embedding/embedding.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/language/linear/linear.hpp"
#include "kernels/language/norm/norm.hpp"
#include "language_model/activation_swap.hpp"
#include "language_model/model.hpp"
#include "report/timers.hpp"
#include "training/gradient_sink.hpp"
#include "training/step_arena.hpp"
#include "training/tensor_axis.hpp"

namespace weft::language_model {

/// Tokens of a micro-batch, where the kernels run: sequences * length rows, sequence after sequence.
struct Tokens {
  std::int64_t sequences = 0, length = 0;
  kernels::Array<const std::uint32_t> ids;
  kernels::Array<const std::int32_t> targets;    ///< kernels::kIgnored: not counted
  kernels::Array<const std::int32_t> positions;  ///< in the sequence, or in its document
  kernels::Array<const std::int32_t> first_key;  ///< first row of the sequence that a row may read; empty: 0
  std::int64_t first_row = 0;                    ///< of row 0 in the whole step; keys the dropout masks
  std::int64_t begin = 0;                        ///< of row 0 in the micro-batch, for a part of one
  kernels::Array<const float> weights = {};      ///< of the losses, in their gradient; empty: 1
  float temperature = 1;                         ///< of the distribution of the targets, if there are any
  std::int64_t vocabulary = 0;                   ///< of it: ids below this one; 0: all of the model

  std::int64_t rows() const { return sequences * length; }
};

/// Sizes and types of a Transformer.
struct TransformerSettings {
  Architecture architecture;                     ///< of the part of this rank (part_of)
  kernels::Scalar type = kernels::Scalar::fp32;  ///< of activations, their gradients and logits
  bool fp8_forward = false;                      ///< products of the blocks in 8 bits (kernels/gemm/fp8.hpp)
  kernels::StatePolicy policy = kernels::StatePolicy::fp32;
  std::int64_t rows = 0;    ///< most rows of a micro-batch
  std::int64_t length = 0;  ///< most rows of a sequence
  /// Rows of the shortest sequences of which a micro-batch may be full: `length` halved some times. 0: `length`.
  std::int64_t shortest = 0;
  MemorySettings memory = {};
  bool gradients = true;  ///< false: forward pass only; one block's activations are held
  /// Sinks get the rows of each example (GradientRows::examples): of each sequence, all of `length`. The head is then
  /// applied to whole sequences.
  bool examples = false;
  /// Inputs and output gradients of the products stay until the end of the backward pass where that costs no copies
  /// (keeps_block_rows), those of the head always: for sinks that need them then (privacy.mode = "book_keeping").
  bool block_rows_stay = false, head_rows_stay = false;
  bool adapters = true;  ///< false: those of the model are left out, it is its base
  AttentionKernels attention = {};

  bool swaps() const { return gradients && memory.swap_activations && architecture.model.layers > kResidentBlocks; }
  /// True if inputs and output gradients of the products of the blocks stay where they are formed, but gradients before
  /// a norm of a sublayer's output (GradientRows::inputs_stay). Where activations are formed twice or swapped, blocks
  /// share their memory, and sinks copy the rows.
  bool keeps_block_rows() const {
    return gradients && block_rows_stay && memory.recompute == Recompute::none && !swaps();
  }
  bool keeps_head_rows() const { return gradients && head_rows_stay; }
  /// True if products add their bias in bf16 (kernels/language/linear/linear.hpp).
  bool rounds_biases(kernels::Backend backend) const {
    return backend == kernels::Backend::cuda && type == kernels::Scalar::bf16 && architecture.model.bias;
  }
};
/// Settings of a training run: of `rank` of a grid, by default of one process. `architecture`: of the whole model.
TransformerSettings transformer_settings(const Configuration&, const Architecture&, const parallel::GridShape& = {},
                                         std::int64_t rank = 0);

/// Rows of logits and rounded biases begin at multiples of 128 elements: products are faster with aligned rows.
constexpr std::int64_t aligned_columns(std::int64_t columns) { return (columns + 127) / 128 * 128; }

/// Blocks of rows whose sums norm_backward leaves, in the backward pass over `rows` rows: of one example each where
/// sinks get examples. The number per example is the same for any number of rows.
kernels::NormBlocks norm_blocks(const TransformerSettings&, std::int64_t rows);
/// Numbers of rows that an example may have (Transformer::example_rows).
inline constexpr std::int64_t kExampleRows = 4;

/// Largest number of adapters of one product: query, key and value.
constexpr std::int64_t kMostAdapters = 3;

/// The attention of a block, without what depends on the tokens.
kernels::Attention attention_shape(const ModelSettings&, std::int64_t sequences, std::int64_t length,
                                   kernels::AttentionImplementation);
/// Every shape of the attention over a full micro-batch.
std::vector<kernels::Attention> attention_shapes(const TransformerSettings&);

class Transformer {
 public:
  /// Results of the forward pass of a block that the backward pass reads.
  struct Activations {
    kernels::AnyMatrix residual;         ///< [rows, C] input of the block
    kernels::AnyMatrix attention_input;  ///< [rows, C] its norm, or `residual`
    kernels::AnyMatrix projected;        ///< [rows, (H + 2 H_kv) d] queries | keys | values
    kernels::AnyMatrix
        attended_rows;         ///< `projected` after norm and rotation; the same memory where these are in place
    kernels::AnyMatrix mixed;  ///< [rows, H d] output of the attention
    kernels::AnyMatrix attention_raw;  ///< [rows, C] before a norm of the sublayer's output
    kernels::AnyMatrix middle;         ///< [rows, C] residual stream after the attention
    kernels::AnyMatrix mlp_input;      ///< [rows, C] its norm, or `middle`
    kernels::AnyMatrix hidden;         ///< [rows, D or 2 D]
    kernels::AnyMatrix activated;      ///< [rows, D]
    kernels::AnyMatrix mlp_raw;        ///< [rows, C] before a norm of the sublayer's output
    kernels::NormStatistics attention_norm, attention_post_norm, mlp_norm, mlp_post_norm;
    kernels::Array<float> inverse;      ///< of the norm of queries and keys
    kernels::Array<float> log_sum;      ///< [sequences * H * length]
    kernels::Array<std::uint8_t> kept;  ///< blocks of keys of sparse attention, [sequences * H * blocks * blocks]
    // Gradients of the backward pass that have memory of their own:
    kernels::AnyMatrix hidden_gradient;      ///< [rows, D] before the activation, if one product forms it
    kernels::AnyMatrix projection_gradient;  ///< [rows, (H + 2 H_kv) d]
  };

  struct Buffers {
    Buffers(const TransformerSettings&, training::StepArena&);
    std::vector<Activations> blocks;
    ActivationSwap::Buffers swap;
    kernels::AnyMatrix sublayer;        ///< [rows, C] output of the last sublayer, to be added to the residual stream
    kernels::AnyMatrix final_residual;  ///< [rows, C]
    kernels::AnyMatrix final_output;    ///< [rows, C] input of the head
    kernels::NormStatistics final_norm;
    std::int64_t head_chunk = 0;  ///< rows
    kernels::AnyMatrix logits;    ///< [rows of a chunk or all, at least Linear::outputs of the head]
    /// [rows, C] of the residual stream: one that each sublayer overwrites, or where rows stay one after each sublayer,
    /// from the last one on, and that of the embedding.
    std::vector<kernels::AnyMatrix> residual_gradients;
    kernels::AnyMatrix input_gradient;       ///< [rows, C] of the input of a sublayer, or of the head
    kernels::AnyMatrix output_gradient;      ///< [rows, C] of the output of a sublayer
    kernels::AnyMatrix wide_gradient;        ///< [rows, max(D, H d)]
    kernels::AnyMatrix mixed_gradient;       ///< [rows, H d], of the output of the attention; in `wide_gradient`
    kernels::AnyMatrix projection_gradient;  ///< [rows, (H + 2 H_kv) d]
    kernels::Array<float> query_rows, key_rows, temperature_rows;
    kernels::NormSums norm_sums;            ///< of the last norm_backward, [blocks, C] each
    kernels::Array<std::int64_t> examples;  ///< first rows, [kExampleRows, sequences + 1]
    kernels::Array<std::byte> attention_workspace, product_workspace;
    kernels::Array<kernels::SoftmaxPart> softmax_parts;  ///< [rows of a chunk] of a part of the vocabulary
    kernels::Array<kernels::bf16> rounded_biases;        ///< of all products, where their kernels take them in bf16
    kernels::Array<kernels::RoundedCopy> bias_copies;    ///< how they are formed
    /// Weights as products read them: with fp16 activations all in fp16, as stored, one after the other; with
    /// fp8_forward those of the blocks in codes. In the order of Model::linears.
    kernels::Array<kernels::half> half_weights;
    std::vector<kernels::Array<std::byte>> coded_weights;
    kernels::Array<std::byte> coded_rows;  ///< fp8_forward: the other operand of a product
    // Buffers for the adapters of a product, [rows, parts * rank] and, with dropout, [rows, inputs].
    kernels::AnyMatrix adapter_rows, adapter_gradient, adapter_input;
  };

  /// `model`, `timers`, the arena and `tensor` must outlive this object. tensor: the ranks that have the other parts of
  /// the model; null if this one has all of it. All calls that compute are then collective over them.
  Transformer(const Model&, const TransformerSettings&, report::Timers&, training::StepArena&,
              training::TensorAxis* tensor = nullptr);

  /// Weights that other ranks have updated and that may still be in transit.
  struct WeightSource {
    std::function<void()> start;                 ///< called by `prepare_weights`: requests all weights
    std::function<void(std::size_t end)> await;  ///< before parameters below `end` are read
  };
  void weights_from(WeightSource source) { source_ = std::move(source); }

  /// Forms what products read in place of the parameters: weights in fp16 or 8 bits, biases in bf16. To be called after
  /// each change of the parameters, before `forward`: once per step, whatever the number of micro-batches.
  void prepare_weights();
  /// Calls prepare_weights and makes later work wait for all weights: for work between steps. Some ranks may have none,
  /// and a replayed graph contains no wait.
  void complete_weights() {
    prepare_weights();
    await_weights(kNoParameter);
  }

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
  /// Forms the losses and the gradient of the hidden states; passes the gradient of the head to the sink. scale: [1],
  /// where the kernels run: 1 / counted targets of the step.
  void losses_and_gradient(const Tokens&, const float* scale, kernels::Array<float> losses, training::GradientSink&);
  /// Backward pass of everything below the head, after `losses_and_gradient`. `step` as in `forward`.
  void backward(const Tokens&, const kernels::AdamStep* step, training::GradientSink&);

  /// Logits of all rows after `forward`, at most head_chunk(), where the kernels run; not soft-capped. Valid until the
  /// next call of this object.
  kernels::AnyMatrix logits(const Tokens&);
  /// Logits of one row on the host, soft-capped, after `forward`. Waits.
  std::vector<float> logits(std::int64_t row);

  /// Function that is called in the forward pass with input and output of each MLP [rows, C], the output before a norm
  /// of it. What the tap writes to the output takes its place. Not called again for recomputation.
  using Tap =
      std::function<void(std::int64_t layer, const kernels::AnyMatrix& input, const kernels::AnyMatrix& output)>;
  void tap(Tap tap) { tap_ = std::move(tap); }

  /// Function that is called in the forward pass with queries | keys | values [rows, (H + 2 H_kv) d] of a block after
  /// norm and rotation, and its output of the attention [rows, H d]. True: has formed the output; false: the attention
  /// of the model forms it. For caches of keys and values.
  using AttentionHook =
      std::function<bool(std::int64_t layer, const kernels::AnyMatrix& packed, const kernels::AnyMatrix& mixed)>;
  void hook_attention(AttentionHook hook) { attention_hook_ = std::move(hook); }

  std::int64_t head_chunk() const { return buffers_.head_chunk; }

  /// The sequences of `tokens` as sinks get them. Empty without TransformerSettings::examples.
  kernels::Examples examples(const Tokens& tokens) const { return examples(tokens.rows()); }

 private:
  // Sites of dropout: the embedding, then two of each block.
  static constexpr std::uint32_t kEmbedding = 0;
  static std::uint32_t attention_site(std::size_t layer) { return 1 + 2 * static_cast<std::uint32_t>(layer); }
  static std::uint32_t mlp_site(std::size_t layer) { return 2 + 2 * static_cast<std::uint32_t>(layer); }

  std::int64_t vocabulary_of(const Tokens&) const;
  void await_weights(std::size_t end) {
    if (source_.await) source_.await(end);
  }
  /// Parts of a micro-batch that are computed in turn: the whole, or its halves.
  std::vector<Tokens> parts(const Tokens&) const;
  /// Rows of the block's activations that belong to the tokens.
  Activations activations(std::size_t layer, const Tokens&) const;
  kernels::AnyMatrix sublayer(const Tokens& tokens) const {
    return buffers_.sublayer.rows_from(tokens.begin, tokens.rows());
  }
  void embed(const Tokens&, const kernels::AdamStep*);
  void enter(std::size_t layer, const Tokens&);
  void attend(std::size_t layer, const Tokens&, const kernels::AdamStep*);
  void start_attention_output(std::size_t layer, const Tokens&);
  void finish_attention(std::size_t layer, const Tokens&, const kernels::AdamStep*);
  void transform(std::size_t layer, const Tokens&);
  void start_mlp_output(std::size_t layer, const Tokens&);
  void finish_mlp(std::size_t layer, const Tokens&, const kernels::AdamStep*, const Tap& tap = {});
  void leave(const Tokens&);
  void recompute(std::size_t layer, const Tokens&, const kernels::AdamStep*);
  void compute_again(std::size_t layer, const Tokens&, const kernels::AdamStep*);
  void backward_mlp(std::size_t layer, const Tokens&, const kernels::AdamStep*, training::GradientSink&);
  void backward_attention(std::size_t layer, const Tokens&, const kernels::AdamStep*, training::GradientSink&);
  void backward_embedding(const Tokens&, const kernels::AdamStep*, training::GradientSink&);

  static kernels::NormStatistics first_of(const kernels::NormStatistics& all, std::int64_t rows);
  void normalise(const NormLayer&, kernels::AnyMatrix x, kernels::AnyMatrix addend, kernels::AnyMatrix sum,
                 kernels::AnyMatrix y, const kernels::NormStatistics&);
  void normalise_backward(const NormLayer&, kernels::AnyMatrix h, const kernels::NormStatistics&, kernels::AnyMatrix dy,
                          kernels::AnyMatrix addend, kernels::AnyMatrix dh, training::GradientSink&);
  void multiply(const Linear&, kernels::AnyMatrix x, kernels::AnyMatrix y);
  void propagate(const Linear&, kernels::AnyMatrix x, kernels::AnyMatrix dy, kernels::AnyMatrix dx,
                 training::GradientSink&);
  bool stays(const kernels::AnyMatrix& gradient) const;
  kernels::AnyMatrix residual_gradient(std::int64_t rows) const;
  kernels::AnyMatrix next_residual_gradient(std::int64_t rows);
  void adapt(const Linear&, kernels::AnyMatrix x, kernels::AnyMatrix y);
  void adapt_backward(const Linear&, kernels::AnyMatrix x, kernels::AnyMatrix dy, kernels::AnyMatrix dx,
                      training::GradientSink&);
  bool adapts(const Linear& linear) const { return settings_.adapters && linear.adapter != kNoParameter; }
  kernels::AnyMatrix thin_rows(kernels::AnyMatrix memory, const Linear&, std::int64_t rows) const;
  kernels::AnyMatrix adapter_rows(const Linear&, kernels::AnyMatrix input);
  kernels::AnyMatrix adapter_input(const Linear&, kernels::AnyMatrix x);
  void drop_adapter(const Linear&, kernels::AnyMatrix);
  void give_gradients(const Linear&, kernels::AnyMatrix x, kernels::AnyMatrix dy, training::GradientSink&,
                      std::int64_t first_row = 0);
  void finish_sublayer(const std::optional<NormLayer>&, kernels::AnyMatrix raw, const kernels::NormStatistics&,
                       std::uint32_t site, const Tokens&, const kernels::AdamStep*);
  kernels::AnyMatrix sublayer_gradient(const std::optional<NormLayer>&, kernels::AnyMatrix raw,
                                       const kernels::NormStatistics&, std::uint32_t site, const Tokens&,
                                       const kernels::AdamStep*, training::GradientSink&);
  void scale_embedding(kernels::AnyMatrix x);
  void drop(std::uint32_t site, const Tokens&, const kernels::AdamStep*, kernels::AnyMatrix);
  bool drops(const kernels::AdamStep* step) const { return step != nullptr && settings().dropout > 0; }
  template <class EachChunk>
  void head(const Tokens&, const EachChunk&);
  void cross_entropy(kernels::CrossEntropy, kernels::AnyMatrix logits, kernels::Array<const std::int32_t> targets,
                     kernels::Array<float> losses, bool gradient);
  void start_sum(kernels::AnyMatrix rows);
  void await_sum(kernels::AnyMatrix rows);

  kernels::LinearWeights weights_of(const Linear&) const;
  void place_biases();
  void place_examples();
  std::array<std::int64_t, kExampleRows> example_rows() const;
  kernels::Examples examples(std::int64_t rows, std::int64_t of_example) const;
  kernels::Examples examples(std::int64_t rows) const { return examples(rows, settings_.length); }

  const ModelSettings& settings() const { return settings_.architecture.model; }
  kernels::Attention attention(std::size_t layer, const Tokens&, const kernels::AdamStep*) const;
  kernels::QueryKey query_key(std::size_t layer, const Tokens&) const;
  bool transforms_queries() const {
    return settings().qk_norm != QueryKeyNorm::none || settings().position == Position::rope;
  }

  const Model& model_;
  const TransformerSettings settings_;
  const kernels::Execution execution_;
  report::Timers& timers_;
  Buffers buffers_;
  training::TensorAxis* const tensor_;
  std::vector<kernels::Array<const kernels::bf16>> rounded_biases_;  // by parameter; empty: none
  std::int64_t largest_bias_ = 0;
  /// First row and step of the present forward or backward pass: they determine the masks of adapters' dropout.
  std::int64_t first_row_ = 0;
  const kernels::AdamStep* step_ = nullptr;
  std::int64_t rows_ = 0;         ///< of its micro-batch
  std::size_t residual_ = 0;      ///< sublayers that the backward pass has left
  bool keeps_ = false;            ///< rows of the present block or of the head stay
  const void* summed_ = nullptr;  ///< the matrix whose sums norm_sums.input holds
  std::optional<ActivationSwap> swap_;
  std::vector<std::int64_t> examples_;  // buffers_.examples on the host
  const std::vector<const Linear*> linears_;
  std::vector<kernels::Matrix<kernels::half>> half_weights_;  // by Linear::index; empty: none
  std::vector<kernels::CodedRows> coded_weights_;             // likewise, without the head
  Tap tap_;
  AttentionHook attention_hook_;
  WeightSource source_;
};

}  // namespace weft::language_model
