// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in convert_portable.cpp and convert_cuda.cu.
#include "kernels/convert/convert.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::normalise_rows) normalise_rows;
decltype(kernels::copy_rows) copy_rows;
}  // namespace portable

namespace cuda {
decltype(kernels::normalise_rows) normalise_rows;
decltype(kernels::copy_rows) copy_rows;
}  // namespace cuda

void normalise_rows(const Execution& execution, AnyMatrix raw, Array<const float> mean, Array<const float> scale,
                    AnyMatrix out, std::int32_t* flag) {
  dispatch<portable::normalise_rows, cuda::normalise_rows>(execution, raw, mean, scale, out, flag);
}

void copy_rows(const Execution& execution, AnyMatrix in, AnyMatrix out) {
  dispatch<portable::copy_rows, cuda::copy_rows>(execution, in, out);
}

}  // namespace weft::kernels
