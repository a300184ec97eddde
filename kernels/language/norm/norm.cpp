// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in norm_portable.cpp and norm_cuda.cu.
#include "kernels/language/norm/norm.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::norm_forward) norm_forward;
decltype(kernels::norm_backward) norm_backward;
}  // namespace portable

namespace cuda {
decltype(kernels::norm_forward) norm_forward;
decltype(kernels::norm_backward) norm_backward;
}  // namespace cuda

void norm_forward(const Execution& execution, const NormWeights& weights, AnyMatrix x, AnyMatrix addend, AnyMatrix sum,
                  AnyMatrix y, const NormStatistics& statistics) {
  dispatch<portable::norm_forward, cuda::norm_forward>(execution, weights, x, addend, sum, y, statistics);
}

void norm_backward(const Execution& execution, const NormWeights& weights, AnyMatrix h,
                   const NormStatistics& statistics, AnyMatrix dy, AnyMatrix addend, AnyMatrix dh,
                   const NormSums& sums) {
  dispatch<portable::norm_backward, cuda::norm_backward>(execution, weights, h, statistics, dy, addend, dh, sums);
}

}  // namespace weft::kernels
