// SPDX-License-Identifier: Apache-2.0
#include "commands/run_directory.hpp"

#include <unistd.h>

#include "base/log.hpp"
#include "checkpoint/writer.hpp"
#include "input/print.hpp"
#include "report/log.hpp"
#include "report/run_record.hpp"
#include "storage/durable.hpp"

namespace weft::commands {

void require_usable_output(const parallel::World& world, const std::filesystem::path& path) {
  world.on_root([&]() -> std::string {
    std::filesystem::path existing = std::filesystem::absolute(path);
    while (!existing.empty() && !std::filesystem::exists(existing)) existing = existing.parent_path();
    if (!std::filesystem::is_directory(existing) || access(existing.c_str(), W_OK | X_OK) != 0)
      throw error(ExitCode::io, "run.output = \"{}\" cannot be written ({} is {}); choose another with --output",
                  path.string(), existing.string(),
                  std::filesystem::is_directory(existing) ? "not ours to write" : "no directory");
    return {};
  });
}

OpenedRun open_run(const Request& request, const input::Schema& schema, const transcoder::Configuration& configuration,
                   const parallel::World& world) {
  OpenedRun run{{configuration.run.output}, std::nullopt};
  checkpoint::require_writable(world.all(), run.directory.path);
  report::log_to_file(run.directory.path / "log.txt");
  report::run_record()["input"] = input::to_json(schema);
  report::record_to(run.directory.path / "run.json", world);
  run.found =
      checkpoint::find(world.all(), run.directory.checkpoints(), request.resume, configuration.checkpoint.verify);
  return run;
}

void keep_input(const RunDirectory& directory, const input::Schema& schema, const parallel::World& world) {
  if (world.is_root()) storage::write_text_atomically(directory.path / "input.toml", input::print(schema));
}

void check_same_run(const input::Schema& schema, const transcoder::Configuration& configuration,
                    const checkpoint::Found& found, const std::string& dataset_fingerprint) {
  std::string refused;
  for (const input::Change& change :
       input::changed_keys(schema, found.manifest.input, (found.path / checkpoint::kManifestName).string())) {
    const std::string what = fmt::format("{} was {}, now {}", change.path, change.before, change.after);
    if (change.resume == input::Resume::fixed)
      refused += fmt::format("\n  {} (it defines the run)", what);
    else if (!configuration.resume.accept_changed)
      refused += fmt::format("\n  {} (allowed with --set resume.accept_changed=true)", what);
    else
      log::info("going on with a changed input: {}", what);
  }
  if (!refused.empty())
    throw collective_error(ExitCode::usage,
                           "{} belongs to a run with another input:{}\nset them back, or begin a new run with another "
                           "--output or with --resume never",
                           found.path.string(), refused);
  if (found.manifest.dataset_fingerprint == dataset_fingerprint) return;
  if (!configuration.data.accept_changed)
    throw collective_error(
        ExitCode::usage,
        "{}: the training data are not those of the interrupted run (fingerprint {}, now {}); put the old "
        "files back, or accept the new ones with --set data.accept_changed=true",
        configuration.data.train, found.manifest.dataset_fingerprint, dataset_fingerprint);
  log::warning("going on with changed training data: {}", configuration.data.train);
}

}  // namespace weft::commands
