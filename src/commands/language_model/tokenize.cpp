// SPDX-License-Identifier: Apache-2.0
//
// weft lm tokenize FILES --output DIR: writes token files.
#include "base/error.hpp"
#include "commands/commands.hpp"

namespace weft::commands {

int language_model_tokenize(const Request&, const parallel::World&) {
  throw error(ExitCode::usage, "weft lm tokenize is not available yet");
}

}  // namespace weft::commands
