// SPDX-License-Identifier: Apache-2.0
#include "commands/report/facts.hpp"

#include <fmt/chrono.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>

#include "checkpoint/directory.hpp"
#include "storage/durable.hpp"

namespace weft::commands {
namespace {

namespace fs = std::filesystem;
using checkpoint::Manifest;
using report::Json;

constexpr std::int64_t kLargestText = std::int64_t{64} << 20;
constexpr std::int64_t kLargestInput = std::int64_t{1} << 20;
constexpr std::size_t kMostStarts = 10'000;
constexpr std::size_t kMostCheckpoints = 50;
constexpr std::size_t kMostNumbers = 256;

Json read_json(const fs::path& path) {
  const std::string text = storage::read_text(path, kLargestText);
  Json json = parse_json(text);
  return json.is_discarded() ? Json() : json;
}

/// A JSON file that a run directory may or may not have.
Json optional_json(const fs::path& path, const char* required, std::vector<std::string>& notes) {
  if (!fs::exists(path)) return nullptr;
  try {
    Json json = read_json(path);
    if (json.is_object() && json.contains(required)) return json;
    notes.push_back(fmt::format("{} has no \"{}\"; it was left out", path.filename().string(), required));
  } catch (const Error& failure) {
    notes.push_back(fmt::format("{}; it was left out", failure.what()));
  }
  return nullptr;
}

std::vector<StartFact> read_starts(const fs::path& path) {
  std::vector<StartFact> starts;
  for_each_line(path, [&](std::string_view text) {
    const Json line = parse_json(text);
    const double begin = number(member(line, {"start"})), end = number(member(line, {"end"}));
    if (begin >= 0) {
      if (starts.size() == kMostStarts) starts.erase(starts.begin());
      starts.push_back({static_cast<std::int64_t>(std::min(begin, 1e15)), -1, nullptr});
    } else if (end >= 0 && !starts.empty()) {
      starts.back().end = static_cast<std::int64_t>(std::min(end, 1e15));
    } else if (member(line, {"changed"}).is_object() && !starts.empty()) {
      starts.back().changed = line["changed"];
    }
  });
  return starts;
}

std::string written_at(const fs::path& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return "";
  return fmt::format("{:%Y-%m-%d %H:%M:%S}", fmt::gmtime(status.st_mtime));
}

CheckpointFact describe_checkpoint(const fs::path& directory, std::int64_t step) {
  CheckpointFact fact;
  fact.step = step;
  const fs::path manifest_path = directory / checkpoint::kManifestName;
  fact.written = written_at(manifest_path);
  try {
    const Manifest manifest = checkpoint::parse(storage::read_text(manifest_path, checkpoint::kLargestManifest));
    for (const checkpoint::ShardEntry& shard : manifest.shards) fact.bytes += shard.bytes;
    fact.grid = checkpoint::to_text(manifest.grid);
  } catch (const checkpoint::NewerFormat&) {
    fact.problem = "its format is newer than this program";
  } catch (const Error& failure) {
    fact.problem = failure.what();
  }
  return fact;
}

/// Steps of the checkpoints, ascending; empty when the directory cannot be listed.
std::vector<std::int64_t> steps_in(const fs::path& directory) {
  try {
    return checkpoint::steps_in(directory);
  } catch (const fs::filesystem_error&) {
    return {};
  }
}

/// The newest valid checkpoint. Collective; the same answer on every rank.
std::optional<checkpoint::Found> newest_valid(const fs::path& directory, const parallel::World& world,
                                              std::string& problem) {
  const std::string listed = world.on_root([&] {
    std::string text;
    for (const std::int64_t step : steps_in(directory)) text += std::to_string(step) + " ";
    return text;
  });
  std::vector<std::int64_t> steps;
  for (std::size_t begin = 0, end; (end = listed.find(' ', begin)) != std::string::npos; begin = end + 1)
    steps.push_back(std::stoll(listed.substr(begin, end - begin)));
  problem = "the run has no checkpoint yet";
  for (std::size_t i = steps.size(); i-- > 0;) {
    try {
      return checkpoint::open(world.all(), directory / checkpoint::directory_name(steps[i]), checkpoint::Verify::full);
    } catch (const Error& failure) {
      if (failure.code() != ExitCode::io) throw;
      if (i + 1 == steps.size()) problem = failure.what();  // of the newest one
    }
  }
  return std::nullopt;
}

}  // namespace

RunFacts read_files(const fs::path& path) {
  if (!fs::is_directory(path))
    throw error(ExitCode::usage, "{}: {}; name the directory of a run (run.output)", path.string(),
                fs::exists(path) ? "not a directory" : "no such directory");
  if (!fs::exists(path / "run.json"))
    throw error(ExitCode::usage,
                "{}: not a run directory (run.json is missing; weft train writes it); name the directory of a run",
                path.string());
  RunFacts facts;
  facts.path = path;
  facts.record = read_json(path / "run.json");
  if (!facts.record.is_object() || !facts.record.contains("exit"))
    throw error(ExitCode::data, "{}: not the record of a run (no JSON object with \"exit\"); is it damaged?",
                (path / "run.json").string());
  facts.benchmark = optional_json(path / "benchmark.json", "cases", facts.notes);
  facts.evaluation = optional_json(path / "evaluation.json", "validation", facts.notes);
  if (fs::exists(path / "input.toml")) try {
      facts.input = storage::read_text(path / "input.toml", kLargestInput);
    } catch (const Error& failure) {
      facts.notes.push_back(failure.what());
    }
  facts.curves = read_curves(path / "metrics.jsonl");
  if (facts.curves.unreadable > 0)
    facts.notes.push_back(fmt::format("metrics.jsonl: {} of {} lines are not records; they were left out",
                                      facts.curves.unreadable, facts.curves.records));
  facts.starts = read_starts(path / "starts.jsonl");
  const std::vector<std::int64_t> steps = steps_in(path / "checkpoints");
  facts.checkpoints_kept = static_cast<std::int64_t>(steps.size());
  for (std::size_t i = steps.size() - std::min(steps.size(), kMostCheckpoints); i < steps.size(); ++i)
    facts.checkpoints.push_back(
        describe_checkpoint(path / "checkpoints" / checkpoint::directory_name(steps[i]), steps[i]));
  return facts;
}

const Json& member(const Json& json, std::initializer_list<const char*> names) {
  static const Json nothing;
  const Json* at = &json;
  for (const char* name : names) {
    if (!at->is_object()) return nothing;
    const auto found = at->find(name);
    if (found == at->end()) return nothing;
    at = &*found;
  }
  return *at;
}

double number(const Json& json) {
  if (!json.is_number()) return kNoNumber;
  const double value = json.get<double>();
  constexpr double kLargest = 1e100;  // beyond it, sums and axes would overflow
  return std::abs(value) < kLargest ? value : kNoNumber;
}

std::vector<double> numbers(const Json& json) {
  std::vector<double> values;
  if (json.is_array())
    for (std::size_t i = 0; i < json.size() && i < kMostNumbers; ++i) values.push_back(number(json[i]));
  return values;
}

std::string text_of(const Json& json) {
  if (json.is_string()) return json.get<std::string>();
  if (json.is_null()) return "";
  return report::to_text(json);
}

std::string name_of(const fs::path& path) {
  fs::path normal = path.lexically_normal();
  if (!normal.has_filename()) normal = normal.parent_path();
  return normal.filename().empty() || normal.filename() == "." ? path.string() : normal.filename().string();
}

RunFacts gather_facts(const fs::path& path, const parallel::World& world) {
  RunFacts facts;
  world.on_root([&]() -> std::string {
    facts = read_files(path);
    return {};
  });
  facts.alone = std::make_shared<const parallel::Communicator>(world.all().split(world.rank(), 0));
  facts.newest = newest_valid(path / "checkpoints", world, facts.newest_problem);
  return facts;
}

}  // namespace weft::commands
