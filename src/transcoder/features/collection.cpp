// SPDX-License-Identifier: Apache-2.0
#include "transcoder/features/collection.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <utility>

#include "kernels/random.hpp"
#include "parallel/grid.hpp"
#include "storage/threads.hpp"

namespace weft::transcoder {

int histogram_bin(float activation) {
  // a = m * 2^e with m in [1/2, 1): floor(2 log2 a) = 2e - 2 if m < sqrt(1/2), else 2e - 1.
  int exponent = 0;
  const float mantissa = std::frexp(activation, &exponent);
  const int half_octave = 2 * exponent - (mantissa < 0.70710678f ? 2 : 1);
  return std::clamp(half_octave + kHistogramOrigin, 0, kHistogramBins - 1);
}

std::array<double, kHistogramBins> histogram_edges() {
  std::array<double, kHistogramBins> edges{};
  for (int i = 1; i < kHistogramBins; ++i)
    edges[static_cast<std::size_t>(i)] = std::exp2(0.5 * static_cast<double>(i - kHistogramOrigin));
  return edges;
}

namespace {

/// Calls visit(row, key, value) for each entry; those of one feature in one thread, in the order of their rows.
template <class Visit>
void for_each_entry(const SparseRows& rows, std::int64_t n_keys, std::int64_t threads, const Visit& visit) {
  std::atomic<std::int64_t> next = 0;
  storage::in_parallel(threads, [&] {
    const parallel::Range keys = parallel::part(n_keys, threads, next++);
    for (std::int64_t token = 0; token < rows.n_tokens; ++token) {
      const auto begin = rows.key.begin() + rows.offsets[static_cast<std::size_t>(token)],
                 end = rows.key.begin() + rows.offsets[static_cast<std::size_t>(token + 1)];
      for (auto at = std::lower_bound(begin, end, keys.begin); at != end && *at < keys.end; ++at)
        visit(rows.first_row + token, static_cast<std::int64_t>(*at),
              rows.value[static_cast<std::size_t>(at - rows.key.begin())]);
    }
  });
}

/// A number that orders rows at random, the same for all features.
std::uint32_t random_order(std::int64_t row) {
  return kernels::philox(0, kernels::Purpose::row_order, 0, static_cast<std::uint64_t>(row)).word[0];
}

/// Makes room for an entry at the place `at` of `n` by dropping the last.
template <class T>
void insert(T* values, std::int64_t n, std::int64_t at, T value) {
  std::copy_backward(values + at, values + n - 1, values + n);
  values[at] = value;
}

}  // namespace

FeatureCollection::FeatureCollection(std::int64_t n_keys, std::int64_t n_top, std::int64_t n_sample)
    : n_top_(n_top),
      n_sample_(n_sample),
      fired_(static_cast<std::size_t>(n_keys), 0),
      histogram_(static_cast<std::size_t>(n_keys * kHistogramBins), 0),
      row_(static_cast<std::size_t>(n_keys * n_examples()), -1),
      sum_(static_cast<std::size_t>(n_keys), 0.0),
      value_(row_.size(), 0.0f),
      order_(static_cast<std::size_t>(n_keys * n_sample)) {}

std::int64_t FeatureCollection::bytes(std::int64_t n_keys, std::int64_t n_examples, std::int64_t context) {
  return n_keys * (8 * (2 + kHistogramBins) + n_examples * (8 + 4 + 4 + 2 * context + 1));
}

void FeatureCollection::add(const SparseRows& rows, std::int64_t threads) {
  for_each_entry(rows, n_keys(), threads, [&](std::int64_t row, std::int64_t key, float value) {
    const auto k = static_cast<std::size_t>(key);
    const std::int64_t fired_before = fired_[k]++;
    sum_[k] += static_cast<double>(value);
    ++histogram_[static_cast<std::size_t>(key * kHistogramBins + histogram_bin(value))];
    // Rows ascend, so an equal value belongs after the kept ones.
    float* const values = value_.data() + key * n_examples();
    std::int64_t* const places = row_.data() + key * n_examples();
    std::int64_t at = n_top_;
    while (at > 0 && value > values[at - 1]) --at;
    if (at < n_top_) {
      insert(values, n_top_, at, value);
      insert(places, n_top_, at, row);
    }
    std::uint32_t* const order = order_.data() + key * n_sample_;
    const std::uint32_t own = random_order(row);
    at = std::min(n_sample_, fired_before);
    while (at > 0 && own < order[at - 1]) --at;
    if (at == n_sample_) return;
    insert(order, n_sample_, at, own);
    insert(values + n_top_, n_sample_, at, value);
    insert(places + n_top_, n_sample_, at, row);
  });
}

void FeatureCollection::finish() {
  std::vector<std::pair<float, std::int64_t>> sample;
  for (std::int64_t key = 0; key < n_keys(); ++key) {
    const auto first = static_cast<std::size_t>(key * n_examples() + n_top_);
    const auto n = static_cast<std::size_t>(std::min(n_sample_, fired_[static_cast<std::size_t>(key)]));
    sample.clear();
    for (std::size_t i = first; i < first + n; ++i) sample.emplace_back(-value_[i], row_[i]);
    std::sort(sample.begin(), sample.end());
    for (std::size_t i = 0; i < n; ++i) {
      value_[first + i] = -sample[i].first;
      row_[first + i] = sample[i].second;
    }
  }
}

Shades::Shades(const FeatureCollection& collection, std::int64_t context)
    : collection_(collection),
      context_(context),
      values_(static_cast<std::size_t>(collection.n_keys() * collection.n_examples() * (2 * context + 1)), 0) {}

void Shades::add(const SparseRows& rows, std::int64_t threads) {
  const std::int64_t n = collection_.n_examples(), window = 2 * context_ + 1;
  for_each_entry(rows, collection_.n_keys(), threads, [&](std::int64_t row, std::int64_t key, float value) {
    const std::int64_t* const places = collection_.row().data() + key * n;
    const float strongest = collection_.value()[static_cast<std::size_t>(key * n)];
    const auto shade = static_cast<std::uint8_t>(std::clamp(std::ceil(255.0f * value / strongest), 1.0f, 255.0f));
    for (std::int64_t i = 0; i < n; ++i)
      if (places[i] >= 0 && std::abs(row - places[i]) <= context_)
        values_[static_cast<std::size_t>((key * n + i) * window + row - places[i] + context_)] = shade;
  });
}

void RowSample::add(const SparseRows& rows) {
  for (std::int64_t token = 0; token < rows.n_tokens; ++token) {
    if (static_cast<double>(random_order(rows.first_row + token)) >= part * 0x1p32) continue;
    const auto at = static_cast<std::size_t>(token);
    for (std::int64_t i = rows.offsets[at]; i < rows.offsets[at + 1]; ++i)
      entries.push_back(n_rows << 32 | rows.key[static_cast<std::size_t>(i)]);
    ++n_rows;
  }
}

LargestEntries coactive_features(const RowSample& sample, std::int64_t layer, std::int64_t n_features, std::int64_t k,
                                 const parallel::Communicator& ranks) {
  const parallel::Range own = parallel::part(n_features, ranks.size(), ranks.rank());
  std::vector<std::uint64_t> mine;  // row * 2^32 + feature
  for (const std::uint64_t entry : sample.entries)
    if (const auto f = static_cast<std::uint32_t>(entry) - layer * own.size(); f >= 0 && f < own.size())
      mine.push_back((entry >> 32 << 32) + static_cast<std::uint64_t>(own.begin + f));
  const std::int64_t bytes = std::ssize(mine) * 8;
  std::vector<std::int64_t> pieces(static_cast<std::size_t>(ranks.size()));
  ranks.all_gather(&bytes, pieces.data(), sizeof bytes);
  std::vector<std::uint64_t> by_row(std::accumulate(pieces.begin(), pieces.end(), std::size_t{0}) / 8);
  ranks.all_gather_uneven(mine.data(), by_row.data(), pieces);
  std::sort(by_row.begin(), by_row.end());
  for (std::uint64_t& entry : mine) entry = entry << 32 | entry >> 32;
  std::sort(mine.begin(), mine.end());

  const auto size = static_cast<std::size_t>(own.size() * k);
  LargestEntries result{std::vector<float>(size), std::vector<std::int64_t>(size, -1)};
  std::vector<std::uint32_t> count(static_cast<std::size_t>(n_features)), seen;
  for (auto at = mine.begin(); at != mine.end(); seen.clear()) {
    const std::uint64_t f = *at >> 32;
    float fired = 0;
    for (; at != mine.end() && *at >> 32 == f; ++at, ++fired)
      for (auto other = std::lower_bound(by_row.begin(), by_row.end(), *at << 32);
           other != by_row.end() && *other >> 32 == static_cast<std::uint32_t>(*at); ++other)
        if (const auto g = static_cast<std::uint32_t>(*other); g != f && count[g]++ == 0) seen.push_back(g);
    std::sort(seen.begin(), seen.end(),
              [&](std::uint32_t a, std::uint32_t b) { return count[a] != count[b] ? count[a] > count[b] : a < b; });
    std::size_t place = (f - static_cast<std::size_t>(own.begin)) * static_cast<std::size_t>(k);
    for (std::size_t i = 0; i < std::min(seen.size(), static_cast<std::size_t>(k)); ++i, ++place) {
      result.index[place] = layer * n_features + seen[i];
      result.value[place] = static_cast<float>(count[seen[i]]) / fired;
    }
    for (const std::uint32_t g : seen) count[g] = 0;
  }
  return result;
}

}  // namespace weft::transcoder
