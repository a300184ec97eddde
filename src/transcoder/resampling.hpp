// SPDX-License-Identifier: Apache-2.0
//
// Resampling of dead features (transcoder.resample_every): after a step, each feature that has been silent for
// dead_window tokens is directed at a token of the batch, drawn with probability proportional to its squared error
// (kernels/transcoder/encode/resample.hpp). Its rows have the norms of fresh ones.
//
// A rank works on the features that it updates; inputs and gradient rows of the whole batch, of which tokens are drawn,
// are on every rank. Draws depend on the seed, the step and the feature alone. No state besides the clocks.
#pragma once

#include <cstdint>

#include "training/step_arena.hpp"
#include "transcoder/model.hpp"
#include "transcoder/settings.hpp"

namespace weft::transcoder {

class Resampling {
 public:
  /// Empty without resampling.
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, training::StepArena&);
    std::int64_t rows = 0;               ///< converted at a time
    kernels::Array<float> weights;       ///< [rows, columns of the widest]
    kernels::Array<double> sums;         ///< [batch]
    kernels::Array<std::int64_t> token;  ///< [owned]
  };

  /// What is passed by reference must outlive this object.
  Resampling(const Configuration&, const Model&, const parallel::GridShape&, const kernels::Execution&,
             training::StepArena&);

  /// True after step `step`, from 1.
  bool is_due(std::int64_t step) const;
  /// x, gradient_rows: of the batch of that step [N, L * d].
  void run(kernels::AnyMatrix x, kernels::AnyMatrix gradient_rows, std::int64_t step);

 private:
  void direct(const kernels::ParameterRows&, kernels::AnyMatrix source, float factor);

  const ModelSettings settings_;
  const std::int64_t steps_;  // of the run
  const std::uint64_t seed_;
  const Model& model_;
  const kernels::Execution execution_;
  const Buffers buffers_;
};

}  // namespace weft::transcoder
