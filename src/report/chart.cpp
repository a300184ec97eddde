// SPDX-License-Identifier: Apache-2.0
#include "report/chart.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "report/format.hpp"
#include "report/html.hpp"
#include "report/picture.hpp"

namespace weft::report {
namespace {

struct Colour {
  const char *fill, *text;  // of words on it
};
constexpr Colour kPalette[] = {
    {"#1f77b4", "#ffffff"}, {"#e98f35", "#14181c"}, {"#14b814", "#14181c"}, {"#dc1818", "#ffffff"},
    {"#ac75d1", "#ffffff"}, {"#7a6a29", "#ffffff"}, {"#e935a1", "#ffffff"}, {"#14b897", "#14181c"},
    {"#8ea923", "#14181c"}, {"#3559e9", "#ffffff"}, {"#ed5a68", "#ffffff"}, {"#1c8731", "#ffffff"},
    {"#993366", "#ffffff"}, {"#396a65", "#ffffff"}, {"#dc18dc", "#ffffff"}, {"#bf8888", "#14181c"}};
static_assert(std::size(kPalette) == kColours);

/// SVG path "M x y L x y …" of the finite points; a new subpath after each gap.
std::string polyline(const Axis& x, const Axis& y, const std::vector<double>& at, const std::vector<double>& values) {
  std::string d;
  bool drawing = false;
  for (std::size_t i = 0; i < at.size(); ++i) {
    if (!std::isfinite(values[i])) {
      drawing = false;
      continue;
    }
    d += fmt::format("{}{:.1f} {:.1f}", drawing ? " L" : " M", x.at(at[i]), y.at(values[i]));
    drawing = true;
  }
  return d;
}

/// The outlines of the ranges where both edges are finite.
std::string outline(const Axis& x, const Axis& y, const LineChart& chart) {
  std::string d;
  for (std::size_t i = 0; i < chart.x.size();) {
    std::size_t end = i;
    while (end < chart.x.size() && std::isfinite(chart.low[end]) && std::isfinite(chart.high[end])) ++end;
    if (end == i) {
      ++i;
      continue;
    }
    for (std::size_t j = i; j < end; ++j)
      d += fmt::format("{}{:.1f} {:.1f}", j == i ? " M" : " L", x.at(chart.x[j]), y.at(chart.high[j]));
    for (std::size_t j = end; j-- > i;) d += fmt::format(" L{:.1f} {:.1f}", x.at(chart.x[j]), y.at(chart.low[j]));
    d += " Z";
    i = end;
  }
  return d;
}

}  // namespace

std::string chart_style() {
  // Blue and orange of equal weight in both themes; distinct in all common kinds of colour vision.
  std::string style =
      R"(:root { --paper: #ffffff; --card: #f6f7f8; --ink: #1c2126; --faint: #5a646e; --rule: #dde1e5; --blue: #1f6fb2; --orange: #b8560f; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181c; --card: #1c2227; --ink: #e6e9ec; --faint: #a3adb7; --rule: #333b43; --blue: #6db3ea; --orange: #f0a35c; } }
@media print { :root { --paper: #ffffff; --card: #ffffff; --ink: #000000; --faint: #444444; --rule: #cccccc; --blue: #1f6fb2; --orange: #b8560f; } }
.chart { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.chart text { fill: var(--ink); }
.chart text.small { fill: var(--faint); font-size: 11px; paint-order: stroke; stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
.chart text.label { fill: var(--faint); font-size: 12px; }
.chart text.over { fill: var(--paper); font-size: 11px; }
.chart text.in { font-size: 11px; }
.axis { stroke: var(--faint); stroke-width: 1; }
.grid { stroke: var(--rule); stroke-width: 1; }
.curve { stroke: var(--blue); stroke-width: 2; fill: none; stroke-linejoin: round; }
.band { fill: var(--blue); fill-opacity: 0.22; stroke: none; }
.level { stroke: var(--orange); stroke-width: 1.5; stroke-dasharray: 7 4; fill: none; }
.mark { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 2 3; }
.bar { fill: var(--blue); }
.pale { fill: var(--blue); fill-opacity: 0.3; }
.whisker { stroke: var(--ink); stroke-width: 1.2; fill: none; }
.cross { stroke: var(--orange); stroke-width: 2.5; fill: none; }
.diamond { fill: var(--orange); stroke: none; }
.cell { fill: var(--blue); stroke: var(--paper); stroke-width: 1; }
.touch { fill: transparent; stroke: none; }
.overlaid { stroke-width: 1.8; fill: none; stroke-linejoin: round; }
@media (max-width: 34rem) { .chart text.small, .chart text.in, .chart text.over { font-size: 14px; } .chart text.label { font-size: 15px; } }
)";
  constexpr const char* dashes[] = {"none", "8 3", "2 3", "10 3 2 3"};
  for (std::size_t i = 0; i < kColours; ++i)
    style += fmt::format(".line{0} {{ stroke: {1}; stroke-dasharray: {2}; }}\n.dot{0} {{ fill: {1}; }}\n", i,
                         kPalette[i].fill, dashes[i % std::size(dashes)]);
  return style;
}

std::string line_chart(const LineChart& chart) {
  Range range, steps;
  range.take(chart.y);
  range.take(chart.low);
  range.take(chart.high);
  if (chart.level >= 0) range.take(chart.level);
  steps.take(chart.x);
  steps.take(0);
  const Axis y = value_axis(range, chart.from_zero);
  const Axis x = linear_axis(steps, kLeft, kRight, 6, false, true);

  Picture picture;
  draw_y_axis(picture, y, chart.y_label + (y.logarithmic ? " (logarithmic)" : ""));
  draw_x_axis(picture, x, kBottom, chart.x_label);
  Legend legend(picture, 0, 32);
  legend.line("curve", chart.line_name);
  if (!chart.low.empty()) legend.box("band", chart.band_name);
  if (chart.level >= 0) legend.line("level", chart.level_name);
  if (!chart.marks.empty()) legend.line("mark", chart.marks_name);

  if (!chart.low.empty()) picture.path(outline(x, y, chart), "band");
  for (const double mark : chart.marks)
    if (mark >= x.low && mark <= x.high) picture.line(x.at(mark), kTop, x.at(mark), kBottom, "mark");
  if (chart.level >= 0) picture.line(kLeft, y.at(chart.level), kRight, y.at(chart.level), "level");
  picture.path(polyline(x, y, chart.x, chart.y), "curve");
  constexpr std::size_t kMostTouched = 400;  // limits the size of the page
  const std::size_t stride = chart.x.size() / kMostTouched + 1;
  for (std::size_t i = 0; i < chart.x.size(); ++i) {
    if (!std::isfinite(chart.y[i])) continue;
    const bool alone =
        (i == 0 || !std::isfinite(chart.y[i - 1])) && (i + 1 == chart.x.size() || !std::isfinite(chart.y[i + 1]));
    if (alone) picture.dot(x.at(chart.x[i]), y.at(chart.y[i]), 2.5, "bar");
    if (i % stride == 0)
      picture.dot(x.at(chart.x[i]), y.at(chart.y[i]), 5, "touch",
                  fmt::format("{} {}: {}", chart.x_label, short_number(chart.x[i]), short_number(chart.y[i])));
  }
  return picture.end(kHeight, chart.y_label);
}

std::string overlay(const Overlay& chart) {
  constexpr std::size_t kMostPoints = 512, kMostTouched = 1200;  // of a line; of all: limits the size of the page
  constexpr std::size_t kNameLength = 60;
  const std::size_t drawn = std::min(chart.lines.size(), kColours);
  Range range, steps;
  steps.take(0);
  std::size_t longest = 1;
  for (std::size_t i = 0; i < drawn; ++i) {
    longest = std::max(longest, chart.lines[i].name.size());
    range.take(chart.lines[i].y);
    steps.take(chart.lines[i].x);
  }
  const Axis y = value_axis(range, chart.from_zero);
  const Axis x = linear_axis(steps, kLeft, kRight, 6, false, true);
  Picture picture;
  draw_y_axis(picture, y, chart.y_label + (y.logarithmic ? " (logarithmic)" : ""));
  draw_x_axis(picture, x, kBottom, chart.x_label);
  for (std::size_t i = 0; i < drawn; ++i) {
    const Overlay::Line& line = chart.lines[i];
    Overlay::Line finite{line.name, {}, {}};
    for (std::size_t j = 0; j < line.x.size(); ++j)
      if (std::isfinite(line.y[j])) {
        finite.x.push_back(line.x[j]);
        finite.y.push_back(line.y[j]);
      }
    const std::size_t points = finite.x.size(), stride = points / kMostPoints + 1;
    const std::size_t touched = points / (kMostTouched / drawn) + 1;
    const std::string dot = fmt::format("dot{}", i);
    Overlay::Line thinned;
    for (std::size_t j = 0; j < points; ++j)
      if (j % stride == 0 || j + 1 == points) {
        thinned.x.push_back(finite.x[j]);
        thinned.y.push_back(finite.y[j]);
      }
    picture.path(polyline(x, y, thinned.x, thinned.y), fmt::format("overlaid line{}", i).c_str());
    if (points == 1) picture.dot(x.at(finite.x[0]), y.at(finite.y[0]), 3, dot.c_str());
    for (std::size_t j = 0; j < points; ++j)
      if (j % touched == 0 || j + 1 == points)
        picture.dot(x.at(finite.x[j]), y.at(finite.y[j]), 5, "touch",
                    fmt::format("{}, {} {}: {}", line.name, chart.x_label, short_number(finite.x[j]),
                                short_number(finite.y[j])));
  }
  const std::size_t names_per_row = 27 + kLetter * static_cast<double>(longest) < kWidth / 2 ? 2 : 1;
  double below = kHeight + 16;
  for (std::size_t i = 0; i < drawn; ++i) {
    const double left = i % names_per_row == 0 ? 0 : kWidth / 2;
    std::string name = chart.lines[i].name;
    if (name.size() > kNameLength) name = "…" + name.substr(name.size() - kNameLength + 1);
    picture.line(left, below - 4, left + 22, below - 4, fmt::format("overlaid line{}", i).c_str(), chart.lines[i].name);
    picture.text(left + 27, below, "start", "small", name);
    if (i % names_per_row == names_per_row - 1 || i + 1 == drawn) below += 17;
  }
  return picture.end(below, chart.y_label);
}

std::string bar_chart(const BarChart& chart) {
  Range range;
  range.take(chart.values);
  range.take(0);
  if (chart.level >= 0) range.take(chart.level);
  if (!range.empty()) range.high *= 1.06;  // space for the numbers above the bars
  const Axis y = linear_axis(range, kBottom, kTop, 5, true);
  Picture picture;
  draw_y_axis(picture, y, chart.y_label);
  Legend legend(picture, 0, 32);
  if (chart.level >= 0) legend.line("level", chart.level_name);
  const auto n = static_cast<double>(std::max<std::size_t>(1, chart.values.size()));
  const double slot = (kRight - kLeft) / n;
  std::size_t longest = 1;
  for (const std::string& name : chart.categories) longest = std::max(longest, name.size());
  const auto every = static_cast<std::size_t>(std::ceil((kLetter * static_cast<double>(longest) + 4) / slot));
  // Names that would overlap are put in two rows; where that is not enough, some are omitted.
  const std::size_t rows = every > 1 ? 2 : 1, named = (every + rows - 1) / rows;
  if (chart.level >= 0) picture.line(kLeft, y.at(chart.level), kRight, y.at(chart.level), "level");
  for (std::size_t i = 0; i < chart.values.size(); ++i) {
    const double middle = kLeft + (static_cast<double>(i) + 0.5) * slot, width = std::min(0.72 * slot, 60.0);
    const double value = chart.values[i];
    const std::string name = i < chart.categories.size() ? chart.categories[i] : "";
    if (std::isfinite(value)) {
      picture.box(middle - width / 2, std::min(y.at(value), y.at(0)), width, std::abs(y.at(0) - y.at(value)), "bar",
                  fmt::format("{} {}: {}", chart.x_label, name, short_number(value)));
      if (slot > 5 * kLetter)
        picture.text(middle, std::min(y.at(value), y.at(0)) - 4, "middle", "small", short_number(value));
    } else {
      picture.text(middle, y.at(0) - 4, "middle", "small", "?");
    }
    if (i % named == 0)
      picture.text(middle, kBottom + 17 + 14 * static_cast<double>(i / named % rows), "middle", "small", name);
  }
  picture.line(kLeft, y.at(0), kRight, y.at(0), "axis");
  const double below = kBottom + 22 + 14 * static_cast<double>(rows);
  picture.text(kRight, below, "end", "label", chart.x_label);
  return picture.end(below + 4, chart.y_label);
}

std::string horizontal_bars(const HorizontalBars& chart) {
  std::size_t longest = 1, longest_text = 1;
  Range range;
  range.take(0);
  for (const Bar& bar : chart.bars) {
    longest = std::max(longest, bar.name.size());
    longest_text = std::max(longest_text, bar.text.size());
    range.take(bar.value);
    range.take(bar.high);
  }
  if (range.high <= 0) range.high = 1;
  constexpr double kRow = 23;
  const double left = std::min(220.0, 14 + kLetter * static_cast<double>(longest));
  const double right = kWidth - std::min(200.0, 14 + kLetter * static_cast<double>(longest_text));
  const Axis x{0, range.high, left, right, false, {}};
  Picture picture;
  picture.text(0, 12, "start", "label", chart.x_label);
  double top = 24;
  if (!chart.limit_name.empty() || !chart.whisker_name.empty()) {
    Legend legend(picture, 0, 32);
    if (!chart.limit_name.empty()) {
      legend.box("bar", chart.limit_name);
      legend.box("pale", "the rest");
    }
    legend.line("whisker", chart.whisker_name);
    top = 44;
  }
  for (const Bar& bar : chart.bars) {
    const double value = std::isfinite(bar.value) ? bar.value : 0;
    const std::string title = bar.name + ": " + bar.text;
    picture.text(left - 7, top + 14, "end", "in", bar.name);
    picture.box(left, top + 2, x.at(value) - left, kRow - 7, chart.limit_name.empty() ? "bar" : "pale", title);
    if (!chart.limit_name.empty() && bar.limit >= 0)
      picture.box(left, top + 2, x.at(std::min(bar.limit, value)) - left, kRow - 7, "bar", title);
    double end = x.at(value);
    if (bar.low >= 0 && bar.high > bar.low && std::isfinite(bar.high)) {
      const double middle = top + 2 + (kRow - 7) / 2;
      picture.line(x.at(bar.low), middle, x.at(bar.high), middle, "whisker");
      for (const double edge : {bar.low, bar.high})
        picture.line(x.at(edge), middle - 4, x.at(edge), middle + 4, "whisker");
      end = std::max(end, x.at(bar.high));
    }
    picture.text(end + 6, top + 14, "start", "small", bar.text);
    top += kRow;
  }
  picture.line(left, chart.limit_name.empty() && chart.whisker_name.empty() ? 24 : 44, left, top, "axis");
  return picture.end(top + 8, chart.x_label);
}

std::string heat_map(const HeatMap& map) {
  const std::size_t rows = map.values.size(), columns = rows == 0 ? 0 : map.values[0].size();
  double largest = 0;
  for (const auto& row : map.values)
    for (const double value : row)
      if (std::isfinite(value)) largest = std::max(largest, value);
  const auto shade = [&](double value) { return largest > 0 ? 0.06 + 0.94 * std::max(0.0, value) / largest : 0.06; };

  constexpr double left = 46, top = 30, scale_width = 90;
  const double cell =
      std::min(60.0, (kWidth - left - scale_width) / static_cast<double>(std::max<std::size_t>(1, columns)));
  const double width = cell * static_cast<double>(columns), height = cell * static_cast<double>(rows);
  const auto every = static_cast<std::size_t>(std::ceil(16 / cell));
  Picture picture;
  picture.text(0, 12, "start", "label", map.y_label);
  for (std::size_t row = 0; row < rows; ++row) {
    const double y = top + cell * static_cast<double>(row);
    if (row % every == 0) picture.text(left - 7, y + cell / 2 + 4, "end", "small", std::to_string(row));
    for (std::size_t column = 0; column < columns; ++column) {
      const double value = map.values[row][column], x = left + cell * static_cast<double>(column);
      if (!std::isfinite(value)) continue;
      picture.box(x, y, cell, cell, "cell", map.notes[row][column], shade(value));
      if (cell >= 5 * kLetter)
        picture.text(x + cell / 2, y + cell / 2 + 4, "middle", shade(value) > 0.55 ? "over" : "in",
                     short_number(value));
    }
  }
  for (std::size_t column = 0; column < columns; column += every)
    picture.text(left + cell * (static_cast<double>(column) + 0.5), top + height + 16, "middle", "small",
                 std::to_string(column));
  picture.text(left + width, top + height + 34, "end", "label", map.x_label);
  // The scale, right of the map.
  constexpr int kShades = 6;
  const double step = std::min(20.0, std::max(12.0, height / kShades));
  for (int i = 0; i < kShades; ++i) {
    const double value = largest * (kShades - 1 - i) / (kShades - 1);
    picture.box(left + width + 18, top + step * i, 16, step, "cell", "", shade(value));
    picture.text(left + width + 40, top + step * i + step / 2 + 4, "start", "small", short_number(value));
  }
  return picture.end(std::max(top + height + 42, top + step * kShades + 8), map.y_label + ", " + map.x_label);
}

std::string time_line(const TimeLine& chart) {
  constexpr double kRow = 24;
  std::size_t longest = chart.points.empty() ? 1 : chart.points_name.size();
  Range range{0, std::max(1.0, chart.last)};
  for (const Span& span : chart.spans) {
    longest = std::max(longest, span.name.size());
    range.take(span.end);
  }
  range.take(chart.points);
  const double left = std::min(180.0, 14 + kLetter * static_cast<double>(longest));
  const Axis x = linear_axis(range, left, kRight - 8, 6, false, true);
  Picture picture;
  double top = 6;
  for (const Span& span : chart.spans) {
    const double middle = top + kRow / 2;
    picture.text(left - 7, middle + 4, "end", "in", span.name);
    picture.line(left, middle, kRight, middle, "grid");
    picture.box(x.at(span.begin), middle - 6, std::max(3.0, x.at(span.end) - x.at(span.begin)), 12,
                span.clean ? "bar" : "pale", span.note);
    if (!span.clean) {
      const double at = std::max(x.at(span.begin) + 3, x.at(span.end));
      picture.path(fmt::format("M{0:.1f} {1:.1f} L{2:.1f} {3:.1f} M{2:.1f} {1:.1f} L{0:.1f} {3:.1f}", at - 5,
                               middle - 5, at + 5, middle + 5),
                   "cross", span.note);
    }
    top += kRow;
  }
  if (!chart.points.empty()) {
    const double middle = top + kRow / 2;
    picture.text(left - 7, middle + 4, "end", "in", chart.points_name);
    picture.line(left, middle, kRight, middle, "grid");
    for (const double point : chart.points)
      picture.path(fmt::format("M{0:.1f} {1:.1f} l6 6 l-6 6 l-6 -6 Z", x.at(point), middle - 6), "diamond",
                   fmt::format("{} {}", chart.x_label, short_number(point)));
    top += kRow;
  }
  draw_x_axis(picture, x, top + 6, chart.x_label, left);
  return picture.end(top + 48, chart.x_label);
}

std::string stacked_bars(const StackedBars& chart) {
  std::vector<std::string> names;
  double longest = 0;
  for (const StackedBars::Case& one : chart.cases) {
    longest = std::max(longest, one.total);
    for (const StackedBars::Part& part : one.parts)
      if (std::find(names.begin(), names.end(), part.name) == names.end()) names.push_back(part.name);
  }
  const auto colour = [&](const std::string& name) -> const Colour& {
    const auto at = std::find(names.begin(), names.end(), name) - names.begin();
    return kPalette[static_cast<std::size_t>(at) % kColours];
  };
  constexpr double left = 150, width = 620, row = 64, bar = 20, head = 48;
  const double legend = head + row * static_cast<double>(chart.cases.size()) + 16;
  const double height = legend + 22.0 * std::ceil(static_cast<double>(names.size()) / 4) + 16;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"13\">\n<style>.paper {{ fill: #ffffff; }} text {{ fill: #1c2126; }} "
      ".faint {{ fill: #5a646e; }}\n@media (prefers-color-scheme: dark) {{ .paper {{ fill: #14181c; }} "
      "text {{ fill: #e6e9ec; }} .faint {{ fill: #a3adb7; }} }}</style>\n"
      "<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n"
      "<text x=\"16\" y=\"24\" font-size=\"15\" font-weight=\"bold\">{2}</text>\n"
      "<text class=\"faint\" x=\"16\" y=\"41\">{3}</text>\n",
      left + width + 130, height, escaped(chart.title), escaped(chart.subtitle));
  double y = head + 8;
  for (const StackedBars::Case& one : chart.cases) {
    out += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", left - 10, y + 15, escaped(one.name));
    for (const bool as_shares : {false, true}) {
      const double top = as_shares ? y + bar + 4 : y;
      const double whole = as_shares ? one.total : longest, scale = whole > 0 ? width / whole : 0;
      double x = left;
      for (const StackedBars::Part& part : one.parts) {
        const double length = part.value * scale;
        out += fmt::format(
            "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.0f}\" fill=\"{}\"><title>{}</title></rect>\n",
            x, top, length, bar, colour(part.name).fill, escaped(part.note));
        if (as_shares && length > 34)
          out += fmt::format(
              "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"11\" style=\"fill: {}\" text-anchor=\"middle\">{:.0f} "
              "%</text>\n",
              x + length / 2, top + 14, colour(part.name).text, 100 * part.value / one.total);
        x += length;
      }
      if (!as_shares)
        out += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", std::max(x, left) + 8, top + 15,
                           escaped(one.text));
    }
    y += row;
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    const double x = 16 + 220 * static_cast<double>(i % 4), top = legend + 22 * static_cast<double>(i / 4);
    out += fmt::format(
        "<rect x=\"{0}\" y=\"{1}\" width=\"14\" height=\"14\" fill=\"{2}\"/><text x=\"{3}\" y=\"{4}\">{5}</text>\n", x,
        top, colour(names[i]).fill, x + 20, top + 12, escaped(names[i]));
  }
  return out + "</svg>\n";
}

}  // namespace weft::report
