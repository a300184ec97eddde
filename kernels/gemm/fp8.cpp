// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/fp8.hpp"

#include "base/error.hpp"
#include "kernels/dispatch.hpp"
#include "kernels/workspace.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::gemm_coded) gemm_coded;
decltype(kernels::gemm_coded_with_bias) gemm_coded_with_bias;
}  // namespace portable

namespace cuda {
decltype(kernels::gemm_coded) gemm_coded;
decltype(kernels::gemm_coded_with_bias) gemm_coded_with_bias;
}  // namespace cuda

std::int64_t coded_bytes(std::int64_t rows, std::int64_t columns) {
  Workspace layout(nullptr);
  layout.take<std::uint8_t>(rows * columns);
  layout.take<float>(rows);
  return layout.bytes();
}

CodedRows coded_rows(Array<std::byte> memory, std::int64_t rows, std::int64_t columns) {
  Workspace layout(memory.data);
  const Array<std::uint8_t> codes = layout.take<std::uint8_t>(rows * columns);
  const Array<float> scales = layout.take<float>(rows);
  if (layout.bytes() > memory.size)
    throw Error(ExitCode::internal, "coded_rows: the memory has " + std::to_string(memory.size) + " bytes (" +
                                        std::to_string(layout.bytes()) + " are needed; see coded_bytes)");
  return {{codes.data, rows, columns, columns}, scales};
}

namespace {
void require_columns(const CodedRows& x, const AnyMatrix& y) {
  if (x.codes.columns % kCodedColumns != 0 || y.columns % kCodedColumns != 0 || y.stride % 8 != 0)
    throw Error(ExitCode::internal, "gemm_coded: rows are no multiples of 16 elements");
}
}  // namespace

void gemm_coded(const Execution& execution, const CodedRows& x, const CodedRows& weight, AnyMatrix y,
                Array<std::byte> workspace) {
  require_columns(x, y);
  dispatch<portable::gemm_coded, cuda::gemm_coded>(execution, x, weight, y, workspace);
}

bool gemm_coded_with_bias(const Execution& execution, const CodedRows& x, const CodedRows& weight,
                          Array<const bf16> bias, AnyMatrix y, Array<std::byte> workspace) {
  require_columns(x, y);
  return dispatch<portable::gemm_coded_with_bias, cuda::gemm_coded_with_bias>(execution, x, weight, bias, y, workspace);
}

}  // namespace weft::kernels
