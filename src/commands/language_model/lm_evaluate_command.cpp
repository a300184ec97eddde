// SPDX-License-Identifier: Apache-2.0
//
// weft lm evaluate MODEL [--text FILE] [--transcoder CHECKPOINT]: loss, perplexity and bits per byte of a language
// model on a text, also with its MLPs replaced by a transcoder or with its features changed. Each group of
// parallel.tensor ranks has the model and some of the batches.
#include <filesystem>

#include "checkpoint/checkpoint_directory.hpp"
#include "checkpoint/manifest.hpp"
#include "commands/language_model/answer_evaluation.hpp"
#include "commands/language_model/loaded_language_model.hpp"
#include "commands/language_model/replacement.hpp"
#include "commands/language_model/texts.hpp"
#include "language_model/run/text_evaluation.hpp"
#include "language_model/tokenizer/lines.hpp"
#include "storage/durable.hpp"

namespace weft::commands {
namespace {

struct LanguageEvaluateOptions {
  std::string text, transcoder, answers;  ///< "" or FILE, "" or CHECKPOINT, "" or FILE of prompts
  InterventionOptions interventions;
  bool frozen_attention = false;
  bool all_checkpoints = false;
  std::int64_t samples = 0;  ///< answers to each prompt; 0: as in training
};

Json record_of(const OpenedModel& opened) {
  if (opened.found) return {{"checkpoint", opened.found->path.string()}, {"step", opened.found->manifest.step}};
  return {{"model", opened.directory->path().string()}};
}

/// Prints the record, and writes it to a file of the output.
int conclude(const Request& request, const char* file, const std::string& printed, const Json& record,
             const parallel::World& world) {
  print_result(request, printed, record);
  if (request.output.empty()) return 0;
  world.on_root([&] {
    storage::make_directory(request.output);
    storage::write_json(std::filesystem::path(request.output) / file, record);
  });
  return 0;
}

/// The model of the request, or the checkpoints of its run, oldest first.
std::vector<std::string> models_of(const Request& request, bool all_checkpoints, const parallel::World& world) {
  if (!all_checkpoints) return {request.subject};
  const std::filesystem::path directory = std::filesystem::path(request.subject) / "checkpoints";
  const std::string names = world.on_root([&] {
    std::string text;
    for (const std::int64_t step : checkpoint::steps_in(directory))
      text += (directory / checkpoint::directory_name(step)).string() + "\n";
    if (text.empty())
      throw error(ExitCode::usage, "{}: has no checkpoints; --all-checkpoints needs the directory of a run",
                  request.subject);
    return text;
  });
  std::vector<std::string> models;
  language_model::each_line(names, request.subject,
                            [&](std::string_view line, const std::string&) { models.emplace_back(line); });
  return models;
}

int run_answer_evaluation(const Request& request, const LanguageEvaluateOptions& options,
                          const parallel::World& world) {
  if (!options.text.empty() || !options.transcoder.empty() || request.dry_run)
    throw collective_error(ExitCode::usage,
                           "weft lm evaluate: --answers goes with neither --text nor --transcoder nor --dry-run");
  Request of_model = request;
  const std::vector<std::string> models = models_of(request, options.all_checkpoints, world);
  of_model.subject = models.front();
  const LoadedLanguageModel loaded(of_model, world);
  polychromic::Configuration configuration = loaded.opened.input.configuration;
  polychromic::Settings& settings = configuration.polychromic;
  settings.prompts_file = options.answers;
  if (options.samples > 0) settings.samples = options.samples;
  Json record = {{"prompts", settings.prompts_file}, {"samples", settings.samples}, {"checkpoints", Json::array()}};
  std::string printed = fmt::format("{} answers to each prompt of {}", settings.samples, settings.prompts_file);
  for (const std::string& model : models) {
    of_model.subject = model;
    const OpenedModel opened(of_model, world);
    if (model != models.front()) opened.load(loaded.part.model, world, loaded.execution());
    Json measured = record_of(opened);
    measured["answers"] = measure_answers(loaded, configuration, world).to_json();
    printed += fmt::format("\n{}:", opened.name());
    for (const auto& [name, value] : measured["answers"].items())
      if (!value.is_null()) printed += fmt::format("\n  {:<15} {:.4f}", name, value.get<double>());
    record["checkpoints"].push_back(std::move(measured));
  }
  return conclude(request, "answers.json", printed, record, world);
}

int run_language_evaluate(const Request& request, const LanguageEvaluateOptions& options,
                          const parallel::World& world) {
  const std::vector<language_model::Intervention> changes = options.interventions.list(options.transcoder);
  if (options.frozen_attention && changes.empty())
    throw collective_error(ExitCode::usage,
                           "--frozen-attention is for interventions; add --set-feature or --scale-feature");
  if (options.answers.empty() && options.all_checkpoints)
    throw collective_error(ExitCode::usage, "--all-checkpoints is for --answers; add --answers FILE");
  if (!options.answers.empty()) return run_answer_evaluation(request, options, world);
  if (request.dry_run) {
    const OpenedModel opened(request, world);
    const language_model::Configuration& configuration = opened.configuration();
    const std::int64_t rows = configuration.micro_tokens();
    language_model::Plan plan = ForwardModel::plan(opened, rows);
    if (!options.transcoder.empty())
      plan.device.emplace_back(
          "transcoder",
          PlannedTranscoder(options.transcoder, opened.architecture.model, rows,
                            device::planned_backend(language_model::device_settings(configuration)), world)
              .bytes);
    if (!changes.empty())
      plan.device.emplace_back("interventions",
                               language_model::InterventionPass::bytes(
                                   language_model::forward_settings(configuration, opened.architecture, rows), rows,
                                   std::ssize(changes), options.frozen_attention));
    return print_plan(request, opened, plan);
  }
  // 1. The model, and the text: that of the command line, else the validation data of the run, else the part of its
  //    text that it held out.
  const LoadedLanguageModel loaded(request, world);
  const language_model::Configuration& configuration = loaded.configuration();
  const bool held_out = options.text.empty() && configuration.data.validation.empty();
  if (held_out && (!loaded.opened.found || configuration.data.validation_fraction == 0))
    throw collective_error(ExitCode::usage,
                           "no text to evaluate on (the model comes without validation data); give --text FILE");
  const std::string path = held_out               ? configuration.data.train
                           : options.text.empty() ? configuration.data.validation
                                                  : options.text;
  const char* const origin = held_out ? "data.train" : options.text.empty() ? "data.validation" : "--text";
  world.on_root([&] {
    if (!std::filesystem::exists(path))
      throw error(ExitCode::usage, "{} = \"{}\": no such file or directory; correct the path", origin, path);
  });
  const dataset::TokenSet whole = held_out
                                      ? training_text(loaded.opened, loaded.tokenizer, true, world)
                                      : language_model::load_tokens(path, origin, configuration.data, loaded.tokenizer,
                                                                    loaded.architecture().vocabulary, world);
  const dataset::Segments text(whole, configuration.data);

  // 2. Measure, print, record.
  if (!request.output.empty()) world.on_root([&] { storage::make_directory(request.output); });
  ForwardOnly forward(loaded, configuration.micro_tokens());
  const language_model::EvaluationResult result =
      language_model::evaluate(text, configuration.data.sequence, forward.settings.rows, forward.transformer,
                               forward.staging, loaded.execution(), &loaded.part.ranks.peers);
  std::string printed = fmt::format("{} on {}: {}", loaded.opened.name(), path, language_model::to_text(result));
  if (const dataset::DocumentRows* const rows = text.documents(); rows != nullptr) printed += '\n' + rows->summary();
  Json record = record_of(loaded.opened);
  record["data"] = path;
  record["validation"] = language_model::to_json(result);
  if (!changes.empty()) {
    TranscoderReplacement transcoder(options.transcoder, loaded.architecture().model, forward.settings.rows,
                                     loaded.execution(), world);
    language_model::InterventionPass pass(transcoder.changed_features(changes, configuration.data.sequence, false),
                                          forward.settings, forward.settings.rows, options.frozen_attention,
                                          forward.transformer, loaded.execution());
    const language_model::EvaluationResult changed =
        language_model::evaluate(text, configuration.data.sequence, forward.settings.rows, forward.transformer,
                                 forward.staging, loaded.execution(), &loaded.part.ranks.peers,
                                 [&](const language_model::Tokens& tokens) { pass.forward(tokens); });
    parallel::on_all(world.all(), [&] { transcoder.require_valid_selections(); });
    printed += fmt::format("\nwith {} intervention{} on features of {}: {} ({:+.4f} nats per token)", changes.size(),
                           changes.size() == 1 ? "" : "s", transcoder.found().path.string(),
                           language_model::to_text(changed), changed.loss - result.loss);
    record["interventions"] = {{"transcoder", transcoder.found().path.string()},
                               {"step", transcoder.found().manifest.step},
                               {"frozen_attention", options.frozen_attention},
                               {"changes", Json::array()},
                               {"validation", language_model::to_json(changed)}};
    for (const language_model::Intervention& change : changes)
      record["interventions"]["changes"].push_back(change.text);
  } else if (!options.transcoder.empty()) {
    TranscoderReplacement transcoder(options.transcoder, loaded.architecture().model, forward.settings.rows,
                                     loaded.execution(), world);
    const language_model::ReplacementResult replaced = language_model::evaluate_replaced(
        text, configuration.data.sequence, forward.settings.rows, loaded.architecture().model, forward.settings.type,
        transcoder.reconstruction(), forward.transformer, forward.staging, loaded.execution(),
        &loaded.part.ranks.peers);
    parallel::on_all(world.all(), [&] { transcoder.require_valid_selections(); });
    printed += fmt::format("\nMLP outputs replaced by {} (step {}):\n{}", transcoder.found().path.string(),
                           transcoder.found().manifest.step, language_model::to_table(replaced));
    record["replacement"] = {{"transcoder", transcoder.found().path.string()},
                             {"step", transcoder.found().manifest.step}};
    record["replacement"].update(language_model::to_json(replaced));
  }
  return conclude(request, "evaluation.json", printed, record, world);
}

}  // namespace

extern const Command lm_evaluate_command = with_options(
    {"lm evaluate", "MODEL", "loss, perplexity and bits per byte on a text",
     "Measures loss, perplexity and bits per byte of a language model on a text; with --transcoder also with its "
     "MLPs replaced by a transcoder or, with --set-feature and --scale-feature, with features of it changed."},
    run_language_evaluate, [](Options& options, LanguageEvaluateOptions& own) {
      options.example("weft lm evaluate gpt2 --transcoder thresholds --text held_out.txt");
      options.add("--text", own.text, "FILE", "the text, or token files (default: the run's validation data)");
      options.add("--transcoder", own.transcoder, "CHECKPOINT",
                  "also the loss with MLP outputs replaced by a transcoder's reconstructions, all layers together and "
                  "each alone");
      own.interventions.add_to(options);
      options.flag("--frozen-attention", own.frozen_attention,
                   "with the attention patterns and norm denominators of the unchanged model");
      options.add("--answers", own.answers, "FILE",
                  "instead of a text: answers to these prompts, FILE.jsonl with references or a prompt per line, drawn "
                  "and rewarded as by the table [polychromic] of the model: reward, pass@k, diversity");
      options.add("--samples", own.samples, "N", "of --answers: answers to each prompt (default: as in training)", 1,
                  1 << 12);
      options.flag("--all-checkpoints", own.all_checkpoints, "of --answers: each checkpoint of the run MODEL");
      options.set().dry_run().output("directory for evaluation.json, with --answers answers.json");
    });

}  // namespace weft::commands
