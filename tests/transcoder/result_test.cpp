// SPDX-License-Identifier: Apache-2.0
//
// Measures that are not defined are shown as "-" and recorded as null, and are not part of means; columns of the table
// stay apart whatever the numbers.
#include "transcoder/run/result.hpp"

#include <cmath>
#include <limits>
#include <sstream>

#include "tests/test.hpp"

namespace weft::transcoder {
namespace {

EvaluationResult result_with(double nmse) {
  EvaluationResult result;
  result.tokens = 10;
  result.nmse = {0.25, nmse};
  result.nmse_standardised = {0.5, nmse};
  result.explained_variance = {0.75, 1 - nmse};
  result.fvu_dimension = {0.5, nmse};
  result.l0 = {16, 32};
  result.dead_fraction = {0, 1};
  result.density_histogram = {std::vector<std::int64_t>(kDensityBins), std::vector<std::int64_t>(kDensityBins)};
  result.nmse_pooled = nmse;
  return result;
}

/// The words of line `i`.
std::vector<std::string> words(const std::string& table, int i) {
  std::istringstream lines(table);
  std::string line;
  for (; i >= 0; --i) std::getline(lines, line);
  std::istringstream in(line);
  return {std::istream_iterator<std::string>(in), {}};
}

}  // namespace

TEST_CASE("a layer without variance has no NMSE and does not change the means") {
  const EvaluationResult result = result_with(std::numeric_limits<double>::quiet_NaN());
  CHECK(mean_over_layers(result.nmse_standardised) == 0.5);
  CHECK(std::isnan(mean_over_layers({std::nan("")})));
  const std::string table = to_table(result);
  CHECK(words(table, 2) == std::vector<std::string>{"1", "-", "-", "-", "32.00", "100.0%"});
  CHECK(words(table, 3) == std::vector<std::string>{"mean", "0.5000", "0.2500", "0.7500", "24.00", "50.0%"});
  const Json json = to_json(result);
  CHECK(json["nmse_standardised"][1].is_null());
  CHECK(json["nmse_pooled"].is_null());
  CHECK(json["nmse_standardised_mean"] == 0.5);
  CHECK(json["l0"] == std::vector<double>{16, 32});
}

TEST_CASE("measures of the decoder: shares by target layer, null before the source, - where there is none") {
  const double none = std::numeric_limits<double>::quiet_NaN();
  EvaluationResult result = result_with(0.5);
  result.density_histogram[0][0] = 3;
  const DecoderSummary summary{{{0.25, 0.75}, {none}}, {0.5, none}, {0.125, none}};
  const Json json = to_json(summary);
  CHECK(json["decoder_share"][0] == std::vector<double>{0.25, 0.75});
  CHECK(json["decoder_share"][1][0].is_null());
  CHECK(json["decoder_share"][1][1].is_null());
  CHECK(json["redundancy_mean"] == 0.5);
  CHECK(json["redundant_fraction"][0] == 0.125);
  const std::string table = to_table(result, summary);
  CHECK(words(table, 1) == std::vector<std::string>{"0", "0.2500", "0.5000", "0.5000", "12.5%"});
  CHECK(words(table, 2) == std::vector<std::string>{"1", "0.5000", "0.5000", "-", "-"});
  CHECK(words(table, 3) == std::vector<std::string>{"mean", "0.3750", "0.5000", "0.5000", "12.5%"});
  CHECK(words(table, 8) == std::vector<std::string>{"0", "3", "0", "0", "0", "0", "0", "0", "0"});
  CHECK(words(table, 13) == std::vector<std::string>{"0", "25.0", "75.0"});
  CHECK(words(table, 14) == std::vector<std::string>{"1", "-"});
}

TEST_CASE("columns of huge numbers are separated") {
  for (const double huge : {99999.0, 1e7, 1e38, 1e300, std::numeric_limits<double>::infinity()}) {
    EvaluationResult result = result_with(huge);
    result.l0 = {1e9, 268435456};
    for (int line = 0; line < 4; ++line) {
      CAPTURE(to_table(result));
      CHECK(words(to_table(result), line).size() == (line == 0 ? 9 : 6));  // names of columns have several words
    }
  }
}

}  // namespace weft::transcoder
