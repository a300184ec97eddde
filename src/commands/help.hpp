// SPDX-License-Identifier: Apache-2.0
//
// Texts about the commands, from the lists of options.hpp: --help, and completion in bash.
#pragma once

#include <string>

#include "commands/options.hpp"

namespace weft::commands {

/// Lines of at most 80 columns, without the last newline.
std::string help_of_program();
std::string help_of_family();
std::string help_of(const CommandEntry& entry);

/// The script with which bash completes commands, options and their values.
std::string bash_completion();

}  // namespace weft::commands
