// SPDX-License-Identifier: Apache-2.0
#include "run/run_settings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/log.hpp"
#include "input/schema.hpp"

namespace weft::run {

void add_keys(input::Schema& schema, RunSettings& run) {
  schema.table("run", "The run: how long it is, and where its results go.");
  schema.add("run.output", run.output, "the run directory: log, metrics, run.json, checkpoints").path_name().free();
  schema.add("run.steps", run.steps, "optimizer steps until the run is finished")
      .in("steps")
      .at_least(1)
      .at_most(input::kMostSteps)
      .free();
  schema
      .add("run.epochs", run.epochs,
           "length of the run in passes over the training data, may be a fraction; 0 = run.steps")
      .in("epochs")
      .at_least(0)
      .at_most(1e6)
      .not_with("run.steps", {}, "each is the length of the run")
      .free();
  schema
      .add("run.stop_after", run.stop_after,
           "evaluations in a row without a lower validation loss after which the run ends; 0 = no limit")
      .in("evaluations")
      .at_least(0)
      .free();
  schema.add("run.seed", run.seed, "seed of every random number: initial weights, order of the rows, rounding")
      .at_least(0);
  schema
      .add("run.walltime", run.walltime,
           "stop cleanly, with a checkpoint, before this much time has passed; \"\" = no limit")
      .in("hh:mm:ss")
      .free();
  schema
      .add("run.lease", run.lease,
           "time without a renewal of this run's lease after which a run on another host may take over its directory")
      .in("s")
      .at_least(1)
      .at_most(3600)
      .free();
  schema
      .add("run.nonfinite", run.nonfinite, {{"stop", NonFinite::stop}, {"skip", NonFinite::skip}},
           "on a loss or gradient that is not finite: end the run (exit code 4; 3 if a value in the files is the "
           "cause), or skip the step")
      .free();
  schema.add("run.skip_at_most", run.skip_at_most, "steps that nonfinite = \"skip\" may skip before the run ends")
      .in("steps")
      .at_least(0)
      .free();
  schema.rule({"run.output"}, [&run]() -> std::string {
    return run.output.empty() ? "run.output is empty; give the name of a directory" : "";
  });
  schema.rule({"run.walltime"}, [&run]() -> std::string {
    if (run.walltime.empty()) return {};
    const std::optional<std::int64_t> seconds = parse_walltime(run.walltime);
    if (seconds == 0)
      return fmt::format(
          "run.walltime = \"{}\" leaves no time for a step; give the time that the job has, or \"\" for no limit",
          run.walltime);
    if (seconds) return {};
    return fmt::format("run.walltime = \"{}\" is not a time (hours:minutes:seconds); write it as \"11:55:00\"",
                       run.walltime);
  });
}

void add_keys(input::Schema& schema, LogSettings& log) {
  schema.table("log", "Progress of the run.");
  schema.add("log.every", log.every, "steps between lines of the log and of metrics.jsonl")
      .in("steps")
      .at_least(1)
      .free();
  schema
      .add("log.evaluate_every", log.evaluate_every,
           "steps between evaluations on the validation data; 0 = after the last step only")
      .in("steps")
      .at_least(0)
      .free();
  for (const char* key : {"run.stop_after", "checkpoint.keep_best"})
    schema.at(key).only_with("log.evaluate_every", {}, "evaluations are compared");
}

void add_keys(input::Schema& schema, ResumeSettings& resume) {
  schema.table("resume", "Resuming from a checkpoint (--resume auto is the default).");
  schema
      .add("resume.accept_changed", resume.accept_changed, "resume although keys that shape the training have changed")
      .free();
  schema
      .add("resume.ignore_no_progress", resume.ignore_no_progress,
           "start although the last two starts died at one step (exit code 93)")
      .free();
}

void use_epochs(RunSettings& run, const input::Schema& schema, double steps_per_epoch) {
  if (run.epochs == 0) return;
  if (steps_per_epoch <= 0)
    throw collective_error(ExitCode::usage,
                           "run.epochs = {} cannot be converted into steps (the size of the training data is not known "
                           "yet); give run.steps",
                           run.epochs);
  // A product that should be whole may be larger by its rounding.
  const double steps = std::ceil(run.epochs * steps_per_epoch * (1 - 1e-12));
  if (steps > input::kMostSteps)
    throw collective_error(ExitCode::usage, "run.epochs = {} is {:.3g} steps (at most {:g} are possible); take fewer",
                           run.epochs, steps, input::kMostSteps);
  run.steps = static_cast<std::int64_t>(steps);
  log::info("run.epochs = {}: {} steps, {:.6g} per epoch", run.epochs, run.steps, steps_per_epoch);
  run.epochs = 0;
  for (const input::Rule& rule : schema.rules()) {
    if (std::find(rule.paths.begin(), rule.paths.end(), "run.steps") == rule.paths.end()) continue;
    if (const std::string problem = rule.problem(); !problem.empty())
      throw collective_error(ExitCode::usage, "{}", problem);
  }
}

void require_validation(const RunSettings& run, bool keep_best, bool has_validation) {
  if (has_validation || (run.stop_after == 0 && !keep_best)) return;
  throw collective_error(ExitCode::usage,
                         "{} compares losses on validation data, and the input has none; give data.validation",
                         run.stop_after > 0 ? "run.stop_after" : "checkpoint.keep_best");
}

std::optional<std::int64_t> parse_walltime(std::string_view text) {
  std::int64_t parts[3] = {};
  int part = 0;
  std::size_t digits = 0;
  for (const char c : text) {
    if (c == ':') {
      if (digits == 0 || ++part > 2) return std::nullopt;
      digits = 0;
    } else if (c >= '0' && c <= '9' && digits < 6) {
      parts[part] = 10 * parts[part] + (c - '0');
      ++digits;
    } else {
      return std::nullopt;
    }
  }
  if (part != 2 || digits == 0 || parts[1] > 59 || parts[2] > 59) return std::nullopt;
  return 3600 * parts[0] + 60 * parts[1] + parts[2];
}

}  // namespace weft::run
