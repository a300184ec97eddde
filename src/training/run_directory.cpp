// SPDX-License-Identifier: Apache-2.0
#include "training/run_directory.hpp"

#include <unistd.h>

#include "base/log.hpp"
#include "checkpoint/directory.hpp"
#include "checkpoint/starts.hpp"
#include "checkpoint/writer.hpp"
#include "input/print.hpp"
#include "input/read.hpp"
#include "parallel/failure.hpp"
#include "report/log.hpp"
#include "report/run_record.hpp"
#include "storage/durable.hpp"

namespace weft::training {

void require_usable_output(const parallel::World& world, const std::filesystem::path& path) {
  world.on_root([&]() -> std::string {
    std::filesystem::path existing = std::filesystem::absolute(path);
    while (!existing.empty() && !std::filesystem::exists(existing)) existing = existing.parent_path();
    if (!std::filesystem::is_directory(existing) || access(existing.c_str(), W_OK | X_OK) != 0)
      throw error(ExitCode::io, "run.output = \"{}\" cannot be written ({} is {}); choose another with --output",
                  path.string(), existing.string(),
                  std::filesystem::is_directory(existing) ? "not writable" : "not a directory");
    return {};
  });
}

namespace {

/// What earlier starts left in the directory. Trivial: broadcast.
struct Earlier {
  int exit_code = -1;           ///< of the last start; -1: unknown
  bool option_applied = false;  ///< it had the same --resume, and there are checkpoints since
  std::int64_t protected_step = -1;
};

/// Reads it, and completes the history of starts before run.json is replaced. Collective.
Earlier earlier_starts(const RunDirectory& directory, const std::string& resume, const parallel::World& world) {
  Earlier earlier;
  parallel::on_root(world.all(), [&] {
    checkpoint::Starts starts(directory.path);
    const report::Json record = report::stored_record(directory.path / "run.json");
    earlier.exit_code = report::exit_code_of(record);
    if (earlier.exit_code >= 0 && record.contains("start_number") && record["start_number"].is_number_integer())
      starts.failed(record["start_number"].get<std::int64_t>(), earlier.exit_code);
    if (resume == "auto") return;
    earlier.option_applied = starts.last_resume() == resume && !checkpoint::steps_in(directory.checkpoints()).empty();
    const std::filesystem::path path(resume), step = path.has_filename() ? path : path.parent_path();
    std::error_code elsewhere;
    if (std::filesystem::equivalent(std::filesystem::absolute(step).parent_path(), directory.checkpoints(), elsewhere))
      earlier.protected_step = checkpoint::step_of(step.filename().string());
  });
  world.all().broadcast(&earlier, sizeof earlier);
  return earlier;
}

}  // namespace

OpenedRun open_run(const RunSettings& settings, const input::Schema& schema, const std::string& resume,
                   checkpoint::Verify verify, const parallel::World& world) {
  OpenedRun run{.directory = {settings.output}, .found = std::nullopt, .resume = resume};
  checkpoint::require_writable(world.all(), run.directory.path);
  report::log_to_file(run.directory.path / "log.txt");
  report::run_record()["input"] = input::to_json(schema);
  report::record_to(run.directory.path / "run.json");
  const Earlier earlier = earlier_starts(run.directory, resume, world);
  run.protected_step = earlier.protected_step;
  if (earlier.option_applied)
    log::info("--resume {}: applied by an earlier start; continuing this run from its newest checkpoint", resume);
  run.found =
      checkpoint::find(world.all(), run.directory.checkpoints(), earlier.option_applied ? "auto" : resume, verify);
  run.complete = run.found && (run.found->manifest.step > settings.steps ||
                               (run.found->manifest.step == settings.steps && earlier.exit_code == 0));
  if (run.complete)
    report::record_to({});
  else
    report::record_running(world);
  return run;
}

bool is_complete(const OpenedRun& run, const RunSettings& settings) {
  if (!run.complete) return false;
  const std::int64_t done = run.found->manifest.step;
  if (done > settings.steps)
    log::info(
        "{}: nothing to do, {} steps are done and run.steps = {} asks for fewer; the record of the run is unchanged",
        run.directory.path.string(), done, settings.steps);
  else
    log::info(
        "{}: the run is finished, all {} steps are done; its record is unchanged. A larger run.steps continues it",
        run.directory.path.string(), done);
  return true;
}

void keep_input(const RunDirectory& directory, const input::Schema& schema, const parallel::World& world) {
  if (world.is_root()) storage::write_text_atomically(directory.path / "input.toml", input::print(schema));
}

void check_same_run(const input::Schema& schema, const ResumeSettings& settings, const checkpoint::Found& found,
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
  if (found.manifest.dataset_fingerprint == data.fingerprint) return;
  if (!data.accept_changed)
    throw collective_error(
        ExitCode::usage,
        "{}: the training data are not those of the interrupted run (fingerprint {}, now {}); restore the "
        "old files, or accept the new ones with --set data.accept_changed=true",
        data.path, found.manifest.dataset_fingerprint, data.fingerprint);
  if (world.is_root()) log::warning("resuming with changed training data: {}", data.path);
}

}  // namespace weft::training
