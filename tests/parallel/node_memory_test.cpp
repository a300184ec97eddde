// SPDX-License-Identifier: Apache-2.0
//
// Runs on 1 to 4 ranks: all ranks can read all pieces, no files remain, and a failure of one rank is reported on all.
#include "parallel/node_memory.hpp"

#include <sys/resource.h>

#include <filesystem>
#include <initializer_list>
#include <string>

#include "tests/test.hpp"

namespace weft::parallel {
namespace {

using Backing = NodeMemory::Backing;

/// Bytes in files of this name prefix. They are empty while they have a name, also those of killed jobs.
std::uintmax_t bytes_left_behind() {
  std::uintmax_t bytes = 0;
  std::error_code gone;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    if (entry.path().filename().string().starts_with("weft-"))
      if (const std::uintmax_t size = entry.file_size(gone); !gone) bytes += size;
  return bytes;
}

}  // namespace

TEST_CASE("the node communicator contains the ranks of the node in order") {
  // All ranks of a test run on one machine.
  CHECK(testing::world().node().size() == testing::world().size());
  CHECK(testing::world().node().rank() == testing::world().rank());
}

TEST_CASE("each rank reads what the others wrote, repeatedly") {
  const Communicator& node = testing::world().node();
  const auto bytes_of = [](int rank) { return rank == 2 ? std::int64_t{0} : (rank + 1) * std::int64_t{3'000'001}; };
  for (const Backing backing : {Backing::anonymous, Backing::directory}) {
    const NodeMemory memory(node, bytes_of(node.rank()), {backing});
    REQUIRE(memory.refusal() == "");
    CHECK(bytes_left_behind() == 0);
    const std::int64_t own = bytes_of(node.rank());
    for (int round = 0; round < 2; ++round) {
      for (std::int64_t i = 0; i < own; i += 4097) {
        REQUIRE(memory.own()[i] == static_cast<std::byte>(round == 0 ? 0 : node.rank() + 1));
        memory.own()[i] = static_cast<std::byte>(node.rank() + round + 1);
      }
      node.barrier();
      for (int rank = 0; rank < node.size(); ++rank)
        for (std::int64_t i = 0; i < bytes_of(rank); i += 4097)
          REQUIRE(memory.of(rank)[i] == static_cast<std::byte>(rank + round + 1));
      node.barrier();
    }
  }
}

TEST_CASE("a failure on one rank is refused on all, with the same text") {
  const Communicator& node = testing::world().node();
  rlimit former{};
  getrlimit(RLIMIT_FSIZE, &former);
  if (node.rank() == node.size() - 1) {
    const rlimit small{1 << 20, former.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
  }
  {
    const NodeMemory memory(node, 2 << 20);
    CHECK(memory.refusal() ==
          "memfd: 2.0 MiB cannot be reserved (File too large); /dev/shm: 2.0 MiB cannot be reserved (File too large)");
    CHECK(NodeMemory(node, 1 << 20).refusal() == "");
  }
  setrlimit(RLIMIT_FSIZE, &former);
  CHECK(bytes_left_behind() == 0);
}

}  // namespace weft::parallel
