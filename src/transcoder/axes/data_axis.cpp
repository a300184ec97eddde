// SPDX-License-Identifier: Apache-2.0
#include "transcoder/axes/data_axis.hpp"

#include <algorithm>

#include "kernels/convert/convert_rows.hpp"
#include "kernels/transcoder/sparse/restrict.hpp"
#include "model/data_parallel.hpp"
#include "transcoder/axes/feature_axis.hpp"
#include "transcoder/selection/selection_sizes.hpp"

namespace weft::transcoder {
namespace {

SelectionSpec selection_of(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid) {
  return selection_spec(configuration, shape, grid, configuration.data.batch_tokens);
}

std::int64_t row_bytes(const Configuration& configuration, const Shape& shape) {
  return shape.width() * kernels::bytes_of(scalar_of(configuration.precision));
}

/// Bytes of the weights that a rank (the largest) updates for the other ranks of the data axis.
std::int64_t updated_bytes(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid) {
  std::int64_t bytes = 0;
  for (const model::ParameterSpec& spec : parameter_specs(shape)) {
    if (spec.update != model::Update::own_rows) continue;
    const std::int64_t held = parallel::largest_part(spec.rows(), grid.size(spec.cut.over)),
                       owned = parallel::largest_part(held, grid.size(parallel::kDataAxis));
    bytes += spec.is_matrix()
                 ? weight_bytes(spec.storage.value_or(configuration.optimizer.state), owned, spec.columns())
                 : 4 * owned;
  }
  return bytes;
}

/// Bytes of the largest matrix on the largest rank: what `gather_updated_rows` moves.
std::int64_t largest_matrix(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid) {
  std::int64_t largest = 0;
  for (const model::ParameterSpec& spec : parameter_specs(shape)) {
    if (spec.update != model::Update::own_rows || !spec.is_matrix()) continue;
    const std::int64_t held = parallel::largest_part(spec.rows(), grid.size(spec.cut.over));
    largest =
        std::max(largest, weight_bytes(spec.storage.value_or(configuration.optimizer.state), held, spec.columns()));
  }
  return largest;
}

/// Number of vectors that `gather_vectors` moves at a time: one per layer, or with offsets one per pair of layers.
std::int64_t vectors_together(const Shape& shape) {
  return shape.affine ? kernels::pair_of(shape.n_layers, shape.n_layers, shape.n_layers) : shape.n_layers;
}

/// Bytes of the largest message that the ranks of the data axis exchange within a step.
std::int64_t largest_message(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                             std::int64_t list_bytes) {
  return std::max(
      {configuration.data.batch_tokens * row_bytes(configuration, shape), grid.size(parallel::kDataAxis) * list_bytes,
       largest_matrix(configuration, shape, grid),
       4 * vectors_together(shape) * parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis))});
}

/// Capacities of the lists of active features, and of the dead ones that the auxiliary loss selects.
struct AllLists {
  std::int64_t active, dead;
};
AllLists list_bytes(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid) {
  const SelectionSpec active = selection_of(configuration, shape, grid);
  return {DataAxis::Lists(active).bytes(),
          configuration.transcoder.auxk > 0 ? DataAxis::Lists(dead_feature_selection(active)).bytes() : 0};
}

std::int64_t largest_message(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid) {
  const AllLists lists = list_bytes(configuration, shape, grid);
  return largest_message(configuration, shape, grid, std::max(lists.active, lists.dead));
}

}  // namespace

DataAxis::Lists::Lists(const SelectionSpec& spec)
    : offsets(parallel::largest_part(spec.max_tokens, spec.grid.size(parallel::kDataAxis)) + 1),
      entries(list_capacity(spec)) {}

DataAxis::Buffers::Buffers(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                           model::StepArena& arena) {
  const std::int64_t groups = grid.size(parallel::kDataAxis);
  if (groups == 1) return;
  const Lists lists(selection_of(configuration, shape, grid));
  const std::int64_t n_local = parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis)),
                     n_keys = shape.n_layers * parallel::largest_part(n_local, groups),
                     entries = capacity(configuration, shape, grid);
  arena.purpose("lists of the data axis");
  arena.communicator(groups, largest_message(configuration, shape, grid));
  arena.communicator(groups, largest_matrix(configuration, shape, grid));
  group_offsets = arena.take<std::int64_t>(groups * lists.offsets);
  group_key = arena.take<std::uint32_t>(groups * lists.entries);
  group_value = arena.take<float>(groups * lists.entries);
  row_offsets = arena.take<std::int64_t>(configuration.data.batch_tokens + 1);
  key = arena.take<std::uint32_t>(entries);
  value = arena.take<float>(entries);
  hit_offsets = arena.take<std::int64_t>(n_keys + 1);
  hit_token = arena.take<std::uint32_t>(entries);
  hit_position = arena.take<std::uint32_t>(entries);
  transpose_workspace = arena.take<std::byte>(kernels::transpose_workspace(arena.backend(), n_keys, entries));
  vectors = arena.take<float>(vectors_together(shape) * n_local);
}

std::int64_t DataAxis::capacity(const Configuration& configuration, const Shape& shape,
                                const parallel::GridShape& grid) {
  return owned_list_capacity(selection_of(configuration, shape, grid));
}

std::int64_t DataAxis::sent_bytes(const Configuration& configuration, const Shape& shape,
                                  const parallel::GridShape& grid) {
  const std::int64_t groups = grid.size(parallel::kDataAxis);
  if (groups == 1) return 0;
  const std::int64_t group = parallel::largest_part(configuration.data.batch_tokens, groups);
  const AllLists lists = list_bytes(configuration, shape, grid);
  std::int64_t bytes =
      2 * group * row_bytes(configuration, shape) + lists.active + updated_bytes(configuration, shape, grid);
  // Dead features add gradient rows, lists, and the biases by which they are selected.
  if (lists.dead > 0)
    bytes += group * row_bytes(configuration, shape) + lists.dead + 4 * shape.n_layers * largest_owned(shape, grid);
  return (groups - 1) * bytes;
}

DataAxis::DataAxis(const Configuration& configuration, const Model& model, const parallel::Grid& grid,
                   const kernels::Execution& execution, model::StepArena& arena)
    : model_(model),
      execution_(execution),
      ranks_(grid.axis(parallel::kDataAxis), execution, largest_message(configuration, model.shape(), grid.shape()),
             configuration.parallel.exchange),
      stream_(execution),
      overlapped_(grid.axis(parallel::kDataAxis), stream_.execution(),
                  largest_matrix(configuration, model.shape(), grid.shape()), configuration.parallel.exchange),
      buffers_(configuration, model.shape(), grid.shape(), arena) {
  if (!active()) return;
  hits_ = {{buffers_.hit_offsets.data, model.shape().n_layers * model.owned().size() + 1},
           buffers_.hit_token,
           buffers_.hit_position};
  device::zero(execution, hits_.offsets);  // also if this rank owns no feature
}

void DataAxis::gather_lists(const kernels::SparseActivations& of_group, std::int64_t n_tokens) {
  activations_ = {n_tokens,     model_.shape().n_layers, model_.owned().size(), buffers_.row_offsets,
                  buffers_.key, buffers_.value};
  gather_lists(of_group, n_tokens, {buffers_.group_offsets, buffers_.group_key, buffers_.group_value}, activations_);
}

void DataAxis::gather_lists(const kernels::SparseActivations& of_group, std::int64_t n_tokens, const GroupLists& all,
                            const kernels::SparseActivations& out) {
  const auto gather = [this](const auto* from, auto to) {
    const std::int64_t bytes = to.size * static_cast<std::int64_t>(sizeof *to.data) / ranks_.size();
    ranks_.all_gather(from, to.data, std::vector<std::int64_t>(static_cast<std::size_t>(ranks_.size()), bytes),
                      "lists");
  };
  gather(of_group.row_offsets.data, all.offsets);
  gather(of_group.key.data, all.key);
  gather(of_group.value.data, all.value);
  const std::int64_t offsets = all.offsets.size / ranks_.size(), entries = all.key.size / ranks_.size();
  std::vector<kernels::SparseActivations> groups;
  for (std::int64_t r = 0; r < ranks_.size(); ++r) {
    const std::int64_t n_group = parallel::part(n_tokens, ranks_.size(), r).size();
    groups.push_back({n_group,
                      model_.shape().n_layers,
                      model_.n_local(),
                      {all.offsets.data + r * offsets, n_group + 1},
                      {all.key.data + r * entries, entries},
                      {all.value.data + r * entries, entries}});
  }
  if (model_.owned().size() > 0) kernels::restrict_features(execution_, groups, model_.owned().begin, out, {});
}

void DataAxis::by_feature() {
  if (model_.owned().size() > 0) kernels::transpose(execution_, activations_, hits_, buffers_.transpose_workspace);
}

void DataAxis::gather_rows(kernels::AnyMatrix rows) {
  if (!active()) return;
  std::vector<std::int64_t> bytes;
  for (std::int64_t r = 0; r < ranks_.size(); ++r)
    bytes.push_back(parallel::part(rows.rows, ranks_.size(), r).size() * rows.columns * kernels::bytes_of(rows.type));
  ranks_.all_gather(rows.data, bytes, "rows of groups");
}

void DataAxis::gather_weights(std::span<const kernels::ParameterRows> matrices) {
  if (!active()) return;
  for (const kernels::ParameterRows& matrix : matrices) model::gather_updated_rows(ranks_, matrix);
}

void DataAxis::start_weights(std::span<const kernels::ParameterRows> matrices) {
  if (!active()) return;
  updated_.record(execution_);
  updated_.hold_back(stream_.execution());
  for (const kernels::ParameterRows& matrix : matrices) model::gather_updated_rows(overlapped_, matrix);
  gathered_.record(stream_.execution());
}

void DataAxis::await_weights(device::IdleClock& idle) {
  if (!active()) return;
  idle.begin(execution_);
  gathered_.hold_back(execution_);
  idle.end(execution_);
}

void DataAxis::gather_vectors(kernels::AnyMatrix all) {
  if (!active()) return;
  std::vector<parallel::Range> owned;
  std::vector<std::int64_t> bytes;
  for (std::int64_t r = 0; r < ranks_.size(); ++r) {
    owned.push_back(parallel::part(all.columns, ranks_.size(), r));
    bytes.push_back(4 * all.rows * owned.back().size());
  }
  // One message carries the slices of all layers.
  const auto together = [&](parallel::Range features) -> kernels::AnyMatrix {
    return {buffers_.vectors.data + all.rows * features.begin, all.type, all.rows, features.size(), features.size()};
  };
  const auto apart = [&](parallel::Range features) { return all.columns_from(features.begin, features.size()); };
  const std::size_t own = static_cast<std::size_t>(ranks_.rank());
  kernels::copy_rows(execution_, apart(owned[own]), together(owned[own]));
  ranks_.all_gather(buffers_.vectors.data, bytes, "biases");
  for (std::size_t r = 0; r < owned.size(); ++r)
    if (r != own) kernels::copy_rows(execution_, together(owned[r]), apart(owned[r]));
}

}  // namespace weft::transcoder
