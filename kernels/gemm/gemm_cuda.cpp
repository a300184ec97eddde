// SPDX-License-Identifier: Apache-2.0
//
// cuBLASLt counts columns first. Seen that way a row-major [n, d] matrix is d x n, and the product [n, f] is
// (f x n) = weight^T (d x f) * input (d x n).
#include "kernels/gemm/gemm_cuda.hpp"

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.hpp"

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

/// One handle a process: it only holds what the library knows of the device, and destroying it at exit would race with
/// the driver's own shutdown.
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
  throw Error(ExitCode::internal, "a dense product takes fp32 or bf16");
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

/// Whether the sum over d is cut into parts that are added later.
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
  cublasLtMatrixLayout_t weight = nullptr, input = nullptr, product = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  GemmRecord record;

  explicit Plan(const GemmShape& shape) {
    record.shape = shape;
    record.gpu = gpu_name();
    record.library = gemm_library_version();
    check(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing a product");
    const cublasOperation_t transposed = CUBLAS_OP_T;
    check(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
          "describing a product");
    const cudaDataType in = type_of(shape.input), out = type_of(shape.product);
    const auto d = static_cast<std::uint64_t>(shape.d_model), n = static_cast<std::uint64_t>(shape.n_tokens),
               f = static_cast<std::uint64_t>(shape.n_features);
    check(cublasLtMatrixLayoutCreate(&weight, in, d, f, shape.weight_stride), "describing a matrix");
    check(cublasLtMatrixLayoutCreate(&input, in, d, n, shape.input_stride), "describing a matrix");
    check(cublasLtMatrixLayoutCreate(&product, out, f, n, shape.product_stride), "describing a matrix");
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    cublasLtMatrixLayoutDestroy(product);
    cublasLtMatrixLayoutDestroy(input);
    cublasLtMatrixLayoutDestroy(weight);
    cublasLtMatmulDescDestroy(operation);
  }

  std::vector<cublasLtMatmulHeuristicResult_t> candidates(std::int64_t workspace_bytes, int most) const {
    cublasLtMatmulPreference_t preference = nullptr;
    check(cublasLtMatmulPreferenceCreate(&preference), "asking for algorithms");
    const std::uint64_t bytes = static_cast<std::uint64_t>(workspace_bytes);
    const std::uint32_t no_reduction = CUBLASLT_REDUCTION_SCHEME_NONE;
    std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<std::size_t>(most));
    int n = 0;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes);
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &no_reduction,
                                         sizeof no_reduction);
    const auto alignment = static_cast<std::uint32_t>(record.shape.alignment);
    for (const auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                             CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
      cublasLtMatmulPreferenceSetAttribute(preference, which, &alignment, sizeof alignment);
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(library(), operation, weight, input, product, product,
                                                                 preference, most, found.data(), &n);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS) n = 0;
    found.resize(static_cast<std::size_t>(n));
    std::erase_if(found, [](const auto& each) { return each.state != CUBLAS_STATUS_SUCCESS || splits_sum(each.algo); });
    return found;
  }

  void use(const cublasLtMatmulAlgo_t& chosen, std::int64_t workspace_bytes) {
    algorithm = chosen;
    record.algorithm = to_hexadecimal(chosen);
    record.workspace = workspace_bytes;
  }

  /// False when the record is of something else or the library does not take it.
  bool use_record(const GemmRecord& given, std::int64_t workspace_bytes) {
    cublasLtMatmulAlgo_t recorded;
    if (given.shape != record.shape || given.gpu != record.gpu || given.library != record.library ||
        !from_hexadecimal(given.algorithm, recorded))
      return false;
    cublasLtMatmulHeuristicResult_t result{};
    if (cublasLtMatmulAlgoCheck(library(), operation, weight, input, product, product, &recorded, &result) !=
            CUBLAS_STATUS_SUCCESS ||
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
    throw Error(ExitCode::internal, "cuBLASLt has no algorithm for a product of " + std::to_string(shape.n_tokens) +
                                        " x " + std::to_string(shape.d_model) + " x " +
                                        std::to_string(shape.n_features) + "");
  plan_->use(found.front().algo, static_cast<std::int64_t>(found.front().workspaceSize));
}

Gemm::~Gemm() = default;
Gemm::Gemm(Gemm&&) noexcept = default;
Gemm& Gemm::operator=(Gemm&&) noexcept = default;

void Gemm::run(const Execution& execution, const void* input, const void* weight, void* product,
               Array<std::byte> workspace) const {
  const float one = 1.0f, zero = 0.0f;
  check(cublasLtMatmul(library(), plan_->operation, &one, weight, plan_->weight, input, plan_->input, &zero, product,
                       plan_->product, product, plan_->product, &plan_->algorithm, workspace.data,
                       static_cast<std::size_t>(workspace.size), static_cast<cudaStream_t>(execution.stream)),
        "a product");
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

GemmRecord Gemm::tune(const Execution& execution, const GemmShape& shape, const void* input, const void* weight,
                      void* product, Array<std::byte> workspace) {
  constexpr int kWarmUp = 5, kTimed = 25;
  const auto stream = static_cast<cudaStream_t>(execution.stream);
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "making an event");
  check(cudaEventCreate(&end), "making an event");
  GemmRecord best;
  for (GemmRecord& candidate : candidates(shape, workspace.size)) {
    const Gemm gemm(shape, workspace.size, &candidate);
    std::vector<float> times(kTimed);
    for (int i = 0; i < kWarmUp; ++i) gemm.run(execution, input, weight, product, workspace);
    for (float& time : times) {
      check(cudaEventRecord(begin, stream), "timing a product");
      gemm.run(execution, input, weight, product, workspace);
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

std::string gpu_name() {
  int device = 0;
  check(cudaGetDevice(&device), "finding the device");
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "asking for the device's name");
  return properties.name;
}

std::int64_t gemm_library_version() { return static_cast<std::int64_t>(cublasLtGetVersion()); }

}  // namespace weft::kernels::cuda
