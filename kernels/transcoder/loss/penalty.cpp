// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in penalty_portable.cpp and penalty_cuda.cu.
#include "kernels/transcoder/loss/penalty.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::sparsity_sums) sparsity_sums;
}
namespace cuda {
decltype(kernels::sparsity_sums) sparsity_sums;
}

void sparsity_sums(const Execution& execution, const SparsityPenalty& penalty, const SparseActivations& activations,
                   const FeatureHits& hits, Array<const float> norm, Array<float> norm_gradient, Array<double> value) {
  dispatch<portable::sparsity_sums, cuda::sparsity_sums>(execution, penalty, activations, hits, norm, norm_gradient,
                                                         value);
}

}  // namespace weft::kernels
