// SPDX-License-Identifier: Apache-2.0
#include "transcoder/decoding.hpp"

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "kernels/convert/convert.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"
#include "kernels/runtime.hpp"
#include "kernels/transcoder/activation/jump_relu.hpp"
#include "kernels/transcoder/decode/tied.hpp"
#include "transcoder/auxiliary.hpp"
#include "transcoder/exchange/feature_axis.hpp"
#include "transcoder/forward.hpp"
#include "transcoder/penalties.hpp"

namespace weft::transcoder {
namespace {

using kernels::AnyMatrix;
using kernels::Array;
using kernels::Form;
using kernels::Scalar;

/// Columns of the codes of a low-rank decoder.
std::int64_t code_columns(const Shape& shape) { return shape.decoder_begin(shape.n_layers); }

/// The columns of pair (s, t) in codes or their gradient rows.
AnyMatrix of_pair(const Shape& shape, AnyMatrix codes, std::int64_t source, std::int64_t target) {
  return codes.columns_from(shape.decoder_begin(source) + (target - source) * shape.rank, shape.rank);
}

/// Calls visit(source, target) for every pair of layers whose target is in `targets`.
template <class Visit>
void for_pairs(parallel::Range targets, const Visit& visit) {
  for (std::int64_t t = targets.begin; t < targets.end; ++t)
    for (std::int64_t s = 0; s <= t; ++s) visit(s, t);
}

}  // namespace

TargetLists::TargetLists(std::int64_t n_tokens, std::int64_t n_layers, std::int64_t entries,
                         training::StepArena& arena) {
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

// Forward
// --------------------------------------------------------------------------------------------------------------

DecoderForward::Buffers::Buffers(const Configuration& configuration, const Shape& shape,
                                 const parallel::GridShape& grid, std::int64_t max_tokens, std::int64_t group,
                                 std::int64_t chunk, training::StepArena& arena) {
  if (shape.decoder == Decoder::tied_target) {
    const SelectionShape selection = selection_shape(configuration, shape, max_tokens);
    std::int64_t entries = list_capacity(with_largest_k(configuration.transcoder), selection, grid);
    if (Auxiliary::wanted(configuration))
      entries = std::max(entries, list_capacity(Auxiliary::selection(configuration.transcoder), selection, grid));
    lists = TargetLists(group, shape.n_layers, entries, arena);
  }
  if (shape.decoder != Decoder::low_rank) return;
  const Scalar scalar = scalar_of(configuration.precision);
  const std::int64_t widest = shape.n_layers * shape.rank;
  codes = arena.take<std::byte>(chunk * code_columns(shape) * kernels::bytes_of(scalar));
  of_target = arena.take<std::byte>(chunk * widest * kernels::bytes_of(scalar));
  workspace = arena.take<std::byte>(kernels::gemm_workspace(
      scalar, kernels::product_type(configuration.optimizer.state, arena.backend() == kernels::Backend::cuda), scalar,
      chunk, shape.d_model, widest));
}

DecoderForward::DecoderForward(const Model& model, const kernels::Execution& execution, const Buffers& buffers)
    : model_(model), execution_(execution), buffers_(buffers) {}

void DecoderForward::begin(const kernels::SparseActivations& of) {
  lists_ = of;
  if (model_.shape().decoder != Decoder::tied_target) return;
  lists_ = buffers_.lists.lists(of);
  kernels::lists_by_target(execution_, of, model_.affine(), lists_, buffers_.lists.begin);
}

void DecoderForward::form(parallel::Range tokens, parallel::Range layers, AnyMatrix partial) const {
  if (model_.shape().decoder == Decoder::low_rank) {
    form_low_rank(tokens, layers, partial);
    return;
  }
  kernels::decode_forward(execution_, lists_, tokens.begin, tokens.size(), model_.decoder(), layers.begin, partial);
  if (model_.shape().decoder == Decoder::tied)
    kernels::sum_to_later_layers(execution_, partial, model_.shape().d_model);
}

/// The codes of a target are brought together, so that its sum over sources is one product, in fp32.
void DecoderForward::form_low_rank(parallel::Range tokens, parallel::Range layers, AnyMatrix partial) const {
  const Shape& shape = model_.shape();
  const std::int64_t n = tokens.size(), columns = code_columns(shape);
  const AnyMatrix codes{buffers_.codes.data, partial.type, n, columns, columns};
  kernels::decode_forward(execution_, lists_, tokens.begin, n, model_.decoder(), 0, codes);
  for (std::int64_t t = layers.begin; t < layers.end; ++t) {
    const std::int64_t width = (t + 1) * shape.rank;
    const AnyMatrix together{buffers_.of_target.data, partial.type, n, width, width};
    for_pairs({t, t + 1}, [&](std::int64_t s, std::int64_t) {
      kernels::copy_rows(execution_, of_pair(shape, codes, s, t), together.columns_from(s * shape.rank, shape.rank));
    });
    kernels::gemm(execution_, 1.0f, together, Form::plain,
                  kernels::product_weights(model_.basis()[static_cast<std::size_t>(t)]), Form::plain, 0.0f,
                  partial.columns_from((t - layers.begin) * shape.d_model, shape.d_model), buffers_.workspace);
  }
}

// Backward
// -------------------------------------------------------------------------------------------------------------

DecoderBackward::Buffers::Buffers(const Configuration& configuration, const Shape& shape,
                                  const parallel::GridShape& grid, std::int64_t n_tokens, std::int64_t entries,
                                  training::StepArena& arena) {
  const std::int64_t owned = largest_owned(shape, grid), n_keys = shape.n_layers * owned;
  const bool by_target = shape.decoder == Decoder::tied_target;
  arena.purpose("backward pass");
  workspace = arena.take<std::byte>(kernels::decode_backward_workspace(
      arena.backend(), shape.n_layers, owned,
      shape.decoder == Decoder::low_rank ? shape.decoder_columns(0) : shape.d_model,
      by_target ? shape.n_layers * entries : entries, Penalties::wanted(configuration)));
  if (by_target) {
    lists = TargetLists(n_tokens, shape.n_layers, entries, arena);
    hit_offsets = arena.take<std::int64_t>(n_keys + 1);
    hit_token = arena.take<std::uint32_t>(lists.key.size);
    hit_position = arena.take<std::uint32_t>(lists.key.size);
    delta = arena.take<float>(lists.key.size);
  }
  if (shape.affine) {
    const std::int64_t pairs = kernels::pair_of(shape.n_layers, shape.n_layers, shape.n_layers);
    offset_gradient = arena.take<float>(pairs * owned);
    scale_gradient = arena.take<float>(pairs * owned);
  }
  if (shape.decoder != Decoder::low_rank) return;
  const Scalar scalar = scalar_of(configuration.precision);
  const std::int64_t gradient = basis_rows(shape) * shape.d_model;
  codes = arena.take<std::byte>(n_tokens * code_columns(shape) * kernels::bytes_of(scalar));
  basis_gradients = arena.take<float>(grid.ranks() * gradient);
  if (grid.ranks() > 1) basis_gradient = arena.take<float>(gradient);
  const Scalar weights =
      kernels::product_type(configuration.optimizer.state, arena.backend() == kernels::Backend::cuda);
  dense_workspace = arena.take<std::byte>(
      std::max(kernels::gemm_workspace(scalar, scalar, Scalar::fp32, shape.rank, shape.d_model, n_tokens),
               kernels::gemm_workspace(scalar, weights, scalar, n_tokens, shape.rank, shape.d_model)));
}

std::int64_t DecoderBackward::basis_rows(const Shape& shape) {
  return shape.decoder == Decoder::low_rank ? code_columns(shape) : 0;
}

std::int64_t DecoderBackward::largest_message(const Shape& shape, std::int64_t n_ranks) {
  return n_ranks * basis_rows(shape) * shape.d_model * static_cast<std::int64_t>(sizeof(float));
}

DecoderBackward::DecoderBackward(const Model& model, parallel::DeviceCommunicator& world,
                                 const kernels::Execution& execution, const Buffers& buffers)
    : model_(model), world_(world), execution_(execution), buffers_(buffers) {}

/// Of the tokens of the whole batch and the features that this rank updates; then summed over all ranks, in their
/// order.
void DecoderBackward::form_basis_gradient(const Batch& batch) {
  const Shape& shape = model_.shape();
  if (shape.decoder != Decoder::low_rank) return;
  const std::int64_t columns = code_columns(shape), d = shape.d_model, size = columns * d;
  const AnyMatrix g = batch.gradient_rows, codes{buffers_.codes.data, g.type, g.rows, columns, columns},
                  own{buffers_.basis_gradients.data + world_.rank() * size, Scalar::fp32, columns, d, d};
  if (model_.owned().size() > 0) {
    kernels::decode_forward(execution_, batch.activations, 0, g.rows, model_.owned_decoder(), 0, codes);
    std::int64_t row = 0;
    for_pairs({0, shape.n_layers}, [&](std::int64_t s, std::int64_t t) {
      kernels::gemm(execution_, 1.0f, of_pair(shape, codes, s, t), Form::transposed, g.columns_from(t * d, d),
                    Form::plain, 0.0f, own.rows_from(row, shape.rank), buffers_.dense_workspace);
      row += shape.rank;
    });
  } else {
    device::zero(execution_, Array<float>{static_cast<float*>(own.data), size});
  }
  if (world_.size() == 1) return;
  const std::vector<std::int64_t> bytes(static_cast<std::size_t>(world_.size()),
                                        size * static_cast<std::int64_t>(sizeof(float)));
  world_.all_gather(buffers_.basis_gradients.data, bytes, "gradients of bases");
  kernels::sum_rows(execution_, {buffers_.basis_gradients.data, world_.size(), size, size}, buffers_.basis_gradient);
}

kernels::Matrix<float> DecoderBackward::basis_gradient() const {
  const std::int64_t d = model_.shape().d_model;
  float* const sum = world_.size() == 1 ? buffers_.basis_gradients.data : buffers_.basis_gradient.data;
  return {sum, basis_rows(model_.shape()), d, d};
}

void DecoderBackward::update_basis(const kernels::AdamStep* step) const {
  std::int64_t row = 0;
  for (const kernels::ParameterRows& basis : model_.basis()) {
    kernels::adam_rows(execution_, basis, 0, {basis_gradient().row(row), basis.rows, basis.columns, basis.columns},
                       step);
    row += basis.rows;
  }
}

void DecoderBackward::prepare_rows(const Batch& batch) {
  const Shape& shape = model_.shape();
  const std::int64_t d = shape.d_model;
  if (shape.decoder == Decoder::tied) kernels::sum_from_later_layers(execution_, batch.gradient_rows, d);
  if (shape.decoder == Decoder::low_rank) {
    const AnyMatrix of_codes = rows(batch.gradient_rows);
    for_pairs({0, shape.n_layers}, [&](std::int64_t s, std::int64_t t) {
      const AnyMatrix basis = kernels::product_weights(model_.basis()[static_cast<std::size_t>(t)]);
      kernels::gemm(execution_, 1.0f, batch.gradient_rows.columns_from(t * d, d), Form::plain,
                    basis.rows_from(s * shape.rank, shape.rank), Form::transposed, 0.0f, of_pair(shape, of_codes, s, t),
                    buffers_.dense_workspace);
    });
  }
  if (shape.decoder == Decoder::tied_target && model_.owned().size() > 0) {
    kernels::lists_by_target(execution_, batch.activations, model_.owned_affine(),
                             buffers_.lists.lists(batch.activations), buffers_.lists.begin);
    kernels::hits_by_target(execution_, batch.activations, batch.hits, buffers_.lists.begin,
                            {buffers_.hit_offsets, buffers_.hit_token, buffers_.hit_position});
  }
}

AnyMatrix DecoderBackward::rows(AnyMatrix gradient_rows) const {
  if (model_.shape().decoder != Decoder::low_rank) return gradient_rows;
  const std::int64_t columns = code_columns(model_.shape());
  return {buffers_.codes.data, gradient_rows.type, gradient_rows.rows, columns, columns};
}

void DecoderBackward::run(const Batch& batch, const kernels::AdamStep* step, Array<float> activation_gradient,
                          Array<double> squared_norm, const kernels::LateRows& late, Array<const float> factors,
                          Array<float> new_norms) {
  if (model_.owned().size() == 0) return;  // more ranks than features leave some without any
  const bool by_target = model_.shape().decoder == Decoder::tied_target;
  const kernels::SparseActivations lists = by_target ? buffers_.lists.lists(batch.activations) : batch.activations;
  const kernels::FeatureHits hits =
      by_target ? kernels::FeatureHits{buffers_.hit_offsets, buffers_.hit_token, buffers_.hit_position} : batch.hits;
  const Array<float> gradient = by_target ? buffers_.delta : activation_gradient;
  if (step != nullptr)
    kernels::decode_backward_update(execution_, lists, hits, rows(batch.gradient_rows), model_.owned_decoder(), step,
                                    gradient, squared_norm, buffers_.workspace, late, factors, new_norms);
  else
    kernels::decode_backward_norm(execution_, lists, hits, rows(batch.gradient_rows), model_.owned_decoder(), gradient,
                                  squared_norm, buffers_.workspace, late, factors);
  if (!by_target) return;
  kernels::gradient_by_source(execution_, batch.activations, model_.owned_affine(), buffers_.lists.begin,
                              buffers_.delta, activation_gradient);
  if (model_.shape().affine)
    kernels::affine_gradient(execution_, batch.activations, batch.hits, model_.owned_affine(), buffers_.lists.begin,
                             buffers_.delta, affine_gradient());
}

kernels::PairAffine DecoderBackward::affine_gradient() const {
  const std::int64_t owned = model_.owned().size(), pairs = model_.affine().scale.rows;
  return {{buffers_.offset_gradient.data, pairs, owned, owned}, {buffers_.scale_gradient.data, pairs, owned, owned}};
}

void DecoderBackward::add_affine_norms(const kernels::AdamStep* step, Array<double> squared_norm) const {
  const std::int64_t owned = model_.owned().size(), n_layers = model_.shape().n_layers;
  if (!model_.shape().affine || owned == 0) return;
  const kernels::PairAffine gradient = affine_gradient();
  for_pairs({0, n_layers}, [&](std::int64_t s, std::int64_t t) {
    const std::int64_t pair = kernels::pair_of(s, t, n_layers);
    for (const kernels::Matrix<float>& of : {gradient.offset, gradient.scale})
      kernels::add_row_squares(execution_, {of.row(pair), owned, 1, 1}, step, {squared_norm.data + s * owned, owned});
  });
}

void DecoderBackward::update_affine(const kernels::AdamStep* step) const {
  const kernels::PairAffine gradient = affine_gradient();
  std::int64_t i = 0;
  for (const kernels::ParameterVector& vector : model_.owned_affine_vectors()) {
    const kernels::Matrix<float>& of = i < gradient.offset.rows ? gradient.offset : gradient.scale;
    kernels::adam_vector(execution_, vector, {of.row(i % of.rows), of.columns}, step);
    ++i;
  }
}

// Norms
// ----------------------------------------------------------------------------------------------------------------

void feature_norms(const kernels::Execution& execution, const Shape& shape,
                   std::span<const kernels::ParameterRows> decoder, Array<float> norm) {
  kernels::decoder_norms(execution, decoder, norm);
  if (shape.decoder == Decoder::tied_target) kernels::norms_of_features(execution, shape.n_layers, norm);
}

}  // namespace weft::transcoder
