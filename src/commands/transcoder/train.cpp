// SPDX-License-Identifier: Apache-2.0
//
// weft train INPUT: trains a transcoder.
#include <filesystem>
#include <memory>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "commands/commands.hpp"
#include "commands/language_model/model_rows.hpp"
#include "commands/shared/dry_run.hpp"
#include "device/runtime.hpp"
#include "input/print.hpp"
#include "parallel/affinity.hpp"
#include "parallel/nccl.hpp"
#include "report/run_record.hpp"
#include "training/algorithms.hpp"
#include "training/loop.hpp"
#include "training/usable_memory.hpp"
#include "transcoder/run/plan.hpp"
#include "transcoder/run/private_training_run.hpp"
#include "transcoder/run/training_run.hpp"

namespace weft::commands {
namespace {

/// True if a dry run is to plan from data.layers and data.d_model, because the files do not exist yet.
bool plans_without_files(const Request& request, const dataset::Settings& data, const parallel::World& world) {
  if (!request.dry_run || data.layers == 0 || !data.model.empty()) return false;
  return world.on_root([&] { return std::string(std::filesystem::exists(data.train) ? "" : "missing"); }) == "missing";
}

std::string summary_without_files(const dataset::Description& data) {
  return fmt::format(
      "{}: not there yet; planned for {} layers, d_model {}, in bf16, from data.layers and data.d_model\n", data.path,
      data.n_layers, data.d_model);
}

}  // namespace

int train(const Request& request, const parallel::World& world) {
  const auto start = Clock::now();
  // 1. The input, the headers of the data, the grid of ranks: every error that can be found before work starts.
  Input input;
  const input::Schema schema = commands::schema(input, request.command);
  read_input(request, schema, world);
  transcoder::Configuration& configuration = input.configuration;
  const parallel::GridShape shape = parallel::grid_shape(
      configuration.parallel.data, {std::string(parallel::kFeatureAxis), configuration.parallel.feature},
      parallel::ranks_of_grid(configuration.parallel, world.size(), request.dry_run));
  if (configuration.privacy.enabled) transcoder::require_private_grid(shape);
  const bool without_files = plans_without_files(request, configuration.data, world);
  if (!without_files && configuration.data.model.empty())
    require_directory(world, configuration.data.train, "data.train");
  if (!configuration.data.validation.empty())
    require_directory(world, configuration.data.validation, "data.validation");
  std::optional<ModelRows> rows;
  if (!configuration.data.model.empty()) rows.emplace(configuration, world);
  transcoder::Datasets data =
      without_files ? transcoder::Datasets{dataset::imagined(configuration.data.train, configuration.data), {}}
      : rows        ? transcoder::describe_datasets(configuration.data, world, rows->datasets())
                    : transcoder::describe_datasets(configuration.data, world);
  const std::string summary = without_files ? summary_without_files(data.train)
                              : rows        ? rows->summary()
                                            : dataset::summary(data.train);
  transcoder::resolve_k(configuration, data.train.n_layers);
  transcoder::check_layers(configuration, data.train.n_layers);
  if (world.is_root())
    for (const std::string& warning : transcoder::idle_settings(configuration)) log::warning("{}", warning);
  if (world.is_root() && configuration.log.evaluate_every > 0 && !data.validation)
    log::warning("log.evaluate_every = {} has no effect (the input has no data.validation)",
                 configuration.log.evaluate_every);
  training::use_recorded_algorithms(configuration.device.algorithms, world);
  const transcoder::Plan plan = transcoder::plan(configuration, data.train, shape);
  const std::string plan_text =
      transcoder::to_text(plan, configuration) +
      (configuration.privacy.enabled ? transcoder::private_text(configuration, data.train, shape) : "");
  if (const std::string advice = transcoder::grid_advice(plan);
      !advice.empty() && !configuration.privacy.enabled && world.is_root())
    log::warning("{}", advice);
  MemoryNeed need{.device = plan.device_total(), .host = plan.host_total()};
  // The host memory of another machine is not known; without its data a run is planned, not started.
  if (configuration.parallel.world == 0 && request.device_memory.empty()) {
    const training::HostShare memory = training::usable_host_memory(world);
    if (!kernels::kCudaBuild) need.host += need.device;
    need.host_available = memory.bytes;
    need.host_limit = memory.limit;
    const std::string problem =
        transcoder::lacks_host_memory(configuration, data.train, shape, memory.bytes, memory.limit);
    if (!problem.empty() && !without_files) throw Error(ExitCode::usage, problem, KnownTo::all_ranks);
    if (!problem.empty() && world.is_root()) log::warning("on this machine: {}", problem);
  }
  if (request.dry_run) {
    transcoder::Plan fitting = plan;
    if (configuration.device.memory > 0) {
      need.device_available = static_cast<std::int64_t>(configuration.device.memory * 1e9);
      transcoder::Configuration smaller = configuration;
      smaller.data.micro_tokens =
          transcoder::micro_tokens_that_fit(configuration, data.train, shape, need.device_available);
      if (smaller.data.micro_tokens != configuration.data.micro_tokens) need.micro_tokens = smaller.data.micro_tokens;
      fitting = transcoder::plan(smaller, data.train, shape);
      need.device = fitting.device_total();
    }
    training::require_usable_output(world, configuration.run.output);
    print_result(request, fmt::format("{}{}{}", summary, plan_text, to_text(need)), plan_document(fitting, need));
    return 0;
  }

  // 2. The hardware: that the run fits is known before anything is created.
  training::accept_requests();
  const device::Runtime runtime(transcoder::device_settings(configuration), world.node_rank(),
                                parallel::bind_to_cpus(world, configuration.device));
  parallel::nccl::allow_multicast(configuration.parallel.nvls);
  const std::int64_t usable = training::usable_device_bytes(configuration.device, transcoder::kContextBytes, world);
  const std::int64_t micro_tokens = usable > 0
                                        ? transcoder::micro_tokens_that_fit(configuration, data.train, shape, usable)
                                        : configuration.data.micro_tokens;
  std::optional<RunningModel> running;
  if (rows) running.emplace(*rows, data, runtime, world);

  // 3. The run directory, and the checkpoint to resume from.
  report::run_record()["data"] = {
      {"model", data.train.model}, {"layers", data.train.n_layers}, {"d_model", data.train.d_model}};
  if (!request.start_id.empty()) report::run_record()["start_id"] = request.start_id;
  const training::OpenedRun opened =
      training::open_run(configuration.run, schema, request.resume, configuration.checkpoint, request.take_over, world);
  if (opened.found) require_kind(*opened.found, "encoder_0/weight", "choose another --output");
  if (opened.found &&
      optimizer::keep_epsilon(schema, configuration.optimizer, opened.found->manifest.input,
                              (opened.found->path / checkpoint::kManifestName).string()) &&
      world.is_root())
    log::info("a run of an earlier version: it continues with its epsilon of {:g} (optimizer.epsilon_scale = \"none\")",
              configuration.optimizer.epsilon);
  const bool changed =
      opened.found &&
      training::check_same_run(schema, configuration.resume, *opened.found,
                               {data.train.path, data.train.fingerprint, configuration.data.accept_changed}, world);
  if (training::is_complete(opened, configuration.run, world)) {
    print_run(request, opened.directory.path, 0, world);
    return 0;
  }
  training::check_schedule(configuration.optimizer, configuration.run, schema, opened, world);
  training::keep_input(opened, schema, world);
  if (opened.found)
    training::use_recorded_algorithms(configuration.device.algorithms, world, opened.found->manifest.extra);
  training::Profile profile(request.profile, world, runtime);
  report::record_start(world, request.command_line, library_versions(), runtime.description());
  log::info("{}{}{}", training::hosts_text(), summary, plan_text);
  configuration.data.micro_tokens = micro_tokens;

  // 4. The model, and its training.
  const parallel::Grid grid(world, shape);
  std::unique_ptr<training::Trainable> model;
  if (configuration.privacy.enabled)
    model =
        std::make_unique<transcoder::PrivateTrainingRun>(configuration, data, opened, changed, world, grid, runtime);
  else
    model = std::make_unique<transcoder::TrainingRun>(configuration, data, opened, world, grid, runtime);
  training::Loop loop(*model, {configuration.run, configuration.log, configuration.resume, configuration.checkpoint},
                      {input::print(schema), request.input_text, library_versions(), data.train.fingerprint}, opened,
                      world, shape, runtime, start);
  const int code = loop.run(&profile, plan.device_total());
  print_run(request, opened.directory.path, code, world);
  return code;
}

}  // namespace weft::commands
