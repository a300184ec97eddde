// SPDX-License-Identifier: Apache-2.0
//
// weft inspect PATH: lists the contents of a dataset, a checkpoint, a run, exported weights or a language model of
// Hugging Face, and checks them.
#include <algorithm>
#include <filesystem>
#include <thread>

#include "base/format.hpp"
#include "base/system.hpp"
#include "base/text.hpp"
#include "bench/transcoder/transcoder_input.hpp"
#include "checkpoint/resume.hpp"
#include "commands/commands.hpp"
#include "commands/family.hpp"
#include "dataset/activations/describe.hpp"
#include "dataset/activations/row_tokens.hpp"
#include "dataset/activations/statistics.hpp"
#include "dataset/tokens/token_set.hpp"
#include "storage/json_file.hpp"

namespace weft::commands {
namespace {

void inspect_checkpoint(const std::filesystem::path& path, const Request& request, const parallel::World& world) {
  const checkpoint::Found found = checkpoint::open(world.all(), path, checkpoint::Verify::full);
  const checkpoint::Manifest& manifest = found.manifest;
  std::string text =
      fmt::format("{}: checkpoint, format {}, step {}, {} tokens ({}), written by {} rank{} ({}), program {}\n",
                  found.path.string(), manifest.format_version, manifest.step, format::grouped(manifest.tokens),
                  printable(checkpoint::to_text(manifest.cursor, ", ")), manifest.world, manifest.world == 1 ? "" : "s",
                  printable(checkpoint::to_text(manifest.grid)), printable(manifest.code_revision));
  for (const Family* family : families()) text += family->describe(found.path, manifest);
  Json tensors = Json::array();
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
                  format::binary_bytes_text(total), manifest.shards.size(), manifest.shards.size() == 1 ? "" : "s"),
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
  bench::TranscoderInput input;
  const input::Schema schema = bench::dataset_keys(input);
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

int run_inspect(const Request& request, const parallel::World& world) {
  const std::filesystem::path path = request.subject;
  const std::string kind = world.on_root([&]() -> std::string {
    if (checkpoint::names_best(path)) return "checkpoint";
    if (!std::filesystem::exists(path))
      throw error(ExitCode::usage, "{}: no such file or directory; name a dataset, token files, a checkpoint or a run",
                  path.string());
    // A checkpoint whose manifest is lost is still recognised by its shards.
    if (std::filesystem::exists(path / checkpoint::kManifestName) ||
        std::filesystem::exists(path / checkpoint::shard_name(0)))
      return "checkpoint";
    if (checkpoint::is_run(path)) return "run";
    if (dataset::holds_tokens(request.subject)) return "tokens";
    for (const Family* family : families())
      if (const auto found = family->inspect_directory(path))
        return print_result(request, found->first, found->second), "of another program";
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
  } else if (kind == "dataset") {
    inspect_dataset(request.subject, request, world);
  }
  return 0;
}

}  // namespace

extern const Command inspect_command = with_options(
    {"inspect", "PATH", "list and check a dataset or a checkpoint",
     "Lists the contents of a dataset, token files, a checkpoint, a run, exported weights or a directory of Hugging "
     "Face, and checks them.",
     Needs::nothing},
    run_inspect, [](Options& options) {
      options.example("weft inspect runs/quickstart");
      options.set("of a dataset: replace a value of table [data], as in data.stored_as=bf16; repeatable");
    });

}  // namespace weft::commands
