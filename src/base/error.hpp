// SPDX-License-Identifier: Apache-2.0
//
// The one way in which Weft reports that it cannot go on: throw an Error, which main catches, prints once and turns into
// the exit code. A message reads: problem (why) suggestion.
#pragma once

#ifndef __CUDACC__  // nvcc cannot evaluate fmt's compile-time format strings: kernels throw Error with a finished string
#include <fmt/format.h>
#endif

#include <stdexcept>
#include <string>
#include <utility>

namespace weft {

/// What the process returns to the scheduler. 128 + n (stopped on request by signal n, resumable) is made by `stopped_by`.
enum class ExitCode : int {
  finished = 0,
  internal = 1,
  usage = 2,          ///< wrong command line or input file
  data = 3,           ///< a dataset is damaged or unsuitable
  numeric = 4,        ///< a loss, gradient or parameter is not finite
  communication = 5,  ///< a rank is lost or hangs
  io = 6,             ///< a file cannot be read or written; no valid checkpoint
  requeue = 75,       ///< stopped cleanly, more to do
  no_progress = 93,   ///< no step beyond the one this start began from
};

constexpr ExitCode stopped_by(int signal) { return static_cast<ExitCode>(128 + signal); }

/// Who knows of an error. What all ranks know ends the program together (MPI_Finalize, then the code); what one rank alone
/// knows must take the others down (MPI_Abort with the code). `one_rank` is always safe, so it is the default.
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

/// The same for what every rank finds out together: an input key, a grid that does not fit the world.
template <class... Args>
Error collective_error(ExitCode code, fmt::format_string<Args...> format, Args&&... args) {
  return Error(code, fmt::format(format, std::forward<Args>(args)...), KnownTo::all_ranks);
}
#endif

}  // namespace weft
