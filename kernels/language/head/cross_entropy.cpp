// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in cross_entropy_portable.cpp and cross_entropy_cuda.cu.
#include "kernels/language/head/cross_entropy.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::softmax_parts) softmax_parts;
decltype(kernels::cross_entropy) cross_entropy;
}  // namespace portable

namespace cuda {
decltype(kernels::softmax_parts) softmax_parts;
decltype(kernels::cross_entropy) cross_entropy;
}  // namespace cuda

void softmax_parts(const Execution& execution, const CrossEntropy& options, AnyMatrix logits,
                   Array<const std::int32_t> targets, Array<SoftmaxPart> parts) {
  dispatch<portable::softmax_parts, cuda::softmax_parts>(execution, options, logits, targets, parts);
}

void cross_entropy(const Execution& execution, const CrossEntropy& options, AnyMatrix logits,
                   Array<const std::int32_t> targets, Array<float> losses, bool gradient) {
  dispatch<portable::cross_entropy, cuda::cross_entropy>(execution, options, logits, targets, losses, gradient);
}

}  // namespace weft::kernels
