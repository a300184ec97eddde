// SPDX-License-Identifier: Apache-2.0
//
// Sizes and memory of a Transformer.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "kernels/gemm/fp8.hpp"
#include "kernels/gemm/gemm.hpp"
#include "language_model/transformer.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Scalar;

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

kernels::NormBlocks norm_blocks(const TransformerSettings& settings, std::int64_t rows) {
  return settings.examples ? kernels::NormBlocks::of(settings.rows, settings.length) : kernels::NormBlocks::of(rows);
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

namespace {

constexpr std::int64_t kLogitBytes = std::int64_t{256} << 20;

/// Rows of a chunk of the head. By default equal chunks: products of a short last one are slow.
std::int64_t chunk_rows(TransformerSettings settings) {
  if (settings.examples) {
    settings.examples = false;
    return std::max(settings.length, chunk_rows(settings) / settings.length * settings.length);
  }
  if (settings.memory.head_chunk > 0) return std::min(settings.memory.head_chunk, settings.rows);
  const std::int64_t row_bytes = aligned_columns(settings.architecture.vocabulary) * kernels::bytes_of(settings.type);
  const std::int64_t most = std::max<std::int64_t>(1, kLogitBytes / row_bytes);
  if (settings.rows <= most) return settings.rows;
  const std::int64_t chunks = (settings.rows + most - 1) / most, rows = (settings.rows + chunks - 1) / chunks;
  return std::min(most, (rows + 7) / 8 * 8);
}

/// Workspace of the products of a Transformer.
std::int64_t product_workspace(const TransformerSettings& settings, kernels::Backend backend) {
  const Architecture& a = settings.architecture;
  const Scalar type = settings.type;
  std::int64_t bytes = 0;
  const auto add = [&](std::int64_t rows, std::int64_t outputs, std::int64_t inputs, Scalar weight) {
    bytes = std::max({bytes, kernels::gemm_workspace(type, weight, type, rows, outputs, inputs),
                      kernels::gemm_workspace(type, weight, type, rows, inputs, outputs)});
  };
  for (const training::ParameterSpec& spec : parameter_specs(a)) {
    if (!spec.is_matrix()) continue;
    const Scalar weight =
        type == Scalar::fp16
            ? type
            : training::planes_of(spec, settings.policy, backend, training::Moments::none).front().type;
    add(settings.rows, a.model.d_model, a.query_width(), weight);
    add(settings.rows, a.projection_width(), a.model.d_model, weight);
    add(settings.rows, a.hidden_width(), a.model.d_model, weight);
    add(settings.rows, a.model.d_mlp, a.model.d_model, weight);
    add(chunk_rows(settings), a.vocabulary, a.model.d_model, weight);
    if (settings.adapters)
      for (const LoraTarget& target : lora_targets(a.model)) {
        if (!a.lora.adapts(target.name)) continue;
        for (std::int64_t parts = 1; parts <= kMostAdapters; ++parts)
          add(settings.rows, parts * a.lora.rank, target.inputs, weight);
        add(settings.rows, target.outputs, a.lora.rank, weight);
      }
    break;  // matrices are stored alike
  }
  return bytes;
}

/// Number of products of a block that have biases.
constexpr std::int64_t kBiasedProducts = 4;

/// Outputs and inputs of the products of a block.
std::array<std::pair<std::int64_t, std::int64_t>, 4> block_products(const Architecture& a) {
  const std::int64_t width = a.model.d_model;
  return {{{a.projection_width(), width}, {width, a.query_width()}, {a.hidden_width(), width}, {width, a.model.d_mlp}}};
}

}  // namespace

TransformerSettings transformer_settings(const Configuration& configuration, const Architecture& architecture,
                                         const parallel::GridShape& grid, std::int64_t rank) {
  AttentionKernels attention = configuration.attention;
  if (library_attention(configuration)) attention.implementation = configuration.attention_kernels;
  const bool book_keeping = configuration.privacy.enabled && configuration.privacy.mode == privacy::Mode::book_keeping;
  return {.architecture = part_of(architecture, grid, rank),
          .type = activation_type(configuration),
          .fp8_forward = configuration.fp8_forward,
          .policy = configuration.optimizer.state,
          .rows = configuration.micro_tokens(),
          .length = configuration.data.sequence,
          .shortest = configuration.data.shortest(),
          .memory = configuration.memory,
          .examples = configuration.privacy.enabled,
          // Sums that are formed when a block is left need no rows of it afterwards.
          .block_rows_stay = book_keeping && !configuration.privacy.sums_by_part(),
          .head_rows_stay = book_keeping,
          .attention = attention};
}

Transformer::Buffers::Buffers(const TransformerSettings& settings, training::StepArena& arena) {
  const Architecture& a = settings.architecture;
  const ModelSettings& model = a.model;
  const std::int64_t rows = settings.rows, width = model.d_model;
  const auto take = [&](std::int64_t columns) {
    const std::int64_t bytes = rows * columns * kernels::bytes_of(settings.type);
    return AnyMatrix{arena.take<std::byte>(bytes).data, settings.type, rows, columns, columns};
  };
  const auto take_statistics = [&](bool exists) -> kernels::NormStatistics {
    if (!exists) return {};
    return {arena.take<float>(model.norm == Norm::layer ? rows : 0), arena.take<float>(rows)};
  };
  const bool swaps = settings.swaps();
  // An array of every block, or one for all blocks.
  const auto kept_or_shared = [&](bool kept, auto& shared, auto&& make) {
    if (kept) {
      const auto made = make();
      if (swaps) swap.add(blocks.size() - 1, made);
      return made;
    }
    if (!shared) shared = make();
    return *shared;
  };
  const bool keeps = settings.gradients;
  const bool keeps_inside = keeps && settings.memory.recompute != Recompute::block;
  const bool keeps_norms = keeps_inside && settings.memory.recompute != Recompute::norm;
  const bool keeps_activation = keeps_norms && settings.memory.recompute != Recompute::activation;
  kernels::QueryKey query_key;
  query_key.heads = model.heads;
  query_key.kv_heads = model.kv_heads;
  query_key.norm = model.qk_norm;

  const std::vector<kernels::Attention> attentions = attention_shapes(settings);
  const auto largest = [&](const auto& size) {
    std::int64_t most = 0;
    for (const kernels::Attention& attention : attentions) most = std::max<std::int64_t>(most, size(attention));
    return most;
  };
  const std::int64_t kept_flags =
      model.sparse_blocks == 0 ? 0 : largest([](const kernels::Attention& shape) { return shape.block_pairs(); });

  arena.purpose("activations");
  struct {
    std::optional<AnyMatrix> residual, attention_input, projected, attended, mixed, attention_raw, middle, mlp_input,
        hidden, activated, mlp_raw;
    std::optional<kernels::NormStatistics> attention_norm, attention_post_norm, mlp_norm, mlp_post_norm;
    std::optional<kernels::Array<float>> inverse, log_sum;
    std::optional<kernels::Array<std::uint8_t>> kept;
  } shared;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) {
    if (swaps && layer >= kResidentBlocks) {
      blocks.push_back(blocks[static_cast<std::size_t>(layer - kResidentBlocks)]);
      continue;
    }
    Activations& block = blocks.emplace_back();
    const auto matrix = [&](bool kept, std::optional<AnyMatrix>& of_all, std::int64_t columns) {
      return kept_or_shared(kept, of_all, [&] { return take(columns); });
    };
    const auto statistics = [&](std::optional<kernels::NormStatistics>& of_all, bool exists) {
      return kept_or_shared(keeps_inside, of_all, [&] { return take_statistics(exists); });
    };
    const auto numbers = [&](std::optional<kernels::Array<float>>& of_all, std::int64_t size) {
      return kept_or_shared(keeps_inside, of_all, [&] { return arena.take<float>(size); });
    };
    block.residual = matrix(keeps, shared.residual, width);
    block.attention_input =
        model.normalises_inputs() ? matrix(keeps_norms, shared.attention_input, width) : block.residual;
    block.projected = matrix(keeps_inside, shared.projected, a.projection_width());
    block.attended_rows = model.qk_norm == QueryKeyNorm::none
                              ? block.projected
                              : matrix(keeps_inside, shared.attended, a.projection_width());
    block.mixed = matrix(keeps_inside, shared.mixed, a.query_width());
    block.middle = matrix(keeps_inside, shared.middle, width);
    block.mlp_input = model.normalises_inputs() ? matrix(keeps_norms, shared.mlp_input, width) : block.middle;
    block.hidden = matrix(keeps_inside, shared.hidden, a.hidden_width());
    block.activated = matrix(keeps_activation, shared.activated, model.d_mlp);
    if (model.normalises_outputs()) {
      block.attention_raw = matrix(keeps_inside, shared.attention_raw, width);
      block.mlp_raw = matrix(keeps_inside, shared.mlp_raw, width);
    }
    block.attention_norm = statistics(shared.attention_norm, model.normalises_inputs());
    block.attention_post_norm = statistics(shared.attention_post_norm, model.normalises_outputs());
    block.mlp_norm = statistics(shared.mlp_norm, model.normalises_inputs());
    block.mlp_post_norm = statistics(shared.mlp_post_norm, model.normalises_outputs());
    block.inverse = numbers(shared.inverse, rows * query_key.inverses_per_row());
    block.log_sum = numbers(shared.log_sum, rows * model.heads);
    block.kept = kept_or_shared(keeps_inside, shared.kept, [&] { return arena.take<std::uint8_t>(kept_flags); });
  }
  sublayer = take(width);
  final_residual = take(width);
  final_output = take(width);
  final_norm = take_statistics(true);
  if (swaps) swap.take_host(blocks.size(), arena);

  arena.purpose("head");
  head_chunk = chunk_rows(settings);
  const std::int64_t of_logits = settings.keeps_head_rows() ? rows : head_chunk, stride = aligned_columns(a.vocabulary);
  logits = {arena.take<std::byte>(of_logits * stride * kernels::bytes_of(settings.type)).data, settings.type, of_logits,
            stride, stride};

  softmax_parts = arena.take<kernels::SoftmaxPart>(a.tensor_ranks > 1 ? head_chunk : 0);

  const kernels::Execution execution{.backend = arena.backend()};
  std::int64_t attention_bytes = largest([&](const kernels::Attention& attention) {
    const std::int64_t choice = model.sparse_blocks == 0 ? 0 : kernels::select_key_blocks_workspace(attention);
    return std::max(choice, settings.attention.workspace(execution, attention, settings.type));
  });
  arena.purpose("backward pass");
  if (settings.gradients) {
    const bool stay = settings.keeps_block_rows();
    // Products before a norm have other gradients than those of the residual stream.
    const std::size_t residuals = stay && !model.normalises_outputs() ? 2 * blocks.size() + 1 : 1;
    while (residual_gradients.size() < residuals) residual_gradients.push_back(take(width));
    input_gradient = take(width);
    if (model.dropout > 0 || model.normalises_outputs()) output_gradient = take(width);
    wide_gradient = take(std::max(model.d_mlp, a.query_width()));
    projection_gradient = take(a.projection_width());
    // If rows are kept, those of the last block are in `wide_gradient`.
    mixed_gradient = stay ? take(a.query_width()) : wide_gradient.columns_from(0, a.query_width());
    for (std::size_t layer = 0; layer < blocks.size(); ++layer) {
      Activations& block = blocks[layer];
      block.hidden_gradient = wide_gradient.columns_from(0, model.d_mlp);
      block.projection_gradient = projection_gradient;
      if (!stay || layer + 1 == blocks.size()) continue;
      // Rows that stay lie where the later block, whose backward pass is complete, had its own.
      if (model.mlp == kernels::MlpActivation::gelu) block.hidden_gradient = blocks[layer + 1].hidden;
      block.projection_gradient = blocks[layer + 1].projected;
    }
    const bool trained = a.lora.rank == 0;
    const bool has_weights = trained && (model.qk_norm == QueryKeyNorm::head || model.qk_norm == QueryKeyNorm::width);
    query_rows = arena.take<float>(has_weights ? rows * a.query_width() : 0);
    key_rows = arena.take<float>(has_weights ? rows * a.key_width() : 0);
    temperature_rows = arena.take<float>(trained && model.qk_norm == QueryKeyNorm::scaled ? rows : 0);
    const std::int64_t blocks =
        settings.examples ? norm_blocks(settings, rows).count(rows) : kernels::NormBlocks::most(rows);
    for (kernels::Matrix<float>* sums : {&norm_sums.weight, &norm_sums.bias, &norm_sums.input})
      *sums = {arena.take<float>(blocks * width).data, blocks, width, width};
    examples = arena.take<std::int64_t>(settings.examples ? kExampleRows * (rows / settings.length + 1) : 0);
    attention_bytes = std::max(attention_bytes, largest([&](const kernels::Attention& attention) {
                                 return settings.attention.backward_workspace(execution, attention, settings.type);
                               }));
  }
  if (a.lora.rank > 0 && settings.adapters) {
    arena.purpose("adapters");
    adapter_rows = take(kMostAdapters * a.lora.rank);
    if (settings.gradients) adapter_gradient = take(kMostAdapters * a.lora.rank);
    if (settings.gradients && a.lora.dropout > 0)
      adapter_input = take(std::max({model.d_model, a.query_width(), model.d_mlp}));
  }
  arena.purpose("workspaces");
  attention_workspace = arena.take<std::byte>(attention_bytes);
  std::int64_t product_bytes = language_model::product_workspace(settings, arena.backend());
  if (settings.fp8_forward) {
    std::int64_t row_bytes = 0;
    for (const auto& [outputs, inputs] : block_products(a)) {
      row_bytes = std::max(row_bytes, kernels::coded_bytes(rows, inputs));
      product_bytes = std::max(product_bytes, kernels::gemm_coded_workspace(arena.backend(), rows, outputs, inputs));
    }
    coded_rows = arena.take<std::byte>(row_bytes);
    for (std::int64_t layer = 0; layer < model.layers; ++layer)
      for (const auto& [outputs, inputs] : block_products(a))
        coded_weights.push_back(arena.take<std::byte>(kernels::coded_bytes(outputs, inputs)));
  }
  product_workspace = arena.take<std::byte>(product_bytes);
  std::int64_t elements = aligned_columns(a.vocabulary) * width;
  for (const auto& [outputs, inputs] : block_products(a)) elements += model.layers * outputs * inputs;
  if (settings.adapters)
    for (const LoraTarget& target : lora_targets(a.model))
      if (a.lora.adapts(target.name)) elements += model.layers * a.lora.rank * (target.outputs + target.inputs);
  half_weights = arena.take<kernels::half>(settings.type == Scalar::fp16 ? elements : 0);
  if (settings.rounds_biases(arena.backend())) {
    rounded_biases =
        arena.take<kernels::bf16>(model.layers * (aligned_columns(a.projection_width()) +
                                                  aligned_columns(a.hidden_width()) + 2 * aligned_columns(width)));
    bias_copies = arena.take<kernels::RoundedCopy>(model.layers * kBiasedProducts);
  }
}

}  // namespace weft::language_model
