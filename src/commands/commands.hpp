// SPDX-License-Identifier: Apache-2.0
//
// The subcommands, one file each. A command is called by every rank with the same request; it returns the exit code of
// this rank or throws an Error, and never exits.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "checkpoint/resume.hpp"
#include "commands/request.hpp"
#include "parallel/world.hpp"
#include "report/json.hpp"

namespace weft::commands {

int train(const Request& request, const parallel::World& world);
int synth(const Request& request, const parallel::World& world);
int evaluate(const Request& request, const parallel::World& world);
int features(const Request& request, const parallel::World& world);
int encode(const Request& request, const parallel::World& world);
int convert(const Request& request, const parallel::World& world);
int inspect(const Request& request, const parallel::World& world);
int benchmark(const Request& request, const parallel::World& world);
int export_weights(const Request& request, const parallel::World& world);
int import_weights(const Request& request, const parallel::World& world);
int language_model_train(const Request& request, const parallel::World& world);
int language_model_evaluate(const Request& request, const parallel::World& world);
int language_model_harvest(const Request& request, const parallel::World& world);
int language_model_export(const Request& request, const parallel::World& world);
int language_model_merge(const Request& request, const parallel::World& world);
int language_model_generate(const Request& request, const parallel::World& world);
int language_model_diversity(const Request& request, const parallel::World& world);
int language_model_tokenize(const Request& request, const parallel::World& world);
int privacy_calculator(const Request& request, const parallel::World& world);

/// Calls the command of the request; returns 0 if the request was only for a text, which has been printed.
int run(const Request& request, const parallel::World& world);

/// The result of a command, on rank 0: `text` on standard output, or with --json `document` alone.
void print_result(const Request& request, std::string_view text, const Json& document);
/// Prints the result of a command that writes files: `text` is left out with --quiet.
void print_written(const Request& request, std::string_view text, const Json& document);

/// Prints with --json, on rank 0, how a run in this directory ended, and its `result` of run.json.
void print_run(const Request& request, const std::filesystem::path& directory, int code, const parallel::World& world);

/// Throws a collective Error(usage) unless `path` is a directory. `origin`: the key or option that names it.
void require_directory(const parallel::World& world, const std::string& path, std::string_view origin);

/// Throws a collective Error(usage) if `path` exists and is not an empty directory.
void require_new_directory(const parallel::World& world, const std::string& path);

/// The checkpoint at `path`: a step directory, or the newest one of a run. Verified. Collective.
checkpoint::Found open_checkpoint(const std::string& path, const parallel::World& world);

/// Throws a collective Error(usage) with the advice if the checkpoint has no tensor of this name: it belongs to another
/// kind of model.
void require_kind(const checkpoint::Found& found, std::string_view tensor, std::string_view advice);

/// Reads the input of a checkpoint, with the request's --set, into the members that
/// `schema` refers to. Throws a collective Error(usage) if --set changes keys that define the run, to which its weights
/// belong; but not for the key `allowed`.
void read_input_of(const checkpoint::Found& found, const Request& request, const input::Schema& schema,
                   const parallel::World& world, std::string_view allowed = "");

/// Name -> version of every library that computes, communicates or writes, for --version and run.json.
std::map<std::string, std::string> library_versions();

}  // namespace weft::commands
