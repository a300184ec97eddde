// SPDX-License-Identifier: Apache-2.0
//
// weft benchmark INPUT: the phases of a step compared with the limits of the machine, for every case of the input.
// Batches are in memory: neither files nor the loader are measured.
#include "training/benchmark.hpp"

#include <filesystem>
#include <memory>
#include <vector>

#include "base/log.hpp"
#include "commands/commands.hpp"
#include "device/runtime.hpp"
#include "kernels/runtime.hpp"
#include "parallel/nccl.hpp"
#include "storage/durable.hpp"
#include "training/algorithms.hpp"
#include "training/run_directory.hpp"
#include "transcoder/benchmark/subject.hpp"

namespace weft::commands {
namespace {

struct Case : training::BenchmarkCase {
  Input input;
};

/// The input once more, with the overrides of one case. Collective.
std::unique_ptr<Case> read_case(const Request& request, const std::string& text, const parallel::World& world) {
  auto one = std::make_unique<Case>(Case{training::parse_case(text), {}});
  Request own = request;
  if (one->name == "dense") own.sets.push_back("benchmark.formulation=dense");
  own.sets.insert(own.sets.end(), one->sets.begin(), one->sets.end());
  read_input(own, schema(one->input, request.command), world);
  return one;
}

/// A checkpoint of the state that the input itself describes. Collective.
training::CheckpointResult measure_own_checkpoint(const Input& input, const parallel::World& world,
                                                  const parallel::Grid& grid, const device::Runtime& runtime) {
  transcoder::BenchmarkSettings settings = input.benchmark;
  settings.batches = 1;
  settings.formulation = transcoder::Formulation::sparse;
  const auto subject =
      transcoder::benchmark_subject(input.configuration, settings, grid, runtime.execution(), runtime.threads());
  subject->build();
  return training::measure_checkpoint(std::filesystem::path(input.configuration.run.output) / "benchmark_checkpoint",
                                      subject->registry(), runtime.execution(), world, [&] {
                                        subject->step();
                                        subject->settle();
                                      });
}

}  // namespace

int benchmark(const Request& request, const parallel::World& world) {
  // 1. The input, once for itself and once for every case; errors are reported before anything is timed.
  if (request.tune && !kernels::kCudaBuild)
    throw collective_error(ExitCode::usage,
                           "--tune: nothing can be tuned here (the CPU's dense library offers no choice of "
                           "algorithms); leave it out");
  Input input;
  read_input(request, schema(input, request.command), world);
  std::vector<std::unique_ptr<Case>> cases;
  for (const std::string& text : input.benchmark.cases) cases.push_back(read_case(request, text, world));
  report::Json reference;
  if (!request.compare.empty())
    world.on_root([&]() -> std::string { return reference = training::read_reference(request.compare), ""; });
  const transcoder::Configuration& configuration = input.configuration;
  const std::filesystem::path directory = configuration.run.output;
  const parallel::GridShape shape = parallel::grid_shape(
      configuration.parallel.data, {std::string(parallel::kFeatureAxis), configuration.parallel.feature}, world.size());
  training::require_usable_output(world, directory);
  if (request.dry_run) return 0;
  world.on_root([&]() -> std::string { return std::filesystem::create_directories(directory), ""; });

  // 2. The machine and its limits.
  const device::Runtime runtime(transcoder::device_settings(configuration), world.node_rank(), world.node_size());
  parallel::nccl::allow_multicast(configuration.parallel.nvls);
  const parallel::Grid grid(world, shape);
  training::BenchmarkResult result;
  result.device = runtime.description();
  result.ranks = world.size();
  result.grid = shape.sizes();
  log::info("{}; {} ranks, grid {}", result.device, world.size(), shape.text());
  result.machine = {training::measure_copy(runtime.execution(), world.all()),
                    training::measure_product(
                        runtime.execution(), grid.part(parallel::kDataAxis, configuration.data.batch_tokens).size(),
                        grid.part(parallel::kFeatureAxis, configuration.transcoder.features).size(),
                        input.benchmark.d_model, world.all())};

  // 3. Every case. Tuning needs one step of each, which makes all products.
  training::use_recorded_algorithms(configuration.device.algorithms, world);
  training::Profile profile(request.profile && !request.tune, world, runtime);  // of the first case
  for (const std::unique_ptr<Case>& one : cases) {
    const transcoder::BenchmarkSettings& settings = one->input.benchmark;
    if (const std::string reason = transcoder::obstacle(one->input.configuration, settings, world); !reason.empty()) {
      log::info("case {} is skipped: {}", one->name, reason);
      continue;
    }
    const auto subject =
        transcoder::benchmark_subject(one->input.configuration, settings, grid, runtime.execution(), runtime.threads());
    if (request.tune) {
      subject->build();
      subject->step();
      subject->settle();
      continue;
    }
    result.cases.push_back(training::measure(*one, *subject, settings, result.machine, world));
    log::info("{}: {:.1f} ms/step", result.cases.back().name, result.cases.back().ms_per_step);
    if (profile.active()) result.profile = profile.conclude(directory, subject->phase_bytes());
  }
  if (request.tune) {
    training::tune_algorithms(runtime.execution(), directory / "algorithms.json");
    return 0;
  }
  if (input.benchmark.checkpoint) result.checkpoint = measure_own_checkpoint(input, world, grid, runtime);

  // 4. Print, write, compare.
  log::info("{}", training::to_table(result));
  std::int64_t slower = 0;
  world.on_root([&]() -> std::string {
    report::write_json(directory / "benchmark.json", training::to_json(result));
    storage::write_text_atomically(directory / "benchmark.svg", training::to_svg(result));
    log::info("results in {}: benchmark.json, benchmark.svg", directory.string());
    if (request.compare.empty()) return {};
    const training::Comparison comparison = training::compare(result, reference, input.benchmark.compare_ratio);
    log::info("{}", comparison.text);
    slower = comparison.slower;
    return {};
  });
  world.all().broadcast(&slower, sizeof slower);
  if (slower != 0)
    throw collective_error(ExitCode::internal,
                           "slower than {} (benchmark.compare_ratio = {:.2f}); see which phase in benchmark.json",
                           request.compare, input.benchmark.compare_ratio);
  return 0;
}

}  // namespace weft::commands
