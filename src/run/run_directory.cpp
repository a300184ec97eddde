// SPDX-License-Identifier: Apache-2.0
#include "run/run_directory.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <set>

#include "base/file.hpp"
#include "base/log.hpp"
#include "checkpoint/best.hpp"
#include "checkpoint/checkpoint_directory.hpp"
#include "checkpoint/checkpoint_writer.hpp"
#include "checkpoint/local.hpp"
#include "checkpoint/starts.hpp"
#include "dataset/fingerprint.hpp"
#include "input/print.hpp"
#include "input/read.hpp"
#include "input/strings.hpp"
#include "optimizer/schedule.hpp"
#include "parallel/failure.hpp"
#include "run/build.hpp"
#include "run/log_session.hpp"
#include "run/run_record.hpp"
#include "storage/durable.hpp"
#include "storage/ownership.hpp"

namespace weft::run {
namespace {
namespace fs = std::filesystem;

/// Throws Error(usage) unless the directory is missing, empty, or that of a run: a run deletes and replaces files. What
/// users prepare before the first start (checkpoints/ on another disk, a request file) belongs to a run.
void require_run_or_empty(const fs::path& path) {
  static const std::set<std::string> names{"CHECKPOINT",     "STOP",          "answers.json",    "benchmark.csv",
                                           "benchmark.json", "benchmark.svg", "evaluation.json", "profile.json",
                                           "checkpoints",    "heartbeat",     "input.toml",      "log.txt",
                                           "metrics.jsonl",  "report.html",   "starts.jsonl",    "statistics.txt"};
  if (!fs::is_directory(path)) return;
  std::string foreign;
  for (const fs::directory_entry& entry : fs::directory_iterator(path)) {
    std::string name = entry.path().filename().string();
    // "benchmark.json.0123abcd.tmp": an interrupted command left it.
    if (name.ends_with(".tmp")) name.resize(std::min(name.find('.', name.find('.') + 1), name.size()));
    if (name == "run.json" || name.starts_with("lease.")) return;
    if (!names.contains(name)) foreign = name;
  }
  if (!foreign.empty())
    throw error(ExitCode::usage,
                "run.output = \"{}\" cannot be used (it holds {}: it is neither empty nor the directory of a run); "
                "choose another with --output",
                path.string(), input::quoted(foreign));
}

/// Throws Error(io) if another user has placed a link there: a run deletes incomplete checkpoints.
void require_own_link(const fs::path& checkpoints) {
  struct stat status {};
  if (::lstat(checkpoints.c_str(), &status) == 0 && S_ISLNK(status.st_mode) && status.st_uid != ::geteuid() &&
      status.st_uid != 0)
    throw error(ExitCode::io, "{}: is a symbolic link of another user; remove it", checkpoints.string());
}

/// Gives a file a new inode: a process that lost the directory may have it open, and writes to the old one from now on.
void replace_by_copy(const fs::path& path) {
  constexpr std::int64_t kLargest = std::int64_t{1} << 32;
  if (fs::exists(fs::symlink_status(path)))
    storage::write_text_atomically(path, storage::read_text(open_own(path, O_RDONLY), path, kLargest));
}

}  // namespace

void require_usable_output(const parallel::World& world, const fs::path& path) {
  world.on_root([&]() -> std::string {
    require_run_or_empty(path);
    fs::path existing = fs::absolute(path);
    while (!existing.empty() && !fs::exists(existing)) existing = existing.parent_path();
    if (!fs::is_directory(existing) || access(existing.c_str(), W_OK | X_OK) != 0)
      throw error(ExitCode::io, "run.output = \"{}\" cannot be written ({} is {}); choose another with --output",
                  path.string(), existing.string(), fs::is_directory(existing) ? "not writable" : "not a directory");
    return {};
  });
}

namespace {

/// What earlier starts left in the directory. Trivial: broadcast.
struct Earlier {
  int exit_code = -1;           ///< exit code of the last start; -1: unknown
  bool option_applied = false;  ///< it had the same --resume, and there are checkpoints since
  std::int64_t protected_step = -1;
};

/// Reads what earlier starts left, and completes the history of starts before run.json is replaced. Collective.
Earlier earlier_starts(const RunDirectory& directory, const std::string& resume, const parallel::World& world) {
  Earlier earlier;
  parallel::on_root(world.all(), [&] {
    checkpoint::Starts starts(directory.path);
    const Json record = run::stored_record(directory.path / "run.json");
    earlier.exit_code = run::exit_code_of(record);
    if (earlier.exit_code >= 0 && record.contains("start_number") && record["start_number"].is_number_integer())
      starts.failed(record["start_number"].get<std::int64_t>(), earlier.exit_code);
    if (resume == "auto") return;
    earlier.option_applied = starts.last_resume() == resume && !checkpoint::steps_in(directory.checkpoints()).empty();
    const fs::path path(resume), step = path.has_filename() ? path : path.parent_path();
    std::error_code elsewhere;
    if (fs::equivalent(fs::absolute(step).parent_path(), directory.checkpoints(), elsewhere))
      earlier.protected_step = checkpoint::step_of(step.filename().string());
  });
  world.all().broadcast(&earlier, sizeof earlier);
  return earlier;
}

/// Keeps the run record of a complete run. Only the name that a job script gave to this start is added, so that the
/// script can determine how this start ended. Collective.
void keep_record(const fs::path& path, const parallel::World& world) {
  const Json& own = run::run_record();
  if (!own.contains("start_id")) return;
  world.on_root([&] {
    Json record = run::stored_record(path);
    record["start_id"] = own["start_id"];
    if (run::exit_code_of(record) != 0) record["exit"] = {{"code", 0}, {"reason", run::exit_reason(0)}};
    storage::write_json(path, record);
  });
}

}  // namespace

OpenedRun open_run(const RunSettings& settings, const input::Schema& schema, const std::string& resume,
                   const checkpoint::Settings& checkpoint, bool take_over, const parallel::World& world) {
  parallel::note_phase("opening the run directory");
  const fs::path path = settings.output;
  parallel::on_root(world.all(), [&] { require_run_or_empty(path); });
  if (const auto failure = parallel::attempt_on_root(world.all(), [&] { storage::make_directory(path); }))
    failure->raise();
  // Released when the program ends: the run record is written after the command.
  static std::optional<checkpoint::Lease> lease;
  lease.emplace(world.all(), path, checkpoint::Lease::Settings{static_cast<double>(settings.lease), take_over});
  storage::set_ownership([] { return lease->lost(); });
  OpenedRun run{.directory = {path, &*lease}, .found = std::nullopt, .resume = resume};
  parallel::on_root(world.all(), [&] {
    require_own_link(run.directory.checkpoints());
    if (!lease->taken_over_from().empty())
      for (const char* name : {"log.txt", "metrics.jsonl", "starts.jsonl"}) replace_by_copy(path / name);
  });
  checkpoint::require_writable(world.all(), path);
  run::log_to_file(path / "log.txt");
  if (!lease->taken_over_from().empty())
    log::warning("{}: taken over from {}", path.string(), lease->taken_over_from());
  run::run_record()["input"] = input::to_json(schema);
  const Earlier earlier = earlier_starts(run.directory, resume, world);
  // A finished run keeps its run record until it is known that this start may continue it.
  const bool finished = earlier.exit_code == 0;
  if (!finished) run::record_to(path / "run.json", lease->fence());
  run.protected_step = earlier.protected_step;
  if (earlier.option_applied)
    log::info("--resume {}: applied by an earlier start; continuing this run from its newest checkpoint", resume);
  const std::string resume_from = earlier.option_applied ? "auto" : resume;
  if (resume_from == "auto" && !checkpoint.local.empty()) {
    checkpoint::Settings settings_of_copy = checkpoint;
    settings_of_copy.protected_step = run.protected_step;
    checkpoint::copy_left_on_nodes(world.all(), world.node(), run.directory.checkpoints(), settings_of_copy,
                                   run.directory.lease);
  }
  run.found = checkpoint::find(world.all(), run.directory.checkpoints(), resume_from, checkpoint.verify,
                               checkpoint::Leftovers::remove, run.directory.lease);
  if (run.found && settings.stop_after > 0 && run.found->manifest.step < settings.steps)
    run.stopped_early =
        checkpoint::best_of(run.found->manifest).value_or(checkpoint::Best()).evaluations_since >= settings.stop_after;
  run.complete = run.found && (run.found->manifest.step > settings.steps ||
                               ((run.found->manifest.step == settings.steps || run.stopped_early) && finished));
  run.record_is_kept = run.complete || (run.found && finished);
  run::record_to(run.record_is_kept ? fs::path() : path / "run.json", lease->fence());
  if (!run.record_is_kept) run::record_running(world);
  return run;
}

bool is_complete(const OpenedRun& run, const RunSettings& settings, const parallel::World& world) {
  if (!run.complete) return false;
  keep_record(run.directory.path / "run.json", world);
  const std::int64_t done = run.found->manifest.step;
  if (run.stopped_early)
    log::info(
        "{}: the run is finished, it stopped at step {} of {} by run.stop_after = {}; its record is unchanged. A "
        "larger run.stop_after continues it",
        run.directory.path.string(), done, settings.steps, settings.stop_after);
  else if (done > settings.steps)
    log::info(
        "{}: nothing to do, {} steps are done and run.steps = {} asks for fewer; the record of the run is unchanged",
        run.directory.path.string(), done, settings.steps);
  else
    log::info(
        "{}: the run is finished, all {} steps are done; its record is unchanged. A larger run.steps continues it",
        run.directory.path.string(), done);
  return true;
}

void keep_input(const OpenedRun& run, const input::Schema& schema, const parallel::World& world) {
  const RunDirectory& directory = run.directory;
  if (run.record_is_kept) {
    run::record_to(directory.path / "run.json", directory.lease->fence());
    run::record_running(world);
  }
  if (!world.is_root()) return;
  storage::require_ownership();
  storage::write_text_atomically(directory.path / "input.toml", input::print(schema));
}

namespace {

/// Keys of these tables say what is written, not what is trained.
bool changes_no_step(const std::string& key) {
  return key.starts_with("log.") || key.starts_with("checkpoint.") || key.starts_with("resume.");
}

/// Every key that this start has changed: "changed" in run.json, key -> [before, after] as TOML. True if later steps
/// may be others: also a free key can change them, as run.steps does with a schedule of the learning rate.
bool record_changes(const input::Schema& schema, const checkpoint::Found& found) {
  Json changed = Json::object();
  bool steps = false;
  for (const input::Key& key : schema.keys()) {
    if (key.path() == "run.output") continue;
    const input::Value before = input::value_in(schema, key.path(), found.manifest.input, checkpoint::kManifestName);
    if (before == key.load()) continue;
    changed[key.path()] = {input::toml_value(before), input::toml_value(key.load())};
    steps = steps || !changes_no_step(key.path());
  }
  if (!changed.empty()) run::run_record()["changed"] = std::move(changed);
  return steps;
}

}  // namespace

bool check_same_run(const input::Schema& schema, const ResumeSettings& settings, const checkpoint::Found& found,
                    const TrainingData& data, const parallel::World& world) {
  std::string refused;
  for (const input::Change& change :
       input::changed_keys(schema, found.manifest.input, (found.path / checkpoint::kManifestName).string())) {
    const std::string what = fmt::format("{} was {}, now {}", change.path, change.before, change.after);
    if (change.resume == input::Resume::fixed)
      refused += fmt::format("\n  {} (it defines the run)", what);
    else if (!settings.accept_changed)
      refused += fmt::format("\n  {} (allowed with --set resume.accept_changed=true)", what);
    else
      log::info("resuming with a changed input: {}", what);
  }
  if (!refused.empty())
    throw collective_error(ExitCode::usage,
                           "{} belongs to a run with another input:{}\nrestore them, or start a new run with another "
                           "--output or with --resume never",
                           found.path.string(), refused);
  const bool same_sums =
      found.manifest.world == world.size() && found.manifest.code_revision == run::build_record.revision;
  const bool changed = record_changes(schema, found) || !same_sums;
  if (dataset::same_data(found.manifest.dataset_fingerprint, data.fingerprint)) return changed;
  if (!data.accept_changed)
    throw collective_error(
        ExitCode::usage,
        "{}: the training data are not those of the interrupted run (fingerprint {}, now {}); restore the "
        "old files, or accept the new ones with --set data.accept_changed=true",
        data.path, found.manifest.dataset_fingerprint, data.fingerprint);
  if (world.is_root()) log::warning("resuming with changed training data: {}", data.path);
  return true;
}

void check_schedule(const optimizer::Settings& now, const RunSettings& run, const input::Schema& schema,
                    const OpenedRun& opened, const parallel::World& world) {
  if (!world.is_root()) return;
  const std::int64_t steps = run.steps;
  if (optimizer::learning_rate(now, steps, steps) == 0)
    log::warning(
        "the learning rate is 0 at step {}, the last one (its schedule ends before, at optimizer.final_fraction = 0): "
        "such steps train nothing; raise optimizer.final_fraction or lower run.steps",
        steps);
  if (!opened.found) return;
  const checkpoint::Manifest& manifest = opened.found->manifest;
  const auto before = [&](const char* key) {
    return std::get<std::int64_t>(input::value_in(schema, key, manifest.input, checkpoint::kManifestName));
  };
  const std::string warning = optimizer::schedule_warning(
      now, manifest.step, {before("run.steps"), before("optimizer.schedule_steps")}, {steps, now.schedule_steps});
  if (!warning.empty()) return log::warning("{}", warning);
  if (const std::int64_t planned = before("run.steps"); planned != steps)
    log::info(
        "run.steps is {}, was {}: the learning rate of the next step is as planned (the schedule extends over {} "
        "steps), "
        "and {:.3g} at step {}",
        steps, planned, optimizer::ScheduleLength{steps, now.schedule_steps}.steps(),
        optimizer::learning_rate(now, steps, steps), steps);
}

}  // namespace weft::run
