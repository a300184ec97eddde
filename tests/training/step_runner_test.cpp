// SPDX-License-Identifier: Apache-2.0
//
// The order of a step on the host: constants, guard, outcome, counts. Recording and running ahead need a GPU.
#include "training/step_runner.hpp"

#include "kernels/runtime.hpp"
#include "tests/test.hpp"

namespace weft::training {
namespace {

/// A "model" of one number, to which each step adds its learning rate unless the step is withheld.
struct Toy {
  explicit Toy(const StepRunner::Settings& settings)
      : grid(testing::world(), parallel::GridShape({{"data", testing::world().size()}})),
        arena(testing::execution(), grid),
        flag(arena.take<std::int32_t>(1)),
        runner(settings, testing::execution(), timers, StepRunner::Buffers(arena),
               [this] { return StepRunner::ExchangeGroups{exchanges}; }) {}

  void step(bool finite, float rate = 1) {
    kernels::AdamStep constants{};
    constants.learning_rate = rate;
    constants.step = static_cast<std::uint64_t>(runner.steps_done() + 1);
    runner.begin(constants);
    runner.run([&] {
      exchanges.of("rows").bytes_sent += 10;
      const std::int32_t value = finite ? 0 : 1;
      device::copy(testing::execution(), flag.data, &value, sizeof value, device::Direction::to_device);
      runner.guard(flag.data);
      kernels::AdamStep here;
      device::copy(testing::execution(), &here, runner.constants(), sizeof here, device::Direction::to_host);
      kernels::fence(testing::execution());
      if (here.withheld == 0) number += here.learning_rate;
    });
    runner.end([] { return std::string("rows 3 to 7"); });
  }

  parallel::Grid grid;
  StepArena arena;
  report::Timers timers;
  parallel::Exchanges exchanges;
  kernels::Array<std::int32_t> flag;
  StepRunner runner;
  float number = 0;
};

std::int64_t skipped(const Toy& toy) {
  std::int64_t value = -1;
  device::copy(testing::execution(), &value, toy.runner.skipped(), sizeof value, device::Direction::to_host);
  kernels::fence(testing::execution());
  return value;
}

}  // namespace

TEST_CASE("each step gets its own constants, and steps and exchanges are counted") {
  Toy toy({.record = false, .runs_ahead = false});
  toy.runner.resume_at(41);
  for (int i = 1; i <= 9; ++i) toy.step(true, static_cast<float>(i));
  toy.runner.settle();
  CHECK(toy.number == 45);
  CHECK(toy.runner.steps_done() == 50);
  CHECK(toy.runner.steps_here() == 9);
  CHECK(toy.runner.step_traffic().bytes_sent == 10);
  REQUIRE(toy.runner.exchanges().size() == 1);
  CHECK(toy.runner.exchanges()[0].total().bytes_sent == 90);
  CHECK(skipped(toy) == 0);
}

TEST_CASE("a step that is not finite ends the run before it updates, and the message names its rows") {
  Toy toy({.record = false, .runs_ahead = false});
  toy.step(true);
  CHECK_THROWS_WITH_AS(toy.step(false), doctest::Contains("not finite at step 2, rows 3 to 7"), Error);
  CHECK(toy.number == 1);
  CHECK(toy.runner.steps_done() == 1);
}

TEST_CASE("steps that are not finite are skipped up to the allowed number") {
  Toy toy({.record = false, .runs_ahead = false, .skip = true, .skip_at_most = 2});
  toy.step(true);
  toy.step(false);
  toy.step(true);
  toy.step(false);
  CHECK(toy.number == 2);
  CHECK(skipped(toy) == 2);
  CHECK_THROWS_WITH_AS(toy.step(false), doctest::Contains("run.skip_at_most = 2"), Error);
  CHECK(toy.number == 2);
}

}  // namespace weft::training
