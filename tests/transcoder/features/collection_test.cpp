// SPDX-License-Identifier: Apache-2.0
//
// Collected activations of features: the strongest ones in order, ties by row, counts, sums and histograms.
#include "transcoder/features/collection.hpp"

#include <cmath>

#include "tests/test.hpp"

namespace weft::transcoder {
namespace {

/// One entry per token.
SparseRows rows_of(std::int64_t first_row, const std::vector<std::pair<std::uint32_t, float>>& entries) {
  SparseRows rows;
  rows.first_row = first_row;
  rows.n_tokens = static_cast<std::int64_t>(entries.size());
  rows.offsets.push_back(0);
  for (const auto& [key, value] : entries) {
    rows.key.push_back(key);
    rows.value.push_back(value);
    rows.offsets.push_back(static_cast<std::int64_t>(rows.key.size()));
  }
  return rows;
}

}  // namespace

TEST_CASE("the strongest activations descend, equal ones by row, whatever the batches") {
  const std::vector<std::pair<std::uint32_t, float>> entries = {{1, 2.0f}, {1, 3.0f}, {0, 1.0f}, {1, 2.0f},
                                                                {1, 3.0f}, {1, 1.0f}, {1, 4.0f}};
  std::vector<std::int64_t> first_sample;
  for (const std::size_t batch : {std::size_t{1}, std::size_t{3}, entries.size()}) {
    FeatureCollection collection(3, 4, 2);
    for (std::size_t begin = 0; begin < entries.size(); begin += batch)
      collection.add(rows_of(static_cast<std::int64_t>(100 + begin),
                             {entries.begin() + static_cast<std::ptrdiff_t>(begin),
                              entries.begin() + static_cast<std::ptrdiff_t>(std::min(begin + batch, entries.size()))}),
                     static_cast<std::int64_t>(batch));
    collection.finish();
    const auto of_key = [&](const auto& all, std::size_t key, std::size_t first, std::size_t count) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(6 * key + first);
      return std::vector(begin, begin + static_cast<std::ptrdiff_t>(count));
    };
    CHECK(of_key(collection.value(), 0, 0, 4) == std::vector<float>{1, 0, 0, 0});
    CHECK(of_key(collection.value(), 1, 0, 4) == std::vector<float>{4, 3, 3, 2});
    CHECK(of_key(collection.row(), 0, 0, 4) == std::vector<std::int64_t>{102, -1, -1, -1});
    CHECK(of_key(collection.row(), 1, 0, 4) == std::vector<std::int64_t>{106, 101, 104, 100});
    CHECK(of_key(collection.row(), 2, 0, 6) == std::vector<std::int64_t>(6, -1));
    // The sample: all there are, or two different ones with their values, whatever the batches and threads.
    CHECK(of_key(collection.row(), 0, 4, 2) == std::vector<std::int64_t>{102, -1});
    const std::vector<std::int64_t> sample = of_key(collection.row(), 1, 4, 2);
    const std::vector<float> values = of_key(collection.value(), 1, 4, 2);
    CHECK(sample[0] != sample[1]);
    for (std::size_t i = 0; i < 2; ++i) CHECK(entries[static_cast<std::size_t>(sample[i] - 100)].second == values[i]);
    CHECK(values[0] >= values[1]);
    if (first_sample.empty()) first_sample = sample;
    CHECK(sample == first_sample);
    Shades shades(collection, 1);
    shades.add(rows_of(100, entries), 2);
    // Feature 1 at its strongest place, row 106, and at row 105 before it: 1 of 4.
    CHECK(of_key(shades.values(), 0, 6 * 3, 3) == std::vector<std::uint8_t>{64, 255, 0});
    CHECK(collection.fired() == std::vector<std::int64_t>{1, 6, 0});
    CHECK(collection.sum() == std::vector<double>{1, 15, 0});
  }
}

TEST_CASE("histogram bins are half octaves that begin at their edges; the ends are open") {
  const auto edges = histogram_edges();
  for (int bin = 1; bin < kHistogramBins; ++bin) {
    const float edge = static_cast<float>(edges[static_cast<std::size_t>(bin)]);
    if ((bin - kHistogramOrigin) % 2 == 0) {  // a power of two, exact in fp32
      CHECK(histogram_bin(edge) == bin);
      CHECK(histogram_bin(std::nextafter(edge, 0.0f)) == bin - 1);
    }
    CHECK(histogram_bin(edge * 1.01f) == bin);
    CHECK(histogram_bin(edge * 0.99f) == bin - 1);
  }
  CHECK(histogram_bin(1e-30f) == 0);
  CHECK(histogram_bin(1e30f) == kHistogramBins - 1);
}

TEST_CASE("rows are drawn with the probability that was asked for, the same for all features and batches") {
  constexpr std::size_t n = 4000;
  RowSample by_batch{0.25}, at_once{0.25}, of_others{0.25}, all{};
  const std::vector<std::pair<std::uint32_t, float>> entries(n, {1, 1.0f}), others(n, {2, 3.0f});
  for (std::size_t begin = 0; begin < n; begin += 1000)
    by_batch.add(rows_of(static_cast<std::int64_t>(begin), {entries.begin(), entries.begin() + 1000}));
  at_once.add(rows_of(0, entries));
  of_others.add(rows_of(0, others));
  all.add(rows_of(0, entries));
  CHECK(all.entries.size() == n);
  // Five standard deviations of a binomial distribution.
  CHECK(std::abs(static_cast<double>(at_once.n_rows) - 1000) < 5 * std::sqrt(n * 0.25 * 0.75));
  CHECK(at_once.entries == by_batch.entries);
  CHECK(of_others.n_rows == at_once.n_rows);
  CHECK(at_once.entries.front() == 1);
  CHECK(at_once.entries.back() == ((at_once.n_rows - 1) << 32 | 1));
}

}  // namespace weft::transcoder
