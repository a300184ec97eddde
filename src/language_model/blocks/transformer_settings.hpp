// SPDX-License-Identifier: Apache-2.0
//
// Sizes and types of a Transformer.
#pragma once

#include "kernels/execution.hpp"
#include "kernels/language/norm/norm.hpp"
#include "language_model/blocks/activation_swap.hpp"
#include "language_model/blocks/architecture.hpp"

namespace weft::language_model {

/// Sizes and types of a Transformer.
struct TransformerSettings {
  Architecture architecture;                     ///< of the part of this rank (part_of)
  kernels::Scalar type = kernels::Scalar::fp32;  ///< of activations, their gradients and logits
  bool fp8 = false;                              ///< products of training steps in 8 bits (coded_products.hpp)
  kernels::StorageType storage = kernels::StorageType::fp32;
  std::int64_t rows = 0;    ///< most rows of a micro-batch
  std::int64_t length = 0;  ///< most rows of a sequence
  /// Rows of the shortest sequences of which a micro-batch may be full: `length` halved some times. 0: `length`.
  std::int64_t shortest = 0;
  MemorySettings memory = {};
  bool gradients = true;  ///< false: forward pass only; one block's activations are held
  /// Sinks get the rows of each example (GradientRows::examples): of each sequence, all of `length`. The head is then
  /// applied to whole sequences.
  bool examples = false;
  /// An example may have several sequences (ExampleRows::join). The head is then applied to all rows at once.
  bool joined_examples = false;
  /// Inputs and output gradients of the products stay until the end of the backward pass where that costs no copies
  /// (keeps_block_rows), those of the head always: for sinks that need them then (privacy.mode = "book_keeping").
  bool block_rows_stay = false, head_rows_stay = false;
  bool gathers_weights = false;  ///< the weights of a unit are there while it is computed (model/weight_slots.hpp)
  bool adapters = true;          ///< false: those of the model are left out, it is its base
  AttentionKernels attention = {};

  /// True if training steps multiply in 8 bits in this block: the first and the last one have larger errors.
  bool codes(std::int64_t block) const {
    return fp8 && gradients && block > 0 && block + 1 < architecture.model.layers;
  }
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
    return backend == kernels::Backend::cuda && type == kernels::Scalar::bf16 && architecture.model.has_biases();
  }
  /// True if products of few rows may apply the norms: those of the inputs of sublayers whose outputs are added to the
  /// residual stream as a product forms them.
  bool joins_norms(kernels::Backend backend) const {
    const ModelSettings& model = architecture.model;
    return backend == kernels::Backend::cuda && type == kernels::Scalar::bf16 &&
           !(adapters && architecture.lora.rank > 0) && architecture.tensor_ranks == 1 &&
           model.residual != Residual::parallel && model.normalises_inputs() && !model.normalises_outputs();
  }
};

/// Rows of logits and rounded biases begin at multiples of 128 elements: products are faster with aligned rows.
constexpr std::int64_t aligned_columns(std::int64_t columns) { return (columns + 127) / 128 * 128; }

/// Blocks of rows whose sums norm_backward leaves, in the backward pass over `rows` rows: of one example each where
/// sinks get examples. The number per example is the same for any number of rows.
inline kernels::NormBlocks norm_blocks(const TransformerSettings& settings, std::int64_t rows) {
  return settings.examples ? kernels::NormBlocks::of(settings.rows, settings.length) : kernels::NormBlocks::of(rows);
}

}  // namespace weft::language_model
