// SPDX-License-Identifier: Apache-2.0
//
// GPT-NeoX, such as Pythia: LayerNorm, biases, GELU, rotary positions of a part of a head, parallel sublayers. The
// projections of attention are one tensor, in which those of each head are together.
#include "language_model/huggingface/families/families.hpp"
#include "language_model/huggingface/keys/decoder_keys.hpp"
#include "language_model/huggingface/keys/rotary_keys.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::language_model::families {
namespace {

constexpr RotaryKeys kNeoxRotary{.base = "rotary_emb_base", .share = "rotary_pct", .default_share = 0.25};

void read_neox(ConfigKeys& keys, HuggingfaceConfig& out) {
  ModelSettings& model = out.model;
  model.preset = Preset::gpt2;
  model.position = Position::rope;
  model.d_model = keys.integer("hidden_size", kMostWidth);
  model.layers = keys.integer("num_hidden_layers", kMostLayers);
  model.heads = model.kv_heads = keys.integer("num_attention_heads", kMostWidth);
  model.d_mlp = keys.integer("intermediate_size", 8 * kMostWidth);
  out.positions = keys.integer("max_position_embeddings", kMostRows);
  model.mlp = activation(keys, "hidden_act", "gelu", false);
  model.norm_epsilon = keys.number_or("layer_norm_eps", 1e-5, kEpsilons);
  model.tied = keys.flag("tie_word_embeddings", out.family->tied_by_default);
  if (keys.flag("use_parallel_residual", true)) model.residual = Residual::parallel;
  keys.require("attention_bias", true);
  require_heads(keys, model, "hidden_size", "num_attention_heads", "num_attention_heads", "");
  read_rotary(keys, out, kNeoxRotary);
  keys.find("classifier_dropout");  // of another kind of model
  keys.find("is_decoder");
}

Json write_neox(const Architecture& architecture) {
  const ModelSettings& model = architecture.model;
  Json config = {{"hidden_size", model.d_model},
                 {"num_hidden_layers", model.layers},
                 {"num_attention_heads", model.heads},
                 {"intermediate_size", model.d_mlp},
                 {"max_position_embeddings", architecture.longest_text()},
                 {"hidden_act", activation_name(model.mlp)},
                 {"layer_norm_eps", model.norm_epsilon},
                 {"use_parallel_residual", model.residual == Residual::parallel}};
  write_rotary(model, config, kNeoxRotary);
  if (model.rope_columns == 0) config[kNeoxRotary.share] = 1.0;
  return config;
}

constexpr MlpActivation kNeoxActivations[] = {MlpActivation::gelu_exact, MlpActivation::gelu};
constexpr std::string_view kNeoxBuffers[] = {".attention.bias", ".attention.masked_bias",
                                             ".attention.rotary_emb.inv_freq"};
// clang-format off
constexpr TensorName kNeoxTensors[] = {
    {"embedding/tokens",  "gpt_neox.embed_in"},
    {"final_norm",        "gpt_neox.final_layer_norm"},
    {"head",              "embed_out", "lm_head"},
    {"attention/query",   "gpt_neox.layers.{}.attention.query_key_value"},
    {"attention/key",     "gpt_neox.layers.{}.attention.query_key_value"},
    {"attention/value",   "gpt_neox.layers.{}.attention.query_key_value"},
    {"attention/output",  "gpt_neox.layers.{}.attention.dense"},
    {"mlp/up",            "gpt_neox.layers.{}.mlp.dense_h_to_4h"},
    {"mlp/down",          "gpt_neox.layers.{}.mlp.dense_4h_to_h"}};
constexpr TensorName kNeoxNorms[] = {
    {"attention_norm",    "gpt_neox.layers.{}.input_layernorm"},
    {"mlp_norm",          "gpt_neox.layers.{}.post_attention_layernorm"}};
// clang-format on
constexpr Family kNeox{.name = "gpt_neox",
                       .class_name = "GPTNeoXForCausalLM",
                       .features = {.norm = Norm::layer,
                                    .mlp = kNeoxActivations,
                                    .biases = kAllBiases,
                                    .grouped_keys = false,
                                    .own_head_size = false,
                                    .partial_rotary = true,
                                    .parallel_residual = true},
                       .read = read_neox,
                       .write = write_neox,
                       .tensors = kNeoxTensors,
                       .norms = kNeoxNorms,
                       .prefix = "gpt_neox.",
                       .blocks = "gpt_neox.layers.",
                       .redundant = kNeoxBuffers,
                       .heads_together = true};

}  // namespace

const Family& gpt_neox() { return kNeox; }

}  // namespace weft::language_model::families
