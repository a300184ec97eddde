// SPDX-License-Identifier: Apache-2.0
//
// weft benchmark of a transcoder: cases are the input with overrides; the case named dense is the dense formulation.
#include "commands/shared/benchmark.hpp"

#include "parallel/nccl.hpp"
#include "transcoder/benchmark/subject.hpp"

namespace weft::commands {
namespace {

class TranscoderBenchmark final : public BenchmarkFamily {
 public:
  training::BenchmarkSettings& settings(Input& input) const override { return input.benchmark; }
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
  void resolve(const Input&, training::BenchmarkCase& one) const override {
    if (one.name == "dense") one.sets.insert(one.sets.begin(), "benchmark.formulation=dense");
  }
  std::string obstacle(const Input& input, const parallel::World& world, bool) const override {
    return transcoder::obstacle(input.configuration, input.benchmark, world);
  }
  std::string plan(const Input&) const override { return "its memory is not planned"; }
  std::unique_ptr<training::BenchmarkSubject> subject(const Input& input, const parallel::Grid& grid,
                                                      const device::Runtime& runtime) const override {
    parallel::nccl::allow_multicast(input.configuration.parallel.nvls);
    return transcoder::benchmark_subject(input.configuration, input.benchmark, grid, runtime.execution(),
                                         runtime.threads());
  }
  void take_checkpoint_case(Input& input) const override {
    input.benchmark.batches = 1;
    input.benchmark.formulation = transcoder::Formulation::sparse;
  }
  void judge(const Input&, training::BenchmarkResult&) const override {}  // cases may be different problems
};

}  // namespace

std::unique_ptr<BenchmarkFamily> transcoder_benchmark() { return std::make_unique<TranscoderBenchmark>(); }

}  // namespace weft::commands
