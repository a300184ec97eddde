// SPDX-License-Identifier: Apache-2.0
//
// weft lm merge CHECKPOINT --output DIR: the same language model without adapters, which are added to its weights.
#include <filesystem>
#include <vector>

#include "base/format.hpp"
#include "checkpoint/checkpoint_writer.hpp"
#include "commands/language_model/opened.hpp"
#include "device/runtime.hpp"
#include "input/print.hpp"
#include "language_model/run/stored_tokenizer.hpp"
#include "language_model/step/adapters.hpp"
#include "parallel/affinity.hpp"
#include "run/build.hpp"

namespace weft::commands {

static int run_merge(const Request& request, const parallel::World& world) {
  // 1. The checkpoint, which has adapters.
  if (request.output.empty())
    throw collective_error(ExitCode::usage,
                           "weft lm merge needs --output DIR (the merged checkpoint is written there)");
  if (world.size() > 1)
    throw collective_error(ExitCode::usage, "weft lm merge runs on one process (it is bound by the disk); use one");
  NewDirectory output(world, request.output);
  OpenedModel opened(request, world);
  if (!opened.found)
    throw collective_error(ExitCode::usage, "{}: is no checkpoint (only those have adapters to merge); name one",
                           opened.name());
  const language_model::Configuration& configuration = opened.configuration();
  const device::Runtime runtime(language_model::device_settings(configuration), world.node_rank(),
                                parallel::bind_to_cpus(world, configuration.device));
  const kernels::Execution& execution = runtime.execution();
  if (opened.architecture.lora.rank == 0)
    throw collective_error(ExitCode::usage, "{}: has no adapters (it was trained without lora.rank)", opened.name());

  // 2. The weights with the adapters, and the tokeniser.
  const parallel::Grid grid(world, language_model::single_process());
  const language_model::Model model(language_model::base_of(opened.architecture), configuration.optimizer.state,
                                    grid.shape(), 0, execution, model::Moments::none);
  opened.load(model, world, execution);
  checkpoint::Registry registry;
  model.parameters().add_to(registry);
  const std::optional<language_model::Tokenizer> tokenizer = opened.tokenizer(world, execution);
  const std::string text = tokenizer ? tokenizer->stored_text() : "";
  std::vector<std::uint8_t> bytes(text.begin(), text.end());
  if (!bytes.empty()) registry.add(language_model::tokenizer_tensor(bytes, true));

  // 3. The checkpoint, whose input has no adapters.
  opened.input.configuration.lora = {};
  opened.input.configuration.initial = {};
  const checkpoint::Manifest& trained = opened.found->manifest;
  checkpoint::Manifest manifest;
  manifest.step = trained.step;
  manifest.tokens = trained.tokens;
  manifest.cursor = trained.cursor;
  manifest.grid = grid.shape().sizes();
  manifest.input = input::print(bench::language_keys(opened.input));
  manifest.original_input = trained.original_input;
  manifest.code_revision = run::build_record.revision;
  manifest.libraries = library_versions();
  manifest.dataset_fingerprint = trained.dataset_fingerprint;
  manifest.extra = json_text(language_model::manifest_extra(model.architecture()));
  checkpoint::Writer writer(world.all(), output.place() / "checkpoints", configuration.checkpoint, registry, execution);
  writer.start(manifest);
  const auto written = writer.finish();
  if (!written || !written->durable)
    throw collective_error(ExitCode::io, "{}: the merged checkpoint could not be written{}", request.output,
                           written ? " (" + written->failure + ")" : "");
  output.publish();
  const std::string path = output.published(written->path);
  print_written(request,
                fmt::format("{}: {} with its adapters merged, {} parameters (weights only, without moments)", path,
                            opened.name(), format::grouped(model::elements_of(model.parameters().specs()))),
                {{"output", request.output}, {"checkpoint", path}, {"model", opened.name()}});
  return 0;
}

extern const Command lm_merge_command = with_options(
    {"lm merge", "CHECKPOINT", "a checkpoint with its adapters merged into the weights",
     "Writes a checkpoint of a language model without adapters ([lora]): they are added to the weights, which can then "
     "be trained further, as a whole or with new adapters."},
    run_merge, [](Options& options) {
      options.example("weft lm merge runs/adapters --output merged");
      options.add("--output", options.request.output, "DIR", "a new directory for the checkpoint");
    });

}  // namespace weft::commands
