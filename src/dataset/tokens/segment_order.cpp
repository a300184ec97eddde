// SPDX-License-Identifier: Apache-2.0
#include "dataset/tokens/segment_order.hpp"

#include "base/contract.hpp"
#include "kernels/random.hpp"

namespace weft::dataset {
namespace {

/// Four rounds give pseudo-random permutations of large domains (Luby and Rackoff, 1988); small ones need more.
constexpr std::uint64_t kRounds = 8;

}  // namespace

std::int64_t shuffled_segment(std::int64_t i, std::int64_t n, std::uint64_t seed, std::int64_t epoch) {
  WEFT_ASSERT(0 <= i && i < n);
  int half = 1;  // bits
  while (std::int64_t{1} << 2 * half < n) ++half;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  auto number = static_cast<std::uint64_t>(i);
  do {
    std::uint64_t left = number >> half, right = number & mask;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
      const kernels::Random4 random = kernels::philox(seed, kernels::Purpose::segment_order,
                                                      static_cast<std::uint64_t>(epoch), round << 32 | right);
      const std::uint64_t mixed = left ^ (random.word[0] & mask);
      left = right;
      right = mixed;
    }
    number = left << half | right;
  } while (number >= static_cast<std::uint64_t>(n));
  return static_cast<std::int64_t>(number);
}

}  // namespace weft::dataset
