// SPDX-License-Identifier: Apache-2.0
#include "parallel/watchdog.hpp"

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "base/fault.hpp"
#include "parallel/failure.hpp"
#include "parallel/nccl.hpp"
#include "parallel/phases.hpp"

namespace weft::parallel {
namespace {

constexpr auto kLookEvery = std::chrono::milliseconds(200);
/// A check that comes later than this was delayed by a suspension of the process, which does not count.
constexpr std::chrono::duration<double> kLongestLook{1};
constexpr auto kExchangeEvery = std::chrono::milliseconds(500);
constexpr auto kPollWhenLeaving = std::chrono::milliseconds(1);
/// A rank that responds sends within this many seconds, also on a busy node.
constexpr double kRespondsWithin = 2;
/// Seconds for rank 0 to end the job, if it responds, before another rank does.
constexpr double kGraceForRoot = 30;

std::atomic<double> timeout_seconds{600};
std::atomic<std::int64_t> present_step{0};
std::atomic<const char*> present_phase{"starting"};
std::atomic<void (*)(std::string_view)> phase_observer{nullptr};

/// A copy of the name, one for equal names, valid until the process ends: the monitoring thread may read it at any
/// time.
const char* interned(std::string_view name) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> names;
  const std::lock_guard lock(mutex);
  const auto found = names.find(name);
  return (found != names.end() ? found : names.emplace(name).first)->c_str();
}

/// Seconds of silence after which a rank counts as dead or stopped.
double silence_of_the_dead() { return std::max(kRespondsWithin, timeout() / 2); }

/// Tests a request without blocking. True if it is complete or null. A failed call counts as incomplete.
bool is_complete(MPI_Request& request) {
  int complete = 0;
  return MPI_Test(&request, &complete, MPI_STATUS_IGNORE) == MPI_SUCCESS && complete != 0;
}

}  // namespace

void note_step(std::int64_t step) {
  present_step = step;
  fault::note_step(step);
  note_progress();
}

void note_phase(std::string_view phase) {
  present_phase = interned(phase);
  note_progress();
  if (const auto observer = phase_observer.load(std::memory_order_relaxed)) observer(phase);
}

void observe_phases(void (*observer)(std::string_view)) { phase_observer = observer; }

HangCause cause_of_hang(const RankPulse& self, std::span<const RankPulse> others, double silence) {
  HangCause cause{self, true};
  for (const RankPulse& one : others) {
    if (one.left) continue;  // it waits for the others to end
    const bool dead = std::chrono::duration<double>(self.at - one.at).count() > silence;
    if (dead ? cause.responds || one.at < cause.rank.at : cause.responds && one.step < cause.rank.step)
      cause = {one, !dead};
  }
  // The last message of a dead rank may be several short steps old. Ranks are in step: it died where this rank waits.
  if (!cause.responds && cause.rank.step < self.step) {
    cause.rank.step = self.step;
    cause.rank.phase = self.phase;
  }
  return cause;
}

void set_timeout(double seconds) { timeout_seconds = seconds; }
double timeout() { return timeout_seconds; }

struct Watchdog::Pulse {
  std::uint64_t progress = 0;
  std::int64_t step = 0;
  std::int32_t last = 0;  ///< not 0: the sender sends no more
  char host[64] = "", phase[64] = "";
};

struct Watchdog::Line {
  int rank = 0;
  Pulse in, out;
  MPI_Request receive = MPI_REQUEST_NULL, send = MPI_REQUEST_NULL;
  bool received_last = false, sent_last = false;
};

Watchdog::Watchdog(int rank, int size, std::string host) : rank_(rank), size_(size), host_(std::move(host)) {
  monitor_ = std::thread([this] { monitor(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
    changed_.notify_all();
  }
  monitor_.join();
}

void Watchdog::connect(const Communicator& all) {
  if (size_ == 1) return;
  ranks_.emplace(all.duplicate());
  // A rank may stop before its messenger has sent anything: its host is known from here on, and its silence counts.
  const Pulse own = own_pulse();
  std::vector<Pulse> pulses(static_cast<std::size_t>(size_));
  ranks_->all_gather(&own, pulses.data(), sizeof own);
  for (int rank = 0; rank < (rank_ == 0 ? size_ : 1); ++rank)
    if (rank != rank_) hear(rank, pulses[static_cast<std::size_t>(rank)]);
  messenger_ = std::thread([this] { exchange(); });
}

void Watchdog::disconnect() {
  if (!messenger_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
    changed_.notify_all();
  }
  messenger_.join();
  ranks_.reset();
  const std::lock_guard lock(mutex_);
  heard_.clear();
}

// ---- the messenger --------------------------------------------------------------------------------------------------

Watchdog::Pulse Watchdog::own_pulse() const {
  Pulse pulse;
  pulse.progress = rank_ == 0 ? job_progress() : noted_progress();
  pulse.step = present_step;
  std::snprintf(pulse.host, sizeof pulse.host, "%s", host_.c_str());
  std::snprintf(pulse.phase, sizeof pulse.phase, "%s", present_phase.load());
  return pulse;
}

void Watchdog::hear(int rank, const Pulse& pulse) {
  const std::lock_guard lock(mutex_);
  const auto known = std::find_if(heard_.begin(), heard_.end(), [&](const RankPulse& one) { return one.rank == rank; });
  RankPulse& heard = known != heard_.end() ? *known : heard_.emplace_back();
  heard = {rank, pulse.progress, pulse.step, pulse.host, pulse.phase, Clock::now(), pulse.last != 0};
}

/// One message is in flight to each rank at most: a rank that is stopped does not fill the memory of others.
void Watchdog::exchange() {
  const MPI_Comm comm = *static_cast<const MPI_Comm*>(ranks_->native());
  std::vector<Line> lines(rank_ == 0 ? static_cast<std::size_t>(size_ - 1) : 1);
  for (std::size_t i = 0; i < lines.size(); ++i) lines[i].rank = rank_ == 0 ? static_cast<int>(i) + 1 : 0;
  const auto receive = [comm](Line& line) {
    MPI_Irecv(&line.in, sizeof line.in, MPI_BYTE, line.rank, 0, comm, &line.receive);
  };
  for (Line& line : lines) receive(line);

  bool leaving = false;
  Clock::time_point send_at{};
  const auto is_open = [](Line& line) { return !line.received_last || !line.sent_last || !is_complete(line.send); };
  while (std::any_of(lines.begin(), lines.end(), is_open)) {
    for (Line& line : lines)
      while (!line.received_last && is_complete(line.receive)) {
        hear(line.rank, line.in);
        line.received_last = line.in.last != 0;
        if (!line.received_last) receive(line);
      }
    // Rank 0 is the last to leave: until then it informs the others that some ranks still work.
    const bool last = leaving && (rank_ != 0 || std::all_of(lines.begin(), lines.end(),
                                                            [](const Line& line) { return line.received_last; }));
    if (last || Clock::now() >= send_at) {
      send_at = Clock::now() + kExchangeEvery;
      for (Line& line : lines) {
        if (line.sent_last || !is_complete(line.send)) continue;
        line.out = own_pulse();
        line.out.last = last ? 1 : 0;
        MPI_Isend(&line.out, sizeof line.out, MPI_BYTE, line.rank, 0, comm, &line.send);
        line.sent_last = last;
      }
    }
    std::unique_lock lock(mutex_);
    if (leaving)
      changed_.wait_for(lock, kPollWhenLeaving);
    else
      leaving = changed_.wait_for(lock, kExchangeEvery, [this] { return leaving_; });
  }
}

// ---- the monitor ----------------------------------------------------------------------------------------------------

std::uint64_t Watchdog::job_progress() const {
  std::uint64_t sum = noted_progress();
  const std::lock_guard lock(mutex_);
  for (const RankPulse& one : heard_) sum += one.progress;
  return sum;
}

double Watchdog::grace() const {
  if (rank_ == 0) return 0;
  const std::lock_guard lock(mutex_);
  const bool root_responds =
      !heard_.empty() && std::chrono::duration<double>(Clock::now() - heard_[0].at).count() < silence_of_the_dead();
  return root_responds ? kGraceForRoot : 0.25 * std::min(rank_, 20);
}

std::string Watchdog::diagnosis(double silent) const {
  const std::lock_guard lock(mutex_);
  const bool known = size_ == 1 || !heard_.empty();
  const RankPulse self{rank_, 0, present_step, host_, present_phase.load(), Clock::now(), false};
  const auto [cause, responds] = cause_of_hang(self, heard_, silence_of_the_dead());
  return fmt::format("rank {} on {}: no progress for {:.0f} s in \"{}\"{} ({}); ending the job{}", cause.rank,
                     cause.host, silent, cause.phase, cause.step > 0 ? fmt::format(", at step {}", cause.step) : "",
                     !responds ? "dead or stopped: it does not respond"
                     : known   ? "it responds, but makes no progress"
                               : "it waits for another rank, which may be dead or stopped",
                     cause.step > 0 ? "; a restart resumes from the newest checkpoint" : "");
}

void Watchdog::monitor() {
  std::uint64_t seen = job_progress();
  Clock::time_point looked = Clock::now();
  double silent = 0;
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLookEvery, [this] { return over_; })) {
    lock.unlock();
    // NCCL may report a lost peer of another node long before the timeout.
    if (const std::string lost = nccl::failure(); !lost.empty())
      end_job(ExitCode::communication,
              fmt::format("rank {} on {}: {}, in \"{}\" at step {}; ending the job; a restart resumes from the newest "
                          "checkpoint",
                          rank_, host_, lost, present_phase.load(), present_step.load()));
    const Clock::time_point now = Clock::now();
    silent += std::min<std::chrono::duration<double>>(now - std::exchange(looked, now), kLongestLook).count();
    if (const std::uint64_t progress = job_progress(); progress != seen) {
      seen = progress;
      silent = 0;
    }
    if (timeout() > 0 && silent >= timeout() && silent >= timeout() + grace())
      end_job(ExitCode::communication, diagnosis(silent));
    lock.lock();
  }
}

}  // namespace weft::parallel
