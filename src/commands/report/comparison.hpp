// SPDX-License-Identifier: Apache-2.0
//
// Several runs of one model family side by side: the settings in which they differ, their results, best first, and
// their curves in common charts. For `weft report RUN RUN …` and at the end of `weft sweep`.
#pragma once

#include <string>
#include <vector>

#include "commands/report/page.hpp"

namespace weft::commands {

struct Comparison {
  struct Run {
    RunFacts facts;
    std::string name;                   ///< the path without what all paths have in common
    std::string state;                  ///< how it ended
    std::vector<std::string> settings;  ///< by key; "" where the run has no such key
    std::vector<double> results;        ///< by result; NaN: none
  };
  const Family* family = nullptr;
  std::vector<std::string> keys;     ///< of the input, "table.key": those that differ between runs
  std::vector<std::string> results;  ///< names, those that any run has
  bool ranked = false;               ///< the first result is a loss or an error: smaller is better
  std::vector<Run> runs;             ///< if ranked by the first result, runs without it last; then by name
};

/// At least one run. Throws a collective Error(usage) if runs belong to different families, whose losses measure
/// different things, or to none.
Comparison compare(std::vector<RunFacts> runs);

/// One self-contained page.
std::string comparison_page(const Comparison&);
/// A table of fixed columns, for the log.
std::string to_text(const Comparison&);
std::string to_csv(const Comparison&);
/// {"family", "sorted_by", "runs": [{"name", "path", "state", "exit_code", "settings": {key: value}, "results": {…}}]}
report::Json to_json(const Comparison&);

}  // namespace weft::commands
