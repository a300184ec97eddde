// SPDX-License-Identifier: Apache-2.0
//
// What `weft benchmark` writes, compares and reads, on made-up results.
#include "bench/benchmark.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "base/error.hpp"

namespace weft::bench {
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
  const Json before = to_json(result_of(100));
  const Comparison same = compare(result_of(109), before, 1.1);
  CHECK_FALSE(same.slower);
  const Comparison slow = compare(result_of(112), before, 1.1);
  CHECK(slow.slower);
  CHECK(slow.text.find("a < b: 112.0 ms/step, before 100.0 ms (1.12 times, more than 1.10)") != std::string::npos);
}

TEST_CASE("a document that is not a benchmark.json, or has none of the cases, is refused") {
  for (const char* text : {"{}", "[]", "3", R"({"cases": 1})", R"({"cases": [7, {"name": "other", "ms_per_step": 5}]})",
                           R"({"cases": [{"name": "a < b", "ms_per_step": "fast"}]})"})
    CHECK_THROWS_AS(compare(result_of(1), Json::parse(text), 1.1), Error);
}

TEST_CASE("a reference of speeds is read for this type of GPU, input and number of ranks") {
  BenchmarkResult result = result_of(112);
  result.gpu = "NVIDIA H200";
  result.input = "benchmark_gpt2_small";
  const Json reference = Json::parse(R"({"gpus": {"NVIDIA H200": {
    "benchmark_gpt2_small": [{"name": "a < b", "ranks": 2, "ms_per_step": 1},
                             {"name": "a < b", "ranks": 1, "ms_per_step": 100, "source": "a table"}],
    "other": [{"name": "a < b", "ms_per_step": 1}]}, "another": {}}})");
  const Comparison slow = compare(result, reference, 1.1);
  CHECK(slow.slower);
  CHECK(slow.text == "a < b: 112.0 ms/step, before 100.0 ms (1.12 times, more than 1.10; a table)");
  for (const char* gpu : {"", "another", "NVIDIA H100"}) {
    result.gpu = gpu;
    CHECK_THROWS_AS(compare(result, reference, 1.1), Error);
  }
}

TEST_CASE("phases without a limit have no percentage of it") {
  const Json json = to_json(result_of(10));
  CHECK(json["cases"][0]["phases"][0]["percent_of_limit"] == 80);
  CHECK(json["cases"][0]["phases"][1]["percent_of_limit"].is_null());
}

TEST_CASE("exchanges are listed by name and in total; a single rank has none") {
  BenchmarkResult result = result_of(10);
  CHECK_FALSE(to_json(result)["cases"][0].contains("communication"));
  CHECK(to_table(result).find("partial sums") == std::string::npos);
  result.ranks = 2;
  Json json = to_json(result)["cases"][0]["communication"];
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

TEST_CASE("a row counts if its loss is that of the baseline") {
  BenchmarkResult result = result_of(100);
  result.cases[0].name = "baseline";
  result.cases[0].loss = 2.0;
  result.cases[0].tokens_per_step = 64;
  const auto add = [&](const char* name, double ms, std::optional<double> loss, std::int64_t tokens) {
    CaseResult one = result.cases[0];
    one.name = name;
    one.ms_per_step = ms;
    one.loss = loss;
    one.tokens_per_step = tokens;
    result.cases.push_back(one);
  };
  add("close", 50, 2.015, 64);
  add("apart", 50, 2.03, 64);
  add("broken", 50, NAN, 64);
  add("larger", 50, 9, 128);
  add("without", 50, std::nullopt, 64);  // such as private training
  judge(result, "baseline", 0.01);
  CHECK(result.cases[1].times_faster == 2);
  CHECK(*result.cases[1].loss_difference == doctest::Approx(0.0075));
  CHECK(result.cases[1].problem.empty());
  CHECK(result.cases[2].problem == "the loss is 2.03000, that of \"baseline\" 2.00000: more than 0.01 apart");
  CHECK_FALSE(result.cases[3].problem.empty());
  CHECK_FALSE(result.cases[4].compared);
  CHECK(result.cases[5].times_faster == 2);
  CHECK(result.cases[5].problem.empty());
  const Json json = to_json(result);
  CHECK(json["baseline"] == "baseline");
  CHECK(json["cases"][1]["valid"] == true);
  CHECK(json["cases"][2]["valid"] == false);
  CHECK(json["cases"][3]["loss"].is_null());
  CHECK(json["cases"][4]["valid"].is_null());
  CHECK(json["cases"][5]["loss"].is_null());
  CHECK(json["cases"][5]["loss_difference"].is_null());

  // Without the baseline nothing is valid; where none is asked for, nothing is judged.
  BenchmarkResult other = result_of(100);
  judge(other, "baseline", 0.01);
  CHECK(other.baseline.empty());
  CHECK_FALSE(to_json(other)["cases"][0].contains("valid"));
  other.not_measured = {{"baseline", "it needs too much"}};
  judge(other, "baseline", 0.01);
  CHECK(to_json(other)["cases"][0]["valid"] == false);
  CHECK(to_json(other)["not_measured"][0]["reason"] == "it needs too much");
  CHECK(to_table(other).find("baseline: not measured, it needs too much") != std::string::npos);
}

TEST_CASE("utilisation is of a stated peak, in both conventions; without one there is none") {
  BenchmarkResult result = result_of(100);
  result.cases[0].tokens_per_second = 1e5;
  result.cases[0].flops = {8e8, 9e8};
  CHECK(to_json(result)["cases"][0]["mfu"]["causal"].is_null());
  CHECK(to_table(result).find("a peak that is not stated") != std::string::npos);
  result.peak_tflops = 200;
  result.ranks = 1;
  const Json json = to_json(result)["cases"][0]["mfu"];
  CHECK(json["causal"].get<double>() == doctest::Approx(0.4));
  CHECK(json["full"].get<double>() == doctest::Approx(0.45));
  CHECK(to_table(result).find("40.0 %") != std::string::npos);
  // The peak is that of one device; several ranks have one each.
  result.ranks = 2;
  CHECK(to_json(result)["cases"][0]["mfu"]["causal"].get<double>() == doctest::Approx(0.2));
  CHECK(to_table(result).find("of 200 TFLOP/s per rank") != std::string::npos);
}

TEST_CASE("the CSV has one line per case, and as many fields in each") {
  BenchmarkResult result = result_of(100);
  result.cases[0].name = "a \"quoted\", name";
  result.not_measured = {{"graphs", "no GPU"}};
  const std::string csv = to_csv(result);
  CHECK(std::count(csv.begin(), csv.end(), '\n') == 3);
  CHECK(csv.find("\n\"a \"\"quoted\"\", name\",\"\",\"\",100,") != std::string::npos);
  CHECK(csv.find("\n\"graphs\",,,,,,,,,,,,,,\"not measured: no GPU\"\n") != std::string::npos);
  const std::string header = csv.substr(0, csv.find('\n'));
  CHECK(std::count(header.begin(), header.end(), ',') == 14);
}

TEST_CASE("a case is a name and overrides") {
  CHECK(parse_case("sparse").name == "sparse");
  CHECK(parse_case("sparse").sets.empty());
  const BenchmarkCase one = parse_case(" bf16 : optimizer.state=bf16, device.precision=bf16 ");
  CHECK(one.name == "bf16");
  CHECK(one.overrides == "optimizer.state=bf16, device.precision=bf16");
  CHECK(one.sets == std::vector<std::string>{"optimizer.state=bf16", "device.precision=bf16"});
}

}  // namespace weft::bench
