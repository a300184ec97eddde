// SPDX-License-Identifier: Apache-2.0
//
// Phi 3: as Llama, with a window in all blocks. The projections of attention are one tensor, gate and up another.
#include "language_model/huggingface/decoder_keys.hpp"
#include "language_model/huggingface/families/decoder_tensors.hpp"
#include "language_model/huggingface/families/families.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::language_model::families {
namespace {

void read_phi3(ConfigKeys& keys, HuggingfaceConfig& out) {
  read_decoder(keys, out);
  read_gated_mlp(keys, out);
  keys.require("attention_bias", false);
  keys.integer_or("original_max_position_embeddings", out.positions, kMostRows);  // of longrope
  read_window(keys, out.model, 0);
}

Json write_phi3(const Architecture& architecture) {
  Json config = decoder_keys(architecture);
  config["sliding_window"] = architecture.model.window > 0 ? Json(architecture.model.window) : Json();
  return config;
}

// clang-format off
constexpr TensorName kPhi3Tensors[] = {
    {"embedding/tokens",  "model.embed_tokens"},
    {"final_norm",        "model.norm"},
    {"head",              "lm_head"},
    {"attention/query",   "model.layers.{}.self_attn.qkv_proj"},
    {"attention/key",     "model.layers.{}.self_attn.qkv_proj"},
    {"attention/value",   "model.layers.{}.self_attn.qkv_proj"},
    {"attention/output",  "model.layers.{}.self_attn.o_proj"},
    {"mlp/gate",          "model.layers.{}.mlp.gate_up_proj"},
    {"mlp/up",            "model.layers.{}.mlp.gate_up_proj"},
    {"mlp/down",          "model.layers.{}.mlp.down_proj"}};
// clang-format on
constexpr Family kPhi3{.name = "phi3",
                       .class_name = "Phi3ForCausalLM",
                       .features = {.windows = BlockWindows::all},
                       .read = read_phi3,
                       .write = write_phi3,
                       .tensors = kPhi3Tensors,
                       .norms = kPreNorms};

}  // namespace

const Family& phi3() { return kPhi3; }

}  // namespace weft::language_model::families
