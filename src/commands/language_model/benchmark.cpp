// SPDX-License-Identifier: Apache-2.0
//
// weft benchmark of a language model: optimisations one by one and together, compared with a baseline without any. A
// row counts if the baseline was measured and has the same loss after as many steps.
#include "commands/shared/benchmark.hpp"

#include "bench/language_model/language_subject.hpp"
#include "bench/language_model/named_cases.hpp"

namespace weft::commands {
namespace {

class LanguageModelBenchmark final : public BenchmarkFamily {
 public:
  bench::BenchmarkSettings& settings(Input& input) const override { return input.language_benchmark; }
  const training::RunSettings& run(const Input& input) const override { return input.language.run; }
  device::Settings device(const Input& input) const override { return language_model::device_settings(input.language); }
  parallel::GridShape grid(const Input& input, const parallel::World&) const override {
    return language_model::grid_shape(input.language);
  }
  void use_ranks(Input& input, const parallel::World& world) const override {
    language_model::use_ranks(input.language, world.size());
  }
  double measure_product(const Input& input, const parallel::Grid& grid,
                         const kernels::Execution& execution) const override {
    const language_model::ModelSettings& model = input.language.language_model;
    return training::measure_product(execution, input.language.micro_tokens(), model.d_mlp, model.d_model,
                                     grid.world());
  }
  void resolve(const Input& input, bench::BenchmarkCase& one) const override {
    bench::resolve(input.language, input.language_benchmark.batch_tokens, one);
  }
  void check(const Input& input, const parallel::World& world) const override {
    bench::check_data(input.language, input.language_benchmark, world);
  }
  std::string obstacle(const Input& input, const parallel::World& world, bool dry) const override {
    return bench::obstacle(input.language, input.language_benchmark, world, dry);
  }
  std::string plan(const Input& input) const override {
    return bench::plan_text(input.language, input.language_benchmark);
  }
  std::unique_ptr<bench::BenchmarkSubject> subject(const Input& input, const parallel::Grid& grid,
                                                   const device::Runtime& runtime,
                                                   const parallel::World&) const override {
    return bench::language_subject(input.language, input.language_benchmark, grid, runtime.execution());
  }
  void take_checkpoint_case(Input& input) const override { input.language_benchmark.batches = 1; }
  void judge(const Input& input, bench::BenchmarkResult& result) const override {
    result.peak_tflops = input.language_benchmark.peak_tflops;
    bench::judge(result, bench::kBaseline, input.language_benchmark.loss_tolerance);
  }
};

}  // namespace

std::unique_ptr<BenchmarkFamily> language_model_benchmark() { return std::make_unique<LanguageModelBenchmark>(); }

}  // namespace weft::commands
