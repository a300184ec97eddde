// SPDX-License-Identifier: Apache-2.0
#include "parallel/world.hpp"

#include <mpi.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/fault.hpp"
#include "base/log.hpp"
#include "parallel/launcher.hpp"

namespace weft::parallel {
namespace {

bool only_if_launched = false;

bool is_initialised() {
  int initialised = 0;
  MPI_Initialized(&initialised);
  return initialised != 0;
}

bool set_if_absent(const char* name, const char* value) {
  return std::getenv(name) == nullptr && setenv(name, value, 1) == 0;
}

/// MPI_Init_thread. Processes that no launcher started may share one session directory of Open MPI 4 (always with
/// ess_singleton_isolated): one that ends removes it while another one creates it, and the start of that one fails. A
/// process that is alone needs no such directory. Without it PMIx must keep its data in memory (gds=hash): its shared
/// files would be in the root directory, or fail with two lines of errors where that cannot be written. The variables
/// are not left to programs that this one starts: mpirun needs the directory.
int init_thread(int* argc, char*** argv) {
  constexpr const char* variables[][2] = {{"OMPI_MCA_orte_create_session_dirs", "0"}, {"PMIX_MCA_gds", "hash"}};
  const bool without_directory = !started_by_launcher() && std::getenv(variables[0][0]) == nullptr;
  std::vector<const char*> added;
  for (const auto& [name, value] : variables)
    if (without_directory && set_if_absent(name, value)) added.push_back(name);
  int provided = 0;
  MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided);
  for (const char* const name : added) unsetenv(name);
  return provided;
}

/// Where MPI cannot open its files it ends the process with messages of its own. Raises the limit of this process as
/// far as is permitted; ends it if that is not enough.
void require_descriptors() {
  constexpr rlim_t kOfMpi = 32;  // 24 suffice for Open MPI 4.1 and one process
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= kOfMpi) return;
  limit.rlim_cur = std::min(limit.rlim_max, kOfMpi);
  ::setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur >= kOfMpi) return;
  log::error("error: this process may have {} files open (MPI needs about {}); raise the limit (ulimit -n)",
             limit.rlim_cur, kOfMpi);
  abort_job(ExitCode::usage);
}

}  // namespace

bool started_by_launcher() {
  // MPI_Init sets some of these variables itself: only the first result is valid.
  static const bool started = [] {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"})
      if (std::getenv(name) != nullptr) return true;
    return false;
  }();
  return started;
}

void start_mpi_if_launched() { only_if_launched = true; }

World::Session::Session(int* argc, char*** argv) {
  const char* const tasks = std::getenv("SLURM_STEP_NUM_TASKS");  // srun without an interface for MPI
  const bool several = started_by_launcher() || (tasks != nullptr && std::strtol(tasks, nullptr, 10) > 1);
  if (only_if_launched && !several) {
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    watchdog.emplace(0, 1, host);
    return;
  }
  require_descriptors();
  const int provided = init_thread(argc, argv);
  if (provided < MPI_THREAD_MULTIPLE) {
    // The prefetch thread exchanges rows while the main thread trains: a lower level would corrupt memory.
    std::fprintf(stderr, "this MPI library offers no MPI_THREAD_MULTIPLE; use one built with thread support\n");
    abort_job(ExitCode::usage);
  }
  int rank = 0, size = 0, length = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  char name[MPI_MAX_PROCESSOR_NAME];
  MPI_Get_processor_name(name, &length);
  watchdog.emplace(rank, size, std::string(name, static_cast<std::size_t>(length)));
}

World::Session::~Session() {
  if (!is_initialised()) return;
  note_phase("MPI_Finalize");
  note_finalising();
  fault::point("finalize");
  MPI_Finalize();
}

World::World(int* argc, char*** argv) : session_(argc, argv), all_(Communicator::world()), node_(all_.split_by_node()) {
  host_ = session_.watchdog->host();
  fault::note_rank(rank());
  session_.watchdog->connect(all_);
}

World::~World() {
  note_phase("ending");
  fault::point("leave");
  session_.watchdog->disconnect();
}

int agreed_exit_code(const World& world, int code) {
  std::int64_t highest = code;
  world.all().maximum({&highest, 1});
  return static_cast<int>(highest);
}

int end_run(const World& world, const Error& failure, std::int64_t step) {
  const std::string at = step < 0 ? "" : fmt::format(" at step {}", step);
  if (failure.known_to() == KnownTo::all_ranks || world.size() == 1) {
    if (world.is_root()) log::error("error{}: {}", at, failure.what());
    return static_cast<int>(failure.code());
  }
  log::error("error on rank {} ({}){}: {}", world.rank(), world.host(), at, failure.what());
  std::fflush(nullptr);
  abort_job(failure.code());
}

void require_matching_launcher(const World& world) {
  // Variables that the launcher sets. SLURM_NTASKS is not among them: in a batch script it counts the tasks of the job,
  // not of this program.
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

void require_one_program(const Communicator& all, bool with_cuda, const std::string& host, const std::string& problem) {
  const std::int64_t own = with_cuda;
  std::vector<std::int64_t> kinds(static_cast<std::size_t>(all.size()));
  all.all_gather(&own, kinds.data(), sizeof own);
  const auto first_of = [&](std::int64_t kind) {
    return static_cast<int>(std::find(kinds.begin(), kinds.end(), kind) - kinds.begin());
  };
  const int with = first_of(1), without = first_of(0);
  if (with == all.size() || without == all.size()) return;
  const std::string host_with = all.broadcast(host, with), host_without = all.broadcast(host, without);
  const std::string why = all.broadcast(problem, without);
  throw collective_error(ExitCode::usage,
                         "rank {} on {} runs the program with CUDA, rank {} on {} the one without{}; start all ranks "
                         "on nodes with GPUs that the program was built for, or all with the program without CUDA",
                         with, host_with, without, host_without, why.empty() ? "" : " (" + why + ")");
}

std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::string version(text, static_cast<std::size_t>(length));
  // Open MPI adds the builder after a comma, MPICH its configuration in further lines.
  version.resize(std::min(version.size(), version.find_first_of(",\n")));
  std::replace(version.begin(), version.end(), '\t', ' ');
  return version;
}

}  // namespace weft::parallel
