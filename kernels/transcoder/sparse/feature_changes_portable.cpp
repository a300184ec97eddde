// SPDX-License-Identifier: Apache-2.0
#include "kernels/lower_bound.hpp"
#include "kernels/portable.hpp"
#include "kernels/transcoder/sparse/feature_changes.hpp"

namespace weft::kernels {

void feature_changes(const Execution& execution, const SparseActivations& activations,
                     Array<const FeatureChange> changes, Array<const std::int32_t> positions, Matrix<float> out) {
  const SparseActivations a = activations;
  for_all(
      execution, "feature_changes", a.n_tokens * changes.size, KOKKOS_LAMBDA(std::int64_t i) {
        const std::int64_t row = i / changes.size, number = i % changes.size;
        const FeatureChange change = changes[number];
        float result = 0.0f;
        if (positions[row] >= change.begin && positions[row] < change.end) {
          // Entries of a row ascend by key.
          const std::int64_t end = a.row_offsets[row + 1];
          const std::int64_t first = lower_bound(a.key, a.row_offsets[row], end, change.key);
          const bool listed = first < end && a.key[first] == change.key;
          const float activation = listed ? a.value[first] : 0.0f;
          result = change.scales ? (change.value - 1.0f) * activation : change.value - activation;
        }
        out.row(row)[number] = result;
      });
}

}  // namespace weft::kernels
