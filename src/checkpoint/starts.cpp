// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/starts.hpp"

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "base/error.hpp"

namespace weft::checkpoint {
namespace {

constexpr int kStartsAllowed = 2;

void append(const std::filesystem::path& path, const nlohmann::json& line) {
  std::ofstream file(path, std::ios::app);
  file << line.dump() << '\n' << std::flush;
  if (!file) throw error(ExitCode::io, "{}: cannot be written (disk full, or no permission?)", path.string());
}

}  // namespace

Starts::Starts(std::filesystem::path run_directory) : path_(std::move(run_directory) / "starts.jsonl") {}

void Starts::begin(std::int64_t step, bool ignore) {
  int silent = 0;  // consecutive starts from this step without an end
  std::ifstream file(path_);
  for (std::string text; std::getline(file, text);) {
    const nlohmann::json line = nlohmann::json::parse(text, nullptr, false);
    if (!line.is_object()) continue;
    if (line.contains("end"))
      silent = 0;
    else if (line.contains("start") && line["start"].is_number_integer())
      silent = line["start"].get<std::int64_t>() == step ? silent + 1 : 1;
  }
  if (silent >= kStartsAllowed && !ignore)
    throw error(
        ExitCode::no_progress,
        "the last {} starts of this run began at step {} and ended without a checkpoint or a message (see log.txt; "
        "requeueing would repeat this); find the cause, then start once with --set resume.ignore_no_progress=true",
        silent, step);
  append(path_, {{"start", step}});
}

void Starts::note_checkpoint(std::int64_t step, const Cost& cost) {
  append(path_, {{"checkpoint", step}, {"seconds", cost.duration}, {"delay", cost.delay}});
}

std::optional<Cost> Starts::last_cost() const {
  std::optional<Cost> cost;
  std::ifstream file(path_);
  for (std::string text; std::getline(file, text);) {
    const nlohmann::json line = nlohmann::json::parse(text, nullptr, false);
    if (!line.is_object() || !line.contains("checkpoint")) continue;
    const auto number = [&](const char* key) {
      return line.contains(key) && line[key].is_number() ? line[key].get<double>() : -1;
    };
    const double duration = number("seconds"), delay = number("delay");
    if (duration > 0 && delay >= 0) cost = {.duration = duration, .delay = delay, .measured = true};
  }
  return cost;
}

void Starts::end(std::int64_t step) { append(path_, {{"end", step}}); }

}  // namespace weft::checkpoint
