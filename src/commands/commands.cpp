// SPDX-License-Identifier: Apache-2.0
#include "commands/commands.hpp"

#include <filesystem>

#include "kernels/runtime.hpp"
#include "parallel/nccl.hpp"
#include "storage/hdf5.hpp"

namespace weft::commands {

namespace {

int call(const Request& request, const parallel::World& world) {
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

/// True if what the command prints is its result, and not an account of the files that it writes.
bool prints_its_result(const Request& request) {
  return request.dry_run || (request.command != Command::train && request.command != Command::synth);
}

}  // namespace

int run(const Request& request, const parallel::World& world) {
  const int code = call(request, world);
  if (prints_its_result(request)) world.on_root([] { require_printed(); });
  return code;
}

void require_directory(const parallel::World& world, const std::string& path, std::string_view origin) {
  namespace fs = std::filesystem;
  world.on_root([&] {
    std::error_code failed;
    const fs::file_status status = fs::status(path, failed);
    if (!fs::exists(status))
      throw error(ExitCode::usage, "{} = \"{}\": no such directory (relative paths begin at {}); correct the path",
                  origin, path, fs::current_path(failed).string());
    if (!fs::is_directory(status))
      throw error(ExitCode::usage, "{} = \"{}\" is a file (the directory of a dataset is needed); correct the path",
                  origin, path);
  });
}

std::map<std::string, std::string> library_versions() {
  std::map<std::string, std::string> versions = {
      {"MPI", parallel::mpi_version()}, {"HDF5", storage::hdf5_version()}, {"kernels", kernels::library_versions()}};
  if (const std::string nccl = parallel::nccl::version(); !nccl.empty()) versions["NCCL"] = nccl;
  return versions;
}

}  // namespace weft::commands
