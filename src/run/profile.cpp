// SPDX-License-Identifier: Apache-2.0
#include "run/profile.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/format.hpp"
#include "base/log.hpp"
#include "base/trace.hpp"
#include "device/memory.hpp"
#include "device/stream.hpp"
#include "run/machine_limits.hpp"
#include "run/trace_file.hpp"

namespace weft::run {
namespace {

/// Phases in which nothing is computed.
constexpr std::string_view kNoKernels[] = {"exchange", "waiting for the device", "waiting for data", "reading rows",
                                           "reward",   "start checkpoint"};
/// The phase of a replayed step, which cannot be split.
constexpr std::string_view kWholeStep = "step";

using Interval = std::pair<std::int64_t, std::int64_t>;

/// The events of a row that `wanted` accepts, ascending and inside the recording. They follow one another.
template <class Wanted>
std::vector<Interval> intervals(const trace::Recording& recording, trace::Row row, Wanted&& wanted) {
  std::vector<Interval> all;
  for (const trace::Event& event : recording.events)
    if (event.row == row && wanted(event.name))
      all.emplace_back(std::clamp<std::int64_t>(event.begin, 0, recording.nanoseconds),
                       std::clamp<std::int64_t>(event.end, 0, recording.nanoseconds));
  std::sort(all.begin(), all.end());
  return all;
}

double seconds_of(const std::vector<Interval>& intervals) {
  std::int64_t sum = 0;
  for (const Interval& one : intervals) sum += one.second - one.first;
  return 1e-9 * static_cast<double>(sum);
}

double seconds_in_both(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  std::int64_t sum = 0;
  for (auto left = a.begin(), right = b.begin(); left != a.end() && right != b.end();) {
    sum += std::max<std::int64_t>(0, std::min(left->second, right->second) - std::max(left->first, right->first));
    left->second < right->second ? ++left : ++right;
  }
  return 1e-9 * static_cast<double>(sum);
}

bool computes(std::string_view phase) {
  return std::find(std::begin(kNoKernels), std::end(kNoKernels), phase) == std::end(kNoKernels);
}

/// Time in phases that compute: on the host without the exchanges inside them.
double kernel_seconds(const trace::Recording& recording, bool on_gpu) {
  const std::vector<Interval> phases = intervals(recording, on_gpu ? trace::Row::device : trace::Row::host, computes);
  if (on_gpu) return seconds_of(phases);
  const auto any = [](std::string_view) { return true; };
  return seconds_of(phases) - seconds_in_both(phases, intervals(recording, trace::Row::exchanges, any));
}

double bytes_per_step(const trace::Recording& recording, const PhaseBytes& phases) {
  const auto has = [&](std::string_view name) {
    return std::any_of(recording.events.begin(), recording.events.end(),
                       [&](const trace::Event& event) { return event.row == trace::Row::host && event.name == name; });
  };
  const bool whole = has(kWholeStep);
  double sum = 0;
  for (const auto& [name, bytes] : phases)
    if (whole || has(name)) sum += bytes;
  return sum;
}

}  // namespace

Profile::Profile(bool wanted, const parallel::World& world, const device::Runtime& runtime)
    : world_(world), runtime_(runtime), active_(wanted) {
  if (!active_) return;
  copy_gb_per_second_ = measure_copy(runtime.execution(), world.all());
  device::reset_peak();
  device_.emplace(runtime.execution());
  trace::arm([this] { device_->wait(); });
}

Profile::~Profile() {
  if (active_) trace::disarm();
}

Json Profile::conclude(const std::filesystem::path& directory, const PhaseBytes& phases) {
  if (!active_) return {};
  trace::end_steps();
  device_->collect();
  const trace::Recording recording = trace::take();
  active_ = false;
  const std::filesystem::path path = directory / "profile.json";
  run::write_trace(path, recording, world_);
  if (recording.steps == 0) {
    log::warning("--profile recorded nothing (the first {} steps are not recorded); make more steps",
                 trace::kWarmupSteps);
    return {{"steps", 0}};
  }

  const bool on_gpu = device::is_asynchronous(runtime_.execution());
  const double steps = recording.steps, seconds = 1e-9 * static_cast<double>(recording.nanoseconds);
  const double kernels = kernel_seconds(recording, on_gpu);
  const double bytes = bytes_per_step(recording, phases);
  const double possible = copy_gb_per_second_ * 1e9 * kernels / steps;  // bytes that a copy would move in that time
  double means[] = {100 * (on_gpu ? kernels : recording.cpu_seconds / runtime_.threads()) / seconds,
                    1e3 * kernels / steps, possible > 0 ? 100 * bytes / possible : 0, bytes};
  world_.all().sum(std::span<double>(means));
  for (double& mean : means) mean /= world_.size();
  std::int64_t largest[] = {recording.nanoseconds, device::memory_use().device_peak_bytes};
  world_.all().maximum(largest);
  const double ms = 1e-6 * static_cast<double>(largest[0]) / steps;

  // A command that states no bytes has no such figure.
  const auto known = [&](double value) { return means[3] > 0 ? Json(value) : Json(); };
  const std::string bandwidth =
      means[3] > 0 ? fmt::format(", memory bandwidth {:.0f} % of {:.1f} GB/s (at least {} per step)", means[2],
                                 copy_gb_per_second_, format::binary_bytes_text(std::llround(means[3])))
                   : "";
  log::info(
      "profile of {} steps: {:.2f} ms/step, device memory {}, utilisation {:.0f} %, kernels {:.2f} ms/step{}; time "
      "line: {}",
      recording.steps, ms, format::binary_bytes_text(largest[1]), means[0], means[1], bandwidth, path.string());
  return {{"steps", recording.steps},
          {"ms_per_step", ms},
          {"device_peak_bytes", largest[1]},
          {"utilisation_percent", means[0]},
          {"kernel_ms_per_step", means[1]},
          {"bandwidth_percent_of_limit", known(means[2])},
          {"copy_gb_per_second", copy_gb_per_second_},
          {"bytes_per_step", known(means[3])}};
}

}  // namespace weft::run
