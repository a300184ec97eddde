// SPDX-License-Identifier: Apache-2.0
#include "run/agreement.hpp"

#include <algorithm>
#include <cstring>
#include <system_error>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "parallel/signals.hpp"
#include "storage/ownership.hpp"

namespace weft::run {
namespace {

constexpr std::int64_t kFirstSignal = 128;  // exit codes above it name a signal
constexpr auto kPollInterval = std::chrono::milliseconds(500);

}  // namespace

StopAgreement::StopAgreement(const parallel::Communicator& world, std::filesystem::path run_directory, double walltime,
                             Clock::time_point start)
    : world_(world.duplicate()), run_directory_(std::move(run_directory)), walltime_(walltime), start_(start) {}

bool StopAgreement::requested_by_file(const char* name) {
  std::error_code ignored;
  if (!std::filesystem::exists(run_directory_ / name, ignored)) return false;
  storage::require_ownership();  // the request may be meant for the next owner
  if (!std::filesystem::remove(run_directory_ / name, ignored)) return false;
  log::info("found the request file {} in {}", name, run_directory_.string());
  return true;
}

Decision StopAgreement::step(std::span<const std::int64_t> phases, double margin, bool checkpoint_due) {
  const parallel::Signals::Requested requested = parallel::Signals::requested();
  std::int64_t stop = requested.stop, checkpoint = checkpoint_due ? 1 : requested.checkpoint;
  if (world_.rank() == 0) {
    const auto now = Clock::now();
    if (now - looked_ > kPollInterval) {
      looked_ = now;
      stop_file_ = stop_file_ || requested_by_file("STOP");
      checkpoint_file_ = requested_by_file("CHECKPOINT");
    }
    out_of_time_ =
        out_of_time_ || (walltime_ > 0 && std::chrono::duration<double>(now - start_).count() + margin > walltime_);
    if (stop_file_ || out_of_time_) stop = std::max<std::int64_t>(stop, static_cast<std::int64_t>(ExitCode::requeue));
    checkpoint = std::max<std::int64_t>(checkpoint, std::exchange(checkpoint_file_, false) ? 1 : 0);
  }
  std::vector<std::int64_t> posted = {stop, checkpoint};
  for (const std::int64_t phase : phases) posted.push_back(-phase);  // their minimum counts
  pending_.push_back(world_.start_maximum(std::move(posted)));
  if (pending_.size() <= static_cast<std::size_t>(kStepsAhead)) return {};
  parallel::Communicator::PendingMaximum oldest = std::move(pending_.front());
  pending_.pop_front();
  return read(std::move(oldest));
}

std::string StopAgreement::cause(std::int64_t stop) const {
  if (stop > kFirstSignal) return fmt::format("SIG{}", sigabbrev_np(static_cast<int>(stop - kFirstSignal)));
  return stop_file_ ? "the file STOP" : out_of_time_ ? "run.walltime" : "SIGUSR1";
}

Decision StopAgreement::read(parallel::Communicator::PendingMaximum pending) {
  const std::vector<std::int64_t> agreed = pending.wait();
  Decision decision{.stop = agreed[0], .checkpoint = agreed[1] != 0, .phases = {}};
  for (std::size_t i = 2; i < agreed.size(); ++i) decision.phases.push_back(-agreed[i]);
  return decision;
}

void StopAgreement::drain() {
  for (; !pending_.empty(); pending_.pop_front()) pending_.front().wait();
}

}  // namespace weft::run
