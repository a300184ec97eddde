// SPDX-License-Identifier: Apache-2.0
#include "kernels/sparse/sparse.hpp"

#include <cstring>
#include <vector>

#include "device/memory.hpp"
#include "kernels/random.hpp"
#include "kernels/runtime.hpp"
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

/// Whether the transpose of rows of ascending keys is what a walk over the rows gives.
bool transposes(const std::vector<std::vector<std::uint32_t>>& rows, std::int64_t n_layers, std::int64_t n_features) {
  const std::int64_t n_keys = n_layers * n_features;
  std::vector<std::int64_t> row_offsets{0};
  std::vector<std::uint32_t> keys;
  std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>> expected(static_cast<std::size_t>(n_keys));
  for (std::size_t n = 0; n < rows.size(); ++n) {
    for (const std::uint32_t key : rows[n]) {
      expected[key].emplace_back(static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(keys.size()));
      keys.push_back(key);
    }
    row_offsets.push_back(static_cast<std::int64_t>(keys.size()));
  }
  const std::int64_t n_entries = row_offsets.back();
  const auto device_offsets = to_device(row_offsets);
  const auto device_keys = to_device(keys);
  const device::Buffer<float> values(n_entries);
  const device::Buffer<std::int64_t> offsets(n_keys + 1);
  const device::Buffer<std::uint32_t> token(n_entries), position(n_entries);
  const device::Buffer<std::byte> workspace(transpose_workspace(testing::execution().backend, n_keys, 0));
  transpose(testing::execution(),
            {static_cast<std::int64_t>(rows.size()), n_layers, n_features, device_offsets.array(), device_keys.array(),
             values.array()},
            {offsets.array(), token.array(), position.array()}, workspace.array());
  const auto host_offsets = to_host(offsets);
  const auto host_token = to_host(token), host_position = to_host(position);
  std::size_t i = 0;
  for (std::size_t k = 0; k < expected.size(); ++k) {
    if (host_offsets[k] != static_cast<std::int64_t>(i)) return false;
    for (const auto& [n, at] : expected[k]) {
      if (host_token[i] != n || host_position[i] != at) return false;
      ++i;
    }
  }
  return host_offsets.back() == n_entries;
}

/// Each key with probability `density`.
std::vector<std::vector<std::uint32_t>> random_rows(std::int64_t n_tokens, std::int64_t n_keys, float density) {
  std::vector<std::vector<std::uint32_t>> rows(static_cast<std::size_t>(n_tokens));
  for (std::int64_t n = 0; n < n_tokens; ++n)
    for (std::int64_t k = 0; k < n_keys; ++k)
      if (uniform_float(
              philox(7, Purpose::test, static_cast<std::uint64_t>(n), static_cast<std::uint64_t>(k)).word[0]) < density)
        rows[static_cast<std::size_t>(n)].push_back(static_cast<std::uint32_t>(k));
  return rows;
}

}  // namespace

TEST_CASE("transpose gives each feature's tokens in ascending order, whatever the shape") {
  CHECK(transposes(random_rows(301, 3 * 97, 0.02f), 3, 97));
  CHECK(transposes(random_rows(57, 1000, 0.6f), 1, 1000));
  CHECK(transposes(random_rows(1, 4001, 0.7f), 1, 4001));  // one token with thousands of features
  CHECK(transposes(random_rows(4097, 5, 0.9f), 5, 1));     // features with thousands of tokens: the other way to sort
  CHECK(transposes({{}, {3}, {}, {}, {0, 3, 7}, {}}, 2, 4));  // empty rows, empty columns
  CHECK(transposes({{}, {}}, 2, 4));
  CHECK(transposes({{0}}, 1, 1));
  auto rows = random_rows(501, 600, 0.003f);
  rows[250].clear();
  for (std::uint32_t k = 0; k < 600; ++k) rows[250].push_back(k);
  CHECK(transposes(rows, 6, 100));
}

TEST_CASE("transpose overwrites what was there and repeats bit for bit") {
  // The threads meet in another order each time; the result must not.
  const auto rows = random_rows(2000, 40, 0.5f);
  for (int repeat = 0; repeat < 10; ++repeat) REQUIRE(transposes(rows, 4, 10));
}

TEST_CASE("a part has the entries of its tokens and features, renumbered, and nothing else") {
  const std::int64_t n_layers = 3, n_features = 37, n_tokens = 50;
  const auto rows = random_rows(n_tokens, n_layers * n_features, 0.2f);
  std::vector<std::int64_t> offsets{0};
  std::vector<std::uint32_t> keys;
  std::vector<float> values;
  for (const auto& row : rows) {
    for (const std::uint32_t key : row) {
      keys.push_back(key);
      values.push_back(static_cast<float>(values.size()));
    }
    offsets.push_back(static_cast<std::int64_t>(keys.size()));
  }
  const auto all_offsets = to_device(offsets);
  const auto all_keys = to_device(keys);
  const auto all_values = to_device(values);
  const SparseActivations all{n_tokens,         n_layers,          n_features, all_offsets.array(),
                              all_keys.array(), all_values.array()};
  struct Part {
    std::int64_t token, n_tokens, feature, n_features;
  };
  for (const Part part : {Part{0, 50, 0, 37}, {13, 21, 12, 12}, {49, 1, 36, 1}, {20, 0, 5, 9}, {7, 9, 5, 0}}) {
    std::vector<std::int64_t> expected_offsets{0};
    std::vector<std::uint32_t> expected_keys;
    std::vector<float> expected_values;
    for (std::int64_t n = part.token; n < part.token + part.n_tokens; ++n) {
      for (std::int64_t i = offsets[static_cast<std::size_t>(n)]; i < offsets[static_cast<std::size_t>(n + 1)]; ++i) {
        const std::int64_t key = keys[static_cast<std::size_t>(i)], feature = key % n_features - part.feature;
        if (feature < 0 || feature >= part.n_features) continue;
        expected_keys.push_back(static_cast<std::uint32_t>(key / n_features * part.n_features + feature));
        expected_values.push_back(values[static_cast<std::size_t>(i)]);
      }
      expected_offsets.push_back(static_cast<std::int64_t>(expected_keys.size()));
    }
    const auto n_entries = static_cast<std::int64_t>(expected_keys.size());
    const device::Buffer<std::int64_t> part_offsets(part.n_tokens + 1);
    const device::Buffer<std::uint32_t> part_keys(n_entries);
    const device::Buffer<float> part_values(n_entries);
    take_part(testing::execution(), all, part.token, part.feature,
              {part.n_tokens, n_layers, part.n_features, part_offsets.array(), part_keys.array(), part_values.array()});
    CHECK(to_host(part_offsets) == expected_offsets);
    CHECK(to_host(part_keys) == expected_keys);
    CHECK(to_host(part_values) == expected_values);
  }
}

}  // namespace weft::kernels
