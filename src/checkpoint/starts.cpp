// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/starts.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <sstream>
#include <utility>

#include "base/json.hpp"
#include "storage/durable.hpp"
#include "storage/ownership.hpp"

namespace weft::checkpoint {
namespace {

constexpr std::size_t kDeathsAllowed = 2;

/// The number with a fixed width, so that a later number replaces it in place.
std::string padded(std::int64_t step) { return fmt::format("{:>19}", step); }

std::int64_t integer(const Json& line, const char* name) {
  const auto found = line.find(name);
  return found != line.end() && found->is_number_integer() ? found->get<std::int64_t>() : -1;
}

double number(const Json& line, const char* name) {
  const auto found = line.find(name);
  return found != line.end() && found->is_number() ? found->get<double>() : -1;
}

}  // namespace

Starts::Starts(const std::filesystem::path& run_directory) : path_(run_directory / "starts.jsonl") {
  constexpr std::int64_t kLargestFile = std::int64_t{64} << 20;
  std::istringstream file(std::filesystem::exists(path_) ? storage::read_text(path_, kLargestFile) : "");
  for (std::string text; std::getline(file, text);) {
    torn_ = file.eof();
    const Json line = parse_json(text);
    if (!line.is_object()) continue;
    if (const std::int64_t step = integer(line, "start"); step >= 0) {
      Start& start = starts_.emplace_back();
      start.step = step;
      start.reached = integer(line, "reached");
      if (const auto resume = line.find("resume"); resume != line.end() && resume->is_string())
        start.resume = resume->get<std::string>();
    } else if (!starts_.empty() && (line.contains("end") || line.contains("failed"))) {
      starts_.back().ended = true;
    } else if (line.contains("checkpoint")) {
      const double duration = number(line, "seconds"), delay = number(line, "delay");
      if (duration > 0 && delay >= 0) cost_ = {.duration = duration, .delay = delay, .measured = true};
    }
  }
}

std::string Starts::last_resume() const { return starts_.empty() ? "auto" : starts_.back().resume; }

void Starts::append(const std::string& line) {
  storage::require_ownership();
  if (file_ < 0) file_ = open_own(path_, O_WRONLY | O_CREAT);
  if (lseek(file_, 0, SEEK_END) < 0) fail_with_errno(path_, "writing");
  const std::string text = (torn_ ? "\n" : "") + line + "\n";
  torn_ = true;  // unless the whole line is written
  write_all(file_, text, path_);
  torn_ = false;
}

void Starts::failed(std::int64_t number, int code) {
  if (starts_.empty() || starts_.back().ended || number != static_cast<std::int64_t>(starts_.size())) return;
  append(fmt::format(R"({{"failed":{},"code":{}}})", starts_.back().reached, code));
  starts_.back().ended = true;
}

std::int64_t Starts::begin(std::int64_t step, const std::string& resume, bool ignore) {
  std::size_t deaths = 0;  // deaths of the last starts, all from `step` and at one step
  for (std::size_t i = starts_.size(); i-- > 0; ++deaths) {
    const Start& start = starts_[i];
    if (start.ended || start.step != step || start.reached < 0 || start.reached != starts_.back().reached) break;
  }
  if (deaths >= kDeathsAllowed && !ignore)
    throw error(ExitCode::no_progress,
                "the last {} starts of this run began at step {} and died at step {} without a message (see log.txt; "
                "requeueing would repeat this); find the cause, then start once with --set "
                "resume.ignore_no_progress=true",
                deaths, step, starts_.back().reached);
  std::string line = fmt::format(R"({{"start":{},)", step);
  if (resume != "auto") line += fmt::format(R"("resume":{},)", json_text(Json(resume)));
  line += R"("reached":)";
  append(line + padded(step) + "}");
  reached_at_ = lseek(file_, 0, SEEK_CUR) - static_cast<off_t>(padded(step).size() + 2);
  starts_.push_back({step, step, resume, false});
  return static_cast<std::int64_t>(starts_.size());
}

void Starts::reached(std::int64_t step) noexcept {
  if (reached_at_ < 0) return;
  char text[24];
  const auto end = fmt::format_to_n(text, sizeof text, "{:>19}", step);
  if (pwrite(file_, text, end.size, reached_at_) < 0) return;  // only makes the history less precise
}

void Starts::note_checkpoint(std::int64_t step, const Cost& cost) {
  append(json_text(Json{{"checkpoint", step}, {"seconds", cost.duration}, {"delay", cost.delay}}));
  cost_ = cost;
}

void Starts::note_changes(const std::string& changed_json) { append("{\"changed\":" + changed_json + "}"); }

void Starts::end(std::int64_t step) { append(fmt::format(R"({{"end":{}}})", step)); }

}  // namespace weft::checkpoint
