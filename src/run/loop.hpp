// SPDX-License-Identifier: Apache-2.0
//
// Trains a model from its first or last checkpointed step until the run is finished or must stop. Independent of the
// model: checkpoints, agreement of the ranks on stopping, watchdog, log, metrics.jsonl, progress, run record.
//
// clang-format off
//   run::accept_requests();                       signals of a scheduler or user
//   run::OpenedRun opened = run::open_run(…); the run directory and the checkpoint to resume from
//   Model model(…);                                     a Trainable
//   run::Loop loop(model, settings, …, opened, …); loads or initialises the state
//   return loop.run();                                  steps, conclusion; the exit code
// clang-format on
#pragma once

#include <map>
#include <optional>
#include <string>

#include "base/clock.hpp"
#include "checkpoint/best.hpp"
#include "checkpoint/checkpoint_settings.hpp"
#include "checkpoint/checkpoints.hpp"
#include "checkpoint/starts.hpp"
#include "device/memory.hpp"
#include "device/runtime.hpp"
#include "parallel/grid.hpp"
#include "run/metrics.hpp"
#include "run/profile.hpp"
#include "run/run_directory.hpp"
#include "run/run_settings.hpp"
#include "run/trainable.hpp"
#include "storage/json_file.hpp"

namespace weft::run {

/// The settings that the loop reads. References to the configuration of the run.
struct LoopSettings {
  const RunSettings& run;
  const LogSettings& log;
  const ResumeSettings& resume;
  const checkpoint::Settings& checkpoint;
};

/// Where a run comes from: recorded in every checkpoint.
struct Origin {
  std::string resolved_input;  ///< loadable again
  std::string original_input;  ///< the input file as the user wrote it
  std::map<std::string, std::string> libraries;
  std::string dataset_fingerprint;
  Json extra = Json::object();  ///< further entries of Manifest::extra
};

/// Installs the signal handlers until the end of the process. Called before the run directory is opened: a request may
/// arrive while a checkpoint is read, and then takes effect in the first steps.
void accept_requests();

/// A line for each host and device, from the run record: "ranks 0, 1 on node01: portable (…)".
std::string hosts_text();

class Loop {
 public:
  /// Loads the state of `opened.found` into the model, or initialises it. `start`: begin of the job, from which
  /// run.walltime counts. All references must outlive the loop. Collective.
  Loop(Trainable&, const LoopSettings&, Origin, const OpenedRun&, const parallel::World&, const parallel::GridShape&,
       const device::Runtime&, Clock::time_point start);

  /// Makes the steps, then the conclusion. Returns the exit code: 0 = finished, requeue, no_progress, 128 + signal.
  /// Collective. `profile`: concluded after the steps. `planned_device_bytes`: for the record; 0 = unknown.
  int run(Profile* profile = nullptr, std::int64_t planned_device_bytes = 0);

 private:
  int make_steps();
  bool log_step(double waited_for_data, bool evaluates);
  bool compares() const { return settings_.run.stop_after > 0 || settings_.checkpoint.keep_best; }
  bool note_validation(const Metrics& measured);
  bool stops_early() const;
  bool finished() const { return steps_done_ >= settings_.run.steps || stops_early(); }
  void settle_best();
  void resume_best(const checkpoint::Found&);
  std::string early_stop_text() const;
  void begin_start();
  void begin_checkpoint();
  checkpoint::Manifest manifest() const;
  Json step_communication() const;
  device::MemoryUse memory_use() const;
  Json run_communication() const;
  void record_result(std::int64_t planned_device_bytes);
  void conclude();
  void log_stop(int code) const;

  Trainable& model_;
  const LoopSettings settings_;
  const Origin origin_;
  const RunDirectory directory_;
  const std::string unit_;
  const bool resumed_;
  const std::string resume_option_;
  const parallel::World& world_;
  const parallel::GridShape grid_;
  const Clock::time_point start_;
  std::optional<run::MetricsWriter> metrics_;  // rank 0
  std::optional<checkpoint::Starts> starts_;   // rank 0
  std::string stop_cause_;                     // rank 0
  std::optional<checkpoint::Checkpoints> checkpoints_;
  checkpoint::Best best_;                             // if evaluations are compared
  checkpoint::Best durable_best_;                     // the same, of those whose checkpoint is durable
  std::optional<checkpoint::Best> best_in_progress_;  // its checkpoint is being written
  std::int64_t steps_done_ = 0, first_step_ = 0;
  std::int64_t work_ = 0;        // since the begin of the run, in units
  std::int64_t first_work_ = 0;  // before this start
  std::int64_t logged_step_ = 0, logged_work_ = 0;
  Clock::time_point logged_at_;
  double trained_seconds_ = 0;     // steps only
  double checkpoint_seconds_ = 0;  // time for which steps waited for checkpoints
  double evaluation_seconds_ = 0;  // between steps
};

}  // namespace weft::run
