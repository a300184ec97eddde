// SPDX-License-Identifier: Apache-2.0
//
// What the charts of a page are drawn with: elements of one picture, axes and legends.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "report/html.hpp"

namespace weft::report {

// Units of the view box of a picture.
constexpr double kWidth = 560;
constexpr double kLetter = 7.6;  // approximate width of a letter of the labels at their largest, on a narrow page
constexpr double kLeft = 70, kRight = kWidth - 14, kTop = 46, kBottom = 232, kHeight = 272;

/// Elements of one picture, in units of its view box.
class Picture {
 public:
  void line(double x1, double y1, double x2, double y2, const char* style, const std::string& title = "") {
    put("line", fmt::format("x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"", x1, y1, x2, y2), style, title);
  }
  void box(double x, double y, double width, double height, const char* style, const std::string& title = "",
           double opacity = 1) {
    std::string place = fmt::format("x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"", x, y,
                                    std::max(0.0, width), std::max(0.0, height));
    if (opacity < 1) place += fmt::format(" fill-opacity=\"{:.3f}\"", opacity);
    put("rect", place, style, title);
  }
  void dot(double x, double y, double radius, const char* style, const std::string& title = "") {
    put("circle", fmt::format("cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\"", x, y, radius), style, title);
  }
  void path(const std::string& d, const char* style, const std::string& title = "") {
    put("path", fmt::format("d=\"{}\"", d), style, title);
  }
  void text(double x, double y, const char* anchor, const char* style, const std::string& words) {
    out_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" class=\"{}\">{}</text>\n", x, y, anchor,
                        style, escaped(words));
  }
  std::string end(double height, const std::string& says) const {
    return fmt::format("<svg role=\"img\" aria-label=\"{}\" viewBox=\"0 0 {:.0f} {:.0f}\" class=\"chart\">\n{}</svg>\n",
                       escaped(says), kWidth, height, out_);
  }

 private:
  void put(const char* element, const std::string& place, const char* style, const std::string& title) {
    out_ += fmt::format("<{} {} class=\"{}\"", element, place, style);
    out_ += title.empty() ? "/>\n" : fmt::format("><title>{}</title></{}>\n", escaped(title), element);
  }
  std::string out_;
};

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -std::numeric_limits<double>::infinity();
  bool empty() const { return !(low <= high); }
  void take(double value) {
    if (!std::isfinite(value)) return;
    low = std::min(low, value);
    high = std::max(high, value);
  }
  void take(const std::vector<double>& values) {
    for (const double value : values) take(value);
  }
};

/// Maps values to positions, linearly or logarithmically; ticks are round numbers.
struct Axis {
  double low = 0, high = 1, begin = 0, end = 1;  ///< values, and their positions in the picture
  bool logarithmic = false;
  std::vector<double> ticks;

  double at(double value) const {
    const double part = logarithmic ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
    return begin + part * (end - begin);
  }
};

/// `widen`: rounds the ends outwards. `whole`: ticks at integers only.
Axis linear_axis(Range range, double begin, double end, int about, bool widen, bool whole = false);

/// Logarithmic when all values are positive and span more than a factor of 30, unless `from_zero`.
Axis value_axis(Range range, bool from_zero);

void draw_y_axis(Picture& picture, const Axis& y, const std::string& label);
void draw_x_axis(Picture& picture, const Axis& x, double y, const std::string& label, double left = kLeft);

/// A row of legend entries, from the left.
class Legend {
 public:
  Legend(Picture& picture, double x, double y) : picture_(picture), x_(x), y_(y) {}
  void line(const char* style, const std::string& name) {
    if (name.empty()) return;
    picture_.line(x_, y_ - 4, x_ + 18, y_ - 4, style);
    words(name);
  }
  void box(const char* style, const std::string& name) {
    if (name.empty()) return;
    picture_.box(x_, y_ - 9, 18, 10, style);
    words(name);
  }

 private:
  void words(const std::string& name) {
    picture_.text(x_ + 23, y_, "start", "small", name);
    x_ += 34 + kLetter * static_cast<double>(name.size());
  }
  Picture& picture_;
  double x_, y_;
};

}  // namespace weft::report
