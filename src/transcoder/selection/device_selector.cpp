// SPDX-License-Identifier: Apache-2.0
#include "transcoder/selection/device_selector.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>

#include "kernels/transcoder/select/select_cuda.hpp"
#include "parallel/device_communicator.hpp"

namespace weft::transcoder {
namespace {

using kernels::Array;
using kernels::cuda::DeviceSelection;
using kernels::cuda::SelectionRequest;
using kernels::cuda::ShardPosition;

/// Request for a rank with `n_features` features at `position`.
SelectionRequest request_for(const SelectionSpec& spec, const SelectionSizes& sizes, const ShardPosition& position,
                             std::int64_t n_features) {
  using kernels::SelectionRule;
  const Activation activation = spec.settings.activation;
  return {.rule = activation == Activation::batch_topk ? SelectionRule::batch_topk
                  : activation == Activation::topk     ? SelectionRule::topk
                                                       : SelectionRule::relu,
          .all_layers = spec.settings.scope == Scope::all_layers,
          .n_tokens = sizes.max_tokens,
          .n_layers = spec.shape.n_layers,
          .n_features = n_features,
          .budget = !kernels::activation_keeps_k(activation)
                        ? sizes.capacity
                        : selection_budget(spec.settings, spec.shape.n_layers, spec.shape.max_tokens),
          .product = spec.product(),
          .tile_tokens = sizes.tile_tokens,
          .tile_features = sizes.tile_features,
          .follows = spec.shape.follows,
          .position = position};
}

/// Largest number of bytes that a rank exchanges on the feature axis in one call.
std::int64_t largest_message(const SelectionSpec& spec, const SelectionSizes& sizes) {
  const std::int64_t n_shards = spec.grid.size(parallel::kFeatureAxis);
  switch (spec.settings.activation) {
    case Activation::batch_topk:
      return n_shards * std::max(sizes.n_groups * sizes.max_tokens, spec.shape.n_layers) * 4;
    case Activation::topk:
      return n_shards * parallel::largest_part(sizes.max_tokens, n_shards) * sizes.n_groups *
             selection_budget(spec.settings, spec.shape.n_layers, spec.shape.max_tokens) * 8;
    case Activation::relu:
    case Activation::jumprelu:
      return 0;
  }
  return 0;
}

struct SelectorArrays {
  SelectorArrays(const SelectionSpec& spec, const SelectionSizes& sizes, kernels::Workspace& device,
                 kernels::Workspace&) {
    const ShardPosition position{.feature_ranks = spec.grid.size(parallel::kFeatureAxis),
                                 .data_ranks = spec.grid.size(parallel::kDataAxis),
                                 .n_features_total = spec.shape.n_features};
    workspace = device.take<std::byte>(
        DeviceSelection::workspace_bytes(request_for(spec, sizes, position, sizes.max_features)));
  }
  Array<std::byte> workspace;
};

class DeviceSelector final : public Selector {
 public:
  DeviceSelector(const SelectionSpec& spec, const SelectionSizes& sizes, const parallel::Grid& grid,
                 const kernels::Execution& execution, const SumDecorator& decorate)
      : Selector(spec, sizes, grid, execution), arrays_(spec, sizes) {
    const parallel::Range features = grid.part(parallel::kFeatureAxis, spec.shape.n_features);
    const ShardPosition position{.feature_ranks = grid.size(parallel::kFeatureAxis),
                                 .feature_index = grid.index(parallel::kFeatureAxis),
                                 .data_ranks = grid.size(parallel::kDataAxis),
                                 .data_index = grid.index(parallel::kDataAxis),
                                 .feature_begin = features.begin,
                                 .n_features_total = spec.shape.n_features};
    const parallel::ExchangeStrategy strategy = spec.shape.exchange;
    if (position.feature_ranks > 1)
      shards_.emplace(grid.axis(parallel::kFeatureAxis), execution, largest_message(spec, sizes), strategy);
    all_.emplace(grid.all_on_an_axis(), execution, 0, strategy);
    selection_.emplace(request_for(spec, sizes, position, features.size()), arrays_->workspace, execution,
                       exchange(decorate));
  }

  ControllerState controller_state() override {
    if (spec_.settings.activation != Activation::batch_topk) return {};
    return {selection_->thresholds(), true};
  }
  void report_faults_to(std::int32_t* fault) override { fault_ = fault; }
  std::string first_fault() override {
    using kernels::cuda::SelectionFailure;
    const SelectionFailure failure = selection_->first_failure(execution_);
    if (failure.kind == SelectionFailure::none) return {};
    const bool one_list = sizes_.n_groups == 1 || !kernels::activation_keeps_k(spec_.settings.activation);
    const std::string where = one_list ? "all layers together" : fmt::format("layer {}", failure.group);
    if (failure.kind == SelectionFailure::overflow)
      return fmt::format("{}: {} pre-activations passed the filter, the list holds {}", where, failure.entries,
                         failure.capacity);
    return fmt::format(
        "{}: no threshold was found in {} passes over the pre-activations, {} passed the last filter, the "
        "list holds {}",
        where, failure.passes, failure.entries, failure.capacity);
  }

  bool forms_products() const override { return selection_->forms_products(); }
  parallel::Exchanges exchanges() const override {
    parallel::Exchanges all;
    if (shards_) all += shards_->exchanges();
    all += all_->exchanges();
    return all;
  }
  void observe(const parallel::ExchangeObserver* observer) override {
    if (shards_) shards_->observe(observer);
    all_->observe(observer);
  }
  void mark(device::IdleClock* idle) override {
    if (shards_) shards_->mark(idle);
    all_->mark(idle);
  }
  void take(const kernels::Execution& where, const TileRequest& tile, kernels::AnyMatrix product) override {
    selection_->take(where, {tile.layer, tile.token_begin, tile.token_count, tile.feature_begin, tile.feature_count},
                     product);
  }
  void finish() override { selection_->finish(execution_, activations()); }

 private:
  void begin() override { selection_->begin(execution_, followed_.n_tokens, followed_.budget, followed_.bias); }
  void select_batch(const Batch& batch) override {
    const std::int64_t budget = kernels::activation_keeps_k(spec_.settings.activation) ? batch.budget : sizes_.capacity;
    selection_->select(
        execution_, batch.n_tokens, budget, batch.bias,
        [&](const kernels::Execution& where, const kernels::cuda::TileRange& tile, kernels::AnyMatrix product) {
          (*batch.produce)(
              where, {tile.layer, tile.token_begin, tile.token_count, tile.feature_begin, tile.feature_count}, product);
        },
        activations(), fault_, batch.cut, batch.operands);
  }

  void read_statistics() override {
    const kernels::cuda::SelectionReport report = selection_->report(execution_);
    statistics_.threshold = report.threshold;
    statistics_.passes = report.passes;
    statistics_.ties_cut = report.ties_cut;
  }

  /// Collectives of the selection; they run on the execution's stream, with which the communicators were made.
  kernels::cuda::SelectionExchange exchange(const SumDecorator& decorate) {
    const SumOverRanks sum = decorate([this](Array<std::int64_t> values) { all_->sum(values, kName); });
    return {.sum = [sum](const kernels::Execution&, Array<std::int64_t> values) { sum(values); },
            .all_gather = [this](const kernels::Execution&, void* data,
                                 std::span<const std::int64_t> bytes) { shards_->all_gather(data, bytes, kName); },
            .all_gather_if = [this](const kernels::Execution&, const std::uint32_t* needed,
                                    Array<std::uint32_t> data) { shards_->all_gather_if(needed, data, kName); },
            .all_to_all =
                [this](const kernels::Execution&, const void* send, std::span<const std::int64_t> send_bytes,
                       void* receive, std::span<const std::int64_t> receive_bytes) {
                  shards_->all_to_all(send, send_bytes, receive, receive_bytes, kName);
                }};
  }

  PlacedArrays<SelectorArrays> arrays_;
  std::int32_t* fault_ = nullptr;
  std::optional<parallel::DeviceCommunicator> shards_, all_;  // the feature axis; all ranks
  std::optional<DeviceSelection> selection_;
};

}  // namespace

void add_device_selector_bytes(const SelectionSpec& spec, SelectionSizes& sizes) {
  const std::int64_t before = sizes.device_bytes;
  PlacedArrays<SelectorArrays>::add_bytes(spec, sizes);
  sizes.on_gpu_bytes = sizes.device_bytes - before;
  for (const auto& bytes :
       {parallel::DeviceCommunicator::bytes(spec.grid.size(parallel::kFeatureAxis), largest_message(spec, sizes)),
        parallel::DeviceCommunicator::bytes(spec.grid.ranks(), 0)}) {
    sizes.device_bytes += bytes.device();
    sizes.host_bytes += bytes.staging;
  }
}

std::unique_ptr<Selector> make_device_selector(const SelectionSpec& spec, const SelectionSizes& sizes,
                                               const parallel::Grid& grid, const kernels::Execution& execution,
                                               const SumDecorator& decorate) {
  return std::make_unique<DeviceSelector>(spec, sizes, grid, execution, decorate);
}

}  // namespace weft::transcoder
