// SPDX-License-Identifier: Apache-2.0
//
// Where the optimizer state of a model is. A separate header, because settings need it and are included everywhere.
#pragma once

namespace weft::model {

/// Training needs moments, evaluation does not.
enum class Moments {
  none,
  held,
  /// Optimizer state in host memory: the moments of matrices, and the low halves of fp32 weights that are kept as two
  /// planes. What products read and all of the vectors stay where the kernels run.
  on_host
};

}  // namespace weft::model
