// SPDX-License-Identifier: Apache-2.0
//
// Directories of other projects (docs/interchange.md describes each format):
//
//   circuit-tracer         W_enc_{i}.safetensors, W_dec_{i}.safetensors, config.yaml     read and written
//                          layer_{i}.safetensors, config.yaml: a set of single layers    read and written
//   crosslayer-coding      model.safetensors, cfg.json                                   read and written
//   clt-forge              [rank{r}_]clt_weights.safetensors, clt_cfg.json               read
//   crosslayer-transcoder  checkpoint.safetensors, config.yaml                           read
//   saelens                sae_weights.safetensors, cfg.json                             read and written
//   sparsify               sae.safetensors, cfg.json                                     read and written
//
// The last two have one layer per directory: a directory of such directories is a transcoder of as many layers.
//
// Every tensor and every key of a configuration is applied, or is an Error(usage) that names it (foreign_settings.hpp).
// To add a format: a function that makes its layout, its case in `open_directory` and, if it is written, in
// `write_directory`.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.hpp"
#include "interchange/checkpoint.hpp"
#include "interchange/foreign_settings.hpp"
#include "interchange/layout.hpp"

namespace weft::interchange {

/// An opened directory: its weights as stored, and their meaning.
struct Opened {
  std::string format;
  std::unique_ptr<LayoutRows> rows;
  Normalised normalised;  ///< statistics of the activations to which the weights apply
  /// True if JumpReLU keeps z = theta (z >= theta instead of z > theta).
  bool keeps_equal = false;
  std::vector<std::pair<std::string, std::string>> facts = {};  ///< name -> text of foreign origin: model, hooks
};

/// True if the directory has the files of one of the formats.
bool is_directory_of_weights(const std::filesystem::path& directory);

/// Opens a directory of any of the formats. `statistics`: norm_stats.json of a model whose directory lacks it; "" =
/// look there and in the directory above. Throws Error(data) for damaged files and Error(usage) for what Weft does not
/// support.
Opened open_directory(const std::filesystem::path& directory, const std::string& statistics = "");

/// Describes format, sizes, storage and origin on a few lines.
std::string summary(const Opened& opened, const std::filesystem::path& directory);
/// Returns format, sizes and origin as a document, for --json.
Json document_of(const Opened& opened);

/// The formats that can be written.
enum class Format { circuit_tracer, crosslayer_coding, saelens, sparsify };

/// Information that other programs need in addition to the weights; "" is not written. {} in a hook stands for the
/// number of the layer. Hooks of TransformerLens (hooks.hpp) are written in the form that the format uses.
struct Origin {
  std::string model, input_hook, output_hook;
};

/// Writes the directory, which appears complete by a rename. `source` applies to raw activations (fold.hpp). Throws
/// Error(usage) if it exists and is not empty, Error(io) and Error(numeric).
void write_directory(const RowSource& source, Format format, Storage storage, const Origin& origin,
                     const std::filesystem::path& directory);

// Functions of each format, which the functions above use.
Opened open_circuit_tracer(const std::filesystem::path& directory);
/// Layout of a set of single layers with Contents::per_layer, else of a cross-layer transcoder. Throws Error(usage) if
/// the format has no such model.
Layout circuit_tracer_layout(const Contents& contents);
std::string circuit_tracer_config(const Contents& contents, const Origin& origin);
Opened open_crosslayer_coding(const std::filesystem::path& directory, const std::string& statistics);
/// Offsets and scales of features that a file has, and the prefix of their names.
struct CodingAffine {
  bool offset = true, scale = true;
  std::string module = "decoder_module.";
};
Layout crosslayer_coding_layout(const Contents& contents, std::string file, const CodingAffine& = {});
std::string crosslayer_coding_config(const Contents& contents, const Origin& origin, Storage storage);
Opened open_clt_forge(const std::filesystem::path& directory);
Opened open_crosslayer_transcoder(const std::filesystem::path& directory);

/// Formats with one layer per directory.
enum class LayerFormat { saelens, sparsify };
/// Returns the layers in a directory, in the order of their numbers ("layer_10" after "layer_2"); {"."} if it is one
/// itself; empty if there is none.
std::vector<std::string> layer_directories(const std::filesystem::path& directory, LayerFormat format);
Opened open_per_layer(const std::filesystem::path& directory, LayerFormat format);
Layout per_layer_layout(const Contents& contents, LayerFormat format, const std::vector<std::string>& directories);
/// Throws Error(usage) if the format has no such model.
void require_expressible(const Contents& contents, LayerFormat format);
std::vector<std::string> layer_names(const Contents& contents, LayerFormat format, const Origin& origin);
std::string per_layer_config(const Contents& contents, LayerFormat format, const Origin& origin, std::int64_t layer,
                             Storage storage);

/// Checks sizes that are dimensions of tensors and returns them. Throws Error(data) that begins with `path` if a model
/// cannot have them.
Sizes checked(const std::filesystem::path& path, std::int64_t n_layers, std::int64_t d_model, std::int64_t n_features);

/// Returns the entry of this name and number of axes. Throws Error(data) if there is none.
const SafetensorsEntry& require_tensor(const SafetensorsFile& file, std::string_view name, std::size_t axes);

}  // namespace weft::interchange
