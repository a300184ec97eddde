// SPDX-License-Identifier: Apache-2.0
//
// The sequences of a micro-batch as sinks get them that need the rows of each example. All sequences are of one length:
// the rest of a short one is padding with gradient 0. An example is one sequence, or several that follow one another.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/privacy/examples.hpp"
#include "language_model/blocks/transformer_settings.hpp"
#include "model/step_arena.hpp"

namespace weft::language_model {

class ExampleRows {
 public:
  /// Takes the memory and states where the examples begin. Without TransformerSettings::examples there are none.
  struct Buffers {
    Buffers(const TransformerSettings&, model::StepArena&);
    kernels::Array<std::int64_t> offsets;  ///< first rows, [kNumbers, sequences + 1]
  };
  ExampleRows(const TransformerSettings&, const kernels::Execution&, const Buffers&);

  /// Each example of the micro-batches from now on has so many sequences. `of` is then for all rows of one.
  void join(std::span<const std::int64_t> sequences);

  /// Examples of `rows` rows of whole sequences with `of_example` rows each: one per token, per head of queries, per
  /// head of keys, or per block of norm_backward. Empty without TransformerSettings::examples.
  kernels::Examples of(std::int64_t rows, std::int64_t of_example) const;
  /// One row per token.
  kernels::Examples of(std::int64_t rows) const { return of(rows, numbers_.front()); }
  /// Number of the example that begins in a row of the micro-batch.
  std::int64_t number_of(std::int64_t row) const { return wanted_ ? row / numbers_.front() : 0; }

 private:
  static constexpr std::int64_t kNumbers = 4;

  void place(std::span<const std::int64_t> sequences);

  const bool wanted_;
  const std::array<std::int64_t, kNumbers> numbers_;  // of rows that an example may have
  const Buffers buffers_;
  const kernels::Execution execution_;
  std::vector<std::int64_t> offsets_;  // Buffers::offsets on the host
};

}  // namespace weft::language_model
