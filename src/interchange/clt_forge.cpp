// SPDX-License-Identifier: Apache-2.0
//
// A checkpoint of CLT-Forge: clt_cfg.json and clt_weights.safetensors, or rank{r}_clt_weights.safetensors with a
// contiguous part F_r of the features each.
//
//   W_enc [L, d, F_r], b_enc [L, F_r], W_dec [M, F_r, d], b_dec [M, d], log_threshold [L, F_r]
//   estimated_norm_scaling_factor_in, _out [L]
//
// M = L (L + 1) / 2 pairs of layers in row-major order, (0, 0), (0, 1), ...; the biases of the pairs add up and are the
// same in all files. With cross_layer_decoders = false, M = L: a layer writes to itself only. JumpReLU, active iff z >
// theta. Weights apply to x * factor_in and give y * factor_out.
#include <cmath>

#include "base/text.hpp"
#include "interchange/formats.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;
namespace {

/// sqrt(d) / factor of each layer: Weft's scalar normalisation multiplies by sqrt(d) / mean norm.
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

}  // namespace

Opened open_clt_forge(const fs::path& directory) {
  const fs::path path = directory / "clt_cfg.json";
  const SortedJson config = json_object(path);
  const auto cross_layer = config.find("cross_layer_decoders");
  const bool own_layer_only = cross_layer != config.end() && cross_layer->is_boolean() && !cross_layer->get<bool>();

  std::vector<std::string> names;
  if (fs::exists(directory / "clt_weights.safetensors")) {
    names.emplace_back("clt_weights.safetensors");
  } else {
    std::int64_t n_shards = 0;
    for (const fs::directory_entry& entry : fs::directory_iterator(directory))
      if (entry.path().filename().string().ends_with("_clt_weights.safetensors")) ++n_shards;
    for (std::int64_t r = 0; r < std::max<std::int64_t>(1, n_shards); ++r)
      names.push_back(fmt::format("rank{}_clt_weights.safetensors", r));
  }
  Layout layout{.contents = {.sizes = {}, .thresholds = true, .per_layer = own_layer_only}, .log_thresholds = true};
  Sizes& sizes = layout.contents.sizes;
  std::vector<std::int64_t> features;  // of each file
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
    const std::size_t encoder = layout.add_tensor(file, "W_enc", {n_layers, d, n}),
                      encoder_bias = layout.add_tensor(file, "b_enc", {n_layers, n}),
                      decoder = layout.add_tensor(file, "W_dec", {pairs, n, d}),
                      decoder_bias = layout.add_tensor(file, "b_dec", {pairs, d}),
                      threshold = layout.add_tensor(file, "log_threshold", {n_layers, n});
    std::int64_t pair = 0;
    for (std::int64_t s = 0; s < n_layers; ++s) {
      layout.blocks[{Part::encoder, s}].push_back({.rows = rows,
                                                   .columns = {0, d},
                                                   .file = file,
                                                   .tensor = encoder,
                                                   .offset = s * d * n,
                                                   .row_stride = 1,
                                                   .column_stride = n});
      for (const auto& [part, tensor] : {std::pair(Part::encoder_bias, encoder_bias), {Part::threshold, threshold}})
        layout.blocks[{part, s}].push_back({.rows = rows,
                                            .columns = {0, 1},
                                            .file = file,
                                            .tensor = tensor,
                                            .offset = s * n,
                                            .row_stride = 1,
                                            .column_stride = 1});
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
  if (const auto model = config.find("model_name"); model != config.end() && model->is_string())
    opened.facts.emplace_back("model", model->get<std::string>());
  return opened;
}

}  // namespace weft::interchange
