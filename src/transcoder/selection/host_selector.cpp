// SPDX-License-Identifier: Apache-2.0
#include "transcoder/selection/host_selector.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/transcoder/select/select.hpp"

namespace weft::transcoder {
namespace {

using kernels::Array;
using kernels::kHistogramBins;
using kernels::kHistogramRounds;
using Search = kernels::KeySearch<std::int64_t>;

constexpr std::int64_t kCandidateSlack = 1024;

class HostSelector final : public Selector {
 public:
  HostSelector(const SelectionSpec& spec, const SelectionBuffers& buffers, const parallel::Grid& grid,
               const kernels::Execution& execution, const SumDecorator& decorate)
      : Selector(spec, buffers, grid, execution), sum_(decorate([this](Array<std::int64_t> values) {
          const parallel::TimedExchange timed(exchanges_, kName, reduced_bytes(values.size));
          grid_.world().sum(std::span<std::int64_t>(values.data, static_cast<std::size_t>(values.size)));
        })) {
    if (spec.settings.activation == Activation::batch_topk)
      controller_.assign(static_cast<std::size_t>(sizes().n_groups), 0);
  }

  ControllerState controller_state() override {
    return {{controller_.data(), static_cast<std::int64_t>(controller_.size())}, false};
  }
  parallel::Exchanges exchanges() const override { return exchanges_; }
  void report_faults_to(std::int32_t* fault) override { fault_ = fault; }
  std::string first_fault() override { return first_fault_; }
  void take(const kernels::Execution&, const kernels::TileRange&, kernels::AnyMatrix product) override;
  void finish() override { finish_per_token(followed_); }

 private:
  void select_batch(const Batch&) override;
  void begin() override {
    clear_lists(followed_);
    cleared_ = true;
  }

  template <class Visit>
  bool for_each_tile(const Batch&, Visit&& visit);
  kernels::CandidateLists candidates(const Batch&) const;
  kernels::Matrix<std::int32_t> per_layer(const Array<std::int32_t>& counts, const Batch& batch) const {
    return {counts.data, batch.n_tokens, spec_.n_layers, spec_.n_layers};
  }
  std::int64_t n_blocks(const Batch& batch) const {
    return (batch.features.size() + sizes().tile_features - 1) / sizes().tile_features;
  }
  std::int64_t group_of(std::int64_t layer) const { return sizes().n_groups == 1 ? 0 : layer; }
  std::vector<Search> new_searches(const Batch& batch) const {
    return std::vector<Search>(static_cast<std::size_t>(sizes().n_groups), Search{.wanted = batch.budget});
  }
  std::int64_t reduced_bytes(std::int64_t n_words) const {
    return parallel::bytes_of_reduction(n_words * 8, grid_.world().size());
  }
  void copy_to_host(void* to, const void* from, std::int64_t bytes) {
    device::copy(execution_, to, from, bytes, device::Direction::to_host);
    kernels::fence(execution_);
  }
  void copy_to_device(void* to, const void* from, std::int64_t bytes) {
    device::copy(execution_, to, from, bytes, device::Direction::to_device);
  }

  void select_all(const Batch&);
  void select_over_batch(const Batch&);
  bool collect(const Batch&, std::span<const std::uint32_t> threshold);
  bool filter_tiles(const Batch&, std::span<const std::uint32_t> threshold, bool ordered);
  std::vector<Search> search_own_tiles(const Batch&);
  std::vector<Search> search_candidates(const Batch&, bool complete, bool& overflow);
  void count_ties_of_tiles(const Batch&, std::span<const Search> found);
  bool admit_ties(const Batch&, std::span<const Search> found);
  void take_candidates(const Batch&, std::span<const Search> found, bool ties_are_cut);
  void select_per_token(const Batch&);
  kernels::BestLists best_lists(const Batch&) const;
  void clear_lists(const Batch&);
  void finish_per_token(const Batch&);
  /// topk: number of entries in the list of a token (and layer); HostSelectorBuffers has lists for the largest k.
  std::int64_t columns_of_lists(const Batch& batch) const { return std::min(batch.budget, own_.budget_of_token); }
  Array<const std::uint64_t> cut_offs(const Batch&);

  const HostSelectorBuffers& own_ = buffers_.host;
  std::vector<std::uint32_t> controller_;  // thresholds of the next batch, by group
  std::vector<std::int64_t> passed_;       // entries of all ranks that passed the filter, by group
  std::int64_t overfull_layer_ = 0;        // layer of the tile that was filtered last
  std::int32_t* fault_ = nullptr;
  std::string first_fault_;
  bool cleared_ = false;  // the lists are cleared and no tile was taken since
  parallel::Exchanges exchanges_;
  SumOverRanks sum_;
};

void HostSelector::select_batch(const Batch& batch) {
  switch (spec_.settings.activation) {
    case Activation::batch_topk:
      select_over_batch(batch);
      break;
    case Activation::topk:
      select_per_token(batch);
      break;
    default:  // every feature above a bound
      select_all(batch);
      break;
  }
}

kernels::CandidateLists HostSelector::candidates(const Batch& batch) const {
  return {batch.n_tokens,     spec_.n_layers,       n_blocks(batch),   batch.features.size(),
          own_.candidate_key, own_.candidate_value, own_.segment_begin};
}

/// Computes the products of every tile in the order (layer, feature block, tokens) and calls visit(tile, block) until
/// it returns false. Returns true if all tiles were visited.
template <class Visit>
bool HostSelector::for_each_tile(const Batch& batch, Visit&& visit) {
  ++statistics_.passes;
  for (std::int64_t layer = 0; layer < spec_.n_layers; ++layer)
    for (std::int64_t block = 0; block < n_blocks(batch); ++block)
      for (std::int64_t token = 0; token < batch.n_tokens; token += sizes().tile_tokens) {
        const std::int64_t feature = block * sizes().tile_features;
        const kernels::TileRange request{layer, token, std::min(sizes().tile_tokens, batch.n_tokens - token), feature,
                                         std::min(sizes().tile_features, batch.features.size() - feature)};
        kernels::AnyMatrix product = own_.tile;
        product.rows = request.token_count;
        product.columns = product.stride = request.feature_count;
        (*batch.produce)(execution_, request, product);
        const auto of_tile = [&](std::span<const Array<const float>> of_layer) -> Array<const float> {
          if (of_layer.empty()) return {};
          return {of_layer[static_cast<std::size_t>(layer)].data + feature, request.feature_count};
        };
        if (!visit(kernels::Tile{product, of_tile(batch.bias), layer, token, feature, of_tile(batch.bounds)}, block))
          return false;
      }
  return true;
}

// ---- selection above a bound

void HostSelector::select_all(const Batch& batch) {
  const std::vector<std::uint32_t> zero(static_cast<std::size_t>(sizes().n_groups), 0);
  if (filter_tiles(batch, zero, false)) {
    take_candidates(batch, {}, false);
    return;
  }
  device::zero(execution_, activations().row_offsets.data, (batch.n_tokens + 1) * 8);
  if (first_fault_.empty())
    first_fault_ = fmt::format("layers 0 to {}: {} or more features are active, the list holds {}", overfull_layer_,
                               own_.on_host.count[0], own_.candidate_key.size);
  const std::int32_t fault = 1;
  if (fault_ == nullptr) throw error(ExitCode::usage, "the selection is not valid, {}", first_fault_);
  copy_to_device(fault_, &fault, sizeof fault);
  kernels::fence(execution_);  // `fault` is destroyed on return
}

// ---- selection over the batch

void HostSelector::select_over_batch(const Batch& batch) {
  std::vector<std::uint32_t> threshold = controller_;
  for (std::uint32_t& key : threshold) key = std::min(key, kernels::kLargestKey);
  // The maximum over ranks is formed while they encode.
  auto pending = grid_.world().start_maximum({threshold.begin(), threshold.end()});
  bool complete = collect(batch, threshold), overflow = false;
  const std::vector<std::int64_t> largest = [&] {
    const parallel::TimedExchange timed(exchanges_, kName, reduced_bytes(sizes().n_groups));
    return pending.wait();
  }();
  std::vector<std::int64_t> filtered_with = largest;

  std::vector<Search> found = search_candidates(batch, complete, overflow);
  // A rank has not collected keys up to its threshold. If the K-th key is not above all thresholds, some of these keys
  // may have to be selected: all ranks begin again without a threshold.
  const auto too_high = [&] {
    for (std::size_t g = 0; g < found.size(); ++g)
      if (filtered_with[g] >= std::max<std::int64_t>(1, found[g].key())) return true;
    return false;
  };
  if (too_high()) {
    ++statistics_.redos;
    std::fill(threshold.begin(), threshold.end(), 0);
    std::fill(filtered_with.begin(), filtered_with.end(), 0);
    complete = collect(batch, threshold);
    found = search_candidates(batch, complete, overflow);
    WEFT_ASSERT(!too_high());
  }
  const bool ties_are_cut = admit_ties(batch, found);
  take_candidates(batch, found, ties_are_cut);

  for (std::size_t g = 0; g < found.size(); ++g) {
    controller_[g] =
        kernels::next_threshold(found[g].key(), static_cast<std::uint32_t>(largest[g]), !overflow,
                                static_cast<std::uint64_t>(passed_[g]), static_cast<std::uint64_t>(batch.budget));
    statistics_.threshold.push_back(kernels::bits_float(found[g].key()));
  }
}

/// Fills the candidate lists so that no selected entry is missing, unless a threshold was too high. Returns true if the
/// list was complete after the first pass.
bool HostSelector::collect(const Batch& batch, std::span<const std::uint32_t> threshold) {
  if (filter_tiles(batch, threshold, false)) return true;
  const std::vector<Search> found = search_own_tiles(batch);
  std::vector<std::uint32_t> lower;
  std::int64_t passing = 0;
  for (const Search& search : found) {
    lower.push_back(search.threshold());
    passing += search.reaching();
  }
  const bool ordered = passing > own_.candidate_key.size;
  if (ordered) {
    // Ties alone overflow the list: only the first ties of each group, which could be selected, enter.
    count_ties_of_tiles(batch, found);
    for (std::size_t g = 0; g < found.size(); ++g) lower[g] = found[g].key();
  }
  if (!filter_tiles(batch, lower, ordered))
    throw error(ExitCode::internal,
                "the selection of layer {} is not valid: {} pre-activations passed the filter, the list holds {} (the "
                "encoder's products differ between two passes over the same tiles); the dense library must give the "
                "same bits for the same shapes",
                overfull_layer_, own_.on_host.count[0], own_.candidate_key.size);
  return false;
}

/// Sets own_.admit for a filter with the keys found, from the ties of this rank.
void HostSelector::count_ties_of_tiles(const Batch& batch, std::span<const Search> found) {
  const std::int64_t n = batch.n_tokens * spec_.n_layers;
  device::zero(execution_, own_.ties.data, n * 4);
  for_each_tile(batch, [&](const kernels::Tile& tile, std::int64_t) {
    const std::uint32_t key = found[static_cast<std::size_t>(group_of(tile.layer))].key();
    if (key > 0) kernels::count_ties_tile(execution_, tile, key, per_layer(own_.ties, batch));
    return true;
  });
  copy_to_host(own_.on_host.admit.data, own_.ties.data, n * 4);
  std::vector<std::int64_t> before(found.size(), 0);
  for (std::int64_t i = 0; i < n; ++i) {
    const auto g = static_cast<std::size_t>(group_of(i % spec_.n_layers));
    std::int32_t& count = own_.on_host.admit[i];
    const std::int64_t ties = count;
    count = static_cast<std::int32_t>(kernels::ties_admitted(ties, before[g], found[g].ties_kept()));
    before[g] += ties;
  }
  copy_to_device(own_.admit.data, own_.on_host.admit.data, n * 4);
}

/// One pass over the tiles. Returns false if more entries passed than the list holds.
bool HostSelector::filter_tiles(const Batch& batch, std::span<const std::uint32_t> threshold, bool ordered) {
  const kernels::CandidateLists lists = candidates(batch);
  device::zero(execution_, own_.segment_begin.data, sizeof(std::int64_t));
  kernels::Filter filter;
  if (ordered) {
    filter.admit = per_layer(own_.admit, batch);
    filter.admitted = per_layer(own_.admitted, batch);
    device::zero(execution_, own_.admitted.data, batch.n_tokens * spec_.n_layers * 4);
  }
  return for_each_tile(batch, [&](const kernels::Tile& tile, std::int64_t block) {
    filter.threshold = threshold[static_cast<std::size_t>(group_of(tile.layer))];
    kernels::filter_tile(execution_, tile, block, filter, lists);
    const std::int64_t next_segment = lists.segment(tile.layer, block, tile.token_begin + tile.product.rows);
    copy_to_host(own_.on_host.count.data, lists.segment_begin.data + next_segment, sizeof(std::int64_t));
    overfull_layer_ = tile.layer;
    return own_.on_host.count[0] <= lists.key.size;
  });
}

/// Returns for each group a key that at least K of this rank's entries reach (or all its candidates), refined until the
/// entries that reach it fit the list or the key is exact.
std::vector<Search> HostSelector::search_own_tiles(const Batch& batch) {
  std::vector<Search> searches = new_searches(batch);
  std::int64_t* host = own_.on_host.histogram.data;
  for (int round = 0; round < kHistogramRounds; ++round) {
    device::zero(execution_, own_.histogram.data, sizes().n_groups * kHistogramBins * 8);
    for_each_tile(batch, [&](const kernels::Tile& tile, std::int64_t) {
      const std::int64_t group = group_of(tile.layer);
      kernels::histogram_tile(execution_, tile, {round, searches[static_cast<std::size_t>(group)].prefix},
                              {own_.histogram.data + group * kHistogramBins, kHistogramBins});
      return true;
    });
    copy_to_host(host, own_.histogram.data, sizes().n_groups * kHistogramBins * 8);
    std::int64_t passing = 0;
    for (std::size_t g = 0; g < searches.size(); ++g) {
      searches[g].advance(kernels::pick_bin(host + static_cast<std::int64_t>(g) * kHistogramBins, searches[g].rank()));
      passing += searches[g].reaching();
    }
    if (passing <= own_.candidate_key.size) break;
  }
  return searches;
}

/// Returns the exact K-th key of each group among the candidates of all ranks. Sets `overflow` if the list of some rank
/// was not complete. Collective.
std::vector<Search> HostSelector::search_candidates(const Batch& batch, bool complete, bool& overflow) {
  const kernels::CandidateLists lists = candidates(batch);
  std::vector<Search> searches = new_searches(batch);
  const Array<std::int64_t> host = own_.on_host.histogram;
  for (int round = 0; round < kHistogramRounds; ++round) {
    device::zero(execution_, own_.histogram.data, sizes().n_groups * kHistogramBins * 8);
    for (std::int64_t g = 0; g < sizes().n_groups; ++g)
      kernels::histogram_candidates(execution_, lists, g, sizes().n_groups == 1 ? spec_.n_layers : g + 1,
                                    {round, searches[static_cast<std::size_t>(g)].prefix},
                                    {own_.histogram.data + g * kHistogramBins, kHistogramBins});
    copy_to_host(host.data, own_.histogram.data, sizes().n_groups * kHistogramBins * 8);
    host[host.size - 1] = complete ? 0 : 1;
    sum_(host);
    if (round == 0) {
      overflow = host[host.size - 1] > 0;
      passed_.assign(searches.size(), 0);
      for (std::size_t g = 0; g < searches.size(); ++g) {
        const std::int64_t* own = host.data + static_cast<std::int64_t>(g) * kHistogramBins;
        passed_[g] = std::accumulate(own, own + kHistogramBins, std::int64_t{0});
      }
    }
    for (std::size_t g = 0; g < searches.size(); ++g)
      searches[g].advance(
          kernels::pick_bin(host.data + static_cast<std::int64_t>(g) * kHistogramBins, searches[g].rank()));
  }
  return searches;
}

/// Sets own_.admit to the number of ties that each (token, layer) of this rank keeps, if more entries than K reach
/// a K-th key. Returns true in that case, the same on all ranks. Collective.
bool HostSelector::admit_ties(const Batch& batch, std::span<const Search> found) {
  for (const Search& search : found) statistics_.ties_cut += search.ties_cut();
  if (statistics_.ties_cut == 0) return false;

  const std::int64_t n_layers = spec_.n_layers, n = batch.n_tokens * n_layers;
  for (std::int64_t layer = 0; layer < n_layers; ++layer)
    own_.on_host.threshold[layer] = found[static_cast<std::size_t>(group_of(layer))].key();
  copy_to_device(own_.threshold.data, own_.on_host.threshold.data, n_layers * 4);
  kernels::count_ties(execution_, candidates(batch), own_.threshold, per_layer(own_.ties, batch));
  copy_to_host(own_.on_host.admit.data, own_.ties.data, n * 4);
  const std::int64_t n_shards = grid_.size(parallel::kFeatureAxis), own = grid_.index(parallel::kFeatureAxis);
  {
    const parallel::TimedExchange timed(exchanges_, kName, n * 4 * (n_shards - 1));
    grid_.axis(parallel::kFeatureAxis).all_gather(own_.on_host.admit.data, own_.on_host.ties.data, n * 4);
  }

  // Earlier tokens belong to the data groups before this one.
  std::vector<std::int64_t> ties_of_group(found.size(), 0);
  for (std::int64_t i = 0; i < n_shards * n; ++i)
    ties_of_group[static_cast<std::size_t>(group_of(i % n_layers))] += own_.on_host.ties[i];
  std::vector<std::int64_t> of_all(found.size() * static_cast<std::size_t>(grid_.size(parallel::kDataAxis)));
  {
    const std::int64_t bytes = static_cast<std::int64_t>(found.size() * sizeof(std::int64_t));
    const parallel::TimedExchange timed(exchanges_, kName, bytes * (grid_.size(parallel::kDataAxis) - 1));
    grid_.axis(parallel::kDataAxis).all_gather(ties_of_group.data(), of_all.data(), bytes);
  }
  std::vector<std::int64_t> before(found.size(), 0);
  for (std::size_t g = 0; g < found.size(); ++g)
    for (std::int64_t d = 0; d < grid_.index(parallel::kDataAxis); ++d)
      before[g] += of_all[static_cast<std::size_t>(d) * found.size() + g];

  for (std::int64_t i = 0; i < n; ++i) {
    const auto g = static_cast<std::size_t>(group_of(i % n_layers));
    for (std::int64_t shard = 0; shard < n_shards; ++shard) {
      const std::int64_t ties = own_.on_host.ties[shard * n + i];
      if (shard == own)
        own_.on_host.admit[i] =
            static_cast<std::int32_t>(kernels::ties_admitted(ties, before[g], found[g].ties_kept()));
      before[g] += ties;
    }
  }
  copy_to_device(own_.admit.data, own_.on_host.admit.data, n * 4);
  return true;
}

/// Forms the result, the candidates from the K-th keys on. found = {}: all candidates.
void HostSelector::take_candidates(const Batch& batch, std::span<const Search> found, bool ties_are_cut) {
  const std::int64_t n_layers = spec_.n_layers;
  for (std::int64_t layer = 0; layer < n_layers; ++layer)
    own_.on_host.threshold[layer] = found.empty() ? 0 : found[static_cast<std::size_t>(group_of(layer))].key();
  copy_to_device(own_.threshold.data, own_.on_host.threshold.data, n_layers * 4);
  kernels::Matrix<const std::int32_t> admit;
  if (ties_are_cut) admit = per_layer(own_.admit, batch);
  kernels::take_candidates(execution_, candidates(batch), own_.threshold, admit, activations());
}

// ---- selection per token

kernels::BestLists HostSelector::best_lists(const Batch& batch) const {
  const std::int64_t n_rows = batch.n_tokens * sizes().n_groups, budget = columns_of_lists(batch);
  return {sizes().n_groups, spec_.n_features, batch.features.begin, {own_.best.data, n_rows, budget, budget}};
}

void HostSelector::clear_lists(const Batch& batch) {
  const kernels::Matrix<std::uint64_t> word = best_lists(batch).word;
  device::zero(execution_, word.data, word.rows * word.columns * 8);
}

void HostSelector::select_per_token(const Batch& batch) {
  clear_lists(batch);
  for_each_tile(batch, [&](const kernels::Tile& tile, std::int64_t) {
    kernels::keep_best_tile(execution_, tile, best_lists(batch));
    return true;
  });
  finish_per_token(batch);
}

void HostSelector::take(const kernels::Execution& execution, const kernels::TileRange& tile,
                        kernels::AnyMatrix product) {
  const bool first = tile.layer == 0 && tile.token_begin == 0 && tile.feature_begin == 0;
  if (first && !cleared_) clear_lists(followed_);  // another pass
  cleared_ = false;
  const float* const bias = followed_.bias[static_cast<std::size_t>(tile.layer)].data + tile.feature_begin;
  kernels::keep_best_tile(execution,
                          {product, {bias, tile.feature_count}, tile.layer, tile.token_begin, tile.feature_begin, {}},
                          best_lists(followed_));
}

void HostSelector::finish_per_token(const Batch& batch) {
  const kernels::BestLists best = best_lists(batch);
  const Array<const std::uint64_t> least =
      grid_.size(parallel::kFeatureAxis) > 1 ? cut_offs(batch) : Array<const std::uint64_t>{};
  kernels::take_best(execution_, best, least, activations());
}

/// Finds for each (token, group) the least word that is selected. Each rank of the feature axis merges the lists of all
/// ranks for a slice of the tokens and returns the cut-offs to all. Collective.
Array<const std::uint64_t> HostSelector::cut_offs(const Batch& batch) {
  const parallel::Communicator& axis = grid_.axis(parallel::kFeatureAxis);
  const std::int64_t n_shards = grid_.size(parallel::kFeatureAxis);
  const std::int64_t n_rows = batch.n_tokens * sizes().n_groups, budget = columns_of_lists(batch);
  std::vector<std::int64_t> rows_of_slice;
  for (std::int64_t i = 0; i < n_shards; ++i)
    rows_of_slice.push_back(parallel::part(batch.n_tokens, n_shards, i).size() * sizes().n_groups);
  const std::int64_t own_rows = rows_of_slice[static_cast<std::size_t>(grid_.index(parallel::kFeatureAxis))];
  std::vector<std::int64_t> send, receive(static_cast<std::size_t>(n_shards), own_rows * budget * 8), returned;
  for (const std::int64_t rows : rows_of_slice) {
    send.push_back(rows * budget * 8);
    returned.push_back(rows * 8);
  }
  const auto& host = own_.on_host;
  copy_to_host(host.best.data, own_.best.data, n_rows * budget * 8);
  {
    const parallel::TimedExchange timed(exchanges_, kName, (n_rows - own_rows) * budget * 8);
    axis.all_to_all(host.best.data, send, host.best_received.data, receive);
  }
  copy_to_device(own_.best_received.data, host.best_received.data, n_shards * own_rows * budget * 8);
  kernels::merge_best(execution_, {own_.best_received.data, n_shards * own_rows, budget, budget}, n_shards,
                      {own_.cut_off_slice.data, own_rows});
  copy_to_host(host.cut_off_slice.data, own_.cut_off_slice.data, own_rows * 8);
  {
    const parallel::TimedExchange timed(exchanges_, kName, own_rows * 8 * (n_shards - 1));
    axis.all_gather_uneven(host.cut_off_slice.data, host.cut_off.data, returned);
  }
  copy_to_device(own_.cut_off.data, host.cut_off.data, n_rows * 8);
  return {own_.cut_off.data, n_rows};
}

}  // namespace

void take_host_selector_buffers(const SelectionSpec& spec, SelectionBuffers& buffers, model::StepArena& arena) {
  const SelectionSizes& sizes = buffers.sizes;
  HostSelectorBuffers& own = buffers.host;
  const std::int64_t n_shards = spec.grid.size(parallel::kFeatureAxis);
  const std::int64_t layers_of_group = spec.settings.scope == Scope::layer ? 1 : spec.n_layers;
  if (!spec.follows) own.tile = arena.take_matrix(spec.product(), sizes.tile_tokens, sizes.tile_features);
  if (spec.settings.activation == Activation::topk) {
    own.budget_of_token =
        std::min(selection_budget(spec.settings, spec.n_layers, spec.max_tokens), layers_of_group * spec.n_features);
    const std::int64_t rows = sizes.max_tokens * sizes.n_groups;
    own.best = arena.take<std::uint64_t>(rows * own.budget_of_token);
    if (n_shards == 1) return;
    const std::int64_t slice_rows = parallel::largest_part(sizes.max_tokens, n_shards) * sizes.n_groups;
    own.best_received = arena.take<std::uint64_t>(n_shards * slice_rows * own.budget_of_token);
    own.cut_off_slice = arena.take<std::uint64_t>(slice_rows);
    own.cut_off = arena.take<std::uint64_t>(rows);
    own.on_host.best = arena.take_host<std::uint64_t>(own.best.size);
    own.on_host.best_received = arena.take_host<std::uint64_t>(own.best_received.size);
    own.on_host.cut_off_slice = arena.take_host<std::uint64_t>(own.cut_off_slice.size);
    own.on_host.cut_off = arena.take_host<std::uint64_t>(own.cut_off.size);
    return;
  }
  const std::int64_t all_entries = sizes.max_tokens * spec.n_layers * sizes.max_features;
  // batch_topk: about 1.5 times as many entries as are selected pass the filter; a bin of the first histogram may admit
  // more.
  const std::int64_t candidates = spec.settings.activation == Activation::batch_topk
                                      ? std::min(all_entries, sizes.capacity * 5 / 2 + kCandidateSlack)
                                      : sizes.capacity;
  const std::int64_t n_blocks =
      sizes.tile_features > 0 ? (sizes.max_features + sizes.tile_features - 1) / sizes.tile_features : 0;
  own.candidate_key = arena.take<std::uint32_t>(candidates);
  own.candidate_value = arena.take<float>(candidates);
  own.segment_begin = arena.take<std::int64_t>(spec.n_layers * n_blocks * sizes.max_tokens + 1);
  own.threshold = arena.take<std::uint32_t>(spec.n_layers);
  own.on_host.count = arena.take_host<std::int64_t>(1);
  own.on_host.threshold = arena.take_host<std::uint32_t>(spec.n_layers);
  if (spec.settings.activation != Activation::batch_topk) return;
  const std::int64_t per_layer = sizes.max_tokens * spec.n_layers;
  own.histogram = arena.take<std::int64_t>(sizes.n_groups * kHistogramBins);
  own.ties = arena.take<std::int32_t>(per_layer);
  own.admit = arena.take<std::int32_t>(per_layer);
  own.admitted = arena.take<std::int32_t>(per_layer);
  own.on_host.histogram = arena.take_host<std::int64_t>(own.histogram.size + 1);
  own.on_host.admit = arena.take_host<std::int32_t>(per_layer);
  own.on_host.ties = arena.take_host<std::int32_t>(n_shards * per_layer);
}

std::unique_ptr<Selector> make_host_selector(const SelectionSpec& spec, const SelectionBuffers& buffers,
                                             const parallel::Grid& grid, const kernels::Execution& execution,
                                             const SumDecorator& decorate) {
  return std::make_unique<HostSelector>(spec, buffers, grid, execution, decorate);
}

}  // namespace weft::transcoder
