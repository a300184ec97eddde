// SPDX-License-Identifier: Apache-2.0
//
// weft benchmark INPUT: the phases of a step compared with the limits of the machine, for every case of the input.
// Batches are in memory: neither files nor the loader are measured.
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
#include "commands/family.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "parallel/affinity.hpp"
#include "run/algorithms.hpp"
#include "run/run_directory.hpp"
#include "storage/durable.hpp"

namespace weft::commands {
namespace {

struct BenchmarkOptions {
  std::string compare;  ///< "" or FILE
  bool tune = false;
};

struct Case : bench::BenchmarkCase {
  std::unique_ptr<bench::BenchmarkModel> model = {};
  parallel::GridShape shape = {};
};

/// The family of the input with this text: the last one whose table it has, or the first one.
const Family& family_of(std::string_view text) {
  const Family* found = families().front();
  for (const Family* family : families())
    if (input::has_table(text, family->table)) found = family;
  return *found;
}

Keys keys_of_family(std::string_view text) {
  const std::shared_ptr<bench::BenchmarkModel> input = family_of(text).benchmark();
  return {input, input->keys()};
}

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
Case read_case(const Request& request, const bench::BenchmarkModel& input, const std::string& text,
               const Family& family, const parallel::World& world) {
  Case one{bench::parse_case(text)};
  refuse_shared_keys(one);
  input.resolve(one);
  Request own = request;
  if (one.obstacle.empty()) own.sets.insert(own.sets.end(), one.sets.begin(), one.sets.end());
  one.model = family.benchmark();
  read_input(own, one.model->keys(), world);
  try {
    one.model->use_ranks(world);
    one.shape = one.model->grid(world);
    one.model->check(world);
  } catch (const Error& error) {
    throw Error(error.code(), fmt::format("case \"{}\": {}", one.name, error.what()), error.known_to());
  }
  return one;
}

/// A checkpoint of the state that the input itself describes. Collective.
bench::CheckpointResult measure_own_checkpoint(bench::BenchmarkModel& input, const parallel::World& world,
                                               const parallel::Grid& grid, const device::Runtime& runtime) {
  input.take_checkpoint_case();
  const auto subject = input.subject(grid, runtime, world);
  subject->build();
  return bench::measure_checkpoint(std::filesystem::path(input.run().output) / "benchmark_checkpoint",
                                   subject->registry(), runtime.execution(), world, [&] {
                                     subject->step();
                                     subject->wait();
                                   });
}

int run_benchmark(const Request& request, const BenchmarkOptions& options, const parallel::World& world) {
  // 1. The input, once for itself and once for every case; errors are reported before anything is timed.
  if (options.tune && !kernels::kCudaBuild)
    throw collective_error(ExitCode::usage,
                           "--tune: nothing can be tuned here (the CPU's dense library offers no choice of "
                           "algorithms); leave it out");
  const Family& family = family_of(request.input_text);
  const std::unique_ptr<bench::BenchmarkModel> input = family.benchmark();
  read_input(request, input->keys(), world);
  input->use_ranks(world);
  const bench::BenchmarkSettings& settings = input->settings();
  std::vector<Case> cases;
  for (const std::string& text : settings.cases) cases.push_back(read_case(request, *input, text, family, world));
  Json reference;
  if (!options.compare.empty()) world.on_root([&] { reference = bench::read_reference(options.compare); });
  const std::filesystem::path directory = input->run().output;
  const parallel::GridShape shape = input->grid(world);
  run::require_usable_output(world, directory);
  run::use_recorded_algorithms(input->device().algorithms, world);  // sizes of workspaces depend on them
  if (request.dry_run) {
    std::string text;
    Json document = {{"cases", Json::array()}};
    for (Case& one : cases) {
      if (one.obstacle.empty()) one.obstacle = one.model->obstacle(world, true);
      text += fmt::format("{}{}: {}", text.empty() ? "" : "\n", one.name,
                          one.obstacle.empty() ? one.model->plan() : "not measured, " + one.obstacle);
      document["cases"].push_back({{"name", one.name}, {"measured", one.obstacle.empty()}});
      if (!one.obstacle.empty()) document["cases"].back()["obstacle"] = one.obstacle;
    }
    print_result(request, text, document);
    return 0;
  }
  world.on_root([&] { storage::make_directory(directory); });

  // 2. The machine and its limits.
  const device::Settings device = input->device();
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
  result.machine = {run::measure_copy(runtime.execution(), world.all()),
                    input->measure_product(grid, runtime.execution())};

  // 3. Every case. Tuning needs one step of each, which makes all products.
  run::Profile profile(request.profile && !options.tune, world, runtime);  // profile of the first case
  for (Case& one : cases) {
    if (one.obstacle.empty()) one.obstacle = one.model->obstacle(world, false);
    if (!one.obstacle.empty()) {
      log::info("case {} is not measured: {}", one.name, one.obstacle);
      result.not_measured.push_back({one.name, one.obstacle});
      continue;
    }
    std::optional<parallel::Grid> own;
    const bool same = one.shape.sizes() == shape.sizes();
    const auto subject = one.model->subject(same ? grid : own.emplace(world, one.shape), runtime, world);
    if (options.tune) {
      subject->build();
      subject->step();
      subject->wait();
      continue;
    }
    result.cases.push_back(bench::measure(one, *subject, one.model->settings(), result.machine, world));
    result.cases.back().grid = one.shape.sizes();
    log::info("{}: {:.1f} ms/step{}", result.cases.back().name, result.cases.back().ms_per_step,
              same ? "" : fmt::format(", grid {}", one.shape.text()));
    if (profile.active()) result.profile = profile.conclude(directory, subject->phase_bytes());
  }
  if (options.tune) {
    bench::tune_algorithms(runtime.execution(), directory / "algorithms.json");
    return 0;
  }
  if (settings.checkpoint) result.checkpoint = measure_own_checkpoint(*input, world, grid, runtime);
  input->judge(result);

  // 4. Print, write, compare.
  const Json document = bench::to_json(result);
  print_result(request, bench::to_table(result), document);
  std::int64_t slower = 0;
  world.on_root([&] {
    storage::write_json(directory / "benchmark.json", document);
    storage::write_shared_text(directory / "benchmark.csv", bench::to_csv(result));
    log::info("results in {}: benchmark.json, benchmark.csv", directory.string());
    if (options.compare.empty()) return;
    const bench::Comparison comparison = bench::compare(result, reference, settings.compare_ratio);
    log::info("{}", comparison.text);
    slower = comparison.slower;
  });
  world.all().broadcast(&slower, sizeof slower);
  if (slower != 0)
    throw collective_error(ExitCode::internal,
                           "slower than {} (benchmark.compare_ratio = {:.2f}); see which phase in benchmark.json",
                           options.compare, settings.compare_ratio);
  return 0;
}

}  // namespace

extern const Command benchmark_command = with_options(
    {"benchmark", "INPUT", "time the phases of a step, of either kind of model",
     "Times the phases of a training step and compares them with the limits of the machine, for every case of table "
     "[benchmark]. Writes benchmark.json and benchmark.csv; weft report makes a page of them.",
     Needs::device, true, keys_of_family},
    run_benchmark, [](Options& options, BenchmarkOptions& own) {
      options.example("weft benchmark inputs/benchmark_gpt2_small.toml --output benchmark");
      options.add("--compare", own.compare, "FILE",
                  "end with 1 when a case takes longer than benchmark.compare_ratio times this benchmark.json's");
      options.flag("--tune", own.tune, "on a GPU: time products and attention, record the best");
      options.set().templates().dry_run().output("the run directory (run.output)").profile();
    });

}  // namespace weft::commands
