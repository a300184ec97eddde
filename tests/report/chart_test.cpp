// SPDX-License-Identifier: Apache-2.0
//
// Texts, numbers and charts of a page: text from files is never markup, and every value gives a valid picture.
#include "report/chart.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "report/format.hpp"
#include "report/html.hpp"

using namespace weft::report;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinite = std::numeric_limits<double>::infinity();
const std::string kReplaced = "\xEF\xBF\xBD";

/// No coordinate of the picture is nan or inf.
bool is_drawn(const std::string& svg) {
  for (const char* word : {"=\"nan", "=\"inf", "=\"-nan", "=\"-inf", " nan", " inf", "-nan", "Lnan", "Mnan"})
    if (svg.find(word) != std::string::npos) return false;
  return svg.starts_with("<svg") && svg.ends_with("</svg>\n");
}

}  // namespace

TEST_CASE("escaped text holds no markup and nothing that XML forbids") {
  CHECK(escaped("<a href=\"x\">&'") == "&lt;a href=&quot;x&quot;&gt;&amp;&#39;");
  CHECK(escaped("line\n\ttab") == "line\n\ttab");
  CHECK(escaped(std::string_view("\0\x1b\x7f", 3)) == kReplaced + kReplaced + kReplaced);
  for (const char* whole : {"\xC3\xA9", "\xE2\x82\xAC", "\xF0\x9F\x98\x80", "\xEF\xBF\xBD"})
    CHECK(escaped(whole) == whole);
  CHECK(escaped("\xC3") == kReplaced);                                  // torn
  CHECK(escaped("\xC3<") == kReplaced + "&lt;");                        // does not swallow what follows
  CHECK(escaped("\xC0\xBC") == kReplaced + kReplaced);                  // '<' written too long
  CHECK(escaped("\xED\xA0\x80") == kReplaced + kReplaced + kReplaced);  // half of a pair
  CHECK(escaped("\xEF\xBF\xBF") == kReplaced);                          // valid UTF-8, but no character
  CHECK(escaped("\xF4\x90\x80\x80") == kReplaced + kReplaced + kReplaced + kReplaced);
}

TEST_CASE("numbers have three significant digits") {
  const std::pair<double, const char*> expected[] = {{0, "0"},         {0.11416, "0.114"},   {8, "8"},
                                                     {99.96, "100"},   {-3.14159, "-3.14"},  {0.1, "0.1"},
                                                     {1000, "1,000"},  {123456, "123,000"},  {999.4, "999"},
                                                     {999.6, "1,000"}, {1e-5, "1e-05"},      {0.00123, "0.00123"},
                                                     {1e20, "1e+20"},  {kNan, "not finite"}, {-5e-324, "-4.9e-324"},
                                                     {100.4, "100"}};
  for (const auto& [value, text] : expected) CHECK(short_number(value) == text);
  CHECK(decimal_bytes_text(0) == "0 B");
  CHECK(decimal_bytes_text(999) == "999 B");
  CHECK(decimal_bytes_text(999'900) == "1 MB");
  CHECK(decimal_bytes_text(2.82e9) == "2.82 GB");
}

TEST_CASE("ticks that are close to each other have different texts") {
  for (const auto& [low, high] : {std::pair{2.7102, 2.7208},
                                  {0.7561, 0.7577},
                                  {1.8e-7, 1.9e-7},
                                  {0.0, 1.0},
                                  {-3.0, 5.0},
                                  {100'500.0, 102'000.0},
                                  {-1.0003, -1.0},
                                  {5.0, 5.0}}) {
    LineChart line;
    line.x = {0, 1};
    line.y = {low, high};
    std::vector<std::string> ticks;
    const std::string svg = line_chart(line);
    const std::regex tick(
        "text-anchor=\"end\" class=\"small\">([^<]*)<");  // the y axis, then the last tick of the x axis
    for (std::sregex_iterator at(svg.begin(), svg.end(), tick), end; at != end; ++at) ticks.push_back((*at)[1]);
    ticks.pop_back();
    CAPTURE(low);
    CHECK(ticks.size() >= 3);
    std::sort(ticks.begin(), ticks.end());
    CHECK(std::adjacent_find(ticks.begin(), ticks.end()) == ticks.end());
  }
}

TEST_CASE("a chart is valid for all values") {
  for (const std::vector<double>& values : {std::vector<double>{},
                                            {kNan},
                                            {kNan, 2, kInfinite},
                                            {0, 0},
                                            {5},
                                            {1e-90, 1e90},
                                            {-1e90, 1e90},
                                            {-1, -2, -3},
                                            {1, 100, 0}}) {
    LineChart line;
    line.y = values;
    for (std::size_t i = 0; i < values.size(); ++i) line.x.push_back(static_cast<double>(i));
    CHECK(is_drawn(line_chart(line)));
    line.low = line.high = line.y;
    line.from_zero = true;
    line.level = 3;
    line.marks = {0, 1, 1e9};
    CHECK(is_drawn(line_chart(line)));
    BarChart bars;
    bars.values = values;
    CHECK(is_drawn(bar_chart(bars)));
    HorizontalBars lying;
    for (const double value : values) lying.bars.push_back({"a", value, "b", value, value, value});
    CHECK(is_drawn(horizontal_bars(lying)));
    lying.limit_name = "limit";
    CHECK(is_drawn(horizontal_bars(lying)));
    HeatMap map;
    if (!values.empty()) map.values.push_back(values);
    map.notes.emplace_back(values.size());
    CHECK(is_drawn(heat_map(map)));
  }
  CHECK(is_drawn(time_line({})));
  CHECK(is_drawn(
      time_line({.x_label = "step", .last = 0, .spans = {{"a", 0, 0, false, ""}}, .points = {0}, .points_name = "p"})));
}

namespace {

struct Lab {
  double lightness, a, b, luminance;
};

/// CIE L*a*b* (D65) of "#rrggbb".
Lab lab(const std::string& hex) {
  double linear[3];
  for (std::size_t i = 0; i < 3; ++i) {
    const double value = std::stoi(hex.substr(1 + 2 * i, 2), nullptr, 16) / 255.0;
    linear[i] = value <= 0.04045 ? value / 12.92 : std::pow((value + 0.055) / 1.055, 2.4);
  }
  const auto& [r, g, b] = linear;
  const auto f = [](double t) { return t > 0.008856 ? std::cbrt(t) : 7.787 * t + 16.0 / 116; };
  const double x = f((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047),
               luminance = 0.2126 * r + 0.7152 * g + 0.0722 * b, y = f(luminance),
               z = f((0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883);
  return {116 * y - 16, 500 * (x - y), 200 * (y - z), luminance};
}

double difference(const Lab& one, const Lab& other) {
  return std::hypot(one.lightness - other.lightness, one.a - other.a, one.b - other.b);
}

/// WCAG contrast ratio.
double contrast(const Lab& one, const Lab& other) {
  const auto [darker, lighter] = std::minmax(one.luminance, other.luminance);
  return (lighter + 0.05) / (darker + 0.05);
}

/// The colours of `pattern#rrggbb` in the text, in their order.
std::vector<std::string> colours_after(const std::string& text, const std::string& pattern) {
  std::vector<std::string> found;
  for (std::size_t at = 0; (at = text.find(pattern + "#", at)) != std::string::npos; ++at)
    found.push_back(text.substr(at + pattern.size(), 7));
  return found;
}

}  // namespace

TEST_CASE("sixteen phases have sixteen colours that are told apart on light and on dark pages") {
  StackedBars bars;
  bars.cases.push_back({"case", 16, "16 ms", {}});
  for (int i = 0; i < 16; ++i) bars.cases[0].parts.push_back({"phase " + std::to_string(i), 1, ""});
  const std::string svg = stacked_bars(bars);
  std::vector<std::string> fills = colours_after(svg, "height=\"20\" fill=\"");
  REQUIRE(fills.size() == 32);  // both bars
  fills.resize(16);
  for (const std::string& one : fills) {
    for (const std::string& other : fills)
      if (&one != &other) CHECK(difference(lab(one), lab(other)) > 30);  // about 2 is just visible
    for (const char* page : {"#ffffff", "#14181c"}) CHECK(contrast(lab(one), lab(page)) > 2.4);
  }
  // Words on a bar.
  const std::vector<std::string> words = colours_after(svg, "style=\"fill: ");
  REQUIRE(words.size() == 16);
  for (std::size_t i = 0; i < 16; ++i) CHECK(contrast(lab(words[i]), lab(fills[i])) > 3);
  CHECK(svg.find("@media (prefers-color-scheme: dark)") != std::string::npos);
  // The lines of a comparison have the same colours.
  for (const std::string& fill : fills) CHECK(chart_style().find("stroke: " + fill) != std::string::npos);
}

TEST_CASE("an overlay draws every line, thins long ones and keeps their ends") {
  Overlay chart{.x_label = "step", .y_label = "loss", .lines = {}};
  for (std::size_t i = 0; i < 20; ++i) {
    Overlay::Line& line = chart.lines.emplace_back();
    line.name = "run <" + std::to_string(i) + ">";
    for (int step = 1; step <= 5000; ++step) {
      line.x.push_back(step);
      line.y.push_back(step % 7 == 0 ? kNan : 1.0 + static_cast<double>(i) / step);
    }
  }
  const std::string svg = overlay(chart);
  CHECK(is_drawn(svg));
  CHECK(svg.size() < 400'000);
  for (std::size_t i = 0; i < 16; ++i) {
    const std::string name = "run &lt;" + std::to_string(i) + "&gt;";
    CHECK(svg.find(name + ", step 5,000: ") != std::string::npos);
    CHECK(svg.find("overlaid line" + std::to_string(i) + "\"") != std::string::npos);
  }
  CHECK(svg.find("run &lt;16&gt;") == std::string::npos);
  CHECK(svg.find("<16>") == std::string::npos);
  CHECK(is_drawn(overlay({})));
  CHECK(is_drawn(overlay({.x_label = "", .y_label = "", .lines = {{"one", {3}, {kNan}}, {"two", {3}, {2}}}})));
}

TEST_CASE("a line breaks where a value is not finite, and texts of a chart are escaped") {
  LineChart chart;
  chart.x = {1, 2, 3, 4, 5};
  chart.y = {1, 2, kNan, 2, 1};
  chart.y_label = "<y>";
  const std::string svg = line_chart(chart);
  const std::size_t path = svg.find("class=\"curve\"");
  REQUIRE(path != std::string::npos);
  const std::string d = svg.substr(svg.rfind("<path", path), path - svg.rfind("<path", path));
  CHECK(std::count(d.begin(), d.end(), 'M') == 2);
  CHECK(svg.find("<y>") == std::string::npos);
  CHECK(svg.find("&lt;y&gt;") != std::string::npos);
}
