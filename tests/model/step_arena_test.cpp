// SPDX-License-Identifier: Apache-2.0
#include "model/step_arena.hpp"

#include "bench/fresh_memory.hpp"
#include "tests/test.hpp"

namespace weft::model {
namespace {

/// Buffers of an imaginary step.
struct Buffers {
  Buffers(const parallel::GridShape& grid, std::int64_t n, StepArena& arena) {
    arena.purpose("forward");
    rows = arena.take<float>(parallel::largest_part(n, grid.size(parallel::kDataAxis)));
    all = arena.exchange(parallel::kDataAxis, 4 * n);
    arena.purpose("backward");
    sums = arena.take<double>(3);
    arena.purpose("forward");
    flags = arena.take_host<std::int32_t>(n);
    empty = arena.take<float>(0);
  }
  kernels::Array<float> rows, empty;
  parallel::ExchangeBuffer all;
  kernels::Array<double> sums;
  kernels::Array<std::int32_t> flags;
};

}  // namespace

TEST_CASE("an arena allocates what it measures, by purpose, and frees it at its end") {
  const std::int64_t n = 101, ranks = testing::world().size();
  const parallel::GridShape shape({{"data", ranks}});
  StepArena measured(testing::execution().backend);
  const Buffers sizes(shape, n, measured);
  CHECK(sizes.rows.data == nullptr);
  CHECK(sizes.rows.size == parallel::largest_part(n, ranks));
  CHECK(sizes.all.data() == nullptr);
  REQUIRE(measured.bytes().size() == 2);
  CHECK(measured.bytes()[0].purpose == "forward");
  CHECK(measured.bytes()[0].device == 4 * parallel::largest_part(n, ranks) + 4 * n);
  CHECK(measured.bytes()[0].host == 4 * n);
  CHECK(measured.bytes()[1].device == 24);

  const parallel::Grid grid(testing::world(), shape);
  const device::MemoryUse before = device::memory_use();
  {
    StepArena arena(testing::execution(), grid);
    const Buffers buffers(shape, n, arena);
    CHECK(buffers.rows.data != nullptr);
    CHECK(buffers.all.data() != nullptr);
    CHECK(device::memory_use().device_bytes - before.device_bytes == measured.device_bytes());
    CHECK(device::memory_use().host_bytes - before.host_bytes == measured.host_bytes());
    REQUIRE(arena.bytes().size() == measured.bytes().size());
    for (std::size_t i = 0; i < arena.bytes().size(); ++i) {
      CHECK(arena.bytes()[i].purpose == measured.bytes()[i].purpose);
      CHECK(arena.bytes()[i].device == measured.bytes()[i].device);
      CHECK(arena.bytes()[i].host == measured.bytes()[i].host);
    }
  }
  CHECK(device::memory_use().device_bytes == before.device_bytes);
  CHECK(device::memory_use().host_bytes == before.host_bytes);
}

TEST_CASE("an arena measures grids of any size without ranks") {
  const std::int64_t n = 1'000'000'000'000;
  StepArena arena(kernels::Backend::portable);
  const Buffers buffers(parallel::GridShape({{"data", 1000}}), n, arena);
  CHECK(arena.device_bytes() == 4 * n / 1000 + 4 * n + 24);
}

TEST_CASE("exchange memory that is not kept is counted, and exists between open and close only") {
  const parallel::Grid grid(testing::world(), parallel::GridShape({{"data", testing::world().size()}}));
  StepArena arena(testing::execution(), grid);
  const std::int64_t before = device::memory_use().device_bytes;
  const bench::FreshMemory fresh;
  parallel::ExchangeBuffer buffer = arena.exchange(parallel::kDataAxis, 640, {.memory = &fresh});
  CHECK(arena.device_bytes() == 640);
  CHECK(device::memory_use().device_bytes == before);
  CHECK(buffer.open() != nullptr);
  CHECK(device::memory_use().device_bytes == before + 640);
  buffer.close();
  CHECK(buffer.data() == nullptr);
  CHECK(device::memory_use().device_bytes == before);
}

}  // namespace weft::model
