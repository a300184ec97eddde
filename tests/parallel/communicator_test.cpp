// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "bench/fresh_memory.hpp"
#include "kernels/bf16.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "parallel/device_communicator.hpp"
#include "parallel/gpu_groups.hpp"
#include "parallel/grid.hpp"
#include "tests/test.hpp"

namespace weft::parallel {
namespace {

/// Applies `work` to a copy of `values` in the memory of the kernels and returns the result.
template <class T, class Work>
std::vector<T> on_device(std::vector<T> values, Work&& work) {
  const kernels::Execution& execution = testing::execution();
  const std::int64_t size = static_cast<std::int64_t>(values.size()), bytes = size * std::int64_t{sizeof(T)};
  const device::Buffer<T> buffer(std::max<std::int64_t>(1, size));
  device::copy(execution, buffer.data(), values.data(), bytes, device::Direction::to_device);
  work(buffer.data());
  device::copy(execution, values.data(), buffer.data(), bytes, device::Direction::to_host);
  kernels::fence(execution);
  return values;
}

}  // namespace

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

TEST_CASE("floating-point sums are formed in rank order") {
  const Communicator& all = testing::world().all();
  // 1e16, 1, -1e16, 1, ...: any other order of these rounds differently.
  const double terms[] = {1e16, 1, -1e16, 1};
  double expected = 0;
  for (int r = 0; r < all.size(); ++r) expected += terms[r % 4];
  double value = terms[all.rank() % 4];
  all.sum({&value, 1});
  CHECK(value == expected);
}

TEST_CASE("collectives on kernel memory agree with those on host memory, and count the bytes sent") {
  const Communicator& all = testing::world().all();
  const kernels::Execution& execution = testing::execution();
  const int p = all.size(), r = all.rank();
  const std::size_t own = static_cast<std::size_t>(r);
  DeviceCommunicator axis(all, execution, 1 << 12);
  CHECK(axis.size() == p);

  // The piece of rank a has a + 1 words of value 7 a; then one word each.
  for (const bool even : {false, true}) {
    std::vector<std::int64_t> bytes, values;
    for (int a = 0; a < p; ++a) {
      bytes.push_back(8 * (even ? 1 : a + 1));
      values.insert(values.end(), even ? 1u : static_cast<unsigned>(a + 1), a == r ? 7 * a : -1);
    }
    const std::int64_t before = axis.traffic().bytes_sent;
    std::vector<std::int64_t> result = on_device(values, [&](std::int64_t* data) { axis.all_gather(data, bytes); });
    std::size_t at = 0;
    for (int a = 0; a < p; ++a)
      for (std::int64_t i = 0; i < bytes[static_cast<std::size_t>(a)] / 8; ++i) REQUIRE(result[at++] == 7 * a);
    CHECK(axis.traffic().bytes_sent - before == bytes[own] * (p - 1));
  }

  // Rank a sends b words of value 10 a + b to rank b: nothing to rank 0.
  std::vector<std::int64_t> send, send_bytes, receive_bytes;
  for (int b = 0; b < p; ++b) {
    send.insert(send.end(), static_cast<std::size_t>(b), 10 * r + b);
    send_bytes.push_back(8 * b);
    receive_bytes.push_back(8 * r);
  }
  device::Buffer<std::int64_t> from(std::max<std::int64_t>(1, static_cast<std::int64_t>(send.size())));
  device::copy(execution, from.data(), send.data(), static_cast<std::int64_t>(send.size()) * 8,
               device::Direction::to_device);
  const std::int64_t before = axis.traffic().bytes_sent;
  const std::vector<std::int64_t> received =
      on_device(std::vector<std::int64_t>(static_cast<std::size_t>(p * r), -1),
                [&](std::int64_t* data) { axis.all_to_all(from.data(), send_bytes, data, receive_bytes); });
  for (int i = 0; i < p * r; ++i) REQUIRE(received[static_cast<std::size_t>(i)] == 10 * (i / r) + r);
  CHECK(axis.traffic().bytes_sent - before == 8 * (p * (p - 1) / 2 - r));

  // Integers are exact above 2^53; floating-point sums are in rank order, as on the host.
  const std::int64_t large = std::int64_t{1} << 60;
  const auto sums = on_device(std::vector<std::int64_t>{large + r, -r, 3}, [&](std::int64_t* data) {
    axis.sum(kernels::Array<std::int64_t>{data, 3});
  });
  CHECK(sums == std::vector<std::int64_t>{p * large + p * (p - 1) / 2, -p * (p - 1) / 2, 3 * p});
  const auto largest = on_device(std::vector<std::int32_t>{r, -r}, [&](std::int32_t* data) {
    axis.maximum(kernels::Array<std::int32_t>{data, 2});
  });
  CHECK(largest == std::vector<std::int32_t>{p - 1, 0});
  const double terms[] = {1e16, 1, -1e16, 1};
  double expected = terms[r % 4];
  all.sum({&expected, 1});
  const auto ordered = on_device(std::vector<double>{terms[r % 4]}, [&](double* data) {
    axis.sum(kernels::Array<double>{data, 1});
  });
  CHECK(ordered[0] == expected);
}

/// Many rounds without synchronisation of the host, as in consecutive steps: a write before the receiver is ready, or a
/// read before all pieces have arrived, results in a wrong value.
TEST_CASE("pieces are exchanged between exchange buffers, in many rounds") {
  const Communicator& all = testing::world().all();
  const kernels::Execution& execution = testing::execution();
  const std::int64_t p = all.size(), r = all.rank();
  constexpr std::int64_t kWords = 1000, kRounds = 50;
  const bench::FreshMemory fresh;
  std::vector<ExchangeStrategy> ways{{}, {.direct = false}, {.memory = &fresh}};
  for (const ExchangeStrategy strategy : ways) {
    // Rank a receives (a + 1) * kWords words from each.
    const std::int64_t sent = kWords * p * (p + 1) / 2, received = kWords * (r + 1) * p;
    DeviceCommunicator axis(all, execution, 8 * kWords * p * (p + 1), strategy);
    ExchangeBuffer from(all, 8 * kWords * p * (p + 1) / 2, strategy), to(all, 8 * kWords * p * p, strategy);
    if (!strategy.direct || strategy.memory != nullptr) CHECK(!axis.is_direct());
    std::vector<std::int64_t> bytes;
    for (std::int64_t a = 0; a < p; ++a) bytes.push_back(8 * kWords * (a + 1));
    device::HostBuffer<std::int64_t> values(kRounds * sent), results(kRounds * received);
    for (std::int64_t round = 0; round < kRounds; ++round)
      for (std::int64_t i = 0; i < sent; ++i) values.data()[round * sent + i] = (round * p + r) * sent + i;
    from.open();
    to.open();
    for (std::int64_t round = 0; round < kRounds; ++round) {
      device::copy(execution, from.data(), values.data() + round * sent, 8 * sent, device::Direction::to_device);
      axis.send_to_owners(from.data(), bytes, to.data(), "pieces");
      device::copy(execution, results.data() + round * received, to.data(), 8 * received, device::Direction::to_host);
    }
    kernels::fence(execution);
    std::int64_t wrong = 0;
    for (std::int64_t round = 0; round < kRounds; ++round)
      for (std::int64_t i = 0; i < received; ++i) {
        const std::int64_t piece = kWords * (r + 1), a = i / piece;
        const std::int64_t at = kWords * r * (r + 1) / 2 + i % piece;  // in the send buffer of rank a
        wrong += results.data()[round * received + i] == (round * p + a) * sent + at ? 0 : 1;
      }
    CHECK(wrong == 0);
    CHECK(axis.exchanges().total().bytes_sent == kRounds * (8 * sent - bytes[static_cast<std::size_t>(r)]));
  }
}

/// Only for GPUs that can access each other's memory; elsewhere exchanges must not be direct.
TEST_CASE("direct exchanges gather columns of uneven rows in place, and reduce, in many rounds") {
  const Communicator& all = testing::world().all();
  const kernels::Execution& execution = testing::execution();
  const std::int64_t p = all.size(), r = all.rank();
  constexpr std::int64_t kColumns = 24, kRows = 101, kFirst = 8, kSome = 12, kRounds = 50;
  DeviceCommunicator axis(all, execution, 1 << 20);
  ExchangeBuffer buffer(all, 4 * kRows * kColumns);
  CHECK(axis.is_direct() == (peers_of(all) != nullptr));
  if (kernels::kCudaBuild && p > 1 && !axis.is_direct())
    MESSAGE("these GPUs cannot access each other's memory, or ranks share one: direct exchanges are not tested");
  if (!axis.is_direct()) return;
  const kernels::AnyMatrix whole{buffer.data(), kernels::Scalar::fp32, kRows, kColumns, kColumns};
  std::vector<Range> rows;
  for (std::int64_t a = 0; a < p; ++a) rows.push_back(parallel::part(kRows, p, a));
  const Range own = rows[static_cast<std::size_t>(r)];
  constexpr std::int64_t kSize = kRows * kColumns;
  // Each value encodes rank and round: values outside the exchanged columns must not change.
  device::HostBuffer<float> values(kRounds * kSize), results(kRounds * kSize);
  for (std::int64_t i = 0; i < kRounds * kSize; ++i) values.data()[i] = static_cast<float>(100 * (i / kSize) + r);
  for (std::int64_t round = 0; round < kRounds; ++round) {
    device::copy(execution, buffer.data(), values.data() + round * kSize, 4 * kSize, device::Direction::to_device);
    axis.all_gather_rows(whole.columns_from(kFirst, kSome), rows, "rows");
    device::copy(execution, results.data() + round * kSize, buffer.data(), 4 * kSize, device::Direction::to_host);
  }
  kernels::fence(execution);
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < kRounds * kSize; ++i) {
    const std::int64_t row = i % kSize / kColumns, column = i % kColumns;
    std::int64_t owner = 0;
    while (row >= rows[static_cast<std::size_t>(owner)].end) ++owner;
    const bool travels = column >= kFirst && column < kFirst + kSome;
    wrong += results.data()[i] == static_cast<float>(100 * (i / kSize) + (travels ? owner : r)) ? 0 : 1;
  }
  CHECK(wrong == 0);
  CHECK(axis.exchanges().total().bytes_sent == kRounds * 4 * own.size() * kSome * (p - 1));

  // One value, a histogram, the largest direct reduction, and one value more.
  for (const std::int64_t size :
       {std::int64_t{1}, std::int64_t{2048}, Peers::Channel::kMostReduced / 8, Peers::Channel::kMostReduced / 8 + 1}) {
    device::Buffer<std::int64_t> sums(size);
    std::vector<std::int64_t> host(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) host[static_cast<std::size_t>(i)] = r + i;
    device::copy(execution, sums.data(), host.data(), 8 * size, device::Direction::to_device);
    // Each round reduces the result of the previous one: a factor of p after the first.
    for (std::int64_t round = 0; round < 5; ++round) axis.sum(sums.array(), "sums");
    device::copy(execution, host.data(), sums.data(), 8 * size, device::Direction::to_host);
    kernels::fence(execution);
    std::int64_t wrong_sums = 0;
    for (std::int64_t i = 0; i < size; ++i)
      wrong_sums += host[static_cast<std::size_t>(i)] == (p * (p - 1) / 2 + p * i) * p * p * p * p ? 0 : 1;
    CHECK(wrong_sums == 0);
  }
}

TEST_CASE("sums of rows are formed in rank order, of all types and sizes and between other exchanges") {
  const Communicator& all = testing::world().all();
  const kernels::Execution& execution = testing::execution();
  const std::int64_t p = all.size(), r = all.rank();
  DeviceCommunicator axis(all, execution, p * 2 * Peers::Channel::kMostRows);
  constexpr std::int64_t kColumns = 24;
  for (const kernels::Scalar type : {kernels::Scalar::fp32, kernels::Scalar::bf16, kernels::Scalar::fp16}) {
    const std::int64_t row_bytes = kColumns * kernels::bytes_of(type);
    // Few blocks, many, the largest direct sum, and more.
    for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{200}, Peers::Channel::kMostRows / row_bytes,
                                    Peers::Channel::kMostRows / row_bytes + 5, std::int64_t{3}}) {
      CAPTURE(rows);
      const device::Buffer<std::byte> memory(rows * row_bytes), gathered(p * rows * row_bytes);
      const kernels::AnyMatrix matrix{memory.data(), type, rows, kColumns, kColumns};
      const auto write = [&](std::int64_t round) {
        std::vector<std::byte> host(static_cast<std::size_t>(memory.bytes()));
        for (std::int64_t i = 0; i < rows * kColumns; ++i) {
          const auto value = static_cast<float>((i + 3 * r + round) % 17);  // sums are exact in each type
          const std::uint16_t narrow =
              type == kernels::Scalar::bf16 ? kernels::to_bf16(value).bits : kernels::to_half(value).bits;
          std::byte* const to = host.data() + i * kernels::bytes_of(type);
          if (type == kernels::Scalar::fp32)
            std::memcpy(to, &value, sizeof value);
          else
            std::memcpy(to, &narrow, sizeof narrow);
        }
        device::copy(execution, memory.data(), host.data(), memory.bytes(), device::Direction::to_device);
        kernels::fence(execution);
      };
      std::int64_t wrong = 0;
      for (std::int64_t round = 0; round < 5; ++round) {
        write(round);
        axis.sum_rows(matrix, gathered.data(), "rows");
        const std::vector<std::int64_t> one = on_device(std::vector<std::int64_t>{r}, [&](std::int64_t* data) {
          axis.sum(kernels::Array<std::int64_t>{data, 1}, "sums");  // barriers are still numbered alike
        });
        CHECK(one[0] == p * (p - 1) / 2);
        std::vector<std::byte> host(static_cast<std::size_t>(memory.bytes()));
        device::copy(execution, host.data(), memory.data(), memory.bytes(), device::Direction::to_host);
        kernels::fence(execution);
        for (std::int64_t i = 0; i < rows * kColumns; ++i) {
          float expected = 0, found = 0;
          for (std::int64_t rank = 0; rank < p; ++rank) expected += static_cast<float>((i + 3 * rank + round) % 17);
          const std::byte* const from = host.data() + i * kernels::bytes_of(type);
          std::uint16_t narrow = 0;
          if (type == kernels::Scalar::fp32) {
            std::memcpy(&found, from, sizeof found);
          } else {
            std::memcpy(&narrow, from, sizeof narrow);
            found = type == kernels::Scalar::bf16 ? float(kernels::bf16{narrow}) : float(kernels::half{narrow});
          }
          wrong += found == expected ? 0 : 1;
        }
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("a gather that no rank needs may be left out, and one that is needed arrives, in any order of both") {
  const Communicator& all = testing::world().all();
  const kernels::Execution& execution = testing::execution();
  const std::int64_t p = all.size(), r = all.rank();
  DeviceCommunicator axis(all, execution, 4 << 20);
  // One word, what a reduction takes at a time, one more, and several times that.
  constexpr std::int64_t kAtOnce = Peers::Channel::kMostReduced / 4;
  for (const std::int64_t piece : {std::int64_t{1}, std::int64_t{1000}, kAtOnce, kAtOnce + 1, 3 * kAtOnce + 17}) {
    CAPTURE(piece);
    const device::Buffer<std::uint32_t> words(p * piece), needed(1);
    for (const std::uint32_t round : {1u, 0u, 2u, 3u, 0u, 0u, 4u}) {
      // Own words show rank and round; those of the others are to be overwritten.
      const auto word = [&](std::int64_t owner, std::int64_t i) {
        return static_cast<std::uint32_t>(1000 * i + 10 * owner) + round;
      };
      std::vector<std::uint32_t> host(static_cast<std::size_t>(p * piece), 7);
      for (std::int64_t i = 0; i < piece; ++i) host[static_cast<std::size_t>(r * piece + i)] = word(r, i);
      device::copy(execution, words.data(), host.data(), 4 * p * piece, device::Direction::to_device);
      device::copy(execution, needed.data(), &round, sizeof round, device::Direction::to_device);
      axis.all_gather_if(needed.data(), words.array(), "ties");
      device::copy(execution, host.data(), words.data(), 4 * p * piece, device::Direction::to_host);
      kernels::fence(execution);
      const bool arrives = round != 0 || !axis.is_direct();
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < p * piece; ++i) {
        const std::int64_t owner = i / piece;
        wrong += host[static_cast<std::size_t>(i)] == (arrives || owner == r ? word(owner, i % piece) : 7) ? 0 : 1;
      }
      CHECK(wrong == 0);
      std::vector<std::int64_t> one = on_device(std::vector<std::int64_t>{r}, [&](std::int64_t* data) {
        axis.sum(kernels::Array<std::int64_t>{data, 1}, "sums");  // barriers are still numbered alike
      });
      CHECK(one[0] == p * (p - 1) / 2);
    }
  }
}

TEST_CASE("exchanges are counted by name, and the mean over ranks is the same on all ranks") {
  const Communicator& all = testing::world().all();
  const int p = all.size(), r = all.rank();
  DeviceCommunicator axis(all, testing::execution(), 1 << 12);
  const std::vector<std::int64_t> bytes(static_cast<std::size_t>(p), 24);
  const std::vector<std::int64_t> values(static_cast<std::size_t>(3 * p), r);
  for (int i = 0; i < 4; ++i) on_device(values, [&](std::int64_t* data) { axis.all_gather(data, bytes, "rows"); });
  const Exchanges before = axis.exchanges();
  on_device(values, [&](std::int64_t* data) { axis.all_gather(data, bytes, "rows"); });
  on_device(values, [&](std::int64_t* data) { axis.sum(kernels::Array<std::int64_t>{data, p}, "flags"); });
  if (p == 1) {
    CHECK(axis.exchanges().all().empty());
    return;
  }
  // Rows: 24 bytes to each other rank. Flags: 8 p bytes in a ring, 2 (p - 1) / p of them.
  const Exchanges two = axis.exchanges().since(before);
  CHECK(axis.traffic().bytes_sent == (p - 1) * (5 * 24 + 16));
  CHECK(two.total().bytes_sent == (p - 1) * (24 + 16));
  Exchanges mine = two;
  mine += before;
  CHECK(mine.of("rows").bytes_sent == 5 * 24 * (p - 1));
  CHECK(mine.of("rows").calls == 5);
  if (axis.is_timed()) CHECK(mine.of("rows").seconds > 0);

  mine.of("rows").bytes_sent += r;  // ranks may differ
  mine.of("rows").seconds = 1e-6;
  const std::vector<ExchangeProfile> means = profile(mine, 5, all);
  REQUIRE(means.size() == 2);
  CHECK(means[0].name == "rows");
  CHECK(means[0].bytes == doctest::Approx(24 * (p - 1) + 0.1 * (p - 1)));
  CHECK(means[0].calls == 1);
  CHECK(means[0].gb_per_second() == doctest::Approx(1e-9 * means[0].bytes / 0.2e-6));
  CHECK(means[1].name == "flags");
  CHECK(means[1].bytes == doctest::Approx(16.0 * (p - 1) / 5));
}

TEST_CASE("a non-blocking maximum completes on every rank") {
  const Communicator& all = testing::world().all();
  auto pending = all.start_maximum({all.rank(), -all.rank(), 7});
  const auto result = pending.wait();
  CHECK(result == std::vector<std::int64_t>{all.size() - 1, 0, 7});
  CHECK(!pending.active());
}

TEST_CASE("the parts of a batch cover it exactly once, for all grids") {
  const World& world = testing::world();
  for (std::int64_t data = 1; data <= world.size(); ++data) {
    if (world.size() % data != 0) continue;
    const Grid grid(world, grid_shape(data, {"feature", 0}, world.size()));
    for (const std::int64_t n : {1, 2, 7, 512}) {
      std::vector<std::int64_t> owners(static_cast<std::size_t>(n), 0);
      const Range own = grid.own_part(n);
      for (std::int64_t i = own.begin; i < own.end; ++i) ++owners[static_cast<std::size_t>(i)];
      world.all().sum(std::span<std::int64_t>(owners));
      for (const std::int64_t count : owners) REQUIRE(count == 1);
    }
    CHECK(grid.index(parallel::kDataAxis) * grid.size(parallel::kFeatureAxis) + grid.index(parallel::kFeatureAxis) ==
          world.rank());
  }
}

TEST_CASE("a grid that does not match the world is a usage error known to all ranks") {
  try {
    grid_shape(2, {"feature", 3}, 4);
    FAIL("accepted");
  } catch (const Error& e) {
    CHECK(e.code() == ExitCode::usage);
    CHECK(e.known_to() == KnownTo::all_ranks);
  }
}

}  // namespace weft::parallel
