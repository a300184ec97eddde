// SPDX-License-Identifier: Apache-2.0
//
// One work item a token: it walks the token's entries twice, to count and to write. There is no hand-written version:
// only measurements take parts on a GPU.
#include "kernels/portable.hpp"
#include "kernels/sparse/sparse.hpp"

namespace weft::kernels {
namespace {

struct Renumbering {
  std::int64_t n_features, part_begin, part_size;

  /// The key in the part; -1: an entry of other features.
  WEFT_HOST_DEVICE std::int64_t operator()(std::uint32_t key) const {
    const std::int64_t feature = key % n_features - part_begin;
    return feature >= 0 && feature < part_size ? key / n_features * part_size + feature : -1;
  }
};

}  // namespace

void take_part(const Execution& execution, const SparseActivations& all, std::int64_t token_begin,
               std::int64_t feature_begin, const SparseActivations& part) {
  const SparseActivations from = all, to = part;
  const Renumbering key_in_part{from.n_features, feature_begin, to.n_features};
  for_all(
      execution, "part: count", to.n_tokens + 1, KOKKOS_LAMBDA(std::int64_t n) {
        std::int64_t count = 0;
        if (n > 0)
          for (std::int64_t i = from.row_offsets[token_begin + n - 1]; i < from.row_offsets[token_begin + n]; ++i)
            count += key_in_part(from.key[i]) >= 0;
        to.row_offsets[n] = count;
      });
  offsets_from_counts(space_of(execution), to.row_offsets.data, to.n_tokens);
  for_all(
      execution, "part: write", to.n_tokens, KOKKOS_LAMBDA(std::int64_t n) {
        std::int64_t at = to.row_offsets[n];
        for (std::int64_t i = from.row_offsets[token_begin + n]; i < from.row_offsets[token_begin + n + 1]; ++i) {
          const std::int64_t key = key_in_part(from.key[i]);
          if (key < 0) continue;
          to.key[at] = static_cast<std::uint32_t>(key);
          to.value[at++] = from.value[i];
        }
      });
}

}  // namespace weft::kernels
