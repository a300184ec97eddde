// SPDX-License-Identifier: Apache-2.0
//
// History of a chain of jobs: the step from which each start of a run began, the step it reached, and how it ended. A
// job that repeatedly fails at the same step must not be requeued forever, and an option of the first start must not be
// applied again by every requeued one.
//
// Stored in starts.jsonl in the run directory, one JSON object per line. Used by rank 0 only.
//
// clang-format off
//   {"start":0,"resume":"never","reached":           18}   a start from step 0; `resume`: its option, unless "auto";
//                                                          `reached`: the step it had begun, rewritten in place
//   {"checkpoint":10,"seconds":1.5,"delay":0.2}            a durable checkpoint: its duration, and the time that training
//                                                          lost to it
//   {"changed":{"run.steps":["20","40"]}}                  keys that this start has changed: before, after (TOML)
//   {"end":20}                                             ended cleanly after step 20
//   {"failed":18,"code":4}                                 ended with a message in step 18
// clang-format on
//
// A start without an end died silently. Unreadable lines are ignored: no results depend on this file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/file.hpp"
#include "checkpoint/interval.hpp"

namespace weft::checkpoint {

class Starts {
 public:
  /// Reads the history. Nothing is written before `failed` or `begin` is called.
  explicit Starts(const std::filesystem::path& run_directory);
  Starts(const Starts&) = delete;

  /// The option --resume of the last start; "auto" if there was none.
  std::string last_resume() const;

  /// Records that start number `number` ended with a message, if it is the last one and no end is known. It then does
  /// not count as a death. Throws Error(io).
  void failed(std::int64_t number, int code);

  /// Records a start from `step` with the option `resume`. Returns its number, from 1. Throws Error(no_progress) if the
  /// last two starts began there too and died at one step, unless `ignore`; Error(io) if the file cannot be written.
  std::int64_t begin(std::int64_t step, const std::string& resume, bool ignore);
  /// Records the keys that the present start has changed: key -> [before, after]. Throws Error(io).
  void note_changes(const std::string& changed_json);
  /// Records that the present start has begun `step`. A failure is ignored.
  void reached(std::int64_t step) noexcept;
  /// Records the cost of a checkpoint that is durable. Throws Error(io).
  void note_checkpoint(std::int64_t step, const Cost& cost);
  /// The newest cost that this start or an earlier one has recorded.
  const std::optional<Cost>& last_cost() const { return cost_; }
  /// Records that the present start ended cleanly at `step`.
  void end(std::int64_t step);

 private:
  struct Start {
    std::int64_t step = -1, reached = -1;  ///< -1: unknown
    std::string resume = "auto";
    bool ended = false;
  };
  void append(const std::string& line);

  std::filesystem::path path_;
  std::vector<Start> starts_;
  std::optional<Cost> cost_;
  bool torn_ = false;  ///< the last line has no end
  Descriptor file_;
  std::int64_t reached_at_ = -1;  ///< offset of the number in the file
};

}  // namespace weft::checkpoint
