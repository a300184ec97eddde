// SPDX-License-Identifier: Apache-2.0
//
// The directory of a run: input.toml (resolved), log.txt, metrics.jsonl, run.json, starts.jsonl, checkpoints/. Created,
// or opened again to resume, before anything is computed.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "checkpoint/resume.hpp"
#include "input/schema.hpp"
#include "parallel/world.hpp"
#include "training/settings.hpp"

namespace weft::training {

struct RunDirectory {
  std::filesystem::path path;
  std::filesystem::path checkpoints() const { return path / "checkpoints"; }
};

/// Throws a collective Error(io) if a run could not write there; changes nothing. For the dry run.
void require_usable_output(const parallel::World&, const std::filesystem::path& path);

struct OpenedRun {
  RunDirectory directory;
  std::optional<checkpoint::Found> found;  ///< the checkpoint to resume from
};
/// Creates the directory, opens log.txt and run.json there, and finds the checkpoint to resume from. `resume`: "auto",
/// "never" or the path of a checkpoint (--resume). Collective.
OpenedRun open_run(const RunSettings&, const input::Schema&, const std::string& resume, const checkpoint::Settings&,
                   const parallel::World&);

/// Writes the resolved input into the directory: once it is known that the run may start.
void keep_input(const RunDirectory&, const input::Schema&, const parallel::World&);

struct TrainingData {
  std::string path, fingerprint;
  bool accept_changed = false;  ///< data.accept_changed
};
/// Compares the input with the one of the run that wrote the checkpoint. Keys that define the run may not change: a
/// collective Error(usage) lists all changes. Changeable keys need resume.accept_changed. Accepted changes are logged.
void check_same_run(const input::Schema&, const ResumeSettings&, const checkpoint::Found&, const TrainingData&);

}  // namespace weft::training
