// SPDX-License-Identifier: Apache-2.0
//
// Stands in for the commands whose own files are not in the tree yet.
#include "commands/commands.hpp"

namespace weft::commands {
namespace {
[[noreturn]] int unwritten(Command command) {
  throw collective_error(ExitCode::internal, "weft {} is not in this build", name(command));
}
}  // namespace

int train(const Request& request, const parallel::World& world) {
  Input input;
  read_input(request, schema(input, request.command), world);
  unwritten(request.command);
}
int synth(const Request& request, const parallel::World&) { unwritten(request.command); }
int evaluate(const Request& request, const parallel::World&) { unwritten(request.command); }
int inspect(const Request& request, const parallel::World&) { unwritten(request.command); }
int benchmark(const Request& request, const parallel::World&) { unwritten(request.command); }

}  // namespace weft::commands
