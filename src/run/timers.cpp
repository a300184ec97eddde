// SPDX-License-Identifier: Apache-2.0
#include "run/timers.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/trace.hpp"
#include "device/ranges.hpp"
#include "parallel/communicator.hpp"
#include "parallel/watchdog.hpp"

namespace weft::run {

void Timers::switch_to(int phase) {
  if (before_switch_) before_switch_();
  const Clock::time_point now = Clock::now();
  if (current_ >= 0)
    phases_[static_cast<std::size_t>(current_)].seconds += std::chrono::duration<double>(now - begin_).count();
  if (current_ >= 0 && trace::on())
    trace::record(trace::Row::host, phases_[static_cast<std::size_t>(current_)].name, begin_, now);
  if (current_ >= 0) device::end_range();
  current_ = phase;
  if (current_ >= 0) device::begin_range(phases_[static_cast<std::size_t>(current_)].name.c_str());
  begin_ = now;
}

void Timers::phase(std::string_view name) {
  parallel::note_phase(name);
  if (held_) return;
  std::string of_pass;
  if (!pass_.empty() && std::find(split_.begin(), split_.end(), name) != split_.end())
    name = of_pass = fmt::format("{}, {}", name, pass_);
  // A step has about ten phases: looking through them costs less than a map.
  auto found = std::find_if(phases_.begin(), phases_.end(), [&](const Phase& r) { return r.name == name; });
  if (found == phases_.end()) found = phases_.insert(found, Phase{std::string(name)});
  ++found->count;
  switch_to(static_cast<int>(found - phases_.begin()));
}

void Timers::stop() {
  if (!held_) switch_to(-1);
}

double Timers::seconds(std::string_view name) const {
  for (const Phase& phase : phases_)
    if (phase.name == name) return phase.seconds;
  return 0;
}

void Timers::reset() {
  stop();
  phases_.clear();
}

std::vector<Timers::Statistics> Timers::gather(const parallel::Communicator& ranks) {
  stop();
  std::string own;
  for (const Phase& phase : phases_) own += phase.name + "\n";
  std::vector<Statistics> all;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const std::string names = ranks.broadcast(own, rank);
    for (std::size_t begin = 0, end = 0; (end = names.find('\n', begin)) != std::string::npos; begin = end + 1) {
      const std::string name = names.substr(begin, end - begin);
      if (std::none_of(all.begin(), all.end(), [&](const Statistics& s) { return s.name == name; }))
        all.push_back({name, 0, 0, 0, 0});
    }
  }
  std::vector<double> mine;
  std::vector<std::int64_t> counts;
  for (const Statistics& s : all) {
    mine.push_back(seconds(s.name));
    const auto found = std::find_if(phases_.begin(), phases_.end(), [&](const Phase& r) { return r.name == s.name; });
    counts.push_back(found == phases_.end() ? 0 : found->count);
  }
  std::vector<double> gathered(mine.size() * static_cast<std::size_t>(ranks.size()));
  ranks.all_gather(mine.data(), gathered.data(), static_cast<std::int64_t>(mine.size() * sizeof(double)));
  ranks.maximum(counts);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].count = counts[i];
    all[i].minimum = all[i].maximum = gathered[i];
    for (std::size_t k = i; k < gathered.size(); k += all.size()) {
      all[i].minimum = std::min(all[i].minimum, gathered[k]);
      all[i].maximum = std::max(all[i].maximum, gathered[k]);
      all[i].mean += gathered[k] / ranks.size();
    }
  }
  return all;
}

Json to_json(const std::vector<Timers::Statistics>& statistics) {
  Json out = Json::object();
  for (const auto& s : statistics)
    out[s.name] = {{"min", s.minimum}, {"mean", s.mean}, {"max", s.maximum}, {"count", s.count}};
  return out;
}

std::string to_table(const std::vector<Timers::Statistics>& statistics) {
  double total = 0;
  std::size_t width = 6;
  for (const auto& s : statistics) {
    total += s.mean;
    width = std::max(width, s.name.size());
  }
  std::string out = fmt::format("{:<{}}   mean s      %    min s    max s", "phase", width);
  for (const auto& s : statistics)
    out += fmt::format("\n{:<{}} {:8.3f} {:5.1f}% {:8.3f} {:8.3f}", s.name, width, s.mean,
                       total > 0 ? 100 * s.mean / total : 0.0, s.minimum, s.maximum);
  return out;
}

}  // namespace weft::run
