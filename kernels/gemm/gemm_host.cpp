// SPDX-License-Identifier: Apache-2.0
//
// The dense library on the host: OpenBLAS through CBLAS, fp32.
#include <cblas.h>

#include <algorithm>

#include "kernels/gemm/dense_library.hpp"
#include "kernels/portable.hpp"

namespace weft::kernels::dense_library {

std::int64_t workspace_bytes() { return 0; }

bool takes(Scalar a, Scalar b, Scalar c) { return a == Scalar::fp32 && b == Scalar::fp32 && c == Scalar::fp32; }

void multiply(const Execution& execution, float alpha, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form, float beta,
              AnyMatrix c, Array<std::byte>) {
  const auto size = [](std::int64_t n) { return static_cast<blasint>(n); };
  const auto transpose = [](Form form) { return form == Form::plain ? CblasNoTrans : CblasTrans; };
  const std::int64_t inner = a_form == Form::plain ? a.columns : a.rows;
  // Rows [begin, end) of C.
  const auto part = [=](std::int64_t begin, std::int64_t end) {
    const AnyMatrix from = a_form == Form::plain ? a.rows_from(begin, end - begin) : a.columns_from(begin, end - begin);
    const AnyMatrix to = c.rows_from(begin, end - begin);
    cblas_sgemm(CblasRowMajor, transpose(a_form), transpose(b_form), size(to.rows), size(to.columns), size(inner),
                alpha, static_cast<const float*>(from.data), size(from.stride), static_cast<const float*>(b.data),
                size(b.stride), beta, static_cast<float*>(to.data), size(to.stride));
  };
  // Each thread computes a part of the rows, which is faster than the library's division of one product. A
  // library built with its own threads serialises concurrent callers, so it gets the whole product.
  const std::int64_t rows = c.rows;
  const std::int64_t n_parts = std::min<std::int64_t>(space_of(execution).concurrency(), (rows + 63) / 64);
  if (n_parts == 1 || openblas_get_parallel() == OPENBLAS_THREAD) {
    part(0, rows);
    return;
  }
  for_all(execution, "gemm", n_parts, [=](std::int64_t i) { part(rows * i / n_parts, rows * (i + 1) / n_parts); });
}

bool multiply_batched(const Execution&, float, AnyMatrix, Form, AnyMatrix, Form, float, AnyMatrix, const Batch&,
                      Array<std::byte>) {
  return false;
}

bool multiply_with_epilogue(const Execution&, AnyMatrix, Form, AnyMatrix, Form, AnyMatrix, const Epilogue&,
                            Array<std::byte>) {
  return false;
}

}  // namespace weft::kernels::dense_library
