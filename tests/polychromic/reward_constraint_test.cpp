// SPDX-License-Identifier: Apache-2.0
//
// The weight of the diversity that holds the mean reward: signs, what it converges to, its limits, its state.
#include "polychromic/reward_constraint.hpp"

#include <cmath>
#include <cstring>

#include "kernels/random.hpp"
#include "tests/kernels/support.hpp"

namespace weft::polychromic {

namespace {

Settings settings(double weight = 1) {
  Settings settings;
  settings.hold_reward = HoldReward::initial;
  settings.diversity_weight = weight;
  return settings;
}

TEST_CASE("a reward above the target raises the weight, one below lowers it, the target keeps it") {
  for (const double error : {-0.01, 0.0, 0.01}) {
    const Settings given = settings(0.7);
    RewardConstraint constraint(given);
    constraint.begin(0.3);
    CHECK(constraint.diversity_weight() == 0.7);
    constraint.observe(0.3 + error);
    // One batch: e = s = error.
    const double expected = 0.7 * std::exp(given.hold_gain * error * (1 + 1 / static_cast<double>(given.hold_horizon)));
    CHECK(std::abs(constraint.diversity_weight() - expected) < 1e-12);
  }
}

TEST_CASE("the reward of a training reaches its target, whatever weight it begins with") {
  // What a training does, in short: the reward changes with each step, the faster the more the weight differs from the
  // one at which reward and diversity balance, which is not known.
  constexpr double kBalance = 1.3, kRate = 0.02, kTarget = 0.3;
  constexpr int kSteps = 600, kLast = 200;
  for (const double first_weight : {0.8, 1.3, 2.0}) {
    const Settings given = settings(first_weight);
    RewardConstraint constraint(given);
    constraint.begin(kTarget);
    double reward = kTarget, sum = 0;
    for (int step = 0; step < kSteps; ++step) {
      // Of 32 answers whose rewards have a standard deviation of 0.06.
      const std::uint32_t word =
          kernels::philox(1, kernels::Purpose::test, 0, static_cast<std::uint64_t>(step)).word[0];
      const double noise =
          0.06 / std::sqrt(32.0) * std::sqrt(12.0) * (static_cast<double>(kernels::uniform_float(word)) - 0.5);
      constraint.observe(reward + noise);
      reward -= kRate * std::log(constraint.diversity_weight() / kBalance);
      if (step >= kSteps - kLast) sum += reward;
    }
    CHECK(std::abs(sum / kLast - kTarget) < 0.01 * kTarget);
    CHECK(std::abs(reward - kTarget) < 0.05 * kTarget);  // and it does not oscillate
  }
}

TEST_CASE("a target that is never reached leaves a weight that is finite, and from which it returns") {
  const Settings given = settings();
  RewardConstraint constraint(given);
  constraint.begin(0.9);
  for (int step = 0; step < 100000; ++step) constraint.observe(0);
  const double lowest = constraint.diversity_weight();
  CHECK(lowest > 1e-3);
  CHECK(lowest < 0.1);
  int steps = 0;
  while (constraint.diversity_weight() < 1 && steps < 100000) {
    constraint.observe(1.8);
    ++steps;
  }
  CHECK(steps < 1000);
}

TEST_CASE("the state of a constraint continues another one bit for bit") {
  const Settings given = settings();
  RewardConstraint whole(given), part(given), next(given);
  whole.begin(0.3);
  part.begin(0.3);
  const auto reward = [](int step) { return 0.3 + 0.01 * std::sin(step); };
  for (int step = 0; step < 7; ++step) {
    whole.observe(reward(step));
    part.observe(reward(step));
  }
  checkpoint::Registry saved, loaded;
  part.add_to(saved, true);
  next.add_to(loaded, false);
  const checkpoint::Tensor &from = saved.tensors()[0], &to = loaded.tensors()[0];
  CHECK(from.owned.size() == from.shape[0]);  // one rank writes it
  CHECK(to.owned.size() == 0);
  std::memcpy(to.data, from.data, static_cast<std::size_t>(from.shape[0]) * sizeof(double));
  for (int step = 7; step < 20; ++step) {
    whole.observe(reward(step));
    next.observe(reward(step));
  }
  CHECK(whole.diversity_weight() == next.diversity_weight());
  CHECK(next.target() == 0.3);
}

}  // namespace
}  // namespace weft::polychromic
