// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/keys/decoder_keys.hpp"

#include <algorithm>
#include <cmath>

#include "base/text.hpp"
#include "language_model/huggingface/keys/rotary_keys.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::language_model {

void require_heads(ConfigKeys& keys, const ModelSettings& model, const char* width, const char* heads,
                   const char* kv_heads, const char* size) {
  if (model.own_head_size == 0 && model.d_model % model.heads != 0)
    throw keys.lacking("\"{}\" = {} is no multiple of \"{}\" = {}", width, model.d_model, heads, model.heads);
  if (const std::int64_t columns = model.head_size(); columns % 8 != 0 || columns > kernels::kLargestHead)
    throw keys.lacking(
        "heads of {} ({}) are not supported (multiples of 8, at most {})", columns,
        keys.find(size) != nullptr ? fmt::format("\"{}\"", size) : fmt::format("\"{}\" / \"{}\"", width, heads),
        kernels::kLargestHead);
  if (model.heads % model.kv_heads != 0)
    throw keys.lacking("\"{}\" = {} does not divide \"{}\" = {}", kv_heads, model.kv_heads, heads, model.heads);
}

MlpActivation activation(ConfigKeys& keys, const char* key, const char* absent, bool gated) {
  const std::string name = keys.text_or(key, absent);
  const bool silu = name == "silu" || name == "swish", gelu = name == "gelu_pytorch_tanh" || name == "gelu_new";
  if (gated && silu) return MlpActivation::swiglu;
  if (gelu) return gated ? MlpActivation::geglu : MlpActivation::gelu;
  if (!gated && name == "gelu") return MlpActivation::gelu_exact;
  throw keys.lacking("\"{}\" = \"{}\" (activations: {}, gelu_pytorch_tanh, gelu_new)", key, printable(name),
                     gated ? "silu" : "gelu");
}

const char* activation_name(MlpActivation activation) {
  if (activation == MlpActivation::swiglu) return "silu";
  return activation == MlpActivation::gelu_exact ? "gelu" : "gelu_pytorch_tanh";
}

void read_sizes(ConfigKeys& keys, HuggingfaceConfig& out, bool needs_head_size) {
  ModelSettings& model = out.model;
  model.preset = Preset::llama;
  model.norm = Norm::rms;
  model.position = Position::rope;
  model.bias = false;
  model.d_model = keys.integer("hidden_size", kMostWidth);
  model.layers = keys.integer("num_hidden_layers", kMostLayers);
  model.heads = keys.integer("num_attention_heads", kMostWidth);
  model.kv_heads = keys.integer_or("num_key_value_heads", model.heads, kMostWidth);
  model.d_mlp = keys.integer("intermediate_size", 8 * kMostWidth);
  model.norm_epsilon = keys.number("rms_norm_eps", kEpsilons);
  out.positions = keys.integer("max_position_embeddings", kMostRows);
  if (needs_head_size || keys.find("head_dim") != nullptr) {
    model.own_head_size = keys.integer("head_dim", kMostWidth);
    if (model.d_model % model.heads == 0 && model.own_head_size == model.d_model / model.heads) model.own_head_size = 0;
  }
  require_heads(keys, model, "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim");
}

void read_decoder(ConfigKeys& keys, HuggingfaceConfig& out, bool needs_head_size) {
  read_sizes(keys, out, needs_head_size);
  read_rotary(keys, out);
}

void read_gated_mlp(ConfigKeys& keys, HuggingfaceConfig& out) {
  out.model.mlp = activation(keys, "hidden_act", "silu", true);
  out.model.tied = keys.flag("tie_word_embeddings", out.family->tied_by_default);
}

void read_biases(ConfigKeys& keys, HuggingfaceConfig& out) {
  const std::span<const Biases> possible = out.family->features.biases;
  const bool attention = keys.flag("attention_bias", false),
             has_mlp = std::find(possible.begin(), possible.end(), Biases::mlp) != possible.end(),
             mlp = has_mlp && keys.flag("mlp_bias", false);
  set_biases(out.model, attention && mlp ? Biases::all
                        : attention      ? Biases::attention
                        : mlp            ? Biases::mlp
                                         : Biases::none);
}

void write_biases(const ModelSettings& model, Json& config) {
  const Biases biases = biases_of(model);
  config["attention_bias"] = biases == Biases::attention || biases == Biases::all;
  if (biases == Biases::mlp || biases == Biases::all) config["mlp_bias"] = true;
}

Json decoder_keys(const Architecture& architecture, const char* activation_key) {
  const ModelSettings& model = architecture.model;
  Json config = {{"hidden_size", model.d_model},
                 {"num_hidden_layers", model.layers},
                 {"num_attention_heads", model.heads},
                 {"num_key_value_heads", model.kv_heads},
                 {"head_dim", model.head_size()},
                 {"intermediate_size", model.d_mlp},
                 {activation_key, activation_name(model.mlp)},
                 {"rms_norm_eps", model.norm_epsilon},
                 {"max_position_embeddings", architecture.longest_text()}};
  return config;
}

void read_gemma(ConfigKeys& keys, HuggingfaceConfig& out, double attention_cap, double logit_cap) {
  ModelSettings& model = out.model;
  model.norm_position = NormPosition::both;
  read_biases(keys, out);
  keys.find("hidden_act");  // the library reads hidden_activation
  model.mlp = activation(keys, "hidden_activation", "gelu_pytorch_tanh", true);
  model.tied = keys.flag("tie_word_embeddings", out.family->tied_by_default);
  model.embedding_scale = std::sqrt(static_cast<double>(model.d_model));
  const double scalar = keys.number("query_pre_attn_scalar", kScalars);
  if (scalar != static_cast<double>(model.head_size())) model.attention_scale = 1 / std::sqrt(scalar);
  // null is none.
  const auto cap = [&](const char* key, double absent) {
    return keys.number_or(key, keys.has(key) ? 0 : absent, kCaps);
  };
  model.attention_softcap = cap("attn_logit_softcapping", attention_cap);
  model.logit_softcap = cap("final_logit_softcapping", logit_cap);
  keys.require("use_bidirectional_attention", false);
}

Json gemma_keys(const Architecture& architecture) {
  const ModelSettings& model = architecture.model;
  Json config = decoder_keys(architecture, "hidden_activation");
  const double scale = model.attention_scale, exact = scale > 0 ? 1 / (scale * scale) : 0, whole = std::round(exact);
  config["query_pre_attn_scalar"] = scale == 0                      ? Json(model.head_size())
                                    : 1 / std::sqrt(whole) == scale ? Json(static_cast<std::int64_t>(whole))
                                                                    : Json(exact);
  config["attn_logit_softcapping"] = model.attention_softcap > 0 ? Json(model.attention_softcap) : Json();
  config["final_logit_softcapping"] = model.logit_softcap > 0 ? Json(model.logit_softcap) : Json();
  write_biases(model, config);
  write_windows(model, config);
  return config;
}

std::vector<bool> sliding_blocks(ConfigKeys& keys, const ModelSettings& model, const std::vector<bool>& by_rule) {
  std::vector<bool> slides = by_rule;
  if (const SortedJson* const types = keys.find("layer_types")) {
    slides.clear();
    if (!types->is_array()) throw keys.damaged("\"layer_types\" is not a list");
    for (const SortedJson& type : *types) {
      const std::string name = type.is_string() ? type.get<std::string>() : "";
      if (name != "full_attention" && name != "sliding_attention")
        throw keys.lacking("\"layer_types\" has {} (full_attention and sliding_attention are supported)",
                           printable(json_text(type)));
      slides.push_back(name == "sliding_attention");
    }
    if (std::ssize(slides) != model.layers)
      throw keys.damaged("\"layer_types\" has {} entries for {} layers", slides.size(), model.layers);
  }
  return slides;
}

void read_windows(ConfigKeys& keys, ModelSettings& model, const std::vector<bool>& by_rule) {
  const std::vector<bool> slides = sliding_blocks(keys, model, by_rule);
  const std::int64_t window = keys.integer_or("sliding_window", keys.has("sliding_window") ? 0 : 4096, kMostRows);
  if (window == 0 || std::find(slides.begin(), slides.end(), true) == slides.end()) return;
  model.window = window;
  const auto full = std::find(slides.begin(), slides.end(), false);
  if (full == slides.end()) return;
  model.full_every = full - slides.begin() + 1;
  for (std::int64_t layer = 0; layer < model.layers; ++layer)
    if (slides[static_cast<std::size_t>(layer)] != (model.window_of(layer) > 0))
      throw keys.lacking(
          "layer {} breaks the pattern of the sliding windows (every n-th layer without one is supported)", layer);
}

void read_window(ConfigKeys& keys, ModelSettings& model, std::int64_t absent) {
  model.window = keys.integer_or("sliding_window", keys.has("sliding_window") ? 0 : absent, kMostRows);
}

void read_used_windows(ConfigKeys& keys, ModelSettings& model, const std::vector<bool>& by_rule) {
  if (keys.flag("use_sliding_window", false)) return read_windows(keys, model, by_rule);
  keys.find("sliding_window");  // not read
  for (const bool sliding : sliding_blocks(keys, model, std::vector<bool>(by_rule.size())))
    if (sliding) throw keys.lacking("\"layer_types\" has sliding_attention, and \"use_sliding_window\" is false");
}

void read_windows_of_last_layers(ConfigKeys& keys, ModelSettings& model) {
  const std::int64_t first = keys.integer_or("max_window_layers", 28, kMostLayers, 0);
  std::vector<bool> blocks;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) blocks.push_back(layer >= first);
  read_used_windows(keys, model, blocks);
}

void write_used_windows(const ModelSettings& model, Json& config) {
  if (model.window == 0) return;
  write_windows(model, config);
  config["use_sliding_window"] = true;
}

void write_windows(const ModelSettings& model, Json& config) {
  Json types = Json::array();
  for (std::int64_t layer = 0; layer < model.layers; ++layer)
    types.push_back(model.window_of(layer) > 0 ? "sliding_attention" : "full_attention");
  config["layer_types"] = types;
  config["sliding_window"] = model.window > 0 ? Json(model.window) : Json();
}

}  // namespace weft::language_model
