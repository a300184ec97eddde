// SPDX-License-Identifier: Apache-2.0
#include "report/picture.hpp"

#include <fmt/format.h>

#include "report/format.hpp"
#include "report/html.hpp"

namespace weft::report {
namespace {

/// The smallest of 1, 2, 5, 10 times a power of ten that is at least `step`.
double round_step(double step) {
  const double power = std::pow(10.0, std::floor(std::log10(step)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (step <= factor * power * (1 + 1e-9)) return factor * power;
  return 10 * power;
}

Axis logarithmic_axis(const Range& range, double begin, double end) {
  Axis axis{range.low, range.high, begin, end, true, {}};
  const int from = static_cast<int>(std::floor(std::log10(range.low)));
  const int to = static_cast<int>(std::ceil(std::log10(range.high)));
  const int skip = std::max(1, (to - from + 7) / 8);
  for (int decade = from; decade <= to; decade += skip)
    for (const double factor : {1.0, 2.0, 5.0}) {
      const double tick = factor * std::pow(10.0, decade);
      if (factor > 1 && to - from > 2) break;
      if (tick >= range.low && tick <= range.high) axis.ticks.push_back(tick);
    }
  return axis;
}

/// The tick with as many digits as tell it from its neighbours.
std::string tick_text(const Axis& axis, double tick) {
  if (axis.logarithmic || axis.ticks.size() < 2 || tick == 0) return short_number(tick);
  const auto power_of = [](double value) {
    return static_cast<int>(std::floor(std::log10(std::abs(value) * (1 + 1e-9))));
  };
  const int last_digit = power_of(axis.ticks[1] - axis.ticks[0]), digits = power_of(tick) - last_digit;
  const bool is_small = std::abs(tick) < 1e-4;  // short_number then has an exponent, and one digit less
  if (digits < (is_small ? 2 : 3) || std::abs(tick) >= 1e15) return short_number(tick);
  if (last_digit >= 0) return grouped(std::llround(tick));
  return is_small || last_digit < -9 ? fmt::format("{:.{}e}", tick, digits) : fmt::format("{:.{}f}", tick, -last_digit);
}

}  // namespace

Axis linear_axis(Range range, double begin, double end, int about, bool widen, bool whole) {
  if (range.empty()) range = {0, 1};
  if (!(range.high - range.low > 1e-12 * std::max(std::abs(range.low), std::abs(range.high)))) {
    const double margin = range.high == 0 ? 1 : 0.1 * std::abs(range.high);
    range = {range.low < 0 || range.low > 0 ? range.low - margin : 0, range.high + margin};
  }
  double step = round_step((range.high - range.low) / about);
  if (whole) step = std::max(1.0, step);
  if (widen) range = {std::floor(range.low / step + 1e-9) * step, std::ceil(range.high / step - 1e-9) * step};
  Axis axis{range.low, range.high, begin, end, false, {}};
  const double first = std::ceil(range.low / step - 1e-9);
  for (int i = 0; (first + i) * step <= range.high + 1e-9 * step; ++i) {
    const double tick = (first + i) * step;
    axis.ticks.push_back(std::abs(tick) < 1e-9 * step ? 0 : tick);
  }
  return axis;
}

Axis value_axis(Range range, bool from_zero) {
  if (!from_zero && !range.empty() && range.low > 0 && range.high > 30 * range.low)
    return logarithmic_axis(range, kBottom, kTop);
  if (from_zero) {
    range.take(0);
    range.high *= 1.05;  // keeps a constant line off the edge
  }
  return linear_axis(range, kBottom, kTop, 5, true);
}

void draw_y_axis(Picture& picture, const Axis& y, const std::string& label) {
  for (const double tick : y.ticks) {
    picture.line(kLeft, y.at(tick), kRight, y.at(tick), tick == y.low ? "axis" : "grid");
    picture.text(kLeft - 7, y.at(tick) + 4, "end", "small", tick_text(y, tick));
  }
  picture.text(0, 12, "start", "label", label);
}

void draw_x_axis(Picture& picture, const Axis& x, double y, const std::string& label, double left) {
  picture.line(left, y, kRight, y, "axis");
  for (const double tick : x.ticks) {
    picture.line(x.at(tick), y, x.at(tick), y + 4, "axis");
    const bool at_the_end = x.at(tick) > kRight - 20;
    picture.text(at_the_end ? kRight : x.at(tick), y + 18, at_the_end ? "end" : "middle", "small", tick_text(x, tick));
  }
  picture.text(kRight, y + 36, "end", "label", label);
}

}  // namespace weft::report
