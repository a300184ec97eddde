// SPDX-License-Identifier: Apache-2.0
//
// Transcoders and autoencoders of single layers, each in a directory with cfg.json:
//
//   saelens    sae_weights.safetensors   W_enc [d, F], b_enc [F], W_dec [F, d], b_dec [d]; threshold [F] (JumpReLU,
//   active
//                                        iff z > theta and z > 0); W_skip [d, d]: y += W_skip x
//              cfg.json                  architecture "standard", "jumprelu", "topk" (autoencoders), "transcoder",
//                                        "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"; d_in,
//                                        d_sae, d_out, k. An autoencoder with apply_b_dec_to_input reads x - b_dec
//   sparsify   sae.safetensors           encoder.weight [F, d], encoder.bias [F], W_dec [F, d], b_dec [d], W_skip [d,
//   d]
//              cfg.json                  d_in, num_latents or expansion_factor, k: the k largest of a token are active;
//                                        without `transcode` the encoder reads x - b_dec
#include <algorithm>
#include <array>
#include <map>

#include "base/text.hpp"
#include "interchange/formats.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;
namespace {

const char* file_of(LayerFormat format) {
  return format == LayerFormat::saelens ? "sae_weights.safetensors" : "sae.safetensors";
}

/// True if `a` is before `b`: numbers inside the names are compared as numbers.
bool natural_less(std::string_view a, std::string_view b) {
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  std::size_t i = 0, j = 0;
  while (i < a.size() && j < b.size()) {
    if (!digit(a[i]) || !digit(b[j])) {
      if (a[i] != b[j]) return a[i] < b[j];
      ++i;
      ++j;
      continue;
    }
    const auto number = [&](std::string_view text, std::size_t& at) {
      while (at < text.size() && text[at] == '0') ++at;
      const std::size_t begin = at;
      while (at < text.size() && digit(text[at])) ++at;
      return text.substr(begin, at - begin);
    };
    const std::string_view m = number(a, i), n = number(b, j);
    if (m.size() != n.size()) return m.size() < n.size();
    if (m != n) return m < n;
  }
  return a.size() - i != b.size() - j ? a.size() - i < b.size() - j : a < b;
}

std::string text_in(const SortedJson& config, const char* key, const std::string& otherwise) {
  const auto at = config.find(key);
  return at != config.end() && at->is_string() ? at->get<std::string>() : otherwise;
}

bool flag_in(const SortedJson& config, const char* key, bool otherwise) {
  const auto at = config.find(key);
  return at != config.end() && at->is_boolean() ? at->get<bool>() : otherwise;
}

/// A positive integer of a configuration.
std::int64_t count_in(const fs::path& path, const SortedJson& config, const char* key) {
  const auto at = config.find(key);
  if (at == config.end() || !at->is_number_unsigned() || at->get<std::uint64_t>() < 1 ||
      at->get<std::uint64_t>() > std::uint64_t{1} << 28)
    throw error(ExitCode::data, "{}: \"{}\" is missing or not a positive integer", path.string(), key);
  return at->get<std::int64_t>();
}

/// What a layer's configuration says.
struct Layer {
  Contents contents;
  bool centred = false;
  std::vector<std::pair<std::string, std::string>> facts = {};
};

[[noreturn]] void lacks(const fs::path& path, const std::string& what) {
  throw error(ExitCode::usage, "{}: {}; Weft cannot read this model", path.string(), what);
}

Layer saelens_layer(const fs::path& path, const SortedJson& config) {
  Layer layer;
  Contents& contents = layer.contents;
  const std::string architecture = text_in(config, "architecture", "standard");
  // Architecture -> thresholds, skip, autoencoder.
  const std::map<std::string, std::array<bool, 3>> known = {{"standard", {false, false, true}},
                                                            {"jumprelu", {true, false, true}},
                                                            {"topk", {false, false, true}},
                                                            {"transcoder", {false, false, false}},
                                                            {"skip_transcoder", {false, true, false}},
                                                            {"jumprelu_transcoder", {true, false, false}},
                                                            {"jumprelu_skip_transcoder", {true, true, false}}};
  const auto found = known.find(architecture);
  if (found == known.end()) lacks(path, fmt::format("architecture \"{}\" has no counterpart", printable(architecture)));
  contents.sizes = checked(path, 1, count_in(path, config, "d_in"), count_in(path, config, "d_sae"));
  contents.thresholds = found->second[0];
  contents.skip = found->second[1];
  contents.autoencoder = found->second[2];
  if (architecture == "topk") contents.k = count_in(path, config, "k");
  if (!contents.autoencoder && count_in(path, config, "d_out") != contents.sizes.d_model)
    lacks(path, "its outputs have another width than its inputs");
  if (const std::string normalise = text_in(config, "normalize_activations", "none"); normalise != "none")
    lacks(path, fmt::format("normalize_activations is \"{}\" (fold it into the weights first)", printable(normalise)));
  if (const std::string shape = text_in(config, "reshape_activations", "none"); shape != "none")
    lacks(path, fmt::format("reshape_activations is \"{}\"", printable(shape)));
  if (flag_in(config, "rescale_acts_by_decoder_norm", false))
    lacks(path, "rescale_acts_by_decoder_norm is true (fold the norms into the weights first)");
  layer.centred = contents.autoencoder && flag_in(config, "apply_b_dec_to_input", true);
  const auto metadata = config.find("metadata");
  const SortedJson& facts = metadata != config.end() && metadata->is_object() ? *metadata : config;
  for (const auto& [key, name] :
       {std::pair("model_name", "model"), {"hook_name", "input hook"}, {"hook_name_out", "output hook"}})
    if (const std::string value = text_in(facts, key, ""); !value.empty()) layer.facts.emplace_back(name, value);
  return layer;
}

Layer sparsify_layer(const fs::path& path, const SortedJson& config) {
  Layer layer;
  Contents& contents = layer.contents;
  const std::int64_t d = count_in(path, config, "d_in");
  const auto latents = config.find("num_latents");
  const bool given = latents != config.end() && latents->is_number_unsigned() && latents->get<std::uint64_t>() > 0;
  contents.sizes = checked(
      path, 1, d, given ? count_in(path, config, "num_latents") : d * count_in(path, config, "expansion_factor"));
  if (const std::string activation = text_in(config, "activation", "topk"); activation != "topk")
    lacks(path, fmt::format("activation \"{}\" has no counterpart", printable(activation)));
  for (const char* const key : {"embed_skip", "gram_lookup", "signed"})
    if (flag_in(config, key, false)) lacks(path, fmt::format("{} is true", key));
  contents.k = count_in(path, config, "k");
  contents.skip = flag_in(config, "skip_connection", false);
  contents.autoencoder = !flag_in(config, "transcode", false);
  layer.centred = contents.autoencoder;
  return layer;
}

}  // namespace

std::vector<std::string> layer_directories(const fs::path& directory, LayerFormat format) {
  const auto is_layer = [&](const fs::path& path) {
    return fs::exists(path / file_of(format)) && fs::exists(path / "cfg.json");
  };
  if (is_layer(directory)) return {"."};
  std::vector<std::string> names;
  std::error_code failure;
  for (fs::directory_iterator entry(directory, failure), end; !failure && entry != end; entry.increment(failure))
    if (is_layer(entry->path())) names.push_back(entry->path().filename().string());
  std::sort(names.begin(), names.end(), natural_less);
  return names;
}

Layout per_layer_layout(const Contents& contents, LayerFormat format, const std::vector<std::string>& directories) {
  const auto [n_layers, d, n_features] = contents.sizes;
  const bool saelens = format == LayerFormat::saelens;
  // What is written; what is read says itself whether it is centred.
  Layout layout{.contents = contents, .positive_entries = true, .centred = !saelens && contents.autoencoder};
  for (std::int64_t i = 0; i < n_layers; ++i) {
    const std::size_t file =
        layout.add_file(fmt::format("{}/{}", directories[static_cast<std::size_t>(i)], file_of(format)));
    if (saelens)
      layout.add_whole(file, "W_enc", {d, n_features}, Part::encoder, i, true);
    else
      layout.add_whole(file, "encoder.weight", {n_features, d}, Part::encoder, i);
    layout.add_whole(file, saelens ? "b_enc" : "encoder.bias", {n_features}, Part::encoder_bias, i);
    layout.add_whole(file, "W_dec", {n_features, d}, Part::decoder, i);
    layout.add_whole(file, "b_dec", {d}, Part::decoder_bias, i);
    if (contents.thresholds) layout.add_whole(file, "threshold", {n_features}, Part::threshold, i);
    if (contents.skip) layout.add_whole(file, "W_skip", {d, d}, Part::skip, i);
  }
  return layout;
}

Opened open_per_layer(const fs::path& directory, LayerFormat format) {
  const std::vector<std::string> names = layer_directories(directory, format);
  Layer first;
  for (const std::string& name : names) {
    const fs::path path = directory / name / "cfg.json";
    const SortedJson config = json_object(path);
    Layer layer = format == LayerFormat::saelens ? saelens_layer(path, config) : sparsify_layer(path, config);
    const Contents &a = layer.contents, &b = first.contents;
    if (name == names.front())
      first = std::move(layer);
    else if (a.sizes.d_model != b.sizes.d_model || a.sizes.n_features != b.sizes.n_features || a.k != b.k ||
             a.thresholds != b.thresholds || a.skip != b.skip || a.autoencoder != b.autoencoder ||
             layer.centred != first.centred)
      throw error(
          ExitCode::usage,
          "{}: has another width, number of features, k or architecture than {} (the layers of a transcoder are "
          "alike); read it alone",
          path.string(), (directory / names.front()).string());
  }
  Contents& contents = first.contents;
  contents.per_layer = true;
  contents.sizes =
      checked(directory, static_cast<std::int64_t>(names.size()), contents.sizes.d_model, contents.sizes.n_features);
  if (contents.k > contents.sizes.n_features)
    throw error(ExitCode::data, "{}: k is {} of {} features", (directory / names.front() / "cfg.json").string(),
                contents.k, contents.sizes.n_features);
  Layout layout = per_layer_layout(contents, format, names);
  layout.centred = first.centred;
  return {.format = format == LayerFormat::saelens ? "saelens" : "sparsify",
          .rows = std::make_unique<LayoutRows>(directory, std::move(layout)),
          .normalised = not_normalised(contents.sizes),
          .facts = std::move(first.facts)};
}

void require_expressible(const Contents& contents, LayerFormat format) {
  if (!contents.per_layer)
    throw error(ExitCode::usage,
                "its features write to later layers too (saelens and sparsify have one layer per file); train with "
                "transcoder.decoder = \"per_layer\", or export to circuit-tracer");
  if (format == LayerFormat::sparsify && contents.k == 0)
    throw error(ExitCode::usage,
                "its active features are those above a threshold (sparsify keeps the k largest of a token); export to "
                "saelens");
  if (format == LayerFormat::saelens && contents.k > 0 && (!contents.autoencoder || contents.skip))
    throw error(ExitCode::usage,
                "it keeps the k largest features of a token (transcoders of saelens know ReLU and JumpReLU only); "
                "export to sparsify, or convert it to JumpReLU first");
  if (format == LayerFormat::saelens && contents.autoencoder && contents.skip)
    throw error(ExitCode::usage, "autoencoders of saelens have no skip connection");
}

namespace {

/// `hook` with the number of the layer in place of {}.
std::string hook_of(std::string hook, std::int64_t layer) {
  if (const std::size_t at = hook.find("{}"); at != hook.npos) hook.replace(at, 2, std::to_string(layer));
  return hook;
}

}  // namespace

std::vector<std::string> layer_names(const Contents& contents, LayerFormat format, const Origin& origin) {
  // sparsify names its directories by the module whose output is reconstructed.
  const std::string& hook = contents.autoencoder ? origin.input_hook : origin.output_hook;
  const bool usable = hook.find("{}") != hook.npos && hook.find('/') == hook.npos && hook.front() != '.';
  std::vector<std::string> names;
  for (std::int64_t layer = 0; layer < contents.sizes.n_layers; ++layer)
    names.push_back(format == LayerFormat::saelens ? fmt::format("layer_{}", layer)
                    : usable                       ? hook_of(hook, layer)
                                                   : fmt::format("layers.{}.mlp", layer));
  return names;
}

std::string per_layer_config(const Contents& contents, LayerFormat format, const Origin& origin, std::int64_t layer,
                             Storage storage) {
  if (format == LayerFormat::sparsify)
    return json_text(Json{{"activation", "topk"},
                          {"expansion_factor", 1},
                          {"normalize_decoder", false},
                          {"num_latents", contents.sizes.n_features},
                          {"k", contents.k},
                          {"multi_topk", false},
                          {"skip_connection", contents.skip},
                          {"transcode", !contents.autoencoder},
                          {"d_in", contents.sizes.d_model}},
                     2) +
           "\n";
  const auto text = [](const std::string& value) { return value.empty() ? Json() : Json(value); };
  const std::string architecture =
      contents.autoencoder
          ? (contents.k > 0        ? "topk"
             : contents.thresholds ? "jumprelu"
                                   : "standard")
          : fmt::format("{}{}transcoder", contents.thresholds ? "jumprelu_" : "", contents.skip ? "skip_" : "");
  Json config = {{"architecture", architecture},
                 {"d_in", contents.sizes.d_model},
                 {"d_sae", contents.sizes.n_features},
                 {"dtype", storage.matrices == kernels::Scalar::bf16 ? "bfloat16" : "float32"},
                 {"device", "cpu"},
                 {"apply_b_dec_to_input", false},
                 {"normalize_activations", "none"},
                 {"reshape_activations", "none"}};
  Json metadata = {{"model_name", text(origin.model)}, {"hook_name", text(hook_of(origin.input_hook, layer))}};
  if (!contents.autoencoder) {
    config["d_out"] = contents.sizes.d_model;
    metadata["hook_name_out"] = text(hook_of(origin.output_hook, layer));
  }
  if (contents.k > 0) config["k"] = contents.k;
  config["metadata"] = metadata;
  return json_text(config, 2) + "\n";
}

}  // namespace weft::interchange
