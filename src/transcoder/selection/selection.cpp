// SPDX-License-Identifier: Apache-2.0
#include "transcoder/selection/selection.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "kernels/runtime.hpp"
#include "transcoder/benchmark/selection_on_rank_0.hpp"

namespace weft::transcoder {
namespace {

using kernels::Array;
using kernels::kHistogramBins;

constexpr std::int64_t kTileTokens = 1024;                       // at most
constexpr std::int64_t kTileBytes = std::int64_t{4} << 20;       // stays in a processor's cache
constexpr std::int64_t kLargestGpuTile = std::int64_t{1} << 30;  // a GPU wants few, large products
constexpr std::int64_t kTileFeatures = 64;                       // a multiple of this
constexpr std::int64_t kCandidateSlack = 1024;
constexpr std::int64_t kLargestIndex = std::int64_t{1} << 32;

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
                             const parallel::GridShape& grid) {
  if (settings.activation == Activation::batch_topk)
    return grid.size(parallel::kFeatureAxis) * sizes.max_tokens * shape.n_layers * 4;
  if (settings.activation == Activation::relu) return 0;
  const std::int64_t tokens =
      grid.size(parallel::kFeatureAxis) * parallel::largest_part(sizes.max_tokens, grid.size(parallel::kFeatureAxis));
  return tokens * sizes.n_groups * selection_budget(settings, shape.n_layers, shape.max_tokens) * 8;
}

}  // namespace

std::int64_t list_capacity(const ModelSettings& settings, const SelectionShape& shape,
                           const parallel::GridShape& grid) {
  const std::int64_t n_groups = settings.scope == Scope::layer ? shape.n_layers : 1;
  const std::int64_t budget = selection_budget(settings, shape.n_layers, shape.max_tokens);
  const std::int64_t n_tokens = parallel::largest_part(shape.max_tokens, grid.size(parallel::kDataAxis)),
                     a_token = shape.n_layers / n_groups *
                               parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis));
  return settings.activation == Activation::topk ? n_tokens * n_groups * std::min(budget, a_token)
                                                 : n_groups * std::min(budget, n_tokens * a_token);
}

SelectionSizes selection_sizes(const ModelSettings& settings, const SelectionShape& shape,
                               const parallel::GridShape& grid, Precision precision, kernels::Backend backend) {
  SelectionSizes sizes;
  sizes.max_tokens = parallel::largest_part(shape.max_tokens, grid.size(parallel::kDataAxis));
  sizes.max_features = parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis));
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
      std::max(sizes.capacity, grid.size(parallel::kDataAxis) == 1
                                   ? 0
                                   : list_capacity(settings, shape, parallel::data_by_feature(1, grid.ranks())));
  if (most >= kLargestIndex || shape.n_layers * shape.n_features >= kLargestIndex)
    throw collective_error(
        ExitCode::usage,
        "the selection needs room for {} active entries on a rank (at most 2^32 are possible); take a smaller "
        "transcoder.k, a smaller batch or more ranks",
        most);
  sizes.on_rank_0 = shape.manner.selection == SelectionPlace::rank_0 && grid.ranks() > 1;
  if constexpr (kernels::kCudaBuild)
    if (on_gpu && !sizes.on_rank_0)
      sizes.on_gpu_bytes = kernels::cuda::DeviceSelection::workspace_bytes(
          gpu_request(settings, shape, sizes, precision,
                      {.feature_ranks = grid.size(parallel::kFeatureAxis),
                       .data_ranks = grid.size(parallel::kDataAxis),
                       .n_features_total = shape.n_features},
                      sizes.max_features));
  const Selection::Arrays arrays(sizes, settings, shape, grid, precision, backend, nullptr, nullptr);
  sizes.device_bytes = arrays.device_bytes;
  if (sizes.on_gpu_bytes > 0 && grid.size(parallel::kFeatureAxis) > 1)
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
                          const parallel::GridShape& grid, Precision precision, kernels::Backend backend, void* device,
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
    host.ties = on_host.cut<std::int32_t>(grid.size(parallel::kFeatureAxis) * per_layer);
  }
  if (settings.activation == Activation::topk) {
    const std::int64_t rows = sizes.max_tokens * sizes.n_groups;
    best = on_device.cut<std::uint64_t>(rows * sizes.best);
    if (grid.size(parallel::kFeatureAxis) > 1) {
      const std::int64_t slice_rows =
          parallel::largest_part(sizes.max_tokens, grid.size(parallel::kFeatureAxis)) * sizes.n_groups;
      best_received = on_device.cut<std::uint64_t>(grid.size(parallel::kFeatureAxis) * slice_rows * sizes.best);
      cut_off_slice = on_device.cut<std::uint64_t>(slice_rows);
      cut_off = on_device.cut<std::uint64_t>(rows);
      host.best = on_host.cut<std::uint64_t>(rows * sizes.best);
      host.best_received = on_host.cut<std::uint64_t>(grid.size(parallel::kFeatureAxis) * slice_rows * sizes.best);
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
      const parallel::Range features = grid.part(parallel::kFeatureAxis, shape.n_features);
      const kernels::cuda::SelectionPlace place{.feature_ranks = grid.size(parallel::kFeatureAxis),
                                                .feature_index = grid.index(parallel::kFeatureAxis),
                                                .data_ranks = grid.size(parallel::kDataAxis),
                                                .data_index = grid.index(parallel::kDataAxis),
                                                .feature_begin = features.begin,
                                                .n_features_total = shape.n_features};
      if (grid.size(parallel::kFeatureAxis) > 1)
        shards_.emplace(grid.axis(parallel::kFeatureAxis), execution,
                        largest_message(settings, shape, sizes_, grid.shape()), shape.manner.way);
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

void Selection::observe(const parallel::ExchangeObserver* observer) {
  if (shards_) shards_->observe(observer);
  if (all_) all_->observe(observer);
  if (on_rank_0_) on_rank_0_->exchange().observe(observer);
}

/// The one place that says by which way a selection on the GPU reaches the other ranks.
kernels::cuda::SelectionExchange Selection::exchange() {
  return {.sum =
              [this](const kernels::Execution&, Array<std::int64_t> values) {
                in_pieces(values.size, [&](std::int64_t begin, std::int64_t size) {
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

void Selection::select(std::int64_t n_tokens_total, std::span<const Array<const float>> bias_of_layer,
                       const Producer& produce) {
  if (n_tokens_total < 1 || n_tokens_total > shape_.max_tokens)
    throw error(ExitCode::internal, "a batch of {} tokens was given to a selection for at most {}", n_tokens_total,
                shape_.max_tokens);
  WEFT_ASSERT(static_cast<std::int64_t>(bias_of_layer.size()) == shape_.n_layers);
  Batch batch;
  batch.n_tokens = grid_.part(parallel::kDataAxis, n_tokens_total).size();
  batch.features = grid_.part(parallel::kFeatureAxis, shape_.n_features);
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
}  // namespace weft::transcoder
