// SPDX-License-Identifier: Apache-2.0
//
// Charts as inline SVG, for a page that carries the style sheet `chart_style`: colours come from its variables, so that
// one picture serves a light and a dark page and a printed one. Two series never differ by colour alone. Every mark has
// a <title>, which a pointer shows. No script.
//
// Values that are not finite are left out: a line breaks there. Texts are escaped here.
#pragma once

#include <string>
#include <vector>

namespace weft::report {

/// Rules for the classes that the charts use, and the variables behind them. In a <style> of the page.
std::string chart_style();

struct LineChart {
  std::string x_label, y_label;  ///< with units
  std::string line_name, band_name;
  std::vector<double> x, y;
  std::vector<double> low, high;  ///< a band around the line; empty: none
  std::vector<double> marks;      ///< values of x with a dashed line
  std::string marks_name;
  double level = -1;  ///< a horizontal line; < 0: none
  std::string level_name;
  bool from_zero = false;  ///< the y axis begins at 0
};
/// The y axis is logarithmic when the values are positive and span more than a factor of 30, unless `from_zero`.
std::string line_chart(const LineChart&);

/// Upright bars, one a category; the axis begins at 0.
struct BarChart {
  std::string x_label, y_label;
  std::vector<std::string> categories;
  std::vector<double> values;
  double level = -1;  ///< a horizontal line; < 0: none
  std::string level_name;
};
std::string bar_chart(const BarChart&);

/// Lying bars with their text behind them.
struct Bar {
  std::string name;
  double value = 0;
  std::string text;            ///< said behind the bar
  double low = -1, high = -1;  ///< a whisker; < 0: none
  double limit = -1;           ///< the part of the bar that the hardware's limit allows, drawn solid; < 0: not known
};
struct LyingBars {
  std::string x_label, limit_name, whisker_name;
  std::vector<Bar> bars;
};
std::string lying_bars(const LyingBars&);

/// A matrix of cells, dark where the value is large; cells without a value (NaN) stay empty.
struct HeatMap {
  std::string x_label, y_label;
  std::vector<std::vector<double>> values;      ///< [row][column], rows of one length
  std::vector<std::vector<std::string>> notes;  ///< what a pointer shows, same shape
};
std::string heat_map(const HeatMap&);

/// One row a span of steps: where it began, where it ended, and how.
struct Span {
  std::string name;
  double begin = 0, end = 0;
  bool clean = true;  ///< false: a cross at the end
  std::string note;
};
struct TimeLine {
  std::string x_label;
  double last = 0;  ///< right end of the axis, at least
  std::vector<Span> spans;
  std::vector<double> points;  ///< diamonds in a row of their own
  std::string points_name;
};
std::string time_line(const TimeLine&);

}  // namespace weft::report
