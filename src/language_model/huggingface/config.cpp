// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/config.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "input/print.hpp"
#include "input/read.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::language_model {
namespace {

constexpr std::string_view kNames[] = {"gpt2", "llama", "qwen3", "olmo2", "gemma2"};

/// Limits as in an input: kernels compute in fp32.
struct Range {
  double least, most;
};
constexpr Range kEpsilons{1.2e-38, 1}, kCaps{1e-3, 3e38}, kBases{1 + 1e-9, 3e38}, kFactors{1, 1e6},
    kFrequencies{1e-30, 1e6}, kScalars{1e-12, 1e12};

/// Keys that do not change the logits: names, types of storage, dropout, training, generation.
constexpr const char* kHarmless[] = {"_attn_implementation",
                                     "_name_or_path",
                                     "architectures",
                                     "attention_dropout",
                                     "attn_implementation",
                                     "attn_pdrop",
                                     "begin_suppress_tokens",
                                     "bos_token_id",
                                     "cache_implementation",
                                     "decoder_start_token_id",
                                     "dtype",
                                     "embd_pdrop",
                                     "eos_token_id",
                                     "finetuning_task",
                                     "forced_bos_token_id",
                                     "forced_eos_token_id",
                                     "gradient_checkpointing",
                                     "hidden_dropout",
                                     "id2label",
                                     "initializer_range",
                                     "label2id",
                                     "max_length",
                                     "n_ctx",
                                     "name_or_path",
                                     "output_attentions",
                                     "output_hidden_states",
                                     "pad_token_id",
                                     "prefix",
                                     "pretraining_tp",
                                     "problem_type",
                                     "reorder_and_upcast_attn",
                                     "resid_pdrop",
                                     "return_dict",
                                     "sep_token_id",
                                     "summary_activation",
                                     "summary_first_dropout",
                                     "summary_proj_to_labels",
                                     "summary_type",
                                     "summary_use_proj",
                                     "task_specific_params",
                                     "tokenizer_class",
                                     "torch_dtype",
                                     "transformers_version",
                                     "use_cache"};

/// The members of an object. Members that were not read are an error at the end.
class Keys {
 public:
  Keys(const SortedJson& object, std::string path) : object_(object), path_(std::move(path)) {}

  template <class... Args>
  Error damaged(fmt::format_string<Args...> format, Args&&... args) const {
    return error(ExitCode::data, "{}: {}", path_, fmt::format(format, std::forward<Args>(args)...));
  }
  /// Error for a feature that Weft does not have.
  template <class... Args>
  Error lacking(fmt::format_string<Args...> format, Args&&... args) const {
    return error(ExitCode::usage, "{}: {}; this model cannot be read", path_,
                 fmt::format(format, std::forward<Args>(args)...));
  }
  const std::string& path() const { return path_; }

  /// True also where the value is null.
  bool has(const char* key) const { return object_.contains(key); }
  /// Value of a member; nullptr if the member is missing or null.
  const SortedJson* find(const char* key) {
    known_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  std::int64_t integer(const char* key, std::int64_t most) {
    const SortedJson* const value = find(key);
    if (value == nullptr) throw damaged("\"{}\" is missing; is it the config.json of a language model?", key);
    if (!value->is_number_unsigned() || *value < 1 || *value > most)
      throw damaged("\"{}\" is not an integer from 1 to {}", key, most);
    return value->get<std::int64_t>();
  }
  std::int64_t integer_or(const char* key, std::int64_t absent, std::int64_t most) {
    return find(key) == nullptr ? absent : integer(key, most);
  }
  double number_or(const char* key, double absent, Range range) {
    const SortedJson* const value = find(key);
    if (value == nullptr) return absent;
    if (!value->is_number() || !(value->get<double>() > 0) || !std::isfinite(value->get<double>()))
      throw damaged("\"{}\" is not a number above 0", key);
    const auto number = value->get<double>();
    if (number < range.least || number > range.most)
      throw lacking("\"{}\" = {} ({:.3g} to {:.3g} are supported)", key, number, range.least, range.most);
    return number;
  }
  double number(const char* key, Range range) {
    if (find(key) == nullptr) throw damaged("\"{}\" is missing; is it the config.json of a language model?", key);
    return number_or(key, 0, range);
  }
  bool flag(const char* key, bool absent) {
    const SortedJson* const value = find(key);
    if (value == nullptr) return absent;
    if (!value->is_boolean()) throw damaged("\"{}\" is neither true nor false", key);
    return value->get<bool>();
  }
  std::string text_or(const char* key, const char* absent) {
    const SortedJson* const value = find(key);
    if (value == nullptr) return absent;
    if (!value->is_string()) throw damaged("\"{}\" is not a text", key);
    return value->get<std::string>();
  }
  void require(const char* key, bool needed) {
    if (flag(key, needed) != needed) throw lacking("\"{}\" = {} (Weft computes with {})", key, !needed, needed);
  }
  void require_absent(const char* key) {
    if (find(key) != nullptr) throw lacking("\"{}\" is not supported", key);
  }
  void refuse_unknown() const {
    for (const auto& [key, value] : object_.items())
      if (!value.is_null() && !known_.contains(key))
        throw lacking("the key \"{}\" is not known (it may change what the model computes)", printable(key));
  }
  void know(std::span<const char* const> keys) { known_.insert(keys.begin(), keys.end()); }

 private:
  const SortedJson& object_;
  const std::string path_;
  std::set<std::string> known_;
};

/// Sizes of heads as the kernels have them. `width`, `heads` and `size` are the keys of the family.
void require_heads(Keys& keys, const ModelSettings& model, const char* width, const char* heads, const char* kv_heads,
                   const char* size) {
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

MlpActivation activation(Keys& keys, const char* key, const char* absent, bool gated) {
  const std::string name = keys.text_or(key, absent);
  const bool silu = name == "silu" || name == "swish", gelu = name == "gelu_pytorch_tanh" || name == "gelu_new";
  if (gated && silu) return MlpActivation::swiglu;
  if (gelu) return gated ? MlpActivation::geglu : MlpActivation::gelu;
  throw keys.lacking("\"{}\" = \"{}\" (activations: {}gelu_pytorch_tanh, gelu_new)", key, printable(name),
                     gated ? "silu, " : "");
}

void read_gpt2(Keys& keys, HuggingfaceConfig& out) {
  ModelSettings& model = out.model;
  model.preset = Preset::gpt2;
  model.d_model = keys.integer("n_embd", kMostWidth);
  model.layers = keys.integer("n_layer", kMostLayers);
  model.heads = model.kv_heads = keys.integer("n_head", kMostWidth);
  model.d_mlp = keys.integer_or("n_inner", 4 * model.d_model, 8 * kMostWidth);
  out.positions = keys.integer("n_positions", kMostRows);
  model.mlp = activation(keys, "activation_function", "gelu_new", false);
  model.norm_epsilon = keys.number_or("layer_norm_epsilon", 1e-5, kEpsilons);
  model.tied = keys.flag("tie_word_embeddings", true);
  keys.require("scale_attn_weights", true);
  keys.require("scale_attn_by_inverse_layer_idx", false);
  keys.require("add_cross_attention", false);
  require_heads(keys, model, "n_embd", "n_head", "n_head", "");
}

struct Rotary {
  double base = 10'000;
  kernels::RopeScaling scaling = {};

  bool same_scaling(const Rotary& other) const {
    const auto values = [](const kernels::RopeScaling& s) { return std::tuple(s.factor, s.length, s.low, s.high); };
    return values(scaling) == values(other.scaling);
  }
};

/// Reads the rotary positions "default", "linear" and "llama3" of the library.
Rotary read_rotary_object(const Keys& keys, const char* key, const SortedJson& object, double base) {
  if (!object.is_object()) throw keys.damaged("\"{}\" is not an object", key);
  Keys inner(object, fmt::format("{}, \"{}\"", keys.path(), key));
  Rotary model;
  model.base = inner.number_or("rope_theta", base, kBases);
  const std::string old = inner.text_or("type", "default"), type = inner.text_or("rope_type", old.c_str());
  if (type == "linear" || type == "llama3") {
    model.scaling.factor = inner.number("factor", kFactors);
  } else if (type != "default") {
    throw inner.lacking("rotary positions of type \"{}\" (default, linear and llama3 are supported)", printable(type));
  }
  if (type == "llama3") {
    model.scaling.length = inner.integer("original_max_position_embeddings", kMostRows);
    model.scaling.low = inner.number("low_freq_factor", kFrequencies);
    model.scaling.high = inner.number("high_freq_factor", kFrequencies);
    if (model.scaling.low >= model.scaling.high)
      throw inner.damaged("\"low_freq_factor\" is not less than \"high_freq_factor\"");
  } else {
    inner.find("original_max_position_embeddings");  // not read by the other types
  }
  if (model.scaling.factor == 1) model.scaling = {};
  inner.refuse_unknown();
  return model;
}

/// rope_theta with rope_scaling (transformers 4), or rope_parameters (transformers 5). Of both objects the library
/// takes rope_scaling and ignores all of the other, including its rope_theta.
void read_rotary(Keys& keys, ModelSettings& model) {
  const SortedJson *parameters = keys.find("rope_parameters"), *scaling = keys.find("rope_scaling");
  const bool has_base = keys.find("rope_theta") != nullptr;
  const double base = keys.number_or("rope_theta", Rotary().base, kBases);
  const auto is_empty = [](const SortedJson* object) {
    return object == nullptr || (object->is_object() && object->empty());
  };
  Rotary rotary{.base = base};
  if (!is_empty(parameters)) {
    rotary = read_rotary_object(keys, "rope_parameters", *parameters, base);
    if (has_base && rotary.base != base)
      throw keys.lacking("\"rope_theta\" = {} contradicts {} of \"rope_parameters\" (readers differ in what they take)",
                         base, rotary.base);
  }
  if (!is_empty(scaling)) {
    const Rotary taken = read_rotary_object(keys, "rope_scaling", *scaling, base);
    const bool same_base = taken.base == rotary.base,
               same_scaling = rotary.scaling.factor == 1 || rotary.same_scaling(taken);
    if (!is_empty(parameters) && !(same_base && same_scaling))
      throw keys.lacking(
          "\"rope_scaling\" contradicts \"rope_parameters\" ({}: the library takes rope_scaling and forgets the rest "
          "of "
          "rope_parameters; remove one of them)",
          same_base ? "their scaling differs" : fmt::format("rope_theta {} and {}", taken.base, rotary.base));
    rotary = taken;
  }
  model.rope_base = rotary.base;
  model.rope_scaling = rotary.scaling;
}

void read_llama(Keys& keys, HuggingfaceConfig& out, bool own_head_size) {
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
  if (own_head_size || keys.find("head_dim") != nullptr) {
    model.own_head_size = keys.integer("head_dim", kMostWidth);
    if (model.d_model % model.heads == 0 && model.own_head_size == model.d_model / model.heads) model.own_head_size = 0;
  }
  require_heads(keys, model, "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim");
  read_rotary(keys, model);
  keys.require("attention_bias", false);
}

/// True for each block that has a window, from layer_types or by rule.
std::vector<bool> sliding_blocks(Keys& keys, const ModelSettings& model, std::vector<bool> slides) {
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

/// Windows as the library has them: null is none, and without the key it has one of 4096.
void read_windows(Keys& keys, ModelSettings& model, const std::vector<bool>& by_rule) {
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

void read_qwen3(Keys& keys, HuggingfaceConfig& out) {
  read_llama(keys, out, true);
  ModelSettings& model = out.model;
  model.qk_norm = QueryKeyNorm::head;
  model.mlp = activation(keys, "hidden_act", "silu", true);
  model.tied = keys.flag("tie_word_embeddings", false);
  const bool slides = keys.flag("use_sliding_window", false);
  const std::int64_t first = keys.integer_or("max_window_layers", 28, kMostLayers);
  std::vector<bool> blocks;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) blocks.push_back(slides && layer >= first);
  if (slides) return read_windows(keys, model, blocks);
  keys.find("sliding_window");  // not read
  for (const bool sliding : sliding_blocks(keys, model, blocks))
    if (sliding) throw keys.lacking("\"layer_types\" has sliding_attention, and \"use_sliding_window\" is false");
}

void read_gemma2(Keys& keys, HuggingfaceConfig& out) {
  read_llama(keys, out, true);
  ModelSettings& model = out.model;
  model.norm_position = NormPosition::both;
  keys.find("hidden_act");  // the library reads hidden_activation
  model.mlp = activation(keys, "hidden_activation", "gelu_pytorch_tanh", true);
  model.tied = keys.flag("tie_word_embeddings", true);
  model.embedding_scale = std::sqrt(static_cast<double>(model.d_model));
  const double scalar = keys.number("query_pre_attn_scalar", kScalars);
  if (scalar != static_cast<double>(model.head_size())) model.attention_scale = 1 / std::sqrt(scalar);
  // null is none; without the key the library has a cap.
  const auto cap = [&](const char* key, double absent) {
    return keys.number_or(key, keys.has(key) ? 0 : absent, kCaps);
  };
  model.attention_softcap = cap("attn_logit_softcapping", 50);
  model.logit_softcap = cap("final_logit_softcapping", 30);
  keys.require("use_bidirectional_attention", false);
  std::vector<bool> blocks;
  for (std::int64_t layer = 0; layer < model.layers; ++layer) blocks.push_back(layer % 2 == 0);
  read_windows(keys, model, blocks);
}

/// Requires all conditions of an input. Those that config.json can break were named by its own keys before.
void require_readable(const ModelSettings& model, const Keys& keys) {
  Configuration configuration;
  const input::Schema schema = language_model::schema(configuration);
  try {
    input::read(schema, table_of(model), "");
  } catch (const Error& failure) {  // ":7:1: language_model.…": positions in a generated table
    std::string_view problem = failure.what();
    while (!problem.empty() && std::string_view(":0123456789 ").find(problem.front()) != std::string_view::npos)
      problem.remove_prefix(1);
    throw keys.lacking("its sizes and options are none that Weft has ({})", problem);
  }
}

}  // namespace

std::string_view name(Family family) { return kNames[static_cast<int>(family)]; }

HuggingfaceConfig read_config(std::string_view text, const std::string& path) {
  const SortedJson object = parse_json<SortedJson>(text);
  if (object.is_discarded() || !object.is_object())
    throw error(ExitCode::data, "{}: is not a JSON object; is it truncated?", path);
  Keys keys(object, path);
  const std::string type = keys.text_or("model_type", "");
  const auto found = std::find(std::begin(kNames), std::end(kNames), type);
  if (found == std::end(kNames))
    throw keys.lacking("model_type \"{}\" (gpt2, llama, qwen3, olmo2 and gemma2 are supported)", printable(type));
  HuggingfaceConfig out;
  out.family = static_cast<Family>(found - std::begin(kNames));
  out.vocabulary = keys.integer("vocab_size", kMostRows);
  keys.require("is_encoder_decoder", false);
  keys.require_absent("quantization_config");
  switch (out.family) {
    case Family::gpt2:
      read_gpt2(keys, out);
      break;
    case Family::llama:
      read_llama(keys, out, false);
      out.model.mlp = activation(keys, "hidden_act", "silu", true);
      out.model.tied = keys.flag("tie_word_embeddings", false);
      keys.require("mlp_bias", false);
      break;
    case Family::qwen3:
      read_qwen3(keys, out);
      break;
    case Family::olmo2:
      read_llama(keys, out, false);
      out.model.mlp = activation(keys, "hidden_act", "silu", true);
      out.model.tied = keys.flag("tie_word_embeddings", false);
      out.model.qk_norm = QueryKeyNorm::width;
      out.model.norm_position = NormPosition::post;
      break;
    case Family::gemma2:
      read_gemma2(keys, out);
      break;
  }
  keys.know(kHarmless);
  keys.refuse_unknown();
  require_readable(out.model, keys);
  return out;
}

std::string table_of(const ModelSettings& model) {
  Configuration configuration;
  const input::Schema schema = language_model::schema(configuration);
  configuration.language_model = model;
  const std::string text = input::print(schema), head = "[language_model]\n";
  const std::size_t begin = text.find(head);
  return text.substr(begin, std::min(text.find("\n[", begin), text.size()) - begin) + "\n";
}

Family family_of(const ModelSettings& model) {
  const Family family = model.norm == Norm::layer                   ? Family::gpt2
                        : model.qk_norm == QueryKeyNorm::head       ? Family::qwen3
                        : model.norm_position == NormPosition::post ? Family::olmo2
                        : model.norm_position == NormPosition::both ? Family::gemma2
                                                                    : Family::llama;
  const auto require = [&](bool fits, std::string_view setting) {
    if (!fits)
      throw collective_error(ExitCode::usage,
                             "language_model.{} of this model has no counterpart in the transformers library's {}; it "
                             "cannot be exported",
                             setting, name(family));
  };
  const bool gpt2 = family == Family::gpt2, gemma2 = family == Family::gemma2, olmo2 = family == Family::olmo2;
  require(model.position == (gpt2 ? Position::learned : Position::rope), "position");
  require(gpt2 ? model.mlp == MlpActivation::gelu : kernels::is_gated(model.mlp), "mlp");
  require(model.bias == gpt2, "bias");
  require(model.qk_norm == (family == Family::qwen3 ? QueryKeyNorm::head
                            : olmo2                 ? QueryKeyNorm::width
                                                    : QueryKeyNorm::none),
          "qk_norm");
  require(model.norm_position == (gemma2  ? NormPosition::both
                                  : olmo2 ? NormPosition::post
                                          : NormPosition::pre),
          "norm_position");
  require(!gpt2 || model.kv_heads == model.heads, "kv_heads");
  require(!(gpt2 || olmo2) || model.head_size() * model.heads == model.d_model, "head_size");
  const float scale = gemma2 ? std::sqrt(static_cast<float>(model.d_model)) : 1;
  require(static_cast<float>(model.embedding_scale) == scale, "embedding_scale");
  require(gemma2 || model.attention_scale == 0, "attention_scale");
  require(gemma2 || model.attention_softcap == 0, "attention_softcap");
  require(gemma2 || model.logit_softcap == 0, "logit_softcap");
  require(gemma2 || family == Family::qwen3 || model.window == 0, "window");
  require(model.sparse_blocks == 0, "sparse_blocks");
  return family;
}

std::string config_text(const Architecture& architecture, Family family, kernels::Scalar type, std::int64_t end) {
  const ModelSettings& model = architecture.model;
  constexpr const char* kClasses[] = {"GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM",
                                      "Gemma2ForCausalLM"};
  const char* const stored = type == kernels::Scalar::bf16 ? "bfloat16" : "float32";
  Json config = {{"architectures", {kClasses[static_cast<int>(family)]}},
                 {"model_type", name(family)},
                 {"torch_dtype", stored},
                 {"dtype", stored},
                 {"vocab_size", architecture.vocabulary},
                 {"bos_token_id", nullptr},
                 {"eos_token_id", end < 0 ? Json() : Json(end)},
                 {"pad_token_id", nullptr},
                 {"tie_word_embeddings", model.tied}};
  if (family == Family::gpt2) {
    config.update({{"n_embd", model.d_model},
                   {"n_layer", model.layers},
                   {"n_head", model.heads},
                   {"n_inner", model.d_mlp},
                   {"n_positions", architecture.longest_text()},
                   {"n_ctx", architecture.longest_text()},
                   {"activation_function", "gelu_new"},
                   {"layer_norm_epsilon", model.norm_epsilon}});
    return json_text(config, 2) + "\n";
  }
  const bool gemma2 = family == Family::gemma2;
  config.update(
      {{"hidden_size", model.d_model},
       {"num_hidden_layers", model.layers},
       {"num_attention_heads", model.heads},
       {"num_key_value_heads", model.kv_heads},
       {"head_dim", model.head_size()},
       {"intermediate_size", model.d_mlp},
       {gemma2 ? "hidden_activation" : "hidden_act", model.mlp == MlpActivation::swiglu ? "silu" : "gelu_pytorch_tanh"},
       {"rms_norm_eps", model.norm_epsilon},
       {"max_position_embeddings", architecture.longest_text()},
       {"rope_theta", model.rope_base},
       {"attention_bias", false}});
  const kernels::RopeScaling& scaling = model.rope_scaling;
  if (scaling.factor > 1 && scaling.length == 0)
    config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", scaling.factor}};
  else if (scaling.factor > 1)
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", scaling.factor},
                              {"original_max_position_embeddings", scaling.length},
                              {"low_freq_factor", scaling.low},
                              {"high_freq_factor", scaling.high}};
  if (gemma2) {
    const double scale = model.attention_scale, exact = scale > 0 ? 1 / (scale * scale) : 0, whole = std::round(exact);
    config["query_pre_attn_scalar"] = scale == 0                      ? Json(model.head_size())
                                      : 1 / std::sqrt(whole) == scale ? Json(static_cast<std::int64_t>(whole))
                                                                      : Json(exact);
    config["attn_logit_softcapping"] = model.attention_softcap > 0 ? Json(model.attention_softcap) : Json();
    config["final_logit_softcapping"] = model.logit_softcap > 0 ? Json(model.logit_softcap) : Json();
  }
  if (gemma2 || model.window > 0) {
    Json types = Json::array();
    for (std::int64_t layer = 0; layer < model.layers; ++layer)
      types.push_back(model.window_of(layer) > 0 ? "sliding_attention" : "full_attention");
    config["layer_types"] = types;
    config["sliding_window"] = model.window > 0 ? Json(model.window) : Json();
    if (!gemma2) config["use_sliding_window"] = true;
  }
  return json_text(config, 2) + "\n";
}

}  // namespace weft::language_model
