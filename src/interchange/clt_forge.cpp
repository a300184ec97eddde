// SPDX-License-Identifier: Apache-2.0
//
// A checkpoint of CLT-Forge: clt_cfg.json and clt_weights.safetensors, or rank{r}_clt_weights.safetensors with a
// contiguous part F_r of the features each.
//
//   W_enc [L, d, F_r], b_enc [L, F_r], W_dec [M, F_r, d], b_dec [M, d], log_threshold [L, F_r]
//   estimated_norm_scaling_factor_in, _out [L]
//
// M = L (L + 1) / 2 pairs of layers in row-major order, (0, 0), (0, 1), ...; the biases of the pairs add up and are the
// same in all files. With cross_layer_decoders = false, M = L: a layer writes to itself only. activation_fn "jumprelu":
// active iff z > theta; "topk": the k largest of a token and layer, without thresholds. Weights apply to x * factor_in
// and give y * factor_out.
#include <algorithm>
#include <cmath>

#include "base/text.hpp"
#include "interchange/formats.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t kMostShards = 65536;

/// Mean norm of each layer, sqrt(d) / factor: Weft's scalar normalisation multiplies by sqrt(d) / mean norm.
std::vector<double> mean_norms(const SafetensorsFile& file, const char* name, const Sizes& sizes) {
  const SafetensorsEntry& entry = require_tensor(file, name, 1);
  if (entry.shape[0] != sizes.n_layers)
    throw error(ExitCode::data, "{}: tensor \"{}\" has {} elements, the model has {} layers", file.path(), name,
                entry.shape[0], sizes.n_layers);
  std::vector<float> factors(static_cast<std::size_t>(sizes.n_layers));
  file.read(entry, 0, sizes.n_layers, factors.data());
  std::vector<double> norms;
  for (const float factor : factors) {
    if (!(factor > 0) || !std::isfinite(factor))
      throw error(ExitCode::data, "{}: tensor \"{}\" has a factor that is not positive", file.path(), name);
    norms.push_back(std::sqrt(static_cast<double>(sizes.d_model)) / static_cast<double>(factor));
  }
  return norms;
}

/// Names of the weights' files: one file, or one for each process that held a part of the features.
std::vector<std::string> files_of(const fs::path& directory, ForeignSettings& config) {
  constexpr const char* kOne = "clt_weights.safetensors";
  const std::optional<std::int64_t> stated = config.optional_count("world_size");
  const bool one = fs::exists(directory / kOne), sharded = config.flag("feature_sharding", !one);
  std::int64_t n_shards = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    if (entry.path().filename().string().ends_with("_clt_weights.safetensors")) ++n_shards;
  if (!sharded || (one && n_shards == 0)) return {kOne};
  std::vector<std::string> names;
  for (std::int64_t r = 0; r < std::clamp<std::int64_t>(stated.value_or(n_shards), 1, kMostShards); ++r)
    names.push_back(fmt::format("rank{}_clt_weights.safetensors", r));
  return names;
}

}  // namespace

Opened open_clt_forge(const fs::path& directory) {
  const fs::path path = directory / "clt_cfg.json";
  ForeignSettings config(path);
  const bool own_layer_only = !config.flag("cross_layer_decoders", true);
  const std::string activation = config.text("activation_fn", "jumprelu");
  if (activation != "jumprelu" && activation != "topk")
    config.refuse(fmt::format("activation_fn \"{}\" has no counterpart", printable(activation)));
  if (const std::string type = config.text("decoder_type", "full"); type != "full")
    config.refuse(fmt::format("decoder_type \"{}\" has no counterpart", printable(type)));
  const bool topk = activation == "topk";
  const std::vector<std::string> names = files_of(directory, config);
  Layout layout{.contents = {.sizes = {}, .thresholds = !topk, .per_layer = own_layer_only}, .log_thresholds = true};
  // The thresholds of such a model keep their first value and are not used.
  if (topk) layout.contents.k = config.count("k");
  Sizes& sizes = layout.contents.sizes;
  std::vector<std::int64_t> features;  // number of features in each file
  Normalised normalised;
  for (const std::string& name : names) {
    if (!fs::exists(directory / name))
      throw error(ExitCode::data, "{}: is missing; was the checkpoint copied completely?", (directory / name).string());
    const SafetensorsFile file((directory / name).string());
    const SafetensorsEntry& weight = require_tensor(file, "W_enc", 3);
    checked(file.path(), weight.shape[0], weight.shape[1], weight.shape[2]);
    sizes = {weight.shape[0], weight.shape[1], sizes.n_features + weight.shape[2]};
    features.push_back(weight.shape[2]);
    if (name != names.front()) continue;
    normalised = not_normalised(sizes);
    normalised.mode = dataset::Normalise::scalar;
    normalised.statistics.inputs.mean_norm = mean_norms(file, "estimated_norm_scaling_factor_in", sizes);
    normalised.statistics.targets.mean_norm = mean_norms(file, "estimated_norm_scaling_factor_out", sizes);
  }
  sizes = checked(path, sizes.n_layers, sizes.d_model, sizes.n_features);
  // If the last file is missing, there are fewer features than the configuration states.
  config.require_equal("n_layers", sizes.n_layers);
  config.require_equal("d_in", sizes.d_model);
  config.require_equal("d_latent", sizes.n_features);
  if (layout.contents.k > sizes.n_features)
    throw error(ExitCode::data, "{}: k is {} of {} features", path.string(), layout.contents.k, sizes.n_features);

  const std::int64_t n_layers = sizes.n_layers, d = sizes.d_model;
  const std::int64_t pairs = own_layer_only ? n_layers : n_layers * (n_layers + 1) / 2;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    const std::int64_t n = features[i];
    const parallel::Range rows{first, first + n};
    first += n;
    const std::size_t file = layout.add_file(names[i]);
    layout.files[file].ignored = {"estimated_norm_scaling_factor_in",
                                  "estimated_norm_scaling_factor_out",
                                  "feature_count",
                                  "layer_mask",
                                  "l_idx",
                                  "k_idx"};
    if (topk) layout.files[file].ignored.push_back("log_threshold");
    const std::size_t encoder = layout.add_tensor(file, "W_enc", {n_layers, d, n}),
                      encoder_bias = layout.add_tensor(file, "b_enc", {n_layers, n}),
                      decoder = layout.add_tensor(file, "W_dec", {pairs, n, d}),
                      decoder_bias = layout.add_tensor(file, "b_dec", {pairs, d});
    const std::size_t threshold = topk ? 0 : layout.add_tensor(file, "log_threshold", {n_layers, n});
    std::int64_t pair = 0;
    for (std::int64_t s = 0; s < n_layers; ++s) {
      layout.blocks[{Part::encoder, s}].push_back({.rows = rows,
                                                   .columns = {0, d},
                                                   .file = file,
                                                   .tensor = encoder,
                                                   .offset = s * d * n,
                                                   .row_stride = 1,
                                                   .column_stride = n});
      for (const auto& [part, tensor] : {std::pair(Part::encoder_bias, encoder_bias), {Part::threshold, threshold}}) {
        if (part == Part::threshold && topk) continue;
        layout.blocks[{part, s}].push_back({.rows = rows,
                                            .columns = {0, 1},
                                            .file = file,
                                            .tensor = tensor,
                                            .offset = s * n,
                                            .row_stride = 1,
                                            .column_stride = 1});
      }
      for (std::int64_t t = s; t < (own_layer_only ? s + 1 : n_layers); ++t, ++pair) {
        layout.blocks[{Part::decoder, s}].push_back({.rows = rows,
                                                     .columns = layout.strip(s, t),
                                                     .file = file,
                                                     .tensor = decoder,
                                                     .offset = pair * n * d,
                                                     .row_stride = d,
                                                     .column_stride = 1});
        if (i == 0)
          layout.blocks[{Part::decoder_bias, t}].push_back({.rows = {0, d},
                                                            .columns = {0, 1},
                                                            .file = file,
                                                            .tensor = decoder_bias,
                                                            .offset = pair * d,
                                                            .row_stride = 1,
                                                            .column_stride = 1});
      }
    }
  }
  Opened opened{.format = "clt-forge",
                .rows = std::make_unique<LayoutRows>(directory, std::move(layout)),
                .normalised = std::move(normalised)};
  if (const std::string model = config.text("model_name"); !model.empty()) opened.facts.emplace_back("model", model);
  // Keys of training and its processes; jumprelu_init_threshold is the initial value of the thresholds.
  constexpr const char* kWithoutEffect[] = {"device",
                                            "dtype",
                                            "seed",
                                            "debug",
                                            "jumprelu_bandwidth",
                                            "jumprelu_init_threshold",
                                            "normalize_decoder",
                                            "dead_feature_window",
                                            "context_size",
                                            "functional_loss",
                                            "l0_coefficient",
                                            "decoder_rank",
                                            "ddp",
                                            "fsdp",
                                            "is_sharded",
                                            "k"};
  config.without_effect(kWithoutEffect);
  config.finish();
  return opened;
}

}  // namespace weft::interchange
