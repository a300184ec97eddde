// SPDX-License-Identifier: Apache-2.0
//
// Names in checkpoints/: step_XXXXXXXX is a checkpoint, *.tmp an incomplete write or deletion, step_XXXXXXXX.abandoned
// a checkpoint that a run resumed from an earlier step has moved aside, step_XXXXXXXX.replaced one in whose place a new
// checkpoint of that step is being published. `latest` names the newest checkpoint for users;
// Weft does not read it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_settings.hpp"

namespace weft::checkpoint {

constexpr const char* kLatestName = "latest";

/// The step in "step_00001200"; -1 for any other name.
std::int64_t step_of(const std::string& name);

/// Steps of the checkpoints in a directory, valid or not, ascending; empty if the directory does not exist.
std::vector<std::int64_t> steps_in(const std::filesystem::path& directory);

/// The name of a checkpoint while another one takes its place.
std::filesystem::path replaced_name(const std::filesystem::path& step_directory);

/// Removes every *.tmp, and every *.replaced whose successor was published; renames the others back. Logs a warning for
/// each.
void remove_leftovers(const std::filesystem::path& directory);

/// Renames a checkpoint to *.abandoned and logs a warning.
void set_aside(const std::filesystem::path& step_directory);

/// The steps to delete (`durable` ascending): all except the newest max(2, keep), the multiples of keep_every, the
/// protected one and, with keep_best, `best`.
std::vector<std::int64_t> expired(const std::vector<std::int64_t>& durable, const Settings& settings,
                                  std::int64_t best = -1);

/// Every *.abandoned, in the order of steps; empty if the directory does not exist.
std::vector<std::filesystem::path> abandoned_in(const std::filesystem::path& directory);

/// The abandoned checkpoints to delete. They count as older than the `n_durable` checkpoints of the run: the
/// newest max(2, keep) of all together are kept.
std::vector<std::filesystem::path> expired_abandoned(const std::filesystem::path& directory, std::size_t n_durable,
                                                     const Settings& settings);

}  // namespace weft::checkpoint
