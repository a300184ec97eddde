// SPDX-License-Identifier: Apache-2.0
#include "commands/sweep/grid.hpp"

#include <algorithm>
#include <cctype>
#include <set>

#include "base/error.hpp"

namespace weft::commands {
namespace {

constexpr std::size_t kMostPoints = 10'000;
constexpr std::size_t kLongestName = 200;  // bytes; file systems allow 255

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  char quote = 0;
  int depth = 0;
  for (const char c : text) {
    if (quote != 0)
      quote = c == quote ? 0 : quote;
    else if (c == '"' || c == '\'')
      quote = c;
    else if (c == '[')
      ++depth;
    else if (c == ']')
      --depth;
    if (c == ',' && quote == 0 && depth == 0)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

std::string file_name(const std::string& text) {
  std::string name;
  for (const char c : text)
    if (c != '"' && c != '\'') name += std::isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '+' ? c : '-';
  return name;
}

}  // namespace

std::vector<Axis> parse_grid(const std::vector<std::string>& grids) {
  std::vector<Axis> axes;
  for (const std::string& grid : grids) {
    const std::size_t equals = grid.find('='), dot = grid.find('.');
    if (equals == std::string::npos || dot > equals || dot == 0 || dot + 1 == equals)
      throw collective_error(ExitCode::usage,
                             "--grid {}: not a key with its values; write --grid table.key=VALUE,VALUE, for example "
                             "optimizer.learning_rate=1e-3,3e-3",
                             grid);
    Axis axis{grid.substr(0, equals), split(grid.substr(equals + 1))};
    if (axis.key == "run.output")
      throw collective_error(ExitCode::usage,
                             "--grid {}: the sweep names the directory of each point (within --output); leave it out",
                             grid);
    for (const Axis& other : axes)
      if (other.key == axis.key)
        throw collective_error(ExitCode::usage, "--grid {}: the key is given twice; give all its values in one option",
                               axis.key);
    for (const std::string& value : axis.values)
      if (value.empty() || std::count(axis.values.begin(), axis.values.end(), value) > 1)
        throw collective_error(ExitCode::usage, "--grid {}: {}; give each value once", grid,
                               value.empty() ? "a value is empty" : "the value " + value + " is repeated");
    axes.push_back(std::move(axis));
  }
  return axes;
}

std::vector<Point> points_of(const std::vector<Axis>& axes) {
  std::vector<Point> points(1);
  for (const Axis& axis : axes) {
    // The key without its table, unless another axis ends in the same word.
    const auto word = [](const std::string& key) { return key.substr(key.rfind('.') + 1); };
    const bool unique = std::count_if(axes.begin(), axes.end(),
                                      [&](const Axis& other) { return word(other.key) == word(axis.key); }) == 1;
    const std::string shown = unique ? word(axis.key) : axis.key;
    if (points.size() * axis.values.size() > kMostPoints)
      throw collective_error(ExitCode::usage, "--grid: more than {} points; give fewer values", kMostPoints);
    std::vector<Point> more;
    for (const Point& point : points)
      for (const std::string& value : axis.values) {
        Point& next = more.emplace_back(point);
        next.name += (next.name.empty() ? "" : "_") + shown + "=" + file_name(value);
        next.sets.push_back(axis.key + "=" + value);
      }
    points = std::move(more);
  }
  std::set<std::string> names;
  for (const Point& point : points)
    if (!names.insert(point.name).second || point.name.size() > kLongestName)
      throw collective_error(ExitCode::usage,
                             "--grid: {} cannot name a directory ({}); write the values in another form, or set "
                             "some keys in the input",
                             point.name,
                             point.name.size() > kLongestName ? "it is too long" : "two points have this name");
  return points;
}

}  // namespace weft::commands
