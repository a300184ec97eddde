// SPDX-License-Identifier: Apache-2.0
#include "language_model/blocks/attention_sublayer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Scalar;
using model::GradientRows;

kernels::Attention attention_shape(const ModelSettings& model, std::int64_t sequences, std::int64_t length,
                                   kernels::AttentionImplementation implementation) {
  return {
      .sequences = sequences,
      .length = length,
      .heads = model.heads,
      .kv_heads = model.kv_heads,
      .head_size = model.head_size(),
      .scale = static_cast<float>(model.attention_scale > 0 ? model.attention_scale
                                                            : 1 / std::sqrt(static_cast<double>(model.head_size()))),
      .softcap = static_cast<float>(model.attention_softcap),
      .window = model.window,
      .first_key = {},
      .kept = {},
      .dropout = {},
      .implementation = implementation};
}

std::vector<kernels::Attention> attention_shapes(const TransformerSettings& settings) {
  std::vector<kernels::Attention> shapes;
  const std::int64_t shortest = settings.shortest > 0 ? settings.shortest : settings.length;
  for (std::int64_t length = shortest; length <= settings.length; length *= 2) {
    shapes.push_back(attention_shape(settings.architecture.model, (settings.rows + length - 1) / length, length,
                                     settings.attention.implementation));
    if (settings.architecture.model.full_every == 0) continue;
    shapes.push_back(shapes.back());
    shapes.back().window = 0;
  }
  return shapes;
}

/// Heads that share a head of keys stay together.
AttentionSublayer::Heads AttentionSublayer::heads() const {
  const std::int64_t key_unit = model().head_size(), query_unit = model().heads / model().kv_heads * key_unit;
  return {{"query", architecture().query_width(), query_unit}, {"key", architecture().key_width(), key_unit}};
}

void AttentionSublayer::declare(ParameterList& list) const {
  const auto [query, key] = heads();
  list.product(prefix(), {query, key, {"value", key.width, key.unit}});
  if (model().qk_norm == QueryKeyNorm::head) {
    list.shared_by_heads(prefix() + "query_norm/weight", model().head_size());
    list.shared_by_heads(prefix() + "key_norm/weight", model().head_size());
  } else if (model().qk_norm == QueryKeyNorm::width) {
    list.by_outputs(prefix() + "query_norm/weight", query);
    list.by_outputs(prefix() + "key_norm/weight", key);
  } else if (model().qk_norm == QueryKeyNorm::scaled) {
    list.shared_by_heads(prefix() + "temperature", 1);
  }
  list.output(prefix(), "output", query.width, query.unit);
  const std::int64_t heads = model().heads, keys = model().kv_heads;
  list.describe(fmt::format("{} head{} of {}{}", heads, heads == 1 ? "" : "s", model().head_size(),
                            keys == heads ? "" : fmt::format(" ({} of keys)", keys)));
}

/// Causal: 2 T Q operations per token forward, 2.5 times as many backward.
std::vector<SublayerWork> AttentionSublayer::work(double length) const {
  const auto query = static_cast<double>(architecture().query_width()),
             rows = static_cast<double>(architecture().projection_width()) + query, operations = 2 * length * query;
  return {{.phase = "attention", .forward = {rows, operations}, .backward = {2 * rows, 2.5 * operations}}};
}

void AttentionSublayer::take(BlockMemory& memory, const Sublayer* later) {
  using Again = BlockMemory::FormedAgain;
  const TransformerSettings& settings = memory.settings();
  const std::int64_t rows = settings.rows, queries = architecture().query_width(), keys = architecture().key_width(),
                     width = architecture().projection_width();
  const std::vector<kernels::Attention> shapes = attention_shapes(settings);
  const auto largest = [&](const auto& size) {
    std::int64_t most = 0;
    for (const kernels::Attention& shape : shapes) most = std::max<std::int64_t>(most, size(shape));
    return most;
  };
  const bool sparse = model().sparse_blocks > 0;
  query_key_.heads = model().heads;
  query_key_.kv_heads = model().kv_heads;
  query_key_.norm = model().qk_norm;
  projected_ = memory.matrix(width, Again::block);
  packed_ = model().qk_norm == QueryKeyNorm::none ? projected_ : memory.matrix(width, Again::block);
  mixed_ = memory.matrix(queries, Again::block);
  inverse_ = memory.array<float>(rows * query_key_.inverses_per_row(), Again::block);
  log_sum_ = memory.array<float>(rows * model().heads, Again::block);
  kept_ = memory.array<std::uint8_t>(
      sparse ? largest([](const kernels::Attention& shape) { return shape.block_pairs(); }) : 0, Again::block);

  // Where rows stay, inner gradients are those of the last block's MLP, and gradients lie where the later block, whose
  // backward pass is complete, had its rows.
  const bool stay = settings.keeps_block_rows();
  mixed_gradient_ = stay ? memory.gradient(queries) : memory.inner_gradient(queries);
  projection_gradient_ = memory.gradient(width);
  if (stay && later != nullptr) projection_gradient_ = dynamic_cast<const AttentionSublayer&>(*later).projected_;
  const bool trained = architecture().lora.rank == 0;
  const bool has_weights = trained && (model().qk_norm == QueryKeyNorm::head || model().qk_norm == QueryKeyNorm::width);
  query_rows_ = memory.gradient_numbers(has_weights ? rows * queries : 0);
  key_rows_ = memory.gradient_numbers(has_weights ? rows * keys : 0);
  temperature_rows_ = memory.gradient_numbers(trained && model().qk_norm == QueryKeyNorm::scaled ? rows : 0);

  const kernels::Execution execution{.backend = memory.arena().backend()};
  workspace_ = memory.workspace(largest([&](const kernels::Attention& shape) {
    const std::int64_t choice = sparse ? kernels::select_key_blocks_workspace(shape) : 0,
                       forward = settings.attention.workspace(execution, shape, settings.type),
                       backward = settings.gradients
                                      ? settings.attention.backward_workspace(execution, shape, settings.type)
                                      : 0;
    return std::max({choice, forward, backward});
  }));
  if (settings.codes(block())) mixed_codes_ = memory.array<std::uint8_t>(rows * queries, Again::block);
}

void AttentionSublayer::bind(const Layers& layers, Products& products) {
  products_ = &products;
  projection_ = &layers.product(prefix() + "query");
  output_ = &layers.product(prefix() + "output");
  products.keep_input(*output_, mixed_codes_);
  query_norm_ = layers.find(prefix() + "query_norm/weight");
  key_norm_ = layers.find(prefix() + "key_norm/weight");
  temperature_ = layers.find(prefix() + "temperature");
  query_key_ = {.heads = model().heads,
                .kv_heads = model().kv_heads,
                .head_size = model().head_size(),
                .norm = model().qk_norm,
                .epsilon = static_cast<float>(model().norm_epsilon),
                .query_weight = layers.values(query_norm_),
                .key_weight = layers.values(key_norm_),
                .temperature = layers.values(temperature_).data,
                .rotary = layers.rotary(block()),
                .rotary_columns = model().rotated_columns(),
                .positions = {}};
}

void AttentionSublayer::forward(const Pass& pass, const kernels::LinearInput& x) {
  const Context& context = products_->context();
  const AnyMatrix packed = pass.rows_of(packed_), mixed = pass.rows_of(mixed_);
  products_->multiply(pass, *projection_, x, pass.rows_of(projected_));
  context.timers.phase("attention");
  if (transforms_queries()) {
    kernels::QueryKey transform = query_key_;
    transform.positions = pass.tokens.positions;
    kernels::query_key(context.execution, transform, pass.rows_of(projected_), packed,
                       pass.rows_of(inverse_, query_key_.inverses_per_row()));
  }
  if (pass.attention != nullptr && (*pass.attention)(block(), packed, mixed)) return;
  const std::int64_t queries = architecture().query_width(), keys = architecture().key_width();
  const kernels::Attention shape = attention(pass);
  if (shape.kept.size > 0)
    kernels::select_key_blocks(context.execution, shape, {model().sparse_local, model().sparse_blocks},
                               packed.columns_from(0, queries), packed.columns_from(queries, keys), kept_of(pass),
                               workspace_);
  context.settings.attention.forward(context.execution, shape, packed.columns_from(0, queries),
                                     packed.columns_from(queries, keys), packed.columns_from(queries + keys, keys),
                                     mixed, pass.rows_of(log_sum_, model().heads), workspace_);
  products_->code_input(pass, *output_, mixed);
}

void AttentionSublayer::output(const Pass& pass, const kernels::LinearOutput& y) {
  products_->multiply(pass, *output_, pass.rows_of(mixed_), y);
}

void AttentionSublayer::backward(const Pass& pass, AnyMatrix x, const OutputGradient& dy, AnyMatrix dx) {
  const Context& context = products_->context();
  const AnyMatrix packed = pass.rows_of(packed_), mixed = pass.rows_of(mixed_),
                  mixed_gradient = pass.rows_of(mixed_gradient_), gradient = pass.rows_of(projection_gradient_);
  products_->propagate(pass, *output_, mixed, dy.rows, mixed_gradient);
  context.timers.phase("attention");
  const std::int64_t queries = architecture().query_width(), keys = architecture().key_width();
  context.settings.attention.backward(context.execution, attention(pass), packed.columns_from(0, queries),
                                      packed.columns_from(queries, keys), packed.columns_from(queries + keys, keys),
                                      mixed, pass.rows_of(log_sum_, model().heads), mixed_gradient,
                                      gradient.columns_from(0, queries), gradient.columns_from(queries, keys),
                                      gradient.columns_from(queries + keys, keys), workspace_);
  if (transforms_queries()) transform_backward(pass, gradient);
  const OutputGradient of_projection = products_->propagate(pass, *projection_, x, gradient, dx);
  // Gradients of weights are formed while the ranks add up that of the input.
  products_->give_gradients(pass, *output_, mixed, dy);
  products_->give_gradients(pass, *projection_, x, of_projection);
}

/// Gradients of norm and rotation, in place. The weights of a norm of heads are shared by all of them: a row per head.
void AttentionSublayer::transform_backward(const Pass& pass, AnyMatrix gradient) {
  const Context& context = products_->context();
  const std::int64_t n = gradient.rows;
  kernels::QueryKey transform = query_key_;
  transform.positions = pass.tokens.positions;
  const bool by_head = transform.norm == QueryKeyNorm::head, weighted = query_rows_.size > 0;
  const auto rows = [&](kernels::Array<float> memory, std::int64_t heads) -> kernels::Matrix<float> {
    const std::int64_t columns = (by_head ? 1 : heads) * transform.head_size;
    return {memory.data, weighted ? n * (by_head ? heads : 1) : 0, columns, columns};
  };
  const kernels::Matrix<float> query_rows = rows(query_rows_, transform.heads),
                               key_rows = rows(key_rows_, transform.kv_heads),
                               temperature_rows{temperature_rows_.data, temperature_rows_.size > 0 ? n : 0, 1, 1};
  kernels::query_key_backward(context.execution, transform, pass.rows_of(projected_),
                              pass.rows_of(inverse_, query_key_.inverses_per_row()), gradient, query_rows, key_rows,
                              temperature_rows);
  context.timers.phase("weight gradients");
  const auto give = [&](std::size_t parameter, const kernels::Matrix<float>& values) {
    if (parameter == kNoParameter) return;
    if (context.settings.examples)
      return pass.sink->take({.form = GradientRows::Form::column_sum,
                              .parameter = parameter,
                              .gradients = {values.data, Scalar::fp32, values.rows, values.columns, values.stride},
                              .examples = context.examples.of(values.rows, values.rows / n * context.settings.length)});
    // A sink that adds up takes at most n rows at a time.
    for (std::int64_t row = 0; row < values.rows; row += n)
      pass.sink->take({.form = GradientRows::Form::column_sum,
                       .parameter = parameter,
                       .gradients = {values.row(row), Scalar::fp32, n, values.columns, values.stride}});
  };
  give(query_norm_, query_rows);
  give(key_norm_, key_rows);
  give(temperature_, temperature_rows);
}

kernels::Array<std::uint8_t> AttentionSublayer::kept_of(const Pass& pass) const {
  if (kept_.size == 0) return {};
  const auto pairs = [&](std::int64_t sequences) {
    return attention_shape(model(), sequences, pass.tokens.length, kernels::AttentionImplementation::own).block_pairs();
  };
  return {kept_.data + pairs(pass.tokens.begin / pass.tokens.length), pairs(pass.tokens.sequences)};
}

kernels::Attention AttentionSublayer::attention(const Pass& pass) const {
  const TransformerSettings& settings = products_->context().settings;
  const Tokens& tokens = pass.tokens;
  const std::int64_t shorter = settings.length / tokens.length;
  const bool whole = settings.gradients && pass.micro_batch_rows == settings.rows &&
                     settings.length % tokens.length == 0 && std::has_single_bit(static_cast<std::uint64_t>(shorter));
  kernels::Attention attention =
      attention_shape(model(), tokens.sequences, tokens.length,
                      whole ? settings.attention.implementation : kernels::AttentionImplementation::own);
  attention.window = model().window_of(block());
  attention.first_key = tokens.first_key;
  attention.kept = kept_of(pass);
  if (pass.drops() && model().attention_dropout > 0)
    attention.dropout = {static_cast<float>(model().attention_dropout), static_cast<std::uint32_t>(block()),
                         tokens.first_row, settings.architecture.first_head, pass.step};
  return attention;
}

}  // namespace weft::language_model
