// SPDX-License-Identifier: Apache-2.0
//
// Counts the work of a transcoder's step: the bytes that each phase must move and the operations of its products. No
// other file has these formulas; `weft benchmark` and --profile compare measured times with them.
#pragma once

#include <span>
#include <string_view>

#include "parallel/grid.hpp"
#include "run/profile.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

/// One rank's part of a step.
struct StepSizes {
  Shape shape;
  std::int64_t n_features = 0;    ///< features of this rank
  std::int64_t group_tokens = 0;  ///< tokens that this rank encodes and decodes
  std::int64_t own_tokens = 0;    ///< tokens whose residual it forms
  std::int64_t batch_tokens = 0;  ///< tokens of the whole batch
  double entries = 0;             ///< active entries
  double entry_columns = 0;       ///< sum over entries of the columns of their strips, (L - s) * d
  std::int64_t row_bytes = 4;     ///< bytes of an element of inputs, products and gradient rows
  std::int64_t weight_bytes = 4;  ///< bytes of a stored weight
  double moments_bytes = 8;       ///< bytes of both stored moments of a parameter
  bool lists_bands = false;       ///< jumprelu with threshold_gradient = "listed"
  bool is_private = false;
  bool stores_products = true;  ///< pre-activations pass through memory between "encode" and "select"
};

/// Work of one phase, by its name in the timers; zero for phases without such work (exchange).
run::Work work_of(std::string_view phase, const StepSizes&);

/// Sizes of a step of `batch_tokens` on this rank; entries are means over ranks, from the active features per token of
/// each layer, `l0`.
StepSizes step_sizes(const Configuration&, const Shape&, const parallel::Grid&, std::span<const double> l0);

/// Bytes of every phase of a step, for --profile.
run::PhaseBytes phase_bytes(const StepSizes&);

}  // namespace weft::transcoder
