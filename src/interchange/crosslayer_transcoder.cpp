// SPDX-License-Identifier: Apache-2.0
//
// An export of crosslayer-transcoder (Goreg12345): checkpoint.safetensors and config.yaml.
//
//   encoder.W [L, d, F], encoder.b [L, F], decoder.W_{t} [t + 1, F, d] of target t, decoder.b [L, d]
//   decoder.W [L, F, d] in place of decoder.W_{t}: a layer writes to itself only
//   nonlinearity.theta [1, L, F]: JumpReLU, active iff z > theta and z > 0
//   input_standardizer.mean, .std, output_standardizer.mean, .std: [L, d] or [L], unless is_folded: (x - mean) / std
#include <algorithm>
#include <cmath>

#include "base/text.hpp"
#include "interchange/formats.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;
namespace {

/// Returns the class of a module ("JumpReLU"), without its path; "" if the configuration does not name it.
std::string class_of(const std::map<std::string, std::string>& config, std::string_view module) {
  const std::string suffix = fmt::format("{}.class_path", module);
  for (const auto& [key, value] : config)
    if (key == suffix || key.ends_with("." + suffix)) return value.substr(value.rfind('.') + 1);
  return "";
}

/// Reads the values [L, d] of a standardiser, which has one value per dimension or one per layer.
std::vector<double> values_of(const SafetensorsFile& file, const std::string& name, const Sizes& sizes) {
  const SafetensorsEntry* const entry = file.find(name);
  if (entry == nullptr)
    throw error(ExitCode::data, "{}: tensor \"{}\" is missing (the model is not folded)", file.path(), name);
  const bool per_layer = entry->shape == std::vector<std::int64_t>{sizes.n_layers};
  if (!per_layer && entry->shape != std::vector<std::int64_t>{sizes.n_layers, sizes.d_model})
    throw error(ExitCode::data, "{}: tensor \"{}\" has {} elements (one per layer, or per layer and dimension)",
                file.path(), name, entry->elements());
  std::vector<float> stored(static_cast<std::size_t>(entry->elements()));
  file.read(*entry, 0, entry->elements(), stored.data());
  std::vector<double> values;
  for (std::int64_t i = 0; i < sizes.n_layers * sizes.d_model; ++i) {
    values.push_back(static_cast<double>(stored[static_cast<std::size_t>(per_layer ? i / sizes.d_model : i)]));
    if (!std::isfinite(values.back()) || (name.ends_with(".std") && !(values.back() > 0)))
      throw error(ExitCode::data, "{}: tensor \"{}\" has an unusable value", file.path(), name);
  }
  return values;
}

}  // namespace

Opened open_crosslayer_transcoder(const fs::path& directory) {
  const fs::path path = directory / "config.yaml";
  const std::map<std::string, std::string> config = yaml_scalars(path);
  constexpr const char* kFile = "checkpoint.safetensors";
  const SafetensorsFile file((directory / kFile).string());
  const auto lacks = [&](const std::string& what) {
    throw error(ExitCode::usage, "{}: {}; Weft cannot read this model", path.string(), what);
  };
  const SafetensorsEntry& weight = require_tensor(file, "encoder.W", 3);
  Layout layout{.contents = {.sizes = checked(file.path(), weight.shape[0], weight.shape[1], weight.shape[2]),
                             .thresholds = file.find("nonlinearity.theta") != nullptr,
                             .per_layer = file.find("decoder.W") != nullptr},
                .positive_entries = true};
  const auto [n_layers, d, n_features] = layout.contents.sizes;
  const std::string nonlinearity = class_of(config, "nonlinearity");
  if (nonlinearity != (layout.contents.thresholds ? "JumpReLU" : "ReLU"))
    lacks(fmt::format("its nonlinearity is {} (only JumpReLU with nonlinearity.theta and ReLU have a counterpart)",
                      nonlinearity.empty() ? "not named" : "\"" + printable(nonlinearity) + "\""));

  const std::size_t weights = layout.add_file(kFile);
  layout.files[weights].ignored = {"nonlinearity.bandwidth"};
  const std::size_t encoder = layout.add_tensor(weights, "encoder.W", {n_layers, d, n_features}),
                    encoder_bias = layout.add_tensor(weights, "encoder.b", {n_layers, n_features}),
                    decoder_bias = layout.add_tensor(weights, "decoder.b", {n_layers, d});
  const std::size_t threshold =
      layout.contents.thresholds ? layout.add_tensor(weights, "nonlinearity.theta", {1, n_layers, n_features}) : 0;
  const std::size_t own_decoder =
      layout.contents.per_layer ? layout.add_tensor(weights, "decoder.W", {n_layers, n_features, d}) : 0;
  // One vector per layer.
  const auto add_vector = [&](Part part, std::int64_t layer, std::size_t tensor) {
    const std::int64_t rows = extent_of(layout.contents, part, layer).rows;
    layout.blocks[{part, layer}].push_back({.rows = {0, rows},
                                            .columns = {0, 1},
                                            .file = weights,
                                            .tensor = tensor,
                                            .offset = layer * rows,
                                            .row_stride = 1,
                                            .column_stride = 1});
  };
  for (std::int64_t t = 0; t < layout.contents.sizes.n_layers; ++t) {
    layout.blocks[{Part::encoder, t}].push_back({.rows = {0, layout.contents.sizes.n_features},
                                                 .columns = {0, layout.contents.sizes.d_model},
                                                 .file = weights,
                                                 .tensor = encoder,
                                                 .offset = t * d * n_features,
                                                 .row_stride = 1,
                                                 .column_stride = n_features});
    add_vector(Part::encoder_bias, t, encoder_bias);
    add_vector(Part::decoder_bias, t, decoder_bias);
    if (layout.contents.thresholds) add_vector(Part::threshold, t, threshold);
    if (layout.contents.per_layer) {
      layout.blocks[{Part::decoder, t}].push_back({.rows = {0, n_features},
                                                   .columns = {0, d},
                                                   .file = weights,
                                                   .tensor = own_decoder,
                                                   .offset = t * n_features * d,
                                                   .row_stride = d});
      continue;
    }
    const std::size_t decoder = layout.add_tensor(weights, fmt::format("decoder.W_{}", t), {t + 1, n_features, d});
    for (std::int64_t s = 0; s <= t; ++s)
      layout.blocks[{Part::decoder, s}].push_back({.rows = {0, n_features},
                                                   .columns = layout.strip(s, t),
                                                   .file = weights,
                                                   .tensor = decoder,
                                                   .offset = s * n_features * d,
                                                   .row_stride = d,
                                                   .column_stride = 1});
  }

  Normalised normalised = not_normalised(layout.contents.sizes);
  const bool folded = std::any_of(config.begin(), config.end(), [](const auto& entry) {
    return (entry.first == "is_folded" || entry.first.ends_with(".is_folded")) && entry.second == "true";
  });
  for (const auto& [module, side] :
       {std::pair<const char*, dataset::SideStatistics*>{"input_standardizer", &normalised.statistics.inputs},
        {"output_standardizer", &normalised.statistics.targets}}) {
    const std::string mean = fmt::format("{}.mean", module), deviation = fmt::format("{}.std", module);
    layout.files[weights].ignored.insert(layout.files[weights].ignored.end(), {mean, deviation});
    const std::string kind = class_of(config, module);
    if (folded || kind == "Standardizer") continue;
    if (!kind.starts_with("Dimensionwise") && !kind.starts_with("Layerwise"))
      lacks(fmt::format("its {} is {}", module, kind.empty() ? "not named" : "\"" + printable(kind) + "\""));
    normalised.mode = dataset::Normalise::per_dimension;
    side->mean = values_of(file, mean, layout.contents.sizes);
    side->standard_deviation = values_of(file, deviation, layout.contents.sizes);
  }
  // Weft divides by the standard deviation plus 1e-6, these models divide by `std` itself. If only one side has a
  // standardiser, the other side divides by 1.
  if (normalised.mode == dataset::Normalise::per_dimension)
    for (dataset::SideStatistics* side : {&normalised.statistics.inputs, &normalised.statistics.targets})
      for (double& value : side->standard_deviation) value -= 1e-6;
  return {.format = "crosslayer-transcoder",
          .rows = std::make_unique<LayoutRows>(directory, std::move(layout)),
          .normalised = std::move(normalised)};
}

}  // namespace weft::interchange
