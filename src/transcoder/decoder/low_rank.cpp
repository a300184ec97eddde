// SPDX-License-Identifier: Apache-2.0
#include "transcoder/decoder/low_rank.hpp"

#include <algorithm>
#include <vector>

#include "device/memory.hpp"
#include "kernels/convert/convert_rows.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/reduce/reduce.hpp"
#include "transcoder/axes/feature_axis.hpp"

namespace weft::transcoder {

using kernels::AnyMatrix;
using kernels::Array;
using kernels::Form;
using kernels::Scalar;

LowRank::LowRank(const Sizes& sizes, const ForwardSizes& forward, model::StepArena& arena)
    : SparseDecoder(sizes.shape) {
  const Scalar scalar = scalar_of(sizes.configuration.precision);
  const std::int64_t widest = shape_.n_layers * shape_.rank;
  codes_ = arena.take<std::byte>(forward.chunk * code_columns(shape_) * kernels::bytes_of(scalar));
  of_target_ = arena.take<std::byte>(forward.chunk * widest * kernels::bytes_of(scalar));
  const Scalar weights =
      kernels::product_type(sizes.configuration.optimizer.state, arena.backend() == kernels::Backend::cuda);
  workspace_of_target_ =
      arena.take<std::byte>(kernels::gemm_workspace(scalar, weights, scalar, forward.chunk, shape_.d_model, widest));
}

/// Returns the columns of pair (s, t) in codes or their gradient rows.
AnyMatrix LowRank::of_pair(AnyMatrix codes, std::int64_t source, std::int64_t target) const {
  return codes.columns_from(shape_.decoder_begin(source) + (target - source) * shape_.rank, shape_.rank);
}

/// Copies the codes of a target to contiguous memory, so that its sum over sources is one product, in fp32.
void LowRank::form(parallel::Range tokens, parallel::Range layers, AnyMatrix partial) const {
  const std::int64_t n = tokens.size(), columns = code_columns(shape_), d = shape_.d_model;
  const AnyMatrix codes{codes_.data, partial.type, n, columns, columns};
  kernels::decode_forward(execution_, lists_, tokens.begin, n, model().decoder(), 0, codes);
  for (std::int64_t t = layers.begin; t < layers.end; ++t) {
    const std::int64_t width = (t + 1) * shape_.rank;
    const AnyMatrix together{of_target_.data, partial.type, n, width, width};
    for (std::int64_t s = 0; s <= t; ++s)
      kernels::copy_rows(execution_, of_pair(codes, s, t), together.columns_from(s * shape_.rank, shape_.rank));
    kernels::gemm(execution_, 1.0f, together, Form::plain,
                  kernels::product_weights(model().basis()[static_cast<std::size_t>(t)]), Form::plain, 0.0f,
                  partial.columns_from((t - layers.begin) * d, d), workspace_of_target_);
  }
}

void LowRank::take_backward(const Sizes& sizes, const BackwardSizes& backward, model::StepArena& arena) {
  const Scalar scalar = scalar_of(sizes.configuration.precision);
  const std::int64_t n_tokens = backward.n_tokens, d = shape_.d_model, gradient = code_columns(shape_) * d;
  take_workspace(sizes, backward.entries, shape_.decoder_columns(0), arena);
  all_codes_ = arena.take<std::byte>(n_tokens * code_columns(shape_) * kernels::bytes_of(scalar));
  basis_gradients_ = arena.take<float>(sizes.grid.ranks() * gradient);
  if (sizes.grid.ranks() > 1) basis_gradient_sum_ = arena.take<float>(gradient);
  const Scalar weights =
      kernels::product_type(sizes.configuration.optimizer.state, arena.backend() == kernels::Backend::cuda);
  dense_workspace_ =
      arena.take<std::byte>(std::max(kernels::gemm_workspace(scalar, scalar, Scalar::fp32, shape_.rank, d, n_tokens),
                                     kernels::gemm_workspace(scalar, weights, scalar, n_tokens, shape_.rank, d)));
}

SparseDecoder::Prepared LowRank::prepare(const Lists& all, AnyMatrix gradient_rows, device::Event&,
                                         parallel::DeviceCommunicator& world) {
  const std::int64_t columns = code_columns(shape_), d = shape_.d_model;
  const AnyMatrix codes{all_codes_.data, gradient_rows.type, gradient_rows.rows, columns, columns};
  form_basis_gradient(all, gradient_rows, codes, world);
  for (std::int64_t t = 0; t < shape_.n_layers; ++t) {
    const AnyMatrix basis = kernels::product_weights(model().basis()[static_cast<std::size_t>(t)]);
    for (std::int64_t s = 0; s <= t; ++s)
      kernels::gemm(execution_, 1.0f, gradient_rows.columns_from(t * d, d), Form::plain,
                    basis.rows_from(s * shape_.rank, shape_.rank), Form::transposed, 0.0f, of_pair(codes, s, t),
                    dense_workspace_);
  }
  return {codes, basis_gradient_};
}

/// Forms the gradients of all V_t over the tokens of the whole batch and the features that this rank updates; then sums
/// them over all ranks, in rank order.
void LowRank::form_basis_gradient(const Lists& all, AnyMatrix g, AnyMatrix codes, parallel::DeviceCommunicator& world) {
  const std::int64_t columns = code_columns(shape_), d = shape_.d_model, size = columns * d;
  const AnyMatrix own{basis_gradients_.data + world.rank() * size, Scalar::fp32, columns, d, d};
  if (owned() > 0) {
    kernels::decode_forward(execution_, all.activations, 0, g.rows, model().owned_decoder(), 0, codes);
    std::int64_t row = 0;
    for (std::int64_t t = 0; t < shape_.n_layers; ++t)
      for (std::int64_t s = 0; s <= t; ++s) {
        kernels::gemm(execution_, 1.0f, of_pair(codes, s, t), Form::transposed, g.columns_from(t * d, d), Form::plain,
                      0.0f, own.rows_from(row, shape_.rank), dense_workspace_);
        row += shape_.rank;
      }
  } else {
    device::zero(execution_, Array<float>{static_cast<float*>(own.data), size});
  }
  basis_gradient_ = {basis_gradients_.data, columns, d, d};
  if (world.size() == 1) return;
  const std::vector<std::int64_t> bytes(static_cast<std::size_t>(world.size()),
                                        size * static_cast<std::int64_t>(sizeof(float)));
  world.all_gather(basis_gradients_.data, bytes, "gradients of bases");
  kernels::sum_rows(execution_, {basis_gradients_.data, world.size(), size, size}, basis_gradient_sum_);
  basis_gradient_.data = basis_gradient_sum_.data;
}

void LowRank::update_rest(const kernels::AdamStep* step, Array<double>) {
  if (step == nullptr) return;
  std::int64_t row = 0;
  for (const kernels::ParameterRows& basis : model().basis()) {
    kernels::adam_rows(execution_, basis, 0, {basis_gradient_.row(row), basis.rows, basis.columns, basis.columns},
                       step);
    row += basis.rows;
  }
}

}  // namespace weft::transcoder
