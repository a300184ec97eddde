// SPDX-License-Identifier: Apache-2.0
//
// A tuner in a model's steps: its factor, its place in the registry, the sweep that leaves the state as it was.
#include <cmath>

#include "kernels/kokkos_runtime.hpp"
#include "model/learning_rate_tuning.hpp"
#include "tests/test.hpp"

namespace weft::model {
namespace {

template <class T>
T read(const T* from) {
  T value;
  device::copy(testing::execution(), &value, from, sizeof value, device::Direction::to_host);
  kernels::fence(testing::execution());
  return value;
}

template <class T>
void write(T* to, const T& value) {
  device::copy(testing::execution(), to, &value, sizeof value, device::Direction::to_device);
  kernels::fence(testing::execution());
}

/// One number w in the memory of the kernels, one on the host; the loss is w^2.
struct Model {
  explicit Model(const optimizer::Settings& settings)
      : grid(testing::world(), parallel::GridShape({{"data", testing::world().size()}})),
        arena(testing::execution(), grid),
        numbers(arena.take<double>(1)),
        losses(arena.take<float>(3)),
        constants(arena.take<kernels::AdamStep>(1)),
        tuning(settings, 1000, testing::execution(), LearningRateTuning::Buffers(settings, 2, arena)) {
    write(numbers.data, 1.0);
    write(losses.data + 2, 0.5f);
    const auto add = [&](const char* name, double* data, bool on_device) {
      registry.add({.name = name,
                    .type = kernels::Scalar::fp64,
                    .shape = {1},
                    .held = {0, 1},
                    .owned = {0, 1},
                    .data = data,
                    .on_device = on_device});
    };
    add("w", numbers.data, true);
    add("steps", &steps, false);
    tuning.add_to(registry, 0);
  }

  /// Returns the loss before the update.
  double step(double rate, bool withheld = false) {
    const double w = read(numbers.data), loss = w * w;
    kernels::AdamStep step{};
    step.learning_rate = static_cast<float>(rate);
    step.step = static_cast<std::uint64_t>(++steps);
    step.withheld = withheld ? 1 : 0;
    write(constants.data, step);
    for (int i = 0; i < 2; ++i) write(losses.data + i, static_cast<float>(loss));
    tuning.apply({losses.data, 2}, losses.data + 2, constants.data);
    applied = read(constants.data).learning_rate;
    write(numbers.data, w - 2 * static_cast<double>(applied) * w);
    return loss;
  }

  parallel::Grid grid;
  StepArena arena;
  kernels::Array<double> numbers;  // w
  kernels::Array<float> losses;    // two losses; their scale
  kernels::Array<kernels::AdamStep> constants;
  double steps = 0;
  float applied = 0;
  LearningRateTuning tuning;
  checkpoint::Registry registry;
};

optimizer::Settings with(optimizer::Tuning tuning) {
  optimizer::Settings settings;
  settings.learning_rate = 0.5;
  settings.tuning = tuning;
  return settings;
}

}  // namespace

TEST_CASE("without tuning nothing is registered and the learning rate stays") {
  Model model(with(optimizer::Tuning::none));
  CHECK(model.registry.find("optimizer/tuning") == nullptr);
  model.step(0.25);
  CHECK(model.applied == 0.25f);
}

TEST_CASE("the factor applies to the learning rate of each step, and a withheld step does not count") {
  Model model(with(optimizer::Tuning::plateau));
  REQUIRE(model.registry.find("optimizer/tuning") != nullptr);
  CHECK(model.registry.find("optimizer/tuning")->shape[0] == kernels::kTuningNumbers);
  for (int i = 0; i < 15; ++i) {
    model.step(0, i < 5);  // a rate of 0: the loss stays
    CHECK(model.tuning.factor() == 1);
  }
  model.step(0.125);
  CHECK(model.tuning.factor() == 0.5);
  CHECK(model.applied == 0.0625f);
  model.tuning.initialise();
  CHECK(model.tuning.factor() == 1);
}

TEST_CASE("the range test restores the state, and its rate replaces optimizer.learning_rate") {
  Model model(with(optimizer::Tuning::range));
  CHECK(model.tuning.needs_range_test());
  double least = 1;
  const double rate = range_test(model.registry, testing::execution(), [&](double at) {
    const double loss = model.step(at);
    least = std::min(least, loss);
    return loss;
  });
  CHECK(least < 0.1);
  CHECK(read(model.numbers.data) == 1.0);
  CHECK(model.steps == 0);
  CHECK(rate > 1e-4);
  CHECK(rate < 0.1);
  model.tuning.set_rate(rate);
  model.step(0.5);
  CHECK(model.applied == doctest::Approx(rate).epsilon(1e-6));
}

TEST_CASE(
    "a range test in which the loss falls at no rate is refused; one that ends in numbers that are not finite is not") {
  Model model(with(optimizer::Tuning::range));
  const auto run = [&](const std::function<double(double)>& step) {
    return range_test(model.registry, testing::execution(), step);
  };
  CHECK_THROWS_WITH_AS(run([](double) { return 1.0; }), doctest::Contains("finds no learning rate"), Error);
  double loss = 3;
  const double rate = run([&](double at) {
    if (at > 1e-3) throw collective_error(ExitCode::numeric, "not finite");
    write(model.numbers.data, 7.0);
    return loss -= 0.01;
  });
  CHECK(rate > 0);
  CHECK(read(model.numbers.data) == 1.0);
  CHECK_THROWS_WITH_AS(run([](double) -> double { throw collective_error(ExitCode::data, "damaged"); }), "damaged",
                       Error);
}

}  // namespace weft::model
