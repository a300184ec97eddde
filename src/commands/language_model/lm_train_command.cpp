// SPDX-License-Identifier: Apache-2.0
//
// weft lm train INPUT: trains a language model. weft lm polychromic INPUT: trains one further for quality and diversity
// of sets of answers (polychromic/polychromic_run.hpp).
#include <algorithm>
#include <memory>
#include <optional>

#include "base/clock.hpp"
#include "base/format.hpp"
#include "base/log.hpp"
#include "bench/language_model/language_input.hpp"
#include "commands/commands.hpp"
#include "commands/shared/train_model.hpp"
#include "input/read.hpp"
#include "language_model/run/grid_plan.hpp"
#include "language_model/run/initial_model.hpp"
#include "language_model/run/language_training_run.hpp"
#include "language_model/run/memory_plan.hpp"
#include "language_model/run/private_plan.hpp"
#include "polychromic/polychromic_run.hpp"
#include "run/algorithms.hpp"
#include "run/usable_memory.hpp"

namespace weft::commands {
namespace {

constexpr std::string_view kPolychromic = "lm polychromic";

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

int train_language_model(const Request& request, const TrainOptions& options, const parallel::World& world) {
  const bool draws_answers = request.command == kPolychromic;
  const auto begin = Clock::now();
  // 1. The input and the text: every error that can be found before work starts.
  bench::LanguageInput input;
  const input::Schema schema = bench::language_training_keys(input);
  if (draws_answers) require_polychromic_table(request, world);
  read_input(request, schema, world);
  language_model::use_ranks(input.configuration,
                            parallel::ranks_of_grid(input.configuration.parallel, world.size(), request.dry_run));
  const polychromic::Configuration& configuration = input.configuration;
  const std::optional<language_model::InitialModel> initial = language_model::open_initial(configuration, world);
  const language_model::Corpus corpus = language_model::load_corpus(configuration, initial, world);
  run::require_validation(configuration.run, configuration.checkpoint.keep_best, corpus.validation.has_value());
  if (draws_answers && configuration.run.epochs > 0)
    throw collective_error(ExitCode::usage,
                           "run.epochs is for weft lm train (the steps of weft lm polychromic draw prompts, of which "
                           "polychromic.every and polychromic.prompts say how many); give run.steps");
  run::use_epochs(input.configuration.run, schema, language_model::steps_per_epoch(configuration, corpus.segments));
  if (world.is_root() && configuration.log.evaluate_every > 0 && !corpus.validation && configuration.sample.tokens == 0)
    log::warning("log.evaluate_every = {} has no effect (no validation data, and log.sample_tokens = 0)",
                 configuration.log.evaluate_every);
  const language_model::Architecture architecture = language_model::architecture_of(configuration, corpus, initial);
  run::use_recorded_algorithms(configuration.device.algorithms, world);
  std::optional<polychromic::Prompts> prompts;  // prompts of weft lm polychromic
  if (draws_answers)
    prompts.emplace(configuration.polychromic, corpus, static_cast<std::uint64_t>(configuration.run.seed), world);
  const auto plan_of = [&](std::int64_t micro_tokens) {
    polychromic::Configuration with = configuration;
    with.memory.micro_tokens = micro_tokens;
    language_model::Plan plan = language_model::plan(with, architecture, corpus.train.size());
    if (prompts) polychromic::add_memory(plan, with, *prompts);
    return plan;
  };
  // The run is planned for another machine, whose host memory is not known, with --device-memory or parallel.world.
  const run::HostShare memory = options.device_memory.empty() && configuration.parallel.world == 0
                                    ? run::usable_host_memory(world)
                                    : run::HostShare{};
  language_model::MemoryLimits limits{memory.bytes, memory.limit,
                                      static_cast<std::int64_t>(configuration.device.memory * 1e9)};
  const bool chooses = configuration.memory.micro_tokens == 0;
  language_model::Plan plan;
  const auto take_micro_tokens = [&](std::int64_t micro_tokens) {
    input.configuration.memory.micro_tokens = micro_tokens;
    input.configuration.parallel.gathered_blocks = parallel::Settings().gathered_blocks;
    plan = plan_of(micro_tokens);
    if (!language_model::gathers_repeatedly(configuration) || !limits.known()) return;
    input.configuration.parallel.gathered_blocks = configuration.language_model.layers;
    if (language_model::Plan all = plan_of(micro_tokens); limits.allow(all))
      plan = std::move(all);
    else
      input.configuration.parallel.gathered_blocks = parallel::Settings().gathered_blocks;
  };
  const auto choose_micro_tokens = [&] {
    take_micro_tokens(chooses ? language_model::largest_micro_tokens(configuration, limits, plan_of)
                              : configuration.memory.micro_tokens);
  };
  choose_micro_tokens();
  if (draws_answers) {
    polychromic::require_settings(configuration, architecture, *prompts, *corpus.tokenizer, world);
    polychromic::require_reward(configuration.polychromic, world);
  }
  language_model::require_memory(plan, configuration, limits);
  language_model::require_worthwhile_swapping(plan);

  // 2. The model, which the recipe makes when the run directory is open.
  PlannedModel planned{
      .schema = schema,
      .settings = {configuration.run, configuration.log, configuration.resume, configuration.checkpoint},
      .optimizer = input.configuration.optimizer,
      .device = language_model::device_settings(configuration),
      .grid = language_model::grid_shape(configuration),
      .data = {corpus.train.name(), corpus.fingerprint, configuration.data.accept_changed},
      .tensor = "embedding/tokens",
      .next = fmt::format("weft lm generate {}", configuration.run.output),
      .extra = language_model::manifest_extra(architecture)};
  const auto describe_plan = [&] {
    const std::int64_t micro = configuration.memory.micro_tokens;
    planned.summary = language_model::summary(corpus) + language_model::to_text(plan, configuration);
    planned.need = {.device = plan.device_total(),
                    .device_available = limits.device,
                    .host = plan.host_total() + (kernels::kCudaBuild ? 0 : plan.device_total()),
                    .host_available = memory.bytes,
                    .host_limit = memory.limit,
                    .micro_tokens = chooses && micro < configuration.rank_tokens() ? micro : 0};
    planned.plan = plan_document(plan, planned.need);
    planned.device_bytes = plan.device_total();
  };
  describe_plan();
  planned.start = [&](const device::Runtime&) -> std::shared_ptr<void> {
    const std::int64_t usable = run::usable_device_bytes(configuration.device, language_model::kContextBytes, world);
    if (usable == 0) return nullptr;
    limits.device = usable;
    choose_micro_tokens();
    language_model::require_memory(plan, configuration, limits);
    describe_plan();
    return nullptr;
  };
  // Sums of gradients are rounded by micro-batch: on the same grid the choice of the first start stays.
  planned.resume = [&](const checkpoint::Found& found) {
    if (!chooses || found.manifest.grid != planned.grid.sizes()) return;
    const auto recorded = std::get<std::int64_t>(
        input::value_in(schema, "data.micro_tokens", found.manifest.input, checkpoint::kManifestName));
    const std::int64_t before = recorded > 0 ? recorded : configuration.rank_tokens(),
                       now = configuration.memory.micro_tokens;
    if (before == now || before % configuration.data.sequence != 0) return;
    if (!limits.allow(plan_of(before))) {
      if (world.is_root())
        log::warning(
            "the micro-batches of {} tokens of the run so far do not fit into memory any more; with {} tokens the sums "
            "of gradients are rounded differently",
            before, now);
      return;
    }
    take_micro_tokens(before);
    describe_plan();
  };
  planned.make = [&](const run::OpenedRun& opened, bool changed, const parallel::Grid& grid,
                     const device::Runtime& runtime) -> std::unique_ptr<run::Trainable> {
    const checkpoint::Found* const found = opened.found ? &*opened.found : nullptr;
    if (prompts)
      return std::make_unique<polychromic::PolychromicRun>(configuration, corpus, *prompts, found, world, grid,
                                                           runtime);
    auto run = std::make_unique<language_model::TrainingRun>(configuration, corpus, found, world, grid, runtime);
    if (changed) run->note_change();
    return run;
  };
  return train_model(request, options, world, planned, begin);
}

}  // namespace

extern const Command lm_train_command =
    training_command({"lm train", "INPUT", "train a model on text; resumes automatically",
                      "Trains a GPT-2- or Llama-style language model on text. A run that was interrupted resumes "
                      "from its newest valid checkpoint when the same command is given again."},
                     "language_model", bench::language_training_keys, train_language_model);

extern const Command lm_polychromic_command =
    training_command({kPolychromic, "INPUT", "train a model further for quality and diversity of answers",
                      "Trains a language model further, so that sets of its answers to a prompt are good and differ "
                      "(docs/polychromic.md). A run that was interrupted resumes from its newest valid checkpoint "
                      "when the same command is given again."},
                     "language_model", bench::language_training_keys, train_language_model);

}  // namespace weft::commands
