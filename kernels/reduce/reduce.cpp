// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in reduce_portable.cpp and reduce_cuda.cu; the other sums run through Kokkos everywhere.
#include "kernels/reduce/reduce.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::sum_parts) sum_parts;
}  // namespace portable

namespace cuda {
decltype(kernels::sum_parts) sum_parts;
}  // namespace cuda

void sum_parts(const Execution& execution, AnyMatrix parts, std::int64_t n_parts, AnyMatrix out) {
  dispatch<portable::sum_parts, cuda::sum_parts>(execution, parts, n_parts, out);
}

}  // namespace weft::kernels
