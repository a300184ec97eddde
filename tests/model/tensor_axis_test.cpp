// SPDX-License-Identifier: Apache-2.0
//
// Sums of rows over the tensor axis: formed in rank order, complete after `await` and, on the host, not before.
#include "model/tensor_axis.hpp"

#include <vector>

#include "base/error.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "tests/test.hpp"

namespace weft::model {
namespace {

constexpr std::int64_t kRows = 5, kColumns = 3;  // divided unevenly

struct Axis {
  /// gathered: with few bytes, rows are summed by their owners.
  explicit Axis(bool overlap, std::int64_t gathered = 64)
      : grid(testing::world().all(),
             parallel::GridShape({{std::string(parallel::kTensorAxis), testing::world().size()}})),
        arena(testing::execution(), grid),
        axis(grid, testing::execution(),
             TensorAxis::Buffers(grid.shape(), kernels::Scalar::fp32, kRows, kColumns, gathered, arena), overlap) {}
  parallel::Grid grid;
  StepArena arena;
  TensorAxis axis;
};

std::vector<float> to_host(const float* data, std::int64_t size) {
  std::vector<float> values(static_cast<std::size_t>(size));
  device::copy(testing::execution(), values.data(), data, 4 * size, device::Direction::to_host);
  kernels::fence(testing::execution());
  return values;
}

/// What this rank contributes, from `first` on.
struct Rows {
  explicit Rows(float first) : memory(kRows * kColumns) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < memory.size(); ++i)
      values.push_back(first + static_cast<float>(i) + 1000 * static_cast<float>(testing::world().rank()));
    device::copy(testing::execution(), memory.data(), values.data(), memory.bytes(), device::Direction::to_device);
    kernels::fence(testing::execution());
  }
  kernels::AnyMatrix matrix() { return {memory.data(), kernels::Scalar::fp32, kRows, kColumns, kColumns}; }
  std::vector<float> values() { return to_host(memory.data(), memory.size()); }
  device::Buffer<float> memory;
};

void check_sums(Rows& rows, float first) {
  const auto n = static_cast<float>(testing::world().size());
  const std::vector<float> values = rows.values();
  for (std::size_t i = 0; i < values.size(); ++i)
    CHECK(values[i] == n * (first + static_cast<float>(i)) + 1000 * n * (n - 1) / 2);  // whole numbers: exact
}

}  // namespace

TEST_CASE("two sums are under way at a time, and each is complete when it has been awaited") {
  for (const auto& [overlap, gathered] : {std::pair{true, 64}, {false, 64}, {true, 16}, {false, 16}}) {
    CAPTURE(overlap);
    CAPTURE(gathered);
    Axis ranks(overlap, gathered);
    Rows first(1), second(100);
    ranks.axis.start_sum(first.matrix(), "first");
    ranks.axis.start_sum(second.matrix(), "second");
    if (!device::is_asynchronous(testing::execution())) {
      // Work that reads rows too early gets wrong numbers here, too: tests on the host find it.
      CHECK(first.values() == Rows(1).values());
      CHECK(second.values() == Rows(100).values());
    }
    CHECK_THROWS_WITH_AS(ranks.axis.start_sum(Rows(0).matrix(), "third"), doctest::Contains("2 sums"), Error);
    ranks.axis.await(second.matrix());  // in any order
    check_sums(second, 100);
    ranks.axis.await(first.matrix());
    ranks.axis.await(first.matrix());  // nothing is under way: no effect
    check_sums(first, 1);
  }
}

TEST_CASE("values that are gathered while a sum is under way do not disturb it") {
  Axis ranks(true);
  Rows rows(1);
  ranks.axis.start_sum(rows.matrix(), "rows");
  Rows own(0);
  const kernels::Array<const float> all = ranks.axis.gather(kernels::Array<float>{own.memory.data(), 4}, "values");
  const std::vector<float> values = to_host(all.data, all.size);
  for (int rank = 0; rank < testing::world().size(); ++rank)
    CHECK(values[static_cast<std::size_t>(4 * rank + 3)] == 3 + 1000 * static_cast<float>(rank));
  ranks.axis.await(rows.matrix());
  check_sums(rows, 1);
}

}  // namespace weft::model
