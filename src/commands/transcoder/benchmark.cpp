// SPDX-License-Identifier: Apache-2.0
//
// weft benchmark of a transcoder: cases are the input with overrides; the case named dense is the dense formulation.
#include "commands/shared/benchmark.hpp"

#include "bench/transcoder/transcoder_subject.hpp"
#include "commands/commands.hpp"
#include "commands/language_model/model_rows.hpp"
#include "parallel/nccl.hpp"

namespace weft::commands {
namespace {

/// data.train, or rows of data.model.
struct DataOfInput final : bench::TrainingData {
  DataOfInput(const transcoder::Configuration& configuration, const device::Runtime& runtime,
              const parallel::World& world) {
    if (!configuration.data.model.empty()) rows.emplace(configuration, world);
    data = rows ? transcoder::describe_datasets(configuration.data, world, rows->datasets())
                : transcoder::describe_datasets(configuration.data, world);
    if (rows) running.emplace(*rows, data, runtime, world);
    description = data.train;
  }

  std::optional<ModelRows> rows;
  transcoder::Datasets data;
  std::optional<RunningModel> running;
};

class TranscoderBenchmark final : public BenchmarkFamily {
 public:
  bench::BenchmarkSettings& settings(Input& input) const override { return input.benchmark; }
  const training::RunSettings& run(const Input& input) const override { return input.configuration.run; }
  device::Settings device(const Input& input) const override {
    return transcoder::device_settings(input.configuration);
  }
  parallel::GridShape grid(const Input& input, const parallel::World& world) const override {
    const parallel::Settings& settings = input.configuration.parallel;
    return parallel::grid_shape(settings.data, {std::string(parallel::kFeatureAxis), settings.feature}, world.size());
  }
  double measure_product(const Input& input, const parallel::Grid& grid,
                         const kernels::Execution& execution) const override {
    return training::measure_product(execution,
                                     grid.part(parallel::kDataAxis, input.configuration.data.batch_tokens).size(),
                                     grid.part(parallel::kFeatureAxis, input.configuration.transcoder.features).size(),
                                     input.benchmark.d_model, grid.world());
  }
  void resolve(const Input&, bench::BenchmarkCase& one) const override {
    if (one.name == "dense") one.sets.insert(one.sets.begin(), "benchmark.formulation=dense");
  }
  std::string obstacle(const Input& input, const parallel::World& world, bool) const override {
    return bench::obstacle(input.configuration, input.benchmark, world);
  }
  std::string plan(const Input&) const override { return "its memory is not planned"; }
  void check(const Input& input, const parallel::World& world) const override {
    const transcoder::Configuration& configuration = input.configuration;
    if (input.benchmark.from == bench::Batches::data && configuration.data.model.empty())
      require_directory(world, configuration.data.train, "data.train");
  }
  std::unique_ptr<bench::BenchmarkSubject> subject(const Input& input, const parallel::Grid& grid,
                                                   const device::Runtime& runtime,
                                                   const parallel::World& world) const override {
    parallel::nccl::allow_multicast(input.configuration.parallel.nvls);
    std::unique_ptr<bench::TrainingData> data;
    if (input.benchmark.from == bench::Batches::data)
      data = std::make_unique<DataOfInput>(input.configuration, runtime, world);
    return bench::transcoder_subject(input.configuration, input.benchmark, world, grid, runtime.execution(),
                                     runtime.threads(), std::move(data));
  }
  void take_checkpoint_case(Input& input) const override {
    input.benchmark.batches = 1;
    input.benchmark.formulation = bench::Formulation::sparse;
  }
  void judge(const Input&, bench::BenchmarkResult&) const override {}  // cases may be different problems
};

}  // namespace

std::unique_ptr<BenchmarkFamily> transcoder_benchmark() { return std::make_unique<TranscoderBenchmark>(); }

}  // namespace weft::commands
