// SPDX-License-Identifier: Apache-2.0
//
// weft inspect PATH: lists the contents of a dataset, a checkpoint, a run or exported weights, and checks them.
#include <algorithm>
#include <filesystem>
#include <thread>

#include "base/log.hpp"
#include "base/text.hpp"
#include "checkpoint/resume.hpp"
#include "commands/commands.hpp"
#include "dataset/activations/row_tokens.hpp"
#include "dataset/activations/statistics.hpp"
#include "dataset/tokens/token_set.hpp"
#include "interchange/formats.hpp"
#include "language_model/model.hpp"
#include "report/format.hpp"
#include "report/log.hpp"
#include "transcoder/model.hpp"

namespace weft::commands {
namespace {

/// Checks that a checkpoint of a transcoder has every tensor that a transcoder of its sizes has. Returns a line of
/// text, "" for other checkpoints.
std::string check_parameters(const std::filesystem::path& path, const checkpoint::Manifest& manifest) {
  const std::optional<transcoder::StoredModel> stored = transcoder::stored_model(manifest.tensors);
  if (!stored) return "";
  const transcoder::Shape& shape = stored->shape;
  // Imported weights have no moments.
  const bool trainable = std::any_of(manifest.tensors.begin(), manifest.tensors.end(),
                                     [](const auto& tensor) { return tensor.name == "encoder_0/weight.first_moment"; });
  const std::string difference = training::first_difference(
      manifest.tensors, training::tensors_of(transcoder::parameter_specs(shape), stored->policy,
                                             trainable ? training::Moments::held : training::Moments::none));
  if (!difference.empty())
    throw collective_error(ExitCode::io, "{}: {} (a transcoder of {} has it); was it written by another program?",
                           path.string(), difference, to_text(shape));
  return fmt::format("  transcoder of {}: {} parameters, all tensors present{}\n", to_text(shape),
                     report::grouped(shape.parameters()), trainable ? "" : " (weights only, without moments)");
}

/// The same for a language model, whose sizes are in its input.
std::string check_language_model(const std::filesystem::path& path, const checkpoint::Manifest& manifest) {
  const auto is_embedding = [](const checkpoint::TensorEntry& tensor) { return tensor.name == "embedding/tokens"; };
  if (std::none_of(manifest.tensors.begin(), manifest.tensors.end(), is_embedding)) return "";
  Input own;
  input::read(schema(own, Command::lm_evaluate), manifest.input,
              (path / checkpoint::kManifestName).string() + ", \"input\"");
  const language_model::Configuration& configuration = own.language;
  const language_model::Architecture architecture =
      language_model::stored_architecture(configuration.language_model, configuration.data.sequence, manifest.tensors);
  const std::vector<training::ParameterSpec> specs = language_model::parameter_specs(architecture);
  const std::string difference = training::first_difference(
      manifest.tensors, training::tensors_of(specs, configuration.optimizer.state, training::Moments::held));
  if (!difference.empty())
    throw collective_error(ExitCode::io,
                           "{}: {} (the language model of its input has it); was it written by another program?",
                           path.string(), difference);
  const language_model::ModelSettings& model = architecture.model;
  return fmt::format(
      "  language model of {} layer{}, d_model {}, {} heads, vocabulary {}: {} parameters, all tensors present\n",
      model.layers, model.layers == 1 ? "" : "s", model.d_model, model.heads, architecture.vocabulary,
      report::grouped(training::elements_of(specs)));
}

void inspect_checkpoint(const std::filesystem::path& path, const parallel::World& world) {
  const checkpoint::Found found = checkpoint::open(world.all(), path, checkpoint::Verify::full);
  const checkpoint::Manifest& manifest = found.manifest;
  std::string text =
      fmt::format("{}: checkpoint, format {}, step {}, {} tokens ({}), written by {} rank{} ({}), program {}\n",
                  path.string(), manifest.format_version, manifest.step, report::grouped(manifest.tokens),
                  printable(checkpoint::to_text(manifest.cursor, ", ")), manifest.world, manifest.world == 1 ? "" : "s",
                  printable(checkpoint::to_text(manifest.grid)), printable(manifest.code_revision));
  text += check_parameters(path, manifest) + check_language_model(path, manifest);
  std::int64_t total = 0;
  for (const checkpoint::TensorEntry& tensor : manifest.tensors) {
    std::string shape;
    for (const std::int64_t extent : tensor.shape) shape += (shape.empty() ? "" : " x ") + std::to_string(extent);
    total += checkpoint::bytes_of(tensor);
    text += fmt::format("  {:<40}{:>6}  {}\n", printable(tensor.name), checkpoint::name_of(tensor.type), shape);
  }
  log::info("{}{} tensors, {}; {} shard{}, all digests match", text, manifest.tensors.size(),
            report::binary_bytes_text(total), manifest.shards.size(), manifest.shards.size() == 1 ? "" : "s");
}

void inspect_dataset(const std::string& path, const Request& request, const parallel::World& world) {
  Input input;
  const input::Schema schema = commands::schema(input, request.command);
  Request settings = request;  // there is no input file: only --set counts
  settings.input_text.clear();
  read_input(settings, schema, world);
  const dataset::Description description = dataset::describe(world, path, input.configuration.data);
  log::info("{}", dataset::summary(description));
  const dataset::Statistics statistics =
      dataset::check(world, description, static_cast<int>(std::max(1u, std::thread::hardware_concurrency())));
  std::string text = fmt::format("every row read: all values finite{}",
                                 description.has_statistics ? ", norm_stats.json agrees with the data" : "");
  for (const std::string& sentence : dataset::constant_dimensions(statistics, description))
    text += fmt::format("\n  {:<13} {}", "constant", sentence);
  if (description.has_tokens)
    text += fmt::format("\n  {:<13} {}", "tokens", world.on_root([&] { return dataset::check_tokens(description); }));
  log::info("{}", text);
}

void inspect_tokens(const std::string& path, const parallel::World& world) {
  const dataset::TokenSet set = dataset::open_tokens(world, path);
  log::info("{}", set.summary());
  world.on_root([&] { set.check(); });
  log::info("every token read: all ids are in the vocabulary");
}

}  // namespace

int inspect(const Request& request, const parallel::World& world) {
  const std::filesystem::path path = request.subject;
  const std::string kind = world.on_root([&]() -> std::string {
    if (!std::filesystem::exists(path))
      throw error(ExitCode::usage, "{}: no such file or directory; name a dataset, token files, a checkpoint or a run",
                  path.string());
    if (std::filesystem::exists(path / checkpoint::kManifestName)) return "checkpoint";
    if (checkpoint::is_run(path)) return "run";
    if (dataset::holds_tokens(request.subject)) return "tokens";
    if (interchange::is_directory_of_weights(path)) return "weights";
    return "dataset";
  });
  if (kind == "checkpoint") {
    inspect_checkpoint(path, world);
  } else if (kind == "run") {
    const auto found = checkpoint::find(world.all(), path / "checkpoints", "auto", checkpoint::Verify::full,
                                        checkpoint::Leftovers::keep);
    if (!found)
      throw collective_error(ExitCode::io,
                             "{}: no checkpoint (the run has not written one yet); name a checkpoint or another run",
                             path.string());
    inspect_checkpoint(found->path, world);
  } else if (kind == "tokens") {
    inspect_tokens(request.subject, world);
  } else if (kind == "weights") {
    world.on_root([&] { log::info("{}", interchange::summary(interchange::open_directory(path), path)); });
  } else {
    inspect_dataset(request.subject, request, world);
  }
  return 0;
}

}  // namespace weft::commands
