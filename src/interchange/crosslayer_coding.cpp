// SPDX-License-Identifier: Apache-2.0
//
// A checkpoint of crosslayer-coding (curt-tigges): model.safetensors and cfg.json.
//
//   encoder_module.encoders.{s}.weight [F, d], .bias_param [F]
//   decoder_module.decoders.{s}->{t}.weight [d, F], .bias_param [d]: one bias per pair of layers; they add up
//   theta_manager.log_threshold [L, F]: ln theta of JumpReLU, active iff z >= theta
//
// decoder_tying "per_source", "per_target": decoder_module.decoders.{i}.weight [d, F], .bias_param [d], those of source
// i for all targets, or of target i for all sources. Then, if enabled,
//
//   decoder_module.skip_weights.{t} [d, d]: y_t += W x_t
//   decoder_module.feature_offset.{t} [F], .feature_scale.{t} [F]: (a + offset) * scale is written to t where a is not
//   0; the prefix is encoder_module or missing in older files
//
// The bias of target t is that of decoder t per target, and the sum of those of sources 0..t per source.
//
// normalization_method: "none", "sqrt_d_model" (x * sqrt(d)), "mean_std" ((x - mean) / (std + 1e-6), with the
// statistics of the training data in norm_stats.json), and older names of these.
#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/text.hpp"
#include "interchange/formats.hpp"
#include "interchange/hooks.hpp"
#include "storage/durable.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;
namespace {

/// Name of the weights' file: model.safetensors, or the only file of this type.
std::string weights_in(const fs::path& directory) {
  std::vector<std::string> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    if (entry.path().extension() == ".safetensors") found.push_back(entry.path().filename().string());
  if (found.size() == 1) return found.front();
  if (fs::exists(directory / "model.safetensors")) return "model.safetensors";
  throw error(ExitCode::data, "{}: has {} files *.safetensors and no model.safetensors; keep one of them",
              directory.string(), found.size());
}

/// Reads the values [L * d] of one side ("inputs") and key ("mean") of norm_stats.json.
std::vector<double> column_of(const fs::path& path, const SortedJson& root, const Sizes& sizes, const char* side,
                              const char* key) {
  std::vector<double> values;
  for (std::int64_t layer = 0; layer < sizes.n_layers; ++layer) {
    const SortedJson* at = &root;
    for (const std::string& name : {std::to_string(layer), std::string(side), std::string(key)}) {
      const bool there = at->is_object() && at->contains(name);
      if (!there)
        throw error(ExitCode::data, "{}: has no \"{}\" of the {} of layer {}", path.string(), key, side, layer);
      at = &(*at)[name];
    }
    if (!at->is_array() || static_cast<std::int64_t>(at->size()) != sizes.d_model)
      throw error(ExitCode::data, "{}: \"{}\" of the {} of layer {} is not a list of {} numbers", path.string(), key,
                  side, layer, sizes.d_model);
    for (const SortedJson& value : *at) {
      const double number = value.is_number() ? value.get<double>() : std::nan("");
      if (!std::isfinite(number) || (std::string_view(key) == "std" && number < 0))
        throw error(ExitCode::data, "{}: \"{}\" of the {} of layer {} has an unusable value", path.string(), key, side,
                    layer);
      values.push_back(number);
    }
  }
  return values;
}

Normalised read_statistics(const fs::path& directory, const std::string& given, const Sizes& sizes) {
  fs::path path = given;
  if (given.empty())
    for (const fs::path& place :
         {directory, directory_of(directory.has_filename() ? directory : directory.parent_path())})
      if (path.empty() && fs::exists(place / "norm_stats.json")) path = place / "norm_stats.json";
  if (path.empty() || !fs::exists(path))
    throw error(ExitCode::usage,
                "{}: the model normalises its activations (cfg.json: normalization_method = mean_std), and {}; give "
                "norm_stats.json of its training data with --statistics FILE",
                directory.string(),
                given.empty() ? "there is no norm_stats.json here or above" : given + " does not exist");
  const std::int64_t at_most = 4096 + sizes.n_layers * sizes.d_model * 4 * 64;
  const SortedJson root = parse_json<SortedJson>(storage::read_text(open_regular(path, ExitCode::data), path, at_most));
  Normalised result = not_normalised(sizes);
  result.mode = dataset::Normalise::per_dimension;
  for (const auto& [side, values] :
       {std::pair<const char*, dataset::SideStatistics*>{"inputs", &result.statistics.inputs},
        {"targets", &result.statistics.targets}}) {
    values->mean = column_of(path, root, sizes, side, "mean");
    values->standard_deviation = column_of(path, root, sizes, side, "std");
  }
  return result;
}

Normalised normalisation_of(const fs::path& directory, ForeignSettings& config, const std::string& statistics,
                            const Sizes& sizes) {
  std::string method = config.text("normalization_method", "none");
  if (config.flag("sqrt_d_model_normalize") || method.ends_with("sqrt_d_model")) method = "sqrt_d_model";
  if (method == "auto" || method == "estimated_mean_std") method = "mean_std";
  if (method == "mean_std") return read_statistics(directory, statistics, sizes);
  Normalised result = not_normalised(sizes);
  // x * sqrt(d) is Weft's scalar normalisation by a mean norm of 1.
  if (method == "sqrt_d_model")
    result.mode = dataset::Normalise::scalar;
  else if (method != "none")
    throw error(ExitCode::usage, "{}: normalization_method \"{}\" is not known", (directory / "cfg.json").string(),
                printable(method));
  return result;
}

const std::map<Tying, std::string> tying_names = {
    {Tying::none, "none"}, {Tying::per_source, "per_source"}, {Tying::per_target, "per_target"}};

/// Returns the prefix of offsets and scales in a file; the prefix of newer files if there are none.
std::string module_of_affine(const std::string& path) {
  const SafetensorsFile file(path);
  for (const char* module : {"decoder_module.", "encoder_module.", ""})
    for (const char* kind : {"feature_offset.0", "feature_scale.0"})
      if (file.find(module + std::string(kind)) != nullptr) return module;
  return "decoder_module.";
}

}  // namespace

Layout crosslayer_coding_layout(const Contents& contents, std::string file_name, const CodingAffine& affine) {
  const auto [n_layers, d, n_features] = contents.sizes;
  Layout layout{.contents = contents, .log_thresholds = true, .summed_biases = contents.tying == Tying::per_source};
  const std::size_t file = layout.add_file(std::move(file_name));
  const bool tied = contents.tying != Tying::none;
  for (std::int64_t s = 0; s < n_layers; ++s) {
    const std::string encoder = fmt::format("encoder_module.encoders.{}.", s);
    layout.add_whole(file, encoder + "weight", {n_features, d}, Part::encoder, s);
    layout.add_whole(file, encoder + "bias_param", {n_features}, Part::encoder_bias, s);
  }
  for (std::int64_t i = 0; tied && i < n_layers; ++i) {
    const std::string decoder = fmt::format("decoder_module.decoders.{}.", i);
    layout.add_whole(file, decoder + "weight", {d, n_features}, Part::decoder, i, true);
    layout.add_whole(file, decoder + "bias_param", {d}, Part::decoder_bias, i);
    if (contents.skip) layout.add_whole(file, fmt::format("decoder_module.skip_weights.{}", i), {d, d}, Part::skip, i);
    if (contents.affine && affine.offset)
      layout.add_whole(file, fmt::format("{}feature_offset.{}", affine.module, i), {n_features}, Part::offset, i);
    if (contents.affine && affine.scale)
      layout.add_whole(file, fmt::format("{}feature_scale.{}", affine.module, i), {n_features}, Part::scale, i);
  }
  for (std::int64_t t = 0; !tied && t < n_layers; ++t)
    for (std::int64_t s = t; s >= 0; --s) {  // the pair (t, t) first: in exports it has the bias
      const std::string decoder = fmt::format("decoder_module.decoders.{}->{}.", s, t);
      layout.blocks[{Part::decoder, s}].push_back(
          {.rows = {0, n_features},
           .columns = layout.strip(s, t),
           .file = file,
           .tensor = layout.add_tensor(file, decoder + "weight", {d, n_features}),
           .row_stride = 1,
           .column_stride = n_features});
      layout.add_whole(file, decoder + "bias_param", {d}, Part::decoder_bias, t);
    }
  if (!contents.thresholds) return layout;
  const std::size_t thresholds = layout.add_tensor(file, "theta_manager.log_threshold", {n_layers, n_features});
  for (std::int64_t s = 0; s < n_layers; ++s)
    layout.blocks[{Part::threshold, s}].push_back({.rows = {0, n_features},
                                                   .columns = {0, 1},
                                                   .file = file,
                                                   .tensor = thresholds,
                                                   .offset = s * n_features,
                                                   .row_stride = 1,
                                                   .column_stride = 1});
  return layout;
}

std::string crosslayer_coding_config(const Contents& contents, const Origin& origin, Storage storage) {
  if (contents.skip && contents.tying == Tying::none)
    throw error(
        ExitCode::usage,
        "crosslayer-coding has no skip connection from a layer's input to its own output only (its untied models "
        "have one per pair of layers); train without transcoder.skip, or with transcoder.decoder = \"per_layer\" and "
        "export to circuit-tracer");
  const auto text = [](const std::string& value) { return value.empty() ? Json() : Json(value); };
  // Its hook templates are those of modules (nnsight) or of TransformerLens; older versions support only the former.
  const bool lens_inputs = is_transformer_lens(origin.input_hook),
             lens_outputs = is_transformer_lens(origin.output_hook);
  Json config = {{"num_features", contents.sizes.n_features},
                 {"num_layers", contents.sizes.n_layers},
                 {"d_model", contents.sizes.d_model},
                 {"model_name", text(origin.model)},
                 {"normalization_method", "none"},
                 {"activation_fn", contents.thresholds ? "jumprelu" : "relu"},
                 {"clt_dtype", storage.matrices == kernels::Scalar::bf16 ? "bfloat16" : "float32"},
                 {"mlp_input_template", text(lens_inputs ? "" : origin.input_hook)},
                 {"mlp_output_template", text(lens_outputs ? "" : origin.output_hook)},
                 {"decoder_tying", tying_names.at(contents.tying)},
                 {"enable_feature_offset", contents.affine},
                 {"enable_feature_scale", contents.affine},
                 {"skip_connection", contents.skip}};
  if (lens_inputs) config["tl_input_template"] = with_block(origin.input_hook);
  if (lens_outputs) config["tl_output_template"] = with_block(origin.output_hook);
  return json_text(config, 2) + "\n";
}

Opened open_crosslayer_coding(const fs::path& directory, const std::string& statistics) {
  const fs::path path = directory / "cfg.json";
  ForeignSettings config(path);
  const auto lacks = [&](const std::string& what, const char* why) {
    config.refuse(fmt::format("{} ({})", what, why));
  };
  Contents contents;
  contents.sizes = checked(path, config.count("num_layers"), config.count("d_model"), config.count("num_features"));
  const std::string activation = config.text("activation_fn", "jumprelu");
  const std::string tying = config.text("decoder_tying", "none");
  const auto known =
      std::find_if(tying_names.begin(), tying_names.end(), [&](const auto& of) { return of.second == tying; });
  if (known == tying_names.end()) lacks(fmt::format("decoder_tying is \"{}\"", printable(tying)), "it is not known");
  contents.tying = known->first;
  contents.skip = config.flag("skip_connection");
  if (contents.skip && contents.tying == Tying::none)
    lacks("skip_connection is true, decoder_tying \"none\"", "one skip matrix per pair of layers has no counterpart");
  CodingAffine affine{config.flag("enable_feature_offset"), config.flag("enable_feature_scale")};
  // Untied models have no offsets or scales, whatever the configuration states.
  contents.affine = contents.tying != Tying::none && (affine.offset || affine.scale);
  if (contents.affine && contents.tying == Tying::per_source)
    lacks("feature offsets or scales are enabled, decoder_tying is \"per_source\"",
          "a vector of a source has the same activation for all its targets");
  if (activation == "batchtopk" || activation == "topk")
    lacks(fmt::format("activation_fn is \"{}\"", activation),
          "it ranks by z-scores over the batch; convert the model to JumpReLU with that program first");
  if (activation != "jumprelu" && activation != "relu")
    lacks(fmt::format("activation_fn \"{}\"", printable(activation)), "it is not known");
  contents.thresholds = activation == "jumprelu";
  for (const char* const key : {"per_target_scale", "per_target_bias"})
    if (config.flag(key)) lacks(fmt::format("{} is true", key), "it has no counterpart");
  const std::string weights = weights_in(directory);
  if (contents.affine) affine.module = module_of_affine((directory / weights).string());
  Layout layout = crosslayer_coding_layout(contents, weights, affine);
  if (!contents.thresholds) layout.files[0].ignored = {"theta_manager.log_threshold"};
  Opened opened{.format = "crosslayer-coding",
                .rows = std::make_unique<LayoutRows>(directory, std::move(layout)),
                .normalised = normalisation_of(directory, config, statistics, contents.sizes),
                .keeps_equal = contents.thresholds};
  for (const auto& [key, other, name] : {std::tuple("model_name", "model_name", "model"),
                                         {"mlp_input_template", "tl_input_template", "input hook"},
                                         {"mlp_output_template", "tl_output_template", "output hook"}}) {
    const std::string second = config.text(other), value = config.text(key, second);
    if (!value.empty()) opened.facts.emplace_back(name, value);
  }
  // jumprelu_threshold is the initial threshold; the other keys belong to training or to other activation functions.
  constexpr const char* kWithoutEffect[] = {
      "jumprelu_threshold",    "batchtopk_k", "batchtopk_frac", "batchtopk_straight_through", "topk_k",
      "topk_straight_through", "topk_mode",   "clt_dtype",      "expected_input_dtype",       "context_size"};
  config.without_effect(kWithoutEffect);
  config.finish();
  return opened;
}

}  // namespace weft::interchange
