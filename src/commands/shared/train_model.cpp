// SPDX-License-Identifier: Apache-2.0
#include "commands/shared/train_model.hpp"

#include <charconv>

#include "base/format.hpp"
#include "base/log.hpp"
#include "commands/commands.hpp"
#include "input/print.hpp"
#include "kernels/execution.hpp"
#include "parallel/affinity.hpp"
#include "run/algorithms.hpp"
#include "run/run_record.hpp"

namespace weft::commands {
namespace {

/// "141GB" or "80GiB" -> GB, 1e9 bytes; 0 if it is no amount of memory that a machine can have.
double gigabytes(const std::string& text) {
  double number = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  const double factor = unit == "GB" ? 1 : unit == "GiB" ? double{1 << 30} / 1e9 : 0;
  constexpr double most = 1e9;  // in bytes below 2^63
  return status == std::errc() && number * factor <= most ? number * factor : 0;
}

bool enough(std::int64_t needed, std::int64_t available) { return available == 0 || needed <= available; }

std::string comparison(std::int64_t needed, std::int64_t available, const std::string& memory) {
  return fmt::format("{}: {} of {} {}, per rank ({:.0f} %)", enough(needed, available) ? "fits" : "does not fit",
                     format::binary_bytes_text(needed), format::binary_bytes_text(available), memory,
                     100 * static_cast<double>(needed) / static_cast<double>(available));
}

/// A line for the device and one for the host.
std::string to_text(const MemoryNeed& need) {
  std::string text;
  if (need.device_available > 0)
    text = comparison(need.device, need.device_available, "of device memory") +
           (need.micro_tokens > 0 ? fmt::format(", with data.micro_tokens = {}", need.micro_tokens) : "");
  else if (kernels::kCudaBuild)
    text = "device memory is not compared; --device-memory 141GB says whether the run fits a GPU of 141 GB";
  if (need.host_available > 0)
    text += (text.empty() ? "" : "\n") +
            comparison(need.host, need.host_available, fmt::format("of host memory ({})", need.host_limit));
  return text;
}

/// Prints with --json, on rank 0, how a run in this directory ended, and its `result` of run.json.
void print_run(const Request& request, const std::filesystem::path& directory, int code, const parallel::World& world) {
  if (!request.json || !world.is_root()) return;
  // A run that was complete already has a run record.
  const bool recorded = run::run_record().contains("result");
  const Json record = recorded ? run::run_record() : run::stored_record(directory / "run.json");
  Json document = {{"run", directory.string()}, {"exit", {{"code", code}, {"reason", run::exit_reason(code)}}}};
  if (record.is_object() && record.contains("result")) document["result"] = record["result"];
  print_result(request, "", document);
}

}  // namespace

Json to_json(const MemoryNeed& need) {
  Json document = {{"fits", enough(need.device, need.device_available) && enough(need.host, need.host_available)},
                   {"device_bytes", need.device},
                   {"host_bytes", need.host}};
  if (need.device_available > 0) document["device_available_bytes"] = need.device_available;
  if (need.host_available > 0) document["host_available_bytes"] = need.host_available;
  if (need.micro_tokens > 0) document["micro_tokens"] = need.micro_tokens;
  return document;
}

void add_train_options(Options& options, TrainOptions& own) {
  options.set().templates();
  options.add("--device-memory", own.device_memory, "AMOUNT",
              "with --dry-run: whether the run fits a GPU of another machine with this memory, as 141GB or 80GiB");
  options.last().problem = [&own, &request = options.request]() -> std::string {
    if (!request.dry_run)
      return "--device-memory describes another machine (it needs --dry-run); device.memory limits this one's";
    if (gigabytes(own.device_memory) > 0) return "";
    return fmt::format("--device-memory {} is no amount of memory (a number with GB or GiB, as in 141GB)",
                       own.device_memory);
  };
  options.last().replaces = [](const std::string& amount) {
    return input::Override{fmt::format("device.memory={}", gigabytes(amount)), ""};
  };
  options.dry_run().output("the run directory (run.output)");
  options.add("--resume", own.resume, "auto|never|PATH",
              "resume from the newest valid checkpoint, start a new run, or resume from PATH (default auto)");
  options.add("--walltime", own.walltime, "hh:mm:ss", "stop cleanly before (run.walltime)").replacing("run.walltime");
  options.last().problem = [&own]() -> std::string {
    if (run::parse_walltime(own.walltime)) return "";
    return fmt::format("--walltime {} is not a time (hours:minutes:seconds, as in 11:55:00)", own.walltime);
  };
  options.flag("--take-over", own.take_over, "take the run directory from a live run, which stops");
  options.add("--start-id", own.start_id, "ID", "recorded in run.json, for job scripts");
  options.profile();
}

int train_model(const Request& request, const TrainOptions& options, const parallel::World& world,
                PlannedModel& planned, Clock::time_point begin) {
  const run::RunSettings& run = planned.settings.run;
  if (request.dry_run) {
    run::require_usable_output(world, run.output);
    print_result(request, planned.summary + to_text(planned.need), planned.plan);
    return 0;
  }

  // 1. The hardware: that the run fits is known before anything is created.
  run::accept_requests();
  const device::Runtime runtime(planned.device, world.node_rank(), parallel::bind_to_cpus(world, planned.device));
  const std::shared_ptr<void> kept = planned.start(runtime);

  // 2. The run directory, and the checkpoint to resume from.
  if (!options.start_id.empty()) run::run_record()["start_id"] = options.start_id;
  const run::OpenedRun opened =
      run::open_run(run, planned.schema, options.resume, planned.settings.checkpoint, options.take_over, world);
  bool changed = false;
  if (opened.found) {
    require_kind(*opened.found, planned.tensor, "choose another --output");
    if (optimizer::keep_epsilon(planned.schema, planned.optimizer, opened.found->manifest.input,
                                (opened.found->path / checkpoint::kManifestName).string()) &&
        world.is_root())
      log::info(
          "a run of an earlier version: it continues with its epsilon of {:g} (optimizer.epsilon_scale = \"none\")",
          planned.optimizer.epsilon);
    if (planned.resume) planned.resume(*opened.found);
    changed = run::check_same_run(planned.schema, planned.settings.resume, *opened.found, planned.data, world);
  }
  if (run::is_complete(opened, run, world)) {
    log::info("next: {}", planned.next);
    print_run(request, opened.directory.path, 0, world);
    return 0;
  }
  run::check_schedule(planned.optimizer, run, planned.schema, opened, world);
  run::keep_input(opened, planned.schema, world);
  if (opened.found) run::use_recorded_algorithms(planned.device.algorithms, world, opened.found->manifest.extra);
  run::Profile profile(request.profile, world, runtime);
  run::record_start(world, request.command_line, library_versions(), runtime.description());
  log::info("{}{}", run::hosts_text(), planned.summary);

  // 3. The model, and its training.
  const parallel::Grid grid(world, planned.grid);
  const std::unique_ptr<run::Trainable> model = planned.make(opened, changed, grid, runtime);
  run::Loop loop(
      *model, planned.settings,
      {input::print(planned.schema), request.input_text, library_versions(), planned.data.fingerprint, planned.extra},
      opened, world, planned.grid, runtime, begin);
  const int code = loop.run(&profile, planned.device_bytes);
  if (code == 0) log::info("next: {}", planned.next);
  print_run(request, opened.directory.path, code, world);
  return code;
}

}  // namespace weft::commands
