// SPDX-License-Identifier: Apache-2.0
//
// Checks a selection request and derives the sizes of tiles and lists and their places in the workspace. Included by
// select_cuda.cu only.
#pragma once

#include <algorithm>
#include <string>

#include "base/error.hpp"
#include "kernels/transcoder/select/hopper_filter.hpp"
#include "kernels/transcoder/select/select_request.hpp"
#include "kernels/transcoder/select/select_topk_cuda.cuh"
#include "kernels/transcoder/select/select_view_cuda.cuh"
#include "kernels/workspace.hpp"

namespace weft::kernels::cuda {
namespace {

/// Products are filtered as they are formed only if at most one in this many is selected: few are listed then.
constexpr std::int64_t kHopperSparsity = 32;

constexpr std::int64_t round_up(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }
constexpr std::int64_t divide_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

std::int64_t total_features(const SelectionRequest& request) {
  return request.position.n_features_total > 0 ? request.position.n_features_total : request.n_features;
}

/// Sizes derived from a request.
struct Sizes {
  std::int64_t groups, tile_tokens, tile_features, tile_stride, blocks, padded_features, capacity, most, ranks;
  std::int64_t segments;  // the largest number of segments of a token in a layer
  std::int64_t parts;     // topk: parts of a row whose largest keys the kernel that forms products finds; 0: none
  bool formed_here;       // products may be filtered as they are formed (hopper_filter.hpp), if the GPU can

  explicit Sizes(const SelectionRequest& request) {
    groups = request.all_layers || request.rule == SelectionRule::relu ? 1 : request.n_layers;
    tile_tokens = request.tile_tokens > 0 ? std::min(request.tile_tokens, request.n_tokens) : request.n_tokens;
    tile_features = request.tile_features > 0 ? std::min(round_up(request.tile_features, 8), request.n_features)
                                              : request.n_features;
    tile_stride = round_up(tile_features, 8);
    blocks = tile_features > 0 ? divide_up(request.n_features, tile_features) : 0;
    ranks = request.position.feature_ranks * request.position.data_ranks;
    // With longer lists, stored products are faster. A segment has kHopperFeatures features, a tile at least one
    // segment.
    const std::int64_t listed_here =
        request.rule == SelectionRule::relu ? request.budget : request.budget * groups / ranks;
    formed_here = request.rule != SelectionRule::topk && request.product == Scalar::bf16 &&
                  listed_here <= request.n_tokens * request.n_layers * request.n_features / kHopperSparsity &&
                  (blocks <= 1 || tile_features >= kHopperFeatures);
    segments = formed_here ? std::max(blocks, divide_up(request.n_features, kHopperFeatures)) : blocks;
    parts = divide_up(request.n_features, kHopperPart);
    // With fewer parts, their largest keys would give a bound too far below the budget-th key.
    if (request.rule != SelectionRule::topk || request.product != Scalar::bf16 || request.follows || blocks != 1 ||
        parts < 2 * request.budget || parts > kMostParts)
      parts = 0;
    padded_features = round_up(request.n_features, formed_here || parts > 0 ? kHopperFeatures : 8);
    const std::int64_t group_entries = request.n_tokens * request.n_features * (request.n_layers / groups);
    // Room for one budget, in case all of it is on this rank, and twice this rank's share.
    const std::int64_t wanted = request.budget + divide_up(2 * request.budget, ranks) + 65536;
    capacity = std::min(group_entries, request.rule == SelectionRule::relu ? request.budget : wanted);
    most = 0;
    if (request.rule == SelectionRule::topk) {
      most = request.budget;
      capacity = 0;
    }
  }
};

struct Layout {
  View view{};
  std::byte* tile = nullptr;
  Count* received = nullptr;  // [shards, tokens of a slice, groups, most] lists of this rank's slice of the tokens
  Count* cut_off = nullptr;   // [tokens, groups]
};

Layout lay_out(const SelectionRequest& request, Workspace& workspace) {
  const Sizes sizes(request);
  const std::int64_t element = bytes_of(request.product);
  const bool topk = request.rule == SelectionRule::topk;
  Layout layout;
  View& view = layout.view;
  view.n_groups = static_cast<int>(sizes.groups);
  view.n_layers = static_cast<int>(request.n_layers);
  view.n_blocks = static_cast<int>(sizes.blocks);
  view.block_features = sizes.tile_features;
  view.all_layers = sizes.groups == 1 && request.n_layers > 1;
  view.n_tokens = request.n_tokens;
  view.n_features = request.n_features;
  view.padded_features = sizes.padded_features;
  view.capacity = sizes.capacity;
  view.most = sizes.most;
  view.n_ranks = static_cast<int>(sizes.ranks);
  view.n_shards = static_cast<int>(request.position.feature_ranks);
  view.shard = static_cast<int>(request.position.feature_index);
  view.n_slices = static_cast<int>(request.position.data_ranks);
  view.slice = static_cast<int>(request.position.data_index);
  view.several = sizes.ranks > 1 && request.rule == SelectionRule::batch_topk;
  view.n_features_total = static_cast<std::uint32_t>(total_features(request));
  view.feature_begin = static_cast<std::uint32_t>(request.position.feature_begin);
  view.threshold = workspace.take<std::uint32_t>(sizes.groups).data;
  view.control = workspace.take<Control>(1).data;
  view.group = workspace.take<Group>(sizes.groups).data;
  view.above = workspace.take<std::uint32_t>(sizes.groups * request.n_tokens).data;
  view.admit = workspace.take<std::uint32_t>(sizes.groups * request.n_tokens).data;
  const std::int64_t limits = request.n_layers * sizes.padded_features;
  if (topk) {
    view.bias = workspace.take<float>(limits).data;
    if (sizes.parts > 0) view.largest = workspace.take<float>(sizes.tile_tokens * sizes.parts).data;
    view.word = workspace.take<Count>(sizes.groups * request.n_tokens * sizes.most).data;
    if (request.follows) view.open = workspace.take<std::uint32_t>(request.n_layers).data;
    if (view.n_shards > 1) {
      const std::int64_t of_slice = divide_up(request.n_tokens, view.n_shards) * sizes.groups;
      layout.received = workspace.take<Count>(view.n_shards * of_slice * sizes.most).data;
      layout.cut_off = workspace.take<Count>(request.n_tokens * sizes.groups).data;
    }
  } else {
    view.limit = workspace.take<std::byte>(limits * (sizes.formed_here ? bytes_of(Scalar::fp32) : element)).data;
    view.histogram = workspace.take<Count>(kHistogramRounds * sizes.groups * kHistogramBins).data;
    view.key = workspace.take<std::uint32_t>(sizes.groups * sizes.capacity).data;
    view.value = workspace.take<float>(sizes.groups * sizes.capacity).data;
    view.segment = workspace.take<uint2>(request.n_tokens * request.n_layers * sizes.segments).data;
    view.survey = workspace.take<Count>(sizes.groups * kHistogramBins).data;
    view.tied =
        workspace.take<std::uint32_t>((view.several ? view.n_shards : 1) * sizes.groups * request.n_tokens).data;
    view.used = workspace.take<std::uint32_t>(sizes.groups * request.n_tokens).data;
    if (view.several) {
      view.agreement = workspace.take<Agreement>(sizes.groups).data;
      view.tied_of_shard = view.tied;
      view.tie = workspace.take<std::uint32_t>(request.n_tokens * request.n_layers).data;
      view.cut_tie = workspace.take<std::uint32_t>(view.n_shards * request.n_layers).data;
      view.last_round = workspace.take<Count>(view.n_slices * sizes.groups * kLastBins).data;
    }
  }
  layout.tile = workspace.take<std::byte>(request.follows ? 0 : sizes.tile_tokens * sizes.tile_stride * element).data;
  return layout;
}

void check_request(const SelectionRequest& request) {
  const auto refuse = [](const std::string& why) { throw Error(ExitCode::usage, "selection on the GPU: " + why); };
  const ShardPosition& position = request.position;
  if (position.feature_ranks < 1 || position.data_ranks < 1 || position.feature_index < 0 || position.data_index < 0 ||
      position.feature_index >= position.feature_ranks || position.data_index >= position.data_ranks)
    refuse("a rank must have a position in its grid");
  if (position.feature_ranks * position.data_ranks > kMostRanks)
    refuse("more than " + std::to_string(kMostRanks) + " ranks");
  if (request.n_tokens < 1 || request.n_layers < 1 || total_features(request) < 1 || request.budget < 1)
    refuse("tokens, layers, features and budget must be positive");
  if (request.n_features < 0 || position.feature_begin < 0 ||
      position.feature_begin + request.n_features > total_features(request))
    refuse("a rank's features must be among all");
  require_layers("selection on the GPU", static_cast<std::size_t>(request.n_layers));
  if (request.n_layers * total_features(request) > 0xffffffffll) refuse("more than 2^32 features in all layers");
  if (request.follows && request.rule != SelectionRule::topk) refuse("only topk follows another selection");
  if (request.product != Scalar::fp32 && request.product != Scalar::bf16) refuse("products must be fp32 or bf16");
  const Sizes sizes(request);
  if (sizes.groups * sizes.capacity > 0xffffffffll) refuse("lists of more than 2^32 entries");
  if (request.rule == SelectionRule::topk && request.budget > kMostPerToken)
    refuse("more than " + std::to_string(kMostPerToken) + " entries of a token in one group");
}

}  // namespace
}  // namespace weft::kernels::cuda
