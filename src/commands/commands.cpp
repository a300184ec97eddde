// SPDX-License-Identifier: Apache-2.0
#include "commands/commands.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "base/log.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "parallel/nccl.hpp"
#include "report/json.hpp"
#include "report/log.hpp"
#include "report/run_record.hpp"
#include "storage/hdf5.hpp"

namespace weft::commands {

namespace {

int call(const Request& request, const parallel::World& world) {
  switch (request.command) {
    case Command::nothing:
      return 0;
    case Command::train:
      return train(request, world);
    case Command::synth:
      return synth(request, world);
    case Command::evaluate:
      return evaluate(request, world);
    case Command::features:
      return features(request, world);
    case Command::encode:
      return encode(request, world);
    case Command::convert:
      return convert(request, world);
    case Command::inspect:
      return inspect(request, world);
    case Command::benchmark:
    case Command::language_benchmark:
      return benchmark(request, world);
    case Command::export_weights:
      return export_weights(request, world);
    case Command::import_weights:
      return import_weights(request, world);
    case Command::lm_train:
    case Command::lm_polychromic:
      return language_model_train(request, world);
    case Command::lm_evaluate:
      return language_model_evaluate(request, world);
    case Command::lm_harvest:
      return language_model_harvest(request, world);
    case Command::lm_export:
      return language_model_export(request, world);
    case Command::lm_merge:
      return language_model_merge(request, world);
    case Command::lm_generate:
      return language_model_generate(request, world);
    case Command::lm_diversity:
      return language_model_diversity(request, world);
    case Command::lm_tokenize:
      return language_model_tokenize(request, world);
    case Command::privacy:
      return privacy_calculator(request, world);
  }
  throw error(ExitCode::internal, "a command without a function");
}

void print_document(const Json& document) {
  report::json_document(report::to_text(report::with_finite_numbers(document), 2));
}

/// True if what the command prints is its result, and not an account of the files that it writes.
bool prints_its_result(const Request& request) {
  return request.dry_run || request.json ||
         (request.command != Command::train && request.command != Command::synth &&
          request.command != Command::lm_train && request.command != Command::lm_polychromic);
}

}  // namespace

int run(const Request& request, const parallel::World& world) {
  const int code = call(request, world);
  if (prints_its_result(request)) world.on_root([] { require_printed(); });
  return code;
}

void print_result(const Request& request, std::string_view text, const Json& document) {
  if (!request.json) return report::result(text);
  print_document(document);
}

void print_written(const Request& request, std::string_view text, const Json& document) {
  log::info("{}", text);
  if (request.json) print_document(document);
}

void print_run(const Request& request, const std::filesystem::path& directory, int code, const parallel::World& world) {
  if (!request.json || !world.is_root()) return;
  // A run that was complete already has a run record.
  const bool recorded = report::run_record().contains("result");
  const Json record = recorded ? report::run_record() : report::stored_record(directory / "run.json");
  Json document = {{"run", directory.string()}, {"exit", {{"code", code}, {"reason", report::exit_reason(code)}}}};
  if (record.is_object() && record.contains("result")) document["result"] = record["result"];
  print_document(document);
}

void require_directory(const parallel::World& world, const std::string& path, std::string_view origin) {
  namespace fs = std::filesystem;
  world.on_root([&] {
    std::error_code failed;
    const fs::file_status status = fs::status(path, failed);
    if (!fs::exists(status))
      throw error(ExitCode::usage, "{} = \"{}\": no such directory (relative paths begin at {}); correct the path",
                  origin, path, fs::current_path(failed).string());
    if (!fs::is_directory(status))
      throw error(ExitCode::usage, "{} = \"{}\" is a file (a directory is needed); correct the path", origin, path);
  });
}

checkpoint::Found open_checkpoint(const std::string& path, const parallel::World& world) {
  const std::filesystem::path run = std::filesystem::path(path) / "checkpoints";
  if (world.on_root([&] { return std::string(checkpoint::is_run(path) ? "run" : ""); }).empty())
    return checkpoint::open(world.all(), path, checkpoint::Verify::full);
  auto found = checkpoint::find(world.all(), run, "auto", checkpoint::Verify::full, checkpoint::Leftovers::keep);
  if (!found)
    throw collective_error(ExitCode::io, "{}: no checkpoint yet (the run has not written one); give another run", path);
  return *std::move(found);
}

void require_kind(const checkpoint::Found& found, std::string_view tensor, std::string_view advice) {
  for (const checkpoint::TensorEntry& entry : found.manifest.tensors)
    if (entry.name == tensor) return;
  throw collective_error(ExitCode::usage, "{}: belongs to another kind of model (it has no tensor \"{}\"); {}",
                         found.path.string(), tensor, advice);
}

void require_new_directory(const parallel::World& world, const std::string& path) {
  namespace fs = std::filesystem;
  const bool taken =
      !world
           .on_root([&] {
             return std::string(fs::exists(path) && !(fs::is_directory(path) && fs::is_empty(path)) ? "taken" : "");
           })
           .empty();
  if (taken)
    throw collective_error(ExitCode::usage,
                           "{}: exists (nothing is overwritten); name a new directory, or remove this one", path);
}

void read_input_of(const checkpoint::Found& found, const Request& request, const input::Schema& schema,
                   const parallel::World& world, std::string_view allowed) {
  Request trained = request;
  trained.input_text = found.manifest.input;
  trained.input_of_checkpoint = true;
  trained.subject = (found.path / checkpoint::kManifestName).string();
  read_input(trained, schema, world);
  std::string refused;
  for (const input::Change& change : input::changed_keys(schema, found.manifest.input, checkpoint::kManifestName))
    if (change.resume == input::Resume::fixed && change.path != allowed)
      refused += fmt::format("\n  {} is {}, not {}", change.path, change.before, change.after);
  if (!refused.empty())
    throw collective_error(ExitCode::usage,
                           "{}: trained with other values (they define the run); remove these --set:{}",
                           found.path.string(), refused);
}

std::map<std::string, std::string> library_versions() {
  std::map<std::string, std::string> versions = {
      {"MPI", parallel::mpi_version()}, {"HDF5", storage::hdf5_version()}, {"kernels", kernels::library_versions()}};
  if (const std::string nccl = parallel::nccl::version(); !nccl.empty()) versions["NCCL"] = nccl;
  return versions;
}

}  // namespace weft::commands
