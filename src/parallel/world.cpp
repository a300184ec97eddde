// SPDX-License-Identifier: Apache-2.0
#include "parallel/world.hpp"

#include <mpi.h>

#include <cstdio>
#include <cstdlib>

#include "base/fault.hpp"
#include "base/log.hpp"

namespace weft::parallel {

World::Session::Session(int* argc, char*** argv) {
  int provided = 0;
  MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided);
  if (provided < MPI_THREAD_MULTIPLE) {
    // The prefetch thread exchanges rows while the main thread trains: without this level that would corrupt memory.
    std::fprintf(stderr, "this MPI library offers no MPI_THREAD_MULTIPLE; use one built with thread support\n");
    MPI_Abort(MPI_COMM_WORLD, static_cast<int>(ExitCode::usage));
  }
}

World::Session::~Session() { MPI_Finalize(); }

World::World(int* argc, char*** argv) : session_(argc, argv), all_(Communicator::world()), node_(all_.split_by_node()) {
  char name[MPI_MAX_PROCESSOR_NAME];
  int length = 0;
  MPI_Get_processor_name(name, &length);
  host_.assign(name, static_cast<std::size_t>(length));
  fault::note_rank(rank());
}

World::~World() = default;

int World::agree(int code) const {
  std::int64_t worst = code;
  all_.maximum({&worst, 1});
  return static_cast<int>(worst);
}

int World::abort(const Error& failure, std::int64_t step) const {
  const int code = static_cast<int>(failure.code());
  const std::string at = step < 0 ? "" : fmt::format(" at step {}", step);
  if (failure.known_to() == KnownTo::all_ranks || size() == 1) {
    if (is_root()) log::error("error{}: {}", at, failure.what());
    return code;
  }
  log::error("error on rank {} ({}){}: {}", rank(), host_, at, failure.what());
  std::fflush(nullptr);
  MPI_Abort(MPI_COMM_WORLD, code);
  std::abort();  // MPI_Abort does not return; this tells the compiler
}

void require_matching_launcher(const World& world) {
  // What the launcher says of itself. SLURM_NTASKS is no witness: in a batch script it is the job's, not this
  // program's.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const char* value = std::getenv(name);
    if (value == nullptr) continue;
    const long expected = std::strtol(value, nullptr, 10);
    if (world.size() == 1 && expected > 1)
      throw collective_error(
          ExitCode::usage,
          "the MPI world is 1 but {} says that {} processes were started (launcher and MPI library do not match: "
          "{} would train alone, side by side); start with \"srun --mpi=pmix\" or with the mpirun of this MPI ({})",
          name, expected, expected == 2 ? "both" : "all", mpi_version());
    return;
  }
}

std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::string version(text, static_cast<std::size_t>(length));
  return version.substr(0, version.find(','));
}

}  // namespace weft::parallel
