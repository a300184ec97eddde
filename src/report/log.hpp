// SPDX-License-Identifier: Apache-2.0
//
// Where the lines of base/log.hpp go while a LogSession lives:
//
//   rank 0        info to standard output, warnings and errors to standard error; all of them to log.txt once it is
//   open other ranks   warnings and errors alone, to standard error, with their rank
//
// Each line is flushed at once: what was said before an abort has been written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace weft::report {

/// Installs the sink for its lifetime. One in a process.
class LogSession {
 public:
  explicit LogSession(int rank);
  LogSession(const LogSession&) = delete;
  ~LogSession();
};

/// From now on every line of rank 0 also goes, with date and time, to the end of this file. Nothing on other ranks.
/// Throws Error(io).
void log_to_file(const std::filesystem::path& path);

/// How far the run is. Rank 0: a line in the log file and, where standard output is no terminal, there too; on a
/// terminal one line that the next status or message replaces.
void status(std::string_view line);

struct Progress {
  std::int64_t step = 0, steps = 0;
  double loss = 0;
  double nmse = 0;  ///< standardised, mean over layers
  double l0 = 0;    ///< active features per token and layer
  double tokens_per_second = 0;
  double percent_of_limit = -1;  ///< of the hardware's limit; < 0: not known, not shown
  double seconds_left = -1;      ///< < 0: not known, not shown
};
/// "step 120/2000  loss 0.4123  NMSE 0.4050  L0 15.98  51,900 tokens/s  0:12:34 left"
std::string progress_text(const Progress& progress);

/// The step that this rank works on, for messages about errors; -1 before the first.
std::int64_t current_step();
void set_current_step(std::int64_t step);

}  // namespace weft::report
