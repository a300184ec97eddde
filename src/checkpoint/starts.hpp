// SPDX-License-Identifier: Apache-2.0
//
// History of a chain of jobs: the step at which each start of a run began, and whether it ended cleanly. A job that
// repeatedly dies at the same step must not be requeued forever.
//
// Stored in starts.jsonl in the run directory, one JSON object per line. Used by rank 0 only.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "checkpoint/interval.hpp"

namespace weft::checkpoint {

class Starts {
 public:
  explicit Starts(std::filesystem::path run_directory);

  /// Records a start from `step`. Throws Error(no_progress) if the last two starts began there too and did not end
  /// cleanly, unless `ignore`; Error(io) if the file cannot be written. Unreadable lines are ignored: no results depend
  /// on this file.
  void begin(std::int64_t step, bool ignore);
  /// Records the cost of a checkpoint that is durable; `last_cost` is the newest record. No results depend on it.
  void note_checkpoint(std::int64_t step, const Cost& cost);
  std::optional<Cost> last_cost() const;
  /// Records that the last start ended cleanly at `step`.
  void end(std::int64_t step);

 private:
  std::filesystem::path path_;
};

}  // namespace weft::checkpoint
