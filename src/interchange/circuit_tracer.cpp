// SPDX-License-Identifier: Apache-2.0
//
// The directory of a cross-layer transcoder as circuit-tracer loads it. Weights apply to raw activations.
//
//   W_enc_{i}.safetensors   W_enc_{i} [F, d], b_enc_{i} [F], b_dec_{i} [d], of target i;
//                           threshold_{i} [F] in all files (JumpReLU, active iff z > theta) or in none (ReLU);
//                           W_skip_{i} [d, d] in all or in none: y_i += x_i W_skip_{i}, the transpose of Weft's matrix
//   W_dec_{i}.safetensors   W_dec_{i} [F, L - i, d]: column j writes to target i + j; rows are read one at a time
//   config.yaml             model_name, model_kind, feature_input_hook, feature_output_hook
#include "interchange/formats.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;

Layout circuit_tracer_layout(const Contents& contents) {
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

std::string circuit_tracer_config(const Origin& origin) {
  std::string text;
  // A JSON text is a YAML scalar.
  const auto put = [&](const char* key, const std::string& value) {
    if (!value.empty()) text += fmt::format("{}: {}\n", key, json_text(Json(value)));
  };
  put("model_name", origin.model);
  text += "model_kind: cross_layer_transcoder\n";
  put("feature_input_hook", origin.input_hook);
  put("feature_output_hook", origin.output_hook);
  return text;
}

Opened open_circuit_tracer(const fs::path& directory) {
  // The number of files is the number of layers; it is bounded before it sizes anything.
  std::int64_t n_layers = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("W_enc_") && name.ends_with(".safetensors")) ++n_layers;
  }
  const fs::path first = directory / "W_enc_0.safetensors";
  const SafetensorsFile file(first.string());
  const SafetensorsEntry& weight = require_tensor(file, "W_enc_0", 2);
  Contents contents{.sizes = checked(first, n_layers, weight.shape[1], weight.shape[0]),
                    .thresholds = file.find("threshold_0") != nullptr,
                    .skip = file.find("W_skip_0") != nullptr};
  Opened opened{.format = "circuit-tracer",
                .rows = std::make_unique<LayoutRows>(directory, circuit_tracer_layout(contents)),
                .normalised = not_normalised(contents.sizes)};
  if (!fs::exists(directory / "config.yaml")) return opened;
  const auto config = yaml_scalars(directory / "config.yaml");
  if (const auto kind = config.find("model_kind"); kind != config.end() && kind->second != "cross_layer_transcoder")
    throw error(ExitCode::usage, "{}: model_kind is \"{}\" (only cross_layer_transcoder is read)",
                (directory / "config.yaml").string(), kind->second);
  for (const auto& [key, name] : {std::pair("model_name", "model"),
                                  {"feature_input_hook", "input hook"},
                                  {"feature_output_hook", "output hook"},
                                  {"scan", "scan"}})
    if (const auto value = config.find(key); value != config.end()) opened.facts.emplace_back(name, value->second);
  return opened;
}

}  // namespace weft::interchange
