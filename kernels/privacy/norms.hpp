// SPDX-License-Identifier: Apache-2.0
//
// Squared norms of per-example gradients from the rows that a backward pass leaves (model/gradient_sink.hpp), X
// [n, in] and G [n, out] in fp32, bf16 or fp16, without storing the gradient of an example. With X_b, G_b the rows of
// example b:
//
//   product          || G_bᵀ X_b ||²                                (direct), equal to
//                    sum over t, s of <x_t, x_s> <g_t, g_s>         (gram)
//   lookup           sum over ids v of || sum over t with id_t = v of g_t ||²
//   tied matrix      lookup + product + 2 sum over t of <e_t, sum over s of P[s, id_t] h_s>
//
// Goodfellow, arXiv 1510.01799 (T = 1); Li et al., arXiv 2110.05679 (gram); Bu et al., arXiv 2210.00038 (choice);
// Phantom Clipping, arXiv 2405.18194 (tied). All functions add to norms [examples], fp64, in a fixed order.
//
// Numerics. Products are summed in fp32, their squares in fp64. Rows of 16 bits enter as they are; fp32 rows are never
// rounded to TF32, whatever Execution::tf32 says. The sums of the Gram form cancel where all inputs share a large
// component and the gradients sum to little. So it adds to each of its terms gram_error of its magnitude: norms are
// then larger than the true ones, by about that fraction without cancellation, and by much more where the rows of an
// example share a component of many times their deviation, where the direct form is as exact as otherwise. clip_factors
// (clipped_sums.hpp) rounds norms up.
//
// A NaN or infinity in the rows of an example makes its norm NaN or infinite, and no other.
#pragma once

#include <cstddef>

#include "kernels/array.hpp"
#include "kernels/execution.hpp"
#include "kernels/privacy/cost.hpp"
#include "kernels/privacy/examples.hpp"

namespace weft::kernels {

/// Method that computes the norms of products.
struct NormMethod {
  NormAlgorithm algorithm = NormAlgorithm::direct;
  /// direct: outputs whose rows of the gradient are formed at a time. gram: positions of a side of a tile. 0:
  /// automatic. The result changes by rounding only.
  std::int64_t tile = 0;
  ProductImplementation implementation = ProductImplementation::library;  ///< fused has tiles of its own
};

/// Relative error of a product of two inner products of `in` and of `out` terms in fp32. Linear in their numbers: terms
/// of one sign, as those on the diagonal, are rounded in one direction, and tensor cores truncate: 2^-23 per addition.
/// Where the terms of an inner product cancel, its error relative to the product of the norms of the rows may reach
/// 2^-23 per addition, which this bound does not cover.
double gram_error(std::int64_t in, std::int64_t out);

/// Examples of at most this many rows take the pairwise products of their rows, whatever the method.
constexpr std::int64_t kPairwiseRows = 8;

/// Bytes of workspace of add_product_norms.
std::int64_t product_norms_workspace(Scalar x, Scalar g, std::int64_t in, std::int64_t out, const ExampleSizes&,
                                     const NormMethod&);

/// norms[b] += || G_bᵀ X_b ||². All rows of an example must come in one call: the norms of parts do not add up. Columns
/// of G that are padding (of a vocabulary) are left out of the view.
void add_product_norms(const Execution&, AnyMatrix x, AnyMatrix g, const Examples&, const NormMethod&,
                       Array<double> norms, Array<std::byte> workspace);

/// sums[b] = sum over the rows t of example b of g[t], or of (x[t] - shift[t]) scale[t] ∘ g[t]: the per-example
/// gradient of a vector, [examples, columns]; for norms and clipped sums see add_stored_norms and add_clipped_examples
/// (clipped_sums.hpp). Statistics of the rows as in kernels/gradient/gradient.hpp: without data 0 and 1.
void form_column_sums(const Execution&, AnyMatrix g, const Examples&, Matrix<float> sums);
void form_column_products(const Execution&, AnyMatrix x, AnyMatrix g, Array<const float> shift,
                          Array<const float> scale, const Examples&, Matrix<float> sums);

/// Bytes of workspace of add_lookup_norms.
std::int64_t lookup_norms_workspace(std::int64_t columns, const ExampleSizes&);

/// ids [n], g [n, columns]. Ids outside [first_row, first_row + table_rows) belong to other ranks and are skipped.
/// Throws Error(internal) if examples * (table_rows + 1) >= 2^32.
void add_lookup_norms(const Execution&, Array<const std::uint32_t> ids, AnyMatrix g, std::int64_t first_row,
                      std::int64_t table_rows, const Examples&, Array<double> norms, Array<std::byte> workspace);

/// Bytes of workspace of add_tied_rows.
std::int64_t tied_rows_workspace(Scalar x, Scalar g, std::int64_t columns, const ExampleSizes&);

/// The cross term of a matrix that is the table of a lookup and the matrix of a product (a tied embedding and head),
/// whose rows come at the two ends of the backward pass. First, with the rows of the product:
///
///   rows[t] += sum over s of G[s, ids[t] - first_row] X[s]      t in example e of `lookup`, s in example e of
///   `product`
///
/// x [s, columns], g [s, table rows of this rank], ids [t], rows [t, columns] fp32. The product's rows may come in
/// several calls. Ids outside the columns of g belong to other ranks.
void add_tied_rows(const Execution&, AnyMatrix x, AnyMatrix g, const Examples& product, Array<const std::uint32_t> ids,
                   std::int64_t first_row, const Examples& lookup, Matrix<float> rows, Array<std::byte> workspace);

/// Bytes of workspace of add_tied_norms.
std::int64_t tied_norms_workspace(const ExampleSizes&);

/// Adds the cross term after add_tied_rows, with the gradients g [t, columns] of the lookup: norms[e] += 2 sum over t
/// of <g[t], rows[t]>. May be negative.
void add_tied_norms(const Execution&, AnyMatrix g, Matrix<const float> rows, const Examples& lookup,
                    Array<double> norms, Array<std::byte> workspace);

}  // namespace weft::kernels
