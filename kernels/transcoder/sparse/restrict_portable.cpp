// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"
#include "kernels/transcoder/sparse/restrict.hpp"

namespace weft::kernels::portable {
namespace {

/// The entries of a group that are kept.
struct Kept {
  std::int64_t first, count;  // features
  Array<const float> bounds;

  /// Index of entry i's feature among the kept features; -1 if it is not kept.
  WEFT_HOST_DEVICE std::int64_t feature(const SparseActivations& from, std::int64_t i) const {
    const std::int64_t feature = from.key[i] % from.n_features - first;
    const bool keeps =
        feature >= 0 && feature < count && (bounds.data == nullptr || from.value[i] > bounds[from.key[i]]);
    return keeps ? feature : -1;
  }
};

}  // namespace

void restrict_features(const Execution& execution, std::span<const SparseActivations> groups,
                       std::int64_t first_feature, SparseActivations out, Array<const float> bounds) {
  const Kept kept{first_feature, out.n_features, bounds};
  for_all(
      execution, "restrict: first offset", 1, KOKKOS_LAMBDA(std::int64_t) { out.row_offsets[0] = 0; });
  std::int64_t first_token = 0;
  for (const SparseActivations& group : groups) {
    const SparseActivations from = group;
    const std::int64_t begin = first_token;
    for_all(
        execution, "restrict: count", from.n_tokens, KOKKOS_LAMBDA(std::int64_t n) {
          std::int64_t count = 0;
          for (std::int64_t i = from.row_offsets[n]; i < from.row_offsets[n + 1]; ++i)
            count += kept.feature(from, i) >= 0 ? 1 : 0;
          out.row_offsets[begin + n + 1] = count;
        });
    first_token += from.n_tokens;
  }
  offsets_from_counts(space_of(execution), out.row_offsets.data, first_token);
  first_token = 0;
  for (const SparseActivations& group : groups) {
    const SparseActivations from = group;
    const std::int64_t begin = first_token;
    for_all(
        execution, "restrict: take", from.n_tokens, KOKKOS_LAMBDA(std::int64_t n) {
          std::int64_t at = out.row_offsets[begin + n];
          for (std::int64_t i = from.row_offsets[n]; i < from.row_offsets[n + 1]; ++i) {
            const std::int64_t feature = kept.feature(from, i);
            if (feature < 0) continue;
            out.key[at] = static_cast<std::uint32_t>(from.key[i] / from.n_features * kept.count + feature);
            out.value[at++] = from.value[i];
          }
        });
    first_token += from.n_tokens;
  }
}

}  // namespace weft::kernels::portable
