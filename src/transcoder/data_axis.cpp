// SPDX-License-Identifier: Apache-2.0
#include "transcoder/data_axis.hpp"

#include <algorithm>

#include "kernels/sparse/restrict.hpp"
#include "transcoder/forward.hpp"
#include "transcoder/selection.hpp"

namespace weft::transcoder {
namespace {

SelectionShape selection_of(const Configuration& configuration, const Shape& shape) {
  return selection_shape(configuration, shape, configuration.data.batch_tokens);
}

/// Features per layer that the largest rank updates.
std::int64_t most_owned(const Shape& shape, parallel::GridShape grid) {
  return parallel::largest_part(parallel::largest_part(shape.n_features, grid.feature), grid.data);
}

std::int64_t row_bytes(const Configuration& configuration, const Shape& shape) {
  return shape.width() * kernels::bytes_of(scalar_of(configuration.precision));
}

constexpr std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

DataAxis::Block::Block(const Configuration& configuration, const Shape& shape, parallel::GridShape grid)
    : capacity(list_capacity(configuration.transcoder, selection_of(configuration, shape), grid)) {
  key_begin = aligned(8 * (parallel::largest_part(configuration.data.batch_tokens, grid.data) + 1));
  value_begin = key_begin + aligned(4 * capacity);
  size = value_begin + aligned(4 * capacity);
}

std::int64_t DataAxis::capacity(const Configuration& configuration, const Shape& shape, parallel::GridShape grid) {
  // A slice of the features over all tokens: what a rank would have were all ranks on the feature axis.
  return list_capacity(configuration.transcoder, selection_of(configuration, shape), {1, grid.data * grid.feature});
}

std::int64_t DataAxis::bytes(const Configuration& configuration, const Shape& shape, parallel::GridShape grid,
                             kernels::Backend backend) {
  if (grid.data == 1) return 0;
  const std::int64_t n_keys = shape.n_layers * most_owned(shape, grid), entries = capacity(configuration, shape, grid);
  return grid.data * Block(configuration, shape, grid).size + 8 * (configuration.data.batch_tokens + 1) +
         8 * (n_keys + 1) + 16 * entries + kernels::transpose_workspace(backend, n_keys, entries);
}

std::int64_t DataAxis::sent_bytes(const Configuration& configuration, const Shape& shape, parallel::GridShape grid) {
  if (grid.data == 1) return 0;
  const std::int64_t group = parallel::largest_part(configuration.data.batch_tokens, grid.data),
                     owned = most_owned(shape, grid);
  std::int64_t weights = 4 * shape.n_layers * owned;  // biases
  for (std::int64_t s = 0; s < shape.n_layers; ++s)
    for (const std::int64_t columns : {shape.d_model, shape.decoder_columns(s)})
      weights += weight_bytes(configuration.optimizer.state, owned, columns);
  return (grid.data - 1) *
         (2 * group * row_bytes(configuration, shape) + Block(configuration, shape, grid).size + weights);
}

DataAxis::DataAxis(const Configuration& configuration, const Model& model, const parallel::Grid& grid,
                   const kernels::Execution& execution)
    : model_(model),
      execution_(execution),
      ranks_(grid.data_axis(), execution,
             grid.shape().data == 1
                 ? 0
                 : std::max({configuration.data.batch_tokens * row_bytes(configuration, model.shape()),
                             grid.shape().data * Block(configuration, model.shape(), grid.shape()).size,
                             weight_bytes(configuration.optimizer.state, model.n_local(), model.shape().width())})),
      block_(configuration, model.shape(), grid.shape()) {
  if (!active()) return;
  const Shape& shape = model.shape();
  const std::int64_t n_keys = shape.n_layers * model.owned().size(),
                     entries = capacity(configuration, shape, grid.shape());
  gathered_ = device::Buffer<std::byte>(ranks_.size() * block_.size);
  row_offsets_ = device::Buffer<std::int64_t>(configuration.data.batch_tokens + 1);
  key_ = device::Buffer<std::uint32_t>(entries);
  value_ = device::Buffer<float>(entries);
  hit_offsets_ = device::Buffer<std::int64_t>(n_keys + 1);
  hit_token_ = device::Buffer<std::uint32_t>(entries);
  hit_position_ = device::Buffer<std::uint32_t>(entries);
  transpose_workspace_ = device::Buffer<std::byte>(kernels::transpose_workspace(execution.backend, n_keys, entries));
  hits_ = {hit_offsets_.array(), hit_token_.array(), hit_position_.array()};
  device::zero(execution, hit_offsets_.data(), hit_offsets_.bytes());  // also where nothing is owned
}

kernels::SparseActivations DataAxis::group_lists(std::int64_t rank, std::int64_t n_tokens) const {
  std::byte* const block = gathered_.data() + rank * block_.size;
  const std::int64_t n_group = parallel::part(n_tokens, ranks_.size(), rank).size();
  return {n_group,
          model_.shape().n_layers,
          model_.n_local(),
          {reinterpret_cast<std::int64_t*>(block), n_group + 1},
          {reinterpret_cast<std::uint32_t*>(block + block_.key_begin), block_.capacity},
          {reinterpret_cast<float*>(block + block_.value_begin), block_.capacity}};
}

void DataAxis::gather_lists(const kernels::SparseActivations& of_group, std::int64_t n_tokens) {
  const kernels::SparseActivations own = group_lists(ranks_.rank(), n_tokens);
  const auto copy = [this](auto to, auto from, std::int64_t size) {
    device::copy(execution_, to.data, from.data, size * static_cast<std::int64_t>(sizeof *to.data),
                 device::Direction::on_device);
  };
  copy(own.row_offsets, of_group.row_offsets, own.n_tokens + 1);
  copy(own.key, of_group.key, block_.capacity);
  copy(own.value, of_group.value, block_.capacity);
  ranks_.all_gather(gathered_.data(), std::vector<std::int64_t>(static_cast<std::size_t>(ranks_.size()), block_.size));
  std::vector<kernels::SparseActivations> groups;
  for (std::int64_t r = 0; r < ranks_.size(); ++r) groups.push_back(group_lists(r, n_tokens));
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
  ranks_.all_gather(rows.data, bytes);
}

void DataAxis::gather_weights(const kernels::ParameterRows& matrix) {
  const std::int64_t planes = matrix.weight_rest != nullptr ? 2 : 1;
  std::vector<std::int64_t> bytes;
  for (std::int64_t r = 0; r < ranks_.size(); ++r) {
    const std::int64_t owned = parallel::part(matrix.rows, ranks_.size(), r).size();
    bytes.push_back(weight_bytes(matrix.policy, owned, matrix.columns) / planes);
  }
  ranks_.all_gather(matrix.weight, bytes);
  if (planes > 1) ranks_.all_gather(matrix.weight_rest, bytes);
}

void DataAxis::gather_bias(kernels::Array<float> bias) {
  std::vector<std::int64_t> bytes;
  for (std::int64_t r = 0; r < ranks_.size(); ++r)
    bytes.push_back(4 * parallel::part(bias.size, ranks_.size(), r).size());
  ranks_.all_gather(bias.data, bytes);
}

}  // namespace weft::transcoder
