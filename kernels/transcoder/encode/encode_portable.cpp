// SPDX-License-Identifier: Apache-2.0
//
// The dense product, by the dense library of the machine: CBLAS on the host, cuBLASLt on a GPU. Both are given fp32 or
// (GPU) a pair of bf16 operands; everything else is widened into the workspace first, which is exact. The product is
// rounded to bf16 once, from the fp32 sum.
#include <algorithm>
#include <string>

#include "base/error.hpp"
#include "kernels/bf16.hpp"
#include "kernels/gemm/gemm_cuda.hpp"
#include "kernels/portable.hpp"
#include "kernels/transcoder/encode/encode.hpp"

#ifdef KOKKOS_ENABLE_CUDA
#include <cublasLt.h>
#else
#include <cblas.h>
#endif

namespace weft::kernels::portable {
namespace {

/// Pieces of the workspace start at multiples of this.
constexpr std::int64_t kAlignment = 256;

std::int64_t padded(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

struct Workspace {
  Array<std::byte> bytes;
  std::int64_t used = 0;

  void* take(std::int64_t n) {
    void* piece = bytes.data + used;
    used += padded(n);
    if (used > bytes.size)
      throw Error(ExitCode::internal,
                  "the workspace of the encoder is too small (" + std::to_string(bytes.size) + " bytes)");
    return piece;
  }
};

void widen(const Space& space, AnyMatrix from, Matrix<float> to) {
  const bf16* source = static_cast<const bf16*>(from.data);
  const std::int64_t stride = from.stride;
  Kokkos::parallel_for(
      "encode: widen", Kokkos::RangePolicy<Space>(space, 0, to.rows * to.columns),
      KOKKOS_LAMBDA(std::int64_t i) { to.data[i] = source[i / to.columns * stride + i % to.columns]; });
}

void narrow(const Space& space, Matrix<const float> from, AnyMatrix to) {
  bf16* target = static_cast<bf16*>(to.data);
  const std::int64_t stride = to.stride;
  Kokkos::parallel_for(
      "encode: narrow", Kokkos::RangePolicy<Space>(space, 0, from.rows * from.columns),
      KOKKOS_LAMBDA(std::int64_t i) { target[i / from.columns * stride + i % from.columns] = to_bf16(from.data[i]); });
}

/// The matrix in fp32: itself, or a widened copy in the workspace.
AnyMatrix in_fp32(const Space& space, AnyMatrix matrix, Workspace& workspace) {
  if (matrix.type == Scalar::fp32) return matrix;
  float* data = static_cast<float*>(workspace.take(matrix.rows * matrix.columns * 4));
  widen(space, matrix, {data, matrix.rows, matrix.columns, matrix.columns});
  return {data, Scalar::fp32, matrix.rows, matrix.columns, matrix.columns};
}

#ifdef KOKKOS_ENABLE_CUDA

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ExitCode::internal, std::string(what) + " failed (" + cublasLtGetStatusString(status) + ")");
}

/// An object of the library that must be destroyed.
template <class T>
class Owned {
 public:
  using Destroy = cublasStatus_t (*)(T);
  Owned(T object, Destroy destroy) : object_(object), destroy_(destroy) {}
  Owned(const Owned&) = delete;
  ~Owned() { destroy_(object_); }
  operator T() const { return object_; }

 private:
  T object_;
  Destroy destroy_;
};

cublasLtHandle_t make_handle() {
  cublasLtHandle_t handle = nullptr;
  check(cublasLtCreate(&handle), "starting cuBLASLt");
  return handle;
}

cublasLtMatmulDesc_t make_operation() {
  cublasLtMatmulDesc_t operation = nullptr;
  check(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing the encoder product");
  return operation;
}

cublasLtMatmulPreference_t make_preference() {
  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtMatmulPreferenceCreate(&preference), "describing the encoder product");
  return preference;
}

/// A row-major matrix as the library sees it: column-major and transposed.
cublasLtMatrixLayout_t make_layout(const AnyMatrix& m) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, m.type == Scalar::bf16 ? CUDA_R_16BF : CUDA_R_32F,
                                   static_cast<std::uint64_t>(m.columns), static_cast<std::uint64_t>(m.rows), m.stride),
        "describing a matrix");
  return layout;
}

void multiply(const Execution& execution, const AnyMatrix& x, const AnyMatrix& weight, const AnyMatrix& product,
              Workspace& workspace) {
  static const Owned<cublasLtHandle_t> handle(make_handle(), cublasLtDestroy);
  const Owned<cublasLtMatmulDesc_t> operation(make_operation(), cublasLtMatmulDescDestroy);
  const Owned<cublasLtMatmulPreference_t> preference(make_preference(), cublasLtMatmulPreferenceDestroy);
  const Owned<cublasLtMatrixLayout_t> a(make_layout(weight), cublasLtMatrixLayoutDestroy);
  const Owned<cublasLtMatrixLayout_t> b(make_layout(x), cublasLtMatrixLayoutDestroy);
  const Owned<cublasLtMatrixLayout_t> c(make_layout(product), cublasLtMatrixLayoutDestroy);
  const cublasOperation_t transposed = CUBLAS_OP_T;
  check(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
        "describing the encoder product");
  const std::uint64_t library_bytes = cuda::kGemmWorkspace;
  void* library_workspace = workspace.take(cuda::kGemmWorkspace);
  // Split-K adds partial sums, and how many depends on the GPU: left out, so that the choice is the shape's alone.
  const std::uint32_t no_reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &library_bytes,
                                             sizeof library_bytes),
        "describing the encoder product");
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &no_reduction,
                                             sizeof no_reduction),
        "describing the encoder product");
  cublasLtMatmulHeuristicResult_t choice{};
  int n_choices = 0;
  check(cublasLtMatmulAlgoGetHeuristic(handle, operation, a, b, c, c, preference, 1, &choice, &n_choices),
        "choosing an algorithm for the encoder product");
  if (n_choices == 0) throw Error(ExitCode::internal, "cuBLASLt has no algorithm for the encoder product");
  const float one = 1.0f, zero = 0.0f;
  check(cublasLtMatmul(handle, operation, &one, weight.data, a, x.data, b, &zero, product.data, c, product.data, c,
                       &choice.algo, library_workspace, library_bytes, static_cast<cudaStream_t>(execution.stream)),
        "the encoder product");
}

#else

void multiply(const Execution& execution, const AnyMatrix& x, const AnyMatrix& weight, const AnyMatrix& product,
              Workspace&) {
  const auto size = [](std::int64_t n) { return static_cast<blasint>(n); };
  const auto part = [=](std::int64_t begin, std::int64_t end) {
    const AnyMatrix from = x.rows_from(begin, end - begin), to = product.rows_from(begin, end - begin);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, size(to.rows), size(to.columns), size(from.columns), 1.0f,
                static_cast<const float*>(from.data), size(from.stride), static_cast<const float*>(weight.data),
                size(weight.stride), 0.0f, static_cast<float*>(to.data), size(to.stride));
  };
  // Each thread its own tokens: on tiles of this size a tenth faster than the library's division of one product. A
  // library with threads of its own would serve the callers one after the other, so it gets the whole.
  const Space& space = space_of(execution);
  const std::int64_t rows = product.rows, n_parts = std::min<std::int64_t>(space.concurrency(), (rows + 63) / 64);
  if (n_parts == 1 || openblas_get_parallel() == OPENBLAS_THREAD) {
    part(0, rows);
    return;
  }
  Kokkos::parallel_for("encode: multiply", Kokkos::RangePolicy<Space>(space, 0, n_parts),
                       [=](std::int64_t i) { part(rows * i / n_parts, rows * (i + 1) / n_parts); });
}

#endif

/// Whether the library takes two bf16 operands (and gives bf16).
#ifdef KOKKOS_ENABLE_CUDA
constexpr bool kLibraryTakesBf16 = true;
#else
constexpr bool kLibraryTakesBf16 = false;
#endif

}  // namespace

std::int64_t encode_workspace(Backend, std::int64_t n_tokens, std::int64_t n_features, std::int64_t d_model,
                              Scalar input, StatePolicy policy, Scalar product) {
  // Whether the fp32 policy keeps two 16-bit planes is known only with the parameters: widening is always provided for
  // then.
  std::int64_t bytes = padded(n_tokens * d_model * (input == Scalar::fp32 ? 0 : 4)) +
                       padded(n_features * d_model * (policy == StatePolicy::fp32 && !kLibraryTakesBf16 ? 0 : 4)) +
                       padded(n_tokens * n_features * (product == Scalar::fp32 ? 0 : 4));
#ifdef KOKKOS_ENABLE_CUDA
  bytes += cuda::kGemmWorkspace;
#endif
  return bytes;
}

void encode_tile(const Execution& execution, AnyMatrix x, const ParameterRows& encoder, std::int64_t row_begin,
                 AnyMatrix product, Array<std::byte> workspace) {
  if (product.rows == 0 || product.columns == 0) return;
  const Space space = space_of(execution);
  Workspace pieces{workspace};
  const bool weight_is_bf16 = encoder.policy != StatePolicy::fp32 || encoder.weight_rest != nullptr;
  AnyMatrix weight{encoder.weight, weight_is_bf16 ? Scalar::bf16 : Scalar::fp32, encoder.rows, encoder.columns,
                   encoder.columns};
  weight = weight.rows_from(row_begin, product.columns);
  const bool narrow_operands = kLibraryTakesBf16 && x.type == Scalar::bf16 && weight.type == Scalar::bf16;
  if (!narrow_operands) {
    x = in_fp32(space, x, pieces);
    weight = in_fp32(space, weight, pieces);
  }
  if (product.type == Scalar::fp32 || narrow_operands) {
    multiply(execution, x, weight, product, pieces);
    return;
  }
  float* sums = static_cast<float*>(pieces.take(product.rows * product.columns * 4));
  multiply(execution, x, weight, {sums, Scalar::fp32, product.rows, product.columns, product.columns}, pieces);
  narrow(space, {sums, product.rows, product.columns, product.columns}, product);
}

}  // namespace weft::kernels::portable
