// SPDX-License-Identifier: Apache-2.0
//
// Dense products of gemm.hpp through cuBLASLt, and the table of the algorithms that they use.
//
// Invariant. The algorithm is fixed when a Gemm is made: that of the algorithm table, or the library's first. Only
// products of bf16 or codes into fp32 may split the sum; the parts are added in a fixed order. Nothing is timed unless
// `Gemm::tune` is called, so two runs of one build on one GPU type give the same bits. fp32 operands are multiplied in
// fp32, or in TF32 if the shape says so.
//
// Speed at the encoder's shapes: docs/performance.md. The limit is the tensor cores' rate at the board's power limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/gemm/fp8_codes.hpp"
#include "kernels/gemm/gemm.hpp"

namespace weft::kernels::cuda {

/// Bytes of workspace that the library may use for a product.
constexpr std::int64_t kGemmWorkspace = std::int64_t{32} << 20;

/// C [rows, columns] = op(A) [rows, inner] * op(B) [inner, columns]; the defaults are the encoder's forms and types.
struct GemmShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t inner = 0;
  std::int64_t a_stride = 0;  ///< elements from row to row, as stored
  std::int64_t b_stride = 0;
  std::int64_t c_stride = 0;
  Scalar input = Scalar::bf16;  ///< type of A and B: fp32, bf16, fp16, or u8: codes with a scale each (fp8.hpp)
  Scalar output = Scalar::bf16;
  std::int64_t alignment = 16;  ///< bytes that all three addresses and row lengths are a multiple of (16 is fastest)
  Form a_form = Form::plain;
  Form b_form = Form::transposed;
  Epilogue::Kind epilogue = Epilogue::Kind::none;
  std::int64_t hidden_stride = 0;                             ///< row length of Epilogue::hidden, 0 without
  bool tf32 = false;                                          ///< fp32 operands are rounded to TF32
  Batch batch = {};                                           ///< products in one call
  CodeType a_code = CodeType::e4m3, b_code = CodeType::e4m3;  ///< of operands in codes
  bool fast = false;  ///< sums of products of codes may be kept with fewer bits than fp32

  bool operator==(const GemmShape&) const = default;
};

/// The algorithm of a shape on one GPU type with one library version: plain values, written to and read from JSON.
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
  /// `record`: an entry of the algorithm table, used when shape, GPU and library agree and the library still accepts
  /// it, ignored otherwise. Throws Error(internal) when no algorithm fits into workspace_bytes.
  Gemm(const GemmShape&, std::int64_t workspace_bytes, const GemmRecord* record = nullptr);
  ~Gemm();
  Gemm(Gemm&&) noexcept;
  Gemm& operator=(Gemm&&) noexcept;

  /// C = alpha * op(A) * op(B) + beta * C. Addresses are aligned as the shape says; the workspace (at least
  /// record().workspace bytes, aligned to 256) is free again when the product is done. `epilogue`: the bias and the
  /// matrix of the shape's epilogue.
  void run(const Execution&, const void* a, const void* b, void* c, Array<std::byte> workspace, float alpha = 1.0f,
           float beta = 0.0f, const Epilogue& epilogue = {}) const;
  /// Runs the product with operands in codes and their scales.
  void run_coded(const Execution&, const void* a, const float* a_scale, const void* b, const float* b_scale, float beta,
                 void* c, Array<std::byte> workspace, const Epilogue& epilogue = {}) const;

  const GemmRecord& record() const;

  /// The library's proposals for a shape, best guess first (at most 16), not timed.
  static std::vector<GemmRecord> candidates(const GemmShape&, std::int64_t workspace_bytes);

  /// Times the candidates on the given matrices and returns the fastest. Synchronises: for `weft benchmark --tune`
  /// only.
  static GemmRecord tune(const Execution&, const GemmShape&, const void* a, const void* b, void* c,
                         Array<std::byte> workspace, const Epilogue& epilogue = {});

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

/// The product of a shape in codes (Gemm::run_coded), prepared once like those of gemm.hpp. bias: of the shape's
/// epilogue. False if the library has no algorithm with this epilogue: nothing is enqueued then.
bool multiply_coded(const Execution&, const GemmShape&, const void* a, const float* a_scale, const void* b,
                    const float* b_scale, float beta, void* c, Array<std::byte> workspace, const void* bias = nullptr);

/// Sets the algorithm table: an entry is used where it fits shape, GPU and library; before the first product of a
/// shape.
void use_gemm_records(std::vector<GemmRecord>);
/// The algorithms used so far in this process, one per shape.
std::vector<GemmRecord> gemm_records_in_use();

/// The name of the current device and the library's version: what an entry of the algorithm table must agree with.
std::string gpu_name();
std::int64_t gemm_library_version();

}  // namespace weft::kernels::cuda
