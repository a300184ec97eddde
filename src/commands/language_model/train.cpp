// SPDX-License-Identifier: Apache-2.0
//
// weft lm train INPUT: trains a language model.
#include <chrono>

#include "base/log.hpp"
#include "commands/commands.hpp"
#include "device/runtime.hpp"
#include "input/print.hpp"
#include "language_model/plan.hpp"
#include "language_model/training_run.hpp"
#include "report/format.hpp"
#include "report/run_record.hpp"
#include "training/algorithms.hpp"
#include "training/loop.hpp"
#include "training/usable_memory.hpp"

namespace weft::commands {

int language_model_train(const Request& request, const parallel::World& world) {
  const auto start = std::chrono::steady_clock::now();
  // 1. The input and the text: every error that can be found before work starts.
  Input input;
  const input::Schema schema = commands::schema(input, request.command);
  read_input(request, schema, world);
  const language_model::Configuration& configuration = input.language;
  if (world.size() > 1)
    throw collective_error(ExitCode::usage,
                           "weft lm train with {} processes (language models are trained by one process so far); start "
                           "one process",
                           world.size());
  const language_model::Corpus corpus = language_model::load_corpus(configuration.data, world);
  if (world.is_root() && configuration.log.evaluate_every > 0 && !corpus.validation && configuration.sample.tokens == 0)
    log::warning("log.evaluate_every = {} has no effect (no validation data, and log.sample_tokens = 0)",
                 configuration.log.evaluate_every);
  const language_model::Architecture architecture = language_model::architecture_of(configuration, corpus);
  training::use_recorded_algorithms(configuration.device.algorithms, world);
  const language_model::Plan plan = language_model::plan(configuration, architecture, corpus.train.size());
  const std::string summary = language_model::summary(corpus) + language_model::to_text(plan, configuration);
  const training::HostShare memory = training::usable_host_memory(world);
  language_model::require_memory(plan, configuration, memory.bytes, memory.limit,
                                 static_cast<std::int64_t>(configuration.device.memory * 1e9));
  language_model::require_worthwhile_swapping(plan);
  if (request.dry_run) {
    training::require_usable_output(world, configuration.run.output);
    log::info("{}", summary);
    return 0;
  }

  // 2. The hardware: that the run fits is known before anything is created.
  training::accept_requests();
  const device::Runtime runtime(language_model::device_settings(configuration), world.node_rank(), world.node_size());
  language_model::require_memory(
      plan, configuration, 0, "",
      training::usable_device_bytes(configuration.device, language_model::kContextBytes, world));

  // 3. The run directory, and the checkpoint to resume from.
  if (!request.start_id.empty()) report::run_record()["start_id"] = request.start_id;
  const training::OpenedRun opened =
      training::open_run(configuration.run, schema, request.resume, configuration.checkpoint, request.take_over, world);
  if (opened.found)
    training::check_same_run(schema, configuration.resume, *opened.found,
                             {corpus.train.name(), corpus.fingerprint, configuration.data.accept_changed}, world);
  if (training::is_complete(opened, configuration.run, world)) return 0;
  training::check_schedule(configuration.optimizer, configuration.run, schema, opened, world);
  training::keep_input(opened.directory, schema, world);
  if (opened.found)
    training::use_recorded_algorithms(configuration.device.algorithms, world, opened.found->manifest.extra);
  training::Profile profile(request.profile, world, runtime);
  report::record_start(world, request.command_line, library_versions(), runtime.description());
  log::info("{}{}", training::hosts_text(), summary);

  // 4. The model, and its training.
  const parallel::Grid grid(world, language_model::single_process());
  language_model::TrainingRun model(configuration, corpus, opened.found ? &*opened.found : nullptr, world, grid,
                                    runtime);
  training::Loop loop(model, {configuration.run, configuration.log, configuration.resume, configuration.checkpoint},
                      {input::print(schema), request.input_text, library_versions(), corpus.fingerprint}, opened, world,
                      grid.shape(), runtime, start);
  return loop.run(&profile, plan.device_total());
}

}  // namespace weft::commands
