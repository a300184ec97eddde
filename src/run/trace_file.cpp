// SPDX-License-Identifier: Apache-2.0
#include "run/trace_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "storage/json_file.hpp"

namespace weft::run {
namespace {

/// A thread of the trace, and the rows that it shows.
struct Thread {
  const char* name;
  std::vector<trace::Row> rows;
};

const std::vector<Thread>& threads() {
  using trace::Row;
  static const std::vector<Thread> all = {
      {"host", {Row::steps, Row::host}}, {"exchanges", {Row::exchanges}},
      {"reader", {Row::reader}},         {"writer", {Row::writer}},
      {"device", {Row::device}},         {"device exchanges", {Row::device_exchanges}}};
  return all;
}

constexpr std::size_t kMostLanes = 8;  // lanes of a thread whose events overlap

/// The first lane in which the event is nested or separate; lanes hold the ends of their open events.
std::size_t lane_of(const trace::Event& event, std::vector<std::vector<std::int64_t>>& lanes) {
  for (std::size_t lane = 0;; ++lane) {
    if (lane == lanes.size()) lanes.emplace_back();
    std::vector<std::int64_t>& open = lanes[lane];
    while (!open.empty() && open.back() <= event.begin) open.pop_back();
    if (!open.empty() && open.back() < event.end && lane + 1 < kMostLanes) continue;
    open.push_back(event.end);
    return lane;
  }
}

std::string metadata(const char* what, int rank, std::size_t thread, const std::string& name) {
  return finite_json_text({{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", thread}, {"args", {{"name", name}}}});
}

}  // namespace

std::string trace_events(const trace::Recording& recording, int rank, const std::string& host) {
  std::string out = metadata("process_name", rank, 0, fmt::format("rank {} on {}", rank, host));
  for (std::size_t thread = 0; thread < threads().size(); ++thread) {
    const std::vector<trace::Row>& rows = threads()[thread].rows;
    std::vector<const trace::Event*> events;
    for (const trace::Event& event : recording.events)
      if (std::find(rows.begin(), rows.end(), event.row) != rows.end()) events.push_back(&event);
    // Outer events before the inner ones that begin with them.
    std::stable_sort(events.begin(), events.end(), [](const trace::Event* a, const trace::Event* b) {
      return a->begin != b->begin ? a->begin < b->begin : a->end != b->end ? a->end > b->end : a->row < b->row;
    });
    std::vector<std::vector<std::int64_t>> lanes;
    for (const trace::Event* event : events) {
      const std::size_t tid = kMostLanes * thread + lane_of(*event, lanes);
      out += fmt::format(",\n{{\"ph\":\"X\",\"name\":{},\"pid\":{},\"tid\":{},\"ts\":{:.3f},\"dur\":{:.3f}}}",
                         finite_json_text(event->name), rank, tid, 1e-3 * static_cast<double>(event->begin),
                         1e-3 * static_cast<double>(event->end - event->begin));
    }
    for (std::size_t lane = 0; lane < lanes.size(); ++lane)
      out +=
          ",\n" + metadata("thread_name", rank, kMostLanes * thread + lane,
                           lane == 0 ? threads()[thread].name : fmt::format("{} {}", threads()[thread].name, lane + 1));
  }
  return out;
}

void write_trace(const std::filesystem::path& path, const trace::Recording& recording, const parallel::World& world) {
  const std::string own = trace_events(recording, world.rank(), world.host());
  std::string all;
  for (int rank = 0; rank < std::min(world.size(), kMostRanksInTrace); ++rank) {
    const std::string events = world.all().broadcast(rank == world.rank() ? own : std::string(), rank);
    if (world.is_root()) all += (rank == 0 ? "" : ",\n") + events;
  }
  if (!world.is_root()) return;
  const Json other = {{"ranks", world.size()}, {"steps", recording.steps}, {"dropped_events", recording.dropped}};
  storage::write_json_text(path,
                           fmt::format("{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[\n{}\n]}}\n",
                                       finite_json_text(other), all));
}

}  // namespace weft::run
