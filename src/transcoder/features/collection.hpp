// SPDX-License-Identifier: Apache-2.0
//
// Activity of the features of this rank on a dataset: how often they fire, how strongly, and where most strongly.
// Memory depends on the number of features, not on the number of tokens.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "transcoder/features/sparse_rows.hpp"

namespace weft::transcoder {

/// Bins of the histogram of activations: two per octave. Bin i begins at 2^((i - kHistogramOrigin) / 2); the first has
/// no lower and the last no upper end.
inline constexpr int kHistogramBins = 32;
inline constexpr int kHistogramOrigin = 18;
int histogram_bin(float activation);
/// Lower ends of the bins; 0 for the first.
std::array<double, kHistogramBins> histogram_edges();

class FeatureCollection {
 public:
  /// Collects `n_keys` features and the `n_top` strongest activations of each.
  FeatureCollection(std::int64_t n_keys, std::int64_t n_top);

  /// Adds a batch. Batches come in stored order: of equal activations the first tokens are kept.
  void add(const SparseRows&);

  std::int64_t n_top() const { return n_top_; }
  // Results by key.
  const std::vector<std::int64_t>& fired() const { return fired_; }          ///< tokens with a > 0
  const std::vector<double>& sum() const { return sum_; }                    ///< sum of the activations
  const std::vector<std::int64_t>& histogram() const { return histogram_; }  ///< [n_keys, kHistogramBins]
  /// Strongest activations [n_keys, n_top], descending by value, equal ones by row; value 0 and row -1 where there are
  /// fewer.
  const std::vector<float>& top_value() const { return top_value_; }
  const std::vector<std::int64_t>& top_row() const { return top_row_; }  ///< rows of the dataset, in stored order

 private:
  std::int64_t n_top_;
  std::vector<std::int64_t> fired_, histogram_, top_row_;
  std::vector<double> sum_;
  std::vector<float> top_value_;
};

}  // namespace weft::transcoder
