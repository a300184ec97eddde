// SPDX-License-Identifier: Apache-2.0
//
// The order of a step on the host: constants, guard, outcome, counts. Recording and running ahead need a GPU.
#include "model/step_runner.hpp"

#include "kernels/kokkos_runtime.hpp"
#include "tests/test.hpp"

namespace weft::model {
namespace {

/// A "model" of one number, to which each step adds its learning rate unless the step is withheld.
struct Toy {
  explicit Toy(const StepRunner::Settings& settings)
      : grid(testing::world(), parallel::GridShape({{"data", testing::world().size()}})),
        arena(testing::execution(), grid),
        flags(arena.take<kernels::StepFlags>(1)),
        runner(settings, testing::execution(), timers, StepRunner::Buffers(arena),
               [this] { return StepRunner::ExchangeGroups{exchanges}; }) {}

  void step(bool finite, float rate = 1, bool fault = false) {
    kernels::AdamStep constants{};
    constants.learning_rate = rate;
    constants.step = static_cast<std::uint64_t>(runner.steps_done() + 1);
    runner.begin(constants);
    runner.run([&] {
      exchanges.of("rows").bytes_sent += 10;
      const kernels::StepFlags found{finite ? 0 : 1, fault ? 1 : 0};
      device::copy(testing::execution(), flags.data, &found, sizeof found, device::Direction::to_device);
      runner.guard(flags.data);
      kernels::AdamStep here;
      device::copy(testing::execution(), &here, runner.constants(), sizeof here, device::Direction::to_host);
      kernels::fence(testing::execution());
      if (here.withheld == 0) number += here.learning_rate;
    });
    runner.end([] { return std::string("rows 3 to 7"); });
  }

  parallel::Grid grid;
  StepArena arena;
  run::Timers timers;
  parallel::Exchanges exchanges;
  kernels::Array<kernels::StepFlags> flags;
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
  Toy toy({.capture = false, .runs_ahead = false});
  toy.runner.resume_at(41);
  for (int i = 1; i <= 9; ++i) toy.step(true, static_cast<float>(i));
  toy.runner.wait();
  CHECK(toy.number == 45);
  CHECK(toy.runner.steps_done() == 50);
  CHECK(toy.runner.steps_here() == 9);
  CHECK(toy.runner.step_traffic().bytes_sent == 10);
  REQUIRE(toy.runner.exchanges().size() == 1);
  CHECK(toy.runner.exchanges()[0].total().bytes_sent == 90);
  CHECK(skipped(toy) == 0);
}

TEST_CASE("a step that is not finite ends the run before it updates, and the message names its rows") {
  Toy toy({.capture = false, .runs_ahead = false});
  toy.step(true);
  CHECK_THROWS_WITH_AS(toy.step(false), doctest::Contains("not finite at step 2, rows 3 to 7"), Error);
  CHECK(toy.number == 1);
  CHECK(toy.runner.steps_done() == 1);
}

TEST_CASE("the message of a private run neither suggests to skip steps nor says which rows it drew") {
  Toy toy({.capture = false, .runs_ahead = false, .may_skip = false});
  try {
    toy.step(false);
    FAIL("not thrown");
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::numeric);
    const std::string message = failure.what();
    CHECK(message.find("not finite at step 1") != std::string::npos);
    CHECK(message.find("run.nonfinite") == std::string::npos);
    CHECK(message.find("rows 3 to 7") == std::string::npos);
  }
}

TEST_CASE("a step that is not valid ends the run with an internal error before it updates, and the model says why") {
  for (const bool explained : {false, true}) {
    Toy toy({.capture = false, .runs_ahead = false, .skip = true, .skip_at_most = 5});
    if (explained)
      toy.runner.explain_fault([](std::int64_t step) {
        throw collective_error(ExitCode::internal, "the lists of step {} are too short", step);
      });
    toy.step(true);
    try {
      toy.step(true, 1, true);
      FAIL("not thrown");
    } catch (const Error& failure) {
      CHECK(failure.code() == ExitCode::internal);
      CHECK(failure.known_to() == KnownTo::all_ranks);
      CHECK(std::string(failure.what()) ==
            (explained ? "the lists of step 2 are too short" : "step 2 is not valid, rows 3 to 7"));
    }
    CHECK(toy.number == 1);
    CHECK(skipped(toy) == 0);
  }
}

TEST_CASE("steps that are not finite are skipped up to the allowed number") {
  Toy toy({.capture = false, .runs_ahead = false, .skip = true, .skip_at_most = 2});
  toy.step(true);
  toy.step(false);
  toy.step(true);
  toy.step(false);
  CHECK(toy.number == 2);
  CHECK(skipped(toy) == 2);
  CHECK_THROWS_WITH_AS(toy.step(false), doctest::Contains("run.skip_at_most = 2"), Error);
  CHECK(toy.number == 2);
}

}  // namespace weft::model
