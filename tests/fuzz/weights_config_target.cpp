// SPDX-License-Identifier: Apache-2.0
//
// Any text as the configuration beside intact weights: cfg.json or norm_stats.json of crosslayer-coding, clt_cfg.json,
// config.yaml of circuit-tracer or crosslayer-transcoder, cfg.json of a layer of saelens or sparsify. The first byte
// chooses.
#include <vector>

#include "interchange/formats.hpp"
#include "tests/fuzz/target.hpp"

using namespace weft;
using storage::SafetensorsWriter;

namespace {

constexpr std::int64_t L = 2, F = 3, d = 2;

void write_ones(const std::filesystem::path& path, const std::vector<SafetensorsWriter::Tensor>& tensors) {
  SafetensorsWriter writer(path, tensors);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::size_t elements = 1;
    for (const std::int64_t extent : tensors[i].shape) elements *= static_cast<std::size_t>(extent);
    writer.write(i, 0, std::vector<float>(elements, 1.0f));
  }
  writer.finish();
}

/// Directories of each format with weights, to which a configuration is added.
struct Directories {
  fuzz::Scratch scratch;
  Directories() {
    namespace fs = std::filesystem;
    const auto of_layout = [&](const char* name, const interchange::Layout& layout) {
      for (const interchange::LayoutFile& file : layout.files) {
        fs::create_directories((fs::path(scratch / name) / file.name).parent_path());
        std::vector<SafetensorsWriter::Tensor> tensors;
        for (const interchange::LayoutTensor& tensor : file.tensors) tensors.push_back({tensor.name, {}, tensor.shape});
        write_ones(fs::path(scratch / name) / file.name, tensors);
      }
    };
    const interchange::Contents contents{.sizes = {L, d, F}, .thresholds = true};
    of_layout("coding", interchange::crosslayer_coding_layout(contents, "model.safetensors"));
    // Everything that a configuration of tied decoders can name.
    of_layout("tied", interchange::crosslayer_coding_layout({.sizes = {L, d, F},
                                                             .thresholds = true,
                                                             .skip = true,
                                                             .tying = interchange::Tying::per_target,
                                                             .affine = true},
                                                            "model.safetensors"));
    of_layout("statistics", interchange::crosslayer_coding_layout(contents, "model.safetensors"));
    std::ofstream(scratch / "statistics/cfg.json")
        << R"({"num_features": 3, "num_layers": 2, "d_model": 2, "normalization_method": "mean_std"})";
    of_layout("tracer", interchange::circuit_tracer_layout(contents));
    const interchange::Contents layers{.sizes = {L, d, F}, .thresholds = true, .per_layer = true};
    of_layout("saelens",
              interchange::per_layer_layout(layers, interchange::LayerFormat::saelens, {"layer_0", "layer_1"}));
    std::ofstream(scratch / "saelens/layer_0/cfg.json")
        << R"({"architecture": "jumprelu_transcoder", "d_in": 2, "d_sae": 3, "d_out": 2})";
    const interchange::Contents top{.sizes = {1, d, F}, .per_layer = true, .k = 2};
    of_layout("sparsify", interchange::per_layer_layout(top, interchange::LayerFormat::sparsify, {"."}));
    fs::create_directories(scratch / "forge");
    write_ones(scratch / "forge/clt_weights.safetensors", {{"W_enc", {}, {L, d, F}},
                                                           {"b_enc", {}, {L, F}},
                                                           {"W_dec", {}, {3, F, d}},
                                                           {"b_dec", {}, {3, d}},
                                                           {"log_threshold", {}, {L, F}},
                                                           {"estimated_norm_scaling_factor_in", {}, {L}},
                                                           {"estimated_norm_scaling_factor_out", {}, {L}}});
    fs::create_directories(scratch / "goreg");
    write_ones(scratch / "goreg/checkpoint.safetensors", {{"encoder.W", {}, {L, d, F}},
                                                          {"encoder.b", {}, {L, F}},
                                                          {"decoder.W_0", {}, {1, F, d}},
                                                          {"decoder.W_1", {}, {2, F, d}},
                                                          {"decoder.b", {}, {L, d}},
                                                          {"nonlinearity.theta", {}, {1, L, F}},
                                                          {"input_standardizer.mean", {}, {L, d}},
                                                          {"input_standardizer.std", {}, {L}}});
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Directories directories;
  fuzz::Choices choices(data, size);
  struct Place {
    const char *directory, *file;
  };
  const Place place = choices.of<Place>({{"coding", "cfg.json"},
                                         {"statistics", "norm_stats.json"},
                                         {"tracer", "config.yaml"},
                                         {"forge", "clt_cfg.json"},
                                         {"goreg", "config.yaml"},
                                         {"saelens", "layer_1/cfg.json"},
                                         {"sparsify", "cfg.json"},
                                         {"tied", "cfg.json"}});
  const std::filesystem::path directory = directories.scratch / place.directory;
  fuzz::write_file((directory / place.file).string(), choices.rest().data(), choices.rest().size());
  fuzz::accepts({ExitCode::usage, ExitCode::data}, [&] {
    const interchange::Opened opened = interchange::open_directory(directory);
    interchange::summary(opened, directory);
    for (const auto& [part, layer] : interchange::parts_of(opened.rows->contents())) {
      const interchange::Extent extent = interchange::extent_of(opened.rows->contents(), part, layer);
      std::vector<float> values(static_cast<std::size_t>(extent.rows * extent.columns));
      opened.rows->read(part, layer, {0, extent.rows}, values.data());
    }
  });
  return 0;
}
