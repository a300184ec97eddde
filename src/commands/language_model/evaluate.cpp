// SPDX-License-Identifier: Apache-2.0
//
// weft lm evaluate CHECKPOINT [--text FILE]: loss, perplexity and bits per byte of a language model on a text.
#include <filesystem>

#include "base/log.hpp"
#include "checkpoint/resume.hpp"
#include "commands/commands.hpp"
#include "device/runtime.hpp"
#include "language_model/plan.hpp"
#include "language_model/training_run.hpp"

namespace weft::commands {
namespace {

/// The part of the training text that the run held out. Throws a collective Error(data) if the text is another one now.
dataset::TokenSet held_out_part(const checkpoint::Found& found, const dataset::TokenSettings& data,
                                const std::optional<language_model::Tokenizer>& tokenizer,
                                const parallel::World& world) {
  const language_model::Corpus corpus = language_model::load_corpus(data, world);
  const bool same = corpus.tokenizer.has_value() == tokenizer.has_value() &&
                    (!tokenizer || corpus.tokenizer->text() == tokenizer->text());
  if (!same || corpus.fingerprint != found.manifest.dataset_fingerprint)
    throw collective_error(ExitCode::data,
                           "{}: has changed since the training (its held-out part is not the one of the run); give "
                           "--text FILE",
                           data.train);
  return *corpus.validation;
}

}  // namespace

int language_model_evaluate(const Request& request, const parallel::World& world) {
  // 1. The checkpoint, and the input that it was trained with.
  const checkpoint::Found found = open_checkpoint(request.subject, world);
  require_kind(found, "embedding/tokens", "weft evaluate is for transcoders");
  Input input;
  const input::Schema schema = commands::schema(input, request.command);
  read_input_of(found, request, schema, world);
  const language_model::Configuration& configuration = input.language;
  if (world.size() > 1)
    throw collective_error(ExitCode::usage, "weft lm evaluate with {} processes (one is supported); start one process",
                           world.size());
  // The text: that of the command line, else the validation data of the run, else the part of its text that it held
  // out.
  const bool held_out = request.text.empty() && configuration.data.validation.empty();
  if (held_out && configuration.data.validation_fraction == 0)
    throw collective_error(ExitCode::usage,
                           "no text to evaluate on (the run has no validation data); give --text FILE");
  const std::string path = held_out               ? configuration.data.train
                           : request.text.empty() ? configuration.data.validation
                                                  : request.text;
  const char* const origin = held_out ? "data.train" : request.text.empty() ? "data.validation" : "--text";
  world.on_root([&]() -> std::string {
    if (!std::filesystem::exists(path))
      throw error(ExitCode::usage, "{} = \"{}\": no such file or directory; correct the path", origin, path);
    return {};
  });

  // 2. The model without moments, and the text in its tokens.
  const language_model::Architecture architecture = language_model::stored_architecture(
      configuration.language_model, configuration.data.sequence, found.manifest.tensors);
  const device::Runtime runtime(language_model::device_settings(configuration), world.node_rank(), world.node_size());
  const kernels::Execution& execution = runtime.execution();
  const std::optional<language_model::Tokenizer> tokenizer = language_model::stored_tokenizer(found, world, execution);
  const dataset::TokenSet text = held_out
                                     ? held_out_part(found, configuration.data, tokenizer, world)
                                     : language_model::load_tokens(path, tokenizer, architecture.vocabulary, world);
  const parallel::Grid grid(world, language_model::single_process());
  const language_model::Model model(architecture, configuration.optimizer.state, grid.shape(), 0, execution,
                                    training::Moments::none);
  checkpoint::Registry registry;
  model.parameters().add_to(registry);
  checkpoint::load(world.all(), found, registry, execution, checkpoint::Load::part);

  // 3. Measure, print, record.
  report::Timers timers;
  training::StepArena arena(execution, grid);
  language_model::TransformerSettings settings = language_model::transformer_settings(configuration, architecture);
  settings.gradients = false;
  language_model::Transformer transformer(model, settings, timers, arena);
  language_model::Staging staging(settings.rows, configuration.data.document_mask, execution, arena);
  const language_model::EvaluationResult result =
      language_model::evaluate(text, configuration.data.sequence, settings.rows, transformer, staging, execution);
  log::info("{} (step {}) on {}: {}", found.path.string(), found.manifest.step, path, language_model::to_text(result));
  if (request.output.empty()) return 0;
  world.on_root([&]() -> std::string {
    std::filesystem::create_directories(request.output);
    return {};
  });
  const report::Json record = {{"checkpoint", found.path.string()},
                               {"step", found.manifest.step},
                               {"data", path},
                               {"validation", language_model::to_json(result)}};
  if (world.is_root()) report::write_json(std::filesystem::path(request.output) / "evaluation.json", record);
  return 0;
}

}  // namespace weft::commands
