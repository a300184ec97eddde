// SPDX-License-Identifier: Apache-2.0
#include "transcoder/selection.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "kernels/runtime.hpp"
#include "transcoder/selection_on_rank_0.hpp"

namespace weft::transcoder {
namespace {

using kernels::Array;
using kernels::kHistogramBins;
using kernels::kHistogramRounds;

constexpr std::int64_t kTileTokens = 1024;                       // at most
constexpr std::int64_t kTileBytes = std::int64_t{4} << 20;       // stays in a processor's cache
constexpr std::int64_t kLargestGpuTile = std::int64_t{1} << 30;  // a GPU wants few, large products
constexpr std::int64_t kTileFeatures = 64;                       // a multiple of this
constexpr std::int64_t kCandidateSlack = 1024;
constexpr std::int64_t kLargestIndex = std::int64_t{1} << 32;
constexpr const char* kName = "selection";  // of its exchanges

constexpr std::int64_t rounded_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// Cuts typed arrays from a piece of memory; without memory it only measures.
class Cutter {
 public:
  explicit Cutter(void* base) : base_(reinterpret_cast<std::uintptr_t>(base)) {}

  template <class T>
  Array<T> cut(std::int64_t size) {
    const Array<T> array{
        size == 0 || base_ == 0 ? nullptr : reinterpret_cast<T*>(base_ + static_cast<std::uintptr_t>(used_)), size};
    used_ += rounded_up(size * static_cast<std::int64_t>(sizeof(T)), 256);
    return array;
  }
  std::int64_t used() const { return used_; }

 private:
  std::uintptr_t base_;
  std::int64_t used_ = 0;
};

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

std::int64_t selection_budget(const ModelSettings& settings, std::int64_t n_layers, std::int64_t n_tokens_total) {
  if (settings.activation == Activation::relu) return std::numeric_limits<std::int64_t>::max();
  double k = settings.k;
  if (settings.scope == Scope::all_layers) k *= static_cast<double>(n_layers);
  if (settings.activation == Activation::batch_topk) k *= static_cast<double>(n_tokens_total);
  return std::max<std::int64_t>(1, std::llround(k));
}

namespace {

/// What a selection on a GPU is asked for: of a rank with these features, or of the largest.
// Without CUDA nobody asks.
[[maybe_unused]] kernels::cuda::SelectionRequest gpu_request(const ModelSettings& settings, const SelectionShape& shape,
                                                             const SelectionSizes& sizes, Precision precision,
                                                             const kernels::cuda::SelectionPlace& place,
                                                             std::int64_t n_features) {
  using kernels::cuda::SelectionRule;
  return {.rule = settings.activation == Activation::batch_topk ? SelectionRule::batch_topk
                  : settings.activation == Activation::topk     ? SelectionRule::topk
                                                                : SelectionRule::relu,
          .all_layers = settings.scope == Scope::all_layers,
          .n_tokens = sizes.max_tokens,
          .n_layers = shape.n_layers,
          .n_features = n_features,
          .budget = settings.activation == Activation::relu
                        ? sizes.capacity
                        : selection_budget(settings, shape.n_layers, shape.max_tokens),
          .product = precision == Precision::bf16 ? kernels::Scalar::bf16 : kernels::Scalar::fp32,
          .tile_tokens = sizes.tile_tokens,
          .tile_features = sizes.tile_features,
          .place = place};
}

/// Bytes that it exchanges on the feature axis at once, at most.
std::int64_t largest_message(const ModelSettings& settings, const SelectionShape& shape, const SelectionSizes& sizes,
                             parallel::GridShape grid) {
  if (settings.activation == Activation::batch_topk) return grid.feature * sizes.max_tokens * shape.n_layers * 4;
  if (settings.activation == Activation::relu) return 0;
  const std::int64_t tokens = grid.feature * parallel::largest_part(sizes.max_tokens, grid.feature);
  return tokens * sizes.n_groups * selection_budget(settings, shape.n_layers, shape.max_tokens) * 8;
}

}  // namespace

std::int64_t list_capacity(const ModelSettings& settings, const SelectionShape& shape, parallel::GridShape grid) {
  const std::int64_t n_groups = settings.scope == Scope::layer ? shape.n_layers : 1;
  const std::int64_t budget = selection_budget(settings, shape.n_layers, shape.max_tokens);
  const std::int64_t n_tokens = parallel::largest_part(shape.max_tokens, grid.data),
                     a_token = shape.n_layers / n_groups * parallel::largest_part(shape.n_features, grid.feature);
  return settings.activation == Activation::topk ? n_tokens * n_groups * std::min(budget, a_token)
                                                 : n_groups * std::min(budget, n_tokens * a_token);
}

SelectionSizes selection_sizes(const ModelSettings& settings, const SelectionShape& shape, parallel::GridShape grid,
                               Precision precision, kernels::Backend backend) {
  SelectionSizes sizes;
  sizes.max_tokens = parallel::largest_part(shape.max_tokens, grid.data);
  sizes.max_features = parallel::largest_part(shape.n_features, grid.feature);
  sizes.n_groups = settings.scope == Scope::layer ? shape.n_layers : 1;

  const std::int64_t element = precision == Precision::bf16 ? 2 : 4;
  const bool on_gpu = backend == kernels::Backend::cuda;
  const std::int64_t columns = kTileFeatures * element;
  const std::int64_t tile_bytes = shape.tile_bytes > 0 ? shape.tile_bytes : on_gpu ? kLargestGpuTile : kTileBytes;
  sizes.tile_tokens = std::min(
      {sizes.max_tokens, on_gpu ? sizes.max_tokens : kTileTokens, std::max<std::int64_t>(16, tile_bytes / columns)});
  const std::int64_t widest = std::max<std::int64_t>(1, tile_bytes / (columns * sizes.tile_tokens)) * kTileFeatures;
  const std::int64_t n_blocks = (sizes.max_features + widest - 1) / widest;
  sizes.tile_features =
      std::min(sizes.max_features, rounded_up((sizes.max_features + n_blocks - 1) / n_blocks, kTileFeatures));

  const std::int64_t budget = selection_budget(settings, shape.n_layers, shape.max_tokens);
  const std::int64_t layers_of_group = settings.scope == Scope::layer ? 1 : shape.n_layers;
  sizes.capacity = list_capacity(settings, shape, grid);
  if (settings.activation == Activation::topk) {
    sizes.best = std::min(budget, layers_of_group * shape.n_features);
  } else {
    const std::int64_t everything = sizes.max_tokens * layers_of_group * sizes.max_features;
    // Half as many again usually pass the filter; a bin of the first histogram may let in more.
    sizes.candidates = std::min(sizes.n_groups * everything, sizes.capacity * 5 / 2 + kCandidateSlack);
    sizes.segments = shape.n_layers * n_blocks * sizes.max_tokens;
  }
  const std::int64_t most =
      std::max(sizes.capacity, grid.data == 1 ? 0 : list_capacity(settings, shape, {1, grid.data * grid.feature}));
  if (most >= kLargestIndex || shape.n_layers * shape.n_features >= kLargestIndex)
    throw collective_error(
        ExitCode::usage,
        "the selection needs room for {} active entries on a rank (at most 2^32 are possible); take a smaller "
        "transcoder.k, a smaller batch or more ranks",
        most);
  sizes.on_rank_0 = shape.manner.selection == SelectionPlace::rank_0 && grid.data * grid.feature > 1;
  if constexpr (kernels::kCudaBuild)
    if (on_gpu && !sizes.on_rank_0)
      sizes.on_gpu_bytes = kernels::cuda::DeviceSelection::workspace_bytes(
          gpu_request(settings, shape, sizes, precision,
                      {.feature_ranks = grid.feature, .data_ranks = grid.data, .n_features_total = shape.n_features},
                      sizes.max_features));
  const Selection::Arrays arrays(sizes, settings, shape, grid, precision, backend, nullptr, nullptr);
  sizes.device_bytes = arrays.device_bytes;
  if (sizes.on_gpu_bytes > 0 && grid.feature > 1)
    sizes.staged_bytes = 2 * largest_message(settings, shape, sizes, grid);
  sizes.host_bytes = arrays.host_bytes + sizes.staged_bytes;
  if (sizes.on_rank_0) {
    const auto memory = SelectionOnRankZero::memory(settings, shape, grid, precision, backend);
    sizes.rank_0_device_bytes = memory.device;
    sizes.rank_0_host_bytes = memory.host;
  }
  return sizes;
}

Selection::Arrays::Arrays(const SelectionSizes& sizes, const ModelSettings& settings, const SelectionShape& shape,
                          parallel::GridShape grid, Precision precision, kernels::Backend backend, void* device,
                          void* host_memory) {
  Cutter on_device(device), on_host(host_memory);
  const std::int64_t n_keys = shape.n_layers * sizes.max_features;
  const std::int64_t per_layer = sizes.max_tokens * shape.n_layers;

  const kernels::Scalar type = precision == Precision::bf16 ? kernels::Scalar::bf16 : kernels::Scalar::fp32;
  row_offsets = on_device.cut<std::int64_t>(sizes.max_tokens + 1);
  key = on_device.cut<std::uint32_t>(sizes.capacity);
  value = on_device.cut<float>(sizes.capacity);
  hit_offsets = on_device.cut<std::int64_t>(n_keys + 1);
  hit_token = on_device.cut<std::uint32_t>(sizes.capacity);
  hit_position = on_device.cut<std::uint32_t>(sizes.capacity);
  transpose_workspace = on_device.cut<std::byte>(kernels::transpose_workspace(backend, n_keys, sizes.capacity));
  host.count = on_host.cut<std::int64_t>(1);
  on_gpu_workspace = on_device.cut<std::byte>(sizes.on_gpu_bytes);
  device_bytes = on_device.used();
  host_bytes = on_host.used();
  if (sizes.on_gpu_bytes > 0 || sizes.on_rank_0) return;

  const auto bytes = on_device.cut<std::byte>(sizes.tile_tokens * sizes.tile_features * kernels::bytes_of(type));
  tile = {bytes.data, type, sizes.tile_tokens, sizes.tile_features, sizes.tile_features};
  if (settings.activation != Activation::topk) {
    candidate_key = on_device.cut<std::uint32_t>(sizes.candidates);
    candidate_value = on_device.cut<float>(sizes.candidates);
    segment_begin = on_device.cut<std::int64_t>(sizes.segments + 1);
    threshold = on_device.cut<std::uint32_t>(shape.n_layers);
    host.threshold = on_host.cut<std::uint32_t>(shape.n_layers);
  }
  if (settings.activation == Activation::batch_topk) {
    histogram = on_device.cut<std::int64_t>(sizes.n_groups * kHistogramBins);
    ties = on_device.cut<std::int32_t>(per_layer);
    admit = on_device.cut<std::int32_t>(per_layer);
    admitted = on_device.cut<std::int32_t>(per_layer);
    host.histogram = on_host.cut<std::int64_t>(sizes.n_groups * kHistogramBins + 1);
    host.admit = on_host.cut<std::int32_t>(per_layer);
    host.ties = on_host.cut<std::int32_t>(grid.feature * per_layer);
  }
  if (settings.activation == Activation::topk) {
    const std::int64_t rows = sizes.max_tokens * sizes.n_groups;
    best = on_device.cut<std::uint64_t>(rows * sizes.best);
    if (grid.feature > 1) {
      const std::int64_t slice_rows = parallel::largest_part(sizes.max_tokens, grid.feature) * sizes.n_groups;
      best_received = on_device.cut<std::uint64_t>(grid.feature * slice_rows * sizes.best);
      cut_off_slice = on_device.cut<std::uint64_t>(slice_rows);
      cut_off = on_device.cut<std::uint64_t>(rows);
      host.best = on_host.cut<std::uint64_t>(rows * sizes.best);
      host.best_received = on_host.cut<std::uint64_t>(grid.feature * slice_rows * sizes.best);
      host.cut_off_slice = on_host.cut<std::uint64_t>(slice_rows);
      host.cut_off = on_host.cut<std::uint64_t>(rows);
    }
  }
  device_bytes = on_device.used();
  host_bytes = on_host.used();
}

Selection::Selection(const ModelSettings& settings, const SelectionShape& shape, const parallel::Grid& grid,
                     const kernels::Execution& execution, Precision precision)
    : settings_(settings),
      shape_(shape),
      grid_(grid),
      execution_(execution),
      sizes_(selection_sizes(settings, shape, grid.shape(), precision, execution.backend)),
      device_memory_(sizes_.device_bytes, device::Allocation::Where::device),
      host_memory_(sizes_.host_bytes - sizes_.staged_bytes, device::Allocation::Where::host),
      arrays_(sizes_, settings, shape, grid.shape(), precision, execution.backend, device_memory_.data(),
              host_memory_.data()) {
  if (sizes_.on_rank_0)
    on_rank_0_ = std::make_unique<SelectionOnRankZero>(settings, shape, sizes_, grid, execution, precision);
  if constexpr (kernels::kCudaBuild)
    if (sizes_.on_gpu_bytes > 0) {
      const parallel::Range features = grid.features(shape.n_features);
      const kernels::cuda::SelectionPlace place{.feature_ranks = grid.shape().feature,
                                                .feature_index = grid.feature_index(),
                                                .data_ranks = grid.shape().data,
                                                .data_index = grid.data_index(),
                                                .feature_begin = features.begin,
                                                .n_features_total = shape.n_features};
      if (grid.shape().feature > 1)
        shards_.emplace(grid.feature_axis(), execution, largest_message(settings, shape, sizes_, grid.shape()),
                        shape.manner.way);
      all_.emplace(grid.all_on_an_axis(), execution, 0, shape.manner.way);
      on_gpu_ = std::make_shared<kernels::cuda::DeviceSelection>(
          gpu_request(settings, shape, sizes_, precision, place, features.size()), arrays_.on_gpu_workspace, execution,
          exchange());
      return;
    }
  if (settings.activation == Activation::batch_topk) controller_.assign(static_cast<std::size_t>(sizes_.n_groups), 0);
}

Selection::~Selection() = default;

parallel::Exchanges Selection::exchanges() const {
  parallel::Exchanges all = exchanges_;
  if (shards_) all += shards_->exchanges();
  if (all_) all += all_->exchanges();
  if (on_rank_0_) all += on_rank_0_->exchange().exchanges();
  return all;
}

void Selection::wait_for_each(bool wait) {
  if (shards_) shards_->wait_for_each(wait);
  if (all_) all_->wait_for_each(wait);
  if (on_rank_0_) on_rank_0_->exchange().wait_for_each(wait);
}

void Selection::block(bool wait) {
  if (shards_) shards_->block(wait);
  if (all_) all_->block(wait);
  if (on_rank_0_) on_rank_0_->exchange().block(wait);
}

std::int64_t Selection::reduced_bytes(std::int64_t n_words) const {
  return parallel::bytes_of_reduction(n_words * 8, grid_.world().size());
}

/// Piece by piece where each collective is to have one thing to do: a histogram.
template <class Call>
void in_pieces(const ExchangeManner& manner, std::int64_t size, Call&& call) {
  const std::int64_t piece = manner.together ? size : kHistogramBins;
  for (std::int64_t begin = 0; begin < size; begin += piece) call(begin, std::min(piece, size - begin));
}

/// The one place that says by which way a selection on the GPU reaches the other ranks.
kernels::cuda::SelectionExchange Selection::exchange() {
  return {.sum =
              [this](const kernels::Execution&, Array<std::int64_t> values) {
                in_pieces(shape_.manner, values.size, [&](std::int64_t begin, std::int64_t size) {
                  all_->sum({values.data + begin, size}, kName);
                });
              },
          .all_gather = [this](const kernels::Execution&, void* data,
                               std::span<const std::int64_t> bytes) { shards_->all_gather(data, bytes, kName); },
          .all_to_all =
              [this](const kernels::Execution&, const void* send, std::span<const std::int64_t> send_bytes,
                     void* receive, std::span<const std::int64_t> receive_bytes) {
                shards_->all_to_all(send, send_bytes, receive, receive_bytes, kName);
              }};
}

void Selection::mark(device::IdleClock* idle) {
  if (shards_) shards_->mark(idle);
  if (all_) all_->mark(idle);
  if (on_rank_0_) on_rank_0_->exchange().mark(idle);
}

Selection::ControllerState Selection::controller_state() {
  if (settings_.activation != Activation::batch_topk) return {{}, false};
  if (on_rank_0_)
    if (const auto of_rank_0 = on_rank_0_->controller_state()) return *of_rank_0;
  if constexpr (kernels::kCudaBuild)
    if (on_gpu_) return {on_gpu_->thresholds(), true};
  return {{controller_.data(), static_cast<std::int64_t>(controller_.size())}, false};
}

/// What one call of `select` works on.
struct Selection::Batch {
  std::int64_t n_tokens = 0;  ///< of this rank's feature group
  parallel::Range features;   ///< of this rank, global indices
  std::int64_t budget = 0;
  std::int64_t n_blocks = 0;
  std::span<const Array<const float>> bias;
  const Producer* produce = nullptr;
};

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

void Selection::select(std::int64_t n_tokens_total, std::span<const Array<const float>> bias_of_layer,
                       const Producer& produce) {
  if (n_tokens_total < 1 || n_tokens_total > shape_.max_tokens)
    throw error(ExitCode::internal, "a batch of {} tokens was given to a selection for at most {}", n_tokens_total,
                shape_.max_tokens);
  WEFT_ASSERT(static_cast<std::int64_t>(bias_of_layer.size()) == shape_.n_layers);
  Batch batch;
  batch.n_tokens = grid_.group_tokens(n_tokens_total).size();
  batch.features = grid_.features(shape_.n_features);
  batch.budget = selection_budget(settings_, shape_.n_layers, n_tokens_total);
  batch.n_blocks = (batch.features.size() + sizes_.tile_features - 1) / sizes_.tile_features;
  batch.bias = bias_of_layer;
  batch.produce = &produce;

  statistics_ = {};
  activations_ = {batch.n_tokens,        shape_.n_layers,
                  batch.features.size(), {arrays_.row_offsets.data, batch.n_tokens + 1},
                  arrays_.key,           arrays_.value};
  hits_ = {
      {arrays_.hit_offsets.data, shape_.n_layers * batch.features.size() + 1}, arrays_.hit_token, arrays_.hit_position};

  if (on_rank_0_) return on_rank_0_->select(n_tokens_total, bias_of_layer, produce, activations_, statistics_);
  if (on_gpu_) return select_on_gpu(batch);
  switch (settings_.activation) {
    case Activation::batch_topk:
      select_over_batch(batch);
      break;
    case Activation::topk:
      select_per_token(batch);
      break;
    case Activation::relu: {
      const std::vector<std::uint32_t> zero(static_cast<std::size_t>(sizes_.n_groups), 0);
      filter_tiles(batch, zero, false);
      take_candidates(batch, {}, false);
      break;
    }
  }
}

const SelectionStatistics& Selection::statistics() {
  if (activations_.n_tokens == 0 && !on_gpu_) return statistics_;
  device::copy(execution_, arrays_.host.count.data, activations_.row_offsets.data + activations_.n_tokens,
               sizeof(std::int64_t), device::Direction::to_host);
  kernels::fence(execution_);
  statistics_.entries = arrays_.host.count[0];
  if constexpr (kernels::kCudaBuild)
    if (on_gpu_) {
      const kernels::cuda::SelectionReport report = on_gpu_->report(execution_);
      statistics_.threshold = report.threshold;
      statistics_.passes = report.passes;
      statistics_.ties_cut = report.ties_cut;
    }
  return statistics_;
}

void Selection::select_on_gpu(const Batch& batch) {
  const std::int64_t budget = settings_.activation == Activation::relu ? sizes_.capacity : batch.budget;
  if constexpr (kernels::kCudaBuild)
    on_gpu_->select(
        execution_, batch.n_tokens, budget, batch.bias,
        [&](const kernels::Execution& where, const kernels::cuda::TileRange& tile, kernels::AnyMatrix product) {
          (*batch.produce)(
              where, {tile.layer, tile.token_begin, tile.token_count, tile.feature_begin, tile.feature_count}, product);
        },
        activations_);
}

void Selection::transpose() { kernels::transpose(execution_, activations_, hits_, arrays_.transpose_workspace); }

// ---- over the batch
// --------------------------------------------------------------------------------------------------

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
    in_pieces(shape_.manner, host.size, [&](std::int64_t begin, std::int64_t size) {
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
  const std::int64_t n_parts = grid_.shape().feature, own = grid_.feature_index();
  {
    const parallel::TimedExchange timed(exchanges_, kName, n * 4 * (n_parts - 1));
    grid_.feature_axis().all_gather(arrays_.host.admit.data, arrays_.host.ties.data, n * 4);
  }

  // Ties of earlier tokens: those of the feature groups before this one.
  std::vector<std::int64_t> of_group(found.size(), 0);
  for (std::int64_t i = 0; i < n_parts * n; ++i)
    of_group[static_cast<std::size_t>(group_of(i % shape_.n_layers))] += arrays_.host.ties[i];
  std::vector<std::int64_t> of_groups(found.size() * static_cast<std::size_t>(grid_.shape().data));
  {
    const std::int64_t bytes = static_cast<std::int64_t>(found.size() * sizeof(std::int64_t));
    const parallel::TimedExchange timed(exchanges_, kName, bytes * (grid_.shape().data - 1));
    grid_.data_axis().all_gather(of_group.data(), of_groups.data(), bytes);
  }

  std::vector<std::int64_t> room;
  for (std::size_t g = 0; g < found.size(); ++g) {
    room.push_back(found[g].wanted - found[g].greater);
    for (std::int64_t d = 0; d < grid_.data_index(); ++d)
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
// -------------------------------------------------------------------------------------------------------

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
  const std::int64_t n_parts = grid_.shape().feature;
  if (n_parts > 1) {
    // Each rank of the feature axis judges a slice of the tokens: it has the best of every rank for them, and tells all
    // from where on an entry stays.
    std::vector<std::int64_t> rows_of_slice;
    for (std::int64_t i = 0; i < n_parts; ++i)
      rows_of_slice.push_back(parallel::part(batch.n_tokens, n_parts, i).size() * sizes_.n_groups);
    const std::int64_t own_rows = rows_of_slice[static_cast<std::size_t>(grid_.feature_index())];
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
      grid_.feature_axis().all_to_all(host.best.data, send, host.best_received.data, receive);
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
      grid_.feature_axis().all_gather_uneven(host.cut_off_slice.data, host.cut_off.data, returned);
    }
    device::copy(execution_, arrays_.cut_off.data, host.cut_off.data, n_rows * 8, device::Direction::to_device);
    cut_off = {arrays_.cut_off.data, n_rows};
  }
  kernels::take_best(execution_, best, cut_off, activations_);
}

}  // namespace weft::transcoder
