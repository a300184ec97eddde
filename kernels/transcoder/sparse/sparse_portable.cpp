// SPDX-License-Identifier: Apache-2.0
#include "kernels/portable.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels::portable {
namespace {

WEFT_HOST_DEVICE inline void exchange(std::uint32_t& a, std::uint32_t& b) {
  const std::uint32_t keep = a;
  a = b;
  b = keep;
}

/// Restores the heap (largest token first) below `root` of n entries.
WEFT_HOST_DEVICE inline void sift_down(std::uint32_t* token, std::uint32_t* position, std::int64_t root,
                                       std::int64_t n) {
  for (std::int64_t child = 2 * root + 1; child < n; child = 2 * root + 1) {
    if (child + 1 < n && token[child] < token[child + 1]) ++child;
    if (token[root] >= token[child]) return;
    exchange(token[root], token[child]);
    exchange(position[root], position[child]);
    root = child;
  }
}

/// Sorts the hits of one feature by token; tokens are distinct. Most lists are sorted already or have two or three
/// hits.
WEFT_HOST_DEVICE inline void sort_hits(std::uint32_t* token, std::uint32_t* position, std::int64_t n) {
  std::int64_t sorted = 1;
  while (sorted < n && token[sorted - 1] < token[sorted]) ++sorted;
  if (sorted >= n) return;
  if (n <= 32) {
    for (std::int64_t i = sorted; i < n; ++i)
      for (std::int64_t j = i; j > 0 && token[j] < token[j - 1]; --j) {
        exchange(token[j], token[j - 1]);
        exchange(position[j], position[j - 1]);
      }
    return;
  }
  for (std::int64_t root = n / 2 - 1; root >= 0; --root) sift_down(token, position, root, n);
  for (std::int64_t last = n - 1; last > 0; --last) {
    exchange(token[0], token[last]);
    exchange(position[0], position[last]);
    sift_down(token, position, 0, last);
  }
}

}  // namespace

std::int64_t transpose_workspace(Backend, std::int64_t n_keys, std::int64_t) {
  return n_keys * static_cast<std::int64_t>(sizeof(std::uint32_t));
}

void transpose(const Execution& execution, const SparseActivations& activations, FeatureHits hits,
               Array<std::byte> workspace) {
  const Space space = space_of(execution);
  const SparseActivations a = activations;
  const std::int64_t n_keys = a.n_layers * a.n_features;
  std::uint32_t* cursor = reinterpret_cast<std::uint32_t*>(workspace.data);
  for_all(
      execution, "transpose: clear", n_keys + 1, KOKKOS_LAMBDA(std::int64_t i) {
        hits.offsets[i] = 0;
        if (i < n_keys) cursor[i] = 0;
      });
  for_all(
      execution, "transpose: count", a.n_tokens, KOKKOS_LAMBDA(std::int64_t n) {
        for (std::int64_t i = a.row_offsets[n]; i < a.row_offsets[n + 1]; ++i)
          Kokkos::atomic_inc(&hits.offsets[a.key[i] + std::int64_t{1}]);
      });
  offsets_from_counts(space, hits.offsets.data, n_keys);
  for_all(
      execution, "transpose: fill", a.n_tokens, KOKKOS_LAMBDA(std::int64_t n) {
        for (std::int64_t i = a.row_offsets[n]; i < a.row_offsets[n + 1]; ++i) {
          const std::int64_t at = hits.offsets[a.key[i]] + Kokkos::atomic_fetch_inc(&cursor[a.key[i]]);
          hits.token[at] = static_cast<std::uint32_t>(n);
          hits.position[at] = static_cast<std::uint32_t>(i);
        }
      });
  // Threads arrive in any order; sorting makes the result independent of it.
  for_all(
      execution, "transpose: sort", n_keys, KOKKOS_LAMBDA(std::int64_t k) {
        const std::int64_t begin = hits.offsets[k];
        sort_hits(hits.token.data + begin, hits.position.data + begin, hits.offsets[k + 1] - begin);
      });
}

}  // namespace weft::kernels::portable
