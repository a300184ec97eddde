// SPDX-License-Identifier: Apache-2.0
//
// GPT-2: LayerNorm, learned positions, biases, GELU in the tanh form. The three projections of attention are one
// tensor, and matrices are [inputs, outputs].
#include "language_model/huggingface/families/families.hpp"
#include "language_model/huggingface/keys/decoder_keys.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::language_model::families {
namespace {

void read_gpt2(ConfigKeys& keys, HuggingfaceConfig& out) {
  ModelSettings& model = out.model;
  model.preset = Preset::gpt2;
  model.d_model = keys.integer("n_embd", kMostWidth);
  model.layers = keys.integer("n_layer", kMostLayers);
  model.heads = model.kv_heads = keys.integer("n_head", kMostWidth);
  model.d_mlp = keys.integer_or("n_inner", 4 * model.d_model, 8 * kMostWidth);
  out.positions = keys.integer("n_positions", kMostRows);
  model.mlp = activation(keys, "activation_function", "gelu_new", false);
  model.norm_epsilon = keys.number_or("layer_norm_epsilon", 1e-5, kEpsilons);
  model.tied = keys.flag("tie_word_embeddings", out.family->tied_by_default);
  keys.require("scale_attn_weights", true);
  keys.require("scale_attn_by_inverse_layer_idx", false);
  keys.require("add_cross_attention", false);
  require_heads(keys, model, "n_embd", "n_head", "n_head", "");
}

Json write_gpt2(const Architecture& architecture) {
  const ModelSettings& model = architecture.model;
  return {{"n_embd", model.d_model},
          {"n_layer", model.layers},
          {"n_head", model.heads},
          {"n_inner", model.d_mlp},
          {"n_positions", architecture.longest_text()},
          {"n_ctx", architecture.longest_text()},
          {"activation_function", model.mlp == MlpActivation::gelu ? "gelu_new" : activation_name(model.mlp)},
          {"layer_norm_epsilon", model.norm_epsilon}};
}

constexpr MlpActivation kActivations[] = {MlpActivation::gelu, MlpActivation::gelu_exact};
constexpr std::string_view kMasks[] = {".attn.bias", ".attn.masked_bias"};
// clang-format off
constexpr TensorName kGpt2Tensors[] = {
    {"embedding/tokens",    "transformer.wte"},
    {"embedding/positions", "transformer.wpe"},
    {"final_norm",          "transformer.ln_f"},
    {"head",                "lm_head"},
    {"attention/query",     "transformer.h.{}.attn.c_attn"},
    {"attention/key",       "transformer.h.{}.attn.c_attn"},
    {"attention/value",     "transformer.h.{}.attn.c_attn"},
    {"attention/output",    "transformer.h.{}.attn.c_proj"},
    {"mlp/up",              "transformer.h.{}.mlp.c_fc"},
    {"mlp/down",            "transformer.h.{}.mlp.c_proj"}};
constexpr TensorName kGpt2Norms[] = {
    {"attention_norm",      "transformer.h.{}.ln_1"},
    {"mlp_norm",            "transformer.h.{}.ln_2"}};
// clang-format on
constexpr Family kGpt2{.name = "gpt2",
                       .class_name = "GPT2LMHeadModel",
                       .features = {.norm = Norm::layer,
                                    .position = Position::learned,
                                    .mlp = kActivations,
                                    .biases = kAllBiases,
                                    .grouped_keys = false,
                                    .own_head_size = false},
                       .read = read_gpt2,
                       .write = write_gpt2,
                       .tensors = kGpt2Tensors,
                       .norms = kGpt2Norms,
                       .prefix = "transformer.",
                       .blocks = "transformer.h.",
                       .redundant = kMasks,
                       .tied_by_default = true,
                       .inputs_first = true};

}  // namespace

const Family& gpt2() { return kGpt2; }

}  // namespace weft::language_model::families
