// SPDX-License-Identifier: Apache-2.0
//
// The time line: what is recorded and when, its bound, and the nesting of its events in the file.
#include "base/trace.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "run/log_session.hpp"
#include "run/timers.hpp"
#include "run/trace_file.hpp"
#include "storage/json_file.hpp"
#include "tests/test.hpp"

using namespace weft;

namespace {

/// Makes steps 1, 2, … with two phases each.
void make_steps(int n) {
  run::Timers timers;
  for (int step = 1; step <= n; ++step) {
    run::set_current_step(step);
    timers.phase("encode");
    timers.phase("decode");
    timers.stop();
  }
  run::set_current_step(-1);
}

std::int64_t count(const trace::Recording& recording, trace::Row row) {
  return std::count_if(recording.events.begin(), recording.events.end(),
                       [&](const trace::Event& event) { return event.row == row; });
}

Json parsed(const trace::Recording& recording) {
  return Json::parse(fmt::format("[{}]", run::trace_events(recording, 0, "host \"a\"")));
}

/// Every two events of a thread are disjoint or nested.
bool is_nested(const Json& events) {
  std::map<int, std::vector<std::pair<double, double>>> threads;
  for (const Json& event : events)
    if (event["ph"] == "X")
      threads[event["tid"].get<int>()].emplace_back(event["ts"].get<double>(),
                                                    event["ts"].get<double>() + event["dur"].get<double>());
  for (const auto& [tid, spans] : threads)
    for (const auto& a : spans)
      for (const auto& b : spans)
        if (a.first < b.first && b.first < a.second - 1e-3 && a.second + 1e-3 < b.second) return false;
  return true;
}

}  // namespace

TEST_CASE("nothing is recorded unless armed") {
  make_steps(10);
  CHECK_FALSE(trace::on());
  CHECK(trace::take().events.empty());
}

TEST_CASE("recording begins after the warm-up and ends after a fixed number of steps") {
  int settled = 0;
  trace::arm([&] { ++settled; });
  make_steps(100);
  trace::Recording recording = trace::take();
  CHECK(settled == 2);
  CHECK(recording.steps == trace::kSteps);
  CHECK(count(recording, trace::Row::steps) == trace::kSteps);
  CHECK(count(recording, trace::Row::host) == 2 * trace::kSteps);
  CHECK(recording.nanoseconds > 0);
  CHECK(recording.cpu_seconds >= 0);

  trace::arm();
  make_steps(trace::kWarmupSteps + 2);  // a run that ends early
  CHECK(trace::take().steps == 2);
  trace::arm();
  make_steps(trace::kWarmupSteps);
  make_steps(10);  // steps after the end of the run do not count
  CHECK(trace::take().steps == 0);
  trace::arm([&] { ++settled; });
  for (int i = 0; i <= trace::kWarmupSteps; ++i) trace::next_step();
  trace::disarm();  // after an error the device is not waited for
  CHECK(settled == 3);
  CHECK_FALSE(trace::on());
  CHECK(trace::take().events.empty());
}

TEST_CASE("events beyond the bound are counted and dropped, from whatever thread") {
  trace::arm();
  for (int i = 0; i <= trace::kWarmupSteps; ++i) trace::next_step();
  REQUIRE(trace::on());
  constexpr int kEach = 20'000;
  const auto fill = [](trace::Row row) {
    for (int i = 0; i < kEach; ++i) const trace::Scope scope(row, "a name that is longer than an event has space for");
  };
  std::thread reader(fill, trace::Row::reader), writer(fill, trace::Row::writer);
  reader.join();
  writer.join();
  const trace::Recording recording = trace::take();
  CHECK(recording.events.size() == trace::kMostEvents);
  CHECK(recording.dropped == 2 * kEach + 1 - static_cast<std::int64_t>(trace::kMostEvents));  // and the step
  CHECK(std::string(recording.events[0].name) == "a name that is longer than an event has");
}

TEST_CASE("events of one thread are nested in the file; those that overlap get threads of their own") {
  trace::Recording recording;
  const auto add = [&](const char* name, trace::Row row, std::int64_t begin, std::int64_t end) {
    trace::Event& event = recording.events.emplace_back();
    std::snprintf(event.name, sizeof event.name, "%s", name);
    event.row = row;
    event.begin = begin;
    event.end = end;
  };
  add("encode", trace::Row::host, 1000, 2000);
  add("step", trace::Row::steps, 1000, 9000);
  add("first", trace::Row::device_exchanges, 1000, 5000);
  add("second \"quoted\"", trace::Row::device_exchanges, 3000, 7000);
  add("third", trace::Row::device_exchanges, 6000, 6500);
  const Json events = parsed(recording);
  CHECK(is_nested(events));
  std::map<std::string, int> tids;
  std::vector<std::string> names;
  for (const Json& event : events) {
    if (event["ph"] == "X") tids[event["name"].get<std::string>()] = event["tid"].get<int>();
    if (event["ph"] == "M") names.push_back(event["args"]["name"].get<std::string>());
  }
  CHECK(tids.at("step") == tids.at("encode"));
  CHECK(tids.at("first") != tids.at("second \"quoted\""));
  CHECK(tids.at("third") == tids.at("first"));
  for (const char* name : {"rank 0 on host \"a\"", "host", "device exchanges", "device exchanges 2"})
    CHECK(std::find(names.begin(), names.end(), name) != names.end());
  CHECK(events[1]["ts"] == 1.0);  // microseconds; the step comes before the phase that begins with it
  CHECK(events[1]["name"] == "step");
}

TEST_CASE("the file holds the events of all ranks") {
  const parallel::World& world = testing::world();
  trace::arm();
  make_steps(trace::kWarmupSteps + 1 + world.rank());
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("weft_trace_test_" + world.all().broadcast(std::to_string(getpid())));
  run::write_trace(path, trace::take(), world);
  if (!world.is_root()) return;
  std::ifstream file(path);
  const Json json = Json::parse(file);
  std::filesystem::remove(path);
  std::map<int, int> steps;
  for (const Json& event : json["traceEvents"])
    if (event["name"] == "step") ++steps[event["pid"].get<int>()];
  for (int rank = 0; rank < world.size(); ++rank) CHECK(steps[rank] == 1 + rank);
  CHECK(json["otherData"]["ranks"] == world.size());
}
