// SPDX-License-Identifier: Apache-2.0
//
// Keys of config.json that most families of the transformers library share.
#pragma once

#include <vector>

#include "language_model/huggingface/keys/model_family.hpp"

namespace weft::language_model {

/// Requires sizes of heads that the kernels have. `width`, `heads`, `kv_heads` and `size` are the keys of the family.
void require_heads(ConfigKeys&, const ModelSettings&, const char* width, const char* heads, const char* kv_heads,
                   const char* size);

/// The activation that a key names; without the key `absent`.
MlpActivation activation(ConfigKeys&, const char* key, const char* absent, bool gated);
const char* activation_name(MlpActivation);

/// Reads the keys of a decoder with RMSNorm: sizes and norms. needs_head_size: without "head_dim" the config is
/// damaged; else it is d_model / heads.
void read_sizes(ConfigKeys&, HuggingfaceConfig&, bool needs_head_size = false);
/// These keys, and rotary positions.
void read_decoder(ConfigKeys&, HuggingfaceConfig&, bool needs_head_size = false);
/// Reads "hidden_act" and "tie_word_embeddings", which most of these families have.
void read_gated_mlp(ConfigKeys&, HuggingfaceConfig&);
/// Reads "attention_bias" and, if the family can have biases of the MLP, "mlp_bias".
void read_biases(ConfigKeys&, HuggingfaceConfig&);
void write_biases(const ModelSettings&, Json& config);
/// The inverse of read_sizes and read_gated_mlp.
Json decoder_keys(const Architecture&, const char* activation_key = "hidden_act");

/// Reads what Gemma 2 and 3 share besides: scaled embedding, scale and caps of attention, cap of the logits. The caps
/// are the library's without their keys; 0: none.
void read_gemma(ConfigKeys&, HuggingfaceConfig&, double attention_cap, double logit_cap);
/// The inverse of read_sizes, read_gemma and read_windows.
Json gemma_keys(const Architecture&);

/// True for each block that has a window, from layer_types or `by_rule`.
std::vector<bool> sliding_blocks(ConfigKeys&, const ModelSettings&, const std::vector<bool>& by_rule);
/// Reads the windows of these blocks: null is none, and without the key the library has one of 4096.
void read_windows(ConfigKeys&, ModelSettings&, const std::vector<bool>& by_rule);
/// Reads "sliding_window" of all blocks: null is none; `absent` without the key, 0 for none.
void read_window(ConfigKeys&, ModelSettings&, std::int64_t absent);
/// read_windows where "use_sliding_window" is true, else none.
void read_used_windows(ConfigKeys&, ModelSettings&, const std::vector<bool>& by_rule);
void write_used_windows(const ModelSettings&, Json& config);
/// read_used_windows of the blocks from "max_window_layers" on, as Qwen has them.
void read_windows_of_last_layers(ConfigKeys&, ModelSettings&);
/// Adds "layer_types" and "sliding_window".
void write_windows(const ModelSettings&, Json& config);

}  // namespace weft::language_model
