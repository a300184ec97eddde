// SPDX-License-Identifier: Apache-2.0
//
// Transcoders as a model family: their inputs, and what weft inspect says about their checkpoints and exported weights.
#include <algorithm>

#include "base/format.hpp"
#include "bench/transcoder/transcoder_input.hpp"
#include "bench/transcoder/transcoder_subject.hpp"
#include "commands/commands.hpp"
#include "commands/family.hpp"
#include "commands/language_model/model_rows.hpp"
#include "interchange/formats.hpp"
#include "parallel/nccl.hpp"
#include "transcoder/parameters/model.hpp"

namespace weft::commands {
namespace {

std::string describe_transcoder(const std::filesystem::path& path, const checkpoint::Manifest& manifest) {
  const std::optional<transcoder::StoredModel> stored = transcoder::stored_model(manifest.tensors);
  if (!stored) return "";
  bench::TranscoderInput input;
  input::require_current(bench::trained_keys(input), manifest.input, (path / checkpoint::kManifestName).string());
  const transcoder::Shape& shape = stored->shape;
  // Imported weights have no moments.
  const bool trainable = std::any_of(manifest.tensors.begin(), manifest.tensors.end(),
                                     [](const auto& tensor) { return tensor.name == "encoder_0/weight.first_moment"; });
  const std::string difference = model::first_difference(
      manifest.tensors, model::tensors_of(transcoder::parameter_specs(shape), stored->storage,
                                          trainable ? model::Moments::held : model::Moments::none));
  if (!difference.empty())
    throw collective_error(ExitCode::io, "{}: {} (a transcoder of {} has it); was it written by another program?",
                           path.string(), difference, to_text(shape));
  return fmt::format("  transcoder of {}: {} parameters, all tensors present{}\n", to_text(shape),
                     format::grouped(shape.parameters()), trainable ? "" : " (weights only, without moments)");
}

std::optional<std::pair<std::string, Json>> inspect_weights(const std::filesystem::path& path) {
  if (!interchange::is_directory_of_weights(path)) return {};
  const interchange::Opened opened = interchange::open_directory(path);
  Json document = document_of(opened);
  document["kind"] = "weights";
  document["path"] = path.string();
  return std::pair<std::string, Json>{interchange::summary(opened, path), document};
}

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

class TranscoderBenchmark final : public bench::BenchmarkModel {
 public:
  input::Schema keys() override { return bench::benchmark_keys(input_); }
  const bench::BenchmarkSettings& settings() const override { return input_.benchmark; }
  const run::RunSettings& run() const override { return input_.configuration.run; }
  device::Settings device() const override { return transcoder::device_settings(input_.configuration); }
  parallel::GridShape grid(const parallel::World& world) const override {
    const parallel::Settings& settings = input_.configuration.parallel;
    return parallel::grid_shape(settings.data, {std::string(parallel::kFeatureAxis), settings.feature}, world.size());
  }
  double measure_product(const parallel::Grid& grid, const kernels::Execution& execution) const override {
    return run::measure_product(execution,
                                grid.part(parallel::kDataAxis, input_.configuration.data.batch_tokens).size(),
                                grid.part(parallel::kFeatureAxis, input_.configuration.transcoder.features).size(),
                                input_.benchmark.d_model, grid.world());
  }
  void resolve(bench::BenchmarkCase& one) const override {
    if (one.name == "dense") one.sets.insert(one.sets.begin(), "benchmark.formulation=dense");
  }
  std::string obstacle(const parallel::World& world, bool) const override {
    return bench::obstacle(input_.configuration, input_.benchmark, world);
  }
  std::string plan() const override { return "its memory is not planned"; }
  void check(const parallel::World& world) const override {
    const transcoder::Configuration& configuration = input_.configuration;
    if (input_.benchmark.from == bench::Batches::data && configuration.data.model.empty())
      require_directory(world, configuration.data.train, "data.train");
  }
  std::unique_ptr<bench::BenchmarkSubject> subject(const parallel::Grid& grid, const device::Runtime& runtime,
                                                   const parallel::World& world) const override {
    parallel::nccl::allow_multicast(input_.configuration.parallel.nvls);
    std::unique_ptr<bench::TrainingData> data;
    if (input_.benchmark.from == bench::Batches::data)
      data = std::make_unique<DataOfInput>(input_.configuration, runtime, world);
    return bench::transcoder_subject(input_.configuration, input_.benchmark, world, grid, runtime.execution(),
                                     runtime.threads(), std::move(data));
  }
  void take_checkpoint_case() override {
    input_.benchmark.batches = 1;
    input_.benchmark.formulation = bench::Formulation::sparse;
  }
  void judge(bench::BenchmarkResult&) const override {}  // cases may be different problems

 private:
  bench::TranscoderInput input_;
};

}  // namespace

extern const Family transcoder_family = {
    .table = "transcoder",
    .model = "a transcoder",
    .title = "Transcoders",
    .keys = [] { return keys_of(bench::training_keys); },
    .benchmark = []() -> std::unique_ptr<bench::BenchmarkModel> { return std::make_unique<TranscoderBenchmark>(); },
    .describe = describe_transcoder,
    .inspect_directory = inspect_weights};

}  // namespace weft::commands
