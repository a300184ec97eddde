// SPDX-License-Identifier: Apache-2.0
//
// CPUs of processes: parts are disjoint, inside the masks that the launcher set, and of whole cores; all threads of a
// process keep to them.
#include "parallel/affinity.hpp"

#include <algorithm>
#include <atomic>
#include <thread>

#include "tests/test.hpp"

namespace weft::parallel {
namespace {

int alone(int cpu) { return cpu; }
int pairs_of_8(int cpu) { return cpu % 8; }  // CPU i and i + 8 are hardware threads of one core

bool includes(const Cpus& all, const Cpus& part) {
  return std::includes(all.begin(), all.end(), part.begin(), part.end());
}

}  // namespace

TEST_CASE("lists of CPUs are read and written in the kernel's format") {
  CHECK(cpus_of("0-3,8,10-11") == Cpus{0, 1, 2, 3, 8, 10, 11});
  CHECK(to_text({0, 1, 2, 3, 8, 10, 11}) == "0-3,8,10-11");
  CHECK(to_text({}) == "");
  CHECK(cpus_of("").empty());
  CHECK(cpus_of("nonsense,4,-,7-6") == Cpus{4});
  CHECK(cpus_of("8190-99999999") == Cpus{8190, 8191});  // no memory for what no machine has
}

TEST_CASE("processes with one mask divide it; disjoint masks stay") {
  const Cpus all = cpus_of("0-15");
  using Masks = std::vector<Cpus>;
  CHECK(divided({all, all}, alone, 1) == Masks{cpus_of("0-7"), cpus_of("8-15")});
  // Hardware threads of a core belong to one process.
  CHECK(divided({all, all}, pairs_of_8, 1) == Masks{cpus_of("0-3,8-11"), cpus_of("4-7,12-15")});
  CHECK(divided({all, all, all}, alone, 1) == Masks{cpus_of("0-4"), cpus_of("5-9"), cpus_of("10-14")});
  const Masks apart{cpus_of("8-15"), cpus_of("0-7")};
  CHECK(divided(apart, alone, 1) == apart);
  // Two groups, as near GPUs of two sockets.
  CHECK(divided({cpus_of("0-7"), cpus_of("8-15"), cpus_of("0-7"), cpus_of("8-15")}, alone, 1) ==
        Masks{cpus_of("0-3"), cpus_of("8-11"), cpus_of("4-7"), cpus_of("12-15")});
  // More processes than cores: by hardware threads; more than these: as they are.
  CHECK(divided({cpus_of("0,8"), cpus_of("0,8")}, pairs_of_8, 1) == Masks{{0}, {8}});
  CHECK(divided({{0}, {0}}, alone, 1) == Masks{{0}, {0}});
  // A part has as many CPUs as threads are wanted, or there are no parts.
  CHECK(divided({all, all}, alone, 8) == Masks{cpus_of("0-7"), cpus_of("8-15")});
  CHECK(divided({all, all}, alone, 9) == Masks{all, all});
  // Masks that overlap partly are the launcher's choice.
  const Masks partly{cpus_of("0-3"), cpus_of("0-3"), cpus_of("2-5")};
  CHECK(divided(partly, alone, 1) == partly);
}

TEST_CASE("the processes of a node take disjoint CPUs inside their masks, with all their threads") {
  const Cpus before = own_cpus();
  REQUIRE(!before.empty());
  // A thread that runs already.
  std::atomic<int> stage{0};
  Cpus of_old_thread, of_new_thread;
  std::thread old_thread([&] {
    while (stage.load() == 0) std::this_thread::yield();
    of_old_thread = own_cpus();
  });
  const int sharing = bind_to_cpus(testing::world(), {});
  stage = 1;
  old_thread.join();
  std::thread([&] { of_new_thread = own_cpus(); }).join();
  const Cpus after = own_cpus();
  CAPTURE(to_text(before));
  CAPTURE(to_text(after));
  CHECK(includes(before, after));
  CHECK(includes(after, of_old_thread));
  CHECK(of_new_thread == after);
  CHECK(processes_sharing_cpus(testing::world()) == sharing);
  CHECK(bind_to_cpus(testing::world(), {}) == sharing);
  // Each CPU counts once if the masks are disjoint.
  std::vector<std::int64_t> users(kMostCpus, 0);
  for (const int cpu : after) users[static_cast<std::size_t>(cpu)] = 1;
  testing::world().node().sum(users);
  const std::int64_t most = *std::max_element(users.begin(), users.end());
  if (static_cast<int>(before.size()) >= testing::world().node_size()) {
    CHECK(most == 1);
    CHECK(sharing == 1);
  } else {
    CHECK(sharing == most);
  }
}

}  // namespace weft::parallel
