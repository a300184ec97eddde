// SPDX-License-Identifier: Apache-2.0
//
// Damaged files of every format are refused by name.
#include <cstring>
#include <iterator>

#include "tests/interchange/known_model.hpp"

using namespace weft;
using namespace weft::interchange;
using namespace weft::interchange::testing;
using weft::testing::has;
using weft::testing::refusal;
using weft::testing::Scratch;
namespace fs = std::filesystem;

namespace {

/// Header and values of a safetensors file.
struct Container {
  SortedJson header;
  std::string values;

  explicit Container(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    header = parse_json<SortedJson>(bytes.substr(8, length));
    values = bytes.substr(8 + length);
  }
  void write(const fs::path& path) const {
    const std::string text = json_text(header);
    const std::uint64_t length = text.size();
    std::string head(8, '\0');
    std::memcpy(head.data(), &length, 8);
    std::ofstream(path, std::ios::binary) << head << text << values;
  }
};

/// Directories of all formats, with the model above.
void write_all_formats(const fs::path& directory) {
  write_directory(Model(true), Format::circuit_tracer, kExact, {}, directory / "circuit-tracer");
  write_directory(Model(single_layers(true, true)), Format::circuit_tracer, kExact, {},
                  directory / "circuit-tracer.set");
  write_directory(Model(true), Format::crosslayer_coding, kExact, {}, directory / "crosslayer-coding");
  write_directory(
      Model(Contents{.sizes = kSizes, .thresholds = true, .skip = true, .tying = Tying::per_target, .affine = true}),
      Format::crosslayer_coding, kExact, {}, directory / "crosslayer-coding.tied");
  write_directory(Model(single_layers(true, true)), Format::saelens, kExact, {}, directory / "saelens");
  write_directory(Model(single_layers(false, true, 2)), Format::sparsify, kExact, {}, directory / "sparsify");
  const auto one = [](auto) { return 1.0f; };
  fs::create_directories(directory / "clt-forge");
  write_text(directory / "clt-forge/clt_cfg.json", "{}");
  write_file(directory / "clt-forge/clt_weights.safetensors", {{"W_enc", {L, d, F}, one},
                                                               {"b_enc", {L, F}, one},
                                                               {"W_dec", {6, F, d}, one},
                                                               {"b_dec", {6, d}, one},
                                                               {"log_threshold", {L, F}, one},
                                                               {"estimated_norm_scaling_factor_in", {L}, one},
                                                               {"estimated_norm_scaling_factor_out", {L}, one}});
  fs::create_directories(directory / "crosslayer-transcoder");
  write_text(directory / "crosslayer-transcoder/config.yaml",
             "nonlinearity:\n  class_path: a.JumpReLU\ninput_standardizer:\n  class_path: a.DimensionwiseS\n"
             "output_standardizer:\n  class_path: a.LayerwiseS\n");
  write_file(directory / "crosslayer-transcoder/checkpoint.safetensors", {{"encoder.W", {L, d, F}, one},
                                                                          {"encoder.b", {L, F}, one},
                                                                          {"decoder.W_0", {1, F, d}, one},
                                                                          {"decoder.W_1", {2, F, d}, one},
                                                                          {"decoder.W_2", {3, F, d}, one},
                                                                          {"decoder.b", {L, d}, one},
                                                                          {"nonlinearity.theta", {1, L, F}, one},
                                                                          {"input_standardizer.mean", {L, d}, one},
                                                                          {"input_standardizer.std", {L, d}, one},
                                                                          {"output_standardizer.mean", {L}, one},
                                                                          {"output_standardizer.std", {L}, one}});
}

}  // namespace

TEST_CASE("every tensor of every format: of another type or shape, missing or cut off, it is named with its file") {
  const Scratch scratch;
  write_all_formats(scratch.path);
  int tensors = 0;
  for (const fs::directory_entry& format : fs::directory_iterator(scratch.path)) {
    const auto refused = [&](const std::string& path, const std::string& tensor) {
      const std::string message = refusal(ExitCode::data, [&] { open_directory(format.path()); });
      CHECK_MESSAGE(has(message, path), message);
      CHECK_MESSAGE(has(message, tensor), message);
    };
    CHECK(open_directory(format.path()).format == format.path().stem().string());
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(format.path())) {
      if (entry.path().extension() != ".safetensors") continue;
      const std::string path = entry.path().string();
      const Container good(path);
      for (const auto& [name, described] : good.header.items()) {
        if (name == "__metadata__") continue;
        ++tensors;
        Container bad = good;
        bad.header[name]["dtype"] = "I32";
        bad.write(path);
        refused(path, name);
        bad = good;
        std::vector<std::int64_t> shape = described["shape"];
        shape.push_back(1);
        bad.header[name]["shape"] = shape;
        bad.write(path);
        refused(path, name);
        bad = good;
        bad.header.erase(name);
        bad.header["another"] = described;
        bad.write(path);
        // Without thresholds or skip matrix in the first file the others have one too many, which has no counterpart.
        const bool optional = name == "threshold_0" || name == "nonlinearity.theta" ||
                              name == "activation_function.threshold" ||
                              (name == "W_skip" && format.path().stem() == "circuit-tracer");
        if (!optional) refused(path, name);
      }
      Container bad = good;
      bad.values.pop_back();
      bad.write(path);
      refused(path, "");
      good.write(path);
    }
  }
  CHECK(tensors == 3 * 5 + 3 * 6 + (3 * 2 + 6 * 2 + 1) + (3 * 7 + 1) + 3 * 6 + 3 * 5 + 7 + 11);
}
