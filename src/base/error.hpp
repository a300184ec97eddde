// SPDX-License-Identifier: Apache-2.0
//
// Error handling: every failure throws an Error. main catches it, prints it once and returns its exit code. Messages
// have the form: problem (why) suggestion.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

// nvcc cannot evaluate fmt's compile-time format strings: kernels make an Error of a std::string.
#ifndef __CUDACC__
#include <fmt/format.h>
#endif

namespace weft {

/// Exit code of the process. See `stopped_by` for 128 + n.
enum class ExitCode : int {
  finished = 0,
  internal = 1,
  usage = 2,          ///< wrong command line or input file
  data = 3,           ///< a dataset is damaged or unsuitable
  numeric = 4,        ///< a loss, gradient or parameter is not finite
  communication = 5,  ///< a rank was lost or hangs
  io = 6,             ///< a file cannot be read or written; no valid checkpoint
  requeue = 75,       ///< stopped cleanly before the last step; start again to continue
  no_progress = 93,   ///< no step completed since this start
};

/// Stopped on request by a signal, resumable: 128 + signal.
constexpr ExitCode stopped_by(int signal) { return static_cast<ExitCode>(128 + signal); }

/// Which ranks throw an error. If all ranks throw it, they end together (MPI_Finalize, then exit with the code). If
/// only one rank does, it ends the others with MPI_Abort(code). `one_rank` is always safe and therefore the default.
enum class KnownTo { one_rank, all_ranks };

class Error : public std::runtime_error {
 public:
  Error(ExitCode code, std::string message, KnownTo known_to = KnownTo::one_rank)
      : std::runtime_error(std::move(message)), code_(code), known_to_(known_to) {}

  ExitCode code() const { return code_; }
  KnownTo known_to() const { return known_to_; }

 private:
  ExitCode code_;
  KnownTo known_to_;
};

#ifndef __CUDACC__
/// `throw error(ExitCode::data, "{}: layer_{} is missing (…) …", path, layer);`
template <class... Args>
Error error(ExitCode code, fmt::format_string<Args...> format, Args&&... args) {
  return Error(code, fmt::format(format, std::forward<Args>(args)...));
}

/// An error that every rank throws, formatted like `error`: a wrong input key, a grid that does not match the number of
/// ranks.
template <class... Args>
Error collective_error(ExitCode code, fmt::format_string<Args...> format, Args&&... args) {
  return Error(code, fmt::format(format, std::forward<Args>(args)...), KnownTo::all_ranks);
}
#endif

}  // namespace weft
