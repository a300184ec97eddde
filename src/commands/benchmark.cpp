// SPDX-License-Identifier: Apache-2.0
#include "commands/commands.hpp"

namespace weft::commands {

int benchmark(const Request&, const parallel::World&) { throw error(ExitCode::internal, "not written"); }

}  // namespace weft::commands
