// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/starts.hpp"

#include <fcntl.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "base/file.hpp"
#include "report/ownership.hpp"
#include "storage/durable.hpp"

namespace weft::checkpoint {
namespace {

constexpr int kStartsAllowed = 2;

void append(const std::filesystem::path& path, const nlohmann::json& line) {
  report::require_ownership();
  write_all(open_own(path, O_WRONLY | O_CREAT | O_APPEND), line.dump() + '\n', path);
}

}  // namespace

Starts::Starts(std::filesystem::path run_directory) : path_(std::move(run_directory) / "starts.jsonl") {}

void Starts::begin(std::int64_t step, bool ignore) {
  int silent = 0;  // consecutive starts from this step without an end
  constexpr std::int64_t kLargestFile = std::int64_t{64} << 20;
  std::istringstream file(std::filesystem::exists(path_) ? storage::read_text(path_, kLargestFile) : "");
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

void Starts::end(std::int64_t step) { append(path_, {{"end", step}}); }

}  // namespace weft::checkpoint
