// SPDX-License-Identifier: Apache-2.0
//
// How a failure of one rank becomes one failure of all ranks, and how the job ends after it.
//
//   on_all, on_root            run a function on every rank or on rank 0; its failure is thrown on every rank
//   attempt, attempt_on_root   the same without throwing: the caller decides what the failure means
//   agree, first_failure       choose one of the failures of several ranks
//   end_job                    ends all ranks from a thread of one rank, also when MPI hangs (parallel/watchdog.hpp)
//
// The end of a program after an Error that reached main is `end_run` (parallel/world.hpp).
//
// A rank that throws an Error known to one rank never reaches the next collective call; the others wait there until
// `end_run` on that rank aborts the job. Before a failure is thrown within a group of GPUs, parallel/nccl.cpp aborts
// the NCCL groups of the process, so that no kernel keeps waiting for a lost rank.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>

#include "base/error.hpp"
#include "parallel/communicator.hpp"

namespace weft::parallel {

struct Failure {
  ExitCode code = ExitCode::internal;
  std::string message;

  /// Throws this failure as an Error known to all ranks.
  [[noreturn]] void raise() const;
};

/// The exception that is being handled, as a Failure: errors of std::filesystem are ExitCode::io, memory or threads
/// that are not there ExitCode::usage, other exceptions ExitCode::internal. Call it inside a catch clause.
Failure current_failure();

/// Runs `function` on this rank. Returns what it throws.
template <class Function>
std::optional<Failure> attempt(Function&& function) {
  try {
    function();
  } catch (...) {
    return current_failure();
  }
  return std::nullopt;
}

/// Collective. The failure with the smallest `order` (at least 0), of the lowest rank among equals; nullopt when no
/// rank has one. All ranks get the same result. One small reduction when there is no failure.
std::optional<Failure> first_failure(const Communicator& ranks, const std::optional<Failure>& own,
                                     std::int64_t order = 0);

/// Collective. As `first_failure`, in the order of ranks, I/O errors last (they often follow from another failure). On
/// several ranks the message begins with "rank r: ".
std::optional<Failure> agree(const Communicator& ranks, const std::optional<Failure>& own);

/// Collective. Runs `function` on every rank; throws what `agree` returns, on every rank.
template <class Function>
void on_all(const Communicator& ranks, Function&& function) {
  if (const auto failure = agree(ranks, attempt(function))) failure->raise();
}

/// Collective. Runs `function` on rank 0. Returns its failure, on every rank.
template <class Function>
std::optional<Failure> attempt_on_root(const Communicator& ranks, Function&& function) {
  std::int64_t code = 0;
  std::string message;
  if (ranks.rank() == 0)
    if (std::optional<Failure> own = attempt(function)) {
      code = static_cast<std::int64_t>(own->code);
      message = std::move(own->message);
    }
  ranks.broadcast(&code, sizeof code);
  if (code == 0) return std::nullopt;
  return Failure{static_cast<ExitCode>(code), ranks.broadcast(std::move(message))};
}

/// Collective. Runs `function` on rank 0 and returns its text, if it has one, on every rank. Its failure is thrown on
/// every rank.
template <class Function>
auto on_root(const Communicator& ranks, Function&& function) {
  if constexpr (std::is_void_v<decltype(function())>) {
    if (const auto failure = attempt_on_root(ranks, function)) failure->raise();
  } else {
    std::string text;
    if (const auto failure = attempt_on_root(ranks, [&] { text = function(); })) failure->raise();
    return ranks.broadcast(std::move(text));
  }
}

/// Logs `why`, writes it to the run record and ends all ranks with `code`. If MPI or a file system does not return,
/// this process ends after 30 s without them. The end of the process frees its GPU. From any thread.
[[noreturn]] void end_job(ExitCode code, const std::string& why);

/// Sets the function that `end_job` calls, from its thread, to write a failure to the run record: report/ is a higher
/// module. It must not throw.
void set_failure_recorder(std::function<void(ExitCode code, const std::string& why)> recorder);

/// MPI_Abort, without flushing buffered output: a blocked stream must not delay it. Exchanges between GPUs in progress
/// are aborted.
[[noreturn]] void abort_job(ExitCode code);
/// From now on `abort_job` ends this process only, with the code: MPI is being finalised, and the launcher ends the
/// others.
void note_finalising();

}  // namespace weft::parallel
