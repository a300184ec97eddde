// SPDX-License-Identifier: Apache-2.0
//
// The baseline attention with the matrix of scores in memory is the attention of training: both agree with the
// definition in fp64.
#include "bench/language_model/matrix_attention.hpp"

#include "tests/kernels/language/attention_reference.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

void check_agreement(const Case& c) {
  CAPTURE(c.length);
  CAPTURE(c.kv_heads);
  CAPTURE(c.softcap);
  CAPTURE(c.window);
  CAPTURE(c.documents);
  CAPTURE(c.sparse);
  CAPTURE(static_cast<int>(c.type));
  Reference r(c);
  r.compute();
  const std::int64_t rows = r.rows(), queries = r.query_columns(), keys = r.key_columns();
  const TestMatrix inputs(r.packed, rows, r.stride(), c.type);
  const TestMatrix upper({r.out_gradient.begin(), r.out_gradient.end()}, rows, queries, c.type);
  const DeviceArray<std::int32_t> first_key(r.first_key);
  const DeviceArray<std::uint8_t> kept(r.kept);
  Attention shape = r.shape;
  if (c.documents) shape.first_key = first_key.array();
  if (c.sparse) shape.kept = kept.array();

  const auto view = [&](const TestMatrix& packed, int part) {
    return part == 0 ? packed.view().columns_from(0, queries)
                     : packed.view().columns_from(queries + (part - 1) * keys, keys);
  };
  const language_model::AttentionKernels attention = bench::matrix_attention();
  const TestMatrix out(std::vector<float>(rows * queries, std::nanf("")), rows, queries, c.type);
  const TestMatrix gradients(std::vector<float>(rows * r.stride(), std::nanf("")), rows, r.stride(), c.type);
  const DeviceArray<float> log_sum(c.sequences * c.heads * c.length);
  const device::Buffer<std::byte> workspace(std::max(attention.workspace(execution(), shape, c.type),
                                                     attention.backward_workspace(execution(), shape, c.type)));
  attention.forward(execution(), shape, view(inputs, 0), view(inputs, 1), view(inputs, 2), out.view(), log_sum.array(),
                    workspace.array());
  attention.backward(execution(), shape, view(inputs, 0), view(inputs, 1), view(inputs, 2), out.view(), log_sum.array(),
                     upper.view(), view(gradients, 0), view(gradients, 1), view(gradients, 2), workspace.array());
  // fp32: sums of up to a few hundred products in fp32. bf16: scores, probabilities and their gradients are rounded to
  // 2^-9 each, and the gradients of a key that several heads share are added in bf16.
  const double tolerance = c.type == Scalar::fp32 ? 1e-5 : 2e-2;
  const std::vector<float> packed = gradients.values();
  CHECK(relative_error(out.values(), r.out) <= tolerance);
  CHECK(relative_error(log_sum.values(), r.log_sum) <= tolerance);
  CHECK(relative_error(r.part<float>(packed, 0, queries), r.dq) <= tolerance);
  CHECK(relative_error(r.part<float>(packed, queries, keys), r.dk) <= tolerance);
  CHECK(relative_error(r.part<float>(packed, queries + keys, keys), r.dv) <= tolerance);
}

}  // namespace

TEST_CASE("attention with the matrix of scores agrees with the definition, with every kind of mask") {
  for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
    for (Case c : {Case{3, 1, 2, 1, 16}, Case{2, 17, 2, 2, 24}, Case{1, 70, 4, 2, 40}, Case{2, 300, 2, 1, 32}}) {
      c.type = type;
      check_agreement(c);
    }
    Case masked{2, 200, 4, 2, 32, 3.0f, 90, true, type};
    check_agreement(masked);
    masked.sparse = true;
    check_agreement(masked);
  }
}

TEST_CASE("sizes beyond 64 bits need more memory than there is, not less") {
  const Attention shape{.sequences = std::int64_t{1} << 20,
                        .length = std::int64_t{1} << 20,
                        .heads = std::int64_t{1} << 16,
                        .kv_heads = 1,
                        .head_size = 8,
                        .scale = 1};
  CHECK(bench::matrix_attention().workspace(execution(), shape, Scalar::fp32) >= std::int64_t{1} << 60);
}

}  // namespace weft::testing
