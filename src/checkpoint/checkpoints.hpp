// SPDX-License-Identifier: Apache-2.0
//
// The checkpoints of a run, as its loop drives them: when to write one, to the run directory or first to the nodes
// (local.hpp), what they cost (interval.hpp), and the verification of those kept (scrub.hpp).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <vector>

#include "checkpoint/checkpoint_writer.hpp"
#include "checkpoint/interval.hpp"
#include "checkpoint/local.hpp"
#include "checkpoint/scrub.hpp"
#include "checkpoint/starts.hpp"
#include "storage/json_file.hpp"

namespace weft::checkpoint {

class Checkpoints {
 public:
  /// Collective. `node`: the ranks of the node of this one. `starts`: on rank 0, the history of the run, which knows
  /// and receives the costs; nullptr on the others. `limited`: the run has a wall-time limit, for which the cost must
  /// be known before the first checkpoint. The other parameters and errors are those of Writer.
  Checkpoints(const parallel::Communicator& world, const parallel::Communicator& node,
              const std::filesystem::path& directory, const Settings& settings, const Registry& registry,
              const kernels::Execution& execution, const std::filesystem::path& resumed_from, Starts* starts,
              bool limited);

  /// Collective, at a step boundary. Completes the one in progress and starts one of this step.
  void start(Manifest manifest);
  /// Collective. Waits until all checkpoints are durable in the run directory, or have failed.
  void finish();
  /// Collective. Removes the directories of the nodes: after `finish`, at the end of a run without error.
  void close();

  /// What the ranks agree on at each step: the minimum of these numbers, of which `advance` then acts on. It waits for
  /// no rank. Collective; does nothing if `least` is empty.
  std::vector<std::int64_t> progress() const;
  void advance(std::span<const std::int64_t> least);

  /// Called at the end of each step with its duration.
  void note_step(double seconds);
  /// True if a checkpoint is due after this step (checkpoint.every); equal on all ranks.
  bool due_after(std::int64_t step) const;
  /// Rank 0 requests a checkpoint of all ranks: checkpoint.every = "auto".
  bool requested();

  /// Step of the newest checkpoint that is durable in the run directory; -1 if there is none.
  std::int64_t last_durable() const { return shared_.last_durable(); }
  /// Seconds that a new checkpoint takes until it is durable in the run directory, measured or estimated; 0 if unknown.
  double expected_seconds() const { return interval_->cost().duration; }
  /// The entries for run.json: "duration_seconds", "delay_seconds", "measured", "interval_seconds" (every = "auto"),
  /// "scrub".
  Json record() const;

 private:
  bool busy() const { return shared_.busy() || (local_ && local_->busy()); }
  void note_local(const std::optional<Report>& report);
  void note_shared(const std::optional<Report>& report);
  void copy_newest();

  const parallel::Communicator& world_;
  const parallel::Communicator& node_;
  const Settings settings_;
  Starts* const starts_;                   // rank 0
  std::filesystem::path local_directory_;  // directory of this node; empty without checkpoint.local
  std::optional<Writer> local_;
  Writer shared_;
  std::optional<Manifest> to_copy_;              // the newest checkpoint on the nodes, if it is not being copied yet
  double local_seconds_ = 0, copy_seconds_ = 0;  // durations of the last ones, with checkpoint.local
  std::optional<Interval> interval_;
  std::optional<Scrub> scrub_;  // rank 0
};

}  // namespace weft::checkpoint
