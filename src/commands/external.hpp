// SPDX-License-Identifier: Apache-2.0
//
// Commands of other programs: `weft NAME` starts weft-NAME from PATH if NAME is no command of this program. Those of
// the Python package (python/weft) are known by name.
#pragma once

#include <span>
#include <string_view>

namespace weft::commands {

/// A command of the Python package.
struct PackageCommand {
  std::string_view name;
  std::string_view arguments;  ///< arguments as the help shows them
  std::string_view summary;    ///< in lists of commands: lower case, without a full stop
  bool on_every_rank;          ///< its processes divide the work; of other commands only rank 0 starts one
};
std::span<const PackageCommand> package_commands();

/// Replaces this process by weft-NAME if the command line names it; returns otherwise. `weft help NAME` is
/// `weft-NAME --help`. Call it before MPI starts. On ranks that have nothing to do it ends the process with 0, and with
/// 2 if NAME is a command of the Python package, which is not installed.
void hand_over_to_external(int argc, const char* const* argv);

}  // namespace weft::commands
