// SPDX-License-Identifier: Apache-2.0
//
// A family of models of the transformers library of Hugging Face, as data: what it can express, how its config.json is
// read and written, and the names of its tensors. One file in families/ per family; families/families.cpp lists them.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/json.hpp"
#include "language_model/blocks/architecture.hpp"
#include "language_model/huggingface/keys/config_keys.hpp"

namespace weft::language_model {

struct Family;

struct HuggingfaceConfig {
  const Family* family = nullptr;
  ModelSettings model = {};
  std::int64_t vocabulary = 0;
  std::int64_t positions = 0;  ///< longest context of the training; learned positions: rows of their table
};

inline constexpr kernels::RopeMethod kRopeMethods[] = {kernels::RopeMethod::bands, kernels::RopeMethod::yarn,
                                                       kernels::RopeMethod::dynamic, kernels::RopeMethod::longrope};
inline constexpr MlpActivation kGatedActivations[] = {MlpActivation::swiglu, MlpActivation::geglu};

/// Blocks that can have a window: the same in all, or by a pattern.
enum class BlockWindows { none, all, by_block };

/// Products with a bias: query, key and value; these and output; gate, up and down.
enum class Biases { none, query_key_value, attention, mlp, all, other };
Biases biases_of(const ModelSettings&);
void set_biases(ModelSettings&, Biases);
inline constexpr Biases kNoBiases[] = {Biases::none}, kAllBiases[] = {Biases::all},
                        kAttentionBiases[] = {Biases::none, Biases::attention};

/// The values of [language_model] that a family can express. The other settings are free.
struct Features {
  Norm norm = Norm::rms;
  Position position = Position::rope;
  std::span<const MlpActivation> mlp = kGatedActivations;
  std::span<const Biases> biases = kNoBiases;
  QueryKeyNorm qk_norm = QueryKeyNorm::none;
  NormPosition norm_position = NormPosition::pre;
  bool grouped_keys = true;   ///< fewer heads of keys than of queries
  bool own_head_size = true;  ///< other than d_model / heads
  BlockWindows windows = BlockWindows::none;
  std::span<const kernels::RopeMethod> rope_methods = kRopeMethods;
  bool partial_rotary = false;  ///< rotary positions of a part of a head
  bool unrotated_blocks = false;
  bool parallel_residual = false;  ///< besides the sequential one
  bool window_base = false;        ///< rotary positions of their own in blocks with a window
  bool caps_and_scale = false;     ///< attention_scale, attention_softcap, logit_softcap
  bool scaled_embedding = false;   ///< by sqrt(d_model)
};

/// The name of a parameter, and of the tensor that it is in or is a part of, without "/weight" or ".weight". {}: number
/// of the block. Parameters with the same tensor are parts of it, in the order of the table. The first one is the token
/// embedding.
struct TensorName {
  std::string_view own, library;
  std::string_view other = {};  ///< of other versions of the library: read too
};

inline constexpr std::string_view kRotaryFrequencies[] = {".self_attn.rotary_emb.inv_freq"};

struct Family {
  std::string_view name;        ///< model_type
  std::string_view class_name;  ///< of the library, for causal language models
  Features features;
  /// Reads the keys of config.json besides those of all families.
  void (*read)(ConfigKeys&, HuggingfaceConfig&);
  /// These keys, for a model that the family can express.
  Json (*write)(const Architecture&);
  std::span<const TensorName> tensors, norms;  ///< norms: of a block
  std::string_view prefix = "model.";          ///< of the tensors without the head
  std::string_view blocks = "model.layers.";   ///< of the tensors of a block, before its number
  /// Tensors of a block in older files that follow from the architecture: masks, frequencies of rotary positions.
  std::span<const std::string_view> redundant = kRotaryFrequencies;
  bool tied_by_default = false;  ///< without the key tie_word_embeddings
  bool inputs_first = false;     ///< matrices of the blocks are [inputs, outputs]
  bool heads_together = false;   ///< outputs of a head follow one another in a tensor of several projections
  float norm_offset = 0;         ///< norms multiply by this + weight
};

}  // namespace weft::language_model
