// SPDX-License-Identifier: Apache-2.0
//
// weft train INPUT: trains a transcoder.
#include <filesystem>
#include <memory>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "bench/transcoder/transcoder_input.hpp"
#include "commands/commands.hpp"
#include "commands/language_model/model_rows.hpp"
#include "commands/shared/train_model.hpp"
#include "dataset/activations/describe.hpp"
#include "parallel/nccl.hpp"
#include "run/algorithms.hpp"
#include "run/run_record.hpp"
#include "run/usable_memory.hpp"
#include "storage/digest.hpp"
#include "transcoder/run/initial_weights.hpp"
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

int run_train(const Request& request, const TrainOptions& options, const parallel::World& world) {
  const auto begin = Clock::now();
  // 1. The input, the headers of the data, the grid of ranks: every error that can be found before work starts.
  bench::TranscoderInput input;
  const input::Schema schema = bench::training_keys(input);
  read_input(request, schema, world);
  transcoder::Configuration& configuration = input.configuration;
  const parallel::GridShape shape = parallel::grid_shape(
      configuration.parallel.data, {std::string(parallel::kFeatureAxis), configuration.parallel.feature},
      parallel::ranks_of_grid(configuration.parallel, world.size(), request.dry_run));
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
  run::require_validation(configuration.run, configuration.checkpoint.keep_best, data.validation.has_value());
  run::use_epochs(configuration.run, schema,
                  static_cast<double>(data.train.n_rows) / static_cast<double>(configuration.data.batch_tokens));
  transcoder::resolve_k(configuration, data.train.n_layers);
  transcoder::check_layers(configuration, data.train.n_layers);
  if (world.is_root())
    for (const std::string& warning : transcoder::idle_settings(configuration)) log::warning("{}", warning);
  if (world.is_root() && configuration.log.evaluate_every > 0 && !data.validation)
    log::warning("log.evaluate_every = {} has no effect (the input has no data.validation)",
                 configuration.log.evaluate_every);
  std::optional<checkpoint::Found> initial;
  if (!configuration.transcoder.initial.empty()) {
    initial = open_checkpoint(configuration.transcoder.initial, world);
    require_kind(*initial, "encoder_0/weight", "give a transcoder as transcoder.initial");
    transcoder::require_initial(configuration, *initial, data.train.n_layers, data.train.d_model);
  }
  run::use_recorded_algorithms(configuration.device.algorithms, world);
  const transcoder::Plan plan = transcoder::plan(configuration, data.train, shape);
  const std::string plan_text =
      transcoder::to_text(plan, configuration) +
      (configuration.privacy.enabled ? transcoder::private_text(configuration, data.train) : "");
  if (const std::string advice = transcoder::grid_advice(plan); !advice.empty() && world.is_root())
    log::warning("{}", advice);
  MemoryNeed need{.device = plan.device_total(), .host = plan.host_total()};
  // The host memory of another machine is not known; without its data a run is planned, not started.
  if (configuration.parallel.world == 0 && options.device_memory.empty()) {
    const run::HostShare memory = run::usable_host_memory(world);
    if (!kernels::kCudaBuild) need.host += need.device;
    need.host_available = memory.bytes;
    need.host_limit = memory.limit;
    const std::string problem =
        transcoder::lacks_host_memory(configuration, data.train, shape, memory.bytes, memory.limit);
    if (!problem.empty() && !without_files) throw Error(ExitCode::usage, problem, KnownTo::all_ranks);
    if (!problem.empty() && world.is_root()) log::warning("on this machine: {}", problem);
  }
  transcoder::Plan fitting = plan;
  if (request.dry_run && configuration.device.memory > 0) {
    need.device_available = static_cast<std::int64_t>(configuration.device.memory * 1e9);
    transcoder::Configuration smaller = configuration;
    smaller.data.micro_tokens =
        transcoder::micro_tokens_that_fit(configuration, data.train, shape, need.device_available);
    if (smaller.data.micro_tokens != configuration.data.micro_tokens) need.micro_tokens = smaller.data.micro_tokens;
    fitting = transcoder::plan(smaller, data.train, shape);
    need.device = fitting.device_total();
  }

  // 2. The model, which the recipe makes when the run directory is open.
  PlannedModel planned{
      .schema = schema,
      .settings = {configuration.run, configuration.log, configuration.resume, configuration.checkpoint},
      .optimizer = configuration.optimizer,
      .device = transcoder::device_settings(configuration),
      .grid = shape,
      .data = {data.train.path, data.train.fingerprint, configuration.data.accept_changed},
      .summary = summary + plan_text,
      .need = need,
      .plan = plan_document(fitting, need),
      .device_bytes = plan.device_total(),
      .tensor = "encoder_0/weight",
      .next = fmt::format("weft features {0} --output {0}/features", configuration.run.output)};
  std::int64_t micro_tokens = configuration.data.micro_tokens;
  planned.start = [&](const device::Runtime& runtime) -> std::shared_ptr<void> {
    parallel::nccl::allow_multicast(configuration.parallel.nvls);
    const std::int64_t usable = run::usable_device_bytes(configuration.device, transcoder::kContextBytes, world);
    if (usable > 0) micro_tokens = transcoder::micro_tokens_that_fit(configuration, data.train, shape, usable);
    run::run_record()["data"] = {
        {"model", data.train.model}, {"layers", data.train.n_layers}, {"d_model", data.train.d_model}};
    if (initial)
      run::run_record()["initial"] = {{"path", initial->path.string()},
                                      {"step", initial->manifest.step},
                                      {"sha256", storage::sha256(checkpoint::to_text(initial->manifest))}};
    if (!rows) return nullptr;
    auto running = std::make_shared<RunningModel>(*rows, data, runtime, world);
    planned.data.fingerprint = data.train.fingerprint;
    return running;
  };
  planned.make = [&](const run::OpenedRun& opened, bool changed, const parallel::Grid& grid,
                     const device::Runtime& runtime) -> std::unique_ptr<run::Trainable> {
    configuration.data.micro_tokens = micro_tokens;
    if (configuration.privacy.enabled)
      return std::make_unique<transcoder::PrivateTrainingRun>(configuration, data, opened, changed, world, grid,
                                                              runtime);
    return std::make_unique<transcoder::TrainingRun>(configuration, data, opened, initial, world, grid, runtime);
  };
  return train_model(request, options, world, planned, begin);
}

}  // namespace

extern const Command train_command =
    training_command({"train", "INPUT", "train a transcoder; resumes automatically",
                      "Trains a cross-layer transcoder on activation files. A run that was interrupted resumes from "
                      "its newest valid checkpoint when the same command is given again."},
                     "transcoder", bench::training_keys, run_train);

}  // namespace weft::commands
