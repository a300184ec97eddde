// SPDX-License-Identifier: Apache-2.0
//
// Texts about the commands, from the lists of options.hpp: --help, manual pages, and completion in shells.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "commands/options.hpp"

namespace weft::commands {

/// Lines of at most 80 columns, without the last newline.
std::string help_of_program();
std::string help_of_family();
std::string help_of(const CommandEntry& entry);

/// Paths below the share directory of an installation, and contents: manual pages in roff, completion for bash, zsh and
/// fish. `version`: of the program.
std::vector<std::pair<std::string, std::string>> shared_files(const std::string& version);

}  // namespace weft::commands
