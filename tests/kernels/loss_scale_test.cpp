// SPDX-License-Identifier: Apache-2.0
#include "kernels/optimize/loss_scale.hpp"

#include <cmath>
#include <limits>

#include "kernels/optimize/adam.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

/// Steps of one parameter with the gradient of a scaled loss, and no more precision than the kernels have.
struct Scaled {
  Execution execution;
  DeviceArray<LossScale> scale{std::vector<LossScale>{LossScale{}}};
  DeviceArray<StepGuard> guard{std::vector<StepGuard>{StepGuard{0, 0}}};
  DeviceArray<AdamStep> step{std::vector<AdamStep>{AdamStep{}}};
  DeviceArray<StepOutcome> outcomes{std::vector<StepOutcome>(kOutcomes)};
  DeviceArray<float> w{std::vector<float>{1.0f}}, m{1}, v{1}, gradient{1};
  DeviceArray<double> norm{1};
  std::uint64_t number = 0;

  static AdamStep constants(std::uint64_t t) {
    const auto correction = [t](double beta) {
      return static_cast<float>(1 / (1 - std::pow(beta, static_cast<double>(t))));
    };
    return {.learning_rate = 0.01f,
            .beta1 = 0.9f,
            .beta2 = 0.95f,
            .first_gain = 0.1f,
            .second_gain = 0.05f,
            .epsilon = 1e-8f,
            .weight_decay = 0,
            .first_correction = correction(0.9),
            .second_correction = correction(0.95),
            .gradient_scale = 1,
            .seed = 0,
            .step = t};
  }

  StepOutcome run(float unscaled, bool overflows, double bound = 0) {
    step.set({constants(++number)});
    const DeviceArray<float> factor(std::vector<float>{unscaled});
    scale_loss(execution, scale.data(), factor.data());
    const float scaled = overflows ? std::numeric_limits<float>::infinity() : factor.values()[0];
    gradient.set({scaled});
    const DeviceArray<double> squared(std::vector<double>{static_cast<double>(scaled) * static_cast<double>(scaled)});
    const DeviceArray<StepFlags> flags(std::vector<StepFlags>{{overflows ? 1 : 0, 0}});
    guard_step(execution, flags.data(), 0, guard.data(), step.data(), outcomes.data(), scale.data());
    unscale_and_clip(execution, squared.data(), bound, scale.data(), norm.data(), step.data());
    adam_vector(execution, {w.array(), m.array(), v.array()}, gradient.array(), step.data());
    update_loss_scale(execution, flags.data(), scale.data());
    return outcomes.values()[number % kOutcomes];
  }
  double present() const { return scale.values()[0].scale; }
};

}  // namespace

TEST_CASE("an overflow withholds exactly one update and does not advance Adam's t") {
  for_each_backend([&](const kernels::Execution& execution) {
    const float gradients[] = {0.5f, -0.25f, 0.125f, 1.0f};
    Scaled with{execution}, without{execution};
    for (int i = 0; i < 4; ++i) {
      without.run(gradients[i], false);
      if (i == 2) {
        const StepOutcome outcome = with.run(gradients[i], true);
        CHECK(outcome.withheld == 1);
        CHECK(outcome.overflow == 1);
        CHECK(outcome.halted == kRuns);
        CHECK(outcome.skipped == 0);
      }
      CHECK(with.run(gradients[i], false).withheld == 0);
      // Equal but for the corrections, which are formed from 1 - beta: an error of 2^-24 each, of an update of 0.01.
      CHECK(std::abs(with.w.values()[0] - without.w.values()[0]) <= (i < 2 ? 0.0f : 0x1p-23f));
    }
    CHECK(with.scale.values()[0].overflows == 1);
  });
}

TEST_CASE("the scale leaves updates unchanged, and the norm and its clipping are those of the gradient itself") {
  for_each_backend([&](const kernels::Execution& execution) {
    Scaled steps{execution};
    steps.run(0.5f, false, 1.0);
    CHECK(steps.norm.values()[0] == 0.5);
    CHECK(steps.step.values()[0].gradient_scale == 0x1p-16f);
    CHECK(steps.m.values()[0] == doctest::Approx(0.05).epsilon(1e-7));
    steps.run(4.0f, false, 1.0);
    CHECK(steps.norm.values()[0] == 4.0);
    CHECK(steps.step.values()[0].gradient_scale == 0x1p-18f);
    // Without a scale: the same with S = 1.
    const DeviceArray<double> squared(std::vector<double>{16.0});
    unscale_and_clip(execution, squared.data(), 1.0, nullptr, steps.norm.data(), steps.step.data());
    CHECK(steps.norm.values()[0] == 4.0);
    CHECK(steps.step.values()[0].gradient_scale == 0.25f);
  });
}

TEST_CASE("the scale halves from the second overflow on and doubles after 2000 clean steps") {
  for_each_backend([&](const kernels::Execution& execution) {
    const DeviceArray<LossScale> scale(std::vector<LossScale>{LossScale{}});
    const DeviceArray<StepFlags> clean(std::vector<StepFlags>{{0, 0}}), overflow(std::vector<StepFlags>{{1, 0}});
    const auto after = [&](const DeviceArray<StepFlags>& flags, int steps) {
      for (int i = 0; i < steps; ++i) update_loss_scale(execution, flags.data(), scale.data());
      return scale.values()[0].scale;
    };
    CHECK(after(overflow, 1) == 0x1p16);
    CHECK(after(clean, 1999) == 0x1p16);
    CHECK(after(overflow, 1) == 0x1p15);
    CHECK(after(overflow, 1) == 0x1p14);
    CHECK(after(clean, 1999) == 0x1p14);
    CHECK(after(clean, 1) == 0x1p15);
    CHECK(after(overflow, 1) == 0x1p15);  // the first one since it doubled
    CHECK(after(overflow, 1) == 0x1p14);
    CHECK(after(overflow, 30) == 1);
    CHECK(after(clean, 2000) == 2);
  });
}

TEST_CASE("a step that is not finite at the least scale ends the run like any other") {
  for_each_backend([&](const kernels::Execution& execution) {
    Scaled steps{execution};
    steps.scale.set({LossScale{.scale = 2, .hysteresis = 0}});
    CHECK(steps.run(1.0f, true).overflow == 1);
    CHECK(steps.present() == 1);
    const StepOutcome outcome = steps.run(1.0f, true);
    CHECK(outcome.overflow == 0);
    CHECK(outcome.halted == kNotFinite);
    CHECK(steps.w.values()[0] == 1.0f);
  });
}

}  // namespace weft::testing
