// SPDX-License-Identifier: Apache-2.0
//
// Poisson sampling: each record joins with the given probability, independently, the same for every caller.
#include "privacy/sampling.hpp"

#include <array>
#include <cmath>
#include <vector>

#include "storage/keystream.hpp"
#include "tests/test.hpp"

namespace weft::privacy {
namespace {

constexpr kernels::NoiseKey kKey = {1, 2, 3, 4, 5, 6, 7, 8}, kOther = {1, 2, 3, 4, 5, 6, 7, 9};

}  // namespace

TEST_CASE("records join with the given probability, each as often as any other, pairs independently") {
  constexpr std::int64_t kRecords = 40, kSteps = 20000;
  constexpr double kRate = 0.2;
  std::vector<double> joined(kRecords, 0.0);
  double together = 0, squares = 0;
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    const std::vector<std::int64_t> members = poisson_sample(kKey, static_cast<std::uint64_t>(step), kRecords, kRate);
    bool zero = false, one = false;
    std::int64_t last = -1;
    for (const std::int64_t member : members) {
      REQUIRE(member > last);
      REQUIRE(member < kRecords);
      last = member;
      ++joined[static_cast<std::size_t>(member)];
      zero = zero || member == 0;
      one = one || member == 1;
    }
    together += zero && one;
    const double excess = static_cast<double>(std::ssize(members)) - kRate * kRecords;
    squares += excess * excess;
  }
  // Five standard errors.
  const double deviation = std::sqrt(kSteps * kRate * (1 - kRate));
  for (const double count : joined) CHECK(std::abs(count - kSteps * kRate) < 5 * deviation);
  CHECK(std::abs(together - kSteps * kRate * kRate) < 5 * std::sqrt(kSteps * kRate * kRate));
  // The size of a batch has the variance of a binomial distribution.
  CHECK(squares / kSteps == doctest::Approx(kRecords * kRate * (1 - kRate)).epsilon(0.05));
}

TEST_CASE("of more than the most records, every subset of so many is as likely as any other") {
  constexpr std::int64_t kSteps = 20000;
  std::array<double, 32> found = {};
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    std::vector<std::int64_t> members = {0, 1, 2, 3, 4}, again = members;
    truncate_sample(kKey, static_cast<std::uint64_t>(step), 3, members);
    truncate_sample(kKey, static_cast<std::uint64_t>(step), 3, again);
    REQUIRE(members == again);
    REQUIRE((std::ssize(members) == 3 && members[0] < members[1] && members[1] < members[2]));
    ++found[(1u << members[0]) | (1u << members[1]) | (1u << members[2])];
  }
  int subsets = 0;
  for (const double count : found) {
    if (count == 0) continue;
    ++subsets;
    CHECK(std::abs(count - kSteps / 10) < 5 * std::sqrt(kSteps * 0.09));
  }
  CHECK(subsets == 10);
  std::vector<std::int64_t> few = {3, 8};
  truncate_sample(kKey, 1, 2, few);
  CHECK(few == std::vector<std::int64_t>{3, 8});
}

TEST_CASE("a draw depends on the key and the step alone") {
  const std::vector<std::int64_t> first = poisson_sample(kKey, 3, 1000, 0.1);
  CHECK(first == poisson_sample(kKey, 3, 1000, 0.1));
  CHECK(first != poisson_sample(kKey, 4, 1000, 0.1));
  CHECK(first != poisson_sample(kOther, 3, 1000, 0.1));
}

TEST_CASE("libcrypto and the code of the kernels have the same key stream") {
  const kernels::NoiseStream stream = kernels::noise_stream(kKey, 77, 5, kernels::NoisePurpose::sampling);
  storage::Keystream libcrypto(kKey, std::to_array(stream.block(0).word));
  std::array<std::uint32_t, 48> words;
  for (std::uint64_t block = 0; block < 6; block += words.size() / 16) {  // a second call continues the first
    libcrypto.fill(words);
    for (std::size_t i = 0; i < words.size(); ++i)
      REQUIRE(words[i] == kernels::chacha20(stream.key, stream.block(block + i / 16)).word[i % 16]);
  }
}

TEST_CASE("all records join at a rate of 1; a batch may be empty") {
  CHECK(poisson_sample(kKey, 1, 5, 1) == std::vector<std::int64_t>{0, 1, 2, 3, 4});
  CHECK(poisson_sample(kKey, 1, 0, 0.5).empty());
  bool empty = false;
  for (std::uint64_t step = 1; step <= 50; ++step) empty = empty || poisson_sample(kKey, step, 10, 0.05).empty();
  CHECK(empty);  // each with probability 0.6
}

}  // namespace weft::privacy
