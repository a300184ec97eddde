// SPDX-License-Identifier: Apache-2.0
//
// The dense product of the encoder through cuBLASLt, row-major:
//
//   product[n, f] = < input[n], weight[f] >       input [n_tokens, d], weight [n_features, d], fp32 sums
//
// Invariant. The algorithm is fixed when a Gemm is made: the one of a record, or the library's first that does not
// split the sum over d. Nothing is timed unless `Gemm::tune` is called, so two runs of one build on one GPU type give
// the same bits. Inputs stored in fp32 are multiplied in fp32 (TF32 is off).
//
// Measured on one H200, n = 4096, d = 768, f = 32768, bf16: see docs/performance.md. The limit is the tensor cores'
// rate at the board's power limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"

namespace weft::kernels::cuda {

/// Bytes of workspace that the library may use for a product.
constexpr std::int64_t kGemmWorkspace = std::int64_t{32} << 20;

struct GemmShape {
  std::int64_t n_tokens = 0;
  std::int64_t n_features = 0;
  std::int64_t d_model = 0;
  std::int64_t input_stride = 0;  ///< elements from row to row
  std::int64_t weight_stride = 0;
  std::int64_t product_stride = 0;
  Scalar input = Scalar::bf16;    ///< fp32 or bf16, of both inputs
  Scalar product = Scalar::bf16;  ///< fp32 or bf16
  std::int64_t alignment = 16;    ///< bytes that all three pointers and strides are a multiple of (16 is fastest)

  bool operator==(const GemmShape&) const = default;
};

/// Which algorithm a shape uses on a kind of GPU with one version of the library: plain values, to be written to and
/// read from JSON.
struct GemmRecord {
  GemmShape shape;
  std::string gpu;             ///< the device's name
  std::int64_t library = 0;    ///< cublasLtGetVersion()
  std::string algorithm;       ///< the library's opaque description, hexadecimal
  std::int64_t workspace = 0;  ///< bytes it needs
  double milliseconds = 0;     ///< median when it was tuned; 0: not timed
};

/// A product of one shape, ready to be enqueued (also into a CUDA graph).
class Gemm {
 public:
  /// `record`: used when shape, GPU and library agree and the library still accepts it, ignored otherwise. Throws
  /// Error(internal) when no algorithm fits into workspace_bytes.
  Gemm(const GemmShape&, std::int64_t workspace_bytes, const GemmRecord* record = nullptr);
  ~Gemm();
  Gemm(Gemm&&) noexcept;
  Gemm& operator=(Gemm&&) noexcept;

  /// Overwrites product. Pointers are aligned as the shape says; the workspace (at least record().workspace bytes,
  /// aligned to 256) is free again when the product is there.
  void run(const Execution&, const void* input, const void* weight, void* product, Array<std::byte> workspace) const;

  const GemmRecord& record() const;

  /// What the library offers for a shape, best guess first (at most 16, none that splits the sum over d), not timed.
  static std::vector<GemmRecord> candidates(const GemmShape&, std::int64_t workspace_bytes);

  /// Times the candidates on the given matrices and returns the fastest. Synchronises: for `weft benchmark --tune`
  /// only.
  static GemmRecord tune(const Execution&, const GemmShape&, const void* input, const void* weight, void* product,
                         Array<std::byte> workspace);

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

/// The name of the current device and the library's version: what a record must agree with.
std::string gpu_name();
std::int64_t gemm_library_version();

}  // namespace weft::kernels::cuda
