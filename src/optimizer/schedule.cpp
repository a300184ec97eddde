// SPDX-License-Identifier: Apache-2.0
#include "optimizer/schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace weft::optimizer {

namespace {

double schedule_length(const Settings& settings, std::int64_t steps) {
  return static_cast<double>(settings.schedule_steps > 0 ? settings.schedule_steps : std::max<std::int64_t>(1, steps));
}

}  // namespace

double warmup(const Settings& settings, std::int64_t steps) {
  return settings.warmup_fraction > 0 ? settings.warmup_fraction * schedule_length(settings, steps)
                                      : static_cast<double>(settings.warmup_steps);
}

double learning_rate(const Settings& settings, std::int64_t step, std::int64_t steps) {
  const double rise = warmup(settings, steps), length = schedule_length(settings, steps);
  const double warm = rise > 0 ? std::min(1.0, static_cast<double>(step) / rise) : 1.0;
  const double done = static_cast<double>(step - 1) / length;
  const double begin = std::max(settings.decay_begin, rise / length);
  const double left = 1.0 - begin;
  const double q = left > 0 ? std::clamp((done - begin) / left, 0.0, 1.0) : 0.0;
  const double last = settings.final_fraction;
  double factor = 1.0;
  switch (settings.schedule) {
    case Schedule::constant:
      break;
    case Schedule::linear:
      factor = 1.0 - (1.0 - last) * q;
      break;
    case Schedule::cosine:
      factor = last + (1.0 - last) * 0.5 * (1.0 + std::cos(std::numbers::pi * q));
      break;
    case Schedule::step:
      factor = done < begin ? 1.0 : last;
      break;
    case Schedule::wsd:
      factor = 1.0 - (1.0 - last) * std::sqrt(q);
      break;
  }
  return settings.learning_rate * warm * factor;
}

std::string schedule_warning(const Settings& settings, std::int64_t done, ScheduleLength before, ScheduleLength now) {
  const auto rate = [&](std::int64_t step, ScheduleLength length) {
    Settings with = settings;
    with.schedule_steps = length.steps();
    return learning_rate(with, step, length.run_steps);
  };
  const double expected = rate(done + 1, before), next = rate(done + 1, now);
  constexpr double kVisible = 0.01;  // fraction of the larger one
  if (done < 1 || std::abs(next - expected) <= kVisible * std::max(next, expected)) return {};
  return fmt::format(
      "the learning rate was {:.3g} at step {} and is {:.3g} at step {} (its schedule extended over {} steps, now over "
      "{}); optimizer.schedule_steps = {} keeps the schedule, with {:.3g} at step {}",
      rate(done, before), done, next, done + 1, before.steps(), now.steps(), before.steps(), expected, done + 1);
}

kernels::AdamStep adam_step(const Settings& settings, std::int64_t step, std::int64_t steps, std::uint64_t seed,
                            double loss_factor) {
  const double t = static_cast<double>(step);
  const double epsilon =
      settings.epsilon_scale == EpsilonScale::loss ? settings.epsilon * loss_factor : settings.epsilon;
  return {.learning_rate = static_cast<float>(learning_rate(settings, step, steps)),
          .beta1 = static_cast<float>(settings.beta1),
          .beta2 = static_cast<float>(settings.beta2),
          .first_gain = static_cast<float>(1.0 - settings.beta1),
          .second_gain = static_cast<float>(1.0 - settings.beta2),
          // Not 0: moments that are 0 are divided by it alone.
          .epsilon = std::max(static_cast<float>(epsilon), std::numeric_limits<float>::min()),
          .weight_decay = static_cast<float>(settings.weight_decay),
          .first_correction = static_cast<float>(1.0 / (1.0 - std::pow(settings.beta1, t))),
          .second_correction = static_cast<float>(1.0 / (1.0 - std::pow(settings.beta2, t))),
          .gradient_scale = 1.0f,
          .seed = seed,
          .step = static_cast<std::uint64_t>(step)};
}

}  // namespace weft::optimizer
