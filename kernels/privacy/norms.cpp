// SPDX-License-Identifier: Apache-2.0
#include "kernels/privacy/norms.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.hpp"
#include "kernels/privacy/fused.hpp"
#include "kernels/privacy/products.hpp"

namespace weft::kernels {
namespace {

// Products -----------------------------------------------------------------------------------------------------------

struct GramTiles {
  std::int64_t side = 0;      ///< positions
  std::int64_t examples = 0;  ///< at a time
  Array<float> x, g;          ///< [examples, side * side] each
  Array<double> parts;
  Array<std::byte> library;
  std::int64_t bytes = 0;
};

GramTiles gram_layout(std::byte* data, Scalar x, Scalar g, std::int64_t in, std::int64_t out, const ExampleSizes& sizes,
                      std::int64_t tile) {
  GramTiles tiles;
  tiles.side = std::max<std::int64_t>(1, std::min(tile > 0 ? tile : automatic_tile(sizes.most_rows), sizes.most_rows));
  const std::int64_t size = tiles.side * tiles.side;
  tiles.examples = std::clamp<std::int64_t>(kFormedBytes / (8 * size), 1, std::max<std::int64_t>(1, sizes.examples));
  Workspace workspace(data);
  tiles.x = workspace.take<float>(tiles.examples * size);
  tiles.g = workspace.take<float>(tiles.examples * size);
  tiles.parts = workspace.take<double>(tiles.examples * square_parts(size));
  tiles.library = workspace.take<std::byte>(
      std::max(gemm_workspace(x, x, Scalar::fp32, tiles.side, tiles.side, std::max<std::int64_t>(1, in)),
               gemm_workspace(g, g, Scalar::fp32, tiles.side, tiles.side, std::max<std::int64_t>(1, out))));
  tiles.bytes = workspace.bytes();
  return tiles;
}

void add_direct_norms(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples,
                      const FormedProducts& formed, Array<double> norms) {
  for_formed_products(execution, x, g, examples, kPairwiseRows, formed,
                      [&](std::int64_t first, std::int64_t count, std::int64_t, Matrix<const float> values) {
                        add_squares(execution, any_matrix(values), {norms.data + first, count}, formed.parts);
                      });
}

/// Adds the Gram norms from tiles i <= j; those off the diagonal count twice.
void add_gram_norms(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples,
                    const GramTiles& tiles, Array<double> norms) {
  Execution exact = execution;
  exact.tf32 = false;
  for_equal_examples(examples, kPairwiseRows, tiles.examples, [&](std::int64_t first, std::int64_t count) {
    const std::int64_t begin = examples.offsets[first], rows = examples.rows_of(first);
    for (std::int64_t i = 0; i < rows; i += tiles.side)
      for (std::int64_t j = i; j < rows; j += tiles.side) {
        const std::int64_t n_i = std::min(tiles.side, rows - i), n_j = std::min(tiles.side, rows - j);
        const auto products = [&](const AnyMatrix& matrix, Array<float> out) -> Matrix<const float> {
          gemm_batched(exact, 1, matrix.rows_from(begin + i, n_i), Form::plain, matrix.rows_from(begin + j, n_j),
                       Form::transposed, 0, {out.data, Scalar::fp32, n_i, n_j, n_j},
                       {count, rows * matrix.stride, rows * matrix.stride, n_i * n_j}, tiles.library);
          return {out.data, count, n_i * n_j, n_i * n_j};
        };
        add_inner_products(execution, products(x, tiles.x), products(g, tiles.g), i == j ? 1.0 : 2.0,
                           gram_error(x.columns, g.columns), {norms.data + first, count}, tiles.parts);
      }
  });
}

std::int64_t fused_parts(std::int64_t in, std::int64_t out, std::int64_t most_rows, std::int64_t examples,
                         const NormMethod& method) {
  return method.algorithm == NormAlgorithm::gram ? fused_gram_parts(most_rows, examples)
                                                 : fused_direct_parts(in, out, examples);
}

std::int64_t fused_bytes(std::int64_t in, std::int64_t out, const ExampleSizes& sizes, const NormMethod& method) {
  if (method.implementation == ProductImplementation::library) return 0;
  Workspace workspace(nullptr);
  workspace.take<double>(fused_parts(in, out, sizes.most_rows, sizes.examples, method));
  return workspace.bytes();
}

bool add_fused_norms(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples,
                     const NormMethod& method, Array<double> norms, Array<std::byte> workspace) {
  const std::int64_t size = fused_parts(x.columns, g.columns, examples.most_rows(), examples.count(), method);
  const Array<double> parts{reinterpret_cast<double*>(workspace.data), size};
  if (method.algorithm == NormAlgorithm::gram)
    return try_cuda<cuda::form_fused_gram>(execution, x, g, examples, kPairwiseRows, gram_error(x.columns, g.columns),
                                           norms, parts);
  return try_cuda<cuda::form_fused_norms>(execution, x, g, examples, kPairwiseRows, norms, parts);
}

// Tied matrix --------------------------------------------------------------------------------------------------------

/// Rows of the lookup whose columns of the product's gradients are gathered at a time.
constexpr std::int64_t kGathered = 1024;

struct TiedRows {
  Array<std::byte> selected;  ///< [rows of an example, kGathered] in g's type
  Array<std::byte> library;
  std::int64_t bytes = 0;
};

TiedRows tied_layout(std::byte* data, Scalar x, Scalar g, std::int64_t columns, std::int64_t most_rows) {
  Workspace workspace(data);
  TiedRows out;
  const std::int64_t rows = std::max<std::int64_t>(1, most_rows), gathered = std::min(kGathered, rows);
  out.selected = workspace.take<std::byte>(rows * gathered * bytes_of(g));
  out.library =
      workspace.take<std::byte>(gemm_workspace(g, x, Scalar::fp32, gathered, std::max<std::int64_t>(1, columns), rows));
  out.bytes = workspace.bytes();
  return out;
}

}  // namespace

double gram_error(std::int64_t in, std::int64_t out) { return 0x1p-23 * static_cast<double>(in + out); }

std::int64_t product_norms_workspace(Scalar x, Scalar g, std::int64_t in, std::int64_t out, const ExampleSizes& sizes,
                                     const NormMethod& method) {
  const std::int64_t bytes = method.algorithm == NormAlgorithm::direct
                                 ? formed_products_layout(nullptr, x, g, in, out, sizes, method.tile).bytes
                                 : gram_layout(nullptr, x, g, in, out, sizes, method.tile).bytes;
  return std::max(bytes, fused_bytes(in, out, sizes, method));
}

void add_product_norms(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& examples,
                       const NormMethod& method, Array<double> norms, Array<std::byte> workspace) {
  const ExampleSizes sizes = sizes_of(examples);
  require_examples(examples, norms.size, product_norms_workspace(x.type, g.type, x.columns, g.columns, sizes, method),
                   workspace, "norms of products");
  std::int64_t n_short = 0;
  for (std::int64_t e = 0; e < examples.count(); ++e) n_short += examples.rows_of(e) <= kPairwiseRows ? 1 : 0;
  if (n_short > 0) add_pairwise_norms(execution, x, g, examples.device_offsets, kPairwiseRows, norms);
  if (n_short == examples.count()) return;
  if (method.implementation == ProductImplementation::fused &&
      add_fused_norms(execution, x, g, examples, method, norms, workspace))
    return;
  if (method.algorithm == NormAlgorithm::gram)
    return add_gram_norms(execution, x, g, examples,
                          gram_layout(workspace.data, x.type, g.type, x.columns, g.columns, sizes, method.tile), norms);
  add_direct_norms(execution, x, g, examples,
                   formed_products_layout(workspace.data, x.type, g.type, x.columns, g.columns, sizes, method.tile),
                   norms);
}

void form_column_sums(const Execution& execution, AnyMatrix g, const Examples& examples, Matrix<float> sums) {
  form_column_products(execution, {}, g, {}, {}, examples, sums);
}

void form_column_products(const Execution& execution, AnyMatrix x, AnyMatrix g, Array<const float> shift,
                          Array<const float> scale, const Examples& examples, Matrix<float> sums) {
  require_examples(examples, sums.rows, 0, {}, "column sums of examples");
  sum_example_columns(execution, x, g, shift, scale, examples.device_offsets, sums);
}

std::int64_t tied_rows_workspace(Scalar x, Scalar g, std::int64_t columns, const ExampleSizes& sizes) {
  return tied_layout(nullptr, x, g, columns, sizes.most_rows).bytes;
}

void add_tied_rows(const Execution& execution, AnyMatrix x, AnyMatrix g, const Examples& product,
                   Array<const std::uint32_t> ids, std::int64_t first_row, const Examples& lookup, Matrix<float> rows,
                   Array<std::byte> workspace) {
  const std::int64_t most_rows = std::max(product.most_rows(), lookup.most_rows());
  const TiedRows work = tied_layout(workspace.data, x.type, g.type, x.columns, most_rows);
  require_examples(product, lookup.count(), work.bytes, workspace, "rows of a tied matrix");
  Execution exact = execution;
  exact.tf32 = false;
  for (std::int64_t e = 0; e < lookup.count(); ++e) {
    const std::int64_t n_product = product.rows_of(e);
    if (n_product == 0) continue;
    for (std::int64_t t = lookup.offsets[e]; t < lookup.offsets[e + 1]; t += kGathered) {
      const std::int64_t n = std::min(kGathered, lookup.offsets[e + 1] - t);
      const AnyMatrix from = g.rows_from(product.offsets[e], n_product),
                      selected{work.selected.data, g.type, n_product, n, n};
      const Array<const std::uint32_t> chosen{ids.data + t, n};
      gather_columns(execution, from, chosen, first_row, selected);
      gemm(exact, 1, selected, Form::transposed, x.rows_from(product.offsets[e], n_product), Form::plain, 1,
           {rows.row(t), Scalar::fp32, n, x.columns, rows.stride}, work.library);
    }
  }
}

std::int64_t tied_norms_workspace(const ExampleSizes& sizes) {
  Workspace memory(nullptr);
  memory.take<double>(sizes.rows);
  return memory.bytes();
}

void add_tied_norms(const Execution& execution, AnyMatrix g, Matrix<const float> rows, const Examples& lookup,
                    Array<double> norms, Array<std::byte> workspace) {
  Workspace memory(workspace.data);
  const Array<double> of_rows = memory.take<double>(g.rows);
  require_examples(lookup, norms.size, memory.bytes(), workspace, "norms of a tied matrix");
  multiply_rows(execution, g, rows, of_rows);
  add_row_values(execution, of_rows, lookup.device_offsets, 0, 2, norms);
}

}  // namespace weft::kernels
