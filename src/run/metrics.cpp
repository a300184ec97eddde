// SPDX-License-Identifier: Apache-2.0
#include "run/metrics.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "base/contract.hpp"
#include "base/log.hpp"
#include "storage/ownership.hpp"

namespace weft::run {
namespace {

namespace fs = std::filesystem;

constexpr int kFlags = O_RDWR | O_CREAT | O_APPEND;
constexpr std::streamsize kLongestLine = 1 << 20;  // longer lines are invalid

std::optional<std::int64_t> step_of(const char* line) {
  const Json record = parse_json(line);
  if (!record.is_object() || !record.contains("step") || !record["step"].is_number_integer()) return std::nullopt;
  return record["step"].get<std::int64_t>();
}

/// The lines of steps <= last.
struct Kept {
  std::int64_t end = 0;            ///< bytes up to the end of the last one
  std::int64_t damaged = 0;        ///< lines before `end` that are none
  std::int64_t first_damaged = 0;  ///< number of the first such line, from 1
};

/// Calls `use(text)` with each kept line, without its end.
template <class Use>
Kept for_each_kept(const fs::path& path, std::int64_t last, Use&& use) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> line(static_cast<std::size_t>(kLongestLine));
  Kept kept;
  std::int64_t offset = 0, pending = 0, first_pending = 0;
  for (std::int64_t number = 1; file.getline(line.data(), kLongestLine) || file.gcount() > 0; ++number) {
    if (file.eof()) break;  // a line without end was left by a kill
    offset += file.gcount();
    const bool whole = !file.fail();
    if (!whole) {
      file.clear();
      file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
      offset += file.gcount();
    }
    const std::optional<std::int64_t> step = whole ? step_of(line.data()) : std::nullopt;
    if (!step || *step > last) {
      if (pending++ == 0) first_pending = number;
      continue;
    }
    if (kept.damaged == 0) kept.first_damaged = first_pending;
    kept.damaged += std::exchange(pending, 0);
    kept.end = offset;
    use(line.data());
  }
  return kept;
}

/// Removes everything but the valid lines of steps <= last. True if the file was replaced by another one.
bool repair(const fs::path& path, const Descriptor& file, std::int64_t last) {
  Kept kept;
  if (last >= 0) kept = for_each_kept(path, last, [](const char*) {});
  if (ftruncate(file, kept.end) != 0) fail_with_errno(path, "truncating");
  if (kept.damaged == 0) return false;
  log::warning("{}: {} damaged line{} removed, the first is line {}; the records around them are kept", path.string(),
               kept.damaged, kept.damaged == 1 ? "" : "s", kept.first_damaged);
  std::string text;
  for_each_kept(path, last, [&](const char* line) { text.append(line) += '\n'; });
  try {
    storage::write_json_text(path, text);
    return true;
  } catch (const Error& unwritten) {
    log::warning("{}; the damaged lines stay", unwritten.what());
    return false;
  }
}

}  // namespace

MetricsWriter::MetricsWriter(const fs::path& path, std::int64_t resumed_step)
    : path_(path), file_(open_own(path, kFlags)) {
  // Only a regular file can be truncated; a device is only written to.
  if (fs::is_regular_file(path) && repair(path, file_, resumed_step)) file_ = open_own(path, kFlags);
}

MetricsWriter::~MetricsWriter() {
  const int reason = storage::owns_run_directory() ? flush() : 0;
  if (const auto missing = lost_ + std::count(unwritten_.begin(), unwritten_.end(), '\n'); missing > 0)
    log::warning("{}: {} record{} missing, they could not be written{}", path_.string(), missing,
                 missing == 1 ? " is" : "s are", reason != 0 ? fmt::format(" ({})", std::strerror(reason)) : "");
}

int MetricsWriter::flush() {
  while (!unwritten_.empty()) {
    const ssize_t n = ::write(file_, unwritten_.data(), unwritten_.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    unwritten_.erase(0, static_cast<std::size_t>(n));
  }
  return 0;
}

void MetricsWriter::write(const Json& record) {
  WEFT_ASSERT(record.contains("step"));
  const std::string line = finite_json_text(record) + "\n";
  if (unwritten_.size() + line.size() <= kMostUnwritten)
    unwritten_ += line;
  else
    ++lost_;
  storage::require_ownership();
  const int reason = flush();
  if (reason != 0 && !failing_)
    log::warning("{}: cannot be written ({}); training continues, records stay in memory and are written later",
                 path_.string(), std::strerror(reason));
  if (reason == 0 && failing_) log::info("{}: can be written again", path_.string());
  failing_ = reason != 0;
}

}  // namespace weft::run
