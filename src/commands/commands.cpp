// SPDX-License-Identifier: Apache-2.0
#include "commands/commands.hpp"

#include "kernels/runtime.hpp"
#include "parallel/nccl.hpp"
#include "storage/hdf5.hpp"

namespace weft::commands {

int run(const Request& request, const parallel::World& world) {
  switch (request.command) {
    case Command::nothing:
      return 0;
    case Command::train:
      return train(request, world);
    case Command::synth:
      return synth(request, world);
    case Command::evaluate:
      return evaluate(request, world);
    case Command::inspect:
      return inspect(request, world);
    case Command::benchmark:
      return benchmark(request, world);
    case Command::report:
      return report(request, world);
  }
  throw error(ExitCode::internal, "a command without a function");
}

std::map<std::string, std::string> library_versions() {
  std::map<std::string, std::string> versions = {
      {"MPI", parallel::mpi_version()}, {"HDF5", storage::hdf5_version()}, {"kernels", kernels::library_versions()}};
  if (const std::string nccl = parallel::nccl::version(); !nccl.empty()) versions["NCCL"] = nccl;
  return versions;
}

}  // namespace weft::commands
