// SPDX-License-Identifier: Apache-2.0
#include <numeric>
#include <vector>

#include "parallel/grid.hpp"
#include "tests/test.hpp"

namespace weft::parallel {

TEST_CASE("pieces of uneven size reach their ranks in order") {
  const Communicator& all = testing::world().all();
  const int p = all.size(), r = all.rank();
  // Rank a sends (a + 1) * (b + 2) words of value 100 a + b to rank b.
  std::vector<std::int64_t> send, send_bytes, receive_bytes;
  for (int b = 0; b < p; ++b) {
    send.insert(send.end(), static_cast<std::size_t>((r + 1) * (b + 2)), 100 * r + b);
    send_bytes.push_back((r + 1) * (b + 2) * 8);
    receive_bytes.push_back((b + 1) * (r + 2) * 8);
  }
  std::vector<std::int64_t> receive(
      static_cast<std::size_t>(std::accumulate(receive_bytes.begin(), receive_bytes.end(), std::int64_t{0}) / 8));
  all.all_to_all(send.data(), send_bytes, receive.data(), receive_bytes);
  std::size_t at = 0;
  for (int a = 0; a < p; ++a)
    for (int i = 0; i < (a + 1) * (r + 2); ++i) REQUIRE(receive[at++] == 100 * a + r);
}

TEST_CASE("floating point sums are formed in rank order") {
  const Communicator& all = testing::world().all();
  // 1e16, 1, -1e16, 1, ...: any other order of these rounds differently.
  const double terms[] = {1e16, 1, -1e16, 1};
  double expected = 0;
  for (int r = 0; r < all.size(); ++r) expected += terms[r % 4];
  double value = terms[all.rank() % 4];
  all.sum({&value, 1});
  CHECK(value == expected);
}

TEST_CASE("a maximum in flight arrives on every rank") {
  const Communicator& all = testing::world().all();
  auto pending = all.start_maximum({all.rank(), -all.rank(), 7});
  const auto result = pending.wait();
  CHECK(result == std::vector<std::int64_t>{all.size() - 1, 0, 7});
  CHECK(!pending.active());
}

TEST_CASE("the parts of a batch cover it once, whatever the grid") {
  const World& world = testing::world();
  for (std::int64_t data = 1; data <= world.size(); ++data) {
    if (world.size() % data != 0) continue;
    const Grid grid(world, grid_shape(data, 0, world.size()));
    for (const std::int64_t n : {1, 2, 7, 512}) {
      std::vector<std::int64_t> owners(static_cast<std::size_t>(n), 0);
      const Range own = grid.own_tokens(n);
      for (std::int64_t i = own.begin; i < own.end; ++i) ++owners[static_cast<std::size_t>(i)];
      world.all().sum(std::span<std::int64_t>(owners));
      for (const std::int64_t count : owners) REQUIRE(count == 1);
    }
    CHECK(grid.data_index() * grid.shape().feature + grid.feature_index() == world.rank());
  }
}

TEST_CASE("a grid that does not fit the world is a usage error known to all") {
  try {
    grid_shape(2, 3, 4);
    FAIL("accepted");
  } catch (const Error& e) {
    CHECK(e.code() == ExitCode::usage);
    CHECK(e.known_to() == KnownTo::all_ranks);
  }
}

TEST_CASE("what the root throws is thrown everywhere") {
  try {
    testing::world().on_root([]() -> std::string { throw error(ExitCode::data, "chunk_0.hdf5: torn"); });
    FAIL("not thrown");
  } catch (const Error& e) {
    CHECK(e.code() == ExitCode::data);
    CHECK(std::string(e.what()) == "chunk_0.hdf5: torn");
  }
  CHECK(testing::world().on_root([] { return std::string("text"); }) == "text");
}

}  // namespace weft::parallel
