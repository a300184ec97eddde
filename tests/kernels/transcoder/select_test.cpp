// SPDX-License-Identifier: Apache-2.0
//
// The rule's arithmetic, and the portable kernels one by one; they run through Kokkos on every backend. Whole
// selections are tested in tests/transcoder/selection/selection_test.cpp, with the portable and the CUDA kernels alike.
#include "kernels/transcoder/select/select.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/random.hpp"
#include "tests/test.hpp"

namespace weft::kernels {
namespace {

template <class T>
device::Buffer<T> to_device(const std::vector<T>& host) {
  device::Buffer<T> buffer(static_cast<std::int64_t>(host.size()));
  device::copy(testing::execution(), buffer.data(), host.data(), buffer.bytes(), device::Direction::to_device);
  fence(testing::execution());
  return buffer;
}

template <class T>
std::vector<T> to_host(const device::Buffer<T>& buffer) {
  std::vector<T> host(static_cast<std::size_t>(buffer.size()));
  device::copy(testing::execution(), host.data(), buffer.data(), buffer.bytes(), device::Direction::to_host);
  fence(testing::execution());
  return host;
}

float noise(std::uint64_t index) { return 2 * uniform_float(philox(3, Purpose::test, 0, index).word[0]) - 1; }

/// One tile of products in either type.
struct Sample {
  std::int64_t n_tokens, n_features;
  std::vector<float> r;  // fp32(stored product + bias)
  device::Buffer<float> wide, bias;
  device::Buffer<bf16> narrow;
  Scalar type;

  Sample(std::int64_t n, std::int64_t f, Scalar type_, float levels) : n_tokens(n), n_features(f), type(type_) {
    std::vector<float> product, shift;
    std::vector<bf16> rounded;
    for (std::int64_t j = 0; j < f; ++j) shift.push_back(static_cast<float>(j % 4) * 0.125f);
    for (std::int64_t i = 0; i < n * f; ++i) {
      float v = std::floor(noise(static_cast<std::uint64_t>(i)) * levels) / levels;
      if (i % 101 == 100) v = std::numeric_limits<float>::quiet_NaN();
      rounded.push_back(to_bf16(v));
      if (type == Scalar::bf16) v = rounded.back();
      product.push_back(v);
      r.push_back(v + shift[static_cast<std::size_t>(i % f)]);
    }
    wide = to_device(product);
    bias = to_device(shift);
    narrow = to_device(rounded);
  }
  Tile tile() const {
    return {{type == Scalar::bf16 ? static_cast<void*>(narrow.data()) : wide.data(), type, n_tokens, n_features,
             n_features},
            bias.array(),
            0,
            0,
            0};
  }
};

}  // namespace

TEST_CASE("keys order as values do; values that are not positive have key 0") {
  CHECK(selection_key(0.0f) == 0);
  CHECK(selection_key(-0.0f) == 0);
  CHECK(selection_key(-1.0f) == 0);
  CHECK(selection_key(std::numeric_limits<float>::quiet_NaN()) == 0);
  CHECK(selection_key(std::numeric_limits<float>::infinity()) == kLargestKey);
  float previous = 0;
  for (const float v : {1e-45f, 1e-40f, 1e-38f, 0.5f, 1.0f, 1.0000001f, 3e38f}) {
    CHECK(selection_key(v) > selection_key(previous));
    previous = v;
  }
}

TEST_CASE("words order by key, then by lower index, and keep both") {
  CHECK(selection_word(7, 5) > selection_word(6, 0));
  CHECK(selection_word(7, 4) > selection_word(7, 5));
  CHECK(selection_word(1, 0xfffffffeu) > 0);
  for (const std::uint32_t key : {1u, 0x3f800000u, kLargestKey})
    for (const std::uint32_t index : {0u, 12345u, 0xfffffffeu}) {
      CHECK(key_of_word(selection_word(key, index)) == key);
      CHECK(index_of_word(selection_word(key, index)) == index);
    }
}

TEST_CASE("budgets round halves up and are at least 1") {
  CHECK(selection_budget(2.5, 1, 1) == 3);
  CHECK(selection_budget(0.3, 1, 1) == 1);
  CHECK(selection_budget(16 + 2.0 / 3, 3, 1) == 50);
  CHECK(selection_budget(0.5, 3, 37) == 56);
}

TEST_CASE("the search through histograms finds the K-th key and its ties") {
  for (const float levels : {3.0f, 64.0f, 1e6f}) {
    std::vector<std::uint32_t> keys;
    for (std::uint64_t i = 0; i < 5000; ++i)
      if (const auto key = selection_key(std::floor(noise(i) * levels) / levels); key > 0) keys.push_back(key);
    std::sort(keys.begin(), keys.end(), std::greater<>());
    const auto n = static_cast<std::int64_t>(keys.size());
    for (const std::int64_t wanted : {std::int64_t{1}, std::int64_t{17}, n / 2, n, n + 1}) {
      KeySearch<std::int64_t> search{.wanted = wanted};
      for (int round = 0; round < kHistogramRounds; ++round) {
        std::vector<std::int64_t> histogram(kHistogramBins, 0);
        for (const std::uint32_t key : keys)
          if (const int bin = search.round().bin(key); bin >= 0) ++histogram[static_cast<std::size_t>(bin)];
        search.advance(pick_bin(histogram.data(), search.rank()));
      }
      CHECK(search.exhausted == (wanted > n));
      if (search.exhausted) {
        CHECK(search.key() == 0);
        CHECK(search.threshold() == 0);
        CHECK(search.reaching() == n);
        CHECK(search.ties_cut() == 0);
        continue;
      }
      const std::uint32_t kth = keys[static_cast<std::size_t>(wanted - 1)];
      const auto first = std::find(keys.begin(), keys.end(), kth) - keys.begin();
      const auto ties = std::count(keys.begin(), keys.end(), kth);
      CHECK(search.key() == kth);
      CHECK(search.threshold() == kth - 1);
      CHECK(search.ties_kept() == wanted - first);
      CHECK(search.ties_cut() == ties - (wanted - first));
    }
  }
}

TEST_CASE("ties are admitted in order: the parts of a sequence get what the whole gets") {
  for (const std::int64_t kept : {0, 1, 7, 20, 100}) {
    std::int64_t before = 0, admitted = 0;
    for (const std::int64_t ties : {3, 0, 5, 1, 9, 4}) {
      const std::int64_t own = ties_admitted<std::int64_t>(ties, before, kept);
      CHECK(own >= 0);
      CHECK(own <= ties);
      if (own < ties) CHECK(admitted + own == kept);  // only the budget cuts
      before += ties;
      admitted += own;
    }
    CHECK(admitted == std::min<std::int64_t>(kept, before));
  }
}

TEST_CASE("the next threshold is below the K-th key, and follows the number of entries that passed") {
  const std::uint32_t kth = float_bits(2.0f), low = float_bits(1.5f);
  CHECK(next_threshold(0, low, true, 10, 100) == 0);
  CHECK(next_threshold(0, low, false, 10, 100) == 0);
  for (const auto passed : {100, 110, 190, 1000, 100000}) {
    const std::uint32_t next = next_threshold(kth, low, true, static_cast<std::uint64_t>(passed), 100);
    CHECK(next < kth);
    CHECK(next >= (passed == 100 ? float_bits(0.98f * 1.5f) : float_bits(0.93f * 2.0f)));
  }
  CHECK(next_threshold(kth, low, true, 100000, 100) > next_threshold(kth, low, true, 1000, 100));
  CHECK(next_threshold(kth, low, true, 50, 100) == 0);
  CHECK(next_threshold(kth, low, false, 0, 100) == float_bits(0.95f * 2.0f));
  CHECK(next_threshold(kth, 0, false, 0, 100) == float_bits(0.95f * 2.0f));
  // After each list that overflows the distance to the K-th key is a quarter.
  std::uint32_t threshold = next_threshold(kth, 0, false, 0, 100);
  for (int batch = 1; batch < 4; ++batch) {
    threshold = next_threshold(kth, threshold, false, 0, 100);
    CHECK(bits_float(threshold) == doctest::Approx(2 - 0.1 * std::pow(0.25, batch)).epsilon(1e-6));
  }
  CHECK(next_threshold(kLargestKey, low, true, 1000, 100) == kLargestKey - 1);  // the K-th value is infinite
}

TEST_CASE("a histogram counts the keys of its round and prefix") {
  for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
    const Sample sample(33, 129, type, 1e6f);
    std::uint32_t prefix = 0;
    for (int round = 0; round < kHistogramRounds; ++round) {
      std::vector<std::int64_t> expected(kHistogramBins, 5);  // adds to the contents
      const int upper = histogram_shift(round) + histogram_width(round);
      for (const float r : sample.r) {
        const std::uint32_t key = selection_key(r);
        if (key != 0 && key >> upper == prefix)
          ++expected[(key >> histogram_shift(round)) % (1u << histogram_width(round))];
      }
      const auto histogram = to_device(std::vector<std::int64_t>(kHistogramBins, 5));
      histogram_tile(testing::execution(), sample.tile(), {round, prefix}, histogram.array());
      CHECK(to_host(histogram) == expected);
      const auto fullest = std::max_element(expected.begin(), expected.end()) - expected.begin();
      prefix = prefix << histogram_width(round) | static_cast<std::uint32_t>(fullest);
    }
  }
}

TEST_CASE("the filter keeps the order, counts entries beyond its capacity, and does not write them") {
  for (const Scalar type : {Scalar::fp32, Scalar::bf16})
    for (const std::int64_t capacity : {0, 10, 100, 100000}) {
      const Sample sample(21, 203, type, 64.0f);
      const float threshold = 0.5f;
      std::vector<std::uint32_t> keys;
      std::vector<float> values;
      std::vector<std::int64_t> begin{0};
      for (std::size_t i = 0; i < sample.r.size(); ++i) {
        if (sample.r[i] > threshold) {
          keys.push_back(static_cast<std::uint32_t>(i % 203));
          values.push_back(sample.r[i]);
        }
        if (i % 203 == 202) begin.push_back(static_cast<std::int64_t>(keys.size()));
      }
      const std::int64_t size = std::max<std::int64_t>(capacity, static_cast<std::int64_t>(keys.size()));
      const auto key = to_device(std::vector<std::uint32_t>(static_cast<std::size_t>(size), 77777));
      const auto value = to_device(std::vector<float>(static_cast<std::size_t>(size), -1.0f));
      const auto segments = to_device(std::vector<std::int64_t>(22, 0));
      filter_tile(testing::execution(), sample.tile(), 0, {float_bits(threshold), {}, {}},
                  {21, 1, 1, 203, {key.data(), capacity}, {value.data(), capacity}, segments.array()});
      CHECK(to_host(segments) == begin);
      const auto found_key = to_host(key);
      const auto found_value = to_host(value);
      for (std::size_t i = 0; i < found_key.size(); ++i) {
        const bool stored = static_cast<std::int64_t>(i) < capacity && i < keys.size();
        REQUIRE(found_key[i] == (stored ? keys[i] : 77777));
        REQUIRE(found_value[i] == (stored ? values[i] : -1.0f));
      }
    }
}

TEST_CASE("the ordered filter admits the first ties of each token, across feature blocks") {
  const Sample sample(12, 90, Scalar::fp32, 4.0f);
  const float threshold = 0.5f;
  std::vector<std::int32_t> room(12);
  for (std::size_t n = 0; n < room.size(); ++n) room[n] = static_cast<std::int32_t>(n);
  const auto admit = to_device(room);
  const auto admitted = to_device(std::vector<std::int32_t>(12, 0));
  const auto ties = to_device(std::vector<std::int32_t>(12, 0));
  const device::Buffer<std::uint32_t> key(12 * 90);
  const device::Buffer<float> value(12 * 90);
  const auto segments = to_device(std::vector<std::int64_t>(2 * 12 + 1, 0));
  const CandidateLists lists{12, 1, 2, 90, key.array(), value.array(), segments.array()};
  for (const std::int64_t block : {0, 1}) {  // features 0..49 and 50..89
    Tile tile = sample.tile();
    tile.feature_begin = block * 50;
    tile.product = tile.product.columns_from(block * 50, block == 0 ? 50 : 40);
    tile.bias = {tile.bias.data + block * 50, tile.product.columns};
    count_ties_tile(testing::execution(), tile, float_bits(threshold), ties.matrix(12, 1));
    filter_tile(testing::execution(), tile, block, {float_bits(threshold), admit.matrix(12, 1), admitted.matrix(12, 1)},
                lists);
  }
  const auto begin = to_host(segments);
  const auto found = to_host(key);
  const auto counted = to_host(ties);
  for (std::int64_t n = 0; n < 12; ++n) {
    std::vector<std::uint32_t> expected, actual;
    std::int32_t tied = 0;
    for (std::uint32_t j = 0; j < 90; ++j) {
      const float r = sample.r[static_cast<std::size_t>(n * 90 + j)];
      if (r > threshold || (r == threshold && tied < n)) expected.push_back(j);
      tied += r == threshold;
    }
    for (const std::int64_t block : {0, 1})
      for (auto i = begin[static_cast<std::size_t>(lists.segment(0, block, n))];
           i < begin[static_cast<std::size_t>(lists.segment(0, block, n) + 1)]; ++i)
        actual.push_back(found[static_cast<std::size_t>(i)]);
    CHECK(actual == expected);
    CHECK(counted[static_cast<std::size_t>(n)] == tied);
  }
}

TEST_CASE("the best of a token with thousands of active features, for any budget") {
  for (const std::int64_t budget : {1, 7, 64, 3000, 6000}) {
    const std::int64_t n_features = 5001;
    const Sample sample(2, n_features, Scalar::fp32, 512.0f);
    const auto words = to_device(std::vector<std::uint64_t>(static_cast<std::size_t>(2 * budget), 0));
    const BestLists best{1, n_features, 0, words.matrix(2, budget)};
    keep_best_tile(testing::execution(), sample.tile(), best);
    const device::Buffer<std::int64_t> offsets(3);
    const device::Buffer<std::uint32_t> key(2 * budget);
    const device::Buffer<float> value(2 * budget);
    take_best(testing::execution(), best, {}, {2, 1, n_features, offsets.array(), key.array(), value.array()});
    const auto found = to_host(key);
    const auto begin = to_host(offsets);
    for (std::int64_t n = 0; n < 2; ++n) {
      const float* row = sample.r.data() + n * n_features;
      std::vector<std::uint32_t> order;
      for (std::int64_t j = 0; j < n_features; ++j)
        if (row[j] > 0) order.push_back(static_cast<std::uint32_t>(j));
      std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) { return row[a] > row[b]; });
      order.resize(std::min<std::size_t>(order.size(), static_cast<std::size_t>(budget)));
      std::sort(order.begin(), order.end());
      const std::vector<std::uint32_t> actual(found.begin() + begin[static_cast<std::size_t>(n)],
                                              found.begin() + begin[static_cast<std::size_t>(n + 1)]);
      CHECK(actual == order);
    }
  }
}

}  // namespace weft::kernels
