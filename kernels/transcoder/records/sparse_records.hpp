// SPDX-License-Identifier: Apache-2.0
//
// Gradients of the records of a private step from sparse lists (transcoder/sparse/sparse.hpp), none of them formed. The
// gradient of a matrix whose row f belongs to a feature is, of record b with its entries (token n, feature f),
//
//   row f of dW_b = sum over the entries of f in b of v[n,f] r[n]       v: activations (decoder) or dz (encoder)
//                                                                       r: gradient rows, or inputs
//
// so that |dW_b|^2 is a sum over the rows that b has entries in: of v^2 |r|^2 where a record has one token. Clipped
// sums are those of the same lists with v times the factor of its record; rows are never scaled, which would round
// those of 16 bits.
//
// Symbols: N tokens, L layers. Squares of tokens and layers are [L, N], fp64, in a fixed order of sums.
#pragma once

#include <cstdint>

#include "kernels/transcoder/activation/threshold_band.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"

namespace weft::kernels {

/// For each row where an input or target is not finite: sets both rows to 0 and flags[row] to 1; of others to 0.
void screen_rows(const Execution&, AnyMatrix inputs, AnyMatrix targets, Array<std::int32_t> flags);

/// squares(s, n) = sum of the squares of the columns of layer s of row n (there are L * d), or with `to_end` of all
/// columns from its first one on. A row with a sum that is not finite is then set to 0, and all of its squares to
/// infinity: products with it are finite.
void row_squares(const Execution&, AnyMatrix rows, bool to_end, Matrix<double> squares);

/// From alpha = d loss / d a of band lists (threshold_band.hpp), by position: dz, and the gradient of the threshold by
/// each entry.
void band_gradients(const Execution&, const ThresholdBand&, const SparseActivations& listed, Matrix<const float> theta,
                    Array<const float> alpha, Array<float> dz, Array<float> by_threshold);

/// squares(s, n) = sum over the entries of token n in layer s of v^2 (of_rows(s, n) + constant) + w^2. `v` and `w` by
/// position; w without data: 0.
void entry_squares(const Execution&, const SparseActivations&, Array<const float> v, Array<const float> w,
                   Matrix<const double> of_rows, double constant, Matrix<double> squares);

/// The same where a record has several entries of a feature: their vectors are added before they are squared. For each
/// feature and record, squares(s, n) of one token n with an entry gains
///
///   |sum of v r|^2 + constant * (sum of v)^2 + (sum of w)^2
///
/// with r the columns of layer s of row n, or with `to_end` all from its first one on.
/// record: of each token, ascending; tokens of none have -1. by_position: workspace, as large as v. source_offsets:
/// offsets of the hits by source if they are those of hits_by_target, which for each key follow one another by source;
/// else empty.
void shared_entry_squares(const Execution&, const SparseActivations&, const FeatureHits&,
                          Array<const std::int64_t> source_offsets, Array<const float> v, Array<const float> w,
                          AnyMatrix rows, bool to_end, double constant, Array<const std::int32_t> record,
                          Array<const std::int64_t> record_offsets, Array<double> by_position, Matrix<double> squares);

/// norms(part, b) += sum over the tokens of record b of squares(s, n) of the layers s of the part: one part per layer
/// if norms has L rows, else one of all.
void add_token_squares(const Execution&, Matrix<const double> squares, Array<const std::int64_t> record_offsets,
                       Matrix<double> norms);

/// values[i] *= factors(s or 0, record of the token) for all entries; exactly 0 where the factor is 0, and for tokens
/// without a record. factors: [1 or L, records].
void scale_entries(const Execution&, const SparseActivations&, Array<const std::int32_t> record,
                   Matrix<const float> factors, Array<float> values);

/// Number of rows of a partial sum of clipped_column_sums, which takes [partial_sums(rows), columns] as workspace.
constexpr std::int64_t kRowsPerPartialSum = 64;
constexpr std::int64_t partial_sums(std::int64_t rows) { return (rows + kRowsPerPartialSum - 1) / kRowsPerPartialSum; }
/// out[c] = sum over the rows n of records of factors[record[n]] rows(n, c), without those of factor 0.
void clipped_column_sums(const Execution&, AnyMatrix rows, Array<const std::int32_t> record, Array<const float> factors,
                         Array<float> partial, Array<float> out);

/// norms[record[first + i]] = infinity where flags[i] is not 0.
void exclude_records(const Execution&, Array<const std::int32_t> flags, std::int64_t first,
                     Array<const std::int32_t> record, Array<double> norms);

}  // namespace weft::kernels
