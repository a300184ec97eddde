// SPDX-License-Identifier: Apache-2.0
#include "bench/language_model/resident_tokens.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "kernels/random.hpp"

namespace weft::bench {

ResidentTokens::ResidentTokens(std::int64_t batches, std::int64_t sequences, std::int64_t length,
                               std::int64_t vocabulary, double zipf, std::uint64_t seed)
    : length_(length) {
  std::vector<double> below;  // sum of the frequencies up to and including an id
  double sum = 0;
  for (std::int64_t id = 0; id < vocabulary; ++id)
    below.push_back(sum += std::pow(1.0 + static_cast<double>(id), -zipf));
  const auto drawn = [&](double part) {
    const auto id = std::upper_bound(below.begin(), below.end(), part * sum) - below.begin();
    return static_cast<std::uint32_t>(std::min<std::int64_t>(id, vocabulary - 1));
  };
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    std::vector<std::uint32_t>& ids = ids_.emplace_back(static_cast<std::size_t>(sequences * (length + 1)));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const kernels::Random4 random =
          kernels::philox(seed, kernels::Purpose::benchmark, static_cast<std::uint64_t>(batch), i);
      const bool follows = i > 0 && (random.word[2] & 1) != 0;
      ids[i] =
          follows
              ? static_cast<std::uint32_t>((5 * std::uint64_t{ids[i - 1]} + 1) % static_cast<std::uint64_t>(vocabulary))
              : drawn(kernels::uniform_double(random.word[0], random.word[1]));
    }
  }
}

ResidentTokens::ResidentTokens(std::int64_t batches, std::int64_t sequences, std::int64_t length,
                               const dataset::TokenSet& set)
    : length_(length) {
  const std::int64_t windows = set.size() / (length + 1);
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    std::vector<std::uint32_t>& ids = ids_.emplace_back(static_cast<std::size_t>(sequences * (length + 1)));
    for (std::int64_t sequence = 0; sequence < sequences; ++sequence)
      set.read((batch * sequences + sequence) % windows * (length + 1),
               std::span(ids).subspan(static_cast<std::size_t>(sequence * (length + 1)),
                                      static_cast<std::size_t>(length + 1)));
  }
}

void ResidentTokens::fill(dataset::TokenBatch& batch, std::int64_t first) {
  const std::vector<std::uint32_t>& ids = ids_[next_];
  next_ = (next_ + 1) % ids_.size();
  const auto length = static_cast<std::size_t>(length_);
  for (std::size_t sequence = 0; sequence < static_cast<std::size_t>(batch.sequences); ++sequence) {
    const std::uint32_t* const window = ids.data() + (static_cast<std::size_t>(first) + sequence) * (length + 1);
    const std::size_t row = sequence * length;
    std::copy_n(window, length, batch.ids.begin() + static_cast<std::ptrdiff_t>(row));
    std::transform(window + 1, window + 1 + length, batch.targets.begin() + static_cast<std::ptrdiff_t>(row),
                   [](std::uint32_t id) { return static_cast<std::int32_t>(id); });
    std::iota(batch.positions.begin() + static_cast<std::ptrdiff_t>(row),
              batch.positions.begin() + static_cast<std::ptrdiff_t>(row + length), 0);
  }
  // One document per sequence.
  std::fill(batch.first_key.begin(), batch.first_key.end(), 0);
  batch.counted = batch.rows();
}

}  // namespace weft::bench
