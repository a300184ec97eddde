// SPDX-License-Identifier: Apache-2.0
//
// Destination of the lines of base/log.hpp during a LogSession:
//
// clang-format off
//   rank 0        info to standard output, warnings and errors to standard error; all of them also to log.txt once it is open
//   other ranks   only warnings and errors, to standard error, with the rank; errors, which end the job, also to log.txt
// clang-format on
//
// Each line is flushed at once, so that no line is lost in an abort.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace weft::report {

/// Installs the sink for its lifetime. At most one per process.
class LogSession {
 public:
  explicit LogSession(int rank);
  LogSession(const LogSession&) = delete;
  ~LogSession();
};

/// Appends all later lines of rank 0 and errors of other ranks, with date and time, to this file. Throws Error(io).
void log_to_file(const std::filesystem::path& path);

/// Progress of the run, on rank 0: a line in the log file and on standard output; on a terminal a line, cut to its
/// width, that the next status replaces. A message ends it, so that the last status before it stays visible.
void status(std::string_view line);

struct Progress {
  std::int64_t step = 0, steps = 0;
  std::string metrics;         ///< "loss 0.4123  NMSE 0.4050": as the model shows them
  std::string unit = "steps";  ///< of the rate
  double per_second = 0;
  double percent_of_limit = -1;  ///< of the hardware's limit; < 0: unknown, not shown
  double seconds_left = -1;      ///< < 0: unknown, not shown
};
/// "step 120/2000  loss 0.4123  NMSE 0.4050  L0 15.98  51,900 tokens/s  0:12:34 left"
std::string progress_text(const Progress& progress);

/// The step of this rank, for messages about errors; -1 before the first.
std::int64_t current_step();
/// Called before each step, and with -1 after the last one. The time line of --profile follows it (base/trace.hpp).
void set_current_step(std::int64_t step);

}  // namespace weft::report
