// SPDX-License-Identifier: Apache-2.0
#include "dataset/tokens/batches.hpp"

#include <algorithm>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/random.hpp"

namespace weft::dataset {
namespace {

/// Fills sequence `s` of the batch with `predictions` ids from `begin` on and the id after each of them; the rest of
/// the sequence is padding. Temporary memory is passed by the caller.
void fill_window(const TokenSet& set, std::int64_t begin, std::int64_t predictions, std::int64_t s, TokenBatch& batch,
                 std::vector<std::uint32_t>& window, std::vector<std::int64_t>& starts) {
  const std::int64_t length = batch.length;
  const auto row = [&](auto span) {
    return span.subspan(static_cast<std::size_t>(s * length), static_cast<std::size_t>(length));
  };
  const auto ids = row(batch.ids);
  const auto targets = row(batch.targets), positions = row(batch.positions);
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };

  if (predictions > 0) {
    window.resize(at(predictions + 1));
    set.read(begin, window);
  }
  for (std::int64_t t = 0; t < length; ++t) {
    const bool given = t < predictions;
    ids[at(t)] = given ? window[at(t)] : 0;
    targets[at(t)] = given ? static_cast<std::int32_t>(window[at(t + 1)]) : kernels::kIgnored;
    positions[at(t)] = static_cast<std::int32_t>(t);
  }
  batch.counted += predictions;
  if (batch.first_key.empty()) return;

  const auto first_key = row(batch.first_key);
  std::fill(first_key.begin(), first_key.end(), 0);
  if (predictions == 0) return;
  set.document_starts(begin, begin + predictions + 1, starts);
  for (std::size_t d = 0; d < starts.size(); ++d) {
    const std::int64_t start = starts[d], end = d + 1 < starts.size() ? starts[d + 1] : length;
    targets[at(start - 1)] = kernels::kIgnored;  // the last id of a document does not predict the next document
    --batch.counted;
    for (std::int64_t t = start; t < std::min(end, length); ++t) {
      positions[at(t)] = static_cast<std::int32_t>(t - start);
      first_key[at(t)] = static_cast<std::int32_t>(start);
    }
  }
}

}  // namespace

TokenRows::TokenRows(std::int64_t sequences, std::int64_t length, bool document_mask) {
  const auto rows = static_cast<std::size_t>(sequences * length);
  ids_.resize(rows);
  targets_.resize(rows);
  positions_.resize(rows);
  first_key_.resize(document_mask ? rows : 0);
  batch_ = {sequences, length, ids_, targets_, positions_, first_key_, 0};
}

TokenBatches::TokenBatches(const TokenSet& set, const TokenSettings& settings, std::uint64_t seed)
    : set_(set), settings_(settings), seed_(seed) {
  WEFT_ASSERT(set.size() > settings.sequence);
}

void TokenBatches::fill(std::int64_t cursor, std::int64_t first, TokenBatch& batch) const {
  const std::int64_t length = batch.length;
  std::vector<std::uint32_t> window;
  std::vector<std::int64_t> starts;
  batch.counted = 0;
  for (std::int64_t s = 0; s < batch.sequences; ++s) {
    const std::int64_t token = cursor + (first + s) * length;  // number of the sequence's first token in the run
    std::int64_t begin = 0, predictions = length;
    if (settings_.order == TokenOrder::random_windows) {
      const auto random = kernels::philox(seed_, kernels::Purpose::token_window, 0, static_cast<std::uint64_t>(token));
      begin =
          static_cast<std::int64_t>(kernels::uniform_below(random, static_cast<std::uint64_t>(set_.size() - length)));
    } else {
      begin = token / length % evaluation_windows(set_, length) * length;
      predictions = std::min(length, set_.size() - 1 - begin);
    }
    fill_window(set_, begin, predictions, s, batch, window, starts);
  }
}

std::int64_t evaluation_windows(const TokenSet& set, std::int64_t length) {
  return (set.size() - 1 + length - 1) / length;
}

void fill_windows(const TokenSet& set, std::int64_t first, TokenBatch& batch) {
  std::vector<std::uint32_t> window;
  std::vector<std::int64_t> starts;
  batch.counted = 0;
  for (std::int64_t s = 0; s < batch.sequences; ++s) {
    const std::int64_t begin = (first + s) * batch.length;
    const std::int64_t predictions = std::clamp<std::int64_t>(set.size() - 1 - begin, 0, batch.length);
    fill_window(set, begin, predictions, s, batch, window, starts);
  }
}

}  // namespace weft::dataset
