// SPDX-License-Identifier: Apache-2.0
#include "run/loop.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/clock.hpp"
#include "base/contract.hpp"
#include "base/error.hpp"
#include "base/fault.hpp"
#include "base/format.hpp"
#include "base/log.hpp"
#include "device/memory.hpp"
#include "parallel/failure.hpp"
#include "parallel/signals.hpp"
#include "parallel/watchdog.hpp"
#include "run/agreement.hpp"
#include "run/algorithms.hpp"
#include "run/build.hpp"
#include "run/log_session.hpp"
#include "run/run_record.hpp"

namespace weft::run {
namespace {

Json to_json(const Metric& metric) {
  const auto number_or_null = [&](double value) { return metric.optional && std::isnan(value) ? Json() : Json(value); };
  return std::visit(
      [&]<class Value>(const Value& value) {
        if constexpr (std::is_same_v<Value, Metric::Group>) {
          Json group = Json::object();
          for (const auto& [name, number] : value) group[name] = number;
          return group;
        } else if constexpr (std::is_same_v<Value, std::vector<double>>) {
          Json layers = Json::array();
          for (const double number : value) layers.push_back(number_or_null(number));
          return layers;
        } else if constexpr (std::is_same_v<Value, double>) {
          return number_or_null(value);
        } else {
          return Json(value);
        }
      },
      metric.value);
}

/// "loss 0.4123  NMSE 0.4050": the metrics that the progress line shows.
std::string progress_of(const Metrics& metrics) {
  std::string text;
  for (const Metric& metric : metrics) {
    if (metric.progress.empty()) continue;
    if (!text.empty()) text += "  ";
    const double* const number = std::get_if<double>(&metric.value);
    if (number != nullptr && metric.optional && std::isnan(*number))
      text += metric.progress.substr(0, metric.progress.find('{')) + "-" +
              metric.progress.substr(metric.progress.find('}') + 1);
    else if (number != nullptr)
      text += fmt::format(fmt::runtime(metric.progress), *number);
    else if (const std::int64_t* integer = std::get_if<std::int64_t>(&metric.value))
      text += fmt::format(fmt::runtime(metric.progress), *integer);
  }
  return text;
}

}  // namespace

void accept_requests() {
  // Never destroyed: the destructor would restore the default actions shortly before the process has ended.
  static const auto* const signals = new parallel::Signals;
  static_cast<void>(signals);
}

std::string hosts_text() {
  std::string text;
  for (const Json& entry : run::run_record()["hosts"]) {
    const auto ranks = entry["ranks"].get<std::vector<std::int64_t>>();
    const auto cpus = entry["cpus"].get<std::vector<std::string>>();
    text += fmt::format("rank{} {} on {}: {}, CPUs {}\n", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "),
                        entry["host"].get<std::string>(), entry["device"].get<std::string>(), fmt::join(cpus, " | "));
  }
  return text;
}

Loop::Loop(Trainable& model, const LoopSettings& settings, Origin origin, const OpenedRun& opened,
           const parallel::World& world, const parallel::GridShape& grid, const device::Runtime& runtime,
           Clock::time_point start)
    : model_(model),
      settings_(settings),
      origin_(std::move(origin)),
      directory_(opened.directory),
      unit_(model.work_unit()),
      resumed_(opened.found.has_value()),
      resume_option_(opened.resume),
      world_(world),
      grid_(grid),
      start_(start) {
  if (world.is_root()) metrics_.emplace(directory_.path / "metrics.jsonl", resumed_ ? opened.found->manifest.step : -1);
  if (resumed_) {
    const checkpoint::Manifest& manifest = opened.found->manifest;
    checkpoint::load(world.all(), *opened.found, model.registry(), runtime.execution());
    model.resume_at(manifest.step, manifest.cursor);
    steps_done_ = manifest.step;
    work_ = manifest.tokens;
    if (compares()) resume_best(*opened.found);
  } else {
    model.initialise();
  }
  first_step_ = steps_done_;
  first_work_ = work_;
  checkpoint::Settings checkpoints = settings.checkpoint;
  checkpoints.protected_step = opened.protected_step;
  if (world.is_root()) starts_.emplace(directory_.path);
  checkpoints_.emplace(world.all(), world.node(), directory_.checkpoints(), checkpoints, model.registry(),
                       runtime.execution(), resumed_ ? opened.found->path : std::filesystem::path(),
                       starts_ ? &*starts_ : nullptr, !settings.run.walltime.empty());
  if (world.is_root()) directory_.lease->begin_at(checkpoints_->last_durable());
}

checkpoint::Manifest Loop::manifest() const {
  checkpoint::Manifest manifest;
  manifest.step = steps_done_;
  manifest.tokens = work_;
  manifest.cursor = model_.cursor();
  manifest.grid = grid_.sizes();
  manifest.input = origin_.resolved_input;
  manifest.original_input = origin_.original_input;
  manifest.code_revision = run::build_record.revision;
  manifest.libraries = origin_.libraries;
  manifest.dataset_fingerprint = origin_.dataset_fingerprint;
  manifest.fence = directory_.lease->fence();
  manifest.owner = directory_.lease->token();
  Json extra = origin_.extra;
  if (const Json algorithms = algorithms_in_use(); !algorithms.empty()) extra["algorithms"] = algorithms;
  if (compares()) extra["best"] = checkpoint::to_json(best_);
  manifest.extra = finite_json_text(extra);
  return manifest;
}

void Loop::begin_checkpoint() {
  parallel::note_phase("checkpoint");
  model_.wait();
  const Clock::time_point begin = Clock::now();
  if (settings_.checkpoint.keep_best) settle_best();
  checkpoints_->start(manifest());
  checkpoint_seconds_ += seconds_since(begin);
}

/// Before a checkpoint is begun: waits for the one in progress. If it was to be kept for its loss and could not be
/// written, the best one before stays. Collective.
void Loop::settle_best() {
  checkpoints_->finish();
  if (best_in_progress_) {
    const bool written = checkpoints_->last_durable() == best_in_progress_->step;
    if (written) {
      durable_best_ = *best_in_progress_;
    } else if (best_.step == best_in_progress_->step) {
      best_.step = durable_best_.step;
      best_.loss = durable_best_.loss;
    }
    best_in_progress_.reset();
  }
  if (best_.step == steps_done_) best_in_progress_ = best_;
}

void Loop::resume_best(const checkpoint::Found& found) {
  best_ = checkpoint::best_of(found.manifest).value_or(checkpoint::Best());
  // The checkpoint may be another run's (--resume), or the best one was deleted.
  bool missing = false;
  if (settings_.checkpoint.keep_best && best_.step >= 0)
    parallel::on_root(world_.all(), [&] {
      missing = !std::filesystem::is_directory(directory_.checkpoints() / checkpoint::directory_name(best_.step));
    });
  world_.all().broadcast(&missing, sizeof missing);
  if (missing) {
    log::warning(
        "the checkpoint of step {}, with the lowest validation loss so far, is not in {}: losses are compared anew",
        best_.step, directory_.checkpoints().string());
    best_ = {};
  }
  durable_best_ = best_;
}

/// True if this evaluation has the lowest loss so far and its checkpoint is to be kept. The same on all ranks.
bool Loop::note_validation(const Metrics& measured) {
  if (!compares()) return false;
  const auto compared =
      std::find_if(measured.begin(), measured.end(), [](const Metric& metric) { return metric.compared; });
  WEFT_ASSERT(compared != measured.end());
  double loss = std::get<double>(compared->value);
  world_.all().broadcast(&loss, sizeof loss);  // decisions must not depend on the rounding of a rank
  const bool lowest = best_.note(steps_done_, loss);
  return lowest && settings_.checkpoint.keep_best;
}

bool Loop::stops_early() const {
  return settings_.run.stop_after > 0 && best_.evaluations_since >= settings_.run.stop_after &&
         steps_done_ < settings_.run.steps;
}

/// Communication of the last step, which is complete: means over ranks. Collective.
Json Loop::step_communication() const {
  const Communication sent = model_.communication();
  double means[] = {static_cast<double>(sent.step_bytes_sent), sent.step_exposed_seconds};
  world_.all().sum(std::span<double>(means));
  for (double& mean : means) mean /= world_.size();
  return {{"bytes_sent", std::llround(means[0])}, {"exposed_seconds", means[1]}};
}

/// Allocated now and at most so far, of the rank with the most. Collective.
device::MemoryUse Loop::memory_use() const {
  const device::MemoryUse own = device::memory_use();
  std::int64_t largest[] = {own.device_bytes, own.device_peak_bytes, own.host_bytes, own.host_peak_bytes};
  world_.all().maximum(largest);
  return {largest[0], largest[1], largest[2], largest[3]};
}

/// True if the checkpoint of this step is to be kept for its validation loss.
bool Loop::log_step(double waited_for_data, bool evaluates) {
  bool keeps = false;
  Metrics metrics = model_.metrics();
  const Json communication = world_.size() > 1 ? step_communication() : Json();
  const device::MemoryUse memory = memory_use();
  const double seconds = seconds_since(logged_at_);
  if (evaluates) {
    const Clock::time_point begin = Clock::now();
    model_.wait();
    const run::Timers::Whole evaluation(model_.timers(), "evaluation");
    const Metrics measured = model_.evaluate();
    metrics.insert(metrics.end(), measured.begin(), measured.end());
    keeps = note_validation(measured);
    evaluation_seconds_ += seconds_since(begin);
  }
  const double rate = static_cast<double>(work_ - logged_work_) / seconds;
  if (world_.is_root()) {
    Json line, result;
    line["step"] = steps_done_;
    line[unit_] = work_;
    for (const Metric& metric : metrics) {
      line[metric.name] = to_json(metric);
      if (metric.in_result) result[metric.name] = line[metric.name];
    }
    line["seconds"] = seconds_since(start_);
    line[unit_ + "_per_second"] = rate;
    line["data_wait_seconds"] = waited_for_data;
    if (!communication.is_null()) line["communication"] = communication;
    line["memory"] = {{"device_bytes", memory.device_bytes},
                      {"device_peak_bytes", memory.device_peak_bytes},
                      {"host_bytes", memory.host_bytes},
                      {"host_peak_bytes", memory.host_peak_bytes}};
    metrics_->write(line);
    run::run_record()["result"]["train"] = result;
  }
  const double seconds_per_step = seconds / static_cast<double>(steps_done_ - logged_step_);
  run::status({.step = steps_done_,
               .steps = settings_.run.steps,
               .metrics = progress_of(metrics),
               .unit = unit_,
               .per_second = rate,
               .memory = fmt::format("{}, peak {}", format::binary_bytes_text(memory.device_bytes),
                                     format::binary_bytes_text(memory.device_peak_bytes)),
               .seconds_left = static_cast<double>(settings_.run.steps - steps_done_) * seconds_per_step});
  logged_step_ = steps_done_;
  logged_work_ = work_;
  logged_at_ = Clock::now();
  return keeps;
}

/// Steps until the last one is done or a stop is agreed on. Returns the exit code. Collective.
int Loop::make_steps() {
  const std::int64_t steps = settings_.run.steps;
  const double walltime = static_cast<double>(parse_walltime(settings_.run.walltime).value_or(0));
  if (world_.is_root() && walltime > 0 && 4 * checkpoints_->expected_seconds() > walltime)
    log::warning(
        "run.walltime = \"{}\" leaves little time to train (a checkpoint takes {:.3g} s, and twice that is reserved); "
        "give the job more time",
        settings_.run.walltime, checkpoints_->expected_seconds());
  StopAgreement agreement(world_.all(), directory_.path, walltime, start_);
  model_.start();
  struct Stop {
    Trainable& model;
    ~Stop() { model.stop(); }
  } const stop{model_};

  int code = 0;
  double waited = 0, longest_step = 0;
  const Clock::time_point loop_begin = Clock::now();
  logged_at_ = loop_begin;
  logged_step_ = steps_done_;
  logged_work_ = work_;
  while (!finished() && code == 0) {
    const Clock::time_point begin = Clock::now();
    const std::int64_t step = steps_done_ + 1;
    run::set_current_step(step);
    parallel::note_step(step);
    parallel::note_phase("waiting for data");
    if (starts_) starts_->reached(step);
    fault::point("step", world_.rank(), step);
    const Step done = model_.step();
    steps_done_ = step;
    work_ += done.work;
    waited += done.waited_for_data;
    const bool evaluates =
        (settings_.log.evaluate_every > 0 && step % settings_.log.evaluate_every == 0) || (compares() && step == steps);
    const bool logs = step % settings_.log.every == 0 || step == steps || evaluates;
    const bool keeps = logs && log_step(std::exchange(waited, 0.0), evaluates);
    const double seconds = seconds_since(begin);
    longest_step = std::max(longest_step, seconds);
    run::live(steps_done_, steps,
              seconds_since(loop_begin) * static_cast<double>(steps - steps_done_) /
                  static_cast<double>(steps_done_ - first_step_));
    checkpoints_->note_step(seconds);

    parallel::note_phase("agreement");
    const Decision decision = agreement.step(
        checkpoints_->progress(), 2 * checkpoints_->expected_seconds() + 3 * longest_step, checkpoints_->requested());
    checkpoints_->advance(decision.phases);
    code = static_cast<int>(decision.stop);
    if (code != 0 || finished() || keeps || decision.checkpoint || checkpoints_->due_after(step)) begin_checkpoint();
  }
  if (code != 0) stop_cause_ = agreement.cause(code);
  parallel::note_phase("the last checkpoint");
  agreement.drain();
  trained_seconds_ = seconds_since(loop_begin) - checkpoint_seconds_ - evaluation_seconds_;
  checkpoints_->finish();
  if (steps_done_ > first_step_ && checkpoints_->last_durable() != steps_done_)
    throw collective_error(
        ExitCode::io,
        "{}: the last step, {}, is in no checkpoint (the reason is given above); free disk space and start again: the "
        "run resumes from {}",
        directory_.checkpoints().string(), steps_done_,
        checkpoints_->last_durable() < 0 ? "its beginning" : "step " + std::to_string(checkpoints_->last_durable()));
  checkpoints_->close();
  run::set_current_step(-1);
  return code;
}

/// What ranks sent per step: means over ranks. Rows of batches overlap with the steps, but for the time that steps
/// waited for them; everything else is sent inside the steps. Collective.
Json Loop::run_communication() const {
  const Communication sent = model_.communication();
  const std::int64_t steps = std::max<std::int64_t>(1, steps_done_ - first_step_);
  double rows[] = {static_cast<double>(sent.rows.bytes), sent.rows.seconds, sent.rows.waited};
  world_.all().sum(std::span<double>(rows));
  for (double& sum : rows) sum /= static_cast<double>(steps) * world_.size();
  Json exchanges = Json::object();
  double bytes = 0, seconds = 0;
  for (const parallel::ExchangeProfile& one : parallel::profile(sent.exchanges, steps, world_.all())) {
    bytes += one.bytes;
    seconds += one.seconds;
    // Where steps run without the host, the duration of an exchange is not known (weft benchmark measures it).
    exchanges[one.name] = {{"bytes", one.bytes},
                           {"ms", sent.timed ? Json(1e3 * one.seconds) : Json()},
                           {"gb_per_second", sent.timed ? Json(one.gb_per_second()) : Json()}};
  }
  // Then the known figure is the time that the last step waited.
  double exposed = sent.timed ? seconds : sent.step_exposed_seconds / world_.size();
  if (!sent.timed) world_.all().sum(std::span<double>(&exposed, 1));
  return {{"bytes", bytes},
          {"exposed_ms", 1e3 * exposed},
          {"exchanges", exchanges},
          {"rows", {{"bytes", rows[0]}, {"hidden_ms", 1e3 * rows[1]}, {"waited_ms", 1e3 * rows[2]}}}};
}

/// Fills the run record. Collective.
void Loop::record_result(std::int64_t planned_device_bytes) {
  const std::vector<run::Timers::Statistics> timings = model_.timers().gather(world_.all());
  Json& record = run::run_record();
  record["device"]["algorithms"] = algorithms_in_use();
  record["result"]["step"] = steps_done_;
  record["result"][unit_] = work_;
  record["result"][unit_ + "_per_second"] =
      trained_seconds_ > 0 ? static_cast<double>(work_ - first_work_) / trained_seconds_ : 0;
  record["result"]["checkpoint_pause_seconds"] = checkpoint_seconds_;
  if (compares() && best_.step >= 0) record["result"]["best"] = {{"step", best_.step}, {"loss", best_.loss}};
  if (stops_early()) record["result"]["stopped_early"] = early_stop_text();
  record["checkpoint"] = checkpoints_->record();
  record["timings"] = run::to_json(timings);
  if (world_.size() > 1) record["communication"] = run_communication();
  const device::MemoryUse memory = device::memory_use();
  record["device"]["peak_bytes"] = memory.device_peak_bytes;
  if (planned_device_bytes > 0) record["device"]["planned_bytes"] = planned_device_bytes;
  if (const std::int64_t taken = device::driver_bytes(); taken > 0) record["device"]["driver_bytes"] = taken;
  record["host_peak_bytes"] = memory.host_peak_bytes;
  if (steps_done_ > first_step_) log::info("{}", run::to_table(timings));
}

/// Evaluates and logs the results of a finished run. Collective.
void Loop::conclude() {
  parallel::note_phase("conclusion");
  Json& result = run::run_record()["result"];
  model_.conclude(result);
  log::info("trained {} steps, {} {} in {} ({} {}/s)", steps_done_ - first_step_, format::grouped(work_ - first_work_),
            unit_, format::duration(trained_seconds_),
            format::grouped(std::llround(result[unit_ + "_per_second"].get<double>())), unit_);
  if (stops_early()) log::info("run.stop_after = {}: {}", settings_.run.stop_after, early_stop_text());
  if (settings_.checkpoint.keep_best && best_.step >= 0)
    log::info("lowest validation loss: {:.6g} at step {}; its checkpoint is {}", best_.loss, best_.step,
              (directory_.path / "best").string());
  log::info("results in {}: log.txt, metrics.jsonl, run.json, checkpoints/", directory_.path.string());
  if (const std::string last = model_.last_line(); !last.empty()) log::info("{}", last);
}

/// Logs where a run that has more to do stopped.
void Loop::log_stop(int code) const {
  const std::int64_t newest = checkpoints_->last_durable();
  log::info("stopped by {} after step {} of {}; {}; the same command continues the run (exit code {})", stop_cause_,
            steps_done_, settings_.run.steps,
            newest < 0 ? "no step was made, there is no checkpoint"
                       : "its state is in " + (directory_.checkpoints() / checkpoint::directory_name(newest)).string(),
            code);
}

std::string Loop::early_stop_text() const {
  return fmt::format("no validation loss below {:.6g}, that of step {}, in {} evaluations; stopped at step {} of {}",
                     best_.loss, best_.step, best_.evaluations_since, steps_done_, settings_.run.steps);
}

/// Adds this start to starts.jsonl. Collective; throws a collective Error(no_progress).
void Loop::begin_start() {
  run::run_record()["start_number"] = std::stoll(world_.on_root([&] {
    const std::int64_t number = starts_->begin(first_step_, resume_option_, settings_.resume.ignore_no_progress);
    if (const Json& own = run::run_record(); own.contains("changed"))
      starts_->note_changes(finite_json_text(own["changed"]));
    return std::to_string(number);
  }));
  run::record_running(world_);
}

int Loop::run(Profile* profile, std::int64_t planned_device_bytes) {
  begin_start();
  log::info("{} step {} of {}", resumed_ ? "resuming after" : "starting at", first_step_, settings_.run.steps);
  int code = make_steps();

  // Everything is saved: from now on a request to stop ends the process at once.
  if (code == 0) parallel::Signals::let_stop();
  record_result(planned_device_bytes);
  // Taken before the conclusion, whose evaluation would replace the bytes of the last step.
  const PhaseBytes phase_bytes = profile != nullptr && profile->active() ? model_.phase_bytes() : PhaseBytes();
  if (finished()) conclude();
  if (profile != nullptr && profile->active())
    run::run_record()["profile"] = profile->conclude(directory_.path, phase_bytes);
  if (starts_) starts_->end(steps_done_);
  if (code == static_cast<int>(ExitCode::requeue) && steps_done_ == first_step_)
    code = static_cast<int>(ExitCode::no_progress);
  if (!finished()) log_stop(code);
  return code;
}

}  // namespace weft::run
