// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/interval.hpp"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/format.hpp"
#include "base/log.hpp"
#include "parallel/failure.hpp"
#include "storage/ownership.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
namespace {

using Clock = Clock;
double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

constexpr std::int64_t kProbePiece = std::int64_t{4} << 20, kMostProbeBytes = std::int64_t{16} << 20;
constexpr double kLongestProbe = 0.5;  // seconds, checked after each piece

/// Seconds to write and sync a piece of kProbePiece bytes: the mean over some pieces of a file, which is deleted at
/// once.
double seconds_per_piece(const fs::path& path) {
  const Descriptor file = create_own(path);
  if (::unlink(path.c_str()) != 0) fail_with_errno(path, "deleting");
  // Not zero: a file system could store zeros as a hole.
  std::string piece(static_cast<std::size_t>(kProbePiece), '\0');
  std::uint64_t state = 1;
  for (char& byte : piece)
    byte = static_cast<char>((state = state * 6364136223846793005u + 1442695040888963407u) >> 56);
  const Clock::time_point begin = Clock::now();
  std::int64_t written = 0;
  double seconds = 0;
  while (written < kMostProbeBytes && seconds < kLongestProbe) {
    write_all(file, piece, path);
    if (::fsync(file) != 0) fail_with_errno(path, "fsync");
    written += kProbePiece;
    seconds = seconds_between(begin, Clock::now());
  }
  return seconds * static_cast<double>(kProbePiece) / static_cast<double>(written);
}

}  // namespace

Cost estimate_cost(const parallel::Communicator& world, const fs::path& directory, std::int64_t bytes) {
  double seconds = 0;
  world.barrier();  // all ranks write at the same time, as in a checkpoint
  parallel::on_all(world, [&] {
    storage::require_ownership();
    // At least one piece: a small checkpoint takes the time of its fsync calls.
    const double pieces = std::max(1.0, static_cast<double>(bytes) / static_cast<double>(kProbePiece));
    seconds = pieces * seconds_per_piece(directory / fmt::format(".speed_{:05d}.tmp", world.rank()));
  });
  std::int64_t microseconds = std::llround(1e6 * seconds);
  world.maximum({&microseconds, 1});
  const double slowest = 1e-6 * static_cast<double>(microseconds);
  return {.duration = slowest, .delay = slowest, .measured = false};
}

double best_interval(double delay, double between_failures) {
  if (delay >= 2 * between_failures) return between_failures;
  const double ratio = delay / (2 * between_failures);
  return std::sqrt(2 * delay * between_failures) * (1 + std::sqrt(ratio) / 3 + ratio / 9) - delay;
}

Interval::Interval(const Settings& settings, const Cost& known)
    : automatic_(settings.every == kAutomatic),
      between_failures_(3600 * settings.mean_time_between_failures),
      cost_(known),
      started_(Clock::now()) {
  update();
}

void Interval::update() {
  // A checkpoint cannot begin before the previous one is durable.
  seconds_ = std::max(best_interval(cost_.delay, between_failures_), cost_.duration);
  if (!automatic_ || std::abs(seconds_ - logged_seconds_) <= 0.1 * logged_seconds_) return;
  logged_seconds_ = seconds_;
  log::info("{}", line());
}

void Interval::note_step(double seconds, bool writing) {
  Steps& steps = writing ? writing_ : others_;
  steps.seconds += seconds;
  ++steps.count;
}

void Interval::note_start(Clock::time_point now) {
  started_ = now;
  requested_ = false;
}

void Interval::note_durable(double duration, double pause) {
  const double slower =
      others_.count > 0 ? std::max(0.0, writing_.seconds - static_cast<double>(writing_.count) * others_.mean()) : 0;
  writing_ = others_ = {};
  const double delay = pause + slower;
  // Single steps vary: take the mean of the new value and the earlier ones.
  cost_ = {.duration = duration, .delay = cost_.measured ? (cost_.delay + delay) / 2 : delay, .measured = true};
  update();
}

bool Interval::due(Clock::time_point now) {
  if (!automatic_ || requested_ || seconds_between(started_, now) < seconds_) return false;
  requested_ = true;
  return true;
}

std::string Interval::line() const {
  return fmt::format(
      "checkpoint.every = \"auto\": one every {} (each takes {:.3g} s and delays training by {:.3g} s, {}; mean time "
      "between failures {:.3g} h)",
      seconds_ < 60 ? fmt::format("{:.1f} s", seconds_) : format::duration(seconds_), cost_.duration, cost_.delay,
      cost_.measured ? "measured" : "estimated from the write speed of the disk", between_failures_ / 3600);
}

}  // namespace weft::checkpoint
