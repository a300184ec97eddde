// SPDX-License-Identifier: Apache-2.0
//
// weft benchmark of a language model: optimisations one by one and together, compared with a baseline without any. A
// row counts if the baseline was measured and has the same loss after as many steps.
#include "commands/shared/benchmark.hpp"

#include "bench/language_model/language_subject.hpp"
#include "bench/language_model/named_cases.hpp"
#include "kernels/gemm/fp8.hpp"
#include "report/format.hpp"
#include "training/usable_memory.hpp"

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
    bench::resolve(input.language, input.language_benchmark, one);
  }
  void check(const Input& input, const parallel::World& world) const override {
    bench::check_data(input.language, input.language_benchmark, world);
  }
  std::string obstacle(const Input& input, const parallel::World& world, bool dry) const override {
    if (std::string reason = bench::obstacle(input.language, input.language_benchmark); !reason.empty()) return reason;
    if (!dry && input.language.fp8_forward)
      if (std::string reason = kernels::coded_obstacle(device::planned_backend(device(input))); !reason.empty())
        return reason;
    const language_model::Plan plan = bench::plan(input.language, input.language_benchmark);
    const auto check = [](std::int64_t needed, std::int64_t available, const std::string& memory) -> std::string {
      if (available == 0 || needed <= available) return "";
      return fmt::format("it needs {} of {}, {} are available", report::binary_bytes_text(needed), memory,
                         report::binary_bytes_text(available));
    };
    const training::HostShare host = training::usable_host_memory(world);
    const std::int64_t on_device =
        dry ? static_cast<std::int64_t>(input.language.device.memory * 1e9)
            : training::usable_device_bytes(input.language.device, language_model::kContextBytes, world);
    const std::string refused = check(plan.device_total(), on_device, "device memory");
    if (!refused.empty()) return refused;
    return check(plan.host_total() + (kernels::kCudaBuild ? 0 : plan.device_total()), host.bytes,
                 fmt::format("host memory ({})", host.limit));
  }
  std::string plan(const Input& input) const override {
    const language_model::Plan plan = bench::plan(input.language, input.language_benchmark);
    return fmt::format("{} parameters, {} where the kernels run, {} on the host", report::grouped(plan.parameters),
                       report::binary_bytes_text(plan.device_total()), report::binary_bytes_text(plan.host_total()));
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
