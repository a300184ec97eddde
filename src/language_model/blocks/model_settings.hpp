// SPDX-License-Identifier: Apache-2.0
//
// Settings from which the sizes and the arithmetic of a model follow: tables [language_model], [memory] and [lora].
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/language/activation/mlp_activation.hpp"
#include "kernels/language/attention/attention.hpp"
#include "kernels/language/norm/norm.hpp"
#include "kernels/language/rope/query_key.hpp"
#include "kernels/optimize/parameter_rows.hpp"

namespace weft::language_model {

/// Bounds of sizes, with which no product of sizes and bytes of an element exceeds 64 bits.
inline constexpr std::int64_t kMostWidth = 1 << 20, kMostLayers = 4096, kMostRows = 1 << 28;

using kernels::MlpActivation;
using kernels::Norm;
using kernels::QueryKeyNorm;

/// Presets of the architecture: gpt2 (Radford et al. 2019), llama (Touvron et al. 2023).
enum class Preset { gpt2, llama };
enum class Position { learned, rope };
/// Position of the norms of a block: the input of a sublayer (Xiong et al. 2020), its output before it is added to the
/// residual stream (OLMo 2, 2024), or both (Gemma 2, 2024).
enum class NormPosition { pre, post, both };
/// The input of a block's MLP: the residual stream after the attention, or before it (GPT-J, 2021).
enum class Residual { sequential, parallel };
/// Activations that the backward pass forms again instead of keeping: those of the MLP's activation function; these and
/// the outputs of norms; everything of a block but its input.
enum class Recompute { none, activation, norm, block };

/// Table [language_model].
struct ModelSettings {
  Preset preset = Preset::gpt2;
  std::int64_t layers = 12;
  std::int64_t heads = 12;
  std::int64_t kv_heads = 12;  ///< divides heads: grouped-query attention (Ainslie et al. 2023)
  std::int64_t d_model = 768;
  std::int64_t d_mlp = 3072;
  std::int64_t own_head_size = 0;  ///< language_model.head_size; 0: d_model / heads
  Norm norm = Norm::layer;
  MlpActivation mlp = MlpActivation::gelu;
  Position position = Position::learned;
  double rope_base = 10'000;
  kernels::RopeScaling rope_scaling;
  std::int64_t rope_columns = 0;     ///< of a head that are rotated; 0: all
  double rope_window_base = 0;       ///< of blocks with a window, whose wavelengths stay as they are; 0: as in others
  std::int64_t unrotated_every = 0;  ///< every such block has no positions; 0: none
  QueryKeyNorm qk_norm = QueryKeyNorm::none;
  NormPosition norm_position = NormPosition::pre;
  Residual residual = Residual::sequential;
  bool tied = true;  ///< the head is the transpose of the token embedding
  bool bias = true;  ///< of all products and, with norm = "layer", of norms
  /// Products that have a bias; empty: all or none, as `bias` states.
  std::vector<std::string> biases = {};
  /// Parts whose parameters are trained (model_parameters.hpp, `is_of_part`); the others are frozen. Empty: all.
  std::vector<std::string> train = {};
  double dropout = 0;
  double attention_dropout = 0;  ///< of the probabilities of attention
  double logit_softcap = 0;      ///< 0: none
  double attention_softcap = 0;  ///< 0: none
  double attention_scale = 0;    ///< of the products of queries and keys; 0: 1 / sqrt(head_size())
  double embedding_scale = 1;    ///< the residual stream begins with the embedding times this
  std::int64_t window = 0;       ///< keys that a query reads, itself included; 0: all earlier ones
  std::int64_t full_every = 0;   ///< every such block has no window; 0: none
  /// Sparse attention (kernels::BlockChoice): chosen blocks of keys; 0: dense.
  std::int64_t sparse_blocks = 0;
  std::int64_t sparse_local = 1;  ///< last blocks that are always read
  double norm_epsilon = 1e-5;

  std::int64_t head_size() const { return own_head_size > 0 ? own_head_size : d_model / heads; }
  /// Keys that a query reads in this block; 0: all earlier ones.
  std::int64_t window_of(std::int64_t layer) const {
    return full_every > 0 && (layer + 1) % full_every == 0 ? 0 : window;
  }
  std::int64_t rotated_columns() const { return rope_columns > 0 ? rope_columns : head_size(); }
  /// Rotary tables: that of blocks with a window is the second if they have one of their own.
  std::int64_t rotary_tables() const { return position != Position::rope ? 0 : rope_window_base > 0 ? 2 : 1; }
  /// The table of a block; -1: its queries and keys are not rotated.
  std::int64_t rotary_table_of(std::int64_t layer) const {
    if (position != Position::rope || (unrotated_every > 0 && (layer + 1) % unrotated_every == 0)) return -1;
    return rope_window_base > 0 && window_of(layer) > 0 ? 1 : 0;
  }
  bool has_bias(const std::string& product) const {
    return biases.empty() ? bias : std::find(biases.begin(), biases.end(), product) != biases.end();
  }
  /// True if any product has one.
  bool has_biases() const { return bias || !biases.empty(); }
  bool normalises_inputs() const { return norm_position != NormPosition::post; }
  bool normalises_outputs() const { return norm_position != NormPosition::pre; }
};

/// Table [memory].
struct MemorySettings {
  std::int64_t micro_tokens = 0;  ///< data.micro_tokens: tokens of a micro-batch; 0: a whole step, or to be chosen
  Recompute recompute = Recompute::none;
  bool offload_optimizer = false;  ///< optimizer state in host memory (model::Moments::on_host)
  bool swap_activations = false;   ///< kept activations of all but two blocks in host memory (ActivationSwap)
  std::int64_t head_chunk = 0;     ///< rows whose logits exist at a time; 0: automatic
};

/// How the frozen weights of a model with adapters are stored: in the type of optimizer.state; in bf16; or those of the
/// linear layers of the blocks packed (kernels/optimize/packed_weights.hpp), the other matrices in bf16.
enum class LoraBase { stored, bf16, int8, nf4 };

/// Table [lora]. y = x Wᵀ + alpha / rank (drop(x) Aᵀ) Bᵀ with W frozen, A [rank, inputs] and B [outputs, rank] trained.
struct LoraSettings {
  std::int64_t rank = 0;  ///< 0: no adapters, all parameters are trained
  double alpha = 16;
  std::vector<std::string> targets = {};  ///< linear layers of a block: query, key, value, output, gate, up, down
  double dropout = 0;                     ///< of the inputs of A, in training
  std::string initial = {};               ///< directory of PEFT with the first values; "": new ones
  LoraBase base = LoraBase::stored;

  kernels::Packing packing() const {
    return base == LoraBase::int8  ? kernels::Packing::int8
           : base == LoraBase::nf4 ? kernels::Packing::nf4
                                   : kernels::Packing::none;
  }
  float scale() const { return static_cast<float>(alpha / static_cast<double>(rank)); }
  bool adapts(const std::string& target) const {
    return rank > 0 && std::find(targets.begin(), targets.end(), target) != targets.end();
  }
};

/// The attention that a model runs: the one of training, or a baseline of `weft benchmark`.
struct AttentionKernels {
  decltype(&kernels::attention_workspace) workspace = kernels::attention_workspace;
  decltype(&kernels::attention_backward_workspace) backward_workspace = kernels::attention_backward_workspace;
  decltype(&kernels::attention) forward = kernels::attention;
  decltype(&kernels::attention_backward) backward = kernels::attention_backward;
  /// Implementation for full micro-batches. Others run on the own kernels: cuDNN prepares every new shape for tens of
  /// milliseconds.
  kernels::AttentionImplementation implementation = kernels::AttentionImplementation::own;
};

}  // namespace weft::language_model
