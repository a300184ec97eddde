// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/config.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/text.hpp"
#include "input/print.hpp"
#include "input/read.hpp"
#include "language_model/huggingface/families/families.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::language_model {
namespace {

/// Keys that do not change the logits: names, types of storage, dropout, training, generation.
constexpr const char* kHarmless[] = {"_attn_implementation",
                                     "_name_or_path",
                                     "architectures",
                                     "attention_dropout",
                                     "attn_implementation",
                                     "attn_pdrop",
                                     "auto_map",
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
                                     "is_llama_config",
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
                                     "transformers.js_config",
                                     "transformers_version",
                                     "use_cache"};

/// Requires all conditions of an input. Those that config.json can break were named by its own keys before.
void require_readable(const ModelSettings& model, const ConfigKeys& keys) {
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

std::string names_of_families() {
  std::string names;
  const std::span<const Family* const> all = families::all();
  for (std::size_t i = 0; i < all.size(); ++i)
    names += fmt::format("{}{}", i == 0 ? "" : i + 1 == all.size() ? " and " : ", ", all[i]->name);
  return names;
}

/// Settings of the model that a family cannot express.
std::vector<std::string_view> lacking(const Family& family, const ModelSettings& model) {
  const Features& features = family.features;
  std::vector<std::string_view> missing;
  const auto require = [&](bool fits, std::string_view setting) {
    if (!fits) missing.push_back(setting);
  };
  require(model.norm == features.norm, "norm");
  require(model.position == features.position, "position");
  require(std::find(features.mlp.begin(), features.mlp.end(), model.mlp) != features.mlp.end(), "mlp");
  require(std::find(features.biases.begin(), features.biases.end(), biases_of(model)) != features.biases.end(),
          model.biases.empty() ? "bias" : "biases");
  require(model.qk_norm == features.qk_norm, "qk_norm");
  require(model.norm_position == features.norm_position, "norm_position");
  require(features.grouped_keys || model.kv_heads == model.heads, "kv_heads");
  require(features.own_head_size || model.head_size() * model.heads == model.d_model, "head_size");
  const float scale = features.scaled_embedding ? std::sqrt(static_cast<float>(model.d_model)) : 1;
  require(static_cast<float>(model.embedding_scale) == scale, "embedding_scale");
  require(features.caps_and_scale || model.attention_scale == 0, "attention_scale");
  require(features.caps_and_scale || model.attention_softcap == 0, "attention_softcap");
  require(features.caps_and_scale || model.logit_softcap == 0, "logit_softcap");
  require(features.parallel_residual || model.residual == Residual::sequential, "residual");
  require(features.windows != BlockWindows::none || model.window == 0, "window");
  require(features.windows != BlockWindows::all || model.full_every == 0, "full_every");
  const kernels::RopeScaling& rope = model.rope_scaling;
  const bool has_method =
      std::find(features.rope_methods.begin(), features.rope_methods.end(), rope.method) != features.rope_methods.end();
  require((rope.method == kernels::RopeMethod::bands && rope.factor == 1) || has_method, "rope_method");
  require(
      rope.amplitude == 0 || rope.method == kernels::RopeMethod::yarn || rope.method == kernels::RopeMethod::longrope,
      "rope_amplitude");
  require(features.partial_rotary || model.rope_columns == 0, "rope_columns");
  require(features.unrotated_blocks || model.unrotated_every == 0, "unrotated_every");
  require(features.window_base ? model.rope_window_base > 0 || rope.factor == 1 : model.rope_window_base == 0,
          "rope_window_base");
  require(model.sparse_blocks == 0, "sparse_blocks");
  return missing;
}

}  // namespace

HuggingfaceConfig read_config(std::string_view text, const std::string& path) {
  const SortedJson object = parse_json<SortedJson>(text);
  if (object.is_discarded() || !object.is_object())
    throw error(ExitCode::data, "{}: is not a JSON object; is it truncated?", path);
  ConfigKeys keys(object, path);
  const std::string type = keys.text_or("model_type", "");
  const std::span<const Family* const> all = families::all();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Family* family) { return family->name == type; });
  if (found == all.end())
    throw keys.lacking("model_type \"{}\" ({} are supported)", printable(type), names_of_families());
  HuggingfaceConfig out;
  out.family = *found;
  out.vocabulary = keys.integer("vocab_size", kMostRows);
  keys.require("is_encoder_decoder", false);
  keys.require_absent("quantization_config");
  out.family->read(keys, out);
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

const Family& family_of(const Architecture& architecture) {
  const ModelSettings& model = architecture.model;
  for (const Family* family : families::all())
    if (family->name == architecture.family && lacking(*family, model).empty()) return *family;
  const Family* nearest = nullptr;
  std::vector<std::string_view> fewest;
  for (const Family* family : families::all()) {
    const std::vector<std::string_view> missing = lacking(*family, model);
    if (missing.empty()) return *family;
    if (nearest != nullptr && missing.size() >= fewest.size()) continue;
    nearest = family;
    fewest = missing;
  }
  std::string settings;
  for (const std::string_view setting : fewest)
    settings += fmt::format("{}language_model.{}", settings.empty() ? "" : ", ", setting);
  throw collective_error(ExitCode::usage,
                         "{} of this model {} no counterpart in the transformers library's {}, which is the nearest to "
                         "it; it cannot be exported",
                         settings, fewest.size() == 1 ? "has" : "have", nearest->name);
}

std::string config_text(const Architecture& architecture, const Family& family, kernels::Scalar type,
                        std::int64_t end) {
  const char* const stored = type == kernels::Scalar::bf16 ? "bfloat16" : "float32";
  Json config = {{"architectures", {family.class_name}},
                 {"model_type", family.name},
                 {"torch_dtype", stored},
                 {"dtype", stored},
                 {"vocab_size", architecture.vocabulary},
                 {"bos_token_id", nullptr},
                 {"eos_token_id", end < 0 ? Json() : Json(end)},
                 {"pad_token_id", nullptr},
                 {"tie_word_embeddings", architecture.model.tied}};
  config.update(family.write(architecture));
  return json_text(config, 2) + "\n";
}

}  // namespace weft::language_model
