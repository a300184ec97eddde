// SPDX-License-Identifier: Apache-2.0
//
// Clipping of per-example gradients: factors c_b from norms, and the clipped sums S = sum over b of c_b dW_b from the
// same rows as the norms (norms.hpp), or from gradients of examples that were stored.
//
// Factors are applied in fp32, to fp32 sums or fp32 copies of the rows, never to rows of 16 bits: rounding there would
// change the bound. A factor of 0 contributes exactly 0, also where the rows are NaN or infinite. All functions add to
// fp32 arrays in a fixed order.
#pragma once

#include <cstddef>

#include "kernels/array.hpp"
#include "kernels/bf16.hpp"
#include "kernels/execution.hpp"
#include "kernels/privacy/examples.hpp"
#include "kernels/privacy/noise.hpp"

namespace weft::kernels {

/// Factor of a gradient of norm n for the bound C.
enum class ClipFunction {
  abadi,      ///< min(1, C / (n + 1e-6)): Abadi et al., arXiv 1607.00133
  automatic,  ///< C / (n + 0.01): Bu et al., arXiv 2206.07136
  indicator,  ///< 1 if n <= C, else 0
};

/// Norms are taken larger by this fraction, so that ||c_b g_b|| <= C holds for what is summed: 2^-14 for the squares
/// and the factors, and for fp32 sums over `rows` rows the most that they can be off where the terms of a sum have one
/// sign, 2^-23 of the sum per row (tensor cores truncate). Terms that cancel may be off by as much of the sum of their
/// magnitudes (docs/privacy.md).
constexpr double norm_margin(std::int64_t rows) { return 0x1p-14 + 0x1p-23 * static_cast<double>(rows); }

/// The factor of an example whose gradient is a sum over at most `rows` rows: at most that of the exact norm; 0 if the
/// norm is not finite or, by cancellation, negative. `rows` is a size of the run, not of the batch, whose other
/// examples must not change the factor.
float clip_factor(double squared_norm, double clip, ClipFunction function, std::int64_t rows = 1);

/// factors[b] from squared norms. `unit`: if not null, `clip` is in units of *unit, in memory of the kernels.
void clip_factors(const Execution&, Array<const double> squared_norms, double clip, ClipFunction, std::int64_t rows,
                  Array<float> factors, const double* unit = nullptr);

/// *balance += number of factors that are 1 - number of others.
void add_clip_balance(const Execution&, Array<const float> factors, double* balance);

/// One step of a clip bound that follows a quantile of the norms (Andrew et al. 2021, arXiv:1905.03871). A record adds
/// b - 1/2 to half of *balance, b = 1 if its norm is at most the bound and else 0: magnitude 1/2, which is why the
/// count needs half the noise of a sum of b. On average the sum is expected * (fraction - 1/2).
struct ClipAdaptation {
  double quantile = 0.5;  ///< fraction of norms that are to be at most the bound
  double rate = 0;
  double deviation = 0;  ///< of the noise on half of *balance
  double expected = 1;   ///< records of a step: the public expectation
};
/// The range of clip bounds.
constexpr double kLeastClip = 1e-6, kLargestClip = 1e6;

/// *clip *= exp(-rate (fraction - quantile)), fraction = 1/2 + (*balance / 2 + deviation xi) / expected, xi the first
/// number of the stream; to kLeastClip or kLargestClip at most.
void adapt_clip(const Execution&, const double* balance, const ClipAdaptation&, const NoiseStream&, double* clip);

/// Bytes of workspace of add_clipped_product.
std::int64_t clipped_product_workspace(Scalar x, Scalar g, std::int64_t in, std::int64_t out, const ExampleSizes&,
                                       ProductImplementation = ProductImplementation::library);

/// out [out, in] += sum over b of c_b G_bᵀ X_b.
void add_clipped_product(const Execution&, AnyMatrix x, AnyMatrix g, const Examples&, Array<const float> factors,
                         Matrix<float> out, Array<std::byte> workspace,
                         ProductImplementation = ProductImplementation::library);

/// Bytes of workspace of add_clipped_lookup.
std::int64_t clipped_lookup_workspace(std::int64_t columns, const ExampleSizes&);

/// out[ids[t] - first_row] += c_b g[t], in ascending order of t; ids outside the rows of `out` are skipped.
void add_clipped_lookup(const Execution&, Array<const std::uint32_t> ids, AnyMatrix g, std::int64_t first_row,
                        const Examples&, Array<const float> factors, Matrix<float> out, Array<std::byte> workspace);

// Stored gradients of examples: `stored` is [examples, elements], of a product [examples, out * in] in bf16. The norm
// is that of the stored values, which are the ones that are summed.

/// Bytes of workspace of form_examples.
std::int64_t form_examples_workspace(Scalar x, Scalar g, std::int64_t in, std::int64_t out, const ExampleSizes&);

/// stored[b] = G_bᵀ X_b, summed in fp32 and rounded to nearest. norms[b] += sum of the squares of the rounded values;
/// without data, no norms.
void form_examples(const Execution&, AnyMatrix x, AnyMatrix g, const Examples&, Matrix<bf16> stored,
                   Array<double> norms, Array<std::byte> workspace);

/// Bytes of workspace of add_lookup_to_examples.
std::int64_t lookup_to_examples_workspace(const ExampleSizes&);

/// stored[b, ids[t] - first_row] += sum over the equal ids of example b of g[t], formed in fp32 and rounded once: a
/// tied matrix. A row of the table has g.columns columns. Limit of examples: add_lookup_norms.
void add_lookup_to_examples(const Execution&, Array<const std::uint32_t> ids, AnyMatrix g, std::int64_t first_row,
                            const Examples&, Matrix<bf16> stored, Array<std::byte> workspace);

/// Bytes of workspace of add_stored_norms for rows of `size` elements.
std::int64_t stored_norms_workspace(std::int64_t examples, std::int64_t size);

/// norms[b] += sum of squares of stored[b], fp32 or bf16.
void add_stored_norms(const Execution&, AnyMatrix stored, Array<double> norms, Array<std::byte> workspace);

/// out [stored.columns] += sum over b of c_b stored[b], fp32 or bf16.
void add_clipped_examples(const Execution&, AnyMatrix stored, Array<const float> factors, Array<float> out);

}  // namespace weft::kernels
