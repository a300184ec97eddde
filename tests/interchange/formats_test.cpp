// SPDX-License-Identifier: Apache-2.0
//
// Each format of a cross-layer transcoder from the definition of its layout, written element by element.
#include "interchange/formats.hpp"

#include "kernels/bf16.hpp"
#include "tests/interchange/known_model.hpp"

using namespace weft;
using namespace weft::interchange;
using namespace weft::interchange::testing;
using weft::testing::has;
using weft::testing::refusal;
using weft::testing::Scratch;
namespace fs = std::filesystem;

TEST_CASE("circuit-tracer: every element has its place, lazily by rows") {
  for (const bool thresholds : {false, true}) {
    const Scratch scratch;
    for (std::int64_t s = 0; s < L; ++s) {
      const auto named = [&](const char* part) { return fmt::format("{}_{}", part, s); };
      std::vector<Filled> tensors = {{named("W_enc"), {F, d}, [=](auto j) { return encoder(s, j / d, j % d); }},
                                     {named("b_enc"), {F}, [=](auto j) { return encoder_bias(s, j); }},
                                     {named("b_dec"), {d}, [=](auto j) { return decoder_bias(s, j); }}};
      if (thresholds) tensors.push_back({named("threshold"), {F}, [=](auto j) { return theta(s, j); }});
      write_file(scratch.path / (named("W_enc") + ".safetensors"), tensors);
      write_file(scratch.path / (named("W_dec") + ".safetensors"), {{named("W_dec"), {F, L - s, d}, [=](auto j) {
                                                                       return decoder(s, s + j / d % (L - s),
                                                                                      j / d / (L - s), j % d);
                                                                     }}});
    }
    write_text(scratch.path / "config.yaml",
               "model_name: \"gpt2\"  \nmodel_kind: cross_layer_transcoder # kind\ntranscoders:\n  - hf://a:b\n"
               "feature_input_hook: 'hook_resid_mid'\n");
    CHECK(is_directory_of_weights(scratch.path));
    const Opened opened = open_directory(scratch.path);
    CHECK(opened.rows->contents().thresholds == thresholds);
    check_rows(*opened.rows, 2);
    const std::string text = summary(opened, scratch.path);
    CHECK(has(text, "format of circuit-tracer"));
    CHECK(has(text, "gpt2"));
    CHECK(has(text, "hook_resid_mid"));
    CHECK(has(text, thresholds ? "JumpReLU" : "ReLU"));
    write_text(scratch.path / "config.yaml", "model_kind: transcoder_set\n");
    CHECK(has(refusal(ExitCode::usage, [&] { open_directory(scratch.path); }), "transcoder_set"));
  }
}

TEST_CASE("crosslayer-coding: biases of the pairs add up, thresholds are logarithms") {
  const Scratch scratch;
  std::vector<Filled> tensors = {
      {"theta_manager.log_threshold", {L, F}, [](auto j) { return std::log(theta(j / F, j % F)); }}};
  for (std::int64_t s = 0; s < L; ++s) {
    tensors.push_back({fmt::format("encoder_module.encoders.{}.weight", s), {F, d}, [=](auto j) {
                         return encoder(s, j / d, j % d);
                       }});
    tensors.push_back(
        {fmt::format("encoder_module.encoders.{}.bias_param", s), {F}, [=](auto j) { return encoder_bias(s, j); }});
    for (std::int64_t t = s; t < L; ++t) {
      const std::string name = fmt::format("decoder_module.decoders.{}->{}.", s, t);
      tensors.push_back({name + "weight", {d, F}, [=](auto j) { return decoder(s, t, j % F, j / F); }});
      // Sums to decoder_bias: s + 1 in those of other layers, the rest in the own layer's.
      tensors.push_back({name + "bias_param", {d}, [=](auto j) {
                           return s < t ? static_cast<float>(s + 1)
                                        : decoder_bias(t, j) - static_cast<float>(t * (t + 1) / 2);
                         }});
    }
  }
  write_file(scratch.path / "clt_checkpoint_97689.safetensors", tensors);
  write_text(scratch.path / "cfg.json",
             R"({"num_features": 5, "num_layers": 3, "d_model": 4, "activation_fn": "jumprelu",
    "normalization_method": "auto_sqrt_d_model", "model_name": "gpt2", "mlp_input_template": null})");
  {
    const Opened opened = open_directory(scratch.path);
    CHECK(opened.keeps_equal);
    CHECK(opened.normalised.mode == dataset::Normalise::scalar);
    CHECK(opened.normalised.statistics.inputs.mean_norm == std::vector<double>(L, 1.0));
    check_rows(*opened.rows, 3);
  }
  // What Weft lacks is named.
  for (const char* const refused :
       {R"("skip_connection": true)", R"("decoder_tying": "per_source", "enable_feature_scale": true)",
        R"("decoder_tying": "per_source", "enable_feature_offset": true)", R"("decoder_tying": "both")",
        R"("activation_fn": "topk")", R"("normalization_method": "mean_std")"}) {
    write_text(scratch.path / "cfg.json",
               fmt::format(R"({{"num_features": 5, "num_layers": 3, "d_model": 4, {}}})", refused));
    const std::string message = refusal(ExitCode::usage, [&] { open_directory(scratch.path); });
    CHECK_MESSAGE(has(message, scratch.path.string()), message);
  }
}

TEST_CASE("crosslayer-coding: decoders tied per source or target, with skip matrices, offsets and scales") {
  struct Case {
    Tying tying;
    bool skip, offset, scale;
    const char* module;  // of offsets and scales; older files have other ones
  };
  for (const Case& of :
       {Case{Tying::per_source, false, false, false, ""}, Case{Tying::per_source, true, false, false, ""},
        Case{Tying::per_target, false, false, false, ""}, Case{Tying::per_target, true, true, true, "decoder_module."},
        Case{Tying::per_target, false, true, false, "encoder_module."},
        Case{Tying::per_target, false, false, true, ""}}) {
    const Scratch scratch;
    std::vector<Filled> tensors;
    const auto add = [&](std::string name, std::vector<std::int64_t> shape, std::function<float(std::int64_t)> value) {
      tensors.push_back({std::move(name), std::move(shape), std::move(value)});
    };
    for (std::int64_t i = 0; i < L; ++i) {
      const auto named = [&](const char* text) { return fmt::format(fmt::runtime(text), i); };
      add(named("encoder_module.encoders.{}.weight"), {F, d}, [=](auto j) { return encoder(i, j / d, j % d); });
      add(named("encoder_module.encoders.{}.bias_param"), {F}, [=](auto j) { return encoder_bias(i, j); });
      add(named("decoder_module.decoders.{}.weight"), {d, F}, [=](auto j) { return decoder(i, i, j % F, j / F); });
      // Per source, target t receives the biases of all sources up to t.
      add(named("decoder_module.decoders.{}.bias_param"), {d}, [=](auto j) {
        return decoder_bias(i, j) - (of.tying == Tying::per_source && i > 0 ? decoder_bias(i - 1, j) : 0);
      });
      if (of.skip) add(named("decoder_module.skip_weights.{}"), {d, d}, [=](auto j) { return other(i, j / d, j % d); });
      if (of.offset) add(of.module + named("feature_offset.{}"), {F}, [=](auto j) { return other(i, j, 0); });
      if (of.scale) add(of.module + named("feature_scale.{}"), {F}, [=](auto j) { return other(i, j, 0); });
    }
    write_file(scratch.path / "model.safetensors", tensors);
    write_text(scratch.path / "cfg.json",
               fmt::format(R"({{"num_features": 5, "num_layers": 3, "d_model": 4, "activation_fn": "relu",
                 "decoder_tying": "{}", "skip_connection": {}, "enable_feature_offset": {}, "enable_feature_scale": {}}})",
                           of.tying == Tying::per_source ? "per_source" : "per_target", of.skip, of.offset, of.scale));
    const Opened opened = open_directory(scratch.path);
    const Contents& contents = opened.rows->contents();
    CHECK(contents.tying == of.tying);
    CHECK(contents.skip == of.skip);
    CHECK(contents.affine == (of.offset || of.scale));
    CHECK(has(summary(opened, scratch.path), "tied per"));
    if (of.offset == of.scale) {
      check_rows(*opened.rows, 2);
      // What is written is read again as the same.
      write_directory(*opened.rows, Format::crosslayer_coding, kExact, {}, scratch.path / "again");
      const Opened again = open_directory(scratch.path / "again");
      CHECK(again.rows->contents().tying == of.tying);
      check_rows(*again.rows, 3);
      continue;
    }
    // Without offsets they are zero, without scales one.
    std::vector<float> offsets(F), scales(F);
    opened.rows->read(Part::offset, 1, {0, F}, offsets.data());
    opened.rows->read(Part::scale, 1, {0, F}, scales.data());
    CHECK(offsets[3] == (of.offset ? other(1, 3, 0) : 0.0f));
    CHECK(scales[3] == (of.scale ? other(1, 3, 0) : 1.0f));
  }
}

TEST_CASE("clt-forge: one file, or one for each part of the features") {
  for (const std::int64_t shards : {1, 2}) {
    const Scratch scratch;
    for (std::int64_t rank = 0; rank < shards; ++rank) {
      const std::int64_t first = F * rank / shards, n = F * (rank + 1) / shards - first;
      std::vector<std::pair<std::int64_t, std::int64_t>> pairs;
      for (std::int64_t s = 0; s < L; ++s)
        for (std::int64_t t = s; t < L; ++t) pairs.emplace_back(s, t);
      const auto m = static_cast<std::int64_t>(pairs.size());
      const auto pair = [=](std::int64_t j) { return pairs[static_cast<std::size_t>(j)]; };
      write_file(
          scratch.path / ((shards > 1 ? fmt::format("rank{}_", rank) : "") + "clt_weights.safetensors"),
          {{"W_enc", {L, d, n}, [=](auto j) { return encoder(j / n / d, first + j % n, j / n % d); }},
           {"b_enc", {L, n}, [=](auto j) { return encoder_bias(j / n, first + j % n); }},
           {"W_dec",
            {m, n, d},
            [=](auto j) { return decoder(pair(j / d / n).first, pair(j / d / n).second, first + j / d % n, j % d); }},
           {"b_dec",
            {m, d},
            [=](auto j) {
              const auto [s, t] = pair(j / d);
              return s < t ? static_cast<float>(s + 1) : decoder_bias(t, j % d) - static_cast<float>(t * (t + 1) / 2);
            }},
           {"log_threshold", {L, n}, [=](auto j) { return std::log(theta(j / n, first + j % n)); }},
           {"layer_mask", {L, m}, [](auto) { return 1.0f; }},
           {"estimated_norm_scaling_factor_in", {L}, [](auto j) { return static_cast<float>(j + 1); }},
           {"estimated_norm_scaling_factor_out", {L}, [](auto) { return 0.5f; }}});
    }
    write_text(scratch.path / "clt_cfg.json", R"({"cross_layer_decoders": true})");
    const Opened opened = open_directory(scratch.path);
    check_rows(*opened.rows, 4);
    CHECK(opened.normalised.mode == dataset::Normalise::scalar);
    CHECK(opened.normalised.statistics.inputs.mean_norm[1] == 1.0);  // sqrt(4) / 2
    CHECK(opened.normalised.statistics.targets.mean_norm[1] == 4.0);
    if (shards == 1) continue;
    fs::remove(scratch.path / "rank0_clt_weights.safetensors");
    CHECK(has(refusal(ExitCode::data, [&] { open_directory(scratch.path); }),
              "rank0_clt_weights.safetensors: is missing"));
  }
}

TEST_CASE("clt-forge without cross-layer decoders: a per-layer transcoder") {
  const Scratch scratch;
  write_file(scratch.path / "clt_weights.safetensors",
             {{"W_enc", {L, d, F}, [](auto) { return 1.0f; }},
              {"b_enc", {L, F}, [](auto) { return 1.0f; }},
              {"W_dec", {L, F, d}, [](auto j) { return decoder(j / d / F, j / d / F, j / d % F, j % d); }},
              {"b_dec", {L, d}, [](auto j) { return decoder_bias(j / d, j % d); }},
              {"log_threshold", {L, F}, [](auto) { return 0.0f; }},
              {"estimated_norm_scaling_factor_in", {L}, [](auto) { return 1.0f; }},
              {"estimated_norm_scaling_factor_out", {L}, [](auto) { return 1.0f; }}});
  write_text(scratch.path / "clt_cfg.json", R"({"cross_layer_decoders": false})");
  const Opened opened = open_directory(scratch.path);
  CHECK(opened.rows->contents().per_layer);
  for (std::int64_t s = 0; s < L; ++s) {
    const std::int64_t columns = d;
    std::vector<float> rows(static_cast<std::size_t>(F * columns));
    opened.rows->read(Part::decoder, s, {0, F}, rows.data());
    for (std::int64_t j = 0; j < F * columns; ++j)
      CHECK(rows[static_cast<std::size_t>(j)] == decoder(s, s, j / d, j % d));
    float bias[d];
    opened.rows->read(Part::decoder_bias, s, {0, d}, bias);
    CHECK(bias[1] == decoder_bias(s, 1));
  }
}

TEST_CASE("crosslayer-transcoder: decoders by target, standardisers unless folded") {
  const Scratch scratch;
  std::vector<Filled> tensors = {{"encoder.W", {L, d, F}, [](auto j) { return encoder(j / F / d, j % F, j / F % d); }},
                                 {"encoder.b", {L, F}, [](auto j) { return encoder_bias(j / F, j % F); }},
                                 {"decoder.b", {L, d}, [](auto j) { return decoder_bias(j / d, j % d); }},
                                 {"nonlinearity.theta", {1, L, F}, [](auto j) { return theta(j / F, j % F); }},
                                 {"nonlinearity.bandwidth", {}, [](auto) { return 1.0f; }},
                                 {"input_standardizer.mean", {L, d}, [](auto j) { return static_cast<float>(j); }},
                                 {"input_standardizer.std", {L}, [](auto j) { return static_cast<float>(j + 2); }}};
  for (std::int64_t t = 0; t < L; ++t)
    tensors.push_back({fmt::format("decoder.W_{}", t), {t + 1, F, d}, [=](auto j) {
                         return decoder(j / d / F, t, j / d % F, j % d);
                       }});
  write_file(scratch.path / "checkpoint.safetensors", tensors);
  const auto config = [&](const std::string& nonlinearity, const char* input, const char* folded) {
    write_text(scratch.path / "config.yaml",
               fmt::format("model:\n  init_args:\n    input_standardizer:\n      class_path: a.b.{}\n"
                           "    nonlinearity:\n      class_path: a.{}\n      init_args:\n        theta: 0.0\n"
                           "    output_standardizer:\n      class_path: a.b.Standardizer\n  is_folded: {}\n",
                           input, nonlinearity, folded));
  };
  config("JumpReLU", "LayerwiseInputStandardizer", "false");
  const Opened opened = open_directory(scratch.path);
  check_rows(*opened.rows, 5);
  CHECK(opened.normalised.mode == dataset::Normalise::per_dimension);
  CHECK(opened.normalised.statistics.inputs.mean[5] == 5.0);
  CHECK(opened.normalised.statistics.inputs.standard_deviation[5] + 1e-6 == doctest::Approx(3.0).epsilon(1e-15));
  CHECK(opened.normalised.statistics.targets.standard_deviation[5] + 1e-6 == doctest::Approx(1.0).epsilon(1e-15));
  config("JumpReLU", "SamplewiseInputStandardizer", "true");
  CHECK(open_directory(scratch.path).normalised.mode == dataset::Normalise::none);
  config("JumpReLU", "SamplewiseInputStandardizer", "false");
  CHECK(has(refusal(ExitCode::usage, [&] { open_directory(scratch.path); }), "SamplewiseInputStandardizer"));
  config("BatchTopK", "Standardizer", "false");
  CHECK(has(refusal(ExitCode::usage, [&] { open_directory(scratch.path); }), "BatchTopK"));
}

TEST_CASE("crosslayer-transcoder with a decoder per layer") {
  const Scratch scratch;
  write_file(scratch.path / "checkpoint.safetensors",
             {{"encoder.W", {L, d, F}, [](auto j) { return encoder(j / F / d, j % F, j / F % d); }},
              {"encoder.b", {L, F}, [](auto j) { return encoder_bias(j / F, j % F); }},
              {"decoder.W", {L, F, d}, [](auto j) { return decoder(j / d / F, j / d / F, j / d % F, j % d); }},
              {"decoder.b", {L, d}, [](auto j) { return decoder_bias(j / d, j % d); }}});
  write_text(scratch.path / "config.yaml", "nonlinearity:\n  class_path: a.ReLU\nis_folded: true\n");
  const Opened opened = open_directory(scratch.path);
  CHECK(opened.rows->contents().per_layer);
  check_rows(*opened.rows, 2);
}

TEST_CASE("written directories read back the same, also rounded to bf16") {
  for (const Format format : {Format::circuit_tracer, Format::crosslayer_coding})
    for (const bool thresholds : {false, true}) {
      const Scratch scratch;
      write_directory(Model(thresholds), format, kExact, {"gpt2", "in", "out"}, scratch.path / "new");
      check_rows(*open_directory(scratch.path / "new").rows, 2);
      CHECK(has(
          refusal(ExitCode::usage, [&] { write_directory(Model(false), format, kExact, {}, scratch.path / "new"); }),
          "nothing is overwritten"));
      write_directory(Model(thresholds), format, {kernels::Scalar::bf16, kernels::Scalar::fp32}, {},
                      scratch.path / "half");
      const Opened half = open_directory(scratch.path / "half");
      float value;
      half.rows->read(Part::encoder, 1, {3, 4}, std::vector<float>(d).data());
      half.rows->read(Part::encoder_bias, 1, {3, 4}, &value);
      CHECK(value == encoder_bias(1, 3));  // vectors stay fp32
      CHECK(half.rows->bytes_by_dtype().at("BF16") == 2 * (L * F * d + 6 * F * d));
      CHECK(std::distance(fs::directory_iterator(scratch.path), {}) == 2);
    }
}

TEST_CASE("crosslayer-coding has no skip connection of a layer alone") {
  const Scratch scratch;
  CHECK(has(refusal(ExitCode::usage,
                    [&] {
                      write_directory(Model(false, true), Format::crosslayer_coding, kExact, {},
                                      scratch.path / "other");
                    }),
            "skip"));
  CHECK(fs::is_empty(scratch.path));
}
