// SPDX-License-Identifier: Apache-2.0
#include "training/run_directory.hpp"

#include <unistd.h>

#include "base/log.hpp"
#include "checkpoint/local.hpp"
#include "checkpoint/writer.hpp"
#include "input/print.hpp"
#include "input/read.hpp"
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

OpenedRun open_run(const RunSettings& settings, const input::Schema& schema, const std::string& resume,
                   const checkpoint::Settings& checkpoint, const parallel::World& world) {
  OpenedRun run{{settings.output}, std::nullopt};
  checkpoint::require_writable(world.all(), run.directory.path);
  report::log_to_file(run.directory.path / "log.txt");
  report::run_record()["input"] = input::to_json(schema);
  report::record_to(run.directory.path / "run.json", world);
  if (resume == "auto" && !checkpoint.local.empty())
    checkpoint::copy_left_on_nodes(world.all(), world.node(), run.directory.checkpoints(), checkpoint);
  run.found = checkpoint::find(world.all(), run.directory.checkpoints(), resume, checkpoint.verify);
  return run;
}

void keep_input(const RunDirectory& directory, const input::Schema& schema, const parallel::World& world) {
  if (world.is_root()) storage::write_text_atomically(directory.path / "input.toml", input::print(schema));
}

void check_same_run(const input::Schema& schema, const ResumeSettings& settings, const checkpoint::Found& found,
                    const TrainingData& data) {
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
  log::warning("resuming with changed training data: {}", data.path);
}

}  // namespace weft::training
