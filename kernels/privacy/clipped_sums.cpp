// SPDX-License-Identifier: Apache-2.0
#include "kernels/privacy/clipped_sums.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "kernels/gradient/gradient.hpp"
#include "kernels/privacy/fused.hpp"
#include "kernels/privacy/products.hpp"

namespace weft::kernels {
namespace {

template <class Value>
std::int64_t bytes_for(std::int64_t values) {
  Workspace memory(nullptr);
  memory.take<Value>(values);
  return memory.bytes();
}

/// Rows of products, and of lookups, that are copied with their factors at a time. A GPU needs many to be occupied.
constexpr std::int64_t kWeighedRows = 4096, kWeighedLookups = kCudaBuild ? 16384 : 4096;

/// Calls body(first row, rows) for all rows of the examples, at most `most` at a time.
template <class Body>
void for_row_groups(const Examples& examples, std::int64_t most, const Body& body) {
  if (examples.count() == 0) return;
  for (std::int64_t first = examples.offsets.front(); first < examples.offsets.back(); first += most)
    body(first, std::min(most, examples.offsets.back() - first));
}

/// True if the rows are copied with their factors and multiplied in one product: fp32 rows, and on the host all, since
/// the library there widens rows of 16 bits anyway. Otherwise the gradient of each example is formed and weighed.
bool weighs_rows(Scalar x, Scalar g) { return !kCudaBuild || x == Scalar::fp32 || g == Scalar::fp32; }

struct WeighedRows {
  Array<float> x, g;
  Array<std::byte> library;
  std::int64_t bytes = 0;
};

WeighedRows weighed_layout(std::byte* data, std::int64_t in, std::int64_t out, std::int64_t rows) {
  const std::int64_t most = std::min(kWeighedRows, rows);
  Workspace workspace(data);
  WeighedRows work;
  work.x = workspace.take<float>(most * in);
  work.g = workspace.take<float>(most * out);
  work.library = workspace.take<std::byte>(gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::fp32, out, in, most));
  work.bytes = workspace.bytes();
  return work;
}

}  // namespace

std::int64_t clipped_product_workspace(Scalar x, Scalar g, std::int64_t in, std::int64_t out, const ExampleSizes& sizes,
                                       ProductImplementation implementation) {
  const std::int64_t fused =
      implementation == ProductImplementation::fused ? bytes_for<float>(fused_sums(in, out, sizes)) : 0;
  return std::max(fused, weighs_rows(x, g) ? weighed_layout(nullptr, in, out, sizes.rows).bytes
                                           : formed_products_layout(nullptr, x, g, in, out, sizes, 0).bytes);
}

void add_clipped_product(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples,
                         Array<const float> factors, Matrix<float> out, Array<std::byte> workspace,
                         ProductImplementation implementation) {
  const ExampleSizes sizes = sizes_of(examples);
  require_examples(examples, factors.size,
                   clipped_product_workspace(x.type, g.type, x.columns, g.columns, sizes, implementation), workspace,
                   "clipped sum of products");
  if (implementation == ProductImplementation::fused &&
      try_cuda<cuda::add_fused_product>(
          execution, x, g, examples, factors, out,
          Array<float>{reinterpret_cast<float*>(workspace.data), fused_sums(x.columns, g.columns, sizes)}))
    return;
  if (!weighs_rows(x.type, g.type)) {
    const FormedProducts formed =
        formed_products_layout(workspace.data, x.type, g.type, x.columns, g.columns, sizes, 0);
    for_formed_products(execution, x, g, examples, 0, formed,
                        [&](std::int64_t first, std::int64_t count, std::int64_t output, Matrix<const float> values) {
                          add_weighed(execution, any_matrix(values), {factors.data + first, count},
                                      {out.row(output), values.columns / x.columns, x.columns, out.stride});
                        });
    return;
  }
  Execution exact = execution;
  exact.tf32 = false;
  const WeighedRows work = weighed_layout(workspace.data, x.columns, g.columns, sizes.rows);
  for_row_groups(examples, kWeighedRows, [&](std::int64_t first, std::int64_t rows) {
    const Matrix<float> left{work.g.data, rows, g.columns, g.columns}, right{work.x.data, rows, x.columns, x.columns};
    weigh_rows(execution, g, first, examples.device_offsets, factors, false, left);
    weigh_rows(execution, x, first, examples.device_offsets, factors, true, right);
    gemm(exact, 1, any_matrix(left), Form::transposed, any_matrix(right), Form::plain, 1, any_matrix(out),
         work.library);
  });
}

std::int64_t clipped_lookup_workspace(std::int64_t columns, const ExampleSizes& sizes) {
  const std::int64_t most = std::min(kWeighedLookups, sizes.rows);
  Workspace memory(nullptr);
  memory.take<float>(most * columns);
  return memory.bytes() + rows_by_id_workspace(most, columns);
}

void add_clipped_lookup(const Execution& execution, Array<const std::uint32_t> ids, AnyMatrix g, std::int64_t first_row,
                        const Examples& examples, Array<const float> factors, Matrix<float> out,
                        Array<std::byte> workspace) {
  const ExampleSizes sizes = sizes_of(examples);
  require_examples(examples, factors.size, clipped_lookup_workspace(g.columns, sizes), workspace,
                   "clipped sum of a lookup");
  Workspace memory(workspace.data);
  const Array<float> weighed = memory.take<float>(std::min(kWeighedLookups, sizes.rows) * g.columns);
  const Array<std::byte> rest{workspace.data + memory.bytes(), workspace.size - memory.bytes()};
  for_row_groups(examples, kWeighedLookups, [&](std::int64_t first, std::int64_t rows) {
    const Matrix<float> copies{weighed.data, rows, g.columns, g.columns};
    weigh_rows(execution, g, first, examples.device_offsets, factors, false, copies);
    add_rows_by_id(execution, {ids.data + first, rows}, any_matrix(copies), first_row, out, rest);
  });
}

std::int64_t form_examples_workspace(Scalar x, Scalar g, std::int64_t in, std::int64_t out, const ExampleSizes& sizes) {
  return std::max(gemm_workspace(g, x, Scalar::bf16, out, in, std::max<std::int64_t>(1, sizes.most_rows)),
                  stored_norms_workspace(sizes.examples, in * out));
}

void form_examples(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples, Matrix<bf16> stored,
                   Array<double> norms, Array<std::byte> workspace) {
  const std::int64_t in = x.columns, out = g.columns;
  require_examples(examples, stored.rows, form_examples_workspace(x.type, g.type, in, out, sizes_of(examples)),
                   workspace, "stored gradients of examples");
  Execution exact = execution;
  exact.tf32 = false;
  // Includes the examples without rows, whose gradients are 0.
  for_equal_examples(examples, -1, examples.count(), [&](std::int64_t first, std::int64_t count) {
    const std::int64_t row = examples.offsets[first], rows = examples.rows_of(first);
    gemm_batched(exact, 1, g.rows_from(row, rows), Form::transposed, x.rows_from(row, rows), Form::plain, 0,
                 {stored.row(first), Scalar::bf16, out, in, in},
                 {count, rows * g.stride, rows * x.stride, stored.stride}, workspace);
  });
  if (norms.data != nullptr) add_stored_norms(execution, any_matrix(stored), norms, workspace);
}

std::int64_t stored_norms_workspace(std::int64_t examples, std::int64_t size) {
  return bytes_for<double>(examples * square_parts(size));
}

void add_stored_norms(const Execution& execution, AnyMatrix stored, Array<double> norms, Array<std::byte> workspace) {
  if (workspace.size < stored_norms_workspace(stored.rows, stored.columns))
    throw Error(ExitCode::internal, "norms of stored gradients: their workspace is too small");
  Workspace memory(workspace.data);
  add_squares(execution, stored, norms, memory.take<double>(stored.rows * square_parts(stored.columns)));
}

void add_clipped_examples(const Execution& execution, AnyMatrix stored, Array<const float> factors, Array<float> out) {
  add_weighed(execution, stored, factors, {out.data, 1, stored.columns, stored.columns});
}

}  // namespace weft::kernels
