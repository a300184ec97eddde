// SPDX-License-Identifier: Apache-2.0
#include "commands/commands.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "base/log.hpp"
#include "input/print.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "parallel/nccl.hpp"
#include "parallel/watchdog.hpp"
#include "run/log_session.hpp"
#include "run/run_record.hpp"
#include "storage/hdf5.hpp"
#include "storage/json_file.hpp"

namespace weft::commands {

namespace {

void print_document(const Json& document) { run::json_document(finite_json_text(with_finite_numbers(document), 2)); }

}  // namespace

void print_result(const Request& request, std::string_view text, const Json& document) {
  if (!request.json) return run::result(text);
  print_document(document);
}

void print_written(const Request& request, std::string_view text, const Json& document) {
  log::info("{}", text);
  if (request.json) print_document(document);
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

NewDirectory::NewDirectory(const parallel::World& world, const std::string& path) : world_(world), path_(path) {
  place_ = world.on_root([&] {
    output_.emplace(path);
    return output_->place().string();
  });
}

void NewDirectory::publish() {
  world_.on_root([&] { output_->publish(); });
}

std::string NewDirectory::published(const std::filesystem::path& file) const {
  return (path_ / file.lexically_relative(place_)).string();
}

std::vector<input::Override> overrides(const Request& request) {
  std::vector<input::Override> all;
  for (const std::string& set : request.sets) all.push_back({set, ""});
  all.insert(all.end(), request.overrides.begin(), request.overrides.end());
  return all;
}

void read_input(const Request& request, const input::Schema& schema, const parallel::World& world) {
  parallel::note_phase("reading the input");
  // The other ranks read the input as rank 0 resolved it: their environment, and so their paths, could differ.
  const std::string resolved = world.on_root([&] {
    input::read(schema, request.input_text, request.subject, overrides(request),
                request.input_of_checkpoint ? input::Writer::checkpoint : input::Writer::user);
    return input::print(schema);
  });
  if (!world.is_root()) input::read(schema, resolved, request.subject);
  parallel::set_timeout(std::get<double>(schema.find("parallel.timeout")->load()));
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
