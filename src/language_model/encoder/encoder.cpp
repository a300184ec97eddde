// SPDX-License-Identifier: Apache-2.0
#include "language_model/encoder/encoder.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/language/embedding/embedding.hpp"
#include "storage/digest.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Scalar;

namespace {

/// Elements at whose multiples parameters begin, as the dense libraries prefer it.
constexpr std::int64_t kAlignment = 64;

/// True for a parameter that continues the matrix or the vector of the one before it.
bool continues(const EncoderParameter& parameter) {
  return parameter.name.find(".key.") != std::string::npos || parameter.name.find(".value.") != std::string::npos;
}

/// Offsets of the parameters in memory, and the size of all.
std::vector<std::int64_t> offsets(const EncoderShape& shape) {
  std::vector<std::int64_t> begin;
  std::int64_t end = 0;
  for (const EncoderParameter& parameter : encoder_parameters(shape)) {
    if (!continues(parameter)) end = (end + kAlignment - 1) / kAlignment * kAlignment;
    begin.push_back(end);
    end += parameter.elements();
  }
  begin.push_back(end);
  return begin;
}

std::int64_t workspace(const EncoderShape& shape, std::int64_t rows) {
  const auto product = [&](std::int64_t columns, std::int64_t inner) {
    return kernels::gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::fp32, rows, columns, inner);
  };
  const std::int64_t d = shape.d_model;
  return std::max({product(3 * d, d), product(d, d), product(shape.d_mlp, d), product(d, shape.d_mlp)});
}

kernels::Execution without_tf32(kernels::Execution execution) {
  execution.tf32 = false;
  return execution;
}

}  // namespace

AnyMatrix Encoder::Rows::first(std::int64_t rows) const {
  return {memory.data(), Scalar::fp32, rows, columns, columns};
}

Encoder::Encoder(const BertDirectory& directory, std::int64_t rows, const kernels::Execution& execution)
    : shape_(directory.shape()),
      most_rows_(rows),
      execution_(without_tf32(execution)),
      weights_(offsets(shape_).back()),
      host_ids_(rows),
      host_positions_(rows),
      host_texts_(rows),
      ids_(rows),
      position_(rows),
      texts_(rows),
      hidden_(rows, shape_.d_model),
      next_hidden_(rows, shape_.d_model),
      sum_(rows, shape_.d_model),
      packed_(rows, 3 * shape_.d_model),
      mixed_(rows, shape_.d_model),
      inner_(rows, shape_.d_mlp),
      activated_(rows, shape_.d_mlp),
      mean_(rows),
      inverse_(rows),
      workspace_(workspace(shape_, rows)) {
  load(directory);
}

std::int64_t Encoder::bytes(const EncoderShape& shape, std::int64_t rows) {
  const std::int64_t numbers = 7 * shape.d_model + 2 * shape.d_mlp + 2,
                     of_row = 4 * numbers + 8 + static_cast<std::int64_t>(sizeof(kernels::TextRows));
  return 4 * offsets(shape).back() + rows * of_row + workspace(shape, rows);
}

void Encoder::load(const BertDirectory& directory) {
  const std::vector<EncoderParameter> all = encoder_parameters(shape_);
  const std::vector<std::int64_t> begin = offsets(shape_);
  constexpr std::size_t kPositions = 1, kTypes = 2;
  std::vector<float> values, types(static_cast<std::size_t>(all[kTypes].elements()));
  directory.read(all[kTypes], types.data());
  device::zero(execution_, weights_.array());  // what lies between parameters is part of the digest
  for (std::size_t i = 0; i < all.size(); ++i) {
    values.resize(static_cast<std::size_t>(all[i].elements()));
    directory.read(all[i], values.data());
    if (i == kPositions)
      for (std::size_t n = 0; n < values.size(); ++n) values[n] += types[n % static_cast<std::size_t>(shape_.d_model)];
    device::copy(execution_, weights_.data() + begin[i], values.data(), std::ssize(values) * 4,
                 device::Direction::to_device);
    kernels::fence(execution_);  // `values` is filled again
  }

  std::size_t next = 0;
  const auto matrix = [&](std::int64_t rows, std::int64_t columns) {
    return AnyMatrix{weights_.data() + begin[next++], Scalar::fp32, rows, columns, columns};
  };
  const auto vector = [&](std::int64_t size) {
    return kernels::Array<const float>{weights_.data() + begin[next++], size};
  };
  const auto norm = [&] {
    const kernels::Array<const float> weight = vector(shape_.d_model), bias = vector(shape_.d_model);
    return kernels::NormWeights{
        .kind = kernels::Norm::layer, .weight = weight, .bias = bias, .epsilon = shape_.norm_epsilon};
  };
  const auto linear = [&](std::int64_t outputs, std::int64_t inputs) {
    const AnyMatrix weight = matrix(outputs, inputs);
    return kernels::LinearWeights{.matrix = weight, .bias = vector(outputs)};
  };
  const std::int64_t d = shape_.d_model;
  tokens_ = matrix(shape_.vocabulary, d);
  positions_ = matrix(shape_.positions, d);
  ++next;  // token types
  embedding_norm_ = norm();
  for (std::int64_t i = 0; i < shape_.layers; ++i) {
    Layer& layer = layers_.emplace_back();
    const AnyMatrix projection = matrix(3 * d, d);
    next += 2;  // key and value
    layer.projection = {.matrix = projection, .bias = vector(3 * d)};
    next += 2;
    layer.output = linear(d, d);
    layer.attention_norm = norm();
    layer.up = linear(shape_.d_mlp, d);
    layer.down = linear(d, shape_.d_mlp);
    layer.mlp_norm = norm();
  }
}

/// y = norm(x + addend); x is overwritten.
void Encoder::normalise(const kernels::NormWeights& norm, AnyMatrix x, AnyMatrix addend, AnyMatrix y) const {
  kernels::norm_forward(execution_, norm, x, addend, x, y,
                        {.mean = {mean_.data(), x.rows}, .inverse = {inverse_.data(), x.rows}});
}

std::string Encoder::digest() const {
  std::string bytes(static_cast<std::size_t>(weights_.bytes()), '\0');
  device::copy(execution_, bytes.data(), weights_.data(), weights_.bytes(), device::Direction::to_host);
  kernels::fence(execution_);
  return storage::sha256(bytes);
}

AnyMatrix Encoder::forward(std::span<const std::uint32_t> ids, std::span<const std::int64_t> sizes) {
  const auto rows = std::ssize(ids);
  if (rows > most_rows_) throw error(ExitCode::internal, "{} rows of an encoder of {}", rows, most_rows_);
  std::int64_t row = 0;
  for (const std::int64_t size : sizes)
    for (std::int64_t begin = row, position = 0; position < size; ++position, ++row) {
      host_ids_.data()[row] = ids[static_cast<std::size_t>(row)];
      host_positions_.data()[row] = static_cast<std::int32_t>(position);
      host_texts_.data()[row] = {begin, begin + size};
    }
  if (row != rows) throw error(ExitCode::internal, "texts of {} tokens for {} ids", row, rows);
  device::copy(execution_, ids_.data(), host_ids_.data(), rows * 4, device::Direction::to_device);
  device::copy(execution_, position_.data(), host_positions_.data(), rows * 4, device::Direction::to_device);
  device::copy(execution_, texts_.data(), host_texts_.data(),
               rows * static_cast<std::int64_t>(sizeof(kernels::TextRows)), device::Direction::to_device);

  AnyMatrix h = hidden_.first(rows), next = next_hidden_.first(rows);
  const AnyMatrix sum = sum_.first(rows), packed = packed_.first(rows), mixed = mixed_.first(rows),
                  inner = inner_.first(rows), activated = activated_.first(rows);
  const kernels::Array<std::byte> workspace = workspace_.array();
  const std::int64_t d = shape_.d_model;
  kernels::embed(execution_, tokens_, 0, {ids_.data(), rows}, positions_, {position_.data(), rows}, sum);
  normalise(embedding_norm_, sum, {}, h);
  for (const Layer& layer : layers_) {
    kernels::linear(execution_, layer.projection, h, packed, workspace);
    kernels::text_attention(execution_,
                            {.heads = shape_.heads,
                             .head_size = shape_.head_size(),
                             .scale = 1 / std::sqrt(static_cast<float>(shape_.head_size())),
                             .texts = {texts_.data(), rows}},
                            packed.columns_from(0, d), packed.columns_from(d, d), packed.columns_from(2 * d, d), mixed);
    kernels::linear(execution_, layer.output, mixed, sum, workspace);
    normalise(layer.attention_norm, sum, h, next);
    std::swap(h, next);
    kernels::linear(execution_, layer.up, h, inner, workspace);
    kernels::mlp_activation(execution_, shape_.mlp, inner, activated);
    kernels::linear(execution_, layer.down, activated, sum, workspace);
    normalise(layer.mlp_norm, sum, h, next);
    std::swap(h, next);
  }
  kernels::fence(execution_);  // host memory is filled again
  return h;
}

}  // namespace weft::language_model
