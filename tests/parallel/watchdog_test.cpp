// SPDX-License-Identifier: Apache-2.0
//
// The watchdog must not end a job in which a rank makes progress. That it ends jobs without progress is tested on
// complete programs (tests/fault/hang_test.py).
#include "parallel/watchdog.hpp"

#include <chrono>
#include <thread>

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
