// SPDX-License-Identifier: Apache-2.0
//
// weft evaluate CHECKPOINT [--data DIR]: measures the quality of a transcoder on validation data.
#include <filesystem>

#include "base/log.hpp"
#include "checkpoint/resume.hpp"
#include "commands/commands.hpp"
#include "device/runtime.hpp"
#include "parallel/nccl.hpp"
#include "report/format.hpp"
#include "training/profile.hpp"
#include "transcoder/benchmark/work.hpp"
#include "transcoder/result.hpp"
#include "transcoder/statistics_state.hpp"

namespace weft::commands {

int evaluate(const Request& request, const parallel::World& world) {
  // 1. The checkpoint, and the input that it was trained with.
  const checkpoint::Found found = open_checkpoint(request.subject, world);
  require_kind(found, "encoder_0/weight", "weft lm evaluate is for language models");
  Input input;
  const input::Schema schema = commands::schema(input, request.command);
  read_input_of(found, request, schema, world, request.data.empty() ? "" : "data.stored_as");
  transcoder::Configuration& configuration = input.configuration;
  const std::string path = request.data.empty() ? configuration.data.validation : request.data;
  if (path.empty())
    throw collective_error(ExitCode::usage, "no data to evaluate on (the run has no data.validation); give --data DIR");

  if (request.profile && request.output.empty())
    throw collective_error(ExitCode::usage, "--profile needs --output DIR (profile.json is written there)");

  // 2. The data, and a transcoder without moments.
  require_directory(world, path, request.data.empty() ? "data.validation" : "--data");
  const dataset::Description description = dataset::describe(world, path, configuration.data);
  const device::Runtime runtime(transcoder::device_settings(configuration), world.node_rank(), world.node_size());
  parallel::nccl::allow_multicast(configuration.parallel.nvls);
  const kernels::Execution& execution = runtime.execution();
  training::Profile profile(request.profile, world, runtime);
  const parallel::Grid grid(world, parallel::data_by_feature(1, world.size()));
  const dataset::Statistics statistics =
      transcoder::load_statistics(world, found, description.n_layers, description.d_model, path, execution);
  const transcoder::NormalisationOnDevice normalisation(
      dataset::normalisation(statistics, description, configuration.data.normalise), statistics, execution);
  const transcoder::Model model(
      transcoder::shape_of(configuration.transcoder, description.n_layers, description.d_model),
      configuration.optimizer.state, grid, execution, transcoder::Moments::none);
  checkpoint::Registry registry;
  model.add_to(registry);
  checkpoint::load(world.all(), found, registry, execution, checkpoint::Load::part);

  // 3. Measure, print, record.
  report::Timers timers;
  training::StepArena arena(execution, grid);
  transcoder::Forward forward(configuration, model, normalisation, grid, execution, timers,
                              configuration.data.batch_tokens, arena);
  const transcoder::EvaluationResult result = transcoder::evaluate(description, model, normalisation, forward, world,
                                                                   grid, execution, configuration.data.batch_tokens);
  report::Json record = {{"checkpoint", found.path.string()}, {"step", found.manifest.step}, {"data", path}};
  record["validation"] = transcoder::to_json(result);
  log::info("{} (step {}) on {}, {} tokens:\n{}", found.path.string(), found.manifest.step, path,
            report::grouped(result.tokens), transcoder::to_table(result));
  if (const auto recovery =
          transcoder::recovered(path, model, normalisation, world, grid, execution, runtime.threads())) {
    record["recovery"] = transcoder::to_json(*recovery);
    if (recovery->counted > 0)
      log::info("planted features recovered: {} of {} ({:.1f} %)", recovery->recovered, recovery->counted,
                100 * recovery->fraction);
  }
  if (request.output.empty()) return 0;
  world.on_root([&]() -> std::string {
    std::filesystem::create_directories(request.output);
    return {};
  });
  if (profile.active())
    record["profile"] = profile.conclude(
        request.output, transcoder::phase_bytes(transcoder::Formulation::sparse,
                                                transcoder::step_sizes(configuration, model.shape(), grid, result.l0)));
  if (world.is_root()) report::write_json(std::filesystem::path(request.output) / "evaluation.json", record);
  return 0;
}

}  // namespace weft::commands
