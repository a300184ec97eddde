// SPDX-License-Identifier: Apache-2.0
#include "transcoder/model.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "kernels/optimize/adam.hpp"
#include "kernels/runtime.hpp"

namespace weft::transcoder {

using kernels::ParameterRows;
using kernels::Scalar;
using kernels::StatePolicy;

namespace {

Scalar weight_type(StatePolicy policy) { return policy == StatePolicy::fp32 ? Scalar::fp32 : Scalar::bf16; }
Scalar moment_type(StatePolicy policy) {
  return policy == StatePolicy::fp32 ? Scalar::fp32 : policy == StatePolicy::bf16 ? Scalar::bf16 : Scalar::u8;
}

/// fp32 weights joined at a time, on their way to or from a checkpoint: 16 MiB.
constexpr std::int64_t kJoinedElements = std::int64_t{4} << 20;

std::int64_t scales_per_row(StatePolicy policy, std::int64_t columns, std::int64_t segment) {
  return policy == StatePolicy::eight_bit ? ParameterRows{.columns = columns, .segment = segment}.blocks_per_row() : 0;
}

}  // namespace

std::int64_t weight_bytes(StatePolicy policy, std::int64_t rows, std::int64_t columns) {
  return rows * columns * kernels::bytes_of(weight_type(policy));
}

std::int64_t moment_bytes(StatePolicy policy, std::int64_t rows, std::int64_t columns, std::int64_t segment) {
  return 2 * rows * (columns * kernels::bytes_of(moment_type(policy)) + scales_per_row(policy, columns, segment) * 4);
}

Model::Model(const Shape& shape, StatePolicy policy, const parallel::Grid& grid, const kernels::Execution& execution,
             Moments moments)
    : shape_(shape),
      policy_(policy),
      execution_(execution),
      moments_(moments),
      features_(grid.part(parallel::kFeatureAxis, shape.n_features)),
      owned_(parallel::part(features_.size(), grid.size(parallel::kDataAxis), grid.index(parallel::kDataAxis))) {
  if (split_weights()) joined_ = device::Buffer<float>(std::max(kJoinedElements, shape.decoder_columns(0)));
  std::uint64_t element_base = 0;
  for (std::int64_t s = 0; s < shape.n_layers; ++s) {
    allocate(encoder_, shape.d_model, element_base);
    element_base += static_cast<std::uint64_t>(shape.n_features * shape.d_model);
  }
  for (std::int64_t s = 0; s < shape.n_layers; ++s) {
    allocate(decoder_, shape.decoder_columns(s), element_base);
    element_base += static_cast<std::uint64_t>(shape.n_features * shape.decoder_columns(s));
  }
  for (int part = 0; part < (moments == Moments::held ? 3 : 1); ++part) {
    bias_[part] = device::Buffer<float>(shape.n_layers * (part == 0 ? n_local() : owned_.size()));
    decoder_bias_[part] = device::Buffer<float>(shape.width());
    device::zero(execution, bias_[part].data(), bias_[part].bytes());
    device::zero(execution, decoder_bias_[part].data(), decoder_bias_[part].bytes());
    state_bytes_ += bias_[part].bytes() + decoder_bias_[part].bytes();
  }
  for (std::int64_t s = 0; s < shape.n_layers; ++s) {
    const kernels::Array<float> all{bias_[0].data() + s * n_local(), n_local()};
    kernels::ParameterVector owned{{all.data + owned_.begin, owned_.size()}, {}, {}};
    if (moments == Moments::held) {
      owned.first_moment = {bias_[1].data() + s * owned_.size(), owned_.size()};
      owned.second_moment = {bias_[2].data() + s * owned_.size(), owned_.size()};
    }
    owned_encoder_bias_.push_back(owned);
    encoder_bias_.push_back(owned_.size() == n_local() ? owned : kernels::ParameterVector{all, {}, {}});
  }
  clocks_ = device::Buffer<std::int64_t>(shape.n_layers * owned_.size());
  device::zero(execution, clocks_.data(), clocks_.bytes());
}

void Model::allocate(Matrices& matrices, std::int64_t columns, std::uint64_t element_base) {
  const std::int64_t segment = shape_.d_model;
  const auto take = [&](std::int64_t bytes) -> std::byte* {
    matrices.memory.emplace_back(bytes);
    device::zero(execution_, matrices.memory.back().data(), bytes);
    state_bytes_ += bytes;
    return matrices.memory.back().data();
  };
  ParameterRows all{.policy = policy_,
                    .rows = n_local(),
                    .columns = columns,
                    .segment = segment,
                    .first_row = features_.begin,
                    .element_base = element_base,
                    .weight = take(weight_bytes(policy_, n_local(), columns) / (split_weights() ? 2 : 1))};
  if (split_weights()) all.weight_rest = reinterpret_cast<std::int16_t*>(take(n_local() * columns * 2));
  ParameterRows owned = all;
  owned.rows = owned_.size();
  owned.first_row += owned_.begin;
  const std::int64_t before = owned_.begin * columns;
  owned.weight =
      static_cast<std::byte*>(all.weight) + before * (split_weights() ? 2 : kernels::bytes_of(weight_type(policy_)));
  if (split_weights()) owned.weight_rest += before;
  if (moments_ == Moments::held) {
    const std::int64_t codes = owned.rows * columns * kernels::bytes_of(moment_type(policy_));
    const std::int64_t scales = owned.rows * scales_per_row(policy_, columns, segment) * 4;
    owned.first_moment = take(codes);
    owned.second_moment = take(codes);
    if (scales > 0) {
      owned.first_scale = reinterpret_cast<float*>(take(scales));
      owned.second_scale = reinterpret_cast<float*>(take(scales));
    }
    if (owned.rows == all.rows) all = owned;
  }
  matrices.all.push_back(all);
  matrices.owned.push_back(owned);
}

void Model::initialise(std::uint64_t seed) {
  const float encoder_bound = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.n_features)));
  const float decoder_bound = static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape_.width())));
  for (const ParameterRows& rows : encoder_.all)
    initialise_uniform(execution_, rows, encoder_bound, seed, kernels::Purpose::encoder_initial);
  for (const ParameterRows& rows : decoder_.all)
    initialise_uniform(execution_, rows, decoder_bound, seed, kernels::Purpose::decoder_initial);
}

kernels::AnyMatrix Model::encoder_biases() const {
  return {bias_[0].data(), Scalar::fp32, shape_.n_layers, n_local(), n_local()};
}

kernels::ParameterVector Model::decoder_bias() const {
  return {decoder_bias_[0].array(), decoder_bias_[1].array(), decoder_bias_[2].array()};
}

void Model::add_matrix_to(checkpoint::Registry& registry, const std::string& name, const Matrices& matrices,
                          std::size_t layer) const {
  const ParameterRows& all = matrices.all[layer];
  const ParameterRows& owned = matrices.owned[layer];
  const parallel::Range written{owned.first_row, owned.first_row + owned.rows};
  const auto add = [&](const std::string& suffix, Scalar type, std::int64_t columns, parallel::Range held, void* data) {
    registry.add({.name = name + suffix,
                  .type = type,
                  .shape = {shape_.n_features, columns},
                  .held = held,
                  .owned = written,
                  .data = data,
                  .on_device = true});
  };
  if (split_weights())
    add_split_weights_to(registry, name, all, written);
  else
    add("", weight_type(policy_), all.columns, features_, all.weight);
  if (moments_ == Moments::none) return;
  add(".first_moment", moment_type(policy_), all.columns, written, owned.first_moment);
  add(".second_moment", moment_type(policy_), all.columns, written, owned.second_moment);
  if (policy_ == StatePolicy::eight_bit) {
    add(".first_scale", Scalar::fp32, owned.blocks_per_row(), written, owned.first_scale);
    add(".second_scale", Scalar::fp32, owned.blocks_per_row(), written, owned.second_scale);
  }
}

/// A checkpoint holds joined fp32 weights, so that it is read with either backend.
void Model::add_split_weights_to(checkpoint::Registry& registry, const std::string& name, const ParameterRows& all,
                                 parallel::Range written) const {
  const auto by_pieces = [this, all](parallel::Range rows, auto&& piece) {
    const std::int64_t most = std::max<std::int64_t>(1, joined_.size() / all.columns);
    for (std::int64_t row = rows.begin; row < rows.end; row += most) {
      const std::int64_t count = std::min(most, rows.end - row);
      piece(row - features_.begin, kernels::Matrix<float>{joined_.data(), count, all.columns, all.columns},
            (row - rows.begin) * all.columns * 4, count * all.columns * 4);
      kernels::fence(execution_);
    }
  };
  registry.add(
      {.name = name,
       .type = Scalar::fp32,
       .shape = {shape_.n_features, all.columns},
       .held = features_,
       .owned = written,
       .data = nullptr,
       .on_device = true,
       .gather =
           [=, this](parallel::Range rows, void* packed) {
             by_pieces(rows, [&](std::int64_t row, kernels::Matrix<float> joined, std::int64_t at, std::int64_t bytes) {
               kernels::weights_to_float(execution_, all, row, joined);
               device::copy(execution_, static_cast<std::byte*>(packed) + at, joined.data, bytes,
                            device::Direction::to_host);
             });
           },
       .scatter =
           [=, this](parallel::Range rows, const void* packed) {
             by_pieces(rows, [&](std::int64_t row, kernels::Matrix<float> joined, std::int64_t at, std::int64_t bytes) {
               device::copy(execution_, joined.data, static_cast<const std::byte*>(packed) + at, bytes,
                            device::Direction::to_device);
               kernels::weights_from_float(execution_, all, row, joined);
             });
           }});
}

void Model::add_to(checkpoint::Registry& registry, int world_rank) const {
  const parallel::Range written{features_.begin + owned_.begin, features_.begin + owned_.end};
  const int parts = moments_ == Moments::held ? 3 : 1;
  const char* const suffix[] = {"", ".first_moment", ".second_moment"};
  for (std::size_t s = 0; s < encoder_.all.size(); ++s) {
    const std::string encoder = "encoder_" + std::to_string(s) + "/";
    add_matrix_to(registry, encoder + "weight", encoder_, s);
    const auto add = [&](const std::string& name, Scalar type, parallel::Range held, void* data) {
      registry.add({.name = encoder + name,
                    .type = type,
                    .shape = {shape_.n_features},
                    .held = held,
                    .owned = written,
                    .data = data,
                    .on_device = true});
    };
    add("bias", Scalar::fp32, features_, encoder_bias_[s].weight.data);
    if (moments_ == Moments::held) {
      add("bias.first_moment", Scalar::fp32, written, owned_encoder_bias_[s].first_moment.data);
      add("bias.second_moment", Scalar::fp32, written, owned_encoder_bias_[s].second_moment.data);
    }
    add("tokens_since_fired", Scalar::i64, written, clocks_.data() + static_cast<std::int64_t>(s) * owned_.size());
    add_matrix_to(registry, "decoder_" + std::to_string(s) + "/weight", decoder_, s);
  }
  for (int part = 0; part < parts; ++part)
    registry.add({.name = std::string("decoder_bias") + suffix[part],
                  .type = Scalar::fp32,
                  .shape = {shape_.width()},
                  .held = {0, shape_.width()},
                  .owned = {0, world_rank == 0 ? shape_.width() : 0},
                  .data = decoder_bias_[part].data(),
                  .on_device = true});
}

}  // namespace weft::transcoder
