// SPDX-License-Identifier: Apache-2.0
//
// Other processes of this program, for `weft sweep`.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

namespace weft::commands {

/// The file of the running program.
std::filesystem::path own_program();

/// Starts a program in a process group of its own, with the environment in which this process was started and
/// `variables` ("NAME=value") in addition. Its output is appended to `log`; "" = that of this process. Throws
/// Error(io).
pid_t start_process(const std::vector<std::string>& arguments, const std::vector<std::string>& variables,
                    const std::filesystem::path& log);

/// A variable for `start_process`, which makes `stop_with_parent` of that process take effect.
std::string tied_to_this_process();
/// If the environment has that variable: this process receives SIGTERM when the process that started it has ended,
/// also when that was killed. A training run then writes its checkpoint and stops.
void stop_with_parent();

/// Exit code of a process, or 128 + the signal that ended it.
int wait_for(pid_t process);
/// Likewise, without waiting; -1 while it runs.
int ended(pid_t process);

/// Variables that give job slot `slot` a GPU of its own; empty without a GPU, and with a single one.
std::vector<std::string> gpu_of_slot(std::size_t slot);

}  // namespace weft::commands
