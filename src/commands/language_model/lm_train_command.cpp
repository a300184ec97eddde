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
  const polychromic::Configuration& configuration = input.configuration;
  const std::int64_t n_ranks = parallel::ranks_of_grid(configuration.parallel, world.size(), request.dry_run);
  const bool divides = configuration.parallel.plan == parallel::Division::automatic;
  if (divides && draws_answers)
    throw collective_error(
        ExitCode::usage,
        "parallel.plan = \"auto\" is for weft lm train (weft lm polychromic divides the state alone); "
        "leave it out, and give parallel.tensor if the model needs more than one GPU");
  if (divides)
    input.configuration.parallel.data = n_ranks;
  else
    language_model::use_ranks(input.configuration, n_ranks);
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
  // The run is planned for another machine, whose host memory is not known, with --device-memory or parallel.world.
  const run::HostShare memory = options.device_memory.empty() && configuration.parallel.world == 0
                                    ? run::usable_host_memory(world)
                                    : run::HostShare{};
  const language_model::Configuration asked = configuration;
  const bool chooses = asked.memory.micro_tokens == 0;
  language_model::GridChoice choice{
      .architecture = architecture,
      .plan_of =
          [&](const language_model::Configuration& with) {
            language_model::Plan plan = language_model::plan(with, architecture, corpus.train.size());
            if (prompts) {
              polychromic::Configuration all = configuration;
              static_cast<language_model::Configuration&>(all) = with;
              polychromic::add_memory(plan, all, *prompts);
            }
            return plan;
          },
      .node_ranks = asked.parallel.world > 0 ? asked.parallel.node : world.node_size(),
      .limits = {memory.bytes, memory.limit, static_cast<std::int64_t>(asked.device.memory * 1e9)}};
  std::vector<language_model::GridPlan> grids;
  language_model::Plan plan;
  const auto take = [&](const language_model::GridPlan& grid) {
    grid.apply_to(input.configuration);
    input.configuration.parallel.plan = parallel::Division::given;  // which the input of the run states
    plan = grid.plan;
  };
  const auto choose = [&] {
    if (n_ranks > 1 && (divides || request.dry_run)) grids = choice.all(asked);
    if (divides && grids.empty()) language_model::use_ranks(input.configuration, n_ranks);
    take(divides && n_ranks > 1 ? language_model::GridChoice::best(grids) : choice.given(asked));
    language_model::require_whole_records(configuration);
  };
  choose();
  if (draws_answers) {
    polychromic::require_settings(configuration, architecture, *prompts, *corpus.tokenizer, world);
    polychromic::require_reward(configuration.polychromic, world);
  }
  language_model::require_memory(plan, configuration, choice.limits);
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
    planned.grid = language_model::grid_shape(configuration);
    planned.summary = language_model::summary(corpus) + language_model::to_text(plan, configuration) +
                      language_model::grids_text(grids, configuration);
    planned.need = {.device = plan.device_total(),
                    .device_available = choice.limits.device,
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
    choice.limits.device = usable;
    choose();
    language_model::require_memory(plan, configuration, choice.limits);
    describe_plan();
    return nullptr;
  };
  // Sums of gradients are rounded by grid and micro-batch: with as many ranks the choice of the first start stays.
  planned.resume = [&](const checkpoint::Found& found) {
    const auto recorded = [&](const char* key) {
      return input::value_in(schema, key, found.manifest.input, checkpoint::kManifestName);
    };
    language_model::Configuration before = asked;
    if (divides) {
      const auto tensor = found.manifest.grid.find(std::string(parallel::kTensorAxis));
      if (tensor == found.manifest.grid.end() || n_ranks % tensor->second != 0) return;
      before.parallel.tensor = tensor->second;
      before.parallel.data = n_ranks / tensor->second;
      for (const auto& [name, shard] : parallel::kShards)
        if (std::get<std::string>(recorded("parallel.shard")) == name) before.parallel.shard = shard;
    }
    if (!(divides || chooses) || found.manifest.grid != language_model::grid_shape(before).sizes()) return;
    if (chooses) before.memory.micro_tokens = std::get<std::int64_t>(recorded("data.micro_tokens"));
    if (before.memory.micro_tokens == 0) before.memory.micro_tokens = before.rank_tokens();
    const auto same = [&] {
      return before.parallel.tensor == configuration.parallel.tensor && before.shard() == configuration.shard() &&
             before.micro_tokens() == configuration.micro_tokens();
    };
    if (same() || before.memory.micro_tokens % before.data.sequence != 0) return;
    const language_model::GridPlan grid = choice.given(before);
    if (grid.fits) {
      take(grid);
      describe_plan();
    } else if (world.is_root()) {
      log::warning(
          "the grid and the micro-batches of {} tokens of the run so far do not fit into memory any more; as divided "
          "now, the sums of gradients are rounded differently",
          before.memory.micro_tokens);
    }
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
