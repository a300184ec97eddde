// SPDX-License-Identifier: Apache-2.0
#include "parallel/watchdog.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <mutex>
#include <set>
#include <utility>

#include "base/fault.hpp"
#include "parallel/nccl.hpp"

namespace weft::parallel {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLookEvery = std::chrono::milliseconds(200);
constexpr auto kPublishEvery = std::chrono::milliseconds(500);
/// Age in seconds above which a record is stale: its process does not run. Clocks of nodes may differ by less.
constexpr long long kOldRecord = 2;

/// Record of one rank in the file. Of fixed width, so that ranks write without coordination.
struct Record {
  char text[128];
};

/// The last published state of a rank.
struct Entry {
  long long time = 0, step = 0;
  unsigned long long progress = 0;
  char host[sizeof(Record)] = "", phase[sizeof(Record)] = "";
};

/// False if this rank has published nothing yet.
bool read_entry(int file, int rank, Entry& entry) {
  Record record{};
  if (::pread(file, &record, sizeof record, rank * static_cast<off_t>(sizeof record)) <= 0) return false;
  record.text[sizeof record.text - 1] = '\0';
  return std::sscanf(record.text, "%lld\t%lld\t%llu\t%127[^\t]\t%127[^\t]", &entry.time, &entry.step, &entry.progress,
                     entry.host, entry.phase) == 5;
}

std::atomic<std::int64_t> present_step{0};
std::atomic<const char*> present_phase{"starting"};
std::atomic<std::uint64_t> progress{0};

/// The same pointer for equal names, valid until the process ends: the monitoring thread may read it at any time.
const char* interned(std::string_view name) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> names;
  const std::lock_guard lock(mutex);
  const auto found = names.find(name);
  return (found != names.end() ? found : names.emplace(name).first)->c_str();
}

}  // namespace

void note_step(std::int64_t step) {
  present_step = step;
  fault::note_step(step);
  ++progress;
}

void note_progress() { ++progress; }

void note_phase(std::string_view phase) {
  present_phase = interned(phase);
  ++progress;
}

Watchdog::Watchdog(const World& world, std::filesystem::path file, double timeout)
    : world_(world), path_(std::move(file)), timeout_(timeout) {
  if (timeout <= 0) return;
  file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (file_ < 0) throw error(ExitCode::io, "{}: cannot be opened ({})", path_.string(), std::strerror(errno));
  publish(0, "starting");
  thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  if (file_ < 0) return;
  ended_ = true;
  thread_.join();
  ::close(file_);
}

void Watchdog::publish(std::int64_t step, const char* phase) const {
  Record record{};
  std::snprintf(record.text, sizeof record.text, "%lld\t%lld\t%llu\t%s\t%s", static_cast<long long>(std::time(nullptr)),
                static_cast<long long>(step), static_cast<unsigned long long>(progress), world_.host().c_str(), phase);
  // A failed write is ignored: it only makes a later message less precise.
  if (::pwrite(file_, &record, sizeof record, world_.rank() * static_cast<off_t>(sizeof record)) < 0) return;
}

std::uint64_t Watchdog::job_progress() const {
  std::uint64_t sum = 0;
  for (int rank = 0; rank < world_.size(); ++rank)
    if (Entry entry; read_entry(file_, rank, entry)) sum += entry.progress;
  return sum;
}

std::string Watchdog::diagnosis(double silent) const {
  // The cause is a rank with a stale record, else the rank with the fewest steps.
  int cause = world_.rank();
  long long least = present_step, now = std::time(nullptr);
  bool cause_is_old = false;
  std::string host = world_.host(), phase = present_phase.load();
  for (int rank = 0; rank < world_.size(); ++rank) {
    Entry entry;
    if (!read_entry(file_, rank, entry)) continue;
    const bool old = now - entry.time > kOldRecord;
    if (old < cause_is_old || (old == cause_is_old && entry.step >= least)) continue;
    cause = rank;
    cause_is_old = old;
    least = entry.step;
    host = entry.host;
    phase = entry.phase;
  }
  // The last record of a dead rank may be many short steps old. Ranks are in step: it died where this rank waits.
  if (cause_is_old) least = std::max<long long>(least, present_step);
  return fmt::format(
      "rank {} on {}: no progress for {:.0f} s in \"{}\", at step {} ({}); ending the job; a restart resumes from the "
      "newest checkpoint",
      cause, host, silent, phase, least,
      cause_is_old ? "dead or stopped: it does not respond" : "it responds, but makes no progress");
}

void Watchdog::watch() {
  std::uint64_t seen = progress;
  Clock::time_point since = Clock::now();
  Clock::time_point published{};
  // The records of the other ranks are read only after half the timeout without progress here, and again at its end.
  const auto half = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_ / 2));
  std::uint64_t all_seen = 0;
  bool looked = false;
  while (!ended_) {
    std::this_thread::sleep_for(kLookEvery);
    if (Clock::now() - published > kPublishEvery) {
      publish(present_step, present_phase);
      published = Clock::now();
    }
    // NCCL may report a lost peer of another node long before the timeout.
    if (const std::string lost = nccl::failure(); !lost.empty())
      end_job(ExitCode::communication,
              fmt::format("rank {} on {}: {}, in \"{}\" at step {}; ending the job; a restart resumes from the newest "
                          "checkpoint",
                          world_.rank(), world_.host(), lost, present_phase.load(), present_step.load()));
    if (const std::uint64_t now = progress; now != seen) {
      seen = now;
      since = Clock::now();
      looked = false;
      continue;
    }
    const double silent = std::chrono::duration<double>(Clock::now() - since).count();
    if (silent >= timeout_ / 2 && !std::exchange(looked, true)) all_seen = job_progress();
    if (silent < timeout_) continue;
    if (const std::uint64_t now = job_progress(); now != all_seen) {
      all_seen = now;
      since = Clock::now() - half;
      continue;
    }
    end_job(ExitCode::communication, diagnosis(silent));
  }
}

}  // namespace weft::parallel
