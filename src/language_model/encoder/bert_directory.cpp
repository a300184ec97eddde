// SPDX-License-Identifier: Apache-2.0
#include "language_model/encoder/bert_directory.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"
#include "interchange/foreign_settings.hpp"
#include "kernels/language/attention/attention_shape.hpp"
#include "language_model/blocks/architecture.hpp"
#include "language_model/blocks/model_settings.hpp"

namespace weft::language_model {
namespace {

namespace fs = std::filesystem;
using interchange::ForeignSettings;

constexpr const char* kBertConfig = "config.json";
constexpr const char* kBertWeights = "model.safetensors";
constexpr std::string_view kPrefix = "bert.";

/// Keys that do not change the hidden states: names, types of storage, dropout, training, heads.
constexpr const char* kWithoutEffect[] = {"_attn_implementation",
                                          "_name_or_path",
                                          "architectures",
                                          "attention_probs_dropout_prob",
                                          "bos_token_id",
                                          "classifier_dropout",
                                          "dtype",
                                          "eos_token_id",
                                          "gradient_checkpointing",
                                          "hidden_dropout_prob",
                                          "id2label",
                                          "initializer_range",
                                          "label2id",
                                          "pad_token_id",
                                          "tie_word_embeddings",
                                          "torch_dtype",
                                          "transformers_version",
                                          "use_cache"};

/// Parts of the library's models that do not change the hidden states.
constexpr std::string_view kUnusedTensors[] = {"embeddings.position_ids", "pooler.", "cls.", "classifier."};

std::int64_t size(ForeignSettings& config, const char* key, std::int64_t most) {
  const std::int64_t value = config.count(key);
  if (value > most) config.refuse(fmt::format("\"{}\" = {} (at most {})", key, value, most));
  return value;
}

EncoderShape read_shape(const fs::path& file) {
  ForeignSettings config(file);
  if (const std::string type = config.text("model_type"); type != "bert")
    config.refuse(fmt::format("model_type is \"{}\" (an encoder of type bert is needed)", printable(type)));
  EncoderShape shape;
  shape.vocabulary = size(config, "vocab_size", kMostRows);
  shape.positions = size(config, "max_position_embeddings", kMostRows);
  shape.token_types = size(config, "type_vocab_size", kMostRows);
  shape.layers = size(config, "num_hidden_layers", kMostLayers);
  shape.heads = size(config, "num_attention_heads", kMostWidth);
  shape.d_model = size(config, "hidden_size", kMostWidth);
  shape.d_mlp = size(config, "intermediate_size", 8 * kMostWidth);
  if (shape.d_model % shape.heads != 0 || shape.head_size() > kernels::kLargestHead)
    config.refuse(
        fmt::format("\"hidden_size\" = {} with \"num_attention_heads\" = {} (heads of whole columns, at most {})",
                    shape.d_model, shape.heads, kernels::kLargestHead));
  const std::string activation = config.text("hidden_act", "gelu");
  if (activation == "gelu_new" || activation == "gelu_pytorch_tanh")
    shape.mlp = kernels::MlpActivation::gelu;
  else if (activation != "gelu")
    config.refuse(
        fmt::format("\"hidden_act\" = \"{}\" (activations: gelu, gelu_new, gelu_pytorch_tanh)", printable(activation)));
  const SortedJson& epsilon = config.value("layer_norm_eps");
  if (!epsilon.is_null()) {
    if (!epsilon.is_number() || !(epsilon.get<double>() >= 1e-30) || !(epsilon.get<double>() <= 1))
      config.refuse("\"layer_norm_eps\" is not a number from 1e-30 to 1");
    shape.norm_epsilon = epsilon.get<float>();
  }
  if (const std::string positions = config.text("position_embedding_type", "absolute"); positions != "absolute")
    config.refuse(fmt::format("\"position_embedding_type\" = \"{}\" (absolute is supported)", printable(positions)));
  for (const char* const key : {"is_decoder", "add_cross_attention", "is_encoder_decoder"})
    if (config.flag(key)) config.refuse(fmt::format("\"{}\" is true", key));
  config.without_effect(kWithoutEffect);
  config.finish();
  return shape;
}

}  // namespace

std::int64_t EncoderParameter::elements() const {
  std::int64_t product = 1;
  for (const std::int64_t extent : shape) product *= extent;
  return product;
}

std::vector<EncoderParameter> encoder_parameters(const EncoderShape& shape) {
  const std::int64_t d = shape.d_model, mlp = shape.d_mlp;
  std::vector<EncoderParameter> all = {{"embeddings.word_embeddings.weight", {shape.vocabulary, d}},
                                       {"embeddings.position_embeddings.weight", {shape.positions, d}},
                                       {"embeddings.token_type_embeddings.weight", {shape.token_types, d}},
                                       {"embeddings.LayerNorm.weight", {d}},
                                       {"embeddings.LayerNorm.bias", {d}}};
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    const auto add = [&](const char* name, std::vector<std::int64_t> extents) {
      all.push_back({fmt::format("encoder.layer.{}.{}", layer, name), std::move(extents)});
    };
    add("attention.self.query.weight", {d, d});
    add("attention.self.key.weight", {d, d});
    add("attention.self.value.weight", {d, d});
    add("attention.self.query.bias", {d});
    add("attention.self.key.bias", {d});
    add("attention.self.value.bias", {d});
    add("attention.output.dense.weight", {d, d});
    add("attention.output.dense.bias", {d});
    add("attention.output.LayerNorm.weight", {d});
    add("attention.output.LayerNorm.bias", {d});
    add("intermediate.dense.weight", {mlp, d});
    add("intermediate.dense.bias", {mlp});
    add("output.dense.weight", {d, mlp});
    add("output.dense.bias", {d});
    add("output.LayerNorm.weight", {d});
    add("output.LayerNorm.bias", {d});
  }
  return all;
}

bool is_bert_directory(const fs::path& directory) {
  const fs::path file = directory / kBertConfig;
  if (!fs::exists(file)) return false;
  const SortedJson config = interchange::json_object(file);
  const auto type = config.find("model_type");
  return type != config.end() && type->is_string() && type->get_ref<const std::string&>() == "bert";
}

BertDirectory::BertDirectory(const fs::path& directory)
    : shape_(read_shape(directory / kBertConfig)), file_((directory / kBertWeights).string()) {
  if (std::any_of(file_.entries().begin(), file_.entries().end(),
                  [](const storage::SafetensorsEntry& one) { return one.name.starts_with(kPrefix); }))
    prefix_ = kPrefix;
  const std::vector<EncoderParameter> all = encoder_parameters(shape_);
  for (const EncoderParameter& parameter : all) {
    const storage::SafetensorsEntry& found = entry(parameter);
    if (found.shape != parameter.shape)
      throw error(ExitCode::data, "{}: tensor \"{}\" has shape {}, a model of the sizes in {} {}", file_.path(),
                  found.name, storage::shape_text(found.shape), kBertConfig, storage::shape_text(parameter.shape));
    if (!found.type || *found.type == kernels::Scalar::fp64)
      throw error(ExitCode::usage, "{}: tensor \"{}\" is stored as {} (F32, F16 and BF16 are read); convert it",
                  file_.path(), found.name, printable(found.dtype));
  }
  for (const storage::SafetensorsEntry& one : file_.entries()) {
    std::string_view name = one.name;
    if (name.starts_with(prefix_)) name.remove_prefix(prefix_.size());
    const bool known =
                   std::any_of(all.begin(), all.end(), [&](const auto&parameter) { return parameter.name == name; }),
               unused = std::any_of(std::begin(kUnusedTensors), std::end(kUnusedTensors),
                                    [&](std::string_view part) { return name.starts_with(part); });
    if (!known && !unused)
      throw error(ExitCode::data, "{}: tensor \"{}\" belongs to no encoder of {} layers (its {} has other sizes?)",
                  file_.path(), printable(one.name), shape_.layers, kBertConfig);
  }
}

const storage::SafetensorsEntry& BertDirectory::entry(const EncoderParameter& parameter) const {
  const storage::SafetensorsEntry* const found = file_.find(prefix_ + parameter.name);
  if (found == nullptr)
    throw error(ExitCode::data, "{}: tensor \"{}\" is missing ({} has its sizes); is the directory complete?",
                file_.path(), prefix_ + parameter.name, kBertConfig);
  return *found;
}

void BertDirectory::read(const EncoderParameter& parameter, float* to) const {
  file_.read(entry(parameter), 0, parameter.elements(), to);
}

}  // namespace weft::language_model
