// SPDX-License-Identifier: Apache-2.0
//
// The selection by the portable kernels: tile by tile, with the host between the passes, which agrees with the other
// ranks' by MPI. The rule and what ranks tell each other are as in kernels/select/select_cuda.hpp.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "kernels/runtime.hpp"
#include "transcoder/selection/selection.hpp"

namespace weft::transcoder {
namespace {

using kernels::Array;
using kernels::kHistogramBins;
using kernels::kHistogramRounds;

/// The threshold for the next batch: where about target * K entries of all ranks pass, on the assumption that counts
/// fall exponentially with the value there. Judged from how many passed this batch's guess; overflow: too many for some
/// rank.
std::uint32_t next_threshold(std::uint32_t kth_key, std::uint32_t guess, bool overflow, std::int64_t passed,
                             std::int64_t wanted) {
  if (kth_key == 0) return 0;
  const double kth = kernels::bits_float(std::min(kth_key, kernels::kLargestKey - 1));
  double below = kth / 16;
  if (guess > 0 && guess < kth_key) {
    const double width = kth - kernels::bits_float(guess);
    const double k = static_cast<double>(wanted);
    const double target = 1.5 + 4 / std::sqrt(k);  // the second term: small batches fluctuate
    const double growth = std::log(static_cast<double>(std::max(passed, wanted)) / k);
    below = overflow ? width / 4 : width * std::log(target) / std::max(growth, 0.05);
  }
  below = std::clamp(below, kth / 4096, kth / 4);
  return std::min(kernels::selection_key(static_cast<float>(kth - below)), kth_key - 1);
}

}  // namespace

/// The search for the K-th largest key of a group: bin by bin through the rounds.
struct Selection::Search {
  std::int64_t wanted = 0;
  bool exhausted = false;    ///< fewer than `wanted`: all of them count
  int rounds = 0;            ///< done so far
  std::uint32_t prefix = 0;  ///< upper bits of the K-th key
  std::int64_t greater = 0;  ///< keys with larger upper bits
  std::int64_t inside = 0;   ///< keys with these upper bits; after the last round: ties

  /// Takes the histogram of keys that share the prefix.
  void advance(const std::int64_t* histogram) {
    if (exhausted) return;
    int bin = (1 << kernels::histogram_width(rounds)) - 1;
    std::int64_t above = greater;
    while (bin >= 0 && above + histogram[bin] < wanted) above += histogram[bin--];
    greater = above;
    exhausted = bin < 0;  // only in the first round
    inside = exhausted ? 0 : histogram[bin];
    if (!exhausted) prefix = prefix << kernels::histogram_width(rounds) | static_cast<std::uint32_t>(bin);
    ++rounds;
  }
  /// The least key with the prefix; after the last round the K-th key. 0: everything counts.
  std::uint32_t key() const { return exhausted ? 0 : prefix << kernels::histogram_shift(rounds - 1); }
};

kernels::CandidateLists Selection::candidates(const Batch& batch) const {
  return {batch.n_tokens,        shape_.n_layers,         batch.n_blocks,       batch.features.size(),
          arrays_.candidate_key, arrays_.candidate_value, arrays_.segment_begin};
}

/// Makes the products of every tile, in the order (layer, feature block, tokens), and shows each to visit(tile, block),
/// until that says false. Returns whether all were visited.
template <class Visit>
bool Selection::for_each_tile(const Batch& batch, Visit&& visit) {
  ++statistics_.passes;
  for (std::int64_t layer = 0; layer < shape_.n_layers; ++layer)
    for (std::int64_t block = 0; block < batch.n_blocks; ++block)
      for (std::int64_t token = 0; token < batch.n_tokens; token += sizes_.tile_tokens) {
        const std::int64_t feature = block * sizes_.tile_features;
        const TileRequest request{layer, token, std::min(sizes_.tile_tokens, batch.n_tokens - token), feature,
                                  std::min(sizes_.tile_features, batch.features.size() - feature)};
        kernels::AnyMatrix product = arrays_.tile;
        product.rows = request.token_count;
        product.columns = product.stride = request.feature_count;
        (*batch.produce)(execution_, request, product);
        const Array<const float> bias{batch.bias[static_cast<std::size_t>(layer)].data + feature,
                                      request.feature_count};
        if (!visit(kernels::Tile{product, bias, layer, token, feature}, block)) return false;
      }
  return true;
}

std::int64_t Selection::reduced_bytes(std::int64_t n_words) const {
  return parallel::bytes_of_reduction(n_words * 8, grid_.world().size());
}

// ---- over the batch

void Selection::select_over_batch(const Batch& batch) {
  std::vector<std::uint32_t> guess = controller_;
  for (std::uint32_t& key : guess) key = std::min(key, kernels::kLargestKey);
  // What the ranks guessed travels while they encode.
  auto pending = grid_.world().start_maximum({guess.begin(), guess.end()});
  bool complete = collect(batch, guess), overflow = false;
  const std::vector<std::int64_t> agreed = [&] {
    const parallel::TimedExchange timed(exchanges_, kName, reduced_bytes(sizes_.n_groups));
    return pending.wait();
  }();
  std::vector<std::int64_t> highest = agreed;

  std::vector<Search> found = search_candidates(batch, complete, overflow);
  // Whoever guessed has not seen keys up to the guess. They count if the K-th key is not above: all begin again
  // without.
  const auto too_high = [&] {
    for (std::size_t g = 0; g < found.size(); ++g)
      if (highest[g] >= std::max<std::int64_t>(1, found[g].key())) return true;
    return false;
  };
  if (too_high()) {
    ++statistics_.redos;
    std::fill(guess.begin(), guess.end(), 0);
    std::fill(highest.begin(), highest.end(), 0);
    complete = collect(batch, guess);
    found = search_candidates(batch, complete, overflow);
    WEFT_ASSERT(!too_high());
  }
  const bool ties_are_cut = admit_ties(batch, found);
  take_candidates(batch, found, ties_are_cut);

  for (std::size_t g = 0; g < found.size(); ++g) {
    controller_[g] =
        next_threshold(found[g].key(), static_cast<std::uint32_t>(agreed[g]), overflow, passed_[g], batch.budget);
    statistics_.threshold.push_back(kernels::bits_float(found[g].key()));
  }
}

/// Fills the candidate lists so that nothing is missing which belongs to the result, unless a guess was too high.
/// Returns whether the guess was used.
bool Selection::collect(const Batch& batch, std::span<const std::uint32_t> guess) {
  if (filter_tiles(batch, guess, false)) return true;
  const std::vector<Search> found = search_own_tiles(batch);
  std::vector<std::uint32_t> threshold;
  std::int64_t passing = 0;
  for (const Search& search : found) {
    threshold.push_back(search.key() == 0 ? 0 : search.key() - 1);
    passing += search.greater + search.inside;
  }
  const bool ordered = passing > sizes_.candidates;
  if (ordered) {
    // Ties alone are too many: of each group the first that could be wanted enter, in (token, layer, feature) order.
    device::zero(execution_, arrays_.ties.data, batch.n_tokens * shape_.n_layers * 4);
    const kernels::Matrix<std::int32_t> ties{arrays_.ties.data, batch.n_tokens, shape_.n_layers, shape_.n_layers};
    for_each_tile(batch, [&](const kernels::Tile& tile, std::int64_t) {
      const std::uint32_t key = found[static_cast<std::size_t>(group_of(tile.layer))].key();
      if (key > 0) kernels::count_ties_tile(execution_, tile, key, ties);
      return true;
    });
    for (std::size_t g = 0; g < found.size(); ++g) threshold[g] = found[g].key();
    device::copy(execution_, arrays_.host.admit.data, ties.data, batch.n_tokens * shape_.n_layers * 4,
                 device::Direction::to_host);
    kernels::fence(execution_);
    std::vector<std::int64_t> room;
    for (const Search& search : found) room.push_back(search.wanted - search.greater);
    for (std::int64_t i = 0; i < batch.n_tokens * shape_.n_layers; ++i) {
      std::int64_t& left = room[static_cast<std::size_t>(group_of(i % shape_.n_layers))];
      std::int32_t& count = arrays_.host.admit[i];
      count = static_cast<std::int32_t>(std::min<std::int64_t>(count, left));
      left -= count;
    }
    device::copy(execution_, arrays_.admit.data, arrays_.host.admit.data, batch.n_tokens * shape_.n_layers * 4,
                 device::Direction::to_device);
  }
  if (!filter_tiles(batch, threshold, ordered))
    throw error(ExitCode::internal,
                "more pre-activations passed than were counted before (the encoder's products differ between two "
                "passes over the "
                "same tiles); the dense library must give the same bits for the same shapes");
  return false;
}

/// One pass over the tiles. False when more passed than there is room for.
bool Selection::filter_tiles(const Batch& batch, std::span<const std::uint32_t> threshold, bool ordered) {
  const kernels::CandidateLists lists = candidates(batch);
  device::zero(execution_, arrays_.segment_begin.data, sizeof(std::int64_t));
  kernels::Filter filter;
  if (ordered) {
    filter.admit = {arrays_.admit.data, batch.n_tokens, shape_.n_layers, shape_.n_layers};
    filter.admitted = {arrays_.admitted.data, batch.n_tokens, shape_.n_layers, shape_.n_layers};
    device::zero(execution_, arrays_.admitted.data, batch.n_tokens * shape_.n_layers * 4);
  }
  return for_each_tile(batch, [&](const kernels::Tile& tile, std::int64_t block) {
    filter.threshold = threshold[static_cast<std::size_t>(group_of(tile.layer))];
    kernels::filter_tile(execution_, tile, block, filter, lists);
    const std::int64_t next_segment = lists.segment(tile.layer, block, tile.token_begin + tile.product.rows);
    device::copy(execution_, arrays_.host.count.data, lists.segment_begin.data + next_segment, sizeof(std::int64_t),
                 device::Direction::to_host);
    kernels::fence(execution_);
    return arrays_.host.count[0] <= sizes_.candidates;
  });
}

/// A key of each group that at least `budget` of this rank's entries reach (or all its candidates), refined until what
/// reaches it fits the lists or the key is exact.
std::vector<Selection::Search> Selection::search_own_tiles(const Batch& batch) {
  std::vector<Search> searches(static_cast<std::size_t>(sizes_.n_groups));
  for (Search& search : searches) search.wanted = batch.budget;
  std::int64_t* host = arrays_.host.histogram.data;
  for (int round = 0; round < kHistogramRounds; ++round) {
    device::zero(execution_, arrays_.histogram.data, sizes_.n_groups * kHistogramBins * 8);
    for_each_tile(batch, [&](const kernels::Tile& tile, std::int64_t) {
      const std::int64_t group = group_of(tile.layer);
      kernels::histogram_tile(execution_, tile, {round, searches[static_cast<std::size_t>(group)].prefix},
                              {arrays_.histogram.data + group * kHistogramBins, kHistogramBins});
      return true;
    });
    device::copy(execution_, host, arrays_.histogram.data, sizes_.n_groups * kHistogramBins * 8,
                 device::Direction::to_host);
    kernels::fence(execution_);
    std::int64_t passing = 0;
    for (std::size_t g = 0; g < searches.size(); ++g) {
      searches[g].advance(host + static_cast<std::int64_t>(g) * kHistogramBins);
      passing += searches[g].greater + searches[g].inside;
    }
    if (passing <= sizes_.candidates) break;
  }
  return searches;
}

/// The exact K-th key of each group among the candidates of all ranks. Sets overflow when some rank's list was not
/// complete. Collective.
std::vector<Selection::Search> Selection::search_candidates(const Batch& batch, bool complete, bool& overflow) {
  const kernels::CandidateLists lists = candidates(batch);
  std::vector<Search> searches(static_cast<std::size_t>(sizes_.n_groups));
  for (Search& search : searches) search.wanted = batch.budget;
  const Array<std::int64_t> host = arrays_.host.histogram;
  for (int round = 0; round < kHistogramRounds; ++round) {
    device::zero(execution_, arrays_.histogram.data, sizes_.n_groups * kHistogramBins * 8);
    for (std::int64_t g = 0; g < sizes_.n_groups; ++g)
      kernels::histogram_candidates(execution_, lists, g, sizes_.n_groups == 1 ? shape_.n_layers : g + 1,
                                    {round, searches[static_cast<std::size_t>(g)].prefix},
                                    {arrays_.histogram.data + g * kHistogramBins, kHistogramBins});
    device::copy(execution_, host.data, arrays_.histogram.data, sizes_.n_groups * kHistogramBins * 8,
                 device::Direction::to_host);
    kernels::fence(execution_);
    host[host.size - 1] = complete ? 0 : 1;
    in_pieces(host.size, [&](std::int64_t begin, std::int64_t size) {
      const parallel::TimedExchange timed(exchanges_, kName, reduced_bytes(size));
      grid_.world().sum(std::span<std::int64_t>(host.data + begin, static_cast<std::size_t>(size)));
    });
    if (round == 0) {
      overflow = host[host.size - 1] > 0;
      passed_.assign(searches.size(), 0);
      for (std::size_t g = 0; g < searches.size(); ++g) {
        const std::int64_t* own = host.data + static_cast<std::int64_t>(g) * kHistogramBins;
        passed_[g] = std::accumulate(own, own + kHistogramBins, std::int64_t{0});
      }
    }
    for (std::size_t g = 0; g < searches.size(); ++g)
      searches[g].advance(host.data + static_cast<std::int64_t>(g) * kHistogramBins);
  }
  return searches;
}

/// When more than the budget reach a K-th key: how many of its ties each (token, layer) of this rank keeps, into
/// `admit`. Returns whether that was so, the same on all ranks. Collective.
bool Selection::admit_ties(const Batch& batch, std::span<const Search> found) {
  for (const Search& search : found)
    statistics_.ties_cut += search.exhausted ? 0 : search.greater + search.inside - search.wanted;
  if (statistics_.ties_cut == 0) return false;

  for (std::int64_t layer = 0; layer < shape_.n_layers; ++layer)
    arrays_.host.threshold[layer] = found[static_cast<std::size_t>(group_of(layer))].key();
  device::copy(execution_, arrays_.threshold.data, arrays_.host.threshold.data, shape_.n_layers * 4,
               device::Direction::to_device);
  const std::int64_t n = batch.n_tokens * shape_.n_layers;
  kernels::count_ties(execution_, candidates(batch), arrays_.threshold,
                      {arrays_.ties.data, batch.n_tokens, shape_.n_layers, shape_.n_layers});
  device::copy(execution_, arrays_.host.admit.data, arrays_.ties.data, n * 4, device::Direction::to_host);
  kernels::fence(execution_);
  const std::int64_t n_parts = grid_.size(parallel::kFeatureAxis), own = grid_.index(parallel::kFeatureAxis);
  {
    const parallel::TimedExchange timed(exchanges_, kName, n * 4 * (n_parts - 1));
    grid_.axis(parallel::kFeatureAxis).all_gather(arrays_.host.admit.data, arrays_.host.ties.data, n * 4);
  }

  // Ties of earlier tokens: those of the feature groups before this one.
  std::vector<std::int64_t> of_group(found.size(), 0);
  for (std::int64_t i = 0; i < n_parts * n; ++i)
    of_group[static_cast<std::size_t>(group_of(i % shape_.n_layers))] += arrays_.host.ties[i];
  std::vector<std::int64_t> of_groups(found.size() * static_cast<std::size_t>(grid_.size(parallel::kDataAxis)));
  {
    const std::int64_t bytes = static_cast<std::int64_t>(found.size() * sizeof(std::int64_t));
    const parallel::TimedExchange timed(exchanges_, kName, bytes * (grid_.size(parallel::kDataAxis) - 1));
    grid_.axis(parallel::kDataAxis).all_gather(of_group.data(), of_groups.data(), bytes);
  }

  std::vector<std::int64_t> room;
  for (std::size_t g = 0; g < found.size(); ++g) {
    room.push_back(found[g].wanted - found[g].greater);
    for (std::int64_t d = 0; d < grid_.index(parallel::kDataAxis); ++d)
      room[g] -= of_groups[static_cast<std::size_t>(d) * found.size() + g];
  }
  for (std::int64_t i = 0; i < n; ++i) {
    std::int64_t& left = room[static_cast<std::size_t>(group_of(i % shape_.n_layers))];
    for (std::int64_t part = 0; part < n_parts; ++part) {
      const std::int64_t count = arrays_.host.ties[part * n + i];
      if (part == own) arrays_.host.admit[i] = static_cast<std::int32_t>(std::clamp<std::int64_t>(left, 0, count));
      left -= count;
    }
  }
  device::copy(execution_, arrays_.admit.data, arrays_.host.admit.data, n * 4, device::Direction::to_device);
  return true;
}

/// The candidates from the K-th keys on, as the result. No keys: all.
void Selection::take_candidates(const Batch& batch, std::span<const Search> found, bool ties_are_cut) {
  for (std::int64_t layer = 0; layer < shape_.n_layers; ++layer)
    arrays_.host.threshold[layer] = found.empty() ? 0 : found[static_cast<std::size_t>(group_of(layer))].key();
  device::copy(execution_, arrays_.threshold.data, arrays_.host.threshold.data, shape_.n_layers * 4,
               device::Direction::to_device);
  kernels::Matrix<const std::int32_t> admit;
  if (ties_are_cut) admit = {arrays_.admit.data, batch.n_tokens, shape_.n_layers, shape_.n_layers};
  kernels::take_candidates(execution_, candidates(batch), arrays_.threshold, admit, activations_);
}

// ---- per token

void Selection::select_per_token(const Batch& batch) {
  const std::int64_t n_rows = batch.n_tokens * sizes_.n_groups;
  kernels::BestLists best;
  best.n_groups = sizes_.n_groups;
  best.n_features_total = shape_.n_features;
  best.feature_offset = batch.features.begin;
  best.word = {arrays_.best.data, n_rows, sizes_.best, sizes_.best};
  device::zero(execution_, arrays_.best.data, n_rows * sizes_.best * 8);
  for_each_tile(batch, [&](const kernels::Tile& tile, std::int64_t) {
    kernels::keep_best_tile(execution_, tile, best);
    return true;
  });

  Array<const std::uint64_t> cut_off;
  const std::int64_t n_parts = grid_.size(parallel::kFeatureAxis);
  if (n_parts > 1) {
    // Each rank of the feature axis judges a slice of the tokens: it has the best of every rank for them, and tells all
    // from where on an entry stays.
    std::vector<std::int64_t> rows_of_slice;
    for (std::int64_t i = 0; i < n_parts; ++i)
      rows_of_slice.push_back(parallel::part(batch.n_tokens, n_parts, i).size() * sizes_.n_groups);
    const std::int64_t own_rows = rows_of_slice[static_cast<std::size_t>(grid_.index(parallel::kFeatureAxis))];
    std::vector<std::int64_t> send, receive(static_cast<std::size_t>(n_parts), own_rows * sizes_.best * 8), returned;
    for (const std::int64_t rows : rows_of_slice) {
      send.push_back(rows * sizes_.best * 8);
      returned.push_back(rows * 8);
    }
    const auto& host = arrays_.host;
    device::copy(execution_, host.best.data, arrays_.best.data, n_rows * sizes_.best * 8, device::Direction::to_host);
    kernels::fence(execution_);
    {
      const parallel::TimedExchange timed(exchanges_, kName, (n_rows - own_rows) * sizes_.best * 8);
      grid_.axis(parallel::kFeatureAxis).all_to_all(host.best.data, send, host.best_received.data, receive);
    }
    device::copy(execution_, arrays_.best_received.data, host.best_received.data, n_parts * own_rows * sizes_.best * 8,
                 device::Direction::to_device);
    kernels::merge_best(execution_, {arrays_.best_received.data, n_parts * own_rows, sizes_.best, sizes_.best}, n_parts,
                        {arrays_.cut_off_slice.data, own_rows});
    device::copy(execution_, host.cut_off_slice.data, arrays_.cut_off_slice.data, own_rows * 8,
                 device::Direction::to_host);
    kernels::fence(execution_);
    {
      const parallel::TimedExchange timed(exchanges_, kName, own_rows * 8 * (n_parts - 1));
      grid_.axis(parallel::kFeatureAxis).all_gather_uneven(host.cut_off_slice.data, host.cut_off.data, returned);
    }
    device::copy(execution_, arrays_.cut_off.data, host.cut_off.data, n_rows * 8, device::Direction::to_device);
    cut_off = {arrays_.cut_off.data, n_rows};
  }
  kernels::take_best(execution_, best, cut_off, activations_);
}

}  // namespace weft::transcoder
