// SPDX-License-Identifier: Apache-2.0
//
// The directory of a run: input.toml (resolved), log.txt, metrics.jsonl, run.json, starts.jsonl, checkpoints/. Made, or
// taken up again, before anything is computed.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "checkpoint/resume.hpp"
#include "commands/request.hpp"
#include "parallel/world.hpp"

namespace weft::commands {

struct RunDirectory {
  std::filesystem::path path;
  std::filesystem::path checkpoints() const { return path / "checkpoints"; }
};

/// Throws a collective Error(io) when a run could not write there; changes nothing. For the dry run.
void require_usable_output(const parallel::World&, const std::filesystem::path& path);

/// Makes the directory, opens log.txt and run.json there, and finds the checkpoint to go on from (`--resume`).
/// Collective.
struct OpenedRun {
  RunDirectory directory;
  std::optional<checkpoint::Found> found;
};
OpenedRun open_run(const Request&, const input::Schema&, const transcoder::Configuration&, const parallel::World&);

/// Writes the resolved input into the directory: once it is known that the run may go on.
void keep_input(const RunDirectory&, const input::Schema&, const parallel::World&);

/// Compares the input with the one that the checkpoint's run was given. Keys that define the run may not change: a
/// collective Error(usage) lists all that did. Changeable ones need resume.accept_changed. Every accepted change is
/// logged.
void check_same_run(const input::Schema&, const transcoder::Configuration&, const checkpoint::Found&,
                    const std::string& dataset_fingerprint);

}  // namespace weft::commands
