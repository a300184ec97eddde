// SPDX-License-Identifier: Apache-2.0
#include "transcoder/decoder/tied_by_target.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/transcoder/decode/by_target.hpp"
#include "transcoder/selection/selection.hpp"

namespace weft::transcoder {

using kernels::Array;

TiedByTarget::TargetLists::TargetLists(std::int64_t n_tokens, std::int64_t n_layers, std::int64_t entries,
                                       model::StepArena& arena) {
  const std::int64_t most = entries * n_layers;
  if (most >= std::int64_t{1} << 32)
    throw collective_error(
        ExitCode::usage,
        "transcoder.decoder = \"tied_target\" needs room for {} entries on a rank, each active feature "
        "once for each of its targets (at most 2^32 are possible); take a smaller transcoder.k, a "
        "smaller batch or more ranks",
        most);
  begin = arena.take<std::int64_t>(n_tokens * n_layers + 1);
  row_offsets = arena.take<std::int64_t>(n_tokens + 1);
  key = arena.take<std::uint32_t>(most);
  value = arena.take<float>(most);
}

TiedByTarget::TiedByTarget(const Sizes& sizes, const ForwardSizes& forward, model::StepArena& arena)
    : SparseDecoder(sizes.shape) {
  const ModelSettings& settings = sizes.configuration.transcoder;
  const SelectionSpec active = selection_spec(sizes.configuration, sizes.shape, sizes.grid, forward.max_tokens);
  std::int64_t entries = list_capacity(active);
  if (settings.auxk > 0) entries = std::max(entries, list_capacity(dead_feature_selection(active)));
  forward_ = TargetLists(forward.group, sizes.shape.n_layers, entries, arena);
}

void TiedByTarget::begin(const kernels::SparseActivations& of) {
  lists_ = forward_.lists(of);
  kernels::lists_by_target(execution_, of, model().affine(), lists_, forward_.begin);
}

void TiedByTarget::take_backward(const Sizes& sizes, const BackwardSizes& backward, model::StepArena& arena) {
  const std::int64_t owned = largest_owned(shape_, sizes.grid);
  SparseDecoder::take_backward(sizes, {backward.n_tokens, shape_.n_layers * backward.entries}, arena);
  backward_ = TargetLists(backward.n_tokens, shape_.n_layers, backward.entries, arena);
  hit_offsets_ = arena.take<std::int64_t>(shape_.n_layers * owned + 1);
  hit_token_ = arena.take<std::uint32_t>(backward_.key.size);
  hit_position_ = arena.take<std::uint32_t>(backward_.key.size);
  delta_ = arena.take<float>(backward_.key.size);
  if (!shape_.affine) return;
  const std::int64_t pairs = kernels::pair_of(shape_.n_layers, shape_.n_layers, shape_.n_layers);
  offset_gradient_ = arena.take<float>(pairs * owned);
  scale_gradient_ = arena.take<float>(pairs * owned);
}

void TiedByTarget::prepare(const Lists& all, kernels::AnyMatrix, device::Event&) {
  if (owned() == 0) return;
  kernels::lists_by_target(execution_, all.activations, model().owned_affine(), backward_.lists(all.activations),
                           backward_.begin);
  kernels::hits_by_target(execution_, all.activations, all.hits, backward_.begin,
                          {hit_offsets_, hit_token_, hit_position_});
}

Lists TiedByTarget::written(const Lists& all) const {
  return {backward_.lists(all.activations), {hit_offsets_, hit_token_, hit_position_}};
}

void TiedByTarget::backward(const Lists& all, kernels::AnyMatrix rows, const BackwardStep& of) {
  if (owned() == 0) return;
  BackwardStep by_target = of;
  by_target.gradient = delta_;
  SparseDecoder::backward(written(all), rows, by_target);
  kernels::gradient_by_source(execution_, all.activations, model().owned_affine(), backward_.begin, delta_,
                              of.gradient);
  if (shape_.affine)
    kernels::affine_gradient(execution_, all.activations, all.hits, model().owned_affine(), backward_.begin, delta_,
                             affine_gradient());
}

kernels::PairAffine TiedByTarget::affine_gradient() const {
  const std::int64_t pairs = model().affine().scale.rows;
  return {{offset_gradient_.data, pairs, owned(), owned()}, {scale_gradient_.data, pairs, owned(), owned()}};
}

void TiedByTarget::update_rest(const kernels::AdamStep* step, Array<double> squared_norm) {
  if (!shape_.affine || owned() == 0) return;
  const kernels::PairAffine gradient = affine_gradient();
  if (squared_norm.data != nullptr)
    for (std::int64_t t = 0; t < shape_.n_layers; ++t)
      for (std::int64_t s = 0; s <= t; ++s) {
        const std::int64_t pair = kernels::pair_of(s, t, shape_.n_layers);
        for (const kernels::Matrix<float>& vectors : {gradient.offset, gradient.scale})
          kernels::add_row_squares(execution_, {vectors.row(pair), owned(), 1, 1}, step,
                                   {squared_norm.data + s * owned(), owned()});
      }
  if (step == nullptr) return;
  std::int64_t i = 0;  // counts all offsets, then all scales
  for (const kernels::ParameterVector& vector : model().owned_affine_vectors()) {
    const kernels::Matrix<float>& vectors = i < gradient.offset.rows ? gradient.offset : gradient.scale;
    kernels::adam_vector(execution_, vector, {vectors.row(i % vectors.rows), vectors.columns}, step);
    ++i;
  }
}

void TiedByTarget::to_feature_norms(Array<float> norm) const {
  kernels::norms_of_features(execution_, shape_.n_layers, norm);
}

void TiedByTarget::to_row_factors(Array<float> factors) const {
  kernels::factors_of_rows(execution_, shape_.n_layers, factors);
}

}  // namespace weft::transcoder
