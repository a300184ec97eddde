// SPDX-License-Identifier: Apache-2.0
//
// The dense library of this build, as gemm.hpp uses it: gemm_host.cpp (OpenBLAS) or gemm_cuda.cpp (cuBLASLt).
#pragma once

#include "kernels/gemm/gemm.hpp"

namespace weft::kernels::dense_library {

/// Bytes of workspace of `multiply`.
std::int64_t workspace_bytes();

/// True if the library multiplies operands of these types into a result of this type.
bool takes(Scalar a, Scalar b, Scalar c);

/// Computes `gemm`, for types that the library takes and sizes above 0.
void multiply(const Execution&, float alpha, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form, float beta,
              AnyMatrix c, Array<std::byte> workspace);

/// Computes `gemm_batched`, for types that the library takes and sizes above 0. False if it has no batched product.
bool multiply_batched(const Execution&, float alpha, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form, float beta,
                      AnyMatrix c, const Batch&, Array<std::byte> workspace);

/// Computes `gemm_with_epilogue`, for sizes above 0.
bool multiply_with_epilogue(const Execution&, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form, AnyMatrix c,
                            const Epilogue&, Array<std::byte> workspace);

}  // namespace weft::kernels::dense_library
