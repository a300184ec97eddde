// SPDX-License-Identifier: Apache-2.0
#include "device/runtime.hpp"

#include <sched.h>

#include <algorithm>
#include <thread>

#include "base/error.hpp"
#include "base/system.hpp"
#include "kernels/runtime.hpp"
#include "tests/test.hpp"

namespace weft::device {
namespace {

Settings with_threads(int threads) {
  Settings settings;
  settings.threads = threads;
  return settings;
}

}  // namespace

TEST_CASE("device.threads beyond what the machine or the library allows is refused") {
  const int hardware = usable_cpus();
  const int most = std::min(hardware, kernels::most_threads());
  CHECK(host_threads(with_threads(1), 4) == 1);
  CHECK(host_threads(with_threads(most), 4) == most);
  // 513 threads hung and 600 crashed in Kokkos' OpenMP space.
  for (const int threads : {most + 1, 513, 600, 4096}) {
    if (threads <= most) continue;
    try {
      host_threads(with_threads(threads), 1);
      FAIL("not refused");
    } catch (const Error& failure) {
      CHECK(failure.code() == ExitCode::usage);
      CHECK(std::string(failure.what()).find(fmt::format("is more than {} (", most)) != std::string::npos);
    }
  }
}

TEST_CASE("threads are as many as CPUs that the process may use, not as the machine has") {
  int threads = 0;
  std::thread([&] {  // its mask is its own
    cpu_set_t mask;
    REQUIRE(sched_getaffinity(0, sizeof mask, &mask) == 0);
    int first = 0;
    while (!CPU_ISSET(first, &mask)) ++first;
    CPU_ZERO(&mask);
    CPU_SET(first, &mask);
    REQUIRE(sched_setaffinity(0, sizeof mask, &mask) == 0);
    threads = host_threads(with_threads(0), 1);
  })
      .join();
  CHECK(threads == 1);
}

TEST_CASE("by default processes share the hardware threads, and each has one at least") {
  const int all = host_threads(with_threads(0), 1);
  CHECK(all >= 1);
  CHECK(host_threads(with_threads(0), 10000) == 1);
}

}  // namespace weft::device
