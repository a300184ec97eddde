// SPDX-License-Identifier: Apache-2.0
//
// The watchdog must not end a job in which a rank makes progress. That it ends jobs without progress is tested on
// complete programs (tests/fault/hang_test.py).
#include "parallel/watchdog.hpp"

#include <chrono>
#include <thread>
#include <vector>

#include "tests/test.hpp"

namespace weft::parallel {
namespace {

/// Sets the timeout for its lifetime. On a busy machine a rank may not run for a second: hence not less.
struct Timeout {
  explicit Timeout(double seconds) : before(timeout()) { set_timeout(seconds); }
  ~Timeout() { set_timeout(before); }
  const double before;
};

void work(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    note_progress();
  }
}

}  // namespace

TEST_CASE("ranks that wait for a slow rank are not ended while it reports progress, whichever it is") {
  const World& world = testing::world();
  const Timeout timeout(3);
  for (const int slow : {0, world.size() - 1}) {
    if (world.rank() == slow) work(7);
    world.all().barrier();  // more than twice the timeout for the others
  }
}

TEST_CASE("the cause of a hang is the rank that does not respond, not one that has left or waits") {
  const auto now = std::chrono::steady_clock::now();
  const auto ago = [&](int seconds) { return now - std::chrono::seconds(seconds); };
  constexpr double silence = 5;
  const RankPulse self{0, 0, 3, "a", "ending", now, false};
  // At the end of the program rank 1 has sent its last message, long ago; then rank 2 is stopped.
  const RankPulse left{1, 9, 3, "b", "ending", ago(30), true}, stopped{2, 9, 3, "c", "ending", ago(20), false};
  HangCause cause = cause_of_hang(self, std::vector{left, stopped}, silence);
  CHECK(cause.rank.rank == 2);
  CHECK_FALSE(cause.responds);
  cause = cause_of_hang(self, std::vector{stopped, left}, silence);
  CHECK(cause.rank.rank == 2);
  // Of two that do not respond, the one that stopped first. The steps since its last message count.
  const RankPulse early{3, 9, 1, "d", "loss", ago(25), false};
  cause = cause_of_hang(self, std::vector{stopped, early, left}, silence);
  CHECK(cause.rank.rank == 3);
  CHECK(cause.rank.step == 3);
  CHECK(cause.rank.phase == "ending");
  // All respond: the one with the fewest steps; this rank if the others are as far.
  const RankPulse behind{4, 9, 2, "e", "reading", ago(1), false}, level{5, 9, 3, "f", "ending", ago(1), false};
  cause = cause_of_hang(self, std::vector{left, level, behind}, silence);
  CHECK(cause.rank.rank == 4);
  CHECK(cause.responds);
  CHECK(cause_of_hang(self, std::vector{left, level}, silence).rank.rank == 0);
}

TEST_CASE("work that must not keep a job alive is no progress") {
  const std::uint64_t before = noted_progress();
  note_progress();
  CHECK(noted_progress() > before);
  std::uint64_t in_background = 0;
  std::thread([&] {
    ignore_progress_of_this_thread();
    const std::uint64_t then = noted_progress();
    note_progress();
    in_background = noted_progress() - then;
  }).join();
  CHECK(in_background == 0);
}

}  // namespace weft::parallel
