// SPDX-License-Identifier: Apache-2.0
//
// The watchdog must not end a job in which a rank makes progress. That it ends jobs without progress is tested on
// complete programs (tests/fault/hang_test.py).
#include "parallel/watchdog.hpp"

#include <chrono>
#include <filesystem>
#include <thread>

#include "tests/test.hpp"

namespace weft::parallel {

TEST_CASE("ranks that wait for a slow rank are not ended while it reports progress") {
  const World& world = weft::testing::world();
  const double timeout = 1;
  std::string folder = (std::filesystem::temp_directory_path() / "weft_watchdog_XXXXXX").string();
  if (world.is_root()) REQUIRE(mkdtemp(folder.data()) != nullptr);
  folder = world.all().broadcast(folder);
  {
    const Watchdog watchdog(world, std::filesystem::path(folder) / "heartbeat", timeout);
    note_step(7);
    note_phase("checkpoint");
    if (world.rank() == world.size() - 1)
      for (int i = 0; i < 25; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        note_progress();
      }
    world.all().barrier();  // 2.5 times the limit for all but the last rank
  }
  if (world.is_root()) std::filesystem::remove_all(folder);
}

}  // namespace weft::parallel
