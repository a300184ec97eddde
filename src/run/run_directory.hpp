// SPDX-License-Identifier: Apache-2.0
//
// The directory of a run: lease.N, input.toml (resolved), log.txt, metrics.jsonl, run.json, starts.jsonl, checkpoints/.
// Created, or opened again to resume, before anything is computed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "checkpoint/lease.hpp"
#include "checkpoint/resume.hpp"
#include "input/schema.hpp"
#include "optimizer/optimizer_settings.hpp"
#include "parallel/world.hpp"
#include "run/run_settings.hpp"

namespace weft::run {

struct RunDirectory {
  std::filesystem::path path;
  checkpoint::Lease* lease = nullptr;  ///< held until the process ends
  std::filesystem::path checkpoints() const { return path / "checkpoints"; }
};

/// Checks the output directory for a dry run and changes nothing. Throws a collective Error(io) if a run could not
/// write there, Error(usage) if the directory is neither empty nor that of a run.
void require_usable_output(const parallel::World&, const std::filesystem::path& path);

struct OpenedRun {
  RunDirectory directory;
  std::optional<checkpoint::Found> found;  ///< the checkpoint to resume from
  std::string resume = "auto";             ///< --resume as given
  std::int64_t protected_step = -1;        ///< step of the checkpoint of this run that --resume names; -1: none
  /// The run has at least run.steps steps, and its run record is complete or of more steps: nothing may be changed.
  bool complete = false;
  bool stopped_early = false;  ///< run.stop_after has ended it
  /// run.json is still that of an earlier start, which finished the run.
  bool record_is_kept = false;
};
/// Creates the directory, acquires its lease, opens log.txt and run.json there, and finds the checkpoint to resume
/// from, after it has copied one that is only on the nodes (checkpoint.local). `resume`: "auto", "never" or the path of
/// a checkpoint (--resume). It applies to the first start only: if the start before this one had the same option, the
/// run continues from its own newest checkpoint. `take_over`: also from a run that may be active. Collective. Throws as
/// `require_usable_output`, and a collective Error(io) if the directory belongs to another run.
OpenedRun open_run(const RunSettings&, const input::Schema&, const std::string& resume, const checkpoint::Settings&,
                   bool take_over, const parallel::World&);

/// True if the run is complete; logged. The command then ends with 0. Collective.
bool is_complete(const OpenedRun&, const RunSettings&, const parallel::World&);

/// Once it is known that the run may start: writes the resolved input into the directory, and run.json if `open_run`
/// has not. Collective.
void keep_input(const OpenedRun&, const input::Schema&, const parallel::World&);

struct TrainingData {
  std::string path, fingerprint;
  bool accept_changed = false;  ///< data.accept_changed
};
/// Compares the input with the one of the run that wrote the checkpoint. Keys that define the run may not change: a
/// collective Error(usage) lists all changes. Changeable keys need resume.accept_changed. Accepted changes are logged.
/// All changes, also of free keys, are in the run record (`changed`). True if a key has changed that is not about
/// output, or the data, the number of ranks or the program: the steps from here on may not be those that the run would
/// have made, be it by the rounding of sums.
bool check_same_run(const input::Schema&, const ResumeSettings&, const checkpoint::Found&, const TrainingData&,
                    const parallel::World&);

/// Warns if the schedule of the learning rate has another length than that of the run so far, which needs no
/// permission, or ends in steps that train nothing.
void check_schedule(const optimizer::Settings&, const RunSettings&, const input::Schema&, const OpenedRun&,
                    const parallel::World&);

}  // namespace weft::run
