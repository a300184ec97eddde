// SPDX-License-Identifier: Apache-2.0
//
// The command line, and the input that belongs to it. The same on every rank: rank 0 reads files and environment and
// broadcasts them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "bench/language_model/language_settings.hpp"
#include "bench/transcoder/transcoder_settings.hpp"
#include "commands/arguments.hpp"
#include "dataset/activations/synthetic.hpp"
#include "input/read.hpp"
#include "input/schema.hpp"
#include "language_model/settings.hpp"
#include "parallel/world.hpp"
#include "transcoder/settings/settings.hpp"

namespace weft::commands {

/// Reads the command line and, for commands with an INPUT, the file. Prints --help and --version (rank 0). Collective.
/// Throws a collective Error(usage).
Request parse(int argc, const char* const* argv, const parallel::World& world);

/// All settings that an input can have, for every command: one file serves synth, train and benchmark. To add a table:
/// a member here, and its keys in `schema`.
struct Input {
  transcoder::Configuration configuration;
  language_model::Configuration language;  ///< configuration of the commands `weft lm`
  dataset::SyntheticSettings synthetic;
  bench::TranscoderSettings benchmark;
  bench::LanguageSettings language_benchmark;
};

/// The keys of `input`, and which of them this command requires. `input` must outlive the schema.
input::Schema schema(Input& input, Command command);

/// --set, --output and --walltime as overrides of input keys.
std::vector<input::Override> overrides(const Request& request);

/// Reads the request's input, with the overrides, into the members that `schema` refers to. Paths are expanded with
/// rank 0's environment. Collective; throws a collective Error(usage).
void read_input(const Request& request, const input::Schema& schema, const parallel::World& world);

/// Throws Error(io) if text that was printed did not reach standard output. Call it on rank 0, after a command whose
/// result is what it prints. A reader that has read enough (`weft inspect RUN | head`) is no error.
void require_printed();

/// The name of a command on the command line: "train", "lm train".
std::string_view name(Command command);

}  // namespace weft::commands
