// SPDX-License-Identifier: Apache-2.0
//
// cuBLASLt is column-major. It reads the transpose of each row-major matrix, so it computes C^T = op(B)^T op(A)^T: its
// first operand is B, its second is A, and an operand that is plain in row-major order is plain for it.
#include "kernels/gemm/gemm_cuda.hpp"

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "kernels/gemm/dense_library.hpp"

namespace weft::kernels::cuda {
namespace {

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ExitCode::internal,
                std::string("cuBLASLt: ") + what + " failed (status " + std::to_string(static_cast<int>(status)) + ")");
}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    throw Error(ExitCode::internal, std::string("CUDA: ") + what + " failed (" + cudaGetErrorString(status) + ")");
}

/// One handle per process. It holds only the library's data about the device; it is not destroyed, which would race
/// with the driver's own shutdown.
cublasLtHandle_t library() {
  static const cublasLtHandle_t handle = [] {
    cublasLtHandle_t made = nullptr;
    check(cublasLtCreate(&made), "starting the library");
    return made;
  }();
  return handle;
}

cudaDataType type_of(Scalar type) {
  if (type == Scalar::fp32) return CUDA_R_32F;
  if (type == Scalar::bf16) return CUDA_R_16BF;
  if (type == Scalar::fp16) return CUDA_R_16F;
  throw Error(ExitCode::internal, "gemm: operands must be fp32, bf16 or fp16");
}

cudaDataType operand_type(Scalar type, CodeType code) {
  if (type != Scalar::u8) return type_of(type);
  return code == CodeType::e4m3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}

cublasLtEpilogue_t epilogue_of(Epilogue::Kind kind) {
  switch (kind) {
    case Epilogue::Kind::none:
      break;
    case Epilogue::Kind::bias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::Kind::bias_gelu:
      return CUBLASLT_EPILOGUE_GELU_BIAS;
    case Epilogue::Kind::gelu_gradient:
      return CUBLASLT_EPILOGUE_DGELU;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

std::string to_hexadecimal(const cublasLtMatmulAlgo_t& algorithm) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  const auto* bytes = reinterpret_cast<const unsigned char*>(&algorithm);
  for (std::size_t i = 0; i < sizeof algorithm; ++i) {
    text += digits[bytes[i] >> 4];
    text += digits[bytes[i] & 15];
  }
  return text;
}

bool from_hexadecimal(const std::string& text, cublasLtMatmulAlgo_t& algorithm) {
  if (text.size() != 2 * sizeof algorithm) return false;
  auto* bytes = reinterpret_cast<unsigned char*>(&algorithm);
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) return false;
    bytes[i / 2] = static_cast<unsigned char>(i % 2 == 0 ? digit << 4 : bytes[i / 2] | digit);
  }
  return true;
}

/// True if the sum over `inner` may be cut into parts. Products with few outputs and long sums, such as the gradients
/// of weights over all rows, would otherwise occupy a part of the GPU.
bool may_split(const GemmShape& shape) { return bytes_of(shape.input) <= 2 && shape.output == Scalar::fp32; }

/// True if the sum over `inner` is cut into parts that are added later.
bool splits_sum(const cublasLtMatmulAlgo_t& algorithm) {
  int parts = 1;
  std::size_t written = 0;
  const auto status =
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof parts, &written);
  return status == CUBLAS_STATUS_SUCCESS && (parts > 1 || parts < 0);
}

}  // namespace

struct Gemm::Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  GemmRecord record;

  explicit Plan(const GemmShape& shape) {
    record.shape = shape;
    record.gpu = gpu_name();
    record.library = gemm_library_version();
    const cublasComputeType_t compute = shape.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    check(cublasLtMatmulDescCreate(&operation, compute, CUDA_R_32F), "describing a product");
    set_form(CUBLASLT_MATMUL_DESC_TRANSA, shape.b_form);
    set_form(CUBLASLT_MATMUL_DESC_TRANSB, shape.a_form);
    if (shape.input == Scalar::u8) {
      // Proposals depend on scales being there, not on where they are.
      const void* const anywhere = reinterpret_cast<const void*>(std::uintptr_t{256});
      set_scales(anywhere, anywhere);
      set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<std::int8_t>(shape.fast ? 1 : 0));
    }
    const cudaDataType out = type_of(shape.output);
    a = layout_of(operand_type(shape.input, shape.a_code), shape.a_form, shape.rows, shape.inner, shape.a_stride);
    b = layout_of(operand_type(shape.input, shape.b_code), shape.b_form, shape.inner, shape.columns, shape.b_stride);
    c = layout_of(out, Form::plain, shape.rows, shape.columns, shape.c_stride);
    if (shape.batch.count > 1) {
      set_batch(a, shape.batch.count, shape.batch.a);
      set_batch(b, shape.batch.count, shape.batch.b);
      set_batch(c, shape.batch.count, shape.batch.c);
    }
    if (shape.epilogue == Epilogue::Kind::none) return;
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(shape.epilogue));
    if (shape.input == Scalar::u8) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, out);
    if (shape.epilogue == Epilogue::Kind::gelu_gradient) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, shape.hidden_stride);
    // Only the alignment of the addresses counts when an algorithm is chosen.
    auto* const aligned = reinterpret_cast<void*>(static_cast<std::uintptr_t>(shape.alignment));
    set_addresses(aligned, aligned);
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    cublasLtMatrixLayoutDestroy(c);
    cublasLtMatrixLayoutDestroy(b);
    cublasLtMatrixLayoutDestroy(a);
    cublasLtMatmulDescDestroy(operation);
  }

  template <class Value>
  void set(cublasLtMatmulDescAttributes_t which, Value value) {
    check(cublasLtMatmulDescSetAttribute(operation, which, &value, sizeof value), "describing a product");
  }
  void set_form(cublasLtMatmulDescAttributes_t which, Form form) {
    set(which, form == Form::plain ? CUBLAS_OP_N : CUBLAS_OP_T);
  }
  void set_addresses(const void* bias, void* hidden) {
    if (record.shape.epilogue == Epilogue::Kind::bias || record.shape.epilogue == Epilogue::Kind::bias_gelu)
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (record.shape.epilogue == Epilogue::Kind::gelu_gradient) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, hidden);
  }

  void set_scales(const void* of_a, const void* of_b) const {
    check(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &of_b, sizeof of_b),
          "describing a product");
    check(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &of_a, sizeof of_a),
          "describing a product");
  }

  /// Layout of a matrix that enters the product as [rows, columns].
  static cublasLtMatrixLayout_t layout_of(cudaDataType type, Form form, std::int64_t rows, std::int64_t columns,
                                          std::int64_t stride) {
    cublasLtMatrixLayout_t layout = nullptr;
    if (form == Form::transposed) std::swap(rows, columns);
    check(cublasLtMatrixLayoutCreate(&layout, type, static_cast<std::uint64_t>(columns),
                                     static_cast<std::uint64_t>(rows), stride),
          "describing a matrix");
    return layout;
  }

  static void set_batch(cublasLtMatrixLayout_t layout, std::int64_t count, std::int64_t distance) {
    const auto products = static_cast<std::int32_t>(count);
    check(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &products, sizeof products),
          "describing a batch");
    check(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &distance,
                                           sizeof distance),
          "describing a batch");
  }

  std::vector<cublasLtMatmulHeuristicResult_t> candidates(std::int64_t workspace_bytes, int most) const {
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "querying algorithms");
    const std::uint64_t bytes = static_cast<std::uint64_t>(workspace_bytes);
    // Parts are kept in the workspace and added in a fixed order, never in the output as they are complete.
    const std::uint32_t reduction =
        may_split(record.shape) ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
    std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<std::size_t>(most));
    int n = 0;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction,
                                         sizeof reduction);
    const auto alignment = static_cast<std::uint32_t>(record.shape.alignment);
    for (const auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                             CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      cublasLtMatmulPreferenceSetAttribute(preference, which, &alignment, sizeof alignment);
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(library(), operation, b, a, c, c, preference, most, found.data(), &n);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS) n = 0;
    found.resize(static_cast<std::size_t>(n));
    std::erase_if(found, [&](const auto& each) {
      return each.state != CUBLAS_STATUS_SUCCESS || (splits_sum(each.algo) && !may_split(record.shape));
    });
    return found;
  }

  void use(const cublasLtMatmulAlgo_t& chosen, std::int64_t workspace_bytes) {
    algorithm = chosen;
    record.algorithm = to_hexadecimal(chosen);
    record.workspace = workspace_bytes;
  }

  /// False if the entry of the algorithm table does not match or the library does not accept it.
  bool use_record(const GemmRecord& given, std::int64_t workspace_bytes) {
    cublasLtMatmulAlgo_t recorded;
    if (given.shape != record.shape || given.gpu != record.gpu || given.library != record.library ||
        !from_hexadecimal(given.algorithm, recorded))
      return false;
    cublasLtMatmulHeuristicResult_t result{};
    if (cublasLtMatmulAlgoCheck(library(), operation, b, a, c, c, &recorded, &result) != CUBLAS_STATUS_SUCCESS ||
        static_cast<std::int64_t>(result.workspaceSize) > workspace_bytes)
      return false;
    use(recorded, static_cast<std::int64_t>(result.workspaceSize));
    record.milliseconds = given.milliseconds;
    return true;
  }
};

Gemm::Gemm(const GemmShape& shape, std::int64_t workspace_bytes, const GemmRecord* record)
    : plan_(std::make_unique<Plan>(shape)) {
  if (record != nullptr && plan_->use_record(*record, workspace_bytes)) return;
  const auto found = plan_->candidates(workspace_bytes, 16);
  if (found.empty())
    throw Error(ExitCode::internal, "cuBLASLt has no algorithm for a product of " + std::to_string(shape.rows) + " x " +
                                        std::to_string(shape.inner) + " x " + std::to_string(shape.columns));
  plan_->use(found.front().algo, static_cast<std::int64_t>(found.front().workspaceSize));
}

Gemm::~Gemm() = default;
Gemm::Gemm(Gemm&&) noexcept = default;
Gemm& Gemm::operator=(Gemm&&) noexcept = default;

void Gemm::run(const Execution& execution, const void* a, const void* b, void* c, Array<std::byte> workspace,
               float alpha, float beta, const Epilogue& epilogue) const {
  plan_->set_addresses(epilogue.bias, epilogue.hidden.data);
  check(cublasLtMatmul(library(), plan_->operation, &alpha, b, plan_->b, a, plan_->a, &beta, c, plan_->c, c, plan_->c,
                       &plan_->algorithm, workspace.data, static_cast<std::size_t>(workspace.size),
                       static_cast<cudaStream_t>(execution.stream)),
        "a product");
}

void Gemm::run_coded(const Execution& execution, const void* a, const float* a_scale, const void* b,
                     const float* b_scale, float beta, void* c, Array<std::byte> workspace,
                     const Epilogue& epilogue) const {
  plan_->set_scales(a_scale, b_scale);
  run(execution, a, b, c, workspace, 1.0f, beta, epilogue);
}

const GemmRecord& Gemm::record() const { return plan_->record; }

std::vector<GemmRecord> Gemm::candidates(const GemmShape& shape, std::int64_t workspace_bytes) {
  Plan plan(shape);
  std::vector<GemmRecord> records;
  for (const auto& candidate : plan.candidates(workspace_bytes, 16)) {
    plan.use(candidate.algo, static_cast<std::int64_t>(candidate.workspaceSize));
    records.push_back(plan.record);
  }
  return records;
}

GemmRecord Gemm::tune(const Execution& execution, const GemmShape& shape, const void* a, const void* b, void* c,
                      Array<std::byte> workspace, const Epilogue& epilogue) {
  constexpr int kWarmUp = 5, kTimed = 25;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "making an event");
  check(cudaEventCreate(&end), "making an event");
  GemmRecord best;
  for (GemmRecord& candidate : candidates(shape, workspace.size)) {
    const Gemm gemm(shape, workspace.size, &candidate);
    std::vector<float> times(kTimed);
    for (int i = 0; i < kWarmUp; ++i) gemm.run(execution, a, b, c, workspace, 1.0f, 0.0f, epilogue);
    for (float& time : times) {
      check(cudaEventRecord(begin, stream), "timing a product");
      gemm.run(execution, a, b, c, workspace, 1.0f, 0.0f, epilogue);
      check(cudaEventRecord(end, stream), "timing a product");
      check(cudaEventSynchronize(end), "timing a product");
      check(cudaEventElapsedTime(&time, begin, end), "timing a product");
    }
    std::nth_element(times.begin(), times.begin() + kTimed / 2, times.end());
    candidate.milliseconds = static_cast<double>(times[kTimed / 2]);
    if (best.algorithm.empty() || candidate.milliseconds < best.milliseconds) best = candidate;
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  if (best.algorithm.empty()) return Gemm(shape, workspace.size).record();
  return best;
}

namespace {

/// A product is prepared once per shape: describing one and choosing its algorithm takes the host longer than the GPU
/// needs for the product.
struct Prepared {
  std::vector<GemmRecord> records;
  std::deque<Gemm> products;
  std::vector<GemmShape> refused;  // with an epilogue for which the library has no algorithm
};
Prepared& prepared() {
  static Prepared all;
  return all;
}

const Gemm& product_of(const GemmShape& shape, std::int64_t workspace_bytes) {
  Prepared& all = prepared();
  for (const Gemm& product : all.products)
    if (product.record().shape == shape) return product;
  const auto same = [&](const GemmRecord& record) { return record.shape == shape; };
  const auto record = std::find_if(all.records.begin(), all.records.end(), same);
  return all.products.emplace_back(shape, workspace_bytes, record == all.records.end() ? nullptr : &*record);
}

/// False if the library has no algorithm for the shape.
bool has_algorithm(const GemmShape& shape, std::int64_t workspace_bytes) {
  Prepared& all = prepared();
  for (const Gemm& product : all.products)
    if (product.record().shape == shape) return true;
  if (std::find(all.refused.begin(), all.refused.end(), shape) != all.refused.end()) return false;
  const bool found = !Gemm::candidates(shape, workspace_bytes).empty();
  if (!found) all.refused.push_back(shape);
  return found;
}

/// The largest power of two up to 16 that divides addresses and row lengths, in bytes.
std::int64_t common_alignment(std::initializer_list<AnyMatrix> matrices) {
  constexpr std::uintptr_t kLargest = 16;
  std::uintptr_t alignment = kLargest;
  for (const AnyMatrix& matrix : matrices) {
    const auto row_bytes = static_cast<std::uintptr_t>(matrix.stride * bytes_of(matrix.type));
    while ((reinterpret_cast<std::uintptr_t>(matrix.data) | row_bytes) % alignment != 0) alignment /= 2;
  }
  return static_cast<std::int64_t>(alignment);
}

}  // namespace

bool multiply_coded(const Execution& execution, const GemmShape& shape, const void* a, const float* a_scale,
                    const void* b, const float* b_scale, float beta, void* c, Array<std::byte> workspace,
                    const void* bias) {
  if (shape.epilogue != Epilogue::Kind::none && !has_algorithm(shape, workspace.size)) return false;
  const Epilogue epilogue{.kind = shape.epilogue, .bias = bias};
  product_of(shape, workspace.size).run_coded(execution, a, a_scale, b, b_scale, beta, c, workspace, epilogue);
  return true;
}

void use_gemm_records(std::vector<GemmRecord> records) { prepared().records = std::move(records); }

std::vector<GemmRecord> gemm_records_in_use() {
  std::vector<GemmRecord> records;
  for (const Gemm& product : prepared().products) records.push_back(product.record());
  return records;
}

std::string gpu_name() {
  int device = 0;
  check(cudaGetDevice(&device), "finding the device");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "querying the device's name");
  return properties.name;
}

std::int64_t gemm_library_version() { return static_cast<std::int64_t>(cublasLtGetVersion()); }

}  // namespace weft::kernels::cuda

namespace weft::kernels::dense_library {

std::int64_t workspace_bytes() { return cuda::kGemmWorkspace; }

bool takes(Scalar a, Scalar b, Scalar c) { return a == b && (c == a || c == Scalar::fp32); }

namespace {

cuda::GemmShape shape_of(const Execution& execution, const AnyMatrix& a, Form a_form, const AnyMatrix& b, Form b_form,
                         const AnyMatrix& c) {
  return {.rows = c.rows,
          .columns = c.columns,
          .inner = a_form == Form::plain ? a.columns : a.rows,
          .a_stride = a.stride,
          .b_stride = b.stride,
          .c_stride = c.stride,
          .input = a.type,
          .output = c.type,
          .alignment = cuda::common_alignment({a, b, c}),
          .a_form = a_form,
          .b_form = b_form,
          .tf32 = execution.tf32 && a.type == Scalar::fp32};
}

}  // namespace

void multiply(const Execution& execution, float alpha, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form, float beta,
              AnyMatrix c, Array<std::byte> workspace) {
  const cuda::GemmShape shape = shape_of(execution, a, a_form, b, b_form, c);
  cuda::product_of(shape, workspace.size).run(execution, a.data, b.data, c.data, workspace, alpha, beta);
}

bool multiply_batched(const Execution& execution, float alpha, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form,
                      float beta, AnyMatrix c, const Batch& batch, Array<std::byte> workspace) {
  cuda::GemmShape shape = shape_of(execution, a, a_form, b, b_form, c);
  shape.batch = batch;
  const std::int64_t distances = batch.a * bytes_of(a.type) | batch.b * bytes_of(b.type) | batch.c * bytes_of(c.type);
  while (distances % shape.alignment != 0) shape.alignment /= 2;
  cuda::product_of(shape, workspace.size).run(execution, a.data, b.data, c.data, workspace, alpha, beta);
  return true;
}

bool multiply_with_epilogue(const Execution& execution, AnyMatrix a, Form a_form, AnyMatrix b, Form b_form, AnyMatrix c,
                            const Epilogue& epilogue, Array<std::byte> workspace) {
  constexpr std::int64_t kAlignment = 16;  // bytes, of every matrix and of the bias
  cuda::GemmShape shape = shape_of(execution, a, a_form, b, b_form, c);
  shape.epilogue = epilogue.kind;
  if (a.type != Scalar::bf16 || b.type != Scalar::bf16 || c.type != Scalar::bf16 || shape.alignment < kAlignment ||
      reinterpret_cast<std::uintptr_t>(epilogue.bias) % kAlignment != 0)
    return false;
  if (epilogue.hidden.data != nullptr) {
    if (epilogue.hidden.type != c.type || cuda::common_alignment({epilogue.hidden}) < kAlignment) return false;
    shape.hidden_stride = epilogue.hidden.stride;
  }
  if (!cuda::has_algorithm(shape, workspace.size)) return false;
  cuda::product_of(shape, workspace.size).run(execution, a.data, b.data, c.data, workspace, 1.0f, 0.0f, epilogue);
  return true;
}

}  // namespace weft::kernels::dense_library
