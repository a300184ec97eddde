// SPDX-License-Identifier: Apache-2.0
//
// Any text as config.json or model.safetensors.index.json beside intact weights. The first byte chooses.
#include "language_model/huggingface/model_directory.hpp"
#include "tests/fuzz/target.hpp"

using namespace weft;

namespace {

constexpr const char* kConfig =
    R"({"model_type": "llama", "vocab_size": 5, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
        "intermediate_size": 3, "max_position_embeddings": 4, "rms_norm_eps": 1e-5})";

/// Two directories with the weights of that model, in one file and with an index.
struct Directories {
  fuzz::Scratch scratch;
  Directories() {
    const language_model::HuggingfaceConfig config = language_model::read_config(kConfig, "config.json");
    const language_model::Architecture architecture{config.model, config.vocabulary, config.positions};
    std::vector<storage::SafetensorsWriter::Tensor> tensors;
    for (const language_model::Place& place : language_model::places(*config.family, architecture))
      tensors.push_back({place.tensor, kernels::Scalar::fp32, place.shape});
    for (const char* name : {"one/model.safetensors", "parts/a.safetensors"}) {
      const std::filesystem::path path = scratch / name;
      std::filesystem::create_directories(path.parent_path());
      storage::SafetensorsWriter writer(path, tensors);
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        std::size_t elements = 1;
        for (const std::int64_t extent : tensors[i].shape) elements *= static_cast<std::size_t>(extent);
        writer.write(i, 0, std::vector<float>(elements, 1.0f));
      }
      writer.finish();
    }
    std::ofstream(scratch / "parts/config.json") << kConfig;
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Directories directories;
  fuzz::Choices choices(data, size);
  struct Place {
    const char *directory, *file;
  };
  const Place place = choices.of<Place>({{"one", "config.json"}, {"parts", "model.safetensors.index.json"}});
  const std::filesystem::path directory = directories.scratch / place.directory;
  fuzz::write_file((directory / place.file).string(), choices.rest().data(), choices.rest().size());
  fuzz::accepts({ExitCode::usage, ExitCode::data}, [&] { language_model::HuggingfaceDirectory(directory).summary(); });
  return 0;
}
