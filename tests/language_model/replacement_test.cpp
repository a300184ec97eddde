// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include "base/error.hpp"
#include "language_model/run/harvester.hpp"
#include "language_model/run/mlp_replacement.hpp"
#include "tests/language_model/small_model.hpp"
#include "tests/scratch.hpp"

using namespace weft;
using namespace weft::testing;

namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kSequences = 3, kLength = 8, kWidth = 32, kLayers = 2;

TransformerSettings small() {
  TransformerSettings settings;
  ModelSettings& model = settings.architecture.model;
  model.layers = kLayers;
  model.heads = model.kv_heads = 4;
  model.d_model = kWidth;
  model.d_mlp = 48;
  settings.architecture.vocabulary = 29;
  settings.architecture.positions = kLength;
  settings.rows = kSequences * kLength;
  settings.length = kLength;
  settings.gradients = false;
  return settings;
}

dataset::TokenSet text() {
  std::vector<std::uint16_t> ids;
  for (std::uint16_t i = 0; i < 60; ++i) ids.push_back(static_cast<std::uint16_t>(i * i * 5 % 29));
  return dataset::TokenSet("text", std::move(ids), 29, 0);
}

/// A model with the memory of a text.
struct Case {
  Case() : grid(world(), single_process()), arena(execution(), grid), staging(24, false, execution(), arena) {
    model.transformer().prepare_weights();
  }
  void set(const std::string& suffix, float factor) {
    for (std::size_t i = 0; i < model.parameters().size(); ++i)
      if (model.parameters().specs()[i].name.ends_with(suffix)) {
        std::vector<float> values = model.get(i);
        for (float& value : values) value *= factor;
        model.set(i, values);
      }
    model.transformer().prepare_weights();
  }
  ReplacementResult measure(const Reconstruction& reconstruction) {
    return evaluate_replaced(text(), kLength, small().rows, small().architecture.model, kernels::Scalar::fp32,
                             reconstruction, model.transformer(), staging, execution());
  }
  SmallModel model{small(), kSequences, kLength};
  parallel::Grid grid;
  model::StepArena arena;
  Staging staging;
};

/// Each output is the same row, whatever the inputs.
Reconstruction constant(const std::vector<float>& row, device::Buffer<float>& memory) {
  memory = device::Buffer<float>(kLayers * kWidth);
  device::copy(execution(), memory.data(), row.data(), memory.bytes(), device::Direction::to_device);
  return {.form =
              [&memory](const kernels::AnyMatrix& inputs, const kernels::Matrix<float>& outputs) {
                for (std::int64_t n = 0; n < inputs.rows; ++n)
                  device::copy(execution(), outputs.row(n), memory.data(), memory.bytes(),
                               device::Direction::on_device);
              },
          .mean = memory.array()};
}

}  // namespace

TEST_CASE("a perfect reconstruction leaves the loss as it is") {
  Case one;
  one.set("mlp/down/weight", 0);  // every output is its bias, exactly
  std::vector<float> biases;
  for (std::size_t i = 0; i < one.model.parameters().size(); ++i)
    if (one.model.parameters().specs()[i].name.ends_with("mlp/down/bias")) {
      const std::vector<float> bias = one.model.get(i);
      biases.insert(biases.end(), bias.begin(), bias.end());
    }
  device::Buffer<float> memory;
  const ReplacementResult result = one.measure(constant(biases, memory));
  CHECK(result.tokens == 59);
  CHECK(result.together.replaced == result.original);
  CHECK(result.together.mean == result.original);
  CHECK(result.together.zero != result.original);
  CHECK(result.together.recovered_from_zero(result.original) == 1);
  for (const ReplacedLosses& losses : result.alone) CHECK(losses.replaced == result.original);
}

TEST_CASE("error terms give the model's loss whatever the reconstruction, zero ablation that of a model without MLPs") {
  Case whole, without;
  const std::vector<float> row(kLayers * kWidth, 0.7f);
  device::Buffer<float> memory, other;
  const ReplacementResult result = whole.measure(constant(row, memory));
  CHECK(std::abs(result.together.replaced - result.original) > 1e-2);
  // Each output is restored but for one rounding of fp32.
  CHECK(result.with_errors == doctest::Approx(result.original).epsilon(1e-5));
  without.set("mlp/down/weight", 0);
  without.set("mlp/down/bias", 0);
  CHECK(result.together.zero == without.measure(constant(row, other)).original);
}

TEST_CASE("the harvest names layer and token of a value that is not finite, or too large for fp16") {
  const dataset::TokenSet set = text();
  const TextStream stream({set});
  const HarvestSettings settings{{.length = kLength, .windows = 7, .windows_per_file = 4}, 3};
  const auto message = [&](float factor, kernels::Scalar type) -> std::pair<ExitCode, std::string> {
    Case one;
    one.set("block_1/mlp/down/weight", factor);
    dataset::WriterSettings writer;
    const weft::testing::Scratch folder;
    writer.path = (folder.path / "data").string();
    writer.n_layers = kLayers;
    writer.d_model = kWidth;
    writer.dtype = type;
    writer.rows_per_file = 32;
    writer.tokens = true;
    dataset::ChunkFiles files(writer, {});
    Harvester harvester(settings, stream, small().architecture.model, one.model.transformer(), one.staging,
                        execution());
    try {
      harvester.write(std::array<std::int64_t, 1>{1}, files);
    } catch (const Error& failure) {
      return {failure.code(), failure.what()};
    }
    return {ExitCode::internal, "nothing"};
  };
  const auto [code, infinite] = message(std::numeric_limits<float>::infinity(), kernels::Scalar::fp32);
  CHECK(code == ExitCode::numeric);
  CHECK(infinite.find("output of the MLP of layer 1 at token 32") != infinite.npos);
  const auto [overflow_code, overflow] = message(1e6f, kernels::Scalar::fp16);
  CHECK(overflow_code == ExitCode::data);
  CHECK(overflow.find("layer 1 at token 32") != overflow.npos);
  CHECK(overflow.find("--type bf16") != overflow.npos);
  CHECK(message(1, kernels::Scalar::fp16).second == "nothing");
}
