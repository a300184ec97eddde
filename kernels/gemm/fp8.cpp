// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/fp8.hpp"

#include "base/error.hpp"
#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::gemm_coded) gemm_coded;
decltype(kernels::gemm_coded_with_bias) gemm_coded_with_bias;
}  // namespace portable

namespace cuda {
decltype(kernels::gemm_coded) gemm_coded;
decltype(kernels::gemm_coded_with_bias) gemm_coded_with_bias;
}  // namespace cuda

namespace {
void require_multiples(const CodedMatrix& a, const CodedMatrix& b, const AnyMatrix& c) {
  for (const std::int64_t size : {a.codes.rows, a.codes.columns, b.codes.rows, a.codes.stride, b.codes.stride})
    if (size % kCodedMultiple != 0)
      throw Error(ExitCode::internal, "gemm_coded: a size is " + std::to_string(size) + ", not a multiple of 16");
  if (a.codes.columns != b.codes.columns || c.rows != a.codes.rows || c.columns != b.codes.rows || c.stride % 8 != 0)
    throw Error(ExitCode::internal, "gemm_coded: the operands do not fit the result");
}
}  // namespace

void gemm_coded(const Execution& execution, const CodedMatrix& a, const CodedMatrix& b, float beta, AnyMatrix c,
                bool fast, Array<std::byte> workspace) {
  require_multiples(a, b, c);
  dispatch<portable::gemm_coded, cuda::gemm_coded>(execution, a, b, beta, c, fast, workspace);
}

bool gemm_coded_with_bias(const Execution& execution, const CodedMatrix& a, const CodedMatrix& b,
                          Array<const bf16> bias, AnyMatrix c, Array<std::byte> workspace) {
  require_multiples(a, b, c);
  return dispatch<portable::gemm_coded_with_bias, cuda::gemm_coded_with_bias>(execution, a, b, bias, c, workspace);
}

}  // namespace weft::kernels
