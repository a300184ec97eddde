// SPDX-License-Identifier: Apache-2.0
//
// Transcoders and autoencoders of single layers, each in a directory with cfg.json:
//
//   saelens    sae_weights.safetensors   W_enc [d, F], b_enc [F], W_dec [F, d], b_dec [d]; threshold [F] (JumpReLU,
//                                        active iff z > theta and z > 0); W_skip [d, d]: y += W_skip x; scaling_factor
//                                        [F] of older files must be 1
//              cfg.json                  architecture "standard", "jumprelu", "topk" (autoencoders), "transcoder",
//                                        "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"; d_in,
//                                        d_sae, d_out, k. An autoencoder with apply_b_dec_to_input reads x - b_dec;
//                                        with rescale_acts_by_decoder_norm, z is multiplied by the norm of the
//                                        feature's row of W_dec, and what it writes divided by it. Before version 6
//                                        TopK is activation_fn (or activation_fn_str) and activation_fn_kwargs.k
//   sparsify   sae.safetensors           encoder.weight [F, d], encoder.bias [F], W_dec [F, d], b_dec [d],
//                                        W_skip [d, d]
//              cfg.json                  d_in, num_latents or expansion_factor, k: the k largest of a token are active;
//                                        without `transcode` the encoder reads x - b_dec
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <tuple>

#include "base/text.hpp"
#include "interchange/formats.hpp"
#include "interchange/hooks.hpp"

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

/// Facts from a layer's configuration.
struct Layer {
  Contents contents;
  bool centred = false;
  bool unit_decoder = false;  ///< Layout::unit_decoder
  std::vector<std::pair<std::string, std::string>> facts = {};
};

// Keys of SAELens 2 to 6 that do not change what the stored weights compute: those of training and of data.
constexpr const char* kSaelensWithoutEffect[] = {
    "device", "dtype", "d_sae_override", "expansion_factor", "hook_layer", "hook_point_layer", "hook_head_index",
    "hook_point_head_index", "hook_eval", "hook_point_eval", "hook_layer_out", "hook_head_index_out", "prepend_bos",
    "context_size", "dataset_path", "dataset_trust_remote_code", "model_class_name", "model_from_pretrained_kwargs",
    "model_kwargs", "neuronpedia_id", "exclude_special_tokens", "seqpos_slice", "seed", "sae_lens_version",
    "sae_lens_training_version", "use_error_term", "from_pretrained_path", "checkpoint_path", "sparsity", "run_name",
    // The presence of the factors' tensor determines whether they are used.
    "finetuning_scaling_factor", "finetuning_method", "finetuning_tokens", "l1_coefficient", "l1_warm_up_steps",
    "lp_norm", "l0_coefficient", "l0_warm_up_steps", "mse_loss_normalization", "noise_scale", "use_ghost_grads",
    "normalize_sae_decoder", "scale_sparsity_penalty_by_decoder_norm", "decoder_init_norm", "decoder_heuristic_init",
    "decoder_heuristic_init_norm", "decoder_orthogonal_init", "init_encoder_as_decoder_transpose", "b_dec_init_method",
    "jumprelu_init_threshold", "jumprelu_bandwidth", "jumprelu_sparsity_loss_mode", "jumprelu_ste_to_input",
    "jumprelu_tanh_scale", "pre_act_loss_coefficient", "target_l0", "aux_loss_coefficient", "use_sparse_activations",
    "topk_threshold_lr", "is_dataset_tokenized", "streaming", "use_cached_activations", "cached_activations_path",
    "n_batches_in_buffer", "training_tokens", "store_batch_size_prompts", "train_batch_size_tokens", "train_batch_size",
    "adam_beta1", "adam_beta2", "lr", "lr_scheduler_name", "lr_warm_up_steps", "lr_end", "lr_decay_steps",
    "n_restart_cycles", "dead_feature_window", "feature_sampling_window", "dead_feature_threshold", "n_eval_batches",
    "eval_batch_size_prompts", "log_to_wandb", "log_activations_store_to_wandb", "log_optimizer_state_to_wandb",
    "wandb_project", "wandb_id", "wandb_entity", "wandb_log_frequency", "eval_every_n_wandb_logs", "resume",
    "n_checkpoints", "verbose", "autocast", "autocast_lm", "compile_llm", "llm_compilation_mode", "compile_sae",
    "sae_compilation_mode", "act_store_device", "tokens_per_buffer", "total_training_steps", "total_training_tokens"};

/// Reads the activation function of files before version 6. Returns true if it is TopK.
bool has_topk_function(ForeignSettings& config) {
  const std::string function = config.text("activation_fn_str", config.text("activation_fn", "relu"));
  if (function != "relu" && function != "topk")
    config.refuse(fmt::format("activation_fn \"{}\" has no counterpart", printable(function)));
  return function == "topk";
}

/// Reads the arguments of the activation function; only k is supported.
std::optional<std::int64_t> k_of_function(ForeignSettings& config) {
  const SortedJson& arguments = config.value("activation_fn_kwargs");
  if (arguments.is_null()) return std::nullopt;
  if (!arguments.is_object())
    throw error(ExitCode::data, "{}: \"activation_fn_kwargs\" is not an object", config.path().string());
  std::optional<std::int64_t> k;
  for (const auto& [key, value] : arguments.items()) {
    if (key != "k") config.refuse(fmt::format("activation_fn_kwargs has \"{}\"", printable(key)));
    if (!value.is_number_unsigned() || value.get<std::uint64_t>() < 1 || value.get<std::uint64_t>() >> 28 != 0)
      throw error(ExitCode::data, "{}: \"activation_fn_kwargs.k\" is not a positive integer", config.path().string());
    k = value.get<std::int64_t>();
  }
  return k;
}

void refuse_normalised_activations(ForeignSettings& config) {
  const SortedJson& normalise = config.value("normalize_activations");
  // Versions before 4 wrote true for "expected_average_only_in".
  if (normalise.is_null() || normalise == "none" || normalise == false) return;
  config.refuse(
      fmt::format("normalize_activations is {} (the factor is not in the file; fold it into the weights first)",
                  printable(json_text(normalise))));
}

Layer saelens_layer(ForeignSettings& config) {
  Layer layer;
  Contents& contents = layer.contents;
  const bool topk_function = has_topk_function(config);
  const std::optional<std::int64_t> k = k_of_function(config);
  std::string architecture = config.text("architecture", "standard");
  if (topk_function && architecture == "standard") architecture = "topk";
  if (topk_function && architecture != "topk")
    config.refuse(fmt::format("activation_fn is \"topk\" and architecture \"{}\"", printable(architecture)));
  // Architecture -> thresholds, skip, autoencoder.
  const std::map<std::string, std::array<bool, 3>> known = {{"standard", {false, false, true}},
                                                            {"jumprelu", {true, false, true}},
                                                            {"topk", {false, false, true}},
                                                            {"transcoder", {false, false, false}},
                                                            {"skip_transcoder", {false, true, false}},
                                                            {"jumprelu_transcoder", {true, false, false}},
                                                            {"jumprelu_skip_transcoder", {true, true, false}}};
  const auto found = known.find(architecture);
  if (found == known.end())
    config.refuse(fmt::format("architecture \"{}\" has no counterpart", printable(architecture)));
  contents.sizes = checked(config.path(), 1, config.count("d_in"), config.count("d_sae"));
  contents.thresholds = found->second[0];
  contents.skip = found->second[1];
  contents.autoencoder = found->second[2];
  if (architecture == "topk") contents.k = k ? *k : config.count("k");
  if (architecture != "topk" && (k || config.has("k")))
    config.refuse(fmt::format("it has k and architecture \"{}\"", printable(architecture)));
  if (const std::optional<std::int64_t> repeated = config.optional_count("k"); repeated && *repeated != contents.k)
    config.refuse(fmt::format("k is {}, activation_fn_kwargs.k is {}", *repeated, contents.k));
  const std::optional<std::int64_t> outputs = config.optional_count("d_out");
  if (!contents.autoencoder && (outputs ? *outputs : config.count("d_out")) != contents.sizes.d_model)
    config.refuse("its outputs have another width than its inputs");
  if (contents.autoencoder && outputs && *outputs != contents.sizes.d_model)
    config.refuse("its outputs have another width than its inputs");
  refuse_normalised_activations(config);
  // hook_z: the values of all heads in one row, one head after the other, as in datasets.
  if (const std::string shape = config.text("reshape_activations", "none"); shape != "none" && shape != "hook_z")
    config.refuse(fmt::format("reshape_activations is \"{}\"", printable(shape)));
  layer.unit_decoder = config.flag("rescale_acts_by_decoder_norm");
  if (layer.unit_decoder && architecture != "topk")
    config.refuse(fmt::format("rescale_acts_by_decoder_norm is true and architecture \"{}\"", architecture));
  layer.centred = config.flag("apply_b_dec_to_input", contents.autoencoder);
  if (layer.centred && !contents.autoencoder) config.refuse("apply_b_dec_to_input is true (b_dec is of its outputs)");
  // Files before version 6 have the keys of `metadata` at the top level.
  const SortedJson& metadata = config.value("metadata");
  for (const auto& [key, older, name] : {std::tuple("model_name", "model_name", "model"),
                                         {"hook_name", "hook_point", "input hook"},
                                         {"hook_name_out", "hook_name_out", "output hook"}}) {
    std::string value = config.text(key, config.text(older));
    if (metadata.is_object() && metadata.contains(key) && metadata[key].is_string())
      value = metadata[key].get<std::string>();
    if (!value.empty()) layer.facts.emplace_back(name, value);
  }
  config.without_effect(kSaelensWithoutEffect);
  config.finish();
  return layer;
}

Layer sparsify_layer(ForeignSettings& config) {
  Layer layer;
  Contents& contents = layer.contents;
  const std::int64_t d = config.count("d_in");
  // num_latents = 0 stands for expansion_factor times d_in.
  const bool given = config.has("num_latents") && config.value("num_latents") != 0;
  contents.sizes =
      checked(config.path(), 1, d, given ? config.count("num_latents") : d * config.count("expansion_factor"));
  if (const std::string activation = config.text("activation", "topk"); activation != "topk")
    config.refuse(fmt::format("activation \"{}\" has no counterpart", printable(activation)));
  for (const char* const key : {"embed_skip", "gram_lookup", "signed"})
    if (config.flag(key)) config.refuse(fmt::format("{} is true", key));
  contents.k = config.count("k");
  contents.skip = config.flag("skip_connection");
  contents.autoencoder = !config.flag("transcode");
  layer.centred = contents.autoencoder;
  constexpr const char* kWithoutEffect[] = {"expansion_factor", "normalize_decoder", "multi_topk"};
  config.without_effect(kWithoutEffect);
  config.finish();
  return layer;
}

/// Throws if a directory has one of the two files of a layer, or a layer of the other format.
void require_complete(const fs::path& directory, LayerFormat format) {
  const LayerFormat other = format == LayerFormat::saelens ? LayerFormat::sparsify : LayerFormat::saelens;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    const bool weights = fs::exists(entry.path() / file_of(format)), config = fs::exists(entry.path() / "cfg.json");
    if (weights != config && !fs::exists(entry.path() / file_of(other)))
      throw error(ExitCode::data, "{}: has {} and no {} (the layers next to it have both); was it copied completely?",
                  entry.path().string(), weights ? file_of(format) : "cfg.json",
                  weights ? "cfg.json" : file_of(format));
    if (fs::exists(entry.path() / file_of(other)))
      throw error(ExitCode::usage, "{}: has {}, the layers next to it {} (one format at a time is read); move it away",
                  entry.path().string(), file_of(other), file_of(format));
  }
}

/// True if the file has a tensor "scaling_factor" of ones, as older versions of SAELens wrote it. Throws Error(usage)
/// if a factor is another number.
bool has_unit_scaling(const fs::path& path) {
  constexpr std::int64_t kPiece = 1 << 16;
  const SafetensorsFile file(path.string());
  const SafetensorsEntry* const factors = file.find("scaling_factor");
  if (factors == nullptr || !factors->type) return false;
  std::vector<float> values;
  for (std::int64_t begin = 0; begin < factors->elements(); begin += kPiece) {
    values.resize(static_cast<std::size_t>(std::min(kPiece, factors->elements() - begin)));
    file.read(*factors, begin, static_cast<std::int64_t>(values.size()), values.data());
    for (const float value : values)
      if (value != 1.0f)
        throw error(ExitCode::usage,
                    "{}: tensor \"scaling_factor\" is not 1 (factors of a fine-tuning have no counterpart); multiply "
                    "W_dec by it first",
                    path.string());
  }
  return true;
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
  // Centring of written files; in read files the configuration states it.
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
  if (names.front() != ".") require_complete(directory, format);
  Layer first;
  for (const std::string& name : names) {
    ForeignSettings config(directory / name / "cfg.json");
    Layer layer = format == LayerFormat::saelens ? saelens_layer(config) : sparsify_layer(config);
    const Contents &a = layer.contents, &b = first.contents;
    if (name == names.front())
      first = std::move(layer);
    else if (a.sizes.d_model != b.sizes.d_model || a.sizes.n_features != b.sizes.n_features || a.k != b.k ||
             a.thresholds != b.thresholds || a.skip != b.skip || a.autoencoder != b.autoencoder ||
             layer.centred != first.centred || layer.unit_decoder != first.unit_decoder)
      throw error(
          ExitCode::usage,
          "{}: has another width, number of features, k or architecture than {} (the layers of a transcoder are "
          "alike); read it alone",
          config.path().string(), (directory / names.front()).string());
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
  layout.unit_decoder = first.unit_decoder;
  for (LayoutFile& file : layout.files)
    if (format == LayerFormat::saelens && has_unit_scaling(directory / file.name)) file.ignored = {"scaling_factor"};
  // A set may have only some layers of a model: the configuration names them.
  if (names.front() != ".") first.facts.emplace_back("directories", fmt::format("{}", fmt::join(names, ", ")));
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

/// Returns `hook` with the number of the layer in place of {}.
std::string hook_of(std::string hook, std::int64_t layer) {
  if (const std::size_t at = hook.find("{}"); at != hook.npos) hook.replace(at, 2, std::to_string(layer));
  return hook;
}

}  // namespace

std::vector<std::string> layer_names(const Contents& contents, LayerFormat format, const Origin& origin) {
  // sparsify names its directories by the module whose output is reconstructed.
  const std::string& hook = contents.autoencoder ? origin.input_hook : origin.output_hook;
  const bool usable = !hook.empty() && (hook.find("{}") != hook.npos || contents.sizes.n_layers == 1) &&
                      hook.find('/') == hook.npos && hook.front() != '.';
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
  const auto hook = [&](const std::string& name) { return text(hook_of(with_block(name), layer)); };
  // Without a version SAELens treats the file as older than version 6 and ignores the metadata.
  Json metadata = {{"sae_lens_version", "6.0.0"},
                   {"sae_lens_training_version", Json()},
                   {"model_name", text(origin.model)},
                   {"hook_name", hook(origin.input_hook)}};
  if (!contents.autoencoder) {
    config["d_out"] = contents.sizes.d_model;
    metadata["hook_name_out"] = hook(origin.output_hook);
  }
  if (contents.k > 0) config["k"] = contents.k;
  config["metadata"] = metadata;
  return json_text(config, 2) + "\n";
}

}  // namespace weft::interchange
