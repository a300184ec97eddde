// SPDX-License-Identifier: Apache-2.0
//
// The whole step, on every grid that fits the ranks: against one rank, and its memory, exchanges and repeatability.
// Variants of the model: trainer_variants_test.cpp.
#include "transcoder/step/trainer.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "dataset/activations/describe.hpp"
#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/transcoder/encode/encode_tile.hpp"
#include "tests/transcoder/trainer_run.hpp"
#include "transcoder/run/plan.hpp"

namespace weft::transcoder {

TEST_CASE("every grid trains what one rank trains: skip connections, a decoder per layer, clipping by the exact norm") {
  const Data data;
  Configuration skipping = configuration_for(Scope::layer), clipped = skipping, per_layer = skipping;
  skipping.transcoder.skip = Skip::linear;
  clipped.optimizer.clip_norm = 0.02;  // far below the norm: every step is clipped
  Configuration both = skipping;
  both.optimizer.clip_norm = 0.02;  // the gradient of the skip connection counts in the norm
  per_layer.transcoder.decoder = Decoder::per_layer;
  per_layer.transcoder.skip = Skip::linear;
  per_layer.transcoder.scope = Scope::all_layers;
  for (const Configuration& configuration : {skipping, clipped, both, per_layer})
    equal_on_every_grid(configuration, data);
}

TEST_CASE("initial weights have the bounds that the settings name") {
  const Data data;
  Configuration configuration = configuration_for(Scope::layer);
  configuration.transcoder.encoder_initial = EncoderInitial::width;
  configuration.transcoder.decoder_initial = DecoderInitial::zero;
  Run run(configuration, data, parallel::data_by_feature(1, testing::world().size()));
  for (const auto& [name, values] : run.parameters()) {
    if (name.ends_with("_moment")) continue;
    float largest = 0;
    for (const float value : values) largest = std::max(largest, std::abs(value));
    // Of 900 values the largest is within 3 % of the bound: the probability that it is not is 0.97^900 = 1e-12.
    if (name.starts_with("encoder_") && name.ends_with("/weight")) {
      CHECK(largest <= 1 / std::sqrt(static_cast<float>(kWidth)));
      CHECK(largest >= 0.97f / std::sqrt(static_cast<float>(kWidth)));
    }
    if (name.starts_with("decoder_")) CHECK(largest == 0);
  }
}

TEST_CASE("every rank has the same skip connection, in every state, and it is trained") {
  const Data data;
  for (const parallel::GridShape& shape : grids())
    for (const kernels::StorageType storage :
         {kernels::StorageType::fp32, kernels::StorageType::bf16, kernels::StorageType::eight_bit}) {
      CAPTURE(shape.text());
      CAPTURE(static_cast<int>(storage));
      Configuration configuration = configuration_for(Scope::layer);
      configuration.transcoder.skip = Skip::linear;
      configuration.optimizer.state = storage;
      if (storage != kernels::StorageType::fp32) configuration.precision = Precision::bf16;
      Run run(configuration, data, shape);
      for (std::int64_t i = 0; i < 4; ++i) run.step(data, i);
      for (const checkpoint::Tensor& tensor : run.trainer.registry().tensors()) {
        if (!tensor.name.starts_with("skip_")) continue;
        CAPTURE(tensor.name);
        REQUIRE(tensor.held.size() == tensor.shape[0]);
        const std::vector<std::byte> bytes = testing::bits_of(tensor);
        CHECK(std::any_of(bytes.begin(), bytes.end(), [](std::byte byte) { return byte != std::byte{0}; }));
        std::vector<std::byte> of_root = bytes;
        testing::world().all().broadcast(of_root.data(), std::ssize(of_root), 0);
        CHECK(bytes == of_root);
      }
    }
}

TEST_CASE("more active features than transcoder.capacity end the run before any parameter changes, on all ranks") {
  const Data data;
  for (const Activation activation : {Activation::relu, Activation::jumprelu})
    for (const parallel::GridShape& shape : grids()) {
      Configuration configuration = jumping(JumpForm::anthropic);
      configuration.transcoder.activation = activation;
      configuration.transcoder.capacity = 3;
      Run run(configuration, data, shape);
      const auto before = run.parameters();
      CHECK_THROWS_WITH_AS(run.step(data, 0), doctest::Contains("raise transcoder.capacity"), Error);
      CHECK(run.parameters() == before);
    }
}

TEST_CASE("entries of the bands need room too: without it the run ends before any parameter changes") {
  const Data data;
  for (const parallel::GridShape& shape : grids()) {
    Configuration configuration = jumping(JumpForm::anthropic);
    configuration.transcoder.threshold = 0.5;  // a ninth of all exceeds it, nine tenths are in its window or above it
    configuration.transcoder.bandwidth = 2;
    configuration.transcoder.capacity = 24;
    Run dense(configuration, data, shape);
    dense.step(data, 0);
    configuration.transcoder.threshold_gradient = ThresholdGradient::listed;
    Run run(configuration, data, shape);
    const auto before = run.parameters();
    CHECK_THROWS_WITH_AS(run.step(data, 0), doctest::Contains("in the band below it"), Error);
    CHECK(run.parameters() == before);
  }
}

TEST_CASE("ranks send the bytes of the formulas, and the plan states no less") {
  const Configuration configuration = configuration_for(Scope::layer);
  const Data data;
  dataset::Settings settings = configuration.data;
  settings.layers = kLayers;
  settings.d_model = kWidth;
  for (const parallel::GridShape& shape : grids()) {
    CAPTURE(shape.size(parallel::kDataAxis));
    CAPTURE(shape.size(parallel::kFeatureAxis));
    Run run(configuration, data, shape);
    run.step(data, 0);
    std::int64_t sent[] = {run.trainer.feature_traffic().bytes_sent, run.trainer.data_traffic().bytes_sent};
    testing::world().all().sum(sent);
    // Each token's inputs and gradient row go to all ranks of its group but one, its partial sums leave all but one.
    const std::int64_t width = kLayers * kWidth;
    CHECK(sent[0] == 3 * (shape.size(parallel::kFeatureAxis) - 1) * kTokens * width * 4);
    // Each input and gradient row goes from every rank of its group to all groups but one, each weight and encoder bias
    // to all but one; lists are sent at their capacity.
    const std::int64_t weights = kFeatures * (kWidth * kLayers * (kLayers + 3) / 2 + kLayers);
    const std::int64_t lists = 8 * (parallel::largest_part(kTokens, shape.size(parallel::kDataAxis)) + 1) +
                               8 * run.trainer.forward().selection().sizes().capacity;
    const std::int64_t ranks = shape.size(parallel::kDataAxis) * shape.size(parallel::kFeatureAxis);
    CHECK(sent[1] == (shape.size(parallel::kDataAxis) - 1) *
                         (shape.size(parallel::kFeatureAxis) * 2 * kTokens * width * 4 + ranks * lists + 4 * weights));

    const Plan planned = plan(configuration, dataset::imagined("none", settings), shape);
    CHECK(ranks * planned.feature_bytes_per_step >= sent[0]);
    CHECK(ranks * planned.data_bytes_per_step >= sent[1]);
  }
}

TEST_CASE("a trainer takes the memory that the plan of its step states, on every grid") {
  const Data data;
  Configuration plain = configuration_for(Scope::layer), clipped = configuration_for(Scope::all_layers), narrow = plain,
                per_token = plain, whole = plain, by_layer = plain, skipping = clipped, per_layer = plain;
  clipped.optimizer.clip_norm = 0.02;
  narrow.optimizer.state = kernels::StorageType::eight_bit;
  narrow.precision = Precision::bf16;
  per_token.transcoder.activation = Activation::topk;
  per_token.transcoder.k = 3;
  whole.transcoder.activation = Activation::relu;
  whole.data.micro_tokens = 0;
  by_layer.alternatives.rows_by_layer = true;
  skipping.transcoder.skip = Skip::linear;
  skipping.optimizer.clip_norm = 0.02;
  per_layer.transcoder.decoder = Decoder::per_layer;
  Configuration dead = with_dead_features();
  dead.transcoder.k_initial = 6;
  dead.transcoder.ranking = Ranking::decoder_norm;
  Configuration tied = dead;
  tied.transcoder.decoder = Decoder::tied;
  Configuration penalised = jumping(JumpForm::anthropic);
  penalised.transcoder.sparsity = penalised.transcoder.preactivation_penalty = 0.1;
  Configuration measured = clipped;
  measured.transcoder.resample_every = 2;
  measured.transcoder.encoder_bias_initial = EncoderBiasInitial::data;
  measured.transcoder.error = ErrorForm::unexplained;
  measured.transcoder.decoder_bias = DecoderBias::pair;
  std::vector<Configuration> all = with_other_decoders();
  all.insert(all.end(), {measured, plain, clipped, narrow, per_token, whole, by_layer, skipping, per_layer,
                         jumping(JumpForm::anthropic), jumping(JumpForm::goreg), listing(JumpForm::anthropic),
                         penalised, dead, tied});
  for (const Configuration& configuration : all)
    for (const parallel::GridShape& shape : grids()) {
      CAPTURE(shape.text());
      const Shape sizes = shape_of(configuration.transcoder, kLayers, kWidth);
      const model::StepArena planned =
          measure_step(configuration, sizes, shape, kLayers * kWidth * 4, testing::execution().backend);
      const device::MemoryUse before = device::memory_use();
      std::int64_t normalisation = 0;
      {
        const NormalisationOnDevice vectors(data.normalisation, data.statistics, testing::execution());
        normalisation = device::memory_use().device_bytes - before.device_bytes;
      }
      const Run run(configuration, data, shape);
      const model::StepArena& taken = run.trainer.memory();
      REQUIRE(taken.bytes().size() == planned.bytes().size());
      for (std::size_t i = 0; i < planned.bytes().size(); ++i) {
        CAPTURE(planned.bytes()[i].purpose);
        CHECK(taken.bytes()[i].purpose == planned.bytes()[i].purpose);
        CHECK(taken.bytes()[i].device == planned.bytes()[i].device);
        CHECK(taken.bytes()[i].host == planned.bytes()[i].host);
      }
      const device::MemoryUse now = device::memory_use();
      CHECK(now.device_bytes - before.device_bytes ==
            taken.device_bytes() + run.trainer.model().parameters().bytes().total() + normalisation);
      CHECK(now.host_bytes - before.host_bytes == taken.host_bytes());
    }
}

TEST_CASE("entries of the ranks add up to those of the step") {
  const Configuration configuration = configuration_for(Scope::all_layers);
  const Data data;
  for (const parallel::GridShape& shape : grids()) {
    Run run(configuration, data, shape);
    run.step(data, 0);
    const TrainingMetrics metrics = run.trainer.metrics();
    const auto& entries = metrics.entries_per_rank;
    // k = 2.5 of 3 layers for 37 tokens: 277.5, halves go up.
    CHECK(entries.mean * testing::world().size() == 278);
    CHECK(entries.minimum <= entries.mean);
    CHECK(entries.mean <= entries.maximum);
    CHECK(entries.minimum == std::floor(entries.minimum));
  }
}

/// Whether the dense library gives a token the same product in a whole batch and in a slice of it: it promises no such
/// thing. On all ranks.
static bool products_are_those_of_a_whole_batch(Precision precision, parallel::Range slice) {
  const std::int64_t d = kWidth, element = kernels::bytes_of(scalar_of(precision));
  std::vector<kernels::bf16> narrow;
  std::vector<float> wide;
  for (std::int64_t i = 0; i < (kTokens + kFeatures) * d; ++i) {
    wide.push_back(static_cast<float>(random_value(3, i)));
    narrow.push_back(kernels::to_bf16(wide.back()));
  }
  const void* const values = precision == Precision::bf16 ? static_cast<const void*>(narrow.data()) : wide.data();
  const device::Buffer<std::byte> memory((kTokens + kFeatures) * d * element), whole(kTokens * kFeatures * element),
      part(kTokens * kFeatures * element);
  device::copy(testing::execution(), memory.data(), values, memory.bytes(), device::Direction::to_device);
  const kernels::AnyMatrix x{memory.data(), scalar_of(precision), kTokens, d, d};
  const kernels::ParameterRows encoder{
      .storage = precision == Precision::bf16 ? kernels::StorageType::bf16 : kernels::StorageType::fp32,
      .rows = kFeatures,
      .columns = d,
      .segment = d,
      .weight = memory.data() + kTokens * d * element};
  const device::Buffer<std::byte> workspace(
      kernels::encode_workspace(testing::execution().backend, kTokens, kFeatures, d, x.type, encoder.storage, x.type));
  const auto product = [&](const device::Buffer<std::byte>& out, parallel::Range tokens) {
    kernels::encode_tile(testing::execution(), x.rows_from(tokens.begin, tokens.size()), encoder, 0,
                         {out.data(), x.type, tokens.size(), kFeatures, kFeatures}, workspace.array());
    std::vector<std::byte> host(static_cast<std::size_t>(tokens.size() * kFeatures * element));
    device::copy(testing::execution(), host.data(), out.data(), std::ssize(host), device::Direction::to_host);
    kernels::fence(testing::execution());
    return host;
  };
  const std::vector<std::byte> all = product(whole, {0, kTokens}), own = product(part, slice);
  std::int64_t different = std::memcmp(own.data(), all.data() + slice.begin * kFeatures * element, own.size()) != 0;
  testing::world().all().maximum({&different, 1});
  return different == 0;
}

TEST_CASE("a grid D x G has the bits of 1 x G, for every state") {
  const parallel::World& world = testing::world();
  const Data data;
  for (const parallel::GridShape& shape : grids())
    for (const kernels::StorageType storage :
         {kernels::StorageType::fp32, kernels::StorageType::bf16, kernels::StorageType::eight_bit}) {
      CAPTURE(shape.size(parallel::kDataAxis));
      CAPTURE(shape.size(parallel::kFeatureAxis));
      CAPTURE(static_cast<int>(storage));
      Configuration configuration = with_dead_features();
      configuration.transcoder.scope = Scope::all_layers;
      configuration.optimizer.state = storage;
      if (storage != kernels::StorageType::fp32) configuration.precision = Precision::bf16;
      Run run(configuration, data, shape);
      if (!products_are_those_of_a_whole_batch(configuration.precision, run.grid.part(parallel::kDataAxis, kTokens))) {
        MESSAGE("not compared: the dense library's products depend on the number of tokens");
        continue;
      }
      const parallel::Communicator group =
          world.all().split(static_cast<int>(world.rank() / shape.size(parallel::kFeatureAxis)), world.rank());
      Run alone(configuration, data, parallel::data_by_feature(1, shape.size(parallel::kFeatureAxis)), group);
      for (std::int64_t i = 0; i < 4; ++i) {
        run.step(data, i);
        alone.step(data, i);
      }
      run.trainer.wait();
      for (const checkpoint::Tensor& tensor : run.trainer.registry().tensors()) {
        CAPTURE(tensor.name);
        // It follows from what passed the filter on each rank, and no result depends on it (selection_rule.hpp).
        if (tensor.name == "selection/threshold") continue;
        const checkpoint::Tensor& expected = *alone.trainer.registry().find(tensor.name);
        const std::vector<std::byte> own = testing::bits_of(tensor), all = testing::bits_of(expected);
        const std::int64_t begin = (tensor.held.begin - expected.held.begin) * tensor.row_bytes();
        CHECK(std::memcmp(own.data(), all.data() + begin, own.size()) == 0);
      }
    }
}

TEST_CASE("more ranks than features or tokens: some have no work, and the result is the same") {
  Configuration configuration = configuration_for(Scope::layer);
  configuration.transcoder.features = 3;
  configuration.transcoder.k = 1;
  configuration.optimizer.clip_norm = 0.02;
  const Data data;
  std::vector<double> losses;
  for (const parallel::GridShape& shape : grids()) {
    Run run(configuration, data, shape);
    for (std::int64_t i = 0; i < 3; ++i) run.step(data, i);
    run.step(data, 3, 2);
    if (losses.empty()) losses = run.losses;
    for (std::size_t i = 0; i < 4; ++i) CHECK(run.losses[i] == doctest::Approx(losses[i]).epsilon(1e-5));
  }
}

TEST_CASE("previous-norm clipping uses the norm of the step before") {
  Configuration exact = configuration_for(Scope::layer), previous = exact;
  exact.optimizer.clip_norm = previous.optimizer.clip_norm = 1e9;  // never reached: both modes only measure
  previous.optimizer.clip_mode = optimizer::ClipMode::previous;
  const Data data;
  for (const parallel::GridShape& shape : grids()) {
    Run a(exact, data, shape), b(previous, data, shape);
    for (std::int64_t i = 0; i < 4; ++i) {
      a.step(data, i);
      b.step(data, i);
    }
    // The same fp64 sum over the same fp32 gradients, formed in another pass.
    CHECK(a.trainer.metrics().gradient_norm == doctest::Approx(b.trainer.metrics().gradient_norm).epsilon(1e-6));
    CHECK(a.trainer.metrics().gradient_norm > 0);
  }
}

TEST_CASE("a batch that is not finite stops the run before any parameter changes, or is skipped") {
  Data data;
  data.targets[static_cast<std::size_t>((kTokens + 3) * kLayers * kWidth + 7)] =
      std::numeric_limits<float>::quiet_NaN();
  for (const parallel::GridShape& shape : grids()) {
    Configuration configuration = configuration_for(Scope::layer);
    Run run(configuration, data, shape);
    run.step(data, 0);
    const auto before = run.parameters();
    CHECK_THROWS_WITH_AS(run.step(data, 1), doctest::Contains("not finite at step 2"), Error);
    CHECK(run.parameters() == before);

    configuration.run.nonfinite = NonFinite::skip;
    configuration.run.skip_at_most = 1;
    Run skipping(configuration, data, shape);
    for (std::int64_t i = 0; i < 3; ++i) skipping.step(data, i);
    CHECK(skipping.trainer.metrics().skipped == 1);
    CHECK_THROWS_AS(skipping.step(data, 1), Error);
  }
}

}  // namespace weft::transcoder
