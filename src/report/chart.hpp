// SPDX-License-Identifier: Apache-2.0
//
// Charts as SVG: the only place that writes it. All but `stacked_bars` are inline pictures for a page that carries the
// style sheet `chart_style`: colours come from its variables, so that one picture serves a light, a dark and a printed
// page. Two series never differ by colour alone. Every mark has a <title>, shown by the browser as a tooltip. No
// script.
//
// Values that are not finite are omitted: a line breaks there. Texts are escaped here.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace weft::report {

/// Colours that are told apart on a light and on a dark page: pairs differ by at least 33 in CIE L*a*b*, and each has a
/// contrast of at least 2.4 with both pages.
constexpr std::size_t kColours = 16;

/// CSS rules and variables for the classes of the charts, for a <style> element of the page.
std::string chart_style();

struct LineChart {
  std::string x_label, y_label;  ///< with units
  std::string line_name, band_name;
  std::vector<double> x, y;
  std::vector<double> low, high;  ///< a band around the line; empty: none
  std::vector<double> marks;      ///< values of x with a dashed vertical line
  std::string marks_name;
  double level = -1;  ///< a horizontal line; < 0: none
  std::string level_name;
  bool from_zero = false;  ///< the y axis begins at 0
};
/// The y axis is logarithmic when all values are positive and span more than a factor of 30, unless `from_zero`.
std::string line_chart(const LineChart&);

/// Curves of several runs in one picture. Neighbours differ in colour and in dashes; the names are a legend below.
struct Overlay {
  struct Line {
    std::string name;
    std::vector<double> x, y;  ///< same length; a line connects the finite values
  };
  std::string x_label, y_label;  ///< with units
  std::vector<Line> lines;       ///< at most kColours; later ones are not drawn
  bool from_zero = false;        ///< the y axis begins at 0
};
/// The y axis as in `line_chart`. A line of more than 512 points is drawn by every n-th one and its last.
std::string overlay(const Overlay&);

/// Vertical bars, one per category; the axis begins at 0.
struct BarChart {
  std::string x_label, y_label;
  std::vector<std::string> categories;
  std::vector<double> values;
  double level = -1;  ///< a horizontal line; < 0: none
  std::string level_name;
};
std::string bar_chart(const BarChart&);

/// Horizontal bars, each with a text at its end.
struct Bar {
  std::string name;
  double value = 0;
  std::string text;            ///< at the end of the bar
  double low = -1, high = -1;  ///< a whisker; < 0: none
  double limit = -1;           ///< the value at the hardware's limit, drawn solid; < 0: unknown
};
struct HorizontalBars {
  std::string x_label, limit_name, whisker_name;
  std::vector<Bar> bars;
};
std::string horizontal_bars(const HorizontalBars&);

/// A matrix of cells, dark where the value is large; cells without a value (NaN) are empty.
struct HeatMap {
  std::string x_label, y_label;
  std::vector<std::vector<double>> values;      ///< [row][column], rows of equal length
  std::vector<std::vector<std::string>> notes;  ///< tooltips, same shape
};
std::string heat_map(const HeatMap&);

/// A span of steps, drawn as a row: where it began, where and how it ended.
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
  std::vector<double> points;  ///< diamonds in a row below the spans
  std::string points_name;
};
std::string time_line(const TimeLine&);

/// Cases with the parts of their totals, as a standalone SVG document in the light or dark theme of its viewer. Each
/// case has two bars: its parts on the scale of the longest case, and its parts as shares of its own total.
struct StackedBars {
  struct Part {
    std::string name;  ///< parts of one name have one colour; more names than kColours share them
    double value = 0;
    std::string note;  ///< tooltip
  };
  struct Case {
    std::string name;
    double total = 0;
    std::string text;  ///< after the upper bar
    std::vector<Part> parts;
  };
  std::string title, subtitle;
  std::vector<Case> cases;
};
std::string stacked_bars(const StackedBars&);

}  // namespace weft::report
