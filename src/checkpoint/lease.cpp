// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/lease.hpp"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/fault.hpp"
#include "base/file.hpp"
#include "base/format.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/system.hpp"
#include "input/strings.hpp"
#include "parallel/failure.hpp"
#include "parallel/watchdog.hpp"
#include "storage/durable.hpp"
#include "storage/ownership.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kPrefix = "lease.";
constexpr std::size_t kMostDigits = 15;
constexpr std::size_t kBytes = 1024;  // more than any names take
constexpr std::int64_t kMostBytes = 1 << 16;
constexpr std::size_t kLongestName = 128;
constexpr std::size_t kTokenDigits = 32;
/// Seconds that an owner on this host has to end: processes outlive a killed launcher by a second or two.
constexpr double kGrace = 10;
constexpr double kLongestSeconds = 3600;

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

/// The text without control characters, which must not reach a terminal from a foreign file, and of limited length.
std::string plain(const std::string& text) {
  const std::string quoted = input::quoted(text, kLongestName);
  return quoted.substr(1, quoted.size() - 2);
}

// --- this process --------------------------------------------------------------------------------------------------

std::string first_line(const char* path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

struct ProcessStatus {
  char state = '?';
  std::int64_t start = 0;  // clock ticks since the boot
};

std::optional<ProcessStatus> status_of(std::int64_t process) {
  const std::string line = first_line(fmt::format("/proc/{}/stat", process).c_str());
  const std::size_t name_end = line.rfind(')');  // the name may contain anything
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));  // from field 3
  ProcessStatus status;
  fields >> status.state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  if (!(fields >> status.start)) return std::nullopt;
  return status;
}

std::string job_of_scheduler() {
  for (const char* name : {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID"})
    if (const char* value = std::getenv(name)) return fmt::format("{}={}", name, value);
  return {};
}

Owner this_process(double seconds) {
  Owner owner;
  owner.token = random_hex(kTokenDigits);
  owner.host = plain(host_name());
  owner.boot = first_line("/proc/sys/kernel/random/boot_id");
  std::error_code none;
  owner.pid_namespace = fs::read_symlink("/proc/self/ns/pid", none).string();
  owner.process = ::getpid();
  owner.process_start = status_of(owner.process).value_or(ProcessStatus{}).start;
  owner.job = plain(job_of_scheduler());
  owner.started = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  owner.seconds = seconds;
  return owner;
}

// --- other owners --------------------------------------------------------------------------------------------------

/// True if this process can look up the process of the owner: same host, boot and process namespace.
bool on_this_system(const Owner& owner, const Owner& mine) {
  return owner.process > 0 && !owner.boot.empty() && !owner.pid_namespace.empty() && owner.host == mine.host &&
         owner.boot == mine.boot && owner.pid_namespace == mine.pid_namespace;
}

bool process_is_gone(const Owner& owner) {
  if (::kill(static_cast<pid_t>(owner.process), 0) != 0 && errno == ESRCH) return true;
  const std::optional<ProcessStatus> status = status_of(owner.process);
  if (!status) return false;
  return status->state == 'Z' || status->state == 'X' || status->start != owner.process_start;
}

/// "process 1234 on node03 (SLURM_JOB_ID=77), started 2026-11-22T06:14:04Z, 0:12:34 ago"
std::string describe(const Owner& owner) {
  if (owner.token.empty()) return "an owner whose lease cannot be read";
  std::string text = fmt::format("process {} on {}", owner.process, plain(owner.host));
  if (!owner.job.empty()) text += fmt::format(" ({})", plain(owner.job));
  text += fmt::format(", started {}", plain(owner.started));
  std::tm started{};
  if (::strptime(owner.started.c_str(), "%Y-%m-%dT%H:%M:%SZ", &started) != nullptr)
    text +=
        fmt::format(", {} ago", format::duration(std::max(0.0, std::difftime(std::time(nullptr), ::timegm(&started)))));
  return text;
}

// --- the files -----------------------------------------------------------------------------------------------------

fs::path path_of(const fs::path& directory, std::int64_t fence) {
  return directory / fmt::format("{}{}", kPrefix, fence);
}

/// N of "lease.N"; 0 for any other name.
std::int64_t fence_of(const std::string& name) {
  if (!name.starts_with(kPrefix) || name.size() > kPrefix.size() + kMostDigits) return 0;
  std::int64_t fence = 0;
  for (const char c : name.substr(kPrefix.size())) {
    if (c < '0' || c > '9') return 0;
    fence = 10 * fence + (c - '0');
  }
  return fence > 0 && name == fmt::format("{}{}", kPrefix, fence) ? fence : 0;
}

/// The numbers of all leases in the directory, ascending.
std::vector<std::int64_t> fences_in(const fs::path& directory) {
  std::vector<std::int64_t> fences;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    if (const std::int64_t fence = fence_of(entry.path().filename().string()); fence > 0) fences.push_back(fence);
  std::sort(fences.begin(), fences.end());
  return fences;
}

/// The open lease; none if it does not exist. A file that another host deletes may be reported as stale once.
std::optional<Descriptor> open_lease(const fs::path& path, int flags) {
  for (int attempts = 3;; --attempts) {
    Descriptor file(::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (file >= 0) return file;
    if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
    if (errno != ESTALE || attempts == 0) fail_with_errno(path, "opening");
  }
}

/// The text of a lease; none if it does not exist.
std::optional<std::string> read_lease(const fs::path& path) {
  const std::optional<Descriptor> file = open_lease(path, O_RDONLY);
  if (!file) return std::nullopt;
  return storage::read_text(*file, path, kMostBytes);
}

/// The token is the first field, at a fixed place: it can be compared while other fields change.
bool has_token(const std::string& text, const std::string& token) {
  return text.starts_with(fmt::format("{{\"token\":\"{}\"", token));
}

void write_in_place(const Descriptor& file, const std::string& text, const fs::path& path) {
  write_at(file, text.data(), static_cast<std::int64_t>(text.size()), 0, path);
}

}  // namespace

Owner parse_owner(const std::string& text) {
  Owner owner;
  const Json json = parse_json(text);
  if (!json.is_object()) return owner;
  const auto string = [&](const char* key, std::string& to) {
    if (json.contains(key) && json[key].is_string()) to = json[key].get<std::string>();
  };
  const auto integer = [&](const char* key, std::int64_t& to) {
    if (json.contains(key) && json[key].is_number_integer()) to = json[key].get<std::int64_t>();
  };
  string("token", owner.token);
  string("host", owner.host);
  string("boot", owner.boot);
  string("pid_namespace", owner.pid_namespace);
  integer("process", owner.process);
  integer("process_start", owner.process_start);
  string("job", owner.job);
  string("started", owner.started);
  integer("renewals", owner.renewals);
  integer("resumed_fence", owner.resumed_fence);
  integer("resumed_step", owner.resumed_step);
  if (json.contains("seconds") && json["seconds"].is_number())
    owner.seconds = std::clamp(json["seconds"].get<double>(), 1.0, kLongestSeconds);
  owner.released = json.contains("released") && json["released"] == true;
  return owner;
}

std::string to_text(const Owner& owner) {
  std::string text = json_text(Json{{"token", owner.token},
                                    {"host", owner.host},
                                    {"boot", owner.boot},
                                    {"pid_namespace", owner.pid_namespace},
                                    {"process", owner.process},
                                    {"process_start", owner.process_start},
                                    {"job", owner.job},
                                    {"started", owner.started},
                                    {"seconds", owner.seconds},
                                    {"renewals", owner.renewals},
                                    {"released", owner.released},
                                    {"resumed_fence", owner.resumed_fence},
                                    {"resumed_step", owner.resumed_step}});
  text.resize(kBytes - 1, ' ');
  return text + '\n';
}

Lease::Lease(const parallel::Communicator& world, fs::path run_directory, const Settings& settings)
    : directory_(std::move(run_directory)) {
  for (;;) {
    std::int64_t acquired = 0;
    parallel::on_root(world, [&] { acquired = attempt(settings); });
    world.broadcast(&acquired, sizeof acquired);
    if (acquired != 0) break;
    parallel::note_progress();
    std::this_thread::sleep_for(std::chrono::duration<double>(std::min(0.5, settings.seconds / 20)));
  }
  mine_.token = world.broadcast(mine_.token);
  world.broadcast(&fence_, sizeof fence_);
  world.broadcast(&resumed_fence_, sizeof resumed_fence_);
  world.broadcast(&resumed_step_, sizeof resumed_step_);
  if (world.rank() == 0) thread_ = std::thread([this] { renew(); });
}

Lease::~Lease() {
  if (!thread_.joinable()) return;
  // MPI_Abort may end the program, and with it static objects, from any thread.
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    mine_.released = true;
  }
  wake_.notify_all();
  thread_.join();
  try {
    rewrite(true);
  } catch (const std::exception& failure) {
    log::warning("{}: cannot be released ({})", path_of(directory_, fence_).string(), failure.what());
  }
}

/// One check of the directory by a contender. True if it has acquired the lease; false: check again. Throws Error(io).
bool Lease::attempt(const Settings& settings) {
  if (mine_.token.empty()) mine_ = this_process(settings.seconds);
  const std::vector<std::int64_t> fences = fences_in(directory_);
  if (fences.empty()) return create(1);
  const std::int64_t fence = fences.back();
  const Clock::time_point now = Clock::now();  // before the lease is read: a pause after it must not count as silence
  const std::optional<std::string> text = read_lease(path_of(directory_, fence));
  if (!text) return false;
  const Owner owner = parse_owner(*text);

  if (!waiting_ || fence != seen_fence_ || *text != seen_) {
    renewed_ = waiting_ && fence == seen_fence_ && !owner.token.empty() && parse_owner(seen_).token == owner.token;
    if (!std::exchange(waiting_, true)) waiting_since_ = now;
    seen_fence_ = fence;
    seen_ = *text;
    seen_since_ = Clock::now();
  }
  const bool here = on_this_system(owner, mine_);
  const double silence = owner.token.empty() ? settings.seconds : owner.seconds;
  const double grace = std::min(kGrace, settings.seconds);
  std::string why;
  if (owner.released) {
    taken_over_from_.clear();
  } else if (here && process_is_gone(owner)) {
    why = "that process does not exist any more";
  } else if (settings.take_over) {
    why = "--take-over";
  } else if (!here && seconds(now - seen_since_) >= silence) {
    why = fmt::format("its lease was not renewed for {:g} s", silence);
  } else if ((here || renewed_) && seconds(now - waiting_since_) >= grace) {
    throw error(ExitCode::io,
                "{}: belongs to another run: {} (two runs in one directory would overwrite each other's files); wait "
                "until it has ended, choose another --output, or take the directory over with --take-over",
                directory_.string(), describe(owner));
  } else {
    if (!std::exchange(announced_, true))
      log::info("{}: belongs to {}; waiting up to {:g} s {}", directory_.string(), describe(owner),
                here ? grace : silence, here ? "until it has ended" : "for a renewal of its lease");
    return false;
  }
  if (!why.empty()) taken_over_from_ = fmt::format("{} ({})", describe(owner), why);
  // The step that an earlier owner has recorded remains valid until this one records its own.
  mine_.resumed_fence = resumed_fence_ = owner.resumed_fence;
  mine_.resumed_step = resumed_step_ = owner.resumed_step;
  return create(fence + 1);
}

/// False if another contender was faster.
bool Lease::create(std::int64_t fence) {
  const fs::path path = path_of(directory_, fence);
  if (fence_of(path.filename().string()) == 0)
    throw error(ExitCode::io, "{}: no lease can have a higher number; remove it",
                path_of(directory_, fence - 1).string());
  Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file < 0 && errno == EEXIST) return false;
  if (file < 0) fail_with_errno(path, "creating");
  fault::point("lease-created");
  try {
    write_in_place(file, to_text(mine_), path);
    if (::fsync(file) != 0 || !file.close()) fail_with_errno(path, "writing");
  } catch (const Error&) {  // a full disk
    std::error_code ignored;
    fs::remove(path, ignored);
    throw;
  }
  storage::sync_directory(directory_);
  fault::point("lease-written");
  // A contender that was slow may have created a number that is not the highest any more.
  const std::vector<std::int64_t> fences = fences_in(directory_);
  if (fences.empty() || fences.back() != fence) {
    fs::remove(path);
    return false;
  }
  for (const std::int64_t lower : fences)
    if (lower != fence) fs::remove(path_of(directory_, lower));
  storage::sync_directory(directory_);
  fence_ = fence;
  return true;
}

/// Overwrites the lease with `mine_`. False if it was lost.
bool Lease::rewrite(bool sync) {
  const fs::path path = path_of(directory_, fence_);
  const std::optional<Descriptor> file = open_lease(path, O_RDWR);
  if (!file || !has_token(storage::read_text(*file, path, kMostBytes), mine_.token)) return false;
  const std::lock_guard lock(mutex_);
  write_in_place(*file, to_text(mine_), path);
  if (sync && ::fsync(*file) != 0) fail_with_errno(path, "fsync");
  return true;
}

/// The thread of rank 0.
void Lease::renew() {
  const auto period = std::chrono::duration<double>(mine_.seconds / 10);
  bool warned = false;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (wake_.wait_for(lock, period, [this] { return ended_; })) return;
      ++mine_.renewals;
    }
    try {
      fault::point("lease-renew");
      if (!rewrite(false)) storage::require_ownership();
      warned = false;
    } catch (const std::exception& failure) {
      // Not fatal: the next attempt may succeed, and every write checks the lease.
      if (!std::exchange(warned, true)) log::warning("the lease cannot be renewed ({}); trying again", failure.what());
    }
  }
}

std::string Lease::lost() const {
  const fs::path path = path_of(directory_, fence_);
  const std::optional<std::string> text = read_lease(path);
  if (text && has_token(*text, mine_.token)) return {};
  std::error_code none;
  if (fs::is_directory(directory_, none))
    if (const std::vector<std::int64_t> fences = fences_in(directory_); !fences.empty() && fences.back() > fence_)
      return fmt::format("{}: taken over by another run: {}; this run ends and writes nothing more there",
                         directory_.string(),
                         describe(parse_owner(read_lease(path_of(directory_, fences.back())).value_or(""))));
  return fmt::format("{}: is gone (was the run directory moved, deleted or replaced?); this run ends", path.string());
}

void Lease::begin_at(std::int64_t resumed_step) {
  {
    const std::lock_guard lock(mutex_);
    mine_.resumed_fence = fence_;
    mine_.resumed_step = resumed_step;
  }
  if (!rewrite(true)) storage::require_ownership();
}

bool Lease::stale(const Manifest& manifest) const {
  return manifest.fence > 0 && manifest.fence < resumed_fence_ && manifest.step > resumed_step_;
}

}  // namespace weft::checkpoint
