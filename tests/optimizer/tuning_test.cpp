// SPDX-License-Identifier: Apache-2.0
//
// The rules that tune the learning rate, on synthetic curves of the loss. Their losses are multiples of 1/16, so that
// means are exact.
#include "optimizer/tuning.hpp"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "kernels/random.hpp"
#include "tests/test.hpp"

namespace weft::optimizer {
namespace {

Settings with(Tuning tuning) {
  Settings settings;
  settings.learning_rate = 1e-3;
  settings.tuning = tuning;
  return settings;
}

/// Steps from 1 and the factors that they change to.
std::vector<std::pair<int, double>> changes(const Settings& settings, int steps,
                                            const std::function<double(int step)>& loss) {
  kernels::TuningState state;
  std::vector<std::pair<int, double>> found;
  for (int step = 1; step <= steps; ++step) {
    const double before = state.factor;
    if (kernels::tune(tuning_rule(settings, 1000), step, loss(step), state) != before)
      found.push_back({step, state.factor});
  }
  return found;
}

using Changes = std::vector<std::pair<int, double>>;

/// Falls to 3 at step 48, and stays there.
double falls_then_stays(int step) { return 6 - std::min(step, 48) / 16.0; }

}  // namespace

TEST_CASE("plateau halves the rate after the patience, then after cooldown and patience again") {
  // The mean of 20 losses has its last new minimum at step 48 + 19.
  CHECK(changes(with(Tuning::plateau), 95, falls_then_stays) == Changes{{77, 0.5}, {92, 0.25}});
  Settings patient = with(Tuning::plateau);
  patient.tuning_patience = 25;
  CHECK(changes(patient, 95, falls_then_stays) == Changes{{92, 0.5}});
  CHECK(changes(with(Tuning::plateau), 90, [](int step) { return 8 - step / 16.0; }).empty());
}

TEST_CASE("plateau does not lower the rate below 1e-7") {
  const Changes found = changes(with(Tuning::plateau), 1000, [](int) { return 1.0; });
  REQUIRE_FALSE(found.empty());
  CHECK(found.back().second * 1e-3 == doctest::Approx(1e-7).epsilon(1e-12));
  Settings tiny = with(Tuning::plateau);
  tiny.learning_rate = 1e-8;
  CHECK(changes(tiny, 100, [](int) { return 1.0; }).empty());
}

TEST_CASE("plateau halves the rate at once at a spike, which the loss before it defines") {
  const auto spike = [](double height) { return [height](int step) { return step == 40 ? height : 8 - step / 16.0; }; };
  // The mean of steps 20 to 39 is 8 - 29.5/16 = 6.16.
  CHECK(changes(with(Tuning::plateau), 60, spike(9.5)) == Changes{{40, 0.5}});
  CHECK(changes(with(Tuning::plateau), 60, spike(9)).empty());
}

TEST_CASE("greedy raises the rate while the loss falls and lowers it while it rises, within bounds") {
  const double up = 1 / 0.9;
  CHECK(changes(with(Tuning::greedy), 25, [](int step) { return 100 - step / 16.0; }) ==
        Changes{{10, up}, {20, up * up}});
  // The first loss is a minimum; the mean rises from then on.
  CHECK(changes(with(Tuning::greedy), 25, [](int step) { return 100 + step / 16.0; }) ==
        Changes{{11, 0.9}, {21, 0.9 * 0.9}});
  CHECK(changes(with(Tuning::greedy), 2000, [](int step) { return 100 - step / 16.0; }).back().second == 10);
  CHECK(changes(with(Tuning::greedy), 2000, [](int step) { return 100 + step / 16.0; }).back().second == 0.1);
  // Neither: differences below 1e-4 of the loss.
  CHECK(changes(with(Tuning::greedy), 100, [](int step) { return 100 + step / 65536.0; }).empty());
}

TEST_CASE("steps of the warm-up are not judged") {
  Settings settings = with(Tuning::plateau);
  settings.warmup_steps = 30;
  CHECK(changes(settings, 45, [](int) { return 1.0; }) == Changes{{41, 0.5}});
  for (const Tuning tuning : {Tuning::none, Tuning::range})
    CHECK(changes(with(tuning), 100, [](int) { return 1.0; }).empty());
}

TEST_CASE("a run that is resumed from its stored state at any step continues with the same factors") {
  for (const Tuning tuning : {Tuning::plateau, Tuning::greedy}) {
    const kernels::TuningRule rule = tuning_rule(with(tuning), 1000);
    kernels::TuningState whole, resumed;
    for (int step = 1; step <= 300; ++step) {
      const kernels::Random4 random =
          kernels::philox(1, kernels::Purpose::row_order, 0, static_cast<std::uint64_t>(step));
      const double loss =
          2 + 3 * std::exp(-step / 40.0) + 0.3 * static_cast<double>(kernels::uniform_float(random.word[0]));
      double stored[kernels::kTuningNumbers];
      std::memcpy(stored, &resumed, sizeof stored);
      for (const double number : stored) CHECK(std::isfinite(number));  // else a checkpoint would refuse it
      kernels::TuningState loaded;
      std::memcpy(&loaded, stored, sizeof stored);
      CHECK(kernels::tune(rule, step, loss, whole) == kernels::tune(rule, step, loss, loaded));
      resumed = loaded;
    }
    CHECK(whole.factor != 1);
  }
}

namespace {

/// The result of a sweep over `loss`, by the decimal logarithm of the rate; how many steps it took.
std::pair<double, std::int64_t> sweep(const std::function<double(double log_rate)>& loss) {
  RangeTest test;
  std::int64_t steps = 0;
  bool more = true;
  for (; more; ++steps) more = test.add(loss(std::log10(RangeTest::rate(steps))));
  return {test.result(), steps};
}

}  // namespace

TEST_CASE("the range test sweeps from 1e-7 to 1 and returns a tenth of the rate of the steepest fall") {
  CHECK(RangeTest::rate(0) == doctest::Approx(1e-7).epsilon(1e-12));
  CHECK(RangeTest::rate(99) == doctest::Approx(1).epsilon(1e-12));
  // Falls around 1e-4, explodes from 1e-1 on. The exponential average lags behind by some steps of 1.17 each.
  const auto loss = [](double log_rate) {
    return 5 - 3 / (1 + std::exp(-4 * (log_rate + 4))) + std::exp(20 * (log_rate + 1));
  };
  const auto [rate, steps] = sweep(loss);
  CHECK(rate > 1e-5);
  CHECK(rate < 1e-3);
  CHECK(steps < RangeTest::kSteps);
  CHECK(steps > 85);
}

TEST_CASE("the range test runs to its end while the loss does not explode, and ignores its noise at the beginning") {
  const auto falls = [](double log_rate) {
    return log_rate < -6.9 ? 5.5 : 5 - 3 / (1 + std::exp(-4 * (log_rate + 2)));
  };
  const auto [rate, steps] = sweep(falls);
  CHECK(steps == RangeTest::kSteps);
  CHECK(rate > 1e-7);  // not that of the first losses
}

TEST_CASE("the range test finds nothing if the loss never falls, and ends at a loss that is not finite") {
  CHECK(sweep([](double) { return 2.0; }).first == 0);
  CHECK(sweep([](double log_rate) { return 2 + log_rate / 100; }).first == 0);
  const auto [rate, steps] = sweep([](double log_rate) {
    return log_rate > -3 ? std::numeric_limits<double>::quiet_NaN() : 5 - std::pow(log_rate + 7, 2) / 16;
  });
  CHECK(steps < 60);
  CHECK(rate > 1e-6);
}

}  // namespace weft::optimizer
