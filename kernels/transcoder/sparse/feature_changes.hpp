// SPDX-License-Identifier: Apache-2.0
//
// By how much interventions change activations: with a the activation of a feature in a row, 0 if it is not listed,
//
//   change = value - a, or (value - 1) a with `scales`, at positions [begin, end); elsewhere 0
#pragma once

#include "kernels/execution.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

struct FeatureChange {
  std::uint32_t key = 0;  ///< of the feature, as in SparseActivations
  float value = 0;
  std::int32_t begin = 0, end = 0;
  bool scales = false;
};

/// Overwrites out [rows of the activations, changes]. positions: of the rows.
void feature_changes(const Execution&, const SparseActivations&, Array<const FeatureChange> changes,
                     Array<const std::int32_t> positions, Matrix<float> out);

}  // namespace weft::kernels
