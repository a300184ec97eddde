// SPDX-License-Identifier: Apache-2.0
//
// What a step must do, counted: the bytes that each phase has to move and the operations of its products. The one place
// of these formulas; `weft benchmark` holds the times against them.
#pragma once

#include <string_view>

#include "commands/shared/benchmark_settings.hpp"
#include "transcoder/settings.hpp"
#include "transcoder/model.hpp"

namespace weft::commands {

/// One rank's part of a step.
struct StepSizes {
  transcoder::Shape shape;
  std::int64_t n_features = 0;    ///< of this rank
  std::int64_t group_tokens = 0;  ///< tokens that this rank encodes and decodes
  std::int64_t own_tokens = 0;    ///< tokens whose residual it forms
  double entries = 0;             ///< active entries
  double entry_columns = 0;       ///< sum over entries of the columns of their strips, (L - s) * d
  std::int64_t row_bytes = 4;     ///< an element of inputs, products and gradient rows
  std::int64_t weight_bytes = 4;  ///< a stored weight
  double moments_bytes = 8;       ///< both stored moments of a parameter
};

struct Work {
  double bytes = 0;
  double flops = 0;  ///< of dense products
};

/// Of one phase, named as its region of time; nothing for phases that are neither (exchange).
Work work_of(std::string_view phase, Formulation, const StepSizes&);

}  // namespace weft::commands
