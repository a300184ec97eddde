// SPDX-License-Identifier: Apache-2.0
//
// weft benchmark INPUT: the phases of a step compared with the limits of the machine, for every case of the input.
// Batches are in memory: neither files nor the loader are measured.
#include "commands/shared/benchmark.hpp"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "base/log.hpp"
#include "bench/tune_algorithms.hpp"
#include "commands/commands.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "parallel/affinity.hpp"
#include "storage/durable.hpp"
#include "training/algorithms.hpp"
#include "training/run_directory.hpp"

namespace weft::commands {
namespace {

struct Case : bench::BenchmarkCase {
  Input input;
  parallel::GridShape shape;
};

/// Keys of the whole process or of the whole table, which a case cannot have to itself.
constexpr std::string_view kShared[] = {"run.output",
                                        "device.threads",
                                        "device.affinity",
                                        "device.algorithms",
                                        "parallel.timeout",
                                        "parallel.nvls",
                                        "benchmark.cases",
                                        "benchmark.checkpoint",
                                        "benchmark.compare_ratio",
                                        "benchmark.peak_tflops",
                                        "benchmark.loss_tolerance"};

void refuse_shared_keys(const bench::BenchmarkCase& one) {
  for (const std::string& set : one.sets) {
    std::string key = set.substr(0, set.find('='));
    key.erase(key.find_last_not_of(" \t") + 1);
    if (std::find(std::begin(kShared), std::end(kShared), key) != std::end(kShared))
      throw collective_error(ExitCode::usage,
                             "benchmark.cases: \"{}\" sets {} (all cases share it); set it outside the cases, and "
                             "measure each value in a run of its own",
                             one.name, key);
  }
}

/// The input once more, with the overrides of one case and the grid that they give. Collective.
std::unique_ptr<Case> read_case(const Request& request, const Input& input, const std::string& text,
                                const BenchmarkFamily& family, const parallel::World& world) {
  auto one = std::make_unique<Case>(Case{bench::parse_case(text), {}, {}});
  refuse_shared_keys(*one);
  family.resolve(input, *one);
  Request own = request;
  if (one->obstacle.empty()) own.sets.insert(own.sets.end(), one->sets.begin(), one->sets.end());
  read_input(own, schema(one->input, request.command), world);
  try {
    family.use_ranks(one->input, world);
    one->shape = family.grid(one->input, world);
    family.check(one->input, world);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("case \"{}\": {}", one->name, error.what()), error.known_to());
  }
  return one;
}

/// A checkpoint of the state that the input itself describes. Collective.
bench::CheckpointResult measure_own_checkpoint(Input input, const BenchmarkFamily& family, const parallel::World& world,
                                               const parallel::Grid& grid, const device::Runtime& runtime) {
  family.take_checkpoint_case(input);
  const auto subject = family.subject(input, grid, runtime, world);
  subject->build();
  return bench::measure_checkpoint(std::filesystem::path(family.run(input).output) / "benchmark_checkpoint",
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
  const std::unique_ptr<BenchmarkFamily> family =
      request.command == Command::language_benchmark ? language_model_benchmark() : transcoder_benchmark();
  Input input;
  read_input(request, schema(input, request.command), world);
  family->use_ranks(input, world);
  const bench::BenchmarkSettings& settings = family->settings(input);
  std::vector<std::unique_ptr<Case>> cases;
  for (const std::string& text : settings.cases) cases.push_back(read_case(request, input, text, *family, world));
  report::Json reference;
  if (!request.compare.empty())
    world.on_root([&]() -> std::string { return reference = bench::read_reference(request.compare), ""; });
  const std::filesystem::path directory = family->run(input).output;
  const parallel::GridShape shape = family->grid(input, world);
  training::require_usable_output(world, directory);
  training::use_recorded_algorithms(family->device(input).algorithms, world);  // sizes of workspaces depend on them
  if (request.dry_run) {
    std::string text;
    report::Json document = {{"cases", report::Json::array()}};
    for (const std::unique_ptr<Case>& one : cases) {
      if (one->obstacle.empty()) one->obstacle = family->obstacle(one->input, world, true);
      text += fmt::format("{}{}: {}", text.empty() ? "" : "\n", one->name,
                          one->obstacle.empty() ? family->plan(one->input) : "not measured, " + one->obstacle);
      document["cases"].push_back({{"name", one->name}, {"measured", one->obstacle.empty()}});
      if (!one->obstacle.empty()) document["cases"].back()["obstacle"] = one->obstacle;
    }
    print_result(request, text, document);
    return 0;
  }
  world.on_root([&]() -> std::string { return storage::make_directory(directory), ""; });

  // 2. The machine and its limits.
  const device::Settings device = family->device(input);
  const device::Runtime runtime(device, world.node_rank(), parallel::bind_to_cpus(world, device));
  const parallel::Grid grid(world, shape);
  bench::BenchmarkResult result;
  result.device = runtime.description();
  result.gpu = device::gpu_name(world.node_rank());
  result.input = std::filesystem::path(request.subject).stem().string();
  result.ranks = world.size();
  result.grid = shape.sizes();
  result.steps = settings.warmup + settings.steps;
  log::info("{}; {} ranks, grid {}", result.device, world.size(), shape.text());
  result.machine = {training::measure_copy(runtime.execution(), world.all()),
                    family->measure_product(input, grid, runtime.execution())};

  // 3. Every case. Tuning needs one step of each, which makes all products.
  training::Profile profile(request.profile && !request.tune, world, runtime);  // profile of the first case
  for (const std::unique_ptr<Case>& one : cases) {
    if (one->obstacle.empty()) one->obstacle = family->obstacle(one->input, world, false);
    if (!one->obstacle.empty()) {
      log::info("case {} is not measured: {}", one->name, one->obstacle);
      result.not_measured.push_back({one->name, one->obstacle});
      continue;
    }
    std::optional<parallel::Grid> own;
    const bool same = one->shape.sizes() == shape.sizes();
    const auto subject = family->subject(one->input, same ? grid : own.emplace(world, one->shape), runtime, world);
    if (request.tune) {
      subject->build();
      subject->step();
      subject->settle();
      continue;
    }
    result.cases.push_back(bench::measure(*one, *subject, family->settings(one->input), result.machine, world));
    result.cases.back().grid = one->shape.sizes();
    log::info("{}: {:.1f} ms/step{}", result.cases.back().name, result.cases.back().ms_per_step,
              same ? "" : fmt::format(", grid {}", one->shape.text()));
    if (profile.active()) result.profile = profile.conclude(directory, subject->phase_bytes());
  }
  if (request.tune) {
    bench::tune_algorithms(runtime.execution(), directory / "algorithms.json");
    return 0;
  }
  if (settings.checkpoint) result.checkpoint = measure_own_checkpoint(input, *family, world, grid, runtime);
  family->judge(input, result);

  // 4. Print, write, compare.
  const report::Json document = bench::to_json(result);
  print_result(request, bench::to_table(result), document);
  std::int64_t slower = 0;
  world.on_root([&]() -> std::string {
    report::write_json(directory / "benchmark.json", document);
    storage::write_text_atomically(directory / "benchmark.csv", bench::to_csv(result));
    log::info("results in {}: benchmark.json, benchmark.csv", directory.string());
    if (request.compare.empty()) return {};
    const bench::Comparison comparison = bench::compare(result, reference, settings.compare_ratio);
    log::info("{}", comparison.text);
    slower = comparison.slower;
    return {};
  });
  world.all().broadcast(&slower, sizeof slower);
  if (slower != 0)
    throw collective_error(ExitCode::internal,
                           "slower than {} (benchmark.compare_ratio = {:.2f}); see which phase in benchmark.json",
                           request.compare, settings.compare_ratio);
  return 0;
}

}  // namespace weft::commands
