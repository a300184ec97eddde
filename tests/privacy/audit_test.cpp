// SPDX-License-Identifier: Apache-2.0
//
// The bound of an audit, the coins of canaries, and which canaries a step draws.
#include "privacy/audit.hpp"

#include <algorithm>
#include <cmath>

#include "checkpoint/registry.hpp"
#include "privacy/account.hpp"
#include "tests/test.hpp"

namespace weft::privacy {
namespace {

/// Bounds by exact binomial coefficients in decimal arithmetic of 60 digits; scipy 1.17.1 gives the same digits.
struct RecordedBound {
  std::int64_t canaries, guesses, right;
  double delta, confidence, epsilon;
};
constexpr RecordedBound kRecorded[] = {{100, 100, 100, 0, 0.95, 3.492965431},
                                       {1000, 100, 75, 1e-05, 0.95, 0.6994668132},
                                       {64, 32, 32, 1e-05, 0.95, 2.319492197},
                                       {64, 32, 30, 0.001, 0.95, 1.393783567},
                                       {256, 128, 70, 1e-05, 0.95, 0},
                                       {256, 128, 118, 0.0001, 0.99, 1.688598569},
                                       {1000, 1000, 560, 1e-06, 0.95, 0.1344751809},
                                       {1000, 1000, 700, 1e-05, 0.999, 0.628138437},
                                       {10, 2, 2, 1e-05, 0.7, 0.1911078896},
                                       {500, 50, 50, 0.01, 0.95, 0}};

}  // namespace

TEST_CASE("the bound of epsilon is that of the theorem") {
  for (const RecordedBound& recorded : kRecorded) {
    CAPTURE(recorded.canaries);
    CAPTURE(recorded.right);
    const Guesses guesses{recorded.canaries, recorded.guesses, recorded.right};
    const double bound = least_epsilon(guesses, recorded.delta, recorded.confidence);
    CHECK(bound == doctest::Approx(recorded.epsilon).epsilon(1e-8));
    if (bound > 0)
      CHECK(probability_of_guesses(guesses, bound, recorded.delta) ==
            doctest::Approx(1 - recorded.confidence).epsilon(1e-8));
  }
  // No guess right: nothing follows.
  CHECK(least_epsilon({100, 50, 0}, 1e-5, 0.95) == 0);
}

TEST_CASE("guesses take the ends of the scores") {
  const std::vector<double> scores = {3, -1, 0, 5, 2, -4};
  const Guesses two = guess(scores, {false, true, true, true, false, false}, 2);
  CHECK((two.canaries == 6 && two.made == 2 && two.right == 2));  // 5 is, -4 is not
  CHECK(guess(scores, {false, true, true, true, false, false}, 4).right == 2);
  CHECK(guess(scores, {true, false, false, true, true, false}, 6).right == 6);
}

TEST_CASE("a canary is drawn as any record if its coin says so, else never") {
  Settings settings;
  settings.enabled = true;
  settings.noise_multiplier = 1;
  settings.delta = 1e-5;
  settings.accountant = AccountantKind::rdp;
  settings.noise_key = KeySource::test;
  settings.canaries = 400;
  constexpr std::int64_t kCount = 600, kSteps = 60;
  constexpr double kRate = 0.25;
  Account account(settings, kRate, {.tokens = 17, .count = kCount});
  account.begin(5, kSteps, weft::testing::world().all());
  const std::vector<bool> coins = account.canaries();
  const auto heads = std::count(coins.begin(), coins.end(), true);
  CHECK(std::abs(static_cast<double>(heads) - 200) < 5 * 10);
  std::vector<std::int64_t> drawn(kCount, 0);
  for (std::int64_t step = 1; step <= kSteps; ++step)
    for (const std::int64_t record : account.draw(step, weft::testing::world().all()))
      ++drawn[static_cast<std::size_t>(record)];
  for (std::int64_t record = 0; record < kCount; ++record) {
    const bool is_in = record < 200 || coins[static_cast<std::size_t>(record - 200)];
    CHECK((drawn[static_cast<std::size_t>(record)] > 0) == is_in);
  }
  // The coins stay with another key of later steps: they are part of the checkpoint.
  checkpoint::Registry registry;
  account.register_in(registry, true);
  CHECK(registry.is_secret("privacy/first_key"));
  for (std::int64_t step = 0; step < kSteps; ++step) account.count_step();
  account.resume(5, kSteps, 2 * kSteps, true, weft::testing::world().all());
  CHECK(account.canaries() == coins);
}

}  // namespace weft::privacy
