// SPDX-License-Identifier: Apache-2.0
//
// The command line, and the command that it calls.
#pragma once

#include <optional>
#include <string>

#include "base/error.hpp"
#include "commands/command.hpp"

namespace weft::commands {

/// A command line.
struct Call {
  Request request;
  const Command* command = nullptr;
  std::string text;              ///< what --help or --version prints; "": the command runs
  std::optional<Error> problem;  ///< what is wrong with the command line
  Needs needs = Needs::nothing;
};

/// Reads the command line; every rank reads the same one.
Call parse(int argc, const char* const* argv);

/// Runs the command, or prints the text that was requested (rank 0), and returns the exit code of this rank. Rank 0
/// reads the INPUT and the environment and broadcasts them. Collective. Throws a collective Error(usage) for a wrong
/// command line or input, and the errors of the command.
int run(Call call, const parallel::World& world);

}  // namespace weft::commands
