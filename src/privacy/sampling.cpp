// SPDX-License-Identifier: Apache-2.0
#include "privacy/sampling.hpp"

#include <cmath>
#include <limits>

namespace weft::privacy {
namespace {

/// The stream of the draws: parameters are numbered from 0.
constexpr std::uint64_t kSamplingStream = std::numeric_limits<std::uint32_t>::max();

}  // namespace

std::vector<std::int64_t> poisson_sample(const kernels::NoiseKey& key, std::uint64_t step, std::int64_t records,
                                         double rate) {
  // The number of records between two that join is geometric: floor(log(u) / log(1 - rate)), 0 for a rate of 1.
  const kernels::NoiseStream stream = kernels::noise_stream(key, step, kSamplingStream);
  const double log_absent = std::log1p(-rate);
  std::vector<std::int64_t> members;
  std::int64_t next = 0;
  for (std::uint64_t draw = 0;; ++draw) {
    const kernels::Random4 random = kernels::philox(stream.key, kernels::Purpose{}, stream.counter, draw);
    const double skipped = std::floor(std::log(kernels::uniform_double(random.word[0], random.word[1])) / log_absent);
    if (!(skipped < static_cast<double>(records - next))) return members;
    next += static_cast<std::int64_t>(skipped);
    members.push_back(next++);
  }
}

}  // namespace weft::privacy
