// SPDX-License-Identifier: Apache-2.0
#include "transcoder/gradient_exchange.hpp"

#include <algorithm>

#include "kernels/decode/decode.hpp"
#include "kernels/encode/encode.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"

namespace weft::transcoder {
namespace {

/// Large enough to use the network well, small beside the state.
constexpr std::int64_t kBucketBytes = std::int64_t{64} << 20;

/// Rows that a bucket takes of each owner's slice.
std::int64_t rows_per_owner(std::int64_t columns, std::int64_t n_ranks) {
  return std::max<std::int64_t>(1, kBucketBytes / (columns * 4 * n_ranks));
}

std::int64_t longest_vector(const Shape& shape, parallel::GridShape grid) {
  return shape.n_layers * std::max(parallel::largest_part(shape.n_features, grid.feature), shape.d_model);
}

/// Elements of the largest bucket over all matrices.
std::int64_t bucket_elements(const Shape& shape, parallel::GridShape grid) {
  const std::int64_t owned = parallel::largest_part(parallel::largest_part(shape.n_features, grid.feature), grid.data);
  std::int64_t largest = 0;
  for (std::int64_t s = 0; s < shape.n_layers; ++s) {
    const std::int64_t columns = shape.decoder_columns(s);
    largest = std::max(largest, std::min(owned, rows_per_owner(columns, grid.data)) * columns * grid.data);
  }
  const std::int64_t d = shape.d_model;
  return std::max(largest, std::min(owned, rows_per_owner(d, grid.data)) * d * grid.data);
}

}  // namespace

std::int64_t GradientExchange::bytes(const Shape& shape, parallel::GridShape grid) {
  if (grid.data == 1) return 0;
  const std::int64_t elements = bucket_elements(shape, grid);
  return 4 * (2 * elements + elements / grid.data + grid.data * longest_vector(shape, grid));
}

GradientExchange::GradientExchange(const Model& model, const parallel::Grid& grid, const kernels::Execution& execution)
    : model_(model),
      execution_(execution),
      ranks_(grid.data_axis(), execution,
             grid.shape().data == 1 ? 0
                                    : std::max({bucket_elements(model.shape(), grid.shape()) * 4,
                                                model.n_local() * model.shape().width() * 4,
                                                longest_vector(model.shape(), grid.shape()) * 4 * grid.shape().data})) {
  for (std::int64_t r = 0; r < grid.shape().data; ++r)
    owned_of_rank_.push_back(parallel::part(model.n_local(), grid.shape().data, r));
  if (!active()) return;
  const std::int64_t elements = bucket_elements(model.shape(), grid.shape());
  bucket_ = device::Buffer<float>(elements);
  received_ = device::Buffer<float>(elements);
  summed_ = device::Buffer<float>(elements / grid.shape().data);
  vectors_ = device::Buffer<float>(grid.shape().data * longest_vector(model.shape(), grid.shape()));
}

template <class FormGradient>
void GradientExchange::matrix(const kernels::ParameterRows& all, const kernels::ParameterRows& owned,
                              std::int64_t layer, const Purpose& purpose, FormGradient&& form) {
  const std::int64_t columns = all.columns, step_rows = rows_per_owner(columns, ranks_.size());
  std::int64_t longest = 0;
  for (const parallel::Range& slice : owned_of_rank_) longest = std::max(longest, slice.size());
  const auto rows_of = [&](std::int64_t rank, std::int64_t begin) -> parallel::Range {
    const parallel::Range slice = owned_of_rank_[static_cast<std::size_t>(rank)];
    return {std::min(slice.begin + begin, slice.end), std::min(slice.begin + begin + step_rows, slice.end)};
  };
  for (std::int64_t begin = 0; begin < longest; begin += step_rows) {
    const parallel::Range own = rows_of(ranks_.rank(), begin);
    std::vector<std::int64_t> send, receive;
    float* next = bucket_.data();
    for (std::int64_t r = 0; r < ranks_.size(); ++r) {
      const parallel::Range rows = rows_of(r, begin);
      if (rows.size() > 0) form(rows.begin, kernels::Matrix<float>{next, rows.size(), columns, columns});
      next += rows.size() * columns;
      send.push_back(rows.size() * columns * 4);
      receive.push_back(own.size() * columns * 4);
    }
    ranks_.all_to_all(bucket_.data(), send, received_.data(), receive);
    if (own.size() == 0) continue;
    const std::int64_t elements = own.size() * columns;
    kernels::sum_parts(execution_, {received_.data(), ranks_.size(), elements, elements}, {summed_.data(), elements});
    const kernels::Matrix<const float> gradient{summed_.data(), own.size(), columns, columns};
    if (purpose.squared_norm.data != nullptr)
      kernels::add_row_norms(execution_, gradient,
                             {purpose.squared_norm.data + layer * all.rows + own.begin, own.size()});
    if (purpose.step != nullptr)
      kernels::adam_rows(execution_, owned, own.begin - model_.owned().begin, gradient, purpose.step);
  }
  if (purpose.step == nullptr) return;
  std::vector<std::int64_t> bytes;
  const std::int64_t row_bytes = weight_bytes(all.policy, 1, columns) / (all.weight_rest != nullptr ? 2 : 1);
  for (const parallel::Range& slice : owned_of_rank_) bytes.push_back(slice.size() * row_bytes);
  ranks_.all_gather(all.weight, bytes);
  if (all.weight_rest != nullptr) ranks_.all_gather(all.weight_rest, bytes);
}

void GradientExchange::decoder(const kernels::SparseActivations& activations, const kernels::FeatureHits& hits,
                               kernels::AnyMatrix gradient_rows, const Purpose& purpose) {
  if (purpose.squared_norm.data != nullptr)
    device::zero(execution_, purpose.squared_norm.data, purpose.squared_norm.size * 8);
  for (std::size_t s = 0; s < model_.decoder().size(); ++s)
    matrix(model_.decoder()[s], model_.owned_decoder()[s], static_cast<std::int64_t>(s), purpose,
           [&](std::int64_t row, kernels::Matrix<float> out) {
             kernels::decode_gradient(execution_, activations, hits, gradient_rows, static_cast<std::int64_t>(s), row,
                                      out);
           });
}

void GradientExchange::encoder(const kernels::SparseActivations& activations, const kernels::FeatureHits& hits,
                               kernels::AnyMatrix inputs, kernels::Array<const float> preactivation_gradient,
                               kernels::Array<float> bias_gradient, const Purpose& purpose) {
  if (purpose.squared_norm.data != nullptr)
    device::zero(execution_, purpose.squared_norm.data, purpose.squared_norm.size * 8);
  for (std::size_t s = 0; s < model_.encoder().size(); ++s)
    matrix(model_.encoder()[s], model_.owned_encoder()[s], static_cast<std::int64_t>(s), purpose,
           [&](std::int64_t row, kernels::Matrix<float> out) {
             float* bias = bias_gradient.data + static_cast<std::int64_t>(s) * model_.n_local() + row;
             kernels::encode_gradient(execution_, activations, hits, inputs, preactivation_gradient,
                                      static_cast<std::int64_t>(s), row, out, {bias, out.rows});
           });
  sum(bias_gradient);
  if (purpose.squared_norm.data == nullptr) return;
  for (std::int64_t s = 0; s < model_.shape().n_layers; ++s) {
    const std::int64_t first = s * model_.n_local() + model_.owned().begin, n = model_.owned().size();
    kernels::add_row_norms(execution_, {bias_gradient.data + first, n, 1, 1}, {purpose.squared_norm.data + first, n});
  }
}

void GradientExchange::sum(kernels::Array<float> vector) {
  if (!active()) return;
  const std::int64_t bytes = vector.size * 4;
  device::copy(execution_, vectors_.data() + ranks_.rank() * vector.size, vector.data, bytes,
               device::Direction::on_device);
  ranks_.all_gather(vectors_.data(), std::vector<std::int64_t>(static_cast<std::size_t>(ranks_.size()), bytes));
  kernels::sum_parts(execution_, {vectors_.data(), ranks_.size(), vector.size, vector.size}, vector);
}

}  // namespace weft::transcoder
