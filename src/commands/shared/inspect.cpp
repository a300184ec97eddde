// SPDX-License-Identifier: Apache-2.0
//
// weft inspect PATH: lists the contents of a dataset, a checkpoint, a run, exported weights or a language model of
// Hugging Face, and checks them.
#include <algorithm>
#include <filesystem>
#include <thread>

#include "base/system.hpp"
#include "base/text.hpp"
#include "checkpoint/resume.hpp"
#include "commands/commands.hpp"
#include "commands/shared/interchange_document.hpp"
#include "dataset/activations/row_tokens.hpp"
#include "dataset/activations/statistics.hpp"
#include "dataset/tokens/token_set.hpp"
#include "interchange/formats.hpp"
#include "language_model/exchange/directory.hpp"
#include "language_model/model.hpp"
#include "report/format.hpp"
#include "report/json.hpp"
#include "transcoder/parameters/model.hpp"

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

/// Compares the tensors of a language model with the sizes in its input, like `check_parameters`.
std::string check_language_model(const std::filesystem::path& path, const checkpoint::Manifest& manifest) {
  const auto is_embedding = [](const checkpoint::TensorEntry& tensor) { return tensor.name == "embedding/tokens"; };
  if (std::none_of(manifest.tensors.begin(), manifest.tensors.end(), is_embedding)) return "";
  Input own;
  input::read(schema(own, Command::lm_evaluate), manifest.input,
              (path / checkpoint::kManifestName).string() + ", \"input\"", {}, input::Writer::checkpoint);
  const language_model::Configuration& configuration = own.language;
  const language_model::Architecture architecture = language_model::stored_architecture(configuration, manifest);
  const std::vector<training::ParameterSpec> specs = language_model::parameter_specs(architecture);
  // Merged weights have no moments.
  const bool trainable = std::any_of(manifest.tensors.begin(), manifest.tensors.end(),
                                     [](const auto& tensor) { return tensor.name.ends_with(".first_moment"); });
  const std::string difference = training::first_difference(
      manifest.tensors, training::tensors_of(specs, configuration.optimizer.state,
                                             trainable ? training::Moments::held : training::Moments::none));
  if (!difference.empty())
    throw collective_error(ExitCode::io,
                           "{}: {} (the language model of its input has it); was it written by another program?",
                           path.string(), difference);
  const language_model::ModelSettings& model = architecture.model;
  const std::string adapters =
      architecture.lora.rank == 0
          ? ""
          : fmt::format(", {} of them in adapters of rank {}", report::grouped(training::trained_elements_of(specs)),
                        architecture.lora.rank);
  return fmt::format(
      "  language model of {} layer{}, d_model {}, {} heads, vocabulary {}: {} parameters{}, all tensors present{}\n",
      model.layers, model.layers == 1 ? "" : "s", model.d_model, model.heads, architecture.vocabulary,
      report::grouped(training::elements_of(specs)), adapters, trainable ? "" : " (weights only, without moments)");
}

void inspect_checkpoint(const std::filesystem::path& path, const Request& request, const parallel::World& world) {
  const checkpoint::Found found = checkpoint::open(world.all(), path, checkpoint::Verify::full);
  const checkpoint::Manifest& manifest = found.manifest;
  std::string text =
      fmt::format("{}: checkpoint, format {}, step {}, {} tokens ({}), written by {} rank{} ({}), program {}\n",
                  path.string(), manifest.format_version, manifest.step, report::grouped(manifest.tokens),
                  printable(checkpoint::to_text(manifest.cursor, ", ")), manifest.world, manifest.world == 1 ? "" : "s",
                  printable(checkpoint::to_text(manifest.grid)), printable(manifest.code_revision));
  text += check_parameters(path, manifest) + check_language_model(path, manifest);
  report::Json tensors = report::Json::array();
  std::int64_t total = 0;
  for (const checkpoint::TensorEntry& tensor : manifest.tensors) {
    std::string shape;
    for (const std::int64_t extent : tensor.shape) shape += (shape.empty() ? "" : " x ") + std::to_string(extent);
    total += checkpoint::bytes_of(tensor);
    tensors.push_back({{"name", tensor.name}, {"type", checkpoint::name_of(tensor.type)}, {"shape", tensor.shape}});
    text += fmt::format("  {:<40}{:>6}  {}\n", printable(tensor.name), checkpoint::name_of(tensor.type), shape);
  }
  print_result(
      request,
      fmt::format("{}{} tensors, {}; {} shard{}, all digests match", text, manifest.tensors.size(),
                  report::binary_bytes_text(total), manifest.shards.size(), manifest.shards.size() == 1 ? "" : "s"),
      {{"kind", "checkpoint"},
       {"path", path.string()},
       {"format", manifest.format_version},
       {"step", manifest.step},
       {"tokens", manifest.tokens},
       {"cursor", manifest.cursor},
       {"grid", manifest.grid},
       {"ranks", manifest.world},
       {"program", manifest.code_revision},
       {"bytes", total},
       {"shards", manifest.shards.size()},
       {"tensors", tensors}});
}

void inspect_dataset(const std::string& path, const Request& request, const parallel::World& world) {
  Input input;
  const input::Schema schema = commands::schema(input, request.command);
  Request settings = request;  // there is no input file: only --set counts
  settings.input_text.clear();
  read_input(settings, schema, world);
  const dataset::Description description = dataset::describe(world, path, input.configuration.data);
  const dataset::Statistics statistics = dataset::check(world, description, usable_cpus());
  const std::vector<std::string> constant = dataset::constant_dimensions(statistics, description);
  std::string text = fmt::format("{}\nevery row read: all values finite{}", dataset::summary(description),
                                 description.has_statistics ? ", norm_stats.json agrees with the data" : "");
  for (const std::string& sentence : constant) text += fmt::format("\n  {:<13} {}", "constant", sentence);
  if (description.has_tokens)
    text += fmt::format("\n  {:<13} {}", "tokens", world.on_root([&] { return dataset::check_tokens(description); }));
  print_result(request, text,
               {{"kind", "dataset"},
                {"path", description.path},
                {"rows", description.n_rows},
                {"layers", description.n_layers},
                {"d_model", description.d_model},
                {"type", dataset::name_of(description.dtype)},
                {"files", description.files.size()},
                {"model", description.model},
                {"hook_inputs", description.hook_inputs},
                {"hook_targets", description.hook_targets},
                {"tokens", description.has_tokens},
                {"fingerprint", description.fingerprint},
                {"constant", constant},
                {"notes", description.notes}});
}

void inspect_tokens(const std::string& path, const Request& request, const parallel::World& world) {
  const dataset::TokenSet set = dataset::open_tokens(world, path);
  world.on_root([&] { set.check(); });
  print_result(request, set.summary() + "\nevery token read: all ids are in the vocabulary",
               {{"kind", "tokens"},
                {"path", path},
                {"tokens", set.size()},
                {"vocabulary", set.vocabulary()},
                {"text_bytes", set.text_bytes()},
                {"files", set.n_files()},
                {"fingerprint", set.fingerprint()}});
}

}  // namespace

int inspect(const Request& request, const parallel::World& world) {
  const std::filesystem::path path = request.subject;
  const std::string kind = world.on_root([&]() -> std::string {
    if (!std::filesystem::exists(path))
      throw error(ExitCode::usage, "{}: no such file or directory; name a dataset, token files, a checkpoint or a run",
                  path.string());
    // A checkpoint whose manifest is lost is still recognised by its shards.
    if (std::filesystem::exists(path / checkpoint::kManifestName) ||
        std::filesystem::exists(path / checkpoint::shard_name(0)))
      return "checkpoint";
    if (checkpoint::is_run(path)) return "run";
    if (dataset::holds_tokens(request.subject)) return "tokens";
    if (interchange::is_directory_of_weights(path)) return "weights";
    if (language_model::is_huggingface_directory(path)) return "huggingface";
    return "dataset";
  });
  if (kind == "checkpoint") {
    inspect_checkpoint(path, request, world);
  } else if (kind == "run") {
    const auto found = checkpoint::find(world.all(), path / "checkpoints", "auto", checkpoint::Verify::full,
                                        checkpoint::Leftovers::keep);
    if (!found)
      throw collective_error(ExitCode::io,
                             "{}: no checkpoint (the run has not written one yet); name a checkpoint or another run",
                             path.string());
    inspect_checkpoint(found->path, request, world);
  } else if (kind == "tokens") {
    inspect_tokens(request.subject, request, world);
  } else if (kind == "huggingface") {
    world.on_root([&] {
      const language_model::HuggingfaceDirectory directory(path);
      const language_model::HuggingfaceConfig& config = directory.config();
      print_result(request, directory.summary(),
                   {{"kind", "huggingface"},
                    {"path", path.string()},
                    {"family", language_model::name(config.family)},
                    {"layers", config.model.layers},
                    {"d_model", config.model.d_model},
                    {"heads", config.model.heads},
                    {"vocabulary", config.vocabulary},
                    {"positions", config.positions}});
    });
  } else if (kind == "weights") {
    world.on_root([&] {
      const interchange::Opened opened = interchange::open_directory(path);
      report::Json document = document_of(opened);
      document["kind"] = "weights";
      document["path"] = path.string();
      print_result(request, interchange::summary(opened, path), document);
    });
  } else {
    inspect_dataset(request.subject, request, world);
  }
  return 0;
}

}  // namespace weft::commands
