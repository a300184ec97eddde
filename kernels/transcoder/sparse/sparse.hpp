// SPDX-License-Identifier: Apache-2.0
//
// The sparse activations of one batch on one rank, by token (CSR) and by feature (CSC).
//
// Symbols: N tokens, L layers, F features per layer on this rank (its shard). A feature of layer s has the key s*F + f.
// Invariants. Within a token entries ascend by key; within a feature they ascend by token: the order of every sum over
// entries is therefore fixed. Counts are stored with the data (offsets), so no kernel needs them on the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/array.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

/// Activations by token (CSR). Arrays have their full capacity; row_offsets[n_tokens] entries are in use.
struct SparseActivations {
  std::int64_t n_tokens = 0;
  std::int64_t n_layers = 0;
  std::int64_t n_features = 0;      ///< per layer, on this rank
  Array<std::int64_t> row_offsets;  ///< [n_tokens + 1]
  Array<std::uint32_t> key;         ///< [capacity] layer * n_features + feature
  Array<float> value;               ///< [capacity] activation, > 0
};

/// The entries of a SparseActivations by feature (CSC).
struct FeatureHits {
  Array<std::int64_t> offsets;    ///< [n_layers * n_features + 1]
  Array<std::uint32_t> token;     ///< [capacity]
  Array<std::uint32_t> position;  ///< [capacity] index of the entry in the CSR arrays
};

/// Bytes of workspace of `transpose`; n_keys = n_layers * n_features, capacity as SparseActivations::key.size.
WEFT_KERNEL(transpose_workspace, std::int64_t(Backend, std::int64_t n_keys, std::int64_t capacity));

/// Converts CSR to CSC. Hits of a feature ascend by token, for any number of threads. Overwrites `hits`.
WEFT_KERNEL(transpose, void(const Execution&, const SparseActivations&, FeatureHits hits, Array<std::byte> workspace));

}  // namespace weft::kernels
