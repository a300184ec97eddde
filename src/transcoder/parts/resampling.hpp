// SPDX-License-Identifier: Apache-2.0
//
// Resampling of dead features (transcoder.resample_every): after a step, each feature that has been silent for
// dead_window tokens is directed at a token of the batch, drawn with probability proportional to its squared error
// (kernels/transcoder/encode/resample.hpp). Its rows have the norms of fresh ones.
//
// A rank works on the features that it updates; inputs and gradient rows of the whole batch, from which tokens are
// drawn, are on every rank. Draws depend on the seed, the step and the feature alone. The clocks are the only state.
#pragma once

#include <cstdint>

#include "transcoder/parts/part.hpp"

namespace weft::transcoder {

class Resampling final : public Part {
 public:
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);
    std::int64_t rows = 0;               ///< rows converted at a time
    kernels::Array<float> weights;       ///< [rows, columns of the widest matrix]
    kernels::Array<double> sums;         ///< [batch]
    kernels::Array<std::int64_t> token;  ///< [owned]
  };

  static bool wanted(const Configuration& configuration, const Shape&) {
    return configuration.transcoder.resample_every > 0;
  }

  explicit Resampling(PartContext&);

  /// Resamples after every resample_every-th step, up to transcoder.resample_end. Other ranks of the data axis receive
  /// the changed decoder with the next step. Collective.
  void after_step(std::int64_t step) override;

 private:
  bool is_due(std::int64_t step) const;
  void resample(kernels::AnyMatrix x, kernels::AnyMatrix gradient_rows, std::int64_t step);
  void direct(const kernels::ParameterRows&, kernels::AnyMatrix source, float factor);

  const ModelSettings settings_;
  const std::int64_t steps_;  // steps of the run
  const std::uint64_t seed_;
  const Model& model_;
  const Forward& forward_;
  DataAxis& data_axis_;
  const GradientRows& gradient_rows_;
  std::int64_t& changes_;
  run::Timers& timers_;
  const kernels::Execution execution_;
  const Buffers buffers_;
};

}  // namespace weft::transcoder
