// SPDX-License-Identifier: Apache-2.0
//
// Memory of the sublayers. An array that the backward pass reads is kept: each block has its own or, with swapped
// activations, each of two sets of blocks. One that memory.recompute forms again, or that only one block needs at a
// time, is shared by all blocks.
//
// Sublayers take their arrays from the last block to the first, those of one kind in the same order in each block;
// arrays that only some blocks have come last.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <tuple>

#include "language_model/blocks/transformer_settings.hpp"
#include "model/step_arena.hpp"

namespace weft::language_model {

class BlockMemory {
 public:
  /// The lowest memory.recompute with which an array is formed again; never: each block keeps it; forward_only: the
  /// backward pass does not read it, so that it is shared by all blocks.
  enum class FormedAgain {
    forward_only = static_cast<int>(Recompute::none),
    activation = static_cast<int>(Recompute::activation),
    norm = static_cast<int>(Recompute::norm),
    block = static_cast<int>(Recompute::block),
    never
  };

  /// inner_columns: the most that `inner_gradient` is asked for. The other arguments must outlive this object.
  BlockMemory(const TransformerSettings&, std::int64_t inner_columns, ActivationSwap::Buffers&, model::StepArena&);

  /// The arrays from now on are those of a sublayer, or of what surrounds it, in a block.
  void begin(std::int64_t block, std::string kind);

  // Results of the forward pass that the backward pass reads; shared if there is none.
  kernels::AnyMatrix matrix(std::int64_t columns, FormedAgain);
  kernels::NormStatistics statistics();
  template <class T>
  kernels::Array<T> array(std::int64_t size, FormedAgain again) {
    const kernels::Array<std::byte> bytes = take("activations", size * bytes_of<T>(), keeps(again));
    return {reinterpret_cast<T*>(bytes.data), size};
  }

  // Shared by all blocks. Gradients are empty without a backward pass.
  kernels::AnyMatrix gradient(std::int64_t columns);
  kernels::Array<float> gradient_numbers(std::int64_t size);
  /// Rows for the gradient of the input of a sublayer's last product: the same memory for all sublayers.
  kernels::AnyMatrix inner_gradient(std::int64_t columns);
  kernels::Array<std::byte> workspace(std::int64_t bytes);

  const TransformerSettings& settings() const { return settings_; }
  model::StepArena& arena() { return arena_; }

 private:
  template <class T>
  static constexpr std::int64_t bytes_of() {
    return static_cast<std::int64_t>(sizeof(T));
  }
  bool keeps(FormedAgain) const;
  kernels::Array<std::byte> take(const char* purpose, std::int64_t bytes, bool kept);
  kernels::AnyMatrix take_matrix(const char* purpose, std::int64_t columns, bool kept);

  const TransformerSettings& settings_;
  ActivationSwap::Buffers& swap_;
  model::StepArena& arena_;
  const std::int64_t inner_columns_;
  std::int64_t block_ = 0;
  std::string kind_;
  std::int64_t next_ = 0;  // array of the sublayer
  std::map<std::tuple<std::int64_t, std::string, std::int64_t>, kernels::Array<std::byte>> taken_;
  kernels::AnyMatrix inner_;
};

}  // namespace weft::language_model
