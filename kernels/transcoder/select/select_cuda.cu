// SPDX-License-Identifier: Apache-2.0
//
// Launches the kernels of a selection in order: select_pass_cuda.cuh (passes over the tiles), select_rows_cuda.cuh
// (from the list to rows); select_topk_cuda.cuh is for topk only. Steps that only several ranks need are skipped for
// one. Sizes and workspace: select_layout_cuda.cuh.
#include <algorithm>
#include <memory>
#include <utility>

#include "base/error.hpp"
#include "kernels/transcoder/select/graph_loop_cuda.hpp"
#include "kernels/transcoder/select/hopper_filter.hpp"
#include "kernels/transcoder/select/select_cuda.hpp"
#include "kernels/transcoder/select/select_layout_cuda.cuh"
#include "kernels/transcoder/select/select_pass_cuda.cuh"
#include "kernels/transcoder/select/select_rows_cuda.cuh"
#include "kernels/transcoder/select/select_topk_cuda.cuh"
#include "kernels/warp_cuda.cuh"
#include "kernels/workspace.hpp"

namespace weft::kernels::cuda {
namespace {

struct FreeHost {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};

}  // namespace

struct DeviceSelection::Parts {
  Parts(const SelectionRequest& for_request, Array<std::byte> memory, SelectionExchange collectives)
      : request(for_request), exchange(std::move(collectives)) {
    Workspace workspace(memory.data);
    layout = lay_out(request, workspace);
    Control* control = nullptr;
    require(cudaMallocHost(&control, sizeof(Control)), "selection on the GPU, page-locked memory");
    control_on_host.reset(control);
  }

  SelectionRequest request;
  SelectionExchange exchange;
  Layout layout;
  struct {
    View view{};
    LayerBias bias{};
    std::int64_t budget = 0;
  } followed;                // arguments of `begin`
  bool formed_here = false;  // the last `select` formed its products itself
  GraphLoop graph_loop;
  std::unique_ptr<Control, FreeHost> control_on_host;  // page-locked

  bool relu() const { return request.rule == SelectionRule::relu; }
  bool topk() const { return request.rule == SelectionRule::topk; }

  template <class Function>
  void with_type(Function&& function) const {
    if (request.product == Scalar::bf16)
      function(bf16{});
    else
      function(float{});
  }

  template <class T, int kWarpsPerRow>
  void launch_filter(const View& view, const Piece& piece, cudaStream_t stream) const {
    const auto blocks = static_cast<unsigned>(divide_up(piece.rows, kWarps / kWarpsPerRow * kShared));
    filter_tile<T, kWarpsPerRow><<<blocks, kThreads, 0, stream>>>(view, piece, relu());
  }

  template <class T>
  void filter(const View& view, const Piece& piece, cudaStream_t stream) const {
    // Vectors per warp: enough to keep loads in flight; few enough that a row of many entries, which its warp reads
    // twice, does not hold up the whole block in narrow tiles (shards of the features).
    constexpr std::int64_t per_warp = 128;
    const std::int64_t vectors = divide_up(piece.columns, Vector<T>::kSize);
    if (vectors > 4 * per_warp)
      launch_filter<T, 8>(view, piece, stream);
    else if (vectors > 2 * per_warp)
      launch_filter<T, 4>(view, piece, stream);
    else if (vectors > per_warp)
      launch_filter<T, 2>(view, piece, stream);
    else
      launch_filter<T, 1>(view, piece, stream);
  }

  template <class T>
  void consume(const View& view, const Piece& piece, bool first, std::int64_t budget, cudaStream_t stream) const {
    if (topk()) {
      const int room = topk_room(budget);
      const bool first_of_group = piece.block == 0 && (piece.layer == 0 || !view.all_layers);
      const std::size_t bytes = static_cast<std::size_t>(room) * sizeof(Count);
      const auto kernel = view.largest != nullptr ? keep_best<bf16, true> : keep_best<T, false>;
      allow_shared_memory(reinterpret_cast<const void*>(kernel), static_cast<std::int64_t>(bytes), "selection: topk");
      kernel<<<static_cast<unsigned>(piece.rows), kThreads, bytes, stream>>>(view, piece, first_of_group,
                                                                             static_cast<int>(budget), room);
      return;
    }
    filter<T>(view, piece, stream);
    if (!first) {
      const auto blocks = blocks_for(piece.rows, kWarps, 8 * multiprocessors());
      survey_tile<T><<<blocks, kThreads, 0, stream>>>(view, piece);
    }
  }

  /// Limit: type of a limit in memory; void: the product's type.
  template <class Limit = void>
  void begin(const View& view, const LayerBias& bias, const LayerBias& bounds, std::int64_t budget, bool first,
             cudaStream_t stream) const {
    const Count wanted = relu() ? kNoBudget : static_cast<Count>(budget);
    const bool clears = view.block_features < Sizes(request).tile_features;
    with_type([&](auto type) {
      using T = decltype(type);
      begin_pass<T, std::conditional_t<std::is_void_v<Limit>, T, Limit>>
          <<<2 * multiprocessors(), kThreads, 0, stream>>>(view, bias, bounds, first, clears, wanted, relu());
    });
    if (view.open != nullptr) find_open<<<static_cast<unsigned>(view.n_layers), 1024, 0, stream>>>(view, bias);
  }

  Piece piece_of(const View& view, const TileRange& range, const void* products, std::int64_t stride,
                 const LayerBias& bias, const LayerBias& bounds) const {
    const float* const of_layer = bounds.layer[range.layer];
    return {products,
            stride,
            range.token_count,
            range.token_begin,
            range.feature_begin,
            static_cast<int>(range.feature_count),
            static_cast<int>(range.layer),
            static_cast<int>(range.feature_begin / view.block_features),
            bias.layer[range.layer] + range.feature_begin,
            of_layer != nullptr ? of_layer + range.feature_begin : nullptr};
  }

  /// Computes all tiles and reads them once.
  void pass(const Execution& execution, const View& view, const LayerBias& bias, const LayerBias& bounds,
            std::int64_t budget, const Producer& producer, bool first) const {
    const Sizes sizes(request);
    const auto stream = stream_of(execution);
    begin(view, bias, bounds, budget, first, stream);
    for (std::int64_t layer = 0; layer < request.n_layers; ++layer)
      for (std::int64_t block = 0; block < sizes.blocks; ++block)
        for (std::int64_t token = 0; token < view.n_tokens; token += sizes.tile_tokens) {
          TileRange range{layer, token, std::min(sizes.tile_tokens, view.n_tokens - token), block * sizes.tile_features,
                          0};
          range.feature_count = std::min(sizes.tile_features, request.n_features - range.feature_begin);
          const std::int64_t stride = round_up(range.feature_count, 8);
          producer(execution, range, {layout.tile, request.product, range.token_count, range.feature_count, stride});
          const Piece piece = piece_of(view, range, layout.tile, stride, bias, bounds);
          with_type([&](auto type) { consume<decltype(type)>(view, piece, first, budget, stream); });
        }
    require(cudaGetLastError(), "selection on the GPU, pass over the tiles");
  }

  /// Runs the first pass, whose products are filtered as they are formed.
  void form_and_filter(const Execution& execution, const View& view, const LayerBias& bias, const LayerBias& bounds,
                       std::int64_t budget, const EncoderOperands& operands) const {
    begin<float>(view, bias, bounds, budget, true, stream_of(execution));
    static_assert(sizeof(Group) % sizeof(Count) == 0);
    HopperFilter filter{.limit = static_cast<const float*>(view.limit),
                        .bias = bias.layer,
                        .bounds = bounds.layer[0] != nullptr ? bounds.layer : nullptr,
                        .padded_features = view.padded_features,
                        .threshold = relu() ? nullptr : view.threshold,
                        .cursor = &view.group->cursor,
                        .cursor_stride = sizeof(Group) / sizeof(Count),
                        .capacity = view.capacity,
                        .key = view.key,
                        .value = view.value,
                        .segment = view.segment,
                        .all_layers = view.all_layers};
    for (std::size_t i = 0;; ++i) {
      const EncoderOperands::Part part = operands.arrive(execution, i);
      if (part.layer_begin == part.layer_end) break;
      filter.segment = view.segment + part.token_begin * view.n_layers * view.n_blocks;
      filter_hopper_products(execution, {operands.x.rows_from(part.token_begin, part.token_count), operands.weight, {}},
                             part.layer_begin, part.layer_end, filter);
    }
  }

  /// Replaces `values` by their sums over all ranks, in place.
  void sum(const Execution& execution, Count* values, std::int64_t n) const {
    exchange.sum(execution, {reinterpret_cast<std::int64_t*>(values), n});
  }

  /// First of the n tokens that belong to a feature shard's slice.
  std::int64_t slice_begin(std::int64_t n, std::int64_t shard) const {
    return shard * n / request.position.feature_ranks;
  }

  /// Cuts the lists to the best entries over all shards: each shard receives all lists of a slice of the tokens and
  /// returns a cut-off for each.
  void cut_to_best_of_all_shards(const Execution& execution, const View& view, std::int64_t budget) const {
    const auto stream = stream_of(execution);
    const std::int64_t n_shards = request.position.feature_ranks, shard = request.position.feature_index;
    const std::int64_t first = slice_begin(view.n_tokens, shard) * view.n_groups;
    const std::int64_t rows = slice_begin(view.n_tokens, shard + 1) * view.n_groups - first;
    const std::int64_t row_bytes = view.most * static_cast<std::int64_t>(sizeof(Count));
    std::vector<std::int64_t> sent, cut_offs;
    for (std::int64_t i = 0; i < n_shards; ++i) {
      const std::int64_t of_slice = (slice_begin(view.n_tokens, i + 1) - slice_begin(view.n_tokens, i)) * view.n_groups;
      sent.push_back(of_slice * row_bytes);
      cut_offs.push_back(of_slice * static_cast<std::int64_t>(sizeof(Count)));
    }
    const std::vector<std::int64_t> received(static_cast<std::size_t>(n_shards), rows * row_bytes);
    exchange.all_to_all(execution, view.word, sent, layout.received, received);
    if (rows > 0)
      find_cut_offs<<<static_cast<unsigned>(divide_up(rows, kWarps)), kThreads, 0, stream>>>(
          layout.received, view.n_shards, rows, view.most, static_cast<int>(budget), layout.cut_off + first);
    exchange.all_gather(execution, layout.cut_off, cut_offs);
    const std::int64_t lists = view.n_tokens * view.n_groups;
    if (lists > 0)
      cut_lists<<<static_cast<unsigned>(divide_up(lists, kThreads)), kThreads, 0, stream>>>(view, layout.cut_off);
  }

  void finish(const Execution& execution, const View& view, std::int64_t budget, const SparseActivations& out) const {
    const auto stream = stream_of(execution);
    const auto groups = static_cast<unsigned>(view.n_groups);
    if (topk()) {
      if (request.position.feature_ranks > 1) cut_to_best_of_all_shards(execution, view, budget);
      make_offsets<<<1, 1024, 0, stream>>>(view, out.row_offsets.data);
      if (view.n_tokens > 0)
        take_best<<<static_cast<unsigned>(view.n_tokens), 128,
                    static_cast<std::size_t>(round_up(budget, 4)) * sizeof(std::uint32_t), stream>>>(view, out);
    } else {
      const unsigned per_group = std::max(1u, static_cast<unsigned>(multiprocessors()) / groups);
      const auto token_blocks = static_cast<unsigned>(std::max<std::int64_t>(1, divide_up(view.n_tokens, kWarps)));
      if (!relu())
        for (int round = 0; round < kHistogramRounds; ++round) {
          search<<<dim3(per_group, groups), 512, 0, stream>>>(view, round);
          if (!view.several) continue;
          if (round == kHistogramRounds - 1)
            sum(execution, view.last_round, std::int64_t{view.n_slices} * view.n_groups * kLastBins);
          else
            sum(execution, view.histogram + static_cast<std::int64_t>(round) * view.n_groups * kHistogramBins,
                view.n_groups * static_cast<std::int64_t>(kHistogramBins));
          choose_bin<<<groups, 512, 0, stream>>>(view, round);
        }
      const unsigned counters = groups * 2 + (view.several ? static_cast<unsigned>(view.n_layers) : 0u);
      count_entries<<<token_blocks, kThreads, kWarps * counters * sizeof(std::uint32_t), stream>>>(view);
      const auto gather_if_cut = [&](std::uint32_t* all, std::int64_t piece) {
        if (view.several && view.n_shards > 1)
          exchange.all_gather_if(execution, &view.control->cuts_here, {all, view.n_shards * piece});
      };
      gather_if_cut(view.tied_of_shard, view.n_groups * view.n_tokens);
      admit_ties<<<groups, 1024, 0, stream>>>(view);
      gather_if_cut(view.cut_tie, view.n_layers);
      make_offsets<<<1, 1024, 0, stream>>>(view, out.row_offsets.data);
      write_rows<<<token_blocks, kThreads, 0, stream>>>(view, out);
    }
    require(cudaGetLastError(), "selection on the GPU, rows");
  }
};

std::int64_t DeviceSelection::workspace_bytes(const SelectionRequest& request) {
  check_request(request);
  Workspace workspace(nullptr);
  lay_out(request, workspace);
  return workspace.bytes();
}

DeviceSelection::DeviceSelection(const SelectionRequest& request, Array<std::byte> workspace,
                                 const Execution& execution, SelectionExchange exchange) {
  if (workspace.size < workspace_bytes(request))
    throw Error(ExitCode::internal, "selection on the GPU: the workspace is too small");
  parts_ = std::make_unique<Parts>(request, workspace, std::move(exchange));
  const View& view = parts_->layout.view;
  set_thresholds<<<1, 128, 0, stream_of(execution)>>>(view.threshold, view.n_groups, kUnknown);
  require(cudaMemsetAsync(view.control, 0, sizeof(Control), stream_of(execution)),
          "selection on the GPU, initial state");
  // Vectors are read up to the padding of a row, which is never selected. Cleared once: no read of undefined memory.
  const Sizes sizes(request);
  if (!request.follows)
    require(cudaMemsetAsync(parts_->layout.tile, 0,
                            static_cast<std::size_t>(sizes.tile_tokens * sizes.tile_stride * bytes_of(request.product)),
                            stream_of(execution)),
            "selection on the GPU, initial state");
  require(cudaGetLastError(), "selection on the GPU, initial state");
}

DeviceSelection::~DeviceSelection() = default;

void DeviceSelection::select(const Execution& execution, std::int64_t n_tokens, std::int64_t budget,
                             std::span<const Array<const float>> bias_of_layer, const Producer& produce,
                             const SparseActivations& activations, std::int32_t* fault,
                             std::span<const Array<const float>> bounds_of_layer, const EncoderOperands* operands) {
  const SelectionRequest& request = parts_->request;
  const std::int64_t fewest = request.position.data_ranks > 1 ? 0 : 1;
  if (n_tokens < fewest || n_tokens > request.n_tokens || budget < 1 ||
      (request.rule != SelectionRule::relu && budget > request.budget) ||
      static_cast<std::int64_t>(bias_of_layer.size()) != request.n_layers ||
      (!bounds_of_layer.empty() && (!parts_->relu() || bounds_of_layer.size() != bias_of_layer.size())))
    throw Error(ExitCode::internal, "selection on the GPU: the batch does not fit the request");
  const auto stream = stream_of(execution);
  View view = parts_->layout.view;
  view.n_tokens = n_tokens;
  view.fault = fault;
  if (view.several) view.tied = view.tied_of_shard + view.shard * view.n_groups * n_tokens;
  LayerBias bias{}, bounds{};
  for (std::size_t layer = 0; layer < bias_of_layer.size(); ++layer) bias.layer[layer] = bias_of_layer[layer].data;
  for (std::size_t layer = 0; layer < bounds_of_layer.size(); ++layer)
    bounds.layer[layer] = bounds_of_layer[layer].data;

  const Sizes sizes(request);
  const bool supported = operands != nullptr && takes_hopper_filter(*operands);
  const bool formed_here = parts_->formed_here = supported && sizes.formed_here;
  const bool parts_known = supported && sizes.parts > 0;
  if (!parts_known) view.largest = nullptr;
  const Producer form = [&](const Execution& where, const TileRange& tile, AnyMatrix product) {
    const AnyMatrix weight = operands->weight[static_cast<std::size_t>(tile.layer)];
    PartsOfRows parts;
    if (parts_known) {
      operands->arrive_layer(where, tile.layer);
      parts = {view.bias + tile.layer * view.padded_features, view.largest};
    }
    store_hopper_products(where,
                          operands->x.rows_from(tile.token_begin, tile.token_count)
                              .columns_from(tile.layer * weight.columns, weight.columns),
                          weight.rows_from(tile.feature_begin, tile.feature_count), product, parts);
    if (parts_known) operands->arrive_layer(where, request.n_layers);
  };
  const Producer& producer = formed_here || parts_known ? form : produce;
  if (formed_here) {
    view.block_features = kHopperFeatures;
    view.n_blocks = static_cast<int>(divide_up(request.n_features, kHopperFeatures));
    parts_->form_and_filter(execution, view, bias, bounds, budget, *operands);
  } else {
    parts_->pass(execution, view, bias, bounds, budget, producer, true);
  }
  if (!parts_->topk()) {
    if (view.several) {
      report_pass<<<1, kMostLayers, 0, stream>>>(view);
      parts_->sum(execution, &view.agreement->passed, view.n_groups * kAgreementCounts);
    }
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    require(cudaStreamIsCapturing(stream, &status), "selection on the GPU, state of the capture");
    const bool relu = parts_->relu();
    if (status == cudaStreamCaptureStatusActive) {
      const cudaGraphConditionalHandle loop = GraphLoop::condition(stream);
      decide<<<1, 1024, 0, stream>>>(view, relu, true, loop);
      parts_->graph_loop.capture(stream, loop, [&](cudaStream_t inside) {
        const Execution body{execution.backend, inside};
        parts_->pass(body, view, bias, bounds, budget, producer, false);
        decide<<<1, 1024, 0, inside>>>(view, relu, true, loop);
      });
    } else {
      for (;;) {
        decide<<<1, 1024, 0, stream>>>(view, relu, false, cudaGraphConditionalHandle{});
        require(cudaMemcpyAsync(parts_->control_on_host.get(), view.control, sizeof(Control), cudaMemcpyDeviceToHost,
                                stream),
                "selection on the GPU, decision on another pass");
        require(cudaStreamSynchronize(stream), "selection on the GPU, pass over the tiles");
        if (parts_->control_on_host->again == 0) break;
        parts_->pass(execution, view, bias, bounds, budget, producer, false);
      }
    }
  }
  parts_->finish(execution, view, budget, activations);
}

void DeviceSelection::begin(const Execution& execution, std::int64_t n_tokens, std::int64_t budget,
                            std::span<const Array<const float>> bias_of_layer) {
  const SelectionRequest& request = parts_->request;
  const std::int64_t fewest = request.position.data_ranks > 1 ? 0 : 1;
  if (!request.follows || n_tokens < fewest || n_tokens > request.n_tokens || budget < 1 || budget > request.budget ||
      static_cast<std::int64_t>(bias_of_layer.size()) != request.n_layers)
    throw Error(ExitCode::internal, "selection on the GPU: the batch does not fit the request");
  auto& followed = parts_->followed;
  followed = {.view = parts_->layout.view, .bias = {}, .budget = budget};
  followed.view.n_tokens = n_tokens;
  for (std::size_t layer = 0; layer < bias_of_layer.size(); ++layer)
    followed.bias.layer[layer] = bias_of_layer[layer].data;
  parts_->begin(followed.view, followed.bias, {}, budget, true, stream_of(execution));
}

void DeviceSelection::take(const Execution& execution, const TileRange& range, AnyMatrix product) {
  const auto& followed = parts_->followed;
  const Piece piece = parts_->piece_of(followed.view, range, product.data, product.stride, followed.bias, {});
  parts_->with_type([&](auto type) {
    parts_->consume<decltype(type)>(followed.view, piece, true, followed.budget, stream_of(execution));
  });
  require(cudaGetLastError(), "selection on the GPU, tile of another selection");
}

void DeviceSelection::finish(const Execution& execution, const SparseActivations& activations) {
  parts_->finish(execution, parts_->followed.view, parts_->followed.budget, activations);
}

bool DeviceSelection::forms_products() const { return parts_->formed_here; }

Array<std::uint32_t> DeviceSelection::thresholds() const {
  return {parts_->layout.view.threshold, parts_->layout.view.n_groups};
}

SelectionFailure DeviceSelection::first_failure(const Execution& execution) const {
  SelectionFailure failure;
  const auto stream = stream_of(execution);
  require(
      cudaMemcpyAsync(&failure, &parts_->layout.view.control->first, sizeof failure, cudaMemcpyDeviceToHost, stream),
      "selection on the GPU, failure");
  require(cudaStreamSynchronize(stream), "selection on the GPU, failure");
  return failure;
}

SelectionStatistics DeviceSelection::statistics(const Execution& execution) const {
  const auto stream = stream_of(execution);
  const View& view = parts_->layout.view;
  std::vector<Group> groups(static_cast<std::size_t>(view.n_groups));
  Control control{};
  require(cudaMemcpyAsync(groups.data(), view.group, groups.size() * sizeof(Group), cudaMemcpyDeviceToHost, stream),
          "selection on the GPU, statistics");
  require(cudaMemcpyAsync(&control, view.control, sizeof control, cudaMemcpyDeviceToHost, stream),
          "selection on the GPU, statistics");
  require(cudaStreamSynchronize(stream), "selection on the GPU, statistics");
  SelectionStatistics result;
  result.passes = control.passes;
  result.overflow = control.failed == SelectionFailure::overflow;
  if (control.failed == SelectionFailure::unsettled)
    throw Error(ExitCode::internal, "selection on the GPU: a tile had other bits when it was computed again");
  for (const Group& group : groups) {
    result.threshold.push_back(bits_float(group.kth));
    result.candidates.push_back(static_cast<std::int64_t>(group.cursor));
    result.ties_cut += static_cast<std::int64_t>(group.ties_cut);
  }
  return result;
}

}  // namespace weft::kernels::cuda
