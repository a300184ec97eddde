// SPDX-License-Identifier: Apache-2.0
//
// Activity of the features of this rank on a dataset: how often they fire, how strongly, and examples: where most
// strongly, and a sample of all places. Memory depends on the number of features, not on the number of tokens.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "transcoder/features/decoder_rows.hpp"
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
  /// Collects `n_keys` features, the `n_top` strongest activations of each and a sample of `n_sample` activations, by
  /// the rows in which the feature fires: each set of as many rows is equally probable, whatever the number of ranks.
  FeatureCollection(std::int64_t n_keys, std::int64_t n_top, std::int64_t n_sample);
  /// Host memory of the collection and of the shades of its examples.
  static std::int64_t bytes(std::int64_t n_keys, std::int64_t n_examples, std::int64_t context);

  /// Adds a batch, with `threads` threads. Batches come in stored order: of equal activations the first tokens are
  /// kept.
  void add(const SparseRows&, std::int64_t threads);
  /// After the last batch: sorts the samples like the strongest.
  void finish();

  std::int64_t n_keys() const { return std::ssize(fired_); }
  std::int64_t n_examples() const { return n_top_ + n_sample_; }
  // Results by key.
  const std::vector<std::int64_t>& fired() const { return fired_; }          ///< tokens with a > 0
  const std::vector<double>& sum() const { return sum_; }                    ///< sum of the activations
  const std::vector<std::int64_t>& histogram() const { return histogram_; }  ///< [n_keys, kHistogramBins]
  /// Examples [n_keys, n_examples]: the strongest, then the sample; each descending by value, equal ones by row; value
  /// 0 and row -1 where there are fewer.
  const std::vector<float>& value() const { return value_; }
  const std::vector<std::int64_t>& row() const { return row_; }  ///< rows of the dataset, in stored order

 private:
  std::int64_t n_top_, n_sample_;
  std::vector<std::int64_t> fired_, histogram_, row_;
  std::vector<double> sum_;
  std::vector<float> value_;
  std::vector<std::uint32_t> order_;  // [n_keys, n_sample], ascending: random numbers of the rows in the sample
};

/// Activations in the contexts of examples, from a second pass over the data.
class Shades {
 public:
  /// `collection` must outlive this object.
  Shades(const FeatureCollection& collection, std::int64_t context);
  void add(const SparseRows&, std::int64_t threads);
  /// [n_keys, n_examples, 2 context + 1]: activation around the row of the example in 255ths of the feature's strongest
  /// one, rounded up.
  const std::vector<std::uint8_t>& values() const { return values_; }

 private:
  const FeatureCollection& collection_;
  const std::int64_t context_;
  std::vector<std::uint8_t> values_;
};

/// The features that fire in rows drawn at random, the same rows on all ranks.
struct RowSample {
  double part = 1;  ///< probability with which a row is drawn
  std::uint64_t n_rows = 0;
  std::vector<std::uint64_t> entries = {};  ///< number of the drawn row * 2^32 + key, ascending

  void add(const SparseRows&);
};
/// For each feature f of this rank in a layer the k features g != f of that layer that fire in most of the drawn rows
/// in which f fires, [F_local, k]: layer * F + g, and the part of those rows. Collective over the feature axis.
LargestEntries coactive_features(const RowSample&, std::int64_t layer, std::int64_t n_features, std::int64_t k,
                                 const parallel::Communicator& ranks);

}  // namespace weft::transcoder
