// SPDX-License-Identifier: Apache-2.0
#include "interchange/formats.hpp"

#include <fmt/ranges.h>

#include <algorithm>

#include "base/format.hpp"
#include "base/text.hpp"
#include "kernels/constants.hpp"
#include "storage/durable.hpp"
#include "storage/pending_output.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;
namespace {

enum class Kind { none, circuit_tracer, crosslayer_coding, clt_forge, crosslayer_transcoder, saelens, sparsify };

/// True if there is a file PREFIX*.safetensors.
bool has_files(const fs::path& directory, std::string_view prefix) {
  std::error_code failure;
  for (fs::directory_iterator entry(directory, failure), end; !failure && entry != end; entry.increment(failure))
    if (entry->path().filename().string().starts_with(prefix) && entry->path().extension() == ".safetensors")
      return true;
  return false;
}

Kind kind_of(const fs::path& directory) {
  const auto has = [&](const char* name) { return fs::exists(directory / name); };
  // The file of layer 0 may be missing.
  if (has_files(directory, "W_enc_") || has_files(directory, "layer_")) return Kind::circuit_tracer;
  if (has("clt_cfg.json")) return Kind::clt_forge;
  if (has("checkpoint.safetensors") && has("config.yaml")) return Kind::crosslayer_transcoder;
  if (!layer_directories(directory, LayerFormat::saelens).empty()) return Kind::saelens;
  if (!layer_directories(directory, LayerFormat::sparsify).empty()) return Kind::sparsify;
  if (has("cfg.json")) return Kind::crosslayer_coding;
  return Kind::none;
}

}  // namespace

bool is_directory_of_weights(const fs::path& directory) { return kind_of(directory) != Kind::none; }

Opened open_directory(const fs::path& directory, const std::string& statistics) {
  const Kind kind = kind_of(directory);
  if (!statistics.empty() && kind != Kind::crosslayer_coding)
    throw error(ExitCode::usage,
                "--statistics {}: {} is of another format (only crosslayer-coding keeps statistics in a file of their "
                "own); leave it out",
                statistics, directory.string());
  switch (kind) {
    case Kind::circuit_tracer:
      return open_circuit_tracer(directory);
    case Kind::crosslayer_coding:
      return open_crosslayer_coding(directory, statistics);
    case Kind::clt_forge:
      return open_clt_forge(directory);
    case Kind::crosslayer_transcoder:
      return open_crosslayer_transcoder(directory);
    case Kind::saelens:
      return open_per_layer(directory, LayerFormat::saelens);
    case Kind::sparsify:
      return open_per_layer(directory, LayerFormat::sparsify);
    case Kind::none:
      break;
  }
  throw error(ExitCode::usage,
              "{}: no transcoder of a known format (W_enc_0.safetensors, layer_0.safetensors, cfg.json, clt_cfg.json, "
              "config.yaml with "
              "checkpoint.safetensors, or directories with sae_weights.safetensors or sae.safetensors); see "
              "docs/interchange.md",
              directory.string());
}

Json document_of(const Opened& opened) {
  const Contents& contents = opened.rows->contents();
  Json document = {{"format", opened.format},
                   {"layers", contents.sizes.n_layers},
                   {"d_model", contents.sizes.d_model},
                   {"features", contents.sizes.n_features},
                   {"activation", contents.k > 0        ? "topk"
                                  : contents.thresholds ? "jumprelu"
                                                        : "relu"},
                   {"per_layer", contents.per_layer},
                   {"autoencoder", contents.autoencoder},
                   {"skip", contents.skip}};
  if (contents.k > 0) document["k"] = contents.k;
  for (const auto& [name, text] : opened.facts) document[name] = text;
  return document;
}

std::string summary(const Opened& opened, const fs::path& directory) {
  const Contents& contents = opened.rows->contents();
  std::string stored;
  for (const auto& [dtype, bytes] : opened.rows->bytes_by_dtype())
    stored += fmt::format("{}{} {}", stored.empty() ? "" : ", ", format::binary_bytes_text(bytes), dtype);
  std::string text = fmt::format(
      "{}: weights in the format of {}\n"
      "  {} of {} layer{}, d_model {}, {} features per layer, {}{}{}\n"
      "  activations    {}\n"
      "  stored as      {}",
      directory.string(), opened.format,
      contents.autoencoder ? "autoencoder"
      : contents.per_layer ? "per-layer transcoder"
                           : "transcoder",
      contents.sizes.n_layers, contents.sizes.n_layers == 1 ? "" : "s", contents.sizes.d_model,
      contents.sizes.n_features,
      contents.k > 0        ? fmt::format("TopK of {}", contents.k)
      : contents.thresholds ? "JumpReLU"
                            : "ReLU",
      contents.tying == Tying::none         ? ""
      : contents.tying == Tying::per_source ? ", decoders tied per source"
      : contents.affine                     ? ", decoders tied per target with offsets and scales"
                                            : ", decoders tied per target",
      contents.skip ? ", linear skip connection" : "",
      opened.normalised.mode == dataset::Normalise::none            ? "raw"
      : opened.normalised.mode == dataset::Normalise::per_dimension ? "normalised per dimension"
                                                                    : "scaled by one number per layer",
      stored);
  for (const auto& [name, value] : opened.facts) text += fmt::format("\n  {:<14} {}", name, printable(value));
  return text;
}

void write_directory(const RowSource& source, Format format, Storage storage, const Origin& origin,
                     const fs::path& directory) {
  storage::write_new_directory(directory, [&](const fs::path& temporary) {
    if (format == Format::circuit_tracer) {
      write(source, circuit_tracer_layout(source.contents()), storage, temporary);
      storage::write_text(temporary / "config.yaml", circuit_tracer_config(source.contents(), origin));
    } else if (format == Format::saelens || format == Format::sparsify) {
      const LayerFormat each = format == Format::saelens ? LayerFormat::saelens : LayerFormat::sparsify;
      require_expressible(source.contents(), each);
      const std::vector<std::string> names = layer_names(source.contents(), each, origin);
      write(source, per_layer_layout(source.contents(), each, names), storage, temporary);
      for (std::size_t i = 0; i < names.size(); ++i) {
        storage::write_text(temporary / names[i] / "cfg.json",
                            per_layer_config(source.contents(), each, origin, static_cast<std::int64_t>(i), storage));
        storage::sync_directory(temporary / names[i]);
      }
    } else {
      const std::string config = crosslayer_coding_config(source.contents(), origin, storage);
      write(source, crosslayer_coding_layout(source.contents(), "model.safetensors"), storage, temporary);
      storage::write_text(temporary / "cfg.json", config);
    }
  });
}

Sizes checked(const fs::path& path, std::int64_t n_layers, std::int64_t d_model, std::int64_t n_features) {
  // Bounds as in an input file: no product of these sizes exceeds 64 bits.
  constexpr std::int64_t kMostFeatures = 1 << 28, kWidest = 1 << 20;
  if (n_layers < 1 || n_layers > kernels::kMostLayers || d_model < 1 || d_model > kWidest || n_features < 1 ||
      n_features > kMostFeatures)
    throw error(ExitCode::data, "{}: has {} layers, d_model {} and {} features (at most {}, {} and {} are supported)",
                path.string(), n_layers, d_model, n_features, kernels::kMostLayers, kWidest, kMostFeatures);
  return {n_layers, d_model, n_features};
}

const SafetensorsEntry& require_tensor(const SafetensorsFile& file, std::string_view name, std::size_t axes) {
  const SafetensorsEntry* const entry = file.find(name);
  if (entry == nullptr)
    throw error(ExitCode::data, "{}: tensor \"{}\" is missing; was the file written by the named program?", file.path(),
                name);
  if (entry->shape.size() != axes)
    throw error(ExitCode::data, "{}: tensor \"{}\" has shape [{}] ({} axes are expected)", file.path(), name,
                fmt::join(entry->shape, ", "), axes);
  return *entry;
}

}  // namespace weft::interchange
