// SPDX-License-Identifier: Apache-2.0
//
// Language models as a model family: their inputs, and what weft inspect says about their checkpoints and about
// directories of Hugging Face.
#include <algorithm>

#include "base/format.hpp"
#include "bench/language_model/language_input.hpp"
#include "bench/language_model/language_subject.hpp"
#include "commands/family.hpp"
#include "language_model/huggingface/model_directory.hpp"
#include "language_model/step/model_weights.hpp"

namespace weft::commands {
namespace {

std::string describe_language_model(const std::filesystem::path& path, const checkpoint::Manifest& manifest) {
  const auto is_embedding = [](const checkpoint::TensorEntry& tensor) { return tensor.name == "embedding/tokens"; };
  if (std::none_of(manifest.tensors.begin(), manifest.tensors.end(), is_embedding)) return "";
  bench::LanguageInput own;
  input::read(bench::language_keys(own), manifest.input, (path / checkpoint::kManifestName).string() + ", \"input\"",
              {}, input::Writer::checkpoint);
  const language_model::Configuration& configuration = own.configuration;
  const language_model::Architecture architecture = language_model::stored_architecture(configuration, manifest);
  const std::vector<model::ParameterSpec> specs = language_model::parameter_specs(architecture);
  // Merged weights have no moments.
  const bool trainable = std::any_of(manifest.tensors.begin(), manifest.tensors.end(),
                                     [](const auto& tensor) { return tensor.name.ends_with(".first_moment"); });
  const std::string difference = model::first_difference(
      manifest.tensors,
      model::tensors_of(specs, configuration.optimizer.state, trainable ? model::Moments::held : model::Moments::none));
  if (!difference.empty())
    throw collective_error(ExitCode::io,
                           "{}: {} (the language model of its input has it); was it written by another program?",
                           path.string(), difference);
  const std::string adapters =
      architecture.lora.rank == 0
          ? ""
          : fmt::format(", {} of them in adapters of rank {}", format::grouped(model::trained_elements_of(specs)),
                        architecture.lora.rank);
  return fmt::format("  language model of {}{}, all tensors present{}\n", language_model::sizes_text(architecture),
                     adapters, trainable ? "" : " (weights only, without moments)");
}

std::optional<std::pair<std::string, Json>> inspect_huggingface(const std::filesystem::path& path) {
  if (!language_model::is_huggingface_directory(path)) return {};
  const language_model::HuggingfaceDirectory directory(path);
  const language_model::HuggingfaceConfig& config = directory.config();
  return std::pair<std::string, Json>{directory.summary(),
                                      {{"kind", "huggingface"},
                                       {"path", path.string()},
                                       {"family", config.family->name},
                                       {"layers", config.model.layers},
                                       {"d_model", config.model.d_model},
                                       {"heads", config.model.heads},
                                       {"vocabulary", config.vocabulary},
                                       {"positions", config.positions}}};
}

}  // namespace

extern const Family language_model_family = {.table = "language_model",
                                             .model = "a language model",
                                             .title = "Language models",
                                             .keys = [] { return keys_of(bench::language_keys); },
                                             .benchmark = bench::language_benchmark,
                                             .describe = describe_language_model,
                                             .inspect_directory = inspect_huggingface};

}  // namespace weft::commands
