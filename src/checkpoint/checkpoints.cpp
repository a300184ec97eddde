// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoints.hpp"

#include <utility>

#include "base/log.hpp"
#include "parallel/failure.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
namespace {

/// The settings of the writer on the nodes: only the newest checkpoint must be there.
Settings on_nodes(Settings settings) {
  settings.keep = 2;
  settings.keep_every = 0;
  settings.protected_step = -1;
  return settings;
}

/// The settings of the writer in the run directory: if it copies, it needs no memory for the state.
Settings in_run_directory(Settings settings) {
  if (!settings.local.empty()) settings.staging = Staging::chunked;
  return settings;
}

/// The cost that an earlier start has measured, else an estimate if it is needed. Collective.
Cost known_cost(const parallel::Communicator& world, const Starts* starts, const fs::path& directory,
                const Settings& settings, const Registry& registry, bool limited) {
  Cost cost;
  parallel::on_root(world, [&] { cost = starts->last_cost().value_or(Cost()); });
  world.broadcast(&cost, sizeof cost);
  if (cost.measured || (!limited && settings.every != kAutomatic)) return cost;
  cost = estimate_cost(world, directory, registry.bytes());
  if (world.rank() == 0)
    log::info("a checkpoint is estimated to take {:.3g} s (from the write speed of {})", cost.duration,
              directory.string());
  return cost;
}

}  // namespace

Checkpoints::Checkpoints(const parallel::Communicator& world, const parallel::Communicator& node,
                         const fs::path& directory, const Settings& settings, const Registry& registry,
                         const kernels::Execution& execution, const fs::path& resumed_from, Starts* starts,
                         bool limited)
    : world_(world),
      node_(node),
      settings_(settings),
      starts_(starts),
      shared_(world, directory, in_run_directory(settings), registry, execution, resumed_from) {
  if (!settings.local.empty()) {
    local_directory_ = begin_local(world, node, directory, settings.local);
    local_.emplace(world, local_directory_, on_nodes(settings), registry, execution, fs::path(), &node);
  }
  const Cost cost = known_cost(world, starts_, directory, settings, registry, limited);
  copy_seconds_ = settings.local.empty() ? 0 : cost.duration;
  Settings logged = settings;
  if (world.rank() != 0) logged.every = 0;  // only rank 0 measures time
  interval_.emplace(logged, cost);
  if (world.rank() == 0 && settings.scrub > 0) scrub_.emplace(directory, 3600 * settings.scrub);
}

void Checkpoints::start(Manifest manifest) {
  if (local_) {
    note_local(local_->finish());
    local_->start(std::move(manifest));
  } else {
    note_shared(shared_.finish());
    shared_.start(std::move(manifest));
  }
  interval_->note_start(Clock::now());
}

void Checkpoints::finish() {
  if (local_) note_local(local_->finish());
  note_shared(shared_.finish());
  copy_newest();
  note_shared(shared_.finish());
}

void Checkpoints::close() {
  if (!local_) return;
  local_.reset();
  remove_local(world_, node_, local_directory_);
}

std::vector<std::int64_t> Checkpoints::progress() const {
  return {local_ ? local_->phases_done() : 0, shared_.phases_done()};
}

void Checkpoints::advance(std::span<const std::int64_t> least) {
  if (least.size() != 2) return;
  if (local_ && local_->allows_advance(least[0])) note_local(local_->advance());
  if (shared_.allows_advance(least[1])) note_shared(shared_.advance());
  copy_newest();
}

/// Starts to copy the newest checkpoint on the nodes, if no other one is being copied.
void Checkpoints::copy_newest() {
  if (!to_copy_ || shared_.busy()) return;
  const Manifest manifest = *std::exchange(to_copy_, std::nullopt);
  const auto own = static_cast<std::size_t>(world_.rank());
  shared_.start_copy(manifest, {{own, local_directory_ / directory_name(manifest.step) / shard_name(world_.rank())}});
}

void Checkpoints::note_local(const std::optional<Report>& report) {
  if (!report || !report->durable) return;
  if (world_.rank() == 0) log::info("{}; on the nodes, not in the run directory yet", report->line());
  to_copy_ = local_->manifest();
  local_seconds_ = report->seconds;
  interval_->note_durable(local_seconds_ + copy_seconds_, report->pause);
}

void Checkpoints::note_shared(const std::optional<Report>& report) {
  if (!report || !report->durable) return;
  if (world_.rank() == 0) log::info("{}", report->line());
  if (report->copied) {
    copy_seconds_ = report->seconds;
    interval_->note_duration(local_seconds_ + copy_seconds_);
  } else {
    interval_->note_durable(report->seconds, report->pause);
  }
  if (world_.rank() != 0) return;
  const auto unwritten = parallel::attempt([&] { starts_->note_checkpoint(report->step, interval_->cost()); });
  if (unwritten) log::warning("the duration of the checkpoint was not recorded: {}", unwritten->message);
}

void Checkpoints::note_step(double seconds) { interval_->note_step(seconds, busy()); }

bool Checkpoints::due_after(std::int64_t step) const { return settings_.every > 0 && step % settings_.every == 0; }

bool Checkpoints::requested() { return interval_->due(Clock::now()); }

Json Checkpoints::record() const {
  const Cost& cost = interval_->cost();
  Json json;
  json["duration_seconds"] = cost.duration;
  json["delay_seconds"] = cost.delay;
  json["measured"] = cost.measured;
  if (settings_.every == kAutomatic) json["interval_seconds"] = interval_->seconds();
  if (scrub_) {
    const Scrub::Result result = scrub_->result();
    json["scrub"] = {{"passes", result.passes},
                     {"verified", result.checkpoints},
                     {"bytes", result.bytes},
                     {"damaged", result.damaged},
                     {"unreadable", result.unreadable}};
  }
  return json;
}

}  // namespace weft::checkpoint
