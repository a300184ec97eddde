// SPDX-License-Identifier: Apache-2.0
//
// What the tests of checkpoint_test share: a temporary directory, the warnings of a rank, and checkpoints of `Sample`.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "checkpoint/checkpoint_writer.hpp"
#include "checkpoint/resume.hpp"
#include "tests/checkpoint/sample.hpp"
#include "tests/scratch.hpp"

namespace weft::checkpoint::testing {
namespace fs = std::filesystem;
using weft::testing::execution;
using weft::testing::Scratch;

inline const parallel::Communicator& world() { return weft::testing::world().all(); }
inline bool root() { return world().rank() == 0; }

/// Collects the warnings of this rank during its lifetime.
struct Warnings {
  std::vector<std::string> lines;
  Warnings() {
    log::set_sink([this](log::Level level, std::string_view line) {
      if (level != log::Level::info) lines.emplace_back(line);
    });
  }
  ~Warnings() {
    log::set_sink([](log::Level, std::string_view) {});
  }
  bool mention(const std::string& text) const {
    return std::any_of(lines.begin(), lines.end(),
                       [&](const std::string& line) { return line.find(text) != line.npos; });
  }
};

inline Settings settings_of(Staging staging = Staging::full, std::int64_t keep = 2, std::int64_t keep_every = 0) {
  Settings settings;
  settings.staging = staging;
  settings.keep = keep;
  settings.keep_every = keep_every;
  return settings;
}

/// Writes checkpoints of these steps with a new writer. Collective over `group`.
inline void write_steps(const parallel::Communicator& group, const fs::path& directory, Sample& sample,
                        std::vector<std::int64_t> steps, const Settings& settings = settings_of(),
                        const fs::path& resumed_from = {}) {
  Writer writer(group, directory, settings, sample.registry, execution(), resumed_from);
  for (const std::int64_t step : steps) {
    sample.fill(step);
    REQUIRE(writer.start(manifest_of(step)));
    sample.clear();  // the writer has its copy
    const auto report = writer.finish();
    REQUIRE(report);
    REQUIRE(report->durable);
    REQUIRE(report->bytes > 0);
    REQUIRE(writer.last_durable() == step);
  }
}

/// The exit code that `find` ends a run with.
inline ExitCode code_of_find(const fs::path& directory, const std::string& resume = "auto") {
  try {
    find(world(), directory, resume, Verify::full);
  } catch (const Error& failure) {
    CHECK(failure.known_to() == KnownTo::all_ranks);
    return failure.code();
  }
  return ExitCode::finished;
}

/// Collective: the barriers exclude concurrent changes by other ranks.
inline std::vector<std::string> names_in(const fs::path& directory) {
  world().barrier();
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  world().barrier();
  return names;
}

}  // namespace weft::checkpoint::testing
