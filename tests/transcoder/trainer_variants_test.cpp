// SPDX-License-Identifier: Apache-2.0
//
// Activations, losses and decoders in the whole step, on every grid that fits the ranks: against the same on one rank.
#include <algorithm>
#include <vector>

#include "tests/transcoder/trainer_run.hpp"
#include "transcoder/run/plan.hpp"

namespace weft::transcoder {

TEST_CASE("jumprelu, clipped, penalised, with dead features and other decoders, trains the same on every grid") {
  const Data data;
  const Configuration plain = jumping(JumpForm::goreg), listed = listing(JumpForm::anthropic);
  Configuration thresholds = jumping(JumpForm::anthropic), negative = plain, tied = plain, clipped = listed,
                penalised = listed, listed_tied = listed, per_layer = listed, listed_dead = listed;
  thresholds.optimizer.clip_norm = negative.optimizer.clip_norm = 0.02;  // thresholds count in the norm
  thresholds.transcoder.sparsity = negative.transcoder.sparsity = 0.1;
  thresholds.transcoder.preactivation_penalty = negative.transcoder.preactivation_penalty = 0.02;
  negative.transcoder.preactivation_form = PreactivationForm::negative;
  tied.transcoder.decoder = listed_tied.transcoder.decoder = Decoder::tied;
  clipped.optimizer.clip_norm = penalised.optimizer.clip_norm = 0.02;
  penalised.transcoder.sparsity = 0.1;
  per_layer.transcoder.decoder = Decoder::per_layer;
  per_layer.transcoder.skip = Skip::linear;
  listed_dead.transcoder.threshold = 1.2;  // few exceed it
  listed_dead.transcoder.bandwidth = 2;
  listed_dead.transcoder.dead_window = kTokens;
  listed_dead.transcoder.auxk = 0.25;
  listed_dead.transcoder.auxk_features = kFeatures + 1;  // all that are dead and positive
  Configuration dead = listed_dead;
  dead.transcoder.threshold_gradient = ThresholdGradient::dense;
  for (const Configuration& configuration :
       {plain, listed, thresholds, negative, tied, clipped, penalised, listed_tied, per_layer, listed_dead, dead})
    equal_on_every_grid(configuration, data);
}

TEST_CASE("sparsity, the auxiliary loss of dead features and tied decoders train the same on every grid") {
  const Data data;
  Configuration sparse = configuration_for(Scope::layer);
  sparse.transcoder.sparsity = 0.1;
  sparse.transcoder.sparsity_scale = 2;
  sparse.transcoder.sparsity_end = 0.75;  // rises over three of four steps
  Configuration clipped = with_dead_features(), per_layer = clipped, tied = clipped;
  clipped.transcoder.sparsity = tied.transcoder.sparsity = 0.1;
  clipped.optimizer.clip_norm = tied.optimizer.clip_norm = 0.02;
  per_layer.transcoder.decoder = Decoder::per_layer;
  tied.transcoder.decoder = Decoder::tied;
  per_layer.transcoder.skip = tied.transcoder.skip = Skip::linear;
  for (const Configuration& configuration : {sparse, with_dead_features(), clipped, per_layer, tied})
    equal_on_every_grid(configuration, data);
}

TEST_CASE("listed windows train as all pre-activations do: every form, decoder and a bandwidth that changes") {
  const Data data;
  std::vector<Configuration> all;
  for (const JumpForm form :
       {JumpForm::anthropic, JumpForm::crosslayer_coding, JumpForm::clt_forge, JumpForm::openmoss, JumpForm::saelens})
    all.push_back(listing(form));
  all.push_back(listing(JumpForm::crosslayer_coding));
  all.back().transcoder.decoder = Decoder::tied_target;
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

TEST_CASE("decoders tied per target train the same on every grid") {
  const Data data;
  for (const Configuration& configuration : with_other_decoders()) equal_on_every_grid(configuration, data);
}

TEST_CASE("every decoder trains with every activation and scope, the same on every grid") {
  const Data data;
  for (const Decoder decoder : {Decoder::cross_layer, Decoder::per_layer, Decoder::tied, Decoder::tied_target})
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
        configuration.transcoder.decoder_affine = decoder == Decoder::tied_target && activation != Activation::jumprelu;
        configuration.transcoder.decoder_scale_initial = 0.1;
        if (activation == Activation::topk) configuration.transcoder.k = 3;
        // Offsets begin at zero: of a gradient whose terms cancel, Adam would show the rounding.
        configuration.optimizer.epsilon = 1e-5;
        equal_on_every_grid(configuration, data);
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

}  // namespace weft::transcoder
