// SPDX-License-Identifier: Apache-2.0
//
// Phi 3: as Llama, with a window in all blocks, and rotary positions of a part of a head, of which LongRoPE makes the
// wavelengths longer. The projections of attention are one tensor, gate and up another.
#include "language_model/huggingface/families/decoder_tensors.hpp"
#include "language_model/huggingface/families/families.hpp"
#include "language_model/huggingface/keys/decoder_keys.hpp"
#include "language_model/huggingface/keys/rotary_keys.hpp"

namespace weft::language_model::families {
namespace {

constexpr RotaryKeys kPhi3Rotary{.length = "original_max_position_embeddings", .default_length = 4096};

void read_phi3(ConfigKeys& keys, HuggingfaceConfig& out) {
  read_sizes(keys, out);
  read_rotary(keys, out, kPhi3Rotary);
  read_gated_mlp(keys, out);
  keys.require("attention_bias", false);
  read_window(keys, out.model, 0);
}

Json write_phi3(const Architecture& architecture) {
  Json config = decoder_keys(architecture);
  write_rotary(architecture.model, config, kPhi3Rotary);
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
constexpr kernels::RopeMethod kPhi3Methods[] = {kernels::RopeMethod::longrope};
constexpr Family kPhi3{.name = "phi3",
                       .class_name = "Phi3ForCausalLM",
                       .features = {.windows = BlockWindows::all, .rope_methods = kPhi3Methods, .partial_rotary = true},
                       .read = read_phi3,
                       .write = write_phi3,
                       .tensors = kPhi3Tensors,
                       .norms = kPreNorms};

}  // namespace

const Family& phi3() { return kPhi3; }

}  // namespace weft::language_model::families
