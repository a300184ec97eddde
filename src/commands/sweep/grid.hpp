// SPDX-License-Identifier: Apache-2.0
//
// The points of `weft sweep`: every combination of the values of its --grid options.
#pragma once

#include <string>
#include <vector>

namespace weft::commands {

/// A key of the input with the values that it takes, each as TOML or as a bare word (as of --set).
struct Axis {
  std::string key;  ///< "table.key"
  std::vector<std::string> values;
};

/// "table.key=VALUE,VALUE,…": values are separated by commas outside quotes and brackets. Throws a collective
/// Error(usage) for another form, an empty or repeated value, and for a key given twice.
std::vector<Axis> parse_grid(const std::vector<std::string>& grids);

struct Point {
  std::string name;               ///< of its directory: "learning_rate=1e-3_k=8", letters, digits and "=_.+-"
  std::vector<std::string> sets;  ///< "table.key=value", one per axis
};
/// In the order of the options; the last axis varies fastest. Throws a collective Error(usage) if two points have the
/// same name.
std::vector<Point> points_of(const std::vector<Axis>& axes);

}  // namespace weft::commands
