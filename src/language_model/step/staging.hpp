// SPDX-License-Identifier: Apache-2.0
// Transfer of batches of tokens to the kernels: filled in host memory, copied to where the kernels run.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "dataset/tokens/batches.hpp"
#include "language_model/step/transformer.hpp"
#include "model/step_arena.hpp"
#include "model/step_runner.hpp"

namespace weft::language_model {

class Staging {
 public:
  /// Host memory of as many batches: a copy to a GPU may run while the next ones are filled.
  static constexpr std::int64_t kSlots = model::StepRunner::kStepsAhead + 2;

  struct Buffers {
    /// Takes the buffers. weights: with weights of rows, for `send_examples`.
    Buffers(std::int64_t rows, bool document_mask, bool weights, model::StepArena&);
    struct Rows {
      kernels::Array<std::uint32_t> ids;
      kernels::Array<std::int32_t> targets, positions, first_key;
      kernels::Array<float> scale;    ///< [1]: 1 / counted targets
      kernels::Array<float> weights;  ///< [rows], or empty
    };
    Rows device;
    kernels::Array<float> losses;  ///< [rows], of an evaluation
    std::array<Rows, kSlots> host;
  };

  Staging(std::int64_t rows, bool document_mask, const kernels::Execution&, model::StepArena&, bool weights = false);

  /// Host memory of the next batch, to be filled. first_row: of the batch's rows in that of all ranks. Throws
  /// Error(internal) if it is too small.
  dataset::TokenBatch next(std::int64_t sequences, std::int64_t length, std::int64_t first_row = 0);
  /// Starts to copy the batch that `next` returned. counted: targets of the batches of all ranks.
  void send(const dataset::TokenBatch&, std::int64_t counted);
  void send(const dataset::TokenBatch& batch) { send(batch, batch.counted); }
  /// Sends like `send`, for losses of examples of so many sequences each: the loss of an example is the mean over its
  /// own targets, whatever else is in the batch.
  void send_examples(const dataset::TokenBatch&, std::span<const std::int64_t> sequences);

  /// `sequences` sequences of the batch from `first` on, where the kernels run.
  Tokens tokens(std::int64_t first, std::int64_t sequences, std::int64_t length) const;
  /// Memory for the losses of an evaluation, where the kernels run.
  kernels::Array<float> losses() const { return buffers_.losses; }
  /// Scale of the loss gradient, [1], where the kernels run.
  const float* scale() const { return buffers_.device.scale.data; }

 private:
  const kernels::Execution execution_;
  const Buffers buffers_;
  std::size_t slot_ = 0;
  bool weighted_ = false;  // by send_examples
  std::int64_t first_row_ = 0;
};

}  // namespace weft::language_model
