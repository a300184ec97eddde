// SPDX-License-Identifier: Apache-2.0
#include "privacy/sampling.hpp"

#include <array>
#include <cmath>

#include "storage/keystream.hpp"

namespace weft::privacy {

std::vector<std::int64_t> poisson_sample(const kernels::NoiseKey& key, std::uint64_t step, std::int64_t records,
                                         double rate) {
  // The number of records between two that join is geometric: floor(log(u) / log(1 - rate)), 0 for a rate of 1.
  const kernels::ChachaInput input = kernels::noise_stream(key, step, 0, kernels::NoisePurpose::sampling).block(0);
  storage::Keystream stream(key, std::to_array(input.word));
  std::array<std::uint32_t, 1024> words;  // two for each number
  const double log_absent = std::log1p(-rate);
  std::vector<std::int64_t> members;
  std::int64_t next = 0;
  for (std::size_t draw = 0;; ++draw) {
    const std::size_t at = 2 * draw % words.size();
    if (at == 0) stream.fill(words);
    const double skipped = std::floor(std::log(kernels::uniform_double(words[at], words[at + 1])) / log_absent);
    if (!(skipped < static_cast<double>(records - next))) return members;
    next += static_cast<std::int64_t>(skipped);
    members.push_back(next++);
  }
}

void truncate_sample(const kernels::NoiseKey& key, std::uint64_t step, std::int64_t most,
                     std::vector<std::int64_t>& records) {
  if (std::ssize(records) <= most) return;
  // Selection sampling (Knuth, algorithm S): a record is kept with probability wanted / left.
  const kernels::ChachaInput input = kernels::noise_stream(key, step, 1, kernels::NoisePurpose::sampling).block(0);
  storage::Keystream stream(key, std::to_array(input.word));
  std::vector<std::uint32_t> words(2 * records.size());
  stream.fill(words);
  std::int64_t kept = 0;
  for (std::size_t i = 0; kept < most; ++i) {
    const auto left = static_cast<double>(records.size() - i), wanted = static_cast<double>(most - kept);
    if (kernels::uniform_double(words[2 * i], words[2 * i + 1]) * left <= wanted)
      records[static_cast<std::size_t>(kept++)] = records[i];
  }
  records.resize(static_cast<std::size_t>(most));
}

}  // namespace weft::privacy
