// SPDX-License-Identifier: Apache-2.0
//
// The whole step, on every grid that fits the ranks, against a dense float64 trainer that shares no code with it.
#include "transcoder/trainer.hpp"

#include <cstring>
#include <vector>

#include "device/memory.hpp"
#include "kernels/optimize/adam.hpp"
#include "kernels/random.hpp"
#include "kernels/runtime.hpp"
#include "kernels/transcoder/encode/encode.hpp"
#include "tests/test.hpp"
#include "tests/training/registry_bits.hpp"
#include "tests/transcoder/dense_reference.hpp"
#include "transcoder/plan.hpp"

namespace weft::transcoder {
namespace {

constexpr std::int64_t kLayers = 3, kWidth = 20, kFeatures = 45, kTokens = 37, kRows = 4 * kTokens;

double random_value(std::uint64_t stream, std::int64_t index) {
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
  /// Normalised as the program does it: in fp32, then taken as exact by the reference.
  static std::vector<double> normalised(const std::vector<float>& rows, const dataset::Affine& affine,
                                        std::int64_t begin) {
    const std::int64_t width = kLayers * kWidth;
    std::vector<double> out;
    for (std::int64_t i = begin * width; i < (begin + kTokens) * width; ++i) {
      const std::size_t j = static_cast<std::size_t>(i % width);
      out.push_back(static_cast<double>((rows[static_cast<std::size_t>(i)] - affine.mean[j]) * affine.scale[j]));
    }
    return out;
  }
};

Configuration configuration_for(Scope scope) {
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

std::vector<parallel::GridShape> grids() {
  std::vector<parallel::GridShape> shapes;
  const std::int64_t p = testing::world().size();
  for (std::int64_t data = 1; data <= p; ++data)
    if (p % data == 0) shapes.push_back(parallel::data_by_feature(data, p / data));
  return shapes;
}

const std::vector<double>& values_of(const testing::DenseReference& reference, const std::string& name) {
  const auto of = [&](const testing::DenseReference::Parameter& p) -> const std::vector<double>& {
    return name.ends_with(".first_moment") ? p.m : name.ends_with(".second_moment") ? p.v : p.w;
  };
  if (name.starts_with("decoder_bias")) return of(reference.decoder_bias);
  if (name.starts_with("skip_")) return of(reference.skip_weight[static_cast<std::size_t>(name[5] - '0')]);
  const std::size_t layer = static_cast<std::size_t>(name[8] - '0');
  if (name.starts_with("decoder_")) return of(reference.decoder[layer]);
  if (name.find("/threshold") != std::string::npos) return of(reference.threshold[layer]);
  return name.find("/bias") != std::string::npos ? of(reference.encoder_bias[layer]) : of(reference.encoder[layer]);
}

testing::DenseReference reference_for(const Configuration& c, Run& run) {
  testing::DenseReference reference;
  reference.n_layers = kLayers;
  reference.d = kWidth;
  reference.n_features = kFeatures;
  reference.k = c.transcoder.k;
  reference.all_layers = c.transcoder.scope == Scope::all_layers;
  reference.cross_layer = c.transcoder.decoder != Decoder::per_layer;
  reference.tied = c.transcoder.decoder == Decoder::tied;
  reference.skip = c.transcoder.skip == Skip::linear;
  reference.learning_rate = c.optimizer.learning_rate;
  reference.weight_decay = c.optimizer.weight_decay;
  reference.clip = c.optimizer.clip_norm;
  reference.allocate();
  if (c.transcoder.activation == Activation::jumprelu) {
    reference.threshold.resize(kLayers);
    for (auto& threshold : reference.threshold) threshold.resize(kFeatures);
    reference.bandwidth = c.transcoder.bandwidth;
    reference.goreg = c.transcoder.pseudo_derivative == JumpForm::goreg;
  }
  reference.sparsity = c.transcoder.sparsity;
  reference.scale = c.transcoder.sparsity_scale;
  reference.ramp = c.transcoder.sparsity_end * static_cast<double>(c.run.steps);
  reference.preactivation = c.transcoder.preactivation_penalty;
  reference.auxk = c.transcoder.auxk;
  reference.auxk_features = c.transcoder.auxk_features;
  reference.window = c.transcoder.dead_window;
  reference.negative = c.transcoder.preactivation_form == PreactivationForm::negative;
  for (const auto& [name, values] : run.parameters()) {
    if (name.find("_moment") != std::string::npos) continue;
    auto& target = const_cast<std::vector<double>&>(values_of(reference, name));
    REQUIRE(target.size() == values.size());
    std::copy(values.begin(), values.end(), target.begin());
  }
  return reference;
}

double relative_difference(const std::vector<float>& values, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double delta = static_cast<double>(values[i]) - expected[i];
    difference += delta * delta;
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / std::max(norm, 1e-300));
}

void compare_with_reference(const Configuration& configuration) {
  const Data data;
  for (const parallel::GridShape& shape : grids()) {
    CAPTURE(shape.size(parallel::kDataAxis));
    CAPTURE(shape.size(parallel::kFeatureAxis));
    Run run(configuration, data, shape);
    testing::DenseReference reference = reference_for(configuration, run);
    for (std::int64_t i = 0; i < 4; ++i) {
      run.step(data, i);
      const double loss =
          reference.step(Data::normalised(data.inputs, data.normalisation.inputs, i * kTokens),
                         Data::normalised(data.targets, data.normalisation.targets, i * kTokens), kTokens);
      // fp32 sums of a few dozen terms: well within the 1e-5 that is promised between grids.
      CHECK(run.losses.back() == doctest::Approx(loss).epsilon(1e-5));
      CHECK(run.trainer.metrics().auxiliary_loss == doctest::Approx(reference.auxiliary_loss).epsilon(1e-5));
    }
    for (const auto& [name, values] : run.parameters()) {
      CAPTURE(name);
      // The promise after 20 fp32 steps; Adam's division makes a tiny gradient's rounding visible, hence not tighter.
      CHECK(relative_difference(values, values_of(reference, name)) <= 1e-5);
    }
  }
}

/// Three steps on grids against the same on one rank: sums differ by rounding.
void equal_on(const Configuration& configuration, const Data& data, const std::vector<parallel::GridShape>& shapes) {
  const parallel::World& world = testing::world();
  Run alone(configuration, data, parallel::data_by_feature(1, 1), world.all().split(world.rank(), 0));
  for (std::int64_t i = 0; i < 3; ++i) alone.step(data, i);
  for (const parallel::GridShape& shape : shapes) {
    CAPTURE(shape.text());
    Run run(configuration, data, shape);
    for (std::int64_t i = 0; i < 3; ++i) {
      run.step(data, i);
      CHECK(run.losses.back() == doctest::Approx(alone.losses[static_cast<std::size_t>(i)]).epsilon(1e-5));
    }
    for (const auto& [name, values] : run.parameters()) {
      CAPTURE(name);
      const std::vector<std::byte> whole = testing::bits_of(*alone.trainer.registry().find(name));
      std::vector<float> expected(values.size());
      REQUIRE(whole.size() == 4 * expected.size());
      std::memcpy(expected.data(), whole.data(), whole.size());
      // As against the dense trainer.
      CHECK(relative_difference(values, std::vector<double>(expected.begin(), expected.end())) <= 1e-5);
    }
  }
}

void equal_on_every_grid(const Configuration& configuration, const Data& data) {
  equal_on(configuration, data, grids());
}

}  // namespace

TEST_CASE("four steps equal the dense float64 trainer, scope layer") {
  compare_with_reference(configuration_for(Scope::layer));
}

TEST_CASE("four steps equal the dense float64 trainer, scope all_layers") {
  compare_with_reference(configuration_for(Scope::all_layers));
}

TEST_CASE("with a skip connection, four steps equal the dense float64 trainer") {
  Configuration configuration = configuration_for(Scope::layer);
  configuration.transcoder.skip = Skip::linear;
  compare_with_reference(configuration);
  configuration.optimizer.clip_norm = 0.02;  // its gradient counts in the norm
  compare_with_reference(configuration);
}

TEST_CASE("with a decoder per layer, four steps equal the dense float64 trainer") {
  Configuration configuration = configuration_for(Scope::layer);
  configuration.transcoder.decoder = Decoder::per_layer;
  compare_with_reference(configuration);
  configuration.transcoder.skip = Skip::linear;
  configuration.transcoder.scope = Scope::all_layers;
  compare_with_reference(configuration);
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
    for (const kernels::StatePolicy policy :
         {kernels::StatePolicy::fp32, kernels::StatePolicy::bf16, kernels::StatePolicy::eight_bit}) {
      CAPTURE(shape.text());
      CAPTURE(static_cast<int>(policy));
      Configuration configuration = configuration_for(Scope::layer);
      configuration.transcoder.skip = Skip::linear;
      configuration.optimizer.state = policy;
      if (policy != kernels::StatePolicy::fp32) configuration.precision = Precision::bf16;
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

TEST_CASE("clipping by the exact norm equals the dense float64 trainer on every grid") {
  Configuration configuration = configuration_for(Scope::layer);
  configuration.optimizer.clip_norm = 0.02;  // far below the norm: every step is clipped
  compare_with_reference(configuration);
}

/// Thresholds amid the pre-activations, whose deviation is about 0.4; a capacity that is not reached.
Configuration jumping(JumpForm form) {
  Configuration configuration = configuration_for(Scope::layer);
  configuration.transcoder.activation = Activation::jumprelu;
  configuration.transcoder.pseudo_derivative = form;
  configuration.transcoder.threshold = 0.2;
  configuration.transcoder.bandwidth = 0.5;
  configuration.transcoder.capacity = kFeatures - 1;
  return configuration;
}

TEST_CASE("jumprelu: four steps equal the dense float64 trainer, thresholds included") {
  compare_with_reference(jumping(JumpForm::anthropic));
}

TEST_CASE("jumprelu whose gradient passes below the threshold equals the dense float64 trainer") {
  compare_with_reference(jumping(JumpForm::goreg));
}

TEST_CASE("jumprelu clipped by the exact norm, in which thresholds count, equals the dense float64 trainer") {
  for (const JumpForm form : {JumpForm::anthropic, JumpForm::goreg}) {
    Configuration configuration = jumping(form);
    configuration.optimizer.clip_norm = 0.02;
    compare_with_reference(configuration);
  }
}

/// The same with gradients of thresholds from lists. The windows reach below 0, where no feature is active.
Configuration listing(JumpForm form) {
  Configuration configuration = jumping(form);
  configuration.transcoder.threshold_gradient = ThresholdGradient::listed;
  configuration.transcoder.capacity = kFeatures;  // windows may hold all
  return configuration;
}

TEST_CASE(
    "jumprelu with listed windows equals the dense float64 trainer, also clipped, penalised and with dead features") {
  const Configuration plain = listing(JumpForm::anthropic);
  Configuration clipped = plain, previous = plain, penalised = plain, tied = plain, per_layer = plain, dead = plain;
  clipped.optimizer.clip_norm = 0.02;
  penalised.transcoder.sparsity = 0.1;
  penalised.optimizer.clip_norm = 0.02;
  tied.transcoder.decoder = Decoder::tied;
  per_layer.transcoder.decoder = Decoder::per_layer;
  per_layer.transcoder.skip = Skip::linear;
  dead.transcoder.threshold = 1.2;  // few exceed it
  dead.transcoder.bandwidth = 2;
  dead.transcoder.dead_window = kTokens;
  dead.transcoder.auxk = 0.25;
  dead.transcoder.auxk_features = kFeatures + 1;
  for (const Configuration& configuration : {plain, clipped, penalised, tied, per_layer, dead})
    compare_with_reference(configuration);
}

TEST_CASE("listed windows train as all pre-activations do: every form, decoder and a bandwidth that changes") {
  const Data data;
  std::vector<Configuration> all;
  for (const JumpForm form :
       {JumpForm::anthropic, JumpForm::crosslayer_coding, JumpForm::clt_forge, JumpForm::openmoss, JumpForm::saelens})
    all.push_back(listing(form));
  for (const Decoder decoder : {Decoder::tied_target, Decoder::low_rank}) {
    all.push_back(listing(JumpForm::crosslayer_coding));
    all.back().transcoder.decoder = decoder;
    if (decoder == Decoder::low_rank) all.back().transcoder.rank = 3;
  }
  all.push_back(listing(JumpForm::clt_forge));
  all.back().transcoder.bandwidth_initial = 1.5;
  all.back().transcoder.sparsity = 0.1;
  all.back().transcoder.dead_window = kTokens;
  for (const Configuration& configuration : all)
    for (const parallel::GridShape& shape : grids()) {
      CAPTURE(shape.text());
      CAPTURE(static_cast<int>(configuration.transcoder.pseudo_derivative));
      CAPTURE(static_cast<int>(configuration.transcoder.decoder));
      Configuration dense = configuration;
      dense.transcoder.threshold_gradient = ThresholdGradient::dense;
      Run a(configuration, data, shape), b(dense, data, shape);
      for (std::int64_t i = 0; i < 4; ++i) {
        a.step(data, i), b.step(data, i);
        const TrainingMetrics of = a.trainer.metrics(), expected = b.trainer.metrics();
        CHECK(of.loss == doctest::Approx(expected.loss).epsilon(1e-5));
        // Entries of windows do not count.
        CHECK(of.l0 == expected.l0);
        CHECK(of.dead_fraction == expected.dead_fraction);
        CHECK(of.sparsity_penalty == doctest::Approx(expected.sparsity_penalty).epsilon(1e-5));
      }
      const auto values = a.parameters(), reference = b.parameters();
      for (std::size_t i = 0; i < reference.size(); ++i) {
        CAPTURE(reference[i].first);
        const std::vector<double> wide(reference[i].second.begin(), reference[i].second.end());
        CHECK(relative_difference(values[i].second, wide) <= 1e-5);
      }
    }
}

TEST_CASE("penalties with decoder norms equal the dense float64 trainer, for batch_topk and jumprelu, also clipped") {
  Configuration sparse = configuration_for(Scope::layer);
  sparse.transcoder.sparsity = 0.1;
  sparse.transcoder.sparsity_scale = 2;
  sparse.transcoder.sparsity_end = 0.75;  // rises over three of four steps
  Configuration both = jumping(JumpForm::anthropic);
  both.transcoder.sparsity = 0.1;
  both.transcoder.preactivation_penalty = 0.02;
  Configuration negative = jumping(JumpForm::goreg);
  negative.transcoder.sparsity = 0.1;
  negative.transcoder.preactivation_penalty = 0.02;
  negative.transcoder.preactivation_form = PreactivationForm::negative;
  negative.optimizer.clip_norm = 0.02;
  for (const Configuration& configuration : {sparse, both, negative}) compare_with_reference(configuration);
}

/// k so small, and a window so short, that some features are dead from the second step on.
Configuration with_dead_features() {
  Configuration configuration = configuration_for(Scope::layer);
  configuration.transcoder.k = 0.5;
  configuration.transcoder.dead_window = kTokens;
  configuration.transcoder.auxk = 0.25;
  configuration.transcoder.auxk_features = 3;
  return configuration;
}

TEST_CASE("the auxiliary loss of dead features equals the dense float64 trainer, also clipped and with penalties") {
  Configuration plain = with_dead_features(), clipped = plain, per_layer = plain, jump = jumping(JumpForm::anthropic);
  clipped.optimizer.clip_norm = 0.02;
  clipped.transcoder.sparsity = 0.1;
  per_layer.transcoder.decoder = Decoder::per_layer;
  per_layer.transcoder.skip = Skip::linear;
  jump.transcoder.threshold = 1.2;  // few exceed it
  jump.transcoder.bandwidth = 2;
  jump.transcoder.dead_window = kTokens;
  jump.transcoder.auxk = 0.25;
  jump.transcoder.auxk_features = kFeatures + 1;  // all that are dead and positive
  for (const Configuration& configuration : {plain, clipped, per_layer, jump}) compare_with_reference(configuration);
}

TEST_CASE("the auxiliary loss reaches dead features alone") {
  const Data data;
  const Configuration with = with_dead_features();
  Configuration without = with;
  without.transcoder.auxk = 0;
  for (const parallel::GridShape& shape : grids()) {
    Run a(with, data, shape), b(without, data, shape);
    a.step(data, 0), b.step(data, 0);
    CHECK(a.parameters() == b.parameters());  // none is dead before the first step
    const double dead = a.trainer.metrics().dead_fraction;
    CHECK(dead > 0.1);
    a.step(data, 1), b.step(data, 1);
    const auto with_loss = a.parameters(), without_loss = b.parameters();
    double changed = 0;
    for (std::size_t i = 0; i < with_loss.size(); ++i) {
      const auto& [name, values] = with_loss[i];
      if (name == "decoder_bias" || name.starts_with("decoder_bias.")) CHECK(values == without_loss[i].second);
      if (!name.ends_with("/bias")) continue;
      for (std::size_t f = 0; f < values.size(); ++f) changed += values[f] != without_loss[i].second[f] ? 1 : 0;
    }
    CHECK(changed > 0);
    CHECK(changed <= dead * kLayers * kFeatures + 0.5);
  }
}

TEST_CASE("k declines from k_initial in whole features, and then holds") {
  ModelSettings settings;
  settings.k = 2.5;
  settings.k_initial = 10;
  settings.k_end = 0.5;
  CHECK(k_at(settings, 1, 100) == 10);
  CHECK(k_at(settings, 26, 100) == 5);  // half way: the geometric mean
  settings.k_decline = Decline::linear;
  CHECK(k_at(settings, 26, 100) == 6);  // 6.25
  CHECK(k_at(settings, 50, 100) == 3);
  CHECK(k_at(settings, 51, 100) == 2.5);
  settings.k_initial = 0;
  CHECK(k_at(settings, 1, 100) == 2.5);
}

TEST_CASE("with a declining k, a step keeps what k then is, on every grid") {
  const Data data;
  for (const Activation activation : {Activation::batch_topk, Activation::topk}) {
    Configuration configuration = configuration_for(Scope::layer);
    configuration.transcoder.activation = activation;
    configuration.transcoder.k = 2;
    configuration.transcoder.k_initial = 8;
    configuration.transcoder.k_end = 0.75;  // 8, 5, 3, 2
    for (const parallel::GridShape& shape : grids()) {
      Run run(configuration, data, shape);
      for (const double k : {8, 5, 3, 2}) {
        run.step(data, 0);
        CHECK(run.trainer.metrics().l0_mean() == doctest::Approx(k).epsilon(1e-6));
      }
    }
  }
}

TEST_CASE("with tied decoders, four steps equal the dense float64 trainer") {
  Configuration configuration = configuration_for(Scope::layer);
  configuration.transcoder.decoder = Decoder::tied;
  compare_with_reference(configuration);
  configuration.transcoder.skip = Skip::linear;
  configuration.transcoder.sparsity = 0.1;
  configuration.optimizer.clip_norm = 0.02;
  configuration.transcoder.k = 0.5;
  configuration.transcoder.auxk = 0.25;
  configuration.transcoder.auxk_features = 3;
  configuration.transcoder.dead_window = kTokens;
  compare_with_reference(configuration);
  configuration = jumping(JumpForm::goreg);
  configuration.transcoder.decoder = Decoder::tied;
  compare_with_reference(configuration);
}

// Their gradients are compared with the float64 reference in tests/reference/agreement_test.py.
std::vector<Configuration> with_other_decoders() {
  Configuration by_target = configuration_for(Scope::layer), low_rank = by_target, affine = with_dead_features();
  by_target.transcoder.decoder = affine.transcoder.decoder = Decoder::tied_target;
  by_target.transcoder.ranking = Ranking::decoder_norm;
  by_target.transcoder.sparsity = 0.1;
  affine.transcoder.decoder_affine = true;
  affine.transcoder.decoder_scale_initial = 0.1;
  affine.optimizer.clip_norm = 0.02;
  low_rank.transcoder.decoder = Decoder::low_rank;
  low_rank.transcoder.rank = 7;
  low_rank.optimizer.clip_norm = 0.02;
  Configuration dead = with_dead_features(), thresholds = jumping(JumpForm::anthropic), of_rank = thresholds;
  dead.transcoder.decoder = of_rank.transcoder.decoder = Decoder::low_rank;
  dead.transcoder.rank = of_rank.transcoder.rank = 3;
  dead.optimizer.clip_norm = 0.02;
  dead.optimizer.clip_mode = optimizer::ClipMode::previous;
  thresholds.transcoder.decoder = Decoder::tied_target;
  thresholds.transcoder.preactivation_penalty = 0.01;
  return {by_target, affine, low_rank, dead, thresholds, of_rank};
}

TEST_CASE("decoders tied per target and of low rank train the same on every grid") {
  const Data data;
  for (const Configuration& configuration : with_other_decoders()) equal_on_every_grid(configuration, data);
}

TEST_CASE("every decoder trains with every activation and scope, the same on every grid") {
  const Data data;
  for (const Decoder decoder :
       {Decoder::cross_layer, Decoder::per_layer, Decoder::tied, Decoder::tied_target, Decoder::low_rank})
    for (const Activation activation :
         {Activation::batch_topk, Activation::topk, Activation::relu, Activation::jumprelu})
      for (const Scope scope : {Scope::layer, Scope::all_layers}) {
        if (scope == Scope::all_layers && !kernels::activation_keeps_k(activation)) continue;
        CAPTURE(static_cast<int>(decoder));
        CAPTURE(static_cast<int>(activation));
        CAPTURE(static_cast<int>(scope));
        Configuration configuration =
            activation == Activation::jumprelu ? jumping(JumpForm::anthropic) : configuration_for(scope);
        configuration.transcoder.activation = activation;
        configuration.transcoder.decoder = decoder;
        configuration.transcoder.rank = decoder == Decoder::low_rank ? 7 : 0;
        configuration.transcoder.decoder_affine = decoder == Decoder::tied_target && activation != Activation::jumprelu;
        configuration.transcoder.decoder_scale_initial = 0.1;
        if (activation == Activation::topk) configuration.transcoder.k = 3;
        // Offsets begin at zero: of a gradient whose terms cancel, Adam would show the rounding.
        configuration.optimizer.epsilon = 1e-5;
        equal_on_every_grid(configuration, data);
      }
}

TEST_CASE("a low-rank decoder of full rank with unit bases trains activations as the decoder that is their product") {
  const Data data;
  Configuration low_rank = configuration_for(Scope::layer), plain = low_rank;
  low_rank.transcoder.decoder = Decoder::low_rank;
  low_rank.transcoder.rank = kWidth;
  Run a(low_rank, data, parallel::data_by_feature(1, testing::world().size())), b(plain, data, a.grid.shape());
  for (std::int64_t t = 0; t < kLayers; ++t) {
    const kernels::ParameterRows& basis = a.trainer.model().basis()[static_cast<std::size_t>(t)];
    std::vector<float> unit(static_cast<std::size_t>(basis.rows * kWidth), 0.0f);
    for (std::int64_t row = 0; row < basis.rows; ++row) unit[static_cast<std::size_t>(row * kWidth + row % kWidth)] = 1;
    const device::Buffer<float> on_device(std::ssize(unit));
    device::copy(testing::execution(), on_device.data(), unit.data(), on_device.bytes(), device::Direction::to_device);
    kernels::weights_from_float(testing::execution(), basis, 0, on_device.matrix(basis.rows, kWidth));
    kernels::fence(testing::execution());
  }
  a.step(data, 0), b.step(data, 0);
  // The same initial values and, in this step, the same activations: encoders see the same gradients.
  CHECK(a.losses[0] == doctest::Approx(b.losses[0]).epsilon(1e-6));
  const auto of = a.parameters(), expected = b.parameters();
  for (std::size_t i = 0; i < expected.size() && expected[i].first.starts_with("encoder_0"); ++i) {
    REQUIRE(of[i].first == expected[i].first);
    const std::vector<double> wide(expected[i].second.begin(), expected[i].second.end());
    CHECK(relative_difference(of[i].second, wide) <= 1e-5);
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

TEST_CASE("entries of the windows need room too: without it the run ends before any parameter changes") {
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
    CHECK_THROWS_WITH_AS(run.step(data, 0), doctest::Contains("in the window below it"), Error);
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
  narrow.optimizer.state = kernels::StatePolicy::eight_bit;
  narrow.precision = Precision::bf16;
  per_token.transcoder.activation = Activation::topk;
  per_token.transcoder.k = 3;
  whole.transcoder.activation = Activation::relu;
  whole.data.micro_tokens = 0;
  by_layer.parallel.exchange.together = false;
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
      const training::StepArena planned =
          measure_step(configuration, sizes, shape, kLayers * kWidth * 4, testing::execution().backend);
      const device::MemoryUse before = device::memory_use();
      std::int64_t normalisation = 0;
      {
        const NormalisationOnDevice vectors(data.normalisation, data.statistics, testing::execution());
        normalisation = device::memory_use().device_bytes - before.device_bytes;
      }
      const Run run(configuration, data, shape);
      const training::StepArena& taken = run.trainer.memory();
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

TEST_CASE("with the selection on rank 0, the plan is that of rank 0") {
  const Data data;
  Configuration configuration = configuration_for(Scope::layer);
  configuration.parallel.exchange.selection = SelectionPlace::rank_0;
  for (const parallel::GridShape& shape : grids()) {
    const Shape sizes = shape_of(configuration.transcoder, kLayers, kWidth);
    const training::StepArena planned =
        measure_step(configuration, sizes, shape, kLayers * kWidth * 4, testing::execution().backend);
    const device::MemoryUse before = device::memory_use();
    const Run run(configuration, data, shape);
    const std::int64_t state = run.trainer.model().parameters().bytes().total() + 8 * 4 * kLayers * kWidth,
                       taken = device::memory_use().device_bytes - before.device_bytes - state;
    if (testing::world().rank() == 0)
      CHECK(taken == planned.device_bytes());
    else
      CHECK(taken <= planned.device_bytes());
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

TEST_CASE("a run repeats bit for bit on the same grid, in fp32 and in 8 bit") {
  for (const auto& [policy, activation] : {std::pair{kernels::StatePolicy::fp32, Activation::batch_topk},
                                           {kernels::StatePolicy::eight_bit, Activation::batch_topk},
                                           {kernels::StatePolicy::fp32, Activation::jumprelu},
                                           {kernels::StatePolicy::eight_bit, Activation::jumprelu}})
    for (const ThresholdGradient gradient : {ThresholdGradient::dense, ThresholdGradient::listed}) {
      if (gradient == ThresholdGradient::listed && activation != Activation::jumprelu) continue;
      Configuration configuration = configuration_for(Scope::layer);
      configuration.transcoder.skip = Skip::linear;
      configuration.optimizer.state = policy;
      if (policy == kernels::StatePolicy::eight_bit) configuration.precision = Precision::bf16;
      configuration.transcoder.activation = activation;
      configuration.transcoder.threshold_gradient = gradient;
      configuration.transcoder.dead_window = kTokens;
      configuration.transcoder.auxk = 0.1;
      const Data data;
      for (const parallel::GridShape& shape : grids()) {
        std::vector<std::vector<std::byte>> first;
        for (int repetition = 0; repetition < 2; ++repetition) {
          Run run(configuration, data, shape);
          for (std::int64_t i = 0; i < 4; ++i) run.step(data, i);
          std::size_t index = 0;
          for (const checkpoint::Tensor& tensor : run.trainer.registry().tensors()) {
            std::vector<std::byte> bytes = testing::bits_of(tensor);
            if (repetition == 0)
              first.push_back(std::move(bytes));
            else
              CHECK(bytes == first[index++]);
          }
        }
      }
    }
}

/// Whether the dense library gives a token the same product in a whole batch and in a slice of it: it promises no such
/// thing. On all ranks.
bool products_are_those_of_a_whole_batch(Precision precision, parallel::Range slice) {
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
      .policy = precision == Precision::bf16 ? kernels::StatePolicy::bf16 : kernels::StatePolicy::fp32,
      .rows = kFeatures,
      .columns = d,
      .segment = d,
      .weight = memory.data() + kTokens * d * element};
  const device::Buffer<std::byte> workspace(
      kernels::encode_workspace(testing::execution().backend, kTokens, kFeatures, d, x.type, encoder.policy, x.type));
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
    for (const kernels::StatePolicy policy :
         {kernels::StatePolicy::fp32, kernels::StatePolicy::bf16, kernels::StatePolicy::eight_bit}) {
      CAPTURE(shape.size(parallel::kDataAxis));
      CAPTURE(shape.size(parallel::kFeatureAxis));
      CAPTURE(static_cast<int>(policy));
      Configuration configuration = with_dead_features();
      configuration.transcoder.scope = Scope::all_layers;
      configuration.optimizer.state = policy;
      if (policy != kernels::StatePolicy::fp32) configuration.precision = Precision::bf16;
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
      run.trainer.settle();
      for (const checkpoint::Tensor& tensor : run.trainer.registry().tensors()) {
        CAPTURE(tensor.name);
        const checkpoint::Tensor& expected = *alone.trainer.registry().find(tensor.name);
        const std::vector<std::byte> own = testing::bits_of(tensor), all = testing::bits_of(expected);
        const std::int64_t begin = (tensor.held.begin - expected.held.begin) * tensor.row_bytes();
        CHECK(std::memcmp(own.data(), all.data() + begin, own.size()) == 0);
      }
    }
}

TEST_CASE("errors in raw space and unexplained variance, and biases of pairs, train the same on every grid") {
  const Data data;
  for (const ErrorForm error : {ErrorForm::raw, ErrorForm::unexplained}) {
    Configuration configuration = configuration_for(Scope::layer);
    configuration.transcoder.error = error;
    configuration.transcoder.decoder_bias = DecoderBias::pair;
    configuration.transcoder.sparsity = 0.1;
    configuration.transcoder.sparsity_reduction = Reduction::layers;
    configuration.optimizer.clip_norm = 0.02;
    equal_on_every_grid(configuration, data);
  }
}

TEST_CASE("resampled features and biases from data are the same on every grid") {
  const Data data;
  for (const Activation activation : {Activation::batch_topk, Activation::jumprelu}) {
    Configuration configuration = configuration_for(Scope::layer);
    configuration.transcoder.activation = activation;
    configuration.transcoder.k = 0.5;
    configuration.transcoder.dead_window = kTokens;
    configuration.transcoder.resample_every = 1;
    configuration.transcoder.encoder_bias_initial = EncoderBiasInitial::data;
    configuration.transcoder.initially_active = 9;
    equal_on_every_grid(configuration, data);
  }
}

TEST_CASE("ranking by z-scores selects the same on every number of ranks on the feature axis") {
  const Data data;
  for (const Activation activation : {Activation::batch_topk, Activation::topk}) {
    Configuration configuration = configuration_for(Scope::all_layers);
    configuration.transcoder.activation = activation;
    configuration.transcoder.k = 2;
    configuration.transcoder.ranking = Ranking::z_score;
    const parallel::GridShape shape = parallel::data_by_feature(1, testing::world().size());
    equal_on(configuration, data, {shape});
    CHECK(measure_step(configuration, shape_of(configuration.transcoder, kLayers, kWidth), shape, kLayers * kWidth * 4,
                       testing::execution().backend)
              .device_bytes() == Run(configuration, data, shape).trainer.memory().device_bytes());
  }
}

TEST_CASE("k of all layers together is k of each times the layers") {
  Configuration configuration = configuration_for(Scope::all_layers);
  configuration.transcoder.k_total = 7.5;
  resolve_k(configuration, kLayers);
  CHECK(configuration.transcoder.k == 2.5);
  configuration.transcoder.activation = Activation::topk;
  CHECK_THROWS_AS(check_layers(configuration, kLayers), Error);  // 7.5 features of a token
  configuration.transcoder.k_total = 8;
  resolve_k(configuration, kLayers);
  CHECK_NOTHROW(check_layers(configuration, kLayers));
  configuration.transcoder.scope = Scope::layer;
  CHECK_THROWS_AS(check_layers(configuration, kLayers), Error);  // 8 / 3 features of a layer
  configuration.transcoder.k_total = kLayers * kFeatures + 1;
  CHECK_THROWS_AS(resolve_k(configuration, kLayers), Error);
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
