// SPDX-License-Identifier: Apache-2.0
//
// The encoder's forward product, by gemm.
#include "kernels/transcoder/encode/encode_tile.hpp"

#include "base/error.hpp"
#include "kernels/gemm/gemm.hpp"

namespace weft::kernels {

std::int64_t encode_workspace(Backend backend, std::int64_t n_tokens, std::int64_t n_features, std::int64_t d_model,
                              Scalar input, StorageType storage, Scalar product) {
  // The CUDA backend keeps fp32 weights as two planes.
  return gemm_workspace(input, product_type(storage, backend == Backend::cuda), product, n_tokens, n_features, d_model);
}

void encode_tile(const Execution& execution, AnyMatrix x, const ParameterRows& encoder, std::int64_t row_begin,
                 AnyMatrix product, Array<std::byte> workspace) {
  if (product.rows == 0 || product.columns == 0) return;
  if (x.type == Scalar::fp32 && encoder.weight_rest != nullptr)
    throw Error(ExitCode::internal,
                "encode_tile: fp32 inputs with the bf16 plane of fp32 weights (only bf16 inputs are supported)");
  gemm(execution, 1.0f, x, Form::plain, product_weights(encoder).rows_from(row_begin, product.columns),
       Form::transposed, 0.0f, product, workspace);
}

}  // namespace weft::kernels
