// SPDX-License-Identifier: Apache-2.0
//
// weft lm train INPUT: trains a language model. weft lm polychromic INPUT: trains one further for quality and diversity
// of sets of answers (language_model/policy/polychromic_run.hpp).
#include <algorithm>
#include <memory>
#include <optional>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "commands/commands.hpp"
#include "commands/shared/dry_run.hpp"
#include "device/runtime.hpp"
#include "input/print.hpp"
#include "input/read.hpp"
#include "language_model/initial.hpp"
#include "language_model/plan.hpp"
#include "language_model/policy/polychromic_run.hpp"
#include "language_model/training_run.hpp"
#include "parallel/affinity.hpp"
#include "report/format.hpp"
#include "report/run_record.hpp"
#include "training/algorithms.hpp"
#include "training/loop.hpp"
#include "training/usable_memory.hpp"

namespace weft::commands {
namespace {

/// Throws if the table is missing: its keys have defaults, but the user must choose how answers are rewarded.
void require_polychromic_table(const Request& request, const parallel::World& world) {
  world.on_root([&] {
    if (!input::has_table(request.input_text, "polychromic") &&
        std::none_of(request.sets.begin(), request.sets.end(),
                     [](const std::string& set) { return set.starts_with("polychromic."); }))
      throw error(ExitCode::usage,
                  "{}: has no table [polychromic], which says what answers are worth (all would have the same reward); "
                  "write one, with a reward of \"likelihood\", \"exact\", \"regex\", \"file\" or \"command\" (or "
                  "\"constant\" for diversity alone), for example:\n\n[polychromic]\nreward = \"likelihood\"\n"
                  "prompts_file = \"prompts.txt\"",
                  request.subject);
  });
}

}  // namespace

int language_model_train(const Request& request, const parallel::World& world) {
  const auto start = Clock::now();
  // 1. The input and the text: every error that can be found before work starts.
  Input input;
  const input::Schema schema = commands::schema(input, request.command);
  if (request.command == Command::lm_polychromic) require_polychromic_table(request, world);
  read_input(request, schema, world);
  language_model::use_ranks(input.language,
                            parallel::ranks_of_grid(input.language.parallel, world.size(), request.dry_run));
  const language_model::Configuration& configuration = input.language;
  const std::optional<language_model::InitialModel> initial = language_model::open_initial(configuration, world);
  const language_model::Corpus corpus = language_model::load_corpus(configuration, initial, world);
  if (world.is_root() && configuration.log.evaluate_every > 0 && !corpus.validation && configuration.sample.tokens == 0)
    log::warning("log.evaluate_every = {} has no effect (no validation data, and log.sample_tokens = 0)",
                 configuration.log.evaluate_every);
  const language_model::Architecture architecture = language_model::architecture_of(configuration, corpus, initial);
  training::use_recorded_algorithms(configuration.device.algorithms, world);
  language_model::Plan plan = language_model::plan(configuration, architecture, corpus.train.size());
  std::optional<language_model::Prompts> prompts;  // prompts of weft lm polychromic
  if (request.command == Command::lm_polychromic) {
    prompts.emplace(configuration.polychromic, corpus, static_cast<std::uint64_t>(configuration.run.seed), world);
    language_model::require_polychromic(configuration, architecture, *prompts);
    language_model::require_reward(configuration.polychromic, world);
    language_model::add_polychromic(plan, configuration, *prompts);
  }
  const std::string summary = language_model::summary(corpus) + language_model::to_text(plan, configuration);
  const std::int64_t device_memory = static_cast<std::int64_t>(configuration.device.memory * 1e9);
  // The run is planned for another machine, whose host memory is not known, with --device-memory or parallel.world.
  const training::HostShare memory = request.device_memory.empty() && configuration.parallel.world == 0
                                         ? training::usable_host_memory(world)
                                         : training::HostShare{};
  language_model::require_memory(plan, configuration, memory.bytes, memory.limit, device_memory);
  language_model::require_worthwhile_swapping(plan);
  if (request.dry_run) {
    training::require_usable_output(world, configuration.run.output);
    const MemoryNeed need{.device = plan.device_total(),
                          .device_available = device_memory,
                          .host = plan.host_total() + (kernels::kCudaBuild ? 0 : plan.device_total()),
                          .host_available = memory.bytes,
                          .host_limit = memory.limit};
    print_result(request, summary + to_text(need), plan_document(plan, need));
    return 0;
  }

  // 2. The hardware: that the run fits is known before anything is created.
  training::accept_requests();
  const device::Runtime runtime(language_model::device_settings(configuration), world.node_rank(),
                                parallel::bind_to_cpus(world, configuration.device));
  language_model::require_memory(
      plan, configuration, 0, "",
      training::usable_device_bytes(configuration.device, language_model::kContextBytes, world));

  // 3. The run directory, and the checkpoint to resume from.
  if (!request.start_id.empty()) report::run_record()["start_id"] = request.start_id;
  const training::OpenedRun opened =
      training::open_run(configuration.run, schema, request.resume, configuration.checkpoint, request.take_over, world);
  if (opened.found) require_kind(*opened.found, "embedding/tokens", "choose another --output");
  const bool changed =
      opened.found &&
      training::check_same_run(schema, configuration.resume, *opened.found,
                               {corpus.train.name(), corpus.fingerprint, configuration.data.accept_changed}, world);
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
  log::info("{}{}", training::hosts_text(), summary);

  // 4. The model, and its training.
  const parallel::Grid grid(world, language_model::grid_shape(configuration));
  const checkpoint::Found* const found = opened.found ? &*opened.found : nullptr;
  std::unique_ptr<training::Trainable> model;
  if (prompts)
    model =
        std::make_unique<language_model::PolychromicRun>(configuration, corpus, *prompts, found, world, grid, runtime);
  else {
    auto run = std::make_unique<language_model::TrainingRun>(configuration, corpus, found, world, grid, runtime);
    if (changed) run->note_change();
    model = std::move(run);
  }
  training::Loop loop(*model, {configuration.run, configuration.log, configuration.resume, configuration.checkpoint},
                      {input::print(schema), request.input_text, library_versions(), corpus.fingerprint,
                       language_model::manifest_extra(architecture)},
                      opened, world, grid.shape(), runtime, start);
  const int code = loop.run(&profile, plan.device_total());
  print_run(request, opened.directory.path, code, world);
  return code;
}

}  // namespace weft::commands
