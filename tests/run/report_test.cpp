// SPDX-License-Identifier: Apache-2.0
//
// The files of a run: metrics that are the same as without interruption, a record of how the run ended.
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>

#include "base/error.hpp"
#include "base/format.hpp"
#include "base/log.hpp"
#include "base/progress.hpp"
#include "run/log_session.hpp"
#include "run/metrics.hpp"
#include "run/pass.hpp"
#include "run/run_record.hpp"
#include "storage/json_file.hpp"
#include "tests/scratch.hpp"

using namespace weft;
namespace fs = std::filesystem;

namespace {

using weft::testing::contents;
using weft::testing::Scratch;
using weft::testing::write_file;

}  // namespace

TEST_CASE("metrics continue after the resumed step") {
  const Scratch scratch;
  const fs::path path = scratch.path / "metrics.jsonl";
  {
    run::MetricsWriter writer(path, -1);
    for (int step = 10; step <= 50; step += 10) writer.write({{"step", step}, {"loss", 1.0 / step}});
  }
  const std::string undisturbed = contents(path);
  // A run killed between the checkpoint of step 30 and step 50, resumed from 30.
  {
    run::MetricsWriter writer(path, 30);
    for (int step = 40; step <= 50; step += 10) writer.write({{"step", step}, {"loss", 1.0 / step}});
  }
  CHECK(contents(path) == undisturbed);
  run::MetricsWriter(path, -1);  // a new run in an old directory
  CHECK(contents(path) == "");
}

TEST_CASE("torn and foreign lines are dropped, whatever they hold") {
  const Scratch scratch;
  const fs::path path = scratch.path / "metrics.jsonl";
  const std::string whole = "{\"step\":1}\n{\"step\":2}\n";
  for (const std::string torn : {"{\"step\":3,\"lo", "{\"step\":3}", "{\"step\":", "\n", "[3]\n", "{\"step\":\"x\"}\n",
                                 "{\"loss\":1}\n", "\xff\xfe\n"}) {
    write_file(path, whole + torn);
    run::MetricsWriter(path, 100);
    CHECK_MESSAGE(contents(path) == whole, torn);
  }
  write_file(path, whole + std::string(3 << 20, '[') + "\n");  // too long for a record, too deep for a stack
  run::MetricsWriter(path, 100);
  CHECK(contents(path) == whole);
  CHECK_THROWS_AS(run::MetricsWriter(scratch.path / "no" / "such" / "directory.jsonl", -1), Error);
}

TEST_CASE("a damaged line between records costs that record only, and is counted") {
  const Scratch scratch;
  const fs::path path = scratch.path / "metrics.jsonl";
  std::vector<std::string> warnings;
  log::set_sink([&](log::Level level, std::string_view line) {
    if (level == log::Level::warning) warnings.emplace_back(line);
  });
  const std::string before = "{\"step\":1}\n{\"step\":2}\n", after = "{\"step\":4}\n{\"step\":5}\n";
  for (const std::string& damaged : {std::string("{\"step\":3,\"lo\n"), std::string(64, '\0') + "\n", std::string("\n"),
                                     std::string("{\"step\":9999}\n"), std::string(3 << 20, '[') + "\n"}) {
    warnings.clear();
    write_file(path, before + damaged + after + "{\"step\":6}\n{\"st");
    { run::MetricsWriter(path, 5).write({{"step", 6}}); }
    CHECK(contents(path) == before + after + "{\"step\":6}\n");
    REQUIRE(warnings.size() == 1);
    CHECK(warnings[0].find("1 damaged line removed, the first is line 3") != std::string::npos);
  }
  log::set_sink([](log::Level, std::string_view) {});
}

TEST_CASE("non-finite numbers are written as strings") {
  const double inf = std::numeric_limits<double>::infinity();
  CHECK(finite_json_text({{"a", std::nan("")}, {"b", {inf, -inf, 1.5}}}) == R"({"a":"nan","b":["inf","-inf",1.5]})");
  CHECK(finite_json_text({{"name", "\xff"}}) == "{\"name\":\"\xEF\xBF\xBD\"}");  // the replacement character
}

TEST_CASE("a full disk costs no record if it has room again later, and otherwise says how many") {
  const Scratch scratch;
  const fs::path path = scratch.path / "metrics.jsonl";
  std::vector<std::string> warnings;
  log::set_sink([&](log::Level level, std::string_view line) {
    if (level == log::Level::warning) warnings.emplace_back(line);
  });
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit former;
  getrlimit(RLIMIT_FSIZE, &former);
  const auto limit = [&](rlim_t bytes) {
    rlimit changed = former;
    changed.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &changed);
  };
  std::string whole;
  {
    run::MetricsWriter writer(path, -1);
    for (int step = 1; step <= 9; ++step) {
      if (step == 3) limit(25);  // in the middle of the third line
      if (step == 7) limit(former.rlim_cur);
      writer.write({{"step", step}});
      whole += fmt::format("{{\"step\":{}}}\n", step);
      if (step == 6) CHECK(contents(path) == whole.substr(0, 25));
    }
  }
  CHECK(contents(path) == whole);
  CHECK(warnings.size() == 1);  // once
  if (fs::exists("/dev/full")) {
    run::MetricsWriter writer("/dev/full", -1);
    for (int step = 1; step <= 3; ++step) writer.write({{"step", step}});
  }
  CHECK(warnings.back().find("3 records are missing") != std::string::npos);
  log::set_sink([](log::Level, std::string_view) {});
}

TEST_CASE("run.json exists from the start and records how the run ended") {
  const Scratch scratch;
  const fs::path path = scratch.path / "run.json";
  run::record_start(testing::world(), "weft train a.toml", {{"MPI", "some"}}, "portable");
  run::run_record()["result"]["step"] = 7;
  run::record_to(path);
  CHECK_FALSE(fs::exists(path));
  run::record_running(testing::world());
  Json json = Json::parse(contents(path));
  CHECK(json["exit"]["code"].is_null());
  CHECK(json["exit"]["reason"] == "running");
  CHECK(json["command"] == "weft train a.toml");
  CHECK(json["libraries"]["MPI"] == "some");
  CHECK(json["ranks"] == 1);
  CHECK(json["hosts"][0]["ranks"] == Json::array({0}));
  CHECK(json["hosts"][0]["device"] == "portable");
  for (const char* key : {"version", "revision", "modified", "compiler", "build_type"})
    CHECK(json["build"].contains(key));

  run::set_current_step(12);
  run::record_end(4, "the loss is nan");
  json = Json::parse(contents(path));
  CHECK(json["exit"]["code"] == 4);
  CHECK(json["exit"]["reason"] == "the loss is nan");
  CHECK(json["exit"]["step"] == 12);
  CHECK(json["result"]["step"] == 7);
  CHECK(std::distance(fs::directory_iterator(scratch.path), {}) == 1);  // nothing temporary stays
  run::set_current_step(-1);

  // The directory was removed: logged, no further consequence.
  fs::remove_all(scratch.path);
  CHECK_NOTHROW(run::record_end(0, "finished"));
}

TEST_CASE("a rank that ends the job replaces the end in the record of rank 0 and keeps the rest") {
  const Scratch scratch;
  const fs::path path = scratch.path / "run.json";
  const auto failed = [&](const std::string& before) {
    write_file(path, before);
    run::record_failure(path, 5, "rank 1 on node7: no progress");
    return Json::parse(contents(path));
  };
  Json json = failed(R"({"ranks":2,"exit":{"code":null,"reason":"running"}})");
  CHECK(json["ranks"] == 2);
  CHECK(json["exit"]["code"] == 5);
  CHECK(json["exit"]["reason"] == "rank 1 on node7: no progress");
  CHECK(json.contains("ended"));
  // A damaged or missing record is replaced, that of a finished run kept.
  for (const char* damaged : {"", "{\"exit\":", "[1]", "{\"exit\":5}", "{\"exit\":{\"code\":\"x\"}}"})
    CHECK(failed(damaged)["exit"]["code"] == 5);
  CHECK(failed(R"({"exit":{"code":0},"result":{}})") == Json::parse(R"({"exit":{"code":0},"result":{}})"));
  // Also if the finished run is of an earlier start; any other record of an earlier start is replaced.
  run::record_to(path, 3);
  const char* finished = R"({"lease":2,"exit":{"code":0},"result":{"step":7}})";
  CHECK(failed(finished) == Json::parse(finished));
  json = failed(R"({"lease":2,"exit":{"code":75},"result":{"step":7}})");
  CHECK(json["lease"] == 3);
  CHECK(json["exit"]["code"] == 5);
  CHECK_FALSE(json.contains("result"));
  run::record_to({});
  fs::remove_all(scratch.path);
  CHECK_NOTHROW(run::record_failure(path, 5, "no directory any more"));
}

TEST_CASE("exit codes have their texts") {
  CHECK(run::exit_reason(0) == "finished");
  CHECK(run::exit_reason(75) == "stopped cleanly, more to do");
  CHECK(run::exit_reason(143) == "stopped by signal 15, resumable");
  CHECK(run::exit_reason(77) == "unknown exit code 77");
}

TEST_CASE("a long pass says how far it is, a short one nothing") {
  std::vector<std::string> lines;
  log::set_sink([&](log::Level, std::string_view line) { lines.emplace_back(line); });
  run::Pass often("features", 4, "batches", 0), rarely("features", 4, "batches");
  const std::uint64_t before = noted_progress();
  for (std::int64_t i = 1; i <= 4; ++i) {
    often.done(i);
    rarely.done(i);
  }
  log::set_sink([](log::Level, std::string_view) {});
  CHECK(noted_progress() == before + 8);  // for the watchdog
  REQUIRE(lines.size() == 3);             // the end is not announced
  CHECK(lines[0].starts_with("features: 1 of 4 batches, 0:00:0"));
  CHECK(lines[2].ends_with(" left"));
}

TEST_CASE("the log file holds every line of rank 0, and is written at once") {
  const Scratch scratch;
  const fs::path path = scratch.path / "log.txt";
  write_file(path, "an older line\n");
  {
    const run::LogSession session(0);
    log::info("before the file is known");
    log::warning("zero");
    run::log_to_file(path);
    log::info("one");
    CHECK(contents(path).ends_with(" one\n"));  // before the session ends: an abort would lose nothing
    log::warning("two");
    run::status({.step = 3, .steps = 9});
    run::set_output(run::Verbosity::quiet, true);
    log::info("four");  // not printed, but kept
  }
  const std::string text = contents(path);
  CHECK(text.starts_with("an older line\n"));
  CHECK(text.find(" warning: zero\n") != std::string::npos);  // of the start of the program
  CHECK(text.find("before") == std::string::npos);
  CHECK(text.find(" one\n") != std::string::npos);
  CHECK(text.find(" warning: two\n") != std::string::npos);
  CHECK(text.find(" step 3/9  0 steps/s\n") != std::string::npos);
  CHECK(text.find(" four\n") != std::string::npos);
  const run::LogSession other(1);
  run::log_to_file(scratch.path / "other.txt");
  CHECK_FALSE(fs::exists(scratch.path / "other.txt"));
}

TEST_CASE("progress and numbers are formatted for people") {
  CHECK(format::grouped(0) == "0");
  CHECK(format::grouped(-1234) == "-1,234");
  CHECK(format::grouped(999) == "999");
  CHECK(format::grouped(1234567) == "1,234,567");
  CHECK(format::duration(3723.4) == "1:02:03");
  CHECK(format::duration(std::nan("")) == "?");
  run::Progress progress;
  progress.step = 120;
  progress.steps = 2000;
  progress.metrics = "loss 0.4123  NMSE 0.4050  L0 15.98";
  progress.unit = "tokens";
  progress.per_second = 51900;
  progress.seconds_left = 754;
  CHECK(run::progress_text(progress) ==
        "step 120/2000  loss 0.4123  NMSE 0.4050  L0 15.98  51,900 tokens/s  0:12:34 left");
  // Whole fields are left out where a line is too long: the last metrics first, the step and the first metric never.
  CHECK(run::progress_text(progress, 80).size() == 80);
  CHECK(run::progress_text(progress, 79) == "step 120/2000  loss 0.4123  NMSE 0.4050  51,900 tokens/s  0:12:34 left");
  CHECK(run::progress_text(progress, 60) == "step 120/2000  loss 0.4123  51,900 tokens/s  0:12:34 left");
  CHECK(run::progress_text(progress, 50) == "step 120/2000  loss 0.4123  0:12:34 left");
  CHECK(run::progress_text(progress, 30) == "step 120/2000  loss 0.4123");
  CHECK(run::progress_text(progress, 10) == "step 120/2");
  // The memory goes first.
  progress.memory = "1.20 GiB, peak 1.53 GiB";
  CHECK(run::progress_text(progress) ==
        "step 120/2000  loss 0.4123  NMSE 0.4050  L0 15.98  51,900 tokens/s  0:12:34 left  1.20 GiB, peak 1.53 GiB");
  CHECK(run::progress_text(progress, 90).size() == 80);
  progress.per_second = std::numeric_limits<double>::infinity();
  CHECK(run::progress_text(progress).find("  ? tokens/s") != std::string::npos);
}
