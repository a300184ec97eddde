// SPDX-License-Identifier: Apache-2.0
//
// weft evaluate CHECKPOINT [--data DIR]: measures the quality of a transcoder on validation data.
#include <filesystem>

#include "base/format.hpp"
#include "base/trace.hpp"
#include "commands/transcoder/loaded_transcoder.hpp"
#include "run/profile.hpp"
#include "storage/durable.hpp"
#include "transcoder/run/result.hpp"
#include "transcoder/run/step_work.hpp"

namespace weft::commands {

static int run_evaluate(const Request& request, const std::string& data, const parallel::World& world) {
  if (request.profile && request.output.empty())
    throw collective_error(ExitCode::usage, "--profile needs --output DIR (profile.json is written there)");

  // 1. The transcoder and the data.
  LoadedTranscoder loaded(request, data, world);
  const kernels::Execution& execution = loaded.execution();
  run::Profile profile(request.profile, world, loaded.runtime);

  // 2. Measure, print, record.
  if (!request.output.empty()) world.on_root([&] { storage::make_directory(request.output); });
  const transcoder::EvaluationResult result =
      transcoder::evaluate(loaded.description, loaded.model, loaded.normalisation, loaded.forward, world, loaded.grid,
                           execution, loaded.batch_tokens(), trace::next_step);
  trace::end_steps();
  if (world.is_root()) transcoder::warn_of_constant_layers(loaded.description, result);
  const transcoder::DecoderSummary decoder = transcoder::summarise_decoder(loaded.model, loaded.grid, execution);
  Json record = {
      {"checkpoint", loaded.found.path.string()}, {"step", loaded.found.manifest.step}, {"data", loaded.data}};
  record["validation"] = transcoder::to_json(result);
  record["validation"].update(transcoder::to_json(decoder));
  std::string text = fmt::format("{} (step {}) on {}, {} tokens:\n{}\n{}", loaded.found.path.string(),
                                 loaded.found.manifest.step, loaded.data, format::grouped(result.tokens),
                                 transcoder::to_table(result), transcoder::to_table(result, decoder));
  if (const auto recovery = transcoder::recovered(loaded.description, loaded.model, loaded.normalisation, world,
                                                  loaded.grid, execution, loaded.runtime.threads())) {
    record["recovery"] = transcoder::to_json(*recovery);
    if (recovery->counted > 0)
      text += fmt::format("\nplanted features recovered: {} of {} ({:.1f} %)", recovery->recovered, recovery->counted,
                          100 * recovery->fraction);
  }
  print_result(request, text, record);
  if (request.output.empty()) return 0;
  if (profile.active())
    record["profile"] =
        profile.conclude(request.output, transcoder::phase_bytes(transcoder::step_sizes(
                                             loaded.configuration(), loaded.model.shape(), loaded.grid, result.l0)));
  if (world.is_root()) storage::write_json(std::filesystem::path(request.output) / "evaluation.json", record);
  return 0;
}

extern const Command evaluate_command = with_options(
    {"evaluate", "CHECKPOINT", "quality on validation data, per layer",
     "Measures a transcoder on data that it was not trained on: errors, explained variance, active and dead features "
     "per layer; on planted data the features recovered."},
    run_evaluate, [](Options& options, std::string& data) {
      options.example("weft evaluate runs/quickstart --data activations/validation");
      data_option(options, data).set().output("directory for evaluation.json");
      options.flag("--profile", options.request.profile,
                   "with --output: write a time line (profile.json, for ui.perfetto.dev) and five figures");
    });

}  // namespace weft::commands
