// SPDX-License-Identifier: Apache-2.0
//
// What `weft benchmark` writes, compares and reads, on made-up results.
#include "training/benchmark.hpp"

#include <doctest/doctest.h>

#include "base/error.hpp"

namespace weft::training {
namespace {

BenchmarkResult result_of(double sparse_ms) {
  BenchmarkResult result;
  result.machine = {10, 100};
  CaseResult one;
  one.name = "a < b";
  one.ms_per_step = sparse_ms;
  one.phases = {{"encode", sparse_ms / 2, 1e6, 2e6, 80}, {"exchange", sparse_ms / 2, 0, 0, -1}};
  one.exchanges = {{"partial sums", 3e6, 2e-3, 1}, {"flags", 8, 0, 2}};
  result.cases = {one};
  return result;
}

}  // namespace

TEST_CASE("a case that takes longer than the ratio allows is named") {
  const report::Json before = to_json(result_of(100));
  const Comparison same = compare(result_of(109), before, 1.1);
  CHECK_FALSE(same.slower);
  const Comparison slow = compare(result_of(112), before, 1.1);
  CHECK(slow.slower);
  CHECK(slow.text.find("a < b: 112.0 ms/step, before 100.0 ms (1.12 times, more than 1.10)") != std::string::npos);
}

TEST_CASE("a document that is not a benchmark.json, or has none of the cases, is refused") {
  for (const char* text : {"{}", "[]", "3", R"({"cases": 1})", R"({"cases": [7, {"name": "other", "ms_per_step": 5}]})",
                           R"({"cases": [{"name": "a < b", "ms_per_step": "fast"}]})"})
    CHECK_THROWS_AS(compare(result_of(1), report::Json::parse(text), 1.1), Error);
}

TEST_CASE("names of cases are text in the plot, and phases without a limit have none") {
  const std::string svg = to_svg(result_of(10));
  CHECK(svg.find("a &lt; b") != std::string::npos);
  CHECK(svg.find("a < b") == std::string::npos);
  const report::Json json = to_json(result_of(10));
  CHECK(json["cases"][0]["phases"][0]["percent_of_limit"] == 80);
  CHECK(json["cases"][0]["phases"][1]["percent_of_limit"].is_null());
}

TEST_CASE("exchanges are listed by name and in total; a single rank has none") {
  BenchmarkResult result = result_of(10);
  CHECK_FALSE(to_json(result)["cases"][0].contains("communication"));
  CHECK(to_table(result).find("partial sums") == std::string::npos);
  result.ranks = 2;
  report::Json json = to_json(result)["cases"][0]["communication"];
  CHECK(json["bytes_per_step"].get<double>() == 3000008);
  CHECK(json["ms"].get<double>() == doctest::Approx(2));
  CHECK(json["exchanges"][0]["name"] == "partial sums");
  CHECK(json["exchanges"][0]["gb_per_second"].get<double>() == doctest::Approx(1.5));
  CHECK(json["exchanges"][1]["gb_per_second"].get<double>() == 0);  // no time was measured
  result.cases[0].exposed_ms = 0.5;
  result.cases[0].exposed_least_ms = 0.25;
  json = to_json(result)["cases"][0]["communication"];
  CHECK(json["exposed_ms"] == 0.5);
  CHECK(json["exposed_least_ms"] == 0.25);
  CHECK(to_table(result).find(
            "exposed: 0.50 ms/step, 25 % of the exchanges' time; 0.25 ms on the rank that waits least") !=
        std::string::npos);

  // Cases side by side show what each exchanges; the name of a case may be long.
  CaseResult other = result.cases[0];
  other.name = "a case with a name that needs room";
  other.exposed_ms = -1;
  result.cases.push_back(other);
  const std::string table = to_table(result);
  CHECK(table.find("\na < b " + std::string(29, ' ')) != std::string::npos);
  CHECK(table.find("2.00       0.50        3.0\na case with a name that needs room ") != std::string::npos);
  CHECK(table.find("2.00          -        3.0") != std::string::npos);
  result.ranks = 1;
  CHECK(to_table(result).find("exposed") == std::string::npos);
}

TEST_CASE("a case is a name and overrides") {
  CHECK(parse_case("sparse").name == "sparse");
  CHECK(parse_case("sparse").sets.empty());
  const BenchmarkCase one = parse_case(" bf16 : optimizer.state=bf16, device.precision=bf16 ");
  CHECK(one.name == "bf16");
  CHECK(one.overrides == "optimizer.state=bf16, device.precision=bf16");
  CHECK(one.sets == std::vector<std::string>{"optimizer.state=bf16", "device.precision=bf16"});
}

}  // namespace weft::training
