// SPDX-License-Identifier: Apache-2.0
#include "language_model/attribution/frozen_text.hpp"

#include <algorithm>

#include "kernels/convert/affine.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/language/attention/score_matrix.hpp"
#include "language_model/blocks/attention_sublayer.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Scalar;

std::string freezing_obstacle(const Architecture& architecture) {
  if (architecture.model.sparse_blocks > 0)
    return "its attention chooses blocks of keys (language_model.sparse_blocks), a choice that is not frozen; take a "
           "model with dense attention";
  if (architecture.lora.rank > 0) return "it has low-rank adapters; merge them first, with weft lm merge";
  return "";
}

TransformerSettings freezing_settings(const Configuration& configuration, const Architecture& architecture,
                                      std::int64_t tokens) {
  TransformerSettings settings = transformer_settings(configuration, architecture);
  settings.type = Scalar::fp32;
  settings.fp8 = false;
  settings.rows = settings.length = tokens;
  settings.shortest = 0;
  // Each block keeps its statistics, as for a backward pass.
  settings.memory = {.head_chunk = 1};
  settings.examples = settings.block_rows_stay = settings.head_rows_stay = false;
  settings.attention.implementation = kernels::AttentionImplementation::own;
  return settings;
}

FrozenText::Buffers::Buffers(const ModelSettings& model, std::int64_t tokens, model::StepArena& arena) {
  arena.purpose("frozen text");
  const std::int64_t columns = model.layers * model.d_model;
  for (kernels::Matrix<float>* matrix : {&inputs, &outputs})
    *matrix = {arena.take<float>(tokens * columns).data, tokens, columns, columns};
  for (std::int64_t block = 0; block < model.layers; ++block)
    patterns.push_back(arena.take<float>(model.heads * tokens * tokens));
  log_sum = arena.take<float>(model.heads * tokens);
  workspace = arena.take<std::byte>(
      kernels::gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::fp32, tokens, tokens, model.head_size()));
}

FrozenText::FrozenText(const ModelSettings& model, std::int64_t tokens, Transformer& transformer,
                       const kernels::Execution& execution, model::StepArena& arena)
    : model_(model), transformer_(transformer), execution_(execution), buffers_(model, tokens, arena) {}

void FrozenText::freeze(const Tokens& tokens) {
  tokens_ = tokens.rows();
  transformer_.tap([&](std::int64_t block, const AnyMatrix& input, const AnyMatrix& output) {
    const auto of_block = [&](const AnyMatrix& all) {
      return all.columns_from(block * model_.d_model, model_.d_model);
    };
    kernels::affine_rows(execution_, input, {}, {}, {}, of_block(mlp_inputs()));
    kernels::affine_rows(execution_, output, {}, {}, {}, of_block(mlp_outputs()));
  });
  transformer_.hook_attention([&](std::int64_t block, const AnyMatrix& packed, const AnyMatrix&) {
    form_patterns(block, packed);
    return false;
  });
  transformer_.forward(tokens, nullptr);
  transformer_.tap({});
  transformer_.hook_attention({});
}

/// p = softmax(scale q kᵀ) over the keys that a query reads.
void FrozenText::form_patterns(std::int64_t block, AnyMatrix packed) {
  kernels::Attention shape = attention_shape(model_, 1, tokens_, kernels::AttentionImplementation::own);
  shape.window = model_.window_of(block);
  const std::int64_t size = shape.head_size, queries = shape.heads * size, group = shape.heads / shape.kv_heads;
  for (std::int64_t head = 0; head < shape.heads; ++head)
    kernels::gemm(execution_, 1, packed.columns_from(head * size, size), kernels::Form::plain,
                  packed.columns_from(queries + head / group * size, size), kernels::Form::transposed, 0,
                  pattern(block, head), buffers_.workspace);
  const AnyMatrix all = pattern(block, 0);
  kernels::softmax_scores(execution_, shape, {all.data, all.type, shape.heads * tokens_, tokens_, tokens_},
                          {buffers_.log_sum.data, shape.heads * tokens_});
}

AnyMatrix FrozenText::pattern(std::int64_t block, std::int64_t head) const {
  float* const first = buffers_.patterns[static_cast<std::size_t>(block)].data;
  return {first + head * tokens_ * tokens_, Scalar::fp32, tokens_, tokens_, tokens_};
}

FrozenText::Sublayer FrozenText::sublayer(std::int64_t number) const {
  const ResidualSublayer& sublayer = transformer_.sublayers()[static_cast<std::size_t>(number)];
  Sublayer norms;
  if (sublayer.norm()) norms.input = {sublayer.norm()->values, {sublayer.statistics().inverse.data, tokens_}};
  if (sublayer.post_norm())
    norms.output = {sublayer.post_norm()->values, {sublayer.post_statistics().inverse.data, tokens_}};
  return norms;
}

FrozenText::Norm FrozenText::final_norm() const {
  return {transformer_.final_norm().values, {transformer_.final_statistics().inverse.data, tokens_}};
}

}  // namespace weft::language_model
