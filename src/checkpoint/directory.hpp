// SPDX-License-Identifier: Apache-2.0
//
// The names inside checkpoints/: step_XXXXXXXX is a checkpoint, *.tmp is a write or a deletion that did not end,
// step_XXXXXXXX.abandoned belongs to a course of the run that was given up, `latest` is a hint for people.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/settings.hpp"

namespace weft::checkpoint {

constexpr const char* kLatestName = "latest";

/// The step in "step_00001200"; -1 for any other name.
std::int64_t step_of(const std::string& name);

/// Steps of the checkpoints in a directory, valid or not, ascending; empty when it does not exist.
std::vector<std::int64_t> steps_in(const std::filesystem::path& directory);

/// Removes every *.tmp and says so.
void remove_leftovers(const std::filesystem::path& directory);

/// Renames a checkpoint to *.abandoned and says so.
void set_aside(const std::filesystem::path& step_directory);

/// Which of these (ascending) may go: all but the newest max(2, keep) and the multiples of keep_every.
std::vector<std::int64_t> expired(const std::vector<std::int64_t>& durable, const Settings& settings);

}  // namespace weft::checkpoint
