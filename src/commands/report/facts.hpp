// SPDX-License-Identifier: Apache-2.0
//
// The contents of a run directory, for any model: the input of `weft report`. Files are only read, and the
// run may still be active. They are not trusted: texts are bounded before they are read, long files are thinned while
// they are read, and no size is taken from a file without a check against the bytes that exist.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/resume.hpp"
#include "commands/report/curves.hpp"
#include "parallel/world.hpp"
#include "report/json.hpp"

namespace weft::commands {

/// One start of the run, from starts.jsonl.
struct StartFact {
  std::int64_t begin = 0;
  std::int64_t end = -1;           ///< -1: no orderly end was recorded
  report::Json changed = nullptr;  ///< key -> [before, after]: keys that differ from those of the start before
};

/// A checkpoint as its manifest describes it; shards are not opened.
struct CheckpointFact {
  std::int64_t step = 0;
  std::int64_t bytes = 0;
  std::string grid;     ///< that wrote it: "data 1 x feature 4"
  std::string written;  ///< UTC
  std::string problem;  ///< why its manifest cannot be used; "": it can
};

struct RunFacts {
  std::filesystem::path path;
  report::Json record;      ///< run.json
  report::Json benchmark;   ///< benchmark.json of the same directory; null: none
  report::Json evaluation;  ///< evaluation.json of the same directory; null: none
  std::string input;        ///< input.toml; "" = none
  Curves curves;
  std::vector<StartFact> starts;
  std::vector<CheckpointFact> checkpoints;              ///< the newest ones, ascending
  std::int64_t checkpoints_kept = 0;                    ///< all of them
  std::optional<checkpoint::Found> newest;              ///< the newest valid checkpoint, verified
  std::string newest_problem;                           ///< why there is none
  std::shared_ptr<const parallel::Communicator> alone;  ///< of this process, to read it
  std::vector<std::string> notes;                       ///< files that could not be used, and why
};

/// All facts but `newest` and `alone`: no checkpoint is read. Throws as `gather_facts`, but not collectively.
RunFacts read_files(const std::filesystem::path& path);

/// Collective; the facts are on rank 0. Throws a collective Error(usage) when `path` is not a run directory, and
/// Error(data) when its run.json is not the record of a run.
RunFacts gather_facts(const std::filesystem::path& path, const parallel::World&);

// Reading of JSON that may hold anything.

inline constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

/// The member at the end of a path of names; null when it does not exist.
const report::Json& member(const report::Json&, std::initializer_list<const char*> names);
/// A finite number below 1e100, else NaN.
double number(const report::Json&);
/// The last component of the path of a run; the path itself where there is none.
std::string name_of(const std::filesystem::path& path);
/// Array -> numbers, at most 256 (layers or bins); empty when it is not an array.
std::vector<double> numbers(const report::Json&);
/// A string as it is, null as "", anything else as JSON.
std::string text_of(const report::Json&);

/// Calls function(std::string_view) for the complete lines of a text file; a torn last one is left out. Stops at a line
/// longer than 1 MiB.
template <class Function>
void for_each_line(const std::filesystem::path& path, Function&& function) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> line(std::size_t{1} << 20);
  while (file.getline(line.data(), static_cast<std::streamsize>(line.size())) && !file.eof())
    function(std::string_view(line.data(), static_cast<std::size_t>(file.gcount()) - 1));
}

}  // namespace weft::commands
