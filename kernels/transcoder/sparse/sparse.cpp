// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in {sparse,restrict}_portable.cpp and {transpose,restrict}_cuda.cu.
#include "kernels/transcoder/sparse/sparse.hpp"

#include "kernels/dispatch.hpp"
#include "kernels/transcoder/sparse/restrict.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::transpose_workspace) transpose_workspace;
decltype(kernels::transpose) transpose;
decltype(kernels::restrict_features) restrict_features;
}  // namespace portable

namespace cuda {
decltype(kernels::transpose_workspace) transpose_workspace;
decltype(kernels::transpose) transpose;
decltype(kernels::restrict_features) restrict_features;
}  // namespace cuda

std::int64_t transpose_workspace(Backend backend, std::int64_t n_keys, std::int64_t capacity) {
  return dispatch<portable::transpose_workspace, cuda::transpose_workspace>(backend, n_keys, capacity);
}

void transpose(const Execution& execution, const SparseActivations& activations, FeatureHits hits,
               Array<std::byte> workspace) {
  dispatch<portable::transpose, cuda::transpose>(execution, activations, hits, workspace);
}

void restrict_features(const Execution& execution, std::span<const SparseActivations> groups,
                       std::int64_t first_feature, SparseActivations out, Array<const float> cut) {
  dispatch<portable::restrict_features, cuda::restrict_features>(execution, groups, first_feature, out, cut);
}

}  // namespace weft::kernels
