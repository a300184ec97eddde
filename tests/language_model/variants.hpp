// SPDX-License-Identifier: Apache-2.0
//
// Small models that together have every option of the architecture.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "language_model/step/transformer.hpp"

namespace weft::testing {

using namespace language_model;

inline constexpr std::int64_t kSequences = 3, kLength = 10;

inline TransformerSettings gpt2() {
  TransformerSettings settings;
  ModelSettings& model = settings.architecture.model;
  model.layers = 2;
  model.heads = 4;
  model.kv_heads = 4;
  model.d_model = 32;
  model.d_mlp = 48;
  settings.architecture.vocabulary = 29;
  settings.architecture.positions = kLength;
  settings.rows = kSequences * kLength;
  settings.length = kLength;
  return settings;
}

inline TransformerSettings llama() {
  TransformerSettings settings = gpt2();
  ModelSettings& model = settings.architecture.model;
  model.preset = Preset::llama;
  model.norm = Norm::rms;
  model.mlp = MlpActivation::swiglu;
  model.position = Position::rope;
  model.tied = false;
  model.bias = false;
  return settings;
}

/// The models of these tests: each option at least once, with others.
inline std::vector<std::pair<std::string, TransformerSettings>> variants() {
  std::vector<std::pair<std::string, TransformerSettings>> all = {{"gpt2", gpt2()}, {"llama", llama()}};
  const auto add = [&](const std::string& name, TransformerSettings base, auto&& change) {
    change(base.architecture.model);
    all.emplace_back(name, base);
  };
  add("gpt2, untied, dropout", gpt2(), [](ModelSettings& model) {
    model.tied = false;
    model.dropout = 0.2;
  });
  add("gpt2, relu2, window, post", gpt2(), [](ModelSettings& model) {
    model.mlp = MlpActivation::relu2;
    model.window = 4;
    model.norm_position = NormPosition::post;
  });
  add("llama, grouped queries, norm of heads", llama(), [](ModelSettings& model) {
    model.kv_heads = 2;
    model.qk_norm = QueryKeyNorm::head;
  });
  add("llama, norm of the width, geglu, softcaps", llama(), [](ModelSettings& model) {
    model.kv_heads = 1;
    model.qk_norm = QueryKeyNorm::width;
    model.mlp = MlpActivation::geglu;
    model.logit_softcap = 8;
    model.attention_softcap = 5;
  });
  add("llama, unit queries and keys, both norms, dropout, tied, biases", llama(), [](ModelSettings& model) {
    model.qk_norm = QueryKeyNorm::scaled;
    model.norm_position = NormPosition::both;
    model.dropout = 0.1;
    model.tied = true;
    model.bias = true;
  });
  add("llama, grouped queries, biases of queries, keys and values, and of down", llama(), [](ModelSettings& model) {
    model.kv_heads = 2;
    model.biases = {"query", "key", "value", "down"};
  });
  add("gpt-neox: parallel sublayers, rotary positions of a part of a head, exact gelu, untied", gpt2(),
      [](ModelSettings& model) {
        model.position = Position::rope;
        model.rope_columns = 4;
        model.residual = Residual::parallel;
        model.mlp = MlpActivation::gelu_exact;
        model.tied = false;
      });
  add("llama, parallel sublayers, both norms, dropout", llama(), [](ModelSettings& model) {
    model.residual = Residual::parallel;
    model.norm_position = NormPosition::both;
    model.dropout = 0.1;
  });
  add("gemma 3 and smollm 3: two bases, norms of partly rotated heads, blocks without positions", llama(),
      [](ModelSettings& model) {
        model.layers = 3;
        model.qk_norm = QueryKeyNorm::head;
        model.window = 4;
        model.full_every = 2;
        model.rope_window_base = 100;
        model.rope_columns = 6;
        model.unrotated_every = 3;
        model.rope_scaling = {.factor = 2, .length = 8, .low = 1, .high = 32, .method = kernels::RopeMethod::yarn};
      });
  add("llama, dropout of attention, grouped queries", llama(), [](ModelSettings& model) {
    model.attention_dropout = 0.2;
    model.kv_heads = 2;
  });
  add("gemma 2: heads wider than d_model / heads, scales, full attention in every second block", llama(),
      [](ModelSettings& model) {
        model.kv_heads = 2;
        model.own_head_size = 16;
        model.mlp = MlpActivation::geglu;
        model.norm_position = NormPosition::both;
        model.tied = true;
        model.attention_softcap = 5;
        model.window = 4;
        model.full_every = 2;
        model.attention_scale = 0.2;
        model.embedding_scale = 3;
        model.rope_scaling = {.factor = 4, .length = 8, .low = 1, .high = 4};
      });
  return all;
}

}  // namespace weft::testing
