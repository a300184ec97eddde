// SPDX-License-Identifier: Apache-2.0
//
// Quality of a transcoder on validation data (docs/numbers.md): raw-space measures from fp64 sums over the whole set,
// with the training activation on consecutive batches in stored order; a short last batch keeps k per token.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "dataset/activations/description.hpp"
#include "transcoder/forward/forward.hpp"
#include "transcoder/parts/training_metrics.hpp"

namespace weft::transcoder {

/// Measures by layer; SSE and SST are sums over tokens, per dimension. NaN: not defined, because the targets of the
/// layer are constant (SST = 0).
struct EvaluationResult {
  std::int64_t tokens = 0;
  std::vector<double> nmse;                ///< sum_i SSE_i / sum_i SST_i (= FVU)
  std::vector<double> nmse_standardised;   ///< nmse with each dimension divided by the training targets' deviation,
                                           ///< without the dimensions in which the deviation is 0
  std::vector<double> explained_variance;  ///< 1 - sum_i Var(e_i) / sum_i Var(y_i)
  std::vector<double> fvu_dimension;       ///< mean of SSE_i / SST_i over the dimensions with SST_i > 0
  std::vector<double> l0;                  ///< active features per token
  std::vector<double> dead_fraction;       ///< features that never fired on this set
  std::vector<std::vector<std::int64_t>>
      density_histogram;  ///< features by floor(log10(density)): never, < 1e-6, ..., [0.1, 1]
  // Measures of all layers together: numerator and denominator are summed over the layers.
  double nmse_pooled = 0;  ///< sum over layers of SSE / sum over layers of SST
  double nmse_standardised_pooled = 0, explained_variance_pooled = 0;
};

/// Bins of density_histogram: never fired, then decades from below 1e-6 up to [0.1, 1].
constexpr int kDensityBins = 8;
/// Name of a bin of density_histogram: "never", "< 1e-6", "1e-6 .. 1e-5", ...
const char* density_bin_name(int bin);

/// Evaluates a model on a dataset. `forward` must have been constructed for batches of at least `batch_tokens`.
/// `before_batch` is called before each batch. Collective. Throws a collective Error(data) with file, row, layer and
/// column of a value that is not finite, and Error(numeric) if a reconstruction of finite activations is not.
EvaluationResult evaluate(const dataset::Description&, const Model&, const NormalisationOnDevice&, Forward&,
                          const parallel::World&, const parallel::Grid&, const kernels::Execution&,
                          std::int64_t batch_tokens, const std::function<void()>& before_batch = {});

/// Device memory that `evaluate` takes on the largest rank.
std::int64_t evaluation_device_bytes(const Shape&, const parallel::GridShape&, std::int64_t batch_tokens);

/// Logs a warning for each layer whose measures are not defined. Called on rank 0.
void warn_of_constant_layers(const dataset::Description&, const EvaluationResult&);

}  // namespace weft::transcoder
