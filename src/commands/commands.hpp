// SPDX-License-Identifier: Apache-2.0
//
// What commands have in common: results, checks of paths and checkpoints, and the input as the request gives it.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/resume.hpp"
#include "commands/command.hpp"
#include "parallel/world.hpp"
#include "storage/json_file.hpp"
#include "storage/pending_output.hpp"

namespace weft::commands {

/// The result of a command, on rank 0: `text` on standard output, or with --json `document` alone.
void print_result(const Request& request, std::string_view text, const Json& document);
/// Prints the result of a command that writes files: `text` is left out with --quiet.
void print_written(const Request& request, std::string_view text, const Json& document);

/// Throws a collective Error(usage) unless `path` is a directory. `origin`: the key or option that names it.
void require_directory(const parallel::World& world, const std::string& path, std::string_view origin);

/// A directory that all ranks write, and that appears when it is complete (storage/pending_output.hpp).
class NewDirectory {
 public:
  /// Collective. Throws a collective Error(usage) if `path` exists and is not an empty directory, Error(io).
  NewDirectory(const parallel::World& world, const std::string& path);

  /// Where to write; equal on all ranks.
  const std::filesystem::path& place() const { return place_; }
  /// Collective. No rank has a file in it open.
  void publish();
  /// The name that a file in `place()` has after `publish`.
  std::string published(const std::filesystem::path& file) const;

 private:
  const parallel::World& world_;
  const std::filesystem::path path_;
  std::optional<storage::PendingOutput> output_;  // rank 0
  std::filesystem::path place_;
};

/// The checkpoint at `path`: a step directory, or the newest one of a run. Verified. Collective.
checkpoint::Found open_checkpoint(const std::string& path, const parallel::World& world);

/// Throws a collective Error(usage) with the advice if the checkpoint has no tensor of this name: it belongs to another
/// kind of model.
void require_kind(const checkpoint::Found& found, std::string_view tensor, std::string_view advice);

/// --set and the options that replace keys of the input, in this order.
std::vector<input::Override> overrides(const Request& request);

/// Reads the request's input, with the overrides, into the members that `schema` refers to. Paths are expanded with
/// rank 0's environment. Collective; throws a collective Error(usage).
void read_input(const Request& request, const input::Schema& schema, const parallel::World& world);

/// Reads the input of a checkpoint, with the request's --set, into the members that
/// `schema` refers to. Throws a collective Error(usage) if --set changes keys that define the run, to which its weights
/// belong; but not for the key `allowed`.
void read_input_of(const checkpoint::Found& found, const Request& request, const input::Schema& schema,
                   const parallel::World& world, std::string_view allowed = "");

/// Name -> version of every library that computes, communicates or writes, for --version and run.json.
std::map<std::string, std::string> library_versions();

}  // namespace weft::commands
