// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/token_embedding.hpp"

#include "kernels/bf16.hpp"
#include "kernels/language/embedding/embedding.hpp"
#include "kernels/language/residual/residual.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Scalar;
using model::GradientRows;

namespace {

constexpr std::uint32_t kEmbeddingSite = 0;  // of dropout

}  // namespace

void TokenEmbedding::forward(const Pass& pass, AnyMatrix h) const {
  context_.timers.phase("embedding");
  const Architecture& part = context_.settings.architecture;
  kernels::embed(context_.execution, context_.layers.token_embedding(), part.first_token, pass.tokens.ids,
                 part.tensor_rank == 0 ? context_.layers.position_embedding() : AnyMatrix{}, pass.tokens.positions, h);
  context_.start_sum(h);
  context_.await_sum(h);
  scale(h);
  context_.drop(kEmbeddingSite, pass, h);
}

void TokenEmbedding::backward(const Pass& pass, AnyMatrix dh) const {
  context_.timers.phase("embedding");
  context_.drop(kEmbeddingSite, pass, dh);
  scale(dh);
  const auto give = [&](std::size_t table, kernels::Array<const std::uint32_t> ids) {
    pass.sink->take({.form = GradientRows::Form::lookup,
                     .parameter = table,
                     .gradients = dh,
                     .ids = ids,
                     .examples = context_.examples.of(dh.rows),
                     .gradients_stay = true});
  };
  give(context_.layers.token_table(), pass.tokens.ids);
  if (context_.layers.position_table() == kNoParameter) return;
  // Positions are not negative.
  const kernels::Array<const std::int32_t> positions = pass.tokens.positions;
  give(context_.layers.position_table(), {reinterpret_cast<const std::uint32_t*>(positions.data), positions.size});
}

/// Forward and backward pass. The factor is rounded to the type of the rows, as in the transformers library.
void TokenEmbedding::scale(AnyMatrix x) const {
  auto factor = static_cast<float>(context_.model().embedding_scale);
  if (factor == 1) return;
  if (x.type == Scalar::bf16) factor = static_cast<float>(kernels::to_bf16(factor));
  if (x.type == Scalar::fp16) factor = static_cast<float>(kernels::to_half(factor));
  kernels::scale_rows(context_.execution, x, factor);
}

}  // namespace weft::language_model
