// SPDX-License-Identifier: Apache-2.0
//
// Names of tensors that most families share.
#pragma once

#include "language_model/huggingface/keys/model_family.hpp"

namespace weft::language_model::families {

// clang-format off
inline constexpr TensorName kDecoderTensors[] = {
    {"embedding/tokens",      "model.embed_tokens"},
    {"final_norm",            "model.norm"},
    {"head",                  "lm_head"},
    {"attention/query",       "model.layers.{}.self_attn.q_proj"},
    {"attention/key",         "model.layers.{}.self_attn.k_proj"},
    {"attention/value",       "model.layers.{}.self_attn.v_proj"},
    {"attention/query_norm",  "model.layers.{}.self_attn.q_norm"},
    {"attention/key_norm",    "model.layers.{}.self_attn.k_norm"},
    {"attention/output",      "model.layers.{}.self_attn.o_proj"},
    {"mlp/gate",              "model.layers.{}.mlp.gate_proj"},
    {"mlp/up",                "model.layers.{}.mlp.up_proj"},
    {"mlp/down",              "model.layers.{}.mlp.down_proj"}};
/// Norms of a block: two before the sublayers; two after them; four.
inline constexpr TensorName kPreNorms[] = {
    {"attention_norm",        "model.layers.{}.input_layernorm"},
    {"mlp_norm",              "model.layers.{}.post_attention_layernorm"}};
inline constexpr TensorName kPostNorms[] = {
    {"attention_post_norm",   "model.layers.{}.post_attention_layernorm"},
    {"mlp_post_norm",         "model.layers.{}.post_feedforward_layernorm"}};
inline constexpr TensorName kBothNorms[] = {
    {"attention_norm",        "model.layers.{}.input_layernorm"},
    {"attention_post_norm",   "model.layers.{}.post_attention_layernorm"},
    {"mlp_norm",              "model.layers.{}.pre_feedforward_layernorm"},
    {"mlp_post_norm",         "model.layers.{}.post_feedforward_layernorm"}};
// clang-format on

}  // namespace weft::language_model::families
