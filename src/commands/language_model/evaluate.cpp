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

int language_model_evaluate(const Request& request, const parallel::World& world) {
  // 1. The checkpoint, and the input that it was trained with.
  const checkpoint::Found found = open_checkpoint(request.subject, world);
  require_kind(found, "embedding/tokens", "weft evaluate is for transcoders");
  Input input;
  const input::Schema schema = commands::schema(input, request.command);
  Request trained = request;
  trained.input_text = found.manifest.input;
  trained.subject = (found.path / checkpoint::kManifestName).string();
  read_input(trained, schema, world);
  require_same_model(schema, found);
  const language_model::Configuration& configuration = input.language;
  if (world.size() > 1)
    throw collective_error(ExitCode::usage, "weft lm evaluate with {} processes (one is supported); start one process",
                           world.size());
  const std::string path = request.text.empty() ? configuration.data.validation : request.text;
  if (path.empty())
    throw collective_error(ExitCode::usage,
                           "no text to evaluate on (the run has no data.validation); give --text FILE");

  world.on_root([&]() -> std::string {
    if (!std::filesystem::exists(path))
      throw error(ExitCode::usage, "{} = \"{}\": no such file or directory; correct the path",
                  request.text.empty() ? "data.validation" : "--text", path);
    return {};
  });

  // 2. The model without moments, and the text in its tokens.
  const language_model::Architecture architecture = language_model::stored_architecture(
      configuration.language_model, configuration.data.sequence, found.manifest.tensors);
  const device::Runtime runtime(language_model::device_settings(configuration), world.node_rank(), world.node_size());
  const kernels::Execution& execution = runtime.execution();
  const std::optional<language_model::Tokenizer> tokenizer = language_model::stored_tokenizer(found, world, execution);
  const dataset::TokenSet text = language_model::load_tokens(path, tokenizer, architecture.vocabulary, world);
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
