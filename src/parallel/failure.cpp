// SPDX-License-Identifier: Apache-2.0
#include "parallel/failure.hpp"

#include <mpi.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "base/log.hpp"
#include "base/system.hpp"
#include "parallel/peers.hpp"

namespace weft::parallel {
namespace {

/// MPI_Abort can itself hang on a broken network.
constexpr std::chrono::seconds kAbortTimeout{30};

std::function<void(ExitCode, const std::string&)> failure_recorder;
std::atomic<bool> finalising{false};

/// The chosen failure and its rank.
std::optional<Failure> choose(const Communicator& ranks, const std::optional<Failure>& own, std::int64_t order,
                              int& rank) {
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::int64_t first = own ? order * ranks.size() + ranks.rank() : kNone;
  ranks.minimum({&first, 1});
  if (first == kNone) return std::nullopt;
  rank = static_cast<int>(first % ranks.size());
  std::int64_t code = own ? static_cast<std::int64_t>(own->code) : 0;
  ranks.broadcast(&code, sizeof code, rank);
  return Failure{static_cast<ExitCode>(code), ranks.broadcast(own ? own->message : std::string(), rank)};
}

}  // namespace

void Failure::raise() const { throw Error(code, message, KnownTo::all_ranks); }

Failure current_failure() {
  try {
    throw;
  } catch (const Error& failure) {
    return {failure.code(), failure.what()};
  } catch (const std::filesystem::filesystem_error& failure) {
    return {ExitCode::io, fmt::format("{}: cannot be used ({}); check the path, its permissions and the disk",
                                      failure.path1().string(), failure.code().message())};
  } catch (const std::system_error& failure) {
    if (failure.code() == std::errc::resource_unavailable_try_again)
      return {
          ExitCode::usage,
          fmt::format("a thread cannot be started on {}; raise the limits of processes and of address space (ulimit "
                      "-u, -v), or set device.threads or OMP_NUM_THREADS to fewer",
                      host_name())};
    return {ExitCode::io, failure.what()};
  } catch (const std::bad_alloc&) {
    return {ExitCode::usage,
            fmt::format("out of host memory on {}; take fewer transcoder.features, a smaller data.batch_tokens or "
                        "data.window_rows, or fewer ranks per node",
                        host_name())};
  } catch (const std::exception& failure) {
    return {ExitCode::internal, failure.what()};
  }
}

std::optional<Failure> first_failure(const Communicator& ranks, const std::optional<Failure>& own, std::int64_t order) {
  int rank = 0;
  return choose(ranks, own, order, rank);
}

std::optional<Failure> agree(const Communicator& ranks, const std::optional<Failure>& own) {
  int rank = 0;
  std::optional<Failure> failure = choose(ranks, own, own && own->code == ExitCode::io ? 1 : 0, rank);
  if (failure && ranks.size() > 1) failure->message = fmt::format("rank {}: {}", rank, failure->message);
  return failure;
}

void end_job(ExitCode code, const std::string& why) {
  // Started first: output and the run record may block too, on a full pipe or a lost file system.
  std::thread([code] {
    std::this_thread::sleep_for(kAbortTimeout);
    ::_exit(static_cast<int>(code));
  }).detach();
  Peers::abort_all();
  log::error("error: {}", why);
  if (failure_recorder) failure_recorder(code, why);
  abort_job(code);
}

void set_failure_recorder(std::function<void(ExitCode, const std::string&)> recorder) {
  failure_recorder = std::move(recorder);
}

void note_finalising() { finalising = true; }

void abort_job(ExitCode code) {
  Peers::abort_all();
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (finalising || !initialized) ::_exit(static_cast<int>(code));
  // A second call of MPI_Abort returns at once. The first one ends the process.
  static std::atomic_flag ending;
  while (ending.test_and_set()) std::this_thread::sleep_for(kAbortTimeout);
  MPI_Abort(MPI_COMM_WORLD, static_cast<int>(code));
  std::abort();  // MPI_Abort does not return, which the compiler cannot know
}

}  // namespace weft::parallel
