// SPDX-License-Identifier: Apache-2.0
#include "optimizer/schedule.hpp"

#include <cmath>

#include "tests/test.hpp"

namespace weft::optimizer {

TEST_CASE("each schedule keeps the rate until decay_begin and then decays as defined") {
  Settings settings;
  settings.learning_rate = 2.0;
  settings.decay_begin = 0.5;
  settings.final_fraction = 0.1;
  // s - 1 steps are complete when step s of 100 begins: q = ((s - 1) / 100 - 0.5) / 0.5.
  for (const Schedule schedule :
       {Schedule::constant, Schedule::linear, Schedule::cosine, Schedule::step, Schedule::wsd}) {
    settings.schedule = schedule;
    CHECK(learning_rate(settings, 1, 100) == 2.0);
    CHECK(learning_rate(settings, 50, 100) == 2.0);
  }
  settings.schedule = Schedule::constant;
  CHECK(learning_rate(settings, 100, 100) == 2.0);
  settings.schedule = Schedule::linear;
  CHECK(learning_rate(settings, 76, 100) == doctest::Approx(2.0 * 0.55).epsilon(1e-12));
  settings.schedule = Schedule::cosine;
  CHECK(learning_rate(settings, 76, 100) == doctest::Approx(2.0 * 0.55).epsilon(1e-12));
  settings.schedule = Schedule::step;
  CHECK(learning_rate(settings, 51, 100) == doctest::Approx(0.2).epsilon(1e-12));
}

TEST_CASE("cosine and wsd have the values of their definitions") {
  Settings settings;
  settings.learning_rate = 1.0;
  settings.schedule = Schedule::cosine;
  settings.warmup_steps = 10;
  settings.decay_begin = 0;
  settings.final_fraction = 0.1;
  // After t steps, of 100.
  const auto rate = [&](std::int64_t t) { return learning_rate(settings, t + 1, 100); };
  for (const auto& [t, expected] : {std::pair{0, 0.1}, {9, 1.0}, {10, 1.0}, {55, 0.55}, {100, 0.1}})
    CHECK(rate(t) == doctest::Approx(expected).epsilon(1e-12));
  settings.schedule = Schedule::wsd;
  settings.warmup_steps = 0;
  settings.decay_begin = 0.8;
  settings.final_fraction = 0;
  for (const auto& [t, expected] : {std::pair{0, 1.0}, {80, 1.0}, {85, 0.5}, {95, 1 - std::sqrt(0.75)}, {100, 0.0}})
    CHECK(rate(t) == doctest::Approx(expected).epsilon(1e-12));
}

TEST_CASE("a warm-up as a fraction of the schedule has the rates of one in steps") {
  Settings settings;
  settings.schedule = Schedule::cosine;
  settings.decay_begin = 0;
  Settings fraction = settings;
  settings.warmup_steps = 12;
  fraction.warmup_steps = 100;  // the default of language models has no effect then
  fraction.warmup_fraction = 0.03;
  for (const std::int64_t step : {1, 11, 12, 13, 200, 400})
    CHECK(learning_rate(fraction, step, 400) == doctest::Approx(learning_rate(settings, step, 400)).epsilon(1e-12));
  CHECK(learning_rate(fraction, 6, 200) == settings.learning_rate);
  // It is a fraction of the schedule, which may be longer than the run.
  fraction.schedule_steps = 400;
  settings.schedule_steps = 400;
  CHECK(learning_rate(fraction, 6, 200) == doctest::Approx(learning_rate(settings, 6, 200)).epsilon(1e-12));
}

TEST_CASE("the decay does not begin before the warm-up has ended") {
  for (const Schedule schedule : {Schedule::linear, Schedule::cosine, Schedule::step, Schedule::wsd}) {
    Settings settings;
    settings.learning_rate = 1.0;
    settings.schedule = schedule;
    settings.warmup_steps = 20;
    settings.decay_begin = 0.1;
    CHECK(learning_rate(settings, 20, 100) == 1.0);
    CHECK(learning_rate(settings, 22, 100) < 1.0);
  }
}

TEST_CASE("schedule_steps replaces the length of the run") {
  Settings settings;
  Settings fixed = settings;
  fixed.schedule_steps = 100;
  for (const std::int64_t step : {1, 81, 95, 100})
    CHECK(learning_rate(fixed, step, 300) == learning_rate(settings, step, 100));
  fixed.final_fraction = 0.1;
  CHECK(learning_rate(fixed, 250, 300) == doctest::Approx(0.1 * fixed.learning_rate));
}

TEST_CASE("a continued run warns of a stretched schedule, with both rates, and not without one") {
  Settings settings;  // linear, from 80 % of the steps
  settings.learning_rate = 5e-4;
  settings.final_fraction = 0.02;
  const std::string text = schedule_warning(settings, 600, {600, 0}, {1000, 0});
  CHECK(text.find("was 1.41e-05 at step 600 and is 0.0005 at step 601") != std::string::npos);
  CHECK(text.find("over 600 steps, now over 1000") != std::string::npos);
  CHECK(text.find("optimizer.schedule_steps = 600 keeps") != std::string::npos);
  CHECK(schedule_warning(settings, 600, {600, 0}, {1000, 600}) == "");
  CHECK(schedule_warning(settings, 600, {1000, 600}, {1000, 600}) == "");
  CHECK(schedule_warning(settings, 300, {600, 0}, {1000, 0}) == "");  // before the decay in both
  CHECK(schedule_warning(settings, 0, {600, 0}, {1000, 0}) == "");
  settings.schedule = Schedule::constant;
  CHECK(schedule_warning(settings, 600, {600, 0}, {1000, 0}) == "");
}

TEST_CASE("warm-up is linear") {
  Settings settings;
  settings.learning_rate = 1.0;
  settings.schedule = Schedule::constant;
  settings.warmup_steps = 4;
  for (int step = 1; step <= 4; ++step) CHECK(learning_rate(settings, step, 100) == 0.25 * step);
  CHECK(learning_rate(settings, 5, 100) == 1.0);
}

TEST_CASE("gains and corrections are computed from the betas in double precision") {
  const Settings settings;
  const kernels::AdamStep step = adam_step(settings, 3, 100, 7);
  CHECK(step.second_gain == 0.001f);  // 1.0f - 0.999f has a relative error of 1e-5
  CHECK(step.first_correction == doctest::Approx(1.0 / (1.0 - 0.9 * 0.9 * 0.9)).epsilon(1e-6));
  CHECK(step.step == 3);
  CHECK(step.seed == 7);
}

TEST_CASE("epsilon is multiplied by the factor of the loss where that is asked for, and is never 0") {
  Settings settings;
  CHECK(adam_step(settings, 1, 100, 7, 0.25).epsilon == 1e-8f);
  settings.epsilon_scale = EpsilonScale::loss;
  settings.epsilon = 1e-3;
  CHECK(adam_step(settings, 1, 100, 7, 0.25).epsilon == 0.25e-3f);
  settings.epsilon = 1.2e-38;
  CHECK(adam_step(settings, 1, 100, 7, 1e-6).epsilon > 0);
}

}  // namespace weft::optimizer
