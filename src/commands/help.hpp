// SPDX-License-Identifier: Apache-2.0
//
// Texts about the commands, from their list: --help, and completion in bash.
#pragma once

#include <string>

#include "commands/command.hpp"

namespace weft::commands {

/// The words that name a command after `weft`, or after the group with this name.
std::vector<std::string> words_after(std::string_view group);

/// Lines of at most 80 columns, without the last newline.
std::string help_of_program();
std::string help_of_group(const Group& group);
std::string help_of(const Command& command);

/// The script with which bash completes commands, options and their values, without the last newline.
std::string bash_completion();

}  // namespace weft::commands
