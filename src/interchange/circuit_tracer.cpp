// SPDX-License-Identifier: Apache-2.0
//
// The directory of a transcoder as circuit-tracer loads it. Weights apply to raw activations. model_kind in config.yaml
// is "cross_layer_transcoder", with
//
//   W_enc_{i}.safetensors   W_enc_{i} [F, d], b_enc_{i} [F], b_dec_{i} [d], of target i;
//                           threshold_{i} [F] in all files (JumpReLU, active iff z > theta) or in none (ReLU);
//                           W_skip_{i} [d, d] in all or in none: y_i += x_i W_skip_{i}, the transpose of Weft's matrix.
//                           Read only: circuit-tracer 0.5 leaves it out when it loads such a directory
//   W_dec_{i}.safetensors   W_dec_{i} [F, L - i, d]: column j writes to target i + j; rows are read one at a time
//
// or "transcoder_set", one transcoder of a single layer per file:
//
//   layer_{i}.safetensors   W_enc [F, d], b_enc [F], W_dec [F, d], b_dec [d]; activation_function.threshold [F]
//                           (JumpReLU) in all files or in none; W_skip [d, d] in all or in none: y += W_skip x
//
// Both have model_name, feature_input_hook and feature_output_hook in config.yaml.
#include "base/text.hpp"
#include "interchange/formats.hpp"
#include "interchange/hooks.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;
namespace {

constexpr const char *kCrossLayer = "cross_layer_transcoder", *kSet = "transcoder_set";

Layout set_layout(const Contents& contents) {
  const auto [n_layers, d, n_features] = contents.sizes;
  Layout layout{.contents = contents};
  for (std::int64_t i = 0; i < n_layers; ++i) {
    const std::size_t file = layout.add_file(fmt::format("layer_{}.safetensors", i));
    layout.add_whole(file, "W_enc", {n_features, d}, Part::encoder, i);
    layout.add_whole(file, "b_enc", {n_features}, Part::encoder_bias, i);
    layout.add_whole(file, "W_dec", {n_features, d}, Part::decoder, i);
    layout.add_whole(file, "b_dec", {d}, Part::decoder_bias, i);
    if (contents.thresholds) layout.add_whole(file, "activation_function.threshold", {n_features}, Part::threshold, i);
    if (contents.skip) layout.add_whole(file, "W_skip", {d, d}, Part::skip, i);
  }
  return layout;
}

Layout cross_layer_layout(const Contents& contents) {
  const auto [n_layers, d, n_features] = contents.sizes;
  Layout layout{.contents = contents};
  for (std::int64_t i = 0; i < n_layers; ++i) {
    const auto named = [&](const char* part) { return fmt::format("{}_{}", part, i); };
    const std::size_t encoder = layout.add_file(named("W_enc") + ".safetensors");
    layout.add_whole(encoder, named("W_enc"), {n_features, d}, Part::encoder, i);
    layout.add_whole(encoder, named("b_enc"), {n_features}, Part::encoder_bias, i);
    layout.add_whole(encoder, named("b_dec"), {d}, Part::decoder_bias, i);
    if (contents.thresholds) layout.add_whole(encoder, named("threshold"), {n_features}, Part::threshold, i);
    if (contents.skip) layout.add_whole(encoder, named("W_skip"), {d, d}, Part::skip, i, true);
    const std::size_t decoder = layout.add_file(named("W_dec") + ".safetensors");
    layout.add_whole(decoder, named("W_dec"), {n_features, n_layers - i, d}, Part::decoder, i);
  }
  return layout;
}

/// Derives the contents from the tensors of the first layer. The number of files is the number of layers; it is checked
/// before memory depends on it.
Contents contents_of(const fs::path& directory, bool set) {
  std::int64_t n_layers = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(set ? "layer_" : "W_enc_") && name.ends_with(".safetensors")) ++n_layers;
  }
  const std::string suffix = set ? "" : "_0";
  const fs::path first = directory / (set ? "layer_0.safetensors" : "W_enc_0.safetensors");
  if (!fs::exists(first))
    throw error(ExitCode::data, "{}: is missing (other layers are present); was it copied completely?", first.string());
  const SafetensorsFile file(first.string());
  const SafetensorsEntry& weight = require_tensor(file, "W_enc" + suffix, 2);
  return {.sizes = checked(first, n_layers, weight.shape[1], weight.shape[0]),
          .thresholds = file.find(set ? "activation_function.threshold" : "threshold_0") != nullptr,
          .skip = file.find("W_skip" + suffix) != nullptr,
          .per_layer = set};
}

/// Applies config.yaml and returns its facts about the model.
std::vector<std::pair<std::string, std::string>> facts_of(const fs::path& path, bool set, std::int64_t n_layers) {
  std::map<std::string, std::string> config = yaml_scalars(path);
  if (const auto kind = config.find("model_kind"); kind != config.end() && kind->second != (set ? kSet : kCrossLayer))
    throw error(ExitCode::usage, "{}: model_kind is \"{}\", the files are those of \"{}\"", path.string(),
                printable(kind->second), set ? kSet : kCrossLayer);
  // List of the files in the order of their layers, if names are not the usual ones; not for cross-layer transcoders.
  std::int64_t listed = 0;
  for (auto at = config.begin(); at != config.end();) {
    const std::string& key = at->first;
    if (!key.starts_with("transcoders.")) {
      ++at;
      continue;
    }
    const std::string name = fs::path(at->second).filename().string();
    if (set && name != "layer_" + key.substr(key.find('.') + 1) + ".safetensors")
      throw error(ExitCode::usage,
                  "{}: {} is {} (files are read by their names, layer_0.safetensors, layer_1.safetensors, ...); rename "
                  "them and leave the list out",
                  path.string(), key, printable(at->second));
    ++listed;
    at = config.erase(at);
  }
  if (set && listed > 0 && listed != n_layers)
    throw error(ExitCode::data, "{}: lists {} transcoders, there are {} files layer_*.safetensors", path.string(),
                listed, n_layers);
  require_known(path, config,
                {"model_name", "model_kind", "feature_input_hook", "feature_output_hook", "scan", "repo_id", "revision",
                 "subfolder"});
  std::vector<std::pair<std::string, std::string>> facts;
  for (const auto& [key, name] : {std::pair("model_name", "model"),
                                  {"feature_input_hook", "input hook"},
                                  {"feature_output_hook", "output hook"},
                                  {"scan", "scan"}})
    if (const auto value = config.find(key); value != config.end()) facts.emplace_back(name, value->second);
  return facts;
}

}  // namespace

Layout circuit_tracer_layout(const Contents& contents) {
  if (contents.per_layer) return set_layout(contents);
  return cross_layer_layout(contents);
}

std::string circuit_tracer_config(const Contents& contents, const Origin& origin) {
  if (contents.skip && !contents.per_layer)
    throw error(ExitCode::usage,
                "it has a skip connection (circuit-tracer leaves it out when it loads a cross-layer transcoder, which "
                "changes every reconstruction); train without transcoder.skip, or with transcoder.decoder = "
                "\"per_layer\", whose skip connections it loads");
  std::string text;
  // A JSON text is a YAML scalar.
  const auto put = [&](const char* key, const std::string& value) {
    if (!value.empty()) text += fmt::format("{}: {}\n", key, json_text(Json(value)));
  };
  put("model_name", origin.model);
  text += fmt::format("model_kind: {}\n", contents.per_layer ? kSet : kCrossLayer);
  put("feature_input_hook", inside_block(origin.input_hook));
  put("feature_output_hook", inside_block(origin.output_hook));
  return text;
}

Opened open_circuit_tracer(const fs::path& directory) {
  const auto is_part_of_set = [](const fs::directory_entry& entry) {
    const std::string name = entry.path().filename().string();
    return name.starts_with("layer_") && name.ends_with(".safetensors");
  };
  const bool set = std::any_of(fs::directory_iterator(directory), fs::directory_iterator(), is_part_of_set);
  const Contents contents = contents_of(directory, set);
  Opened opened{.format = "circuit-tracer",
                .rows = std::make_unique<LayoutRows>(directory, circuit_tracer_layout(contents)),
                .normalised = not_normalised(contents.sizes)};
  if (const fs::path config = directory / "config.yaml"; fs::exists(config))
    opened.facts = facts_of(config, set, contents.sizes.n_layers);
  return opened;
}

}  // namespace weft::interchange
