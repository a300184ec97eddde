// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/scrub.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/progress.hpp"
#include "checkpoint/checkpoint_directory.hpp"
#include "checkpoint/manifest.hpp"
#include "parallel/failure.hpp"
#include "storage/digest.hpp"
#include "storage/durable.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr double kBytesPerSecond = 100e6;

/// A hint: the next reads come from the disk.
void forget_cached(const fs::path& path, std::int64_t begin, std::int64_t bytes) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return;
  ::posix_fadvise(file, begin, bytes, POSIX_FADV_DONTNEED);
  ::close(file);
}

/// Thrown when the scrub ends in the middle of a checkpoint.
struct Ended {};

/// A difference from what the manifest says, as opposed to a failure to read.
struct Damage {
  std::string what;
};

}  // namespace

Scrub::Scrub(fs::path directory, double seconds)
    : directory_(std::move(directory)), seconds_(seconds), thread_([this] { run(); }) {}

Scrub::~Scrub() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Scrub::Result Scrub::result() const {
  const std::lock_guard lock(mutex_);
  return result_;
}

bool Scrub::wait(double seconds) {
  std::unique_lock lock(mutex_);
  return !changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return ended_; });
}

void Scrub::run() {
  constexpr int kLowestPriority = 19;
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), kLowestPriority);  // priority of this thread only
  ignore_progress_of_this_thread();
  try {
    while (wait(seconds_)) pass();
  } catch (const Ended&) {
  }
}

void Scrub::pass() {
  std::vector<std::int64_t> steps;
  if (const auto failure = parallel::attempt([&] { steps = steps_in(directory_); })) {
    log::warning("{}: checkpoint.scrub: cannot be listed ({})", directory_.string(), failure->message);
    return;
  }
  std::int64_t good = 0;
  for (const std::int64_t step : steps) {
    const fs::path path = directory_ / directory_name(step);
    std::string damage, unread;
    try {
      verify(path);
      ++good;
    } catch (const Damage& damaged) {
      damage = damaged.what;
    } catch (const Ended&) {
      throw;
    } catch (...) {
      unread = parallel::current_failure().message;
    }
    if (damage.empty() && unread.empty()) continue;
    std::error_code ignored;
    if (!fs::exists(path, ignored)) continue;  // replaced by newer ones in the meantime
    const std::string line = path.filename().string() + ": " + (damage.empty() ? unread : damage);
    const std::lock_guard lock(mutex_);
    std::vector<std::string>& list = damage.empty() ? result_.unreadable : result_.damaged;
    if (std::find(list.begin(), list.end(), line) != list.end()) continue;
    list.push_back(line);
    if (damage.empty())
      log::warning("{}: cannot be verified, {} (checkpoint.scrub); training continues", path.string(), unread);
    else
      log::warning("{}: is damaged, {} (checkpoint.scrub); it stays until newer ones replace it", path.string(),
                   damage);
  }
  const std::lock_guard lock(mutex_);
  ++result_.passes;
  result_.checkpoints += good;
  if (good > 0) log::info("checkpoint.scrub: {} checkpoint{} verified", good, good == 1 ? "" : "s");
}

void Scrub::verify(const fs::path& directory) {
  const std::string text = storage::read_text(directory / kManifestName, kLargestManifest);
  Manifest manifest;
  try {
    manifest = parse(text);
  } catch (const Error& failure) {
    throw Damage{std::string(kManifestName) + ": " + failure.what()};
  }
  for (const ShardEntry& shard : manifest.shards) {
    const fs::path path = directory / shard.file;
    if (!fs::is_regular_file(path)) throw Damage{"shard " + shard.file + " is missing"};
    if (const auto size = static_cast<std::int64_t>(fs::file_size(path)); size != shard.bytes)
      throw Damage{fmt::format("shard {} has {} bytes, its manifest says {}", shard.file, size, shard.bytes)};
    for (std::size_t i = 0; i < shard.sha256.size(); ++i) {
      const std::int64_t begin = static_cast<std::int64_t>(i) * storage::kDigestSegment,
                         bytes = std::min(storage::kDigestSegment, shard.bytes - begin);
      forget_cached(path, begin, bytes);
      const auto segment = static_cast<std::int64_t>(i);
      if (storage::sha256_segments(path, shard.bytes, segment, segment + 1, 1).front() != shard.sha256[i])
        throw Damage{
            fmt::format("shard {} differs from its sha256 between byte {} and {}", shard.file, begin, begin + bytes)};
      forget_cached(path, begin, bytes);  // keeps the page cache free for the training data
      {
        const std::lock_guard lock(mutex_);
        result_.bytes += bytes;
      }
      if (!wait(static_cast<double>(bytes) / kBytesPerSecond)) throw Ended{};
    }
  }
}

}  // namespace weft::checkpoint
