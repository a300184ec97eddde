// SPDX-License-Identifier: Apache-2.0
#include "transcoder/exchange/data_axis.hpp"

#include <algorithm>

#include "kernels/convert/convert.hpp"
#include "kernels/transcoder/sparse/restrict.hpp"
#include "transcoder/forward.hpp"
#include "transcoder/selection/selection.hpp"

namespace weft::transcoder {
namespace {

SelectionShape selection_of(const Configuration& configuration, const Shape& shape) {
  return selection_shape(configuration, shape, configuration.data.batch_tokens);
}

/// Features per layer that the largest rank updates.
std::int64_t most_owned(const Shape& shape, const parallel::GridShape& grid) {
  return parallel::largest_part(parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis)),
                                grid.size(parallel::kDataAxis));
}

std::int64_t row_bytes(const Configuration& configuration, const Shape& shape) {
  return shape.width() * kernels::bytes_of(scalar_of(configuration.precision));
}

}  // namespace

DataAxis::Lists::Lists(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid)
    : offsets(parallel::largest_part(configuration.data.batch_tokens, grid.size(parallel::kDataAxis)) + 1),
      entries(list_capacity(configuration.transcoder, selection_of(configuration, shape), grid)) {}

std::int64_t DataAxis::capacity(const Configuration& configuration, const Shape& shape,
                                const parallel::GridShape& grid) {
  // A slice of the features over all tokens: what a rank would have were all ranks on the feature axis.
  return list_capacity(configuration.transcoder, selection_of(configuration, shape),
                       parallel::data_by_feature(1, grid.ranks()));
}

std::int64_t DataAxis::bytes(const Configuration& configuration, const Shape& shape, const parallel::GridShape& grid,
                             kernels::Backend backend) {
  if (grid.size(parallel::kDataAxis) == 1) return 0;
  const std::int64_t n_keys = shape.n_layers * most_owned(shape, grid), entries = capacity(configuration, shape, grid);
  return grid.size(parallel::kDataAxis) * Lists(configuration, shape, grid).bytes() +
         8 * (configuration.data.batch_tokens + 1) + 8 * (n_keys + 1) + 16 * entries +
         4 * shape.n_layers * parallel::largest_part(shape.n_features, grid.size(parallel::kFeatureAxis)) +
         kernels::transpose_workspace(backend, n_keys, entries);
}

std::int64_t DataAxis::sent_bytes(const Configuration& configuration, const Shape& shape,
                                  const parallel::GridShape& grid) {
  if (grid.size(parallel::kDataAxis) == 1) return 0;
  const std::int64_t group = parallel::largest_part(configuration.data.batch_tokens, grid.size(parallel::kDataAxis)),
                     owned = most_owned(shape, grid);
  std::int64_t weights = 4 * shape.n_layers * owned;  // biases
  for (std::int64_t s = 0; s < shape.n_layers; ++s)
    for (const std::int64_t columns : {shape.d_model, shape.decoder_columns(s)})
      weights += weight_bytes(configuration.optimizer.state, owned, columns);
  return (grid.size(parallel::kDataAxis) - 1) *
         (2 * group * row_bytes(configuration, shape) + Lists(configuration, shape, grid).bytes() + weights);
}

DataAxis::DataAxis(const Configuration& configuration, const Model& model, const parallel::Grid& grid,
                   const kernels::Execution& execution)
    : model_(model),
      execution_(execution),
      ranks_(grid.axis(parallel::kDataAxis), execution,
             grid.size(parallel::kDataAxis) == 1
                 ? 0
                 : std::max({configuration.data.batch_tokens * row_bytes(configuration, model.shape()),
                             grid.size(parallel::kDataAxis) * Lists(configuration, model.shape(), grid.shape()).bytes(),
                             weight_bytes(configuration.optimizer.state, model.n_local(), model.shape().width())}),
             configuration.parallel.manner.way),
      stream_(execution),
      beside_(grid.axis(parallel::kDataAxis), stream_.execution(),
              weight_bytes(configuration.optimizer.state, model.n_local(), model.shape().width()),
              configuration.parallel.manner.way),
      lists_(configuration, model.shape(), grid.shape()) {
  if (!active()) return;
  const Shape& shape = model.shape();
  const std::int64_t n_keys = shape.n_layers * model.owned().size(),
                     entries = capacity(configuration, shape, grid.shape());
  group_offsets_ = device::Buffer<std::int64_t>(ranks_.size() * lists_.offsets);
  group_key_ = device::Buffer<std::uint32_t>(ranks_.size() * lists_.entries);
  group_value_ = device::Buffer<float>(ranks_.size() * lists_.entries);
  row_offsets_ = device::Buffer<std::int64_t>(configuration.data.batch_tokens + 1);
  key_ = device::Buffer<std::uint32_t>(entries);
  value_ = device::Buffer<float>(entries);
  hit_offsets_ = device::Buffer<std::int64_t>(n_keys + 1);
  hit_token_ = device::Buffer<std::uint32_t>(entries);
  hit_position_ = device::Buffer<std::uint32_t>(entries);
  transpose_workspace_ = device::Buffer<std::byte>(kernels::transpose_workspace(execution.backend, n_keys, entries));
  biases_ = device::Buffer<float>(shape.n_layers * model.n_local());
  hits_ = {hit_offsets_.array(), hit_token_.array(), hit_position_.array()};
  device::zero(execution, hit_offsets_.data(), hit_offsets_.bytes());  // also where nothing is owned
}

void DataAxis::gather_lists(const kernels::SparseActivations& of_group, std::int64_t n_tokens) {
  const auto gather = [this](auto from, const auto& to) {
    const std::int64_t bytes = to.bytes() / ranks_.size();
    ranks_.all_gather(from.data, to.data(), std::vector<std::int64_t>(static_cast<std::size_t>(ranks_.size()), bytes),
                      "lists");
  };
  gather(of_group.row_offsets, group_offsets_);
  gather(of_group.key, group_key_);
  gather(of_group.value, group_value_);
  std::vector<kernels::SparseActivations> groups;
  for (std::int64_t r = 0; r < ranks_.size(); ++r) {
    const std::int64_t n_group = parallel::part(n_tokens, ranks_.size(), r).size();
    groups.push_back({n_group,
                      model_.shape().n_layers,
                      model_.n_local(),
                      {group_offsets_.data() + r * lists_.offsets, n_group + 1},
                      {group_key_.data() + r * lists_.entries, lists_.entries},
                      {group_value_.data() + r * lists_.entries, lists_.entries}});
  }
  activations_ = {n_tokens,     model_.shape().n_layers, model_.owned().size(), row_offsets_.array(),
                  key_.array(), value_.array()};
  if (model_.owned().size() > 0) kernels::restrict_features(execution_, groups, model_.owned().begin, activations_);
}

void DataAxis::by_feature() {
  if (model_.owned().size() > 0) kernels::transpose(execution_, activations_, hits_, transpose_workspace_.array());
}

void DataAxis::gather_rows(kernels::AnyMatrix rows) {
  std::vector<std::int64_t> bytes;
  for (std::int64_t r = 0; r < ranks_.size(); ++r)
    bytes.push_back(parallel::part(rows.rows, ranks_.size(), r).size() * rows.columns * kernels::bytes_of(rows.type));
  ranks_.all_gather(rows.data, bytes, "rows of groups");
}

void DataAxis::gather(parallel::DeviceCommunicator& axis, const kernels::ParameterRows& matrix) {
  const std::int64_t planes = matrix.weight_rest != nullptr ? 2 : 1;
  std::vector<std::int64_t> bytes;
  for (std::int64_t r = 0; r < ranks_.size(); ++r) {
    const std::int64_t owned = parallel::part(matrix.rows, ranks_.size(), r).size();
    bytes.push_back(weight_bytes(matrix.policy, owned, matrix.columns) / planes);
  }
  axis.all_gather(matrix.weight, bytes, "weights");
  if (planes > 1) axis.all_gather(matrix.weight_rest, bytes, "weights");
}

void DataAxis::gather_weights(std::span<const kernels::ParameterRows> matrices) {
  for (const kernels::ParameterRows& matrix : matrices) gather(ranks_, matrix);
}

void DataAxis::start_weights(std::span<const kernels::ParameterRows> matrices) {
  updated_.record(execution_);
  updated_.hold_back(stream_.execution());
  for (const kernels::ParameterRows& matrix : matrices) gather(beside_, matrix);
  gathered_.record(stream_.execution());
}

void DataAxis::await_weights(device::IdleClock& idle) {
  idle.begin(execution_);
  gathered_.hold_back(execution_);
  idle.end(execution_);
}

void DataAxis::gather_biases() {
  const kernels::AnyMatrix all = model_.encoder_biases();
  std::vector<parallel::Range> owned;
  std::vector<std::int64_t> bytes;
  for (std::int64_t r = 0; r < ranks_.size(); ++r) {
    owned.push_back(parallel::part(all.columns, ranks_.size(), r));
    bytes.push_back(4 * all.rows * owned.back().size());
  }
  // A slice of every layer: they travel together.
  const auto together = [&](parallel::Range features) -> kernels::AnyMatrix {
    return {biases_.data() + all.rows * features.begin, all.type, all.rows, features.size(), features.size()};
  };
  const auto apart = [&](parallel::Range features) { return all.columns_from(features.begin, features.size()); };
  const std::size_t own = static_cast<std::size_t>(ranks_.rank());
  kernels::copy_rows(execution_, apart(owned[own]), together(owned[own]));
  ranks_.all_gather(biases_.data(), bytes, "biases");
  for (std::size_t r = 0; r < owned.size(); ++r)
    if (r != own) kernels::copy_rows(execution_, together(owned[r]), apart(owned[r]));
}

}  // namespace weft::transcoder
