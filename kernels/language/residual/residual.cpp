// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in residual_portable.cpp and residual_cuda.cu.
#include "kernels/language/residual/residual.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::add_bias) add_bias;
decltype(kernels::add_rows) add_rows;
decltype(kernels::scale_rows) scale_rows;
}  // namespace portable

namespace cuda {
decltype(kernels::add_bias) add_bias;
decltype(kernels::add_rows) add_rows;
decltype(kernels::scale_rows) scale_rows;
}  // namespace cuda

void add_bias(const Execution& execution, AnyMatrix rows, Array<const float> bias) {
  dispatch<portable::add_bias, cuda::add_bias>(execution, rows, bias);
}

void add_rows(const Execution& execution, AnyMatrix x, AnyMatrix addend, AnyMatrix sum) {
  dispatch<portable::add_rows, cuda::add_rows>(execution, x, addend, sum);
}

void scale_rows(const Execution& execution, AnyMatrix rows, float factor) {
  dispatch<portable::scale_rows, cuda::scale_rows>(execution, rows, factor);
}

}  // namespace weft::kernels
