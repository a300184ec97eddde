// SPDX-License-Identifier: Apache-2.0
//
// The memory of a chain of jobs: from which step each start of a run went on, and whether it ended in an orderly way. A
// job that dies again and again at one place must not be requeued for ever.
//
// Kept in starts.jsonl in the run directory, one object a line, by rank 0 alone.
#pragma once

#include <cstdint>
#include <filesystem>

namespace weft::checkpoint {

class Starts {
 public:
  explicit Starts(std::filesystem::path run_directory);

  /// Notes a start from `step`. Throws Error(no_progress) when the last two starts began there too and ended without a
  /// word, unless `ignore`. Unreadable lines are passed over: this file is advice, not state.
  void begin(std::int64_t step, bool ignore);
  /// Notes that the run that began last ended in an orderly way at `step`.
  void end(std::int64_t step);

 private:
  std::filesystem::path path_;
};

}  // namespace weft::checkpoint
