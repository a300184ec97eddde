// SPDX-License-Identifier: Apache-2.0
//
// Runs of a few steps of a small transcoder, on every grid that fits the ranks, compared with the same run on one rank.
// tests/reference/agreement_test.py compares one rank with a dense trainer in float64 that shares no code with it.
#pragma once

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/random.hpp"
#include "tests/model/registry_bits.hpp"
#include "tests/test.hpp"
#include "transcoder/step/trainer.hpp"

namespace weft::transcoder {

constexpr std::int64_t kLayers = 3, kWidth = 20, kFeatures = 45, kTokens = 37, kRows = 4 * kTokens;

inline double random_value(std::uint64_t stream, std::int64_t index) {
  return kernels::normal(kernels::philox(11, kernels::Purpose::test, stream, static_cast<std::uint64_t>(index)));
}

/// Raw rows with a mean and a spread of their own in every dimension.
struct Data {
  std::vector<float> inputs, targets;  // [kRows, L * d]
  dataset::Statistics statistics;
  dataset::Normalisation normalisation;

  Data() {
    const std::int64_t width = kLayers * kWidth;
    for (std::int64_t i = 0; i < kRows * width; ++i) {
      const std::int64_t j = i % width;
      inputs.push_back(static_cast<float>(0.5 * static_cast<double>(j % 3) +
                                          (1 + 0.1 * static_cast<double>(j % 7)) * random_value(1, i)));
      targets.push_back(static_cast<float>(-0.2 * static_cast<double>(j % 5) +
                                           (2 + 0.1 * static_cast<double>(j % 4)) * random_value(2, i)));
    }
    statistics.n_rows = kRows;
    side(inputs, statistics.inputs);
    side(targets, statistics.targets);
    affine(statistics.inputs, normalisation.inputs);
    affine(statistics.targets, normalisation.targets);
  }

  static void side(const std::vector<float>& rows, dataset::SideStatistics& out) {
    const std::size_t width = kLayers * kWidth;
    out.mean.assign(width, 0);
    out.standard_deviation.assign(width, 0);
    out.mean_norm.assign(kLayers, 1);
    for (std::size_t i = 0; i < rows.size(); ++i) out.mean[i % width] += static_cast<double>(rows[i]) / kRows;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const double delta = static_cast<double>(rows[i]) - out.mean[i % width];
      out.standard_deviation[i % width] += delta * delta / (kRows - 1);
    }
    for (double& value : out.standard_deviation) value = std::sqrt(value);
  }
  static void affine(const dataset::SideStatistics& side, dataset::Affine& out) {
    for (std::size_t i = 0; i < side.mean.size(); ++i) {
      out.mean.push_back(static_cast<float>(side.mean[i]));
      out.scale.push_back(static_cast<float>(1.0 / (side.standard_deviation[i] + 1e-6)));
    }
  }
};

inline Configuration configuration_for(Scope scope) {
  Configuration c;
  c.run.steps = 4;
  c.run.seed = 5;
  c.data.batch_tokens = kTokens;
  c.data.micro_tokens = 8;  // several chunks, the last one short
  c.transcoder.features = kFeatures;
  c.transcoder.k = 2.5;
  c.transcoder.scope = scope;
  c.optimizer.learning_rate = 3e-3;
  c.optimizer.schedule = optimizer::Schedule::constant;
  c.optimizer.weight_decay = 0.1;
  return c;
}

/// A run of four steps on one grid.
struct Run {
  parallel::Grid grid;
  Trainer trainer;
  std::vector<double> losses;

  Run(const Configuration& configuration, const Data& data, const parallel::GridShape& shape)
      : Run(configuration, data, shape, testing::world().all()) {}
  Run(const Configuration& configuration, const Data& data, const parallel::GridShape& shape,
      const parallel::Communicator& ranks)
      : grid(ranks, shape),
        trainer(configuration, shape_of(configuration.transcoder, kLayers, kWidth), data.normalisation, data.statistics,
                grid, testing::execution(), kLayers * kWidth * 4,
                [](const dataset::RawBatch&, std::int64_t) { return std::string("test rows"); }) {
    trainer.initialise();
  }

  void step(const Data& data, std::int64_t i, std::int64_t n_tokens = kTokens) {
    const std::int64_t width = kLayers * kWidth, begin = i * kTokens;
    const parallel::Range own = grid.own_part(n_tokens);
    dataset::RawBatch batch;
    const auto rows = [&](const std::vector<float>& all, parallel::Range range) -> kernels::AnyMatrix {
      return {const_cast<float*>(all.data()) + (begin + range.begin) * width, kernels::Scalar::fp32, range.size(),
              width, width};
    };
    batch.inputs = rows(data.inputs, own);
    batch.targets = rows(data.targets, own);
    batch.n_tokens = n_tokens;
    trainer.step(batch);
    losses.push_back(trainer.metrics().loss);
  }

  /// Every owned row of every tensor, gathered: [name][element].
  std::vector<std::pair<std::string, std::vector<float>>> parameters() {
    std::vector<std::pair<std::string, std::vector<float>>> all;
    for (const checkpoint::Tensor& tensor : trainer.registry().tensors()) {
      if (tensor.type != kernels::Scalar::fp32) continue;
      const std::int64_t row = tensor.row_bytes(), n = tensor.shape[0];
      std::vector<std::int64_t> bytes;
      const parallel::Communicator& world = testing::world().all();
      std::vector<std::int64_t> ranges(static_cast<std::size_t>(2 * world.size()));
      const std::int64_t mine[2] = {tensor.owned.begin, tensor.owned.end};
      world.all_gather(mine, ranges.data(), sizeof mine);
      const std::vector<std::byte> own = testing::bits_of(tensor);
      std::vector<std::byte> values(static_cast<std::size_t>(n * row));
      std::int64_t covered = 0;
      for (int r = 0; r < world.size(); ++r) {
        const std::int64_t rank_begin = ranges[static_cast<std::size_t>(2 * r)],
                           rank_end = ranges[static_cast<std::size_t>(2 * r + 1)];
        covered += rank_end - rank_begin;
        if (rank_end == rank_begin) continue;
        std::byte* piece = values.data() + rank_begin * row;
        if (r == world.rank())
          std::memcpy(piece, own.data() + (rank_begin - tensor.held.begin) * row,
                      static_cast<std::size_t>((rank_end - rank_begin) * row));
        world.broadcast(piece, (rank_end - rank_begin) * row, r);
      }
      REQUIRE(covered == n);  // owned ranges cover each row exactly once
      std::vector<float> floats(values.size() / 4);
      std::memcpy(floats.data(), values.data(), values.size());
      all.emplace_back(tensor.name, std::move(floats));
    }
    return all;
  }
};

inline std::vector<parallel::GridShape> grids() {
  std::vector<parallel::GridShape> shapes;
  const std::int64_t p = testing::world().size();
  for (std::int64_t data = 1; data <= p; ++data)
    if (p % data == 0) shapes.push_back(parallel::data_by_feature(data, p / data));
  return shapes;
}

inline double relative_difference(const std::vector<float>& values, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double delta = static_cast<double>(values[i]) - expected[i];
    difference += delta * delta;
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / std::max(norm, 1e-300));
}

/// Three steps on grids against the same on one rank: sums differ by rounding.
inline void equal_on(const Configuration& configuration, const Data& data,
                     const std::vector<parallel::GridShape>& shapes) {
  const parallel::World& world = testing::world();
  Run alone(configuration, data, parallel::data_by_feature(1, 1), world.all().split(world.rank(), 0));
  for (std::int64_t i = 0; i < 3; ++i) alone.step(data, i);
  for (const parallel::GridShape& shape : shapes) {
    CAPTURE(shape.text());
    Run run(configuration, data, shape);
    for (std::int64_t i = 0; i < 3; ++i) {
      run.step(data, i);
      // fp32 sums of a few dozen terms: well within the 1e-5 that is promised between grids.
      CHECK(run.losses.back() == doctest::Approx(alone.losses[static_cast<std::size_t>(i)]).epsilon(1e-5));
    }
    for (const auto& [name, values] : run.parameters()) {
      CAPTURE(name);
      const std::vector<std::byte> whole = testing::bits_of(*alone.trainer.registry().find(name));
      std::vector<float> expected(values.size());
      REQUIRE(whole.size() == 4 * expected.size());
      std::memcpy(expected.data(), whole.data(), whole.size());
      // The promise after 20 fp32 steps; Adam's division makes a tiny gradient's rounding visible, hence not tighter.
      CHECK(relative_difference(values, std::vector<double>(expected.begin(), expected.end())) <= 1e-5);
    }
  }
}

inline void equal_on_every_grid(const Configuration& configuration, const Data& data) {
  equal_on(configuration, data, grids());
}

/// Thresholds amid the pre-activations, whose deviation is about 0.4; a capacity that is not reached.
inline Configuration jumping(JumpForm form) {
  Configuration configuration = configuration_for(Scope::layer);
  configuration.transcoder.activation = Activation::jumprelu;
  configuration.transcoder.pseudo_derivative = form;
  configuration.transcoder.threshold = 0.2;
  configuration.transcoder.bandwidth = 0.5;
  configuration.transcoder.capacity = kFeatures - 1;
  return configuration;
}

/// The same with gradients of thresholds from lists. The bands reach below 0, where no feature is active.
inline Configuration listing(JumpForm form) {
  Configuration configuration = jumping(form);
  configuration.transcoder.threshold_gradient = ThresholdGradient::listed;
  configuration.transcoder.capacity = kFeatures;  // windows may hold all
  return configuration;
}

/// k so small, and a window so short, that some features are dead from the second step on.
inline Configuration with_dead_features() {
  Configuration configuration = configuration_for(Scope::layer);
  configuration.transcoder.k = 0.5;
  configuration.transcoder.dead_window = kTokens;
  configuration.transcoder.auxk = 0.25;
  configuration.transcoder.auxk_features = 3;
  return configuration;
}

// Their gradients are compared with the float64 reference in tests/reference/agreement_test.py.
inline std::vector<Configuration> with_other_decoders() {
  Configuration by_target = configuration_for(Scope::layer), affine = with_dead_features();
  by_target.transcoder.decoder = affine.transcoder.decoder = Decoder::tied_target;
  by_target.transcoder.ranking = Ranking::decoder_norm;
  by_target.transcoder.sparsity = 0.1;
  affine.transcoder.decoder_affine = true;
  affine.transcoder.decoder_scale_initial = 0.1;
  affine.optimizer.clip_norm = 0.02;
  Configuration clipped = affine, thresholds = jumping(JumpForm::anthropic);
  clipped.optimizer.clip_mode = optimizer::ClipMode::previous;
  thresholds.transcoder.decoder = Decoder::tied_target;
  thresholds.transcoder.preactivation_penalty = 0.01;
  return {by_target, affine, clipped, thresholds};
}

}  // namespace weft::transcoder
