// SPDX-License-Identifier: Apache-2.0
//
// Destination of the lines of base/log.hpp during a LogSession:
//
// clang-format off
//   rank 0        info to standard output, warnings and errors to standard error; all of them also to log.txt once it is open,
//                 with the warnings before it
//   other ranks   only warnings and errors, to standard error, with the rank; errors, which end the job, also to log.txt
// clang-format on
//
// --quiet leaves out info, but not in log.txt; with --json info is on standard error, since standard output has the
// result alone. Each line is flushed at once, so that no line is lost in an abort.
//
// On a terminal a run has a live line below all others: it is erased before another line is written, and redrawn after
// it. Colours are used on terminals alone, and not where NO_COLOR is set or TERM is dumb.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace weft::run {

/// Installs the sink for its lifetime. At most one per process.
class LogSession {
 public:
  explicit LogSession(int rank);
  LogSession(const LogSession&) = delete;
  ~LogSession();
};

/// Appends the warnings so far and all later lines of rank 0, and errors of other ranks, with date and time, to this
/// file. Throws Error(io).
void log_to_file(const std::filesystem::path& path);

enum class Verbosity { quiet, normal, verbose };

/// Sets the output of all later lines; `json`: --json was given. Without a call: normal, false.
void set_output(Verbosity verbosity, bool json);

/// The result of a command on standard output, also with --quiet. On rank 0; the caller leaves it out with --json.
void result(std::string_view text);

/// The document of --json on standard output. On rank 0.
void json_document(std::string_view text);

/// A line of --verbose, with the seconds since the start. On rank 0.
void detail(std::string_view line);

struct Progress {
  std::int64_t step = 0, steps = 0;
  std::string metrics = {};    ///< "loss 0.4123  NMSE 0.4050": as the model shows them, separated by two spaces
  std::string unit = "steps";  ///< unit of the rate
  double per_second = 0;
  std::string memory = {};       ///< "1.20 GiB, peak 1.53 GiB"; "" = not shown
  double percent_of_limit = -1;  ///< percent of the hardware's limit; < 0: unknown, not shown
  double seconds_left = -1;      ///< < 0: unknown, not shown
};
/// "step 120/2000  loss 0.4123  NMSE 0.4050  L0 15.98  51,900 tokens/s  0:12:34 left  1.20 GiB, peak 1.53 GiB". Where
/// that has more than `columns` characters, whole fields are left out: the memory, the limit, metrics from the last on,
/// the rate, the time.
std::string progress_text(const Progress& progress, std::size_t columns = std::string::npos);

/// Progress every log.every steps, on rank 0: a line in the log file and on standard output; on a terminal one that
/// fits its width now.
void status(const Progress& progress);

/// The live line, at most ten times per second: step, part of the run, time left. On rank 0, each step.
void live(std::int64_t step, std::int64_t steps, double seconds_left);

/// The step of this rank, for messages about errors; -1 before the first.
std::int64_t current_step();
/// Called before each step, and with -1 after the last one: the live line ends. --profile follows it (base/trace.hpp).
void set_current_step(std::int64_t step);

}  // namespace weft::run
