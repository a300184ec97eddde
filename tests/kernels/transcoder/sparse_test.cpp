// SPDX-License-Identifier: Apache-2.0
#include "kernels/transcoder/sparse/sparse.hpp"

#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/random.hpp"
#include "kernels/transcoder/sparse/restrict.hpp"
#include "tests/kernels/support.hpp"

namespace weft::kernels {
namespace {

using testing::for_each_backend;

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

/// True if the transpose of rows of ascending keys equals that of a loop over the rows.
bool transposes(const Execution& execution, const std::vector<std::vector<std::uint32_t>>& rows, std::int64_t n_layers,
                std::int64_t n_features) {
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
  const device::Buffer<std::byte> workspace(transpose_workspace(execution.backend, n_keys, n_entries));
  transpose(execution,
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

/// Lists on the device, with garbage beyond the entries in use.
struct Lists {
  device::Buffer<std::int64_t> row_offsets;
  device::Buffer<std::uint32_t> key;
  device::Buffer<float> value;
};

/// A value that identifies token and key.
float value_of(std::int64_t token, std::uint32_t key) {
  return static_cast<float>(token) + 0.5f * static_cast<float>(key) + 1.0f;
}

Lists lists_of(const std::vector<std::vector<std::uint32_t>>& rows, std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> row_offsets{0};
  std::vector<std::uint32_t> key;
  std::vector<float> value;
  for (std::int64_t n = begin; n < end; ++n) {
    for (const std::uint32_t k : rows[static_cast<std::size_t>(n)]) {
      key.push_back(k);
      value.push_back(value_of(n, k));
    }
    row_offsets.push_back(static_cast<std::int64_t>(key.size()));
  }
  key.insert(key.end(), 11, 0xfffffffeu);
  value.insert(value.end(), 11, -1.0f);
  return {to_device(row_offsets), to_device(key), to_device(value)};
}

/// Whether the lists of tokens cut at `cuts`, restricted to features [first, first + kept) and values above the bounds
/// of their keys, if given, are what a walk over all tokens gives.
bool restricts(const Execution& execution, const std::vector<std::vector<std::uint32_t>>& rows,
               const std::vector<std::int64_t>& cuts, std::int64_t n_layers, std::int64_t n_features,
               std::int64_t first, std::int64_t kept, const std::vector<float>& bounds = {}) {
  std::vector<Lists> memory;
  std::vector<SparseActivations> groups;
  for (std::size_t g = 0; g + 1 < cuts.size(); ++g) {
    memory.push_back(lists_of(rows, cuts[g], cuts[g + 1]));
    const Lists& lists = memory.back();
    groups.push_back({cuts[g + 1] - cuts[g], n_layers, n_features, lists.row_offsets.array(), lists.key.array(),
                      lists.value.array()});
  }
  std::vector<std::int64_t> offsets{0};
  std::vector<std::uint32_t> key;
  std::vector<float> value;
  for (std::size_t n = 0; n < rows.size(); ++n) {
    for (const std::uint32_t k : rows[n]) {
      const std::int64_t layer = k / n_features, feature = k % n_features;
      if (feature < first || feature >= first + kept) continue;
      if (!bounds.empty() && !(value_of(static_cast<std::int64_t>(n), k) > bounds[k])) continue;
      key.push_back(static_cast<std::uint32_t>(layer * kept + feature - first));
      value.push_back(value_of(static_cast<std::int64_t>(n), k));
    }
    offsets.push_back(static_cast<std::int64_t>(key.size()));
  }
  const std::int64_t n_tokens = static_cast<std::int64_t>(rows.size()), n_kept = static_cast<std::int64_t>(key.size());
  // Exactly as long as what is kept: writes beyond it would be errors.
  const device::Buffer<std::int64_t> got_offsets(n_tokens + 1);
  const device::Buffer<std::uint32_t> got_key(n_kept);
  const device::Buffer<float> got_value(n_kept);
  const device::Buffer<float> bound = to_device(bounds);
  restrict_features(execution, groups, first,
                    {n_tokens, n_layers, kept, got_offsets.array(), got_key.array(), got_value.array()},
                    bounds.empty() ? Array<const float>{} : Array<const float>{bound.data(), std::ssize(bounds)});
  return to_host(got_offsets) == offsets && to_host(got_key) == key && to_host(got_value) == value;
}

}  // namespace

TEST_CASE("restricting lists to a range of features joins the groups and keeps the order") {
  for_each_backend([&](const kernels::Execution& execution) {
    const auto rows = random_rows(301, 3 * 97, 0.08f);
    CHECK(restricts(execution, rows, {0, 301}, 3, 97, 0, 97));  // everything
    CHECK(restricts(execution, rows, {0, 100, 200, 301}, 3, 97, 0,
                    33));  // the first, a middle and the last slice of three ranks
    CHECK(restricts(execution, rows, {0, 100, 200, 301}, 3, 97, 32, 33));
    CHECK(restricts(execution, rows, {0, 100, 200, 301}, 3, 97, 65, 32));
    CHECK(restricts(execution, rows, {0, 0, 300, 300, 301}, 3, 97, 96, 1));  // groups without tokens, a single feature
    CHECK(restricts(execution, rows, {0, 150, 301}, 3, 97, 40, 0));          // a rank that owns nothing
    CHECK(restricts(execution, random_rows(1, 4001, 0.7f), {0, 1}, 1, 4001, 1000, 2001));
    CHECK(restricts(execution, random_rows(2500, 40, 0.5f), {0, 1250, 2500}, 4, 10, 3, 4));
    CHECK(restricts(execution, {{}, {3}, {}, {}, {0, 3, 7}, {}}, {0, 3, 6}, 2, 4, 3, 1));
    CHECK(restricts(execution, {{}, {}}, {0, 1, 2}, 2, 4, 0, 2));
  });
}

TEST_CASE("restricting lists to values above a bound of their key keeps those alone, and none that equals it") {
  for_each_backend([&](const kernels::Execution& execution) {
    const auto rows = random_rows(301, 3 * 97, 0.08f);
    std::vector<float> bounds;
    for (std::uint32_t k = 0; k < 3 * 97; ++k)
      bounds.push_back(k % 5 == 0   ? -1.0f
                       : k % 7 == 0 ? std::numeric_limits<float>::infinity()
                                    : value_of(40 * (k % 6), k));
    CHECK(restricts(execution, rows, {0, 301}, 3, 97, 0, 97, bounds));
    CHECK(restricts(execution, rows, {0, 100, 200, 301}, 3, 97, 32, 33, bounds));
    CHECK(restricts(execution, random_rows(1, 4001, 0.7f), {0, 1}, 1, 4001, 0, 4001, std::vector<float>(4001, 900.0f)));
    CHECK(restricts(execution, rows, {0, 301}, 3, 97, 0, 97, std::vector<float>(3 * 97, 1e9f)));  // nothing is kept
  });
}

TEST_CASE("transpose gives each feature's tokens in ascending order for every shape") {
  for_each_backend([&](const kernels::Execution& execution) {
    CHECK(transposes(execution, random_rows(301, 3 * 97, 0.02f), 3, 97));
    CHECK(transposes(execution, random_rows(57, 1000, 0.6f), 1, 1000));
    CHECK(transposes(execution, random_rows(1, 4001, 0.7f), 1, 4001));  // one token with thousands of features
    CHECK(transposes(execution, random_rows(4097, 5, 0.9f), 5,
                     1));  // features with thousands of tokens: the second sorting algorithm
    CHECK(transposes(execution, {{}, {3}, {}, {}, {0, 3, 7}, {}}, 2, 4));  // empty rows, empty columns
    CHECK(transposes(execution, {{}, {}}, 2, 4));
    CHECK(transposes(execution, {{0}}, 1, 1));
    auto rows = random_rows(501, 600, 0.003f);
    rows[250].clear();
    for (std::uint32_t k = 0; k < 600; ++k) rows[250].push_back(k);
    CHECK(transposes(execution, rows, 6, 100));
    // More tokens than the bit map of the CUDA kernels has at a time: 262,144. Features in nearly all of them, in few.
    // The portable kernels sort a list with one thread.
    std::vector<std::vector<std::uint32_t>> many(execution.backend == Backend::cuda ? 2 * 262144 + 77 : 7777);
    for (std::size_t n = 0; n < many.size(); ++n) {
      if (n % 5 != 0) many[n].push_back(0);
      if (n % 1000 == 999) many[n].push_back(1);
    }
    CHECK(transposes(execution, many, 1, 3));
  });
}

TEST_CASE("transpose overwrites its output and repeats bit for bit") {
  for_each_backend([&](const kernels::Execution& execution) {
    // The threads meet in another order each time; the result must not.
    const auto rows = random_rows(2000, 40, 0.5f);
    for (int repeat = 0; repeat < 10; ++repeat) REQUIRE(transposes(execution, rows, 4, 10));
  });
}

}  // namespace weft::kernels
