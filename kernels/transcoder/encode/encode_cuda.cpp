// SPDX-License-Identifier: Apache-2.0
#include "kernels/transcoder/encode/encode_cuda.hpp"

#include <algorithm>
#include <deque>

#include "base/error.hpp"
#include "kernels/bf16.hpp"

namespace weft::kernels::cuda {
namespace {

constexpr std::int64_t kLargestAlignment = 16;

/// Products are prepared once for each shape: describing one and choosing its algorithm takes the host longer than the
/// GPU needs for the product.
struct Prepared {
  std::vector<GemmRecord> records;
  std::deque<Gemm> products;
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

/// The largest power of two up to 16 that divides all of `bytes`.
std::int64_t common_alignment(std::initializer_list<std::int64_t> bytes) {
  std::int64_t alignment = kLargestAlignment;
  for (const std::int64_t each : bytes)
    while (each % alignment != 0) alignment /= 2;
  return alignment;
}

std::int64_t address(const void* pointer) {
  return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer) % kLargestAlignment);
}

}  // namespace

std::int64_t encode_workspace(Backend, std::int64_t, std::int64_t, std::int64_t, Scalar, StatePolicy, Scalar) {
  return kGemmWorkspace;
}

void encode_tile(const Execution& execution, AnyMatrix x, const ParameterRows& encoder, std::int64_t row_begin,
                 AnyMatrix product, Array<std::byte> workspace) {
  if (product.rows == 0 || product.columns == 0) return;
  if (x.type != Scalar::bf16 || (encoder.policy == StatePolicy::fp32 && encoder.weight_rest == nullptr))
    throw Error(ExitCode::internal, "the encoder's CUDA product takes bf16 inputs and bf16 weights");
  const bf16* const weight = static_cast<const bf16*>(encoder.weight) + row_begin * encoder.columns;
  const GemmShape shape{
      .n_tokens = product.rows,
      .n_features = product.columns,
      .d_model = encoder.columns,
      .input_stride = x.stride,
      .weight_stride = encoder.columns,
      .product_stride = product.stride,
      .input = Scalar::bf16,
      .product = product.type,
      .alignment = common_alignment({address(x.data), address(weight), address(product.data), 2 * x.stride,
                                     2 * encoder.columns, bytes_of(product.type) * product.stride})};
  product_of(shape, workspace.size).run(execution, x.data, weight, product.data, workspace);
}

void use_gemm_records(std::vector<GemmRecord> records) { prepared().records = std::move(records); }

std::vector<GemmRecord> gemm_records_in_use() {
  std::vector<GemmRecord> records;
  for (const Gemm& product : prepared().products) records.push_back(product.record());
  return records;
}

}  // namespace weft::kernels::cuda
