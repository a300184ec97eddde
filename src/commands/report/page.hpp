// SPDX-License-Identifier: Apache-2.0
//
// The page of `weft report`: sections that every run has, and those of the model family. A family has one file with one
// function, listed in families.cpp.
#pragma once

#include <string>
#include <vector>

#include "commands/report/facts.hpp"
#include "report/page.hpp"

namespace weft::commands {

/// How the curve of a metric is drawn.
struct CurveStyle {
  std::string metric;  ///< its name in metrics.jsonl
  std::string title, y_label, caption;
  std::string line_name = {}, band_name = {};  ///< legend; with a band over the layers of the metric
  double factor = 1;                           ///< values are drawn times this
  bool from_zero = false;                      ///< the y axis begins at 0
  bool skip_if_zero = false;                   ///< not drawn when all values are 0 (not recorded)
  double level = -1;                           ///< a horizontal line; < 0: none
  std::string level_name = {};
};

/// What a model family adds to the page.
struct FamilyPart {
  std::string about;                      ///< one line: model, data, size, rate
  std::vector<CurveStyle> curves;         ///< drawn first; other metrics follow
  std::vector<report::Tile> tiles;        ///< after those of the run
  std::vector<report::Section> sections;  ///< between the training curves and the time by phase
};

/// A result by which runs are compared: a number of `result` in run.json, or of evaluation.json.
struct ResultColumn {
  std::string name;
  std::vector<std::string> path;  ///< {"validation", "loss"}: members of `result`
};

struct Family {
  const char* table;  ///< the table of the input (run.json, `input`) that marks its runs
  const char* name;   ///< "transcoders"
  FamilyPart (*part)(const RunFacts&);
  /// Smaller is better in the first one that any of the runs has: runs are sorted by it.
  std::vector<ResultColumn> results;
};

/// All families. To add one: a function in a file of its own, and its line in families.cpp.
const std::vector<Family>& families();
/// The family of a run; null: its input was not recorded, or is of none.
const Family* family_of(const RunFacts&);
/// The styles of the family, the common ones, and one for each other metric of the curves.
std::vector<CurveStyle> styles_of(const Curves&, const std::vector<CurveStyle>& of_family);

/// One self-contained HTML document (report/page.hpp). Missing information is stated in its place.
std::string report_page(const RunFacts&);

// Texts and figures that several sections use.

/// "12.3 %"; "not finite".
std::string percent(double fraction);
/// How the run ended: "finished", "running", "exit code 75".
std::string state_of(const RunFacts&);
/// `word: value` of a key of the input, e.g. "k 8"; "" where the run has none.
std::string setting(const RunFacts&, const char* table, const char* key, const char* word);
/// Joins what is not empty by commas.
std::string joined(const std::vector<std::string>& parts);
/// Fixed decimals, for columns of a table; "not finite".
std::string fixed(double value, int decimals);
/// "1,234,567"; "unknown" when it is not a number.
std::string whole(double value);

constexpr std::size_t kMostRows = 64;  ///< of a table or bar chart

}  // namespace weft::commands
