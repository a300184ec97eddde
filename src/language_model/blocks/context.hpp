// SPDX-License-Identifier: Apache-2.0
//
// The tokens of a micro-batch, the state of one pass over them, and what all parts of a transformer compute with.
#pragma once

#include <cstdint>
#include <functional>

#include "kernels/language/embedding/embedding.hpp"
#include "kernels/language/linear/linear_operands.hpp"
#include "kernels/optimize/adam.hpp"
#include "language_model/blocks/example_rows.hpp"
#include "language_model/blocks/layers.hpp"
#include "model/gradient_sink.hpp"
#include "model/tensor_axis.hpp"
#include "run/timers.hpp"

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
  const float* scale = nullptr;                  ///< [1], of the gradient of the loss: 1 / counted targets of the step
  kernels::Array<const float> weights = {};      ///< of the losses, in their gradient; empty: 1
  float temperature = 1;                         ///< of the distribution of the targets, if there are any
  double top_p = 1;                              ///< of it, as of SampleRule; 1: all ids
  std::int64_t vocabulary = 0;                   ///< of it: ids below this one; 0: all of the model
  bool drops = true;                             ///< false: no dropout, as where texts are generated
  /// In fp32 the bits of a row of the forward pass depend on its text alone: neither on the other rows nor on whether
  /// its keys come from the pass or from a cache.
  bool by_row = false;

  std::int64_t rows() const { return sequences * length; }
};

/// Function that is called in the forward pass with input and output of each MLP [rows, C], the output before a norm of
/// it. What the tap writes to the output takes its place.
using Tap = std::function<void(std::int64_t layer, const kernels::AnyMatrix& input, const kernels::AnyMatrix& output)>;

/// Function that is called in the forward pass with queries | keys | values [rows, (H + 2 H_kv) d] of a block after
/// norm and rotation, and its output of the attention [rows, H d]. True: has formed the output; false: the attention of
/// the model forms it.
using AttentionHook =
    std::function<bool(std::int64_t layer, const kernels::AnyMatrix& packed, const kernels::AnyMatrix& mixed)>;

/// Function that forms a norm in place of the model: h = x + addend in `sum`, if there is an addend, and the norm of h
/// in y. Called in the order of the forward pass.
using NormHook =
    std::function<void(const kernels::NormWeights&, const kernels::AnyMatrix& x, const kernels::AnyMatrix& addend,
                       const kernels::AnyMatrix& sum, const kernels::AnyMatrix& y, const kernels::NormStatistics&)>;

/// One pass over a micro-batch, or over a part of one.
struct Pass {
  Tokens tokens;
  const kernels::AdamStep* step = nullptr;  ///< draws the masks of dropout; null: no step of training
  std::int64_t micro_batch_rows = 0;
  bool backward_follows = false;             ///< false: nothing reads the activations afterwards
  bool coded = false;                        ///< products are those of CodedProducts, where it has them
  const AttentionHook* attention = nullptr;  ///< null: none
  /// Moments of the residual stream of a joined pass, whose products add their outputs to it and apply the norms of it
  /// (kernels/language/linear/linear_operands.hpp); empty: norms and sums have kernels of their own.
  kernels::Array<kernels::Moments> moments = {};
  // Members that a backward pass sets:
  model::GradientSink* sink = nullptr;
  bool rows_stay = false;  ///< rows that sinks get stay until the end of the pass (GradientRows::inputs_stay)

  bool joined() const { return moments.size > 0; }
  /// True if values are dropped where a probability says so.
  bool drops() const { return step != nullptr && tokens.drops; }
  /// Rows of the tokens among those of a micro-batch.
  kernels::AnyMatrix rows_of(const kernels::AnyMatrix& matrix) const {
    return matrix.rows_from(tokens.begin, tokens.rows());
  }
  /// Numbers of the tokens, `per_row` for each, among those of a micro-batch. An empty array stays empty.
  template <class T>
  kernels::Array<T> rows_of(const kernels::Array<T>& numbers, std::int64_t per_row) const {
    if (numbers.size == 0) return numbers;
    return {numbers.data + tokens.begin * per_row, tokens.rows() * per_row};
  }
  kernels::NormStatistics rows_of(const kernels::NormStatistics& statistics) const {
    return {rows_of(statistics.mean, 1), rows_of(statistics.inverse, 1)};
  }
};

/// Gradient of the output of a product, [rows, outputs].
struct OutputGradient {
  kernels::AnyMatrix rows;
  kernels::AnyMatrix sums = {};  ///< of its blocks of rows (norm_blocks), [blocks, outputs]; without data: not formed
  bool stays = true;             ///< false: the next sublayer overwrites it
};

/// What all parts of a transformer compute with.
struct Context {
  const TransformerSettings& settings;
  const Layers& layers;
  const ExampleRows& examples;
  kernels::Execution execution;
  run::Timers& timers;
  model::TensorAxis* tensor;  ///< null: this rank has the whole model

  const ModelSettings& model() const { return settings.architecture.model; }

  /// rows [n, C], to which each rank of the tensor axis contributes, are to become their sums: from await_sum on.
  void start_sum(kernels::AnyMatrix rows) const {
    if (tensor == nullptr) return;
    timers.phase("exchange");
    tensor->start_sum(rows, "activations");
  }
  void await_sum(kernels::AnyMatrix rows) const {
    if (tensor == nullptr) return;
    timers.phase("exchange");
    tensor->await(rows);
  }
  bool drops(const Pass& pass) const { return pass.drops() && model().dropout > 0; }
  /// Dropout in place, if there is any. Sites of the masks: the embedding, then the sublayers.
  void drop(std::uint32_t site, const Pass& pass, kernels::AnyMatrix rows) const {
    if (!drops(pass)) return;
    kernels::dropout(execution, {site, static_cast<float>(model().dropout), pass.tokens.first_row}, pass.step, rows);
  }
};

}  // namespace weft::language_model
