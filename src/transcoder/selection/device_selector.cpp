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
          .n_layers = spec.n_layers,
          .n_features = n_features,
          .budget = !kernels::activation_keeps_k(activation)
                        ? sizes.capacity
                        : selection_budget(spec.settings, spec.n_layers, spec.max_tokens),
          .product = spec.product(),
          .tile_tokens = sizes.tile_tokens,
          .tile_features = sizes.tile_features,
          .follows = spec.follows,
          .position = position};
}

/// Largest number of bytes that a rank exchanges on the feature axis in one call.
std::int64_t largest_message(const SelectionSpec& spec, const SelectionSizes& sizes) {
  const std::int64_t n_shards = spec.grid.size(parallel::kFeatureAxis);
  switch (spec.settings.activation) {
    case Activation::batch_topk:
      return n_shards * std::max(sizes.n_groups * sizes.max_tokens, spec.n_layers) * 4;
    case Activation::topk:
      return n_shards * parallel::largest_part(sizes.max_tokens, n_shards) * sizes.n_groups *
             selection_budget(spec.settings, spec.n_layers, spec.max_tokens) * 8;
    default:  // every feature above a bound: nothing is exchanged
      return 0;
  }
}

class DeviceSelector final : public Selector {
 public:
  DeviceSelector(const SelectionSpec& spec, const SelectionBuffers& buffers, const parallel::Grid& grid,
                 const kernels::Execution& execution, const SumDecorator& decorate)
      : Selector(spec, buffers, grid, execution) {
    const parallel::Range features = grid.part(parallel::kFeatureAxis, spec.n_features);
    const ShardPosition position{.feature_ranks = grid.size(parallel::kFeatureAxis),
                                 .feature_index = grid.index(parallel::kFeatureAxis),
                                 .data_ranks = grid.size(parallel::kDataAxis),
                                 .data_index = grid.index(parallel::kDataAxis),
                                 .feature_begin = features.begin,
                                 .n_features_total = spec.n_features};
    const parallel::ExchangeStrategy strategy = spec.exchange;
    if (position.feature_ranks > 1)
      shards_.emplace(grid.axis(parallel::kFeatureAxis), execution, largest_message(spec, sizes()), strategy);
    all_.emplace(grid.all_on_an_axis(), execution, 0, strategy);
    selection_.emplace(request_for(spec, sizes(), position, features.size()), buffers.device, execution,
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
    const bool one_list = sizes().n_groups == 1 || !kernels::activation_keeps_k(spec_.settings.activation);
    const std::string where = one_list ? "all layers together" : fmt::format("layer {}", failure.group);
    if (failure.kind == SelectionFailure::overflow)
      return fmt::format("{}: {} pre-activations passed the filter, the list holds {}", where, failure.entries,
                         failure.capacity);
    return fmt::format(
        "{}: no threshold was found in {} passes over the pre-activations, {} passed the last filter, the "
        "list holds {}",
        where, failure.passes, failure.entries, failure.capacity);
  }

  bool is_on_device() const override { return true; }
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
  void take(const kernels::Execution& where, const kernels::TileRange& tile, kernels::AnyMatrix product) override {
    selection_->take(where, tile, product);
  }
  void finish() override { selection_->finish(execution_, activations()); }

 private:
  void begin() override { selection_->begin(execution_, followed_.n_tokens, followed_.budget, followed_.bias); }
  void select_batch(const Batch& batch) override {
    const std::int64_t budget =
        kernels::activation_keeps_k(spec_.settings.activation) ? batch.budget : sizes().capacity;
    selection_->select(execution_, batch.n_tokens, budget, batch.bias, *batch.produce, activations(), fault_,
                       batch.bounds, batch.operands);
  }

  void read_statistics() override {
    const std::int64_t entries = statistics_.entries;
    statistics_ = selection_->statistics(execution_);
    statistics_.entries = entries;
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

  std::int32_t* fault_ = nullptr;
  std::optional<parallel::DeviceCommunicator> shards_, all_;  // the feature axis; all ranks
  std::optional<DeviceSelection> selection_;
};

}  // namespace

void take_device_selector_buffers(const SelectionSpec& spec, SelectionBuffers& buffers, model::StepArena& arena) {
  const std::int64_t n_shards = spec.grid.size(parallel::kFeatureAxis);
  const ShardPosition largest{.feature_ranks = n_shards,
                              .data_ranks = spec.grid.size(parallel::kDataAxis),
                              .n_features_total = spec.n_features};
  buffers.device = arena.take<std::byte>(
      DeviceSelection::workspace_bytes(request_for(spec, buffers.sizes, largest, buffers.sizes.max_features)));
  arena.communicator(n_shards, largest_message(spec, buffers.sizes));
  arena.communicator(spec.grid.ranks(), 0);
}

std::unique_ptr<Selector> make_device_selector(const SelectionSpec& spec, const SelectionBuffers& buffers,
                                               const parallel::Grid& grid, const kernels::Execution& execution,
                                               const SumDecorator& decorate) {
  return std::make_unique<DeviceSelector>(spec, buffers, grid, execution, decorate);
}

}  // namespace weft::transcoder
