// SPDX-License-Identifier: Apache-2.0
//
// Each format from the definition of its layout: values that encode what they are, written element by element.
#include "interchange/formats.hpp"

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>

#include "interchange/fold.hpp"
#include "kernels/bf16.hpp"
#include "tests/interchange/scratch.hpp"

using namespace weft;
using namespace weft::interchange;
using weft::testing::has;
using weft::testing::refusal;
using weft::testing::Scratch;
namespace fs = std::filesystem;

namespace {

constexpr std::int64_t L = 3, F = 5, d = 4;
constexpr Sizes kSizes{L, d, F};

// Different for every element, exact in fp32 and, except for decoders, in sums with biases.
float encoder(std::int64_t s, std::int64_t f, std::int64_t i) {
  return static_cast<float>(1000 + s * 100 + f * 10 + i);
}
float encoder_bias(std::int64_t s, std::int64_t f) { return static_cast<float>(2000 + s * 10 + f); }
float theta(std::int64_t s, std::int64_t f) { return 0.25f * static_cast<float>(1 + s * 10 + f); }
float decoder(std::int64_t s, std::int64_t t, std::int64_t f, std::int64_t i) {
  return static_cast<float>(10'000 + s * 1000 + t * 100 + f * 10 + i);
}
float other(std::int64_t layer, std::int64_t r, std::int64_t c) { return static_cast<float>(layer * 100 + r * 10 + c); }
float decoder_bias(std::int64_t t, std::int64_t i) { return static_cast<float>(3000 + t * 10 + i); }

/// A file whose tensors are filled by functions of their row-major index.
struct Filled {
  std::string name;
  std::vector<std::int64_t> shape;
  std::function<float(std::int64_t)> value;
};
void write_file(const fs::path& path, const std::vector<Filled>& tensors) {
  std::vector<SafetensorsWriter::Tensor> declared;
  for (const Filled& tensor : tensors) declared.push_back({tensor.name, kernels::Scalar::fp32, tensor.shape});
  SafetensorsWriter writer(path, declared);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::int64_t elements = 1;
    for (const std::int64_t extent : tensors[i].shape) elements *= extent;
    std::vector<float> values;
    for (std::int64_t j = 0; j < elements; ++j) values.push_back(tensors[i].value(j));
    writer.write(i, 0, values);
  }
  writer.finish();
}
void write_text(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

/// All parts have the values above; read in pieces of `step` rows. Thresholds within the rounding of exp(log).
void check_rows(const RowSource& source, std::int64_t step) {
  REQUIRE(source.contents().sizes.n_layers == L);
  REQUIRE(source.contents().sizes.n_features == F);
  REQUIRE(source.contents().sizes.d_model == d);
  for (const auto& [part, layer] : parts_of(source.contents())) {
    const Extent extent = extent_of(source.contents(), part, layer);
    for (std::int64_t begin = 0; begin < extent.rows; begin += step) {
      const parallel::Range rows{begin, std::min(extent.rows, begin + step)};
      std::vector<float> values(static_cast<std::size_t>(rows.size() * extent.columns), -1.0f);
      source.read(part, layer, rows, values.data());
      for (std::int64_t r = rows.begin; r < rows.end; ++r)
        for (std::int64_t c = 0; c < extent.columns; ++c) {
          const float value = values[static_cast<std::size_t>((r - rows.begin) * extent.columns + c)];
          CAPTURE(static_cast<int>(part));
          CAPTURE(layer);
          CAPTURE(r);
          CAPTURE(c);
          if (part == Part::encoder) CHECK(value == encoder(layer, r, c));
          if (part == Part::encoder_bias) CHECK(value == encoder_bias(layer, r));
          if (part == Part::threshold) CHECK(std::abs(value - theta(layer, r)) <= 1e-6f * theta(layer, r));
          if (part == Part::decoder) CHECK(value == decoder(layer, layer + c / d, r, c % d));
          if (part == Part::decoder_bias) CHECK(value == decoder_bias(layer, r));
          if (part == Part::skip || part == Part::offset || part == Part::scale) CHECK(value == other(layer, r, c));
        }
    }
  }
}

/// The model above as a source, for writing.
class Model : public RowSource {
 public:
  explicit Model(bool thresholds, bool skip = false)
      : contents_{.sizes = kSizes, .thresholds = thresholds, .skip = skip} {}
  explicit Model(Contents contents) : contents_(contents) {}
  const Contents& contents() const override { return contents_; }
  void read(Part part, std::int64_t layer, parallel::Range rows, float* to) const override {
    const std::int64_t columns = extent_of(contents_, part, layer).columns;
    for (std::int64_t r = rows.begin; r < rows.end; ++r)
      for (std::int64_t c = 0; c < columns; ++c)
        *to++ = part == Part::encoder        ? encoder(layer, r, c)
                : part == Part::encoder_bias ? encoder_bias(layer, r)
                : part == Part::threshold    ? theta(layer, r)
                : part == Part::decoder      ? decoder(layer, layer + c / d, r, c % d)
                : part == Part::decoder_bias ? decoder_bias(layer, r)
                                             : other(layer, r, c);
  }

 private:
  Contents contents_;
};

constexpr Storage kExact{kernels::Scalar::fp32, kernels::Scalar::fp32};

}  // namespace

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
      CHECK(!fs::exists(scratch.path / "half.tmp"));
    }
}

TEST_CASE("a skip matrix is stored as circuit-tracer multiplies it, x W") {
  const Scratch scratch;
  write_directory(Model(false, true), Format::circuit_tracer, kExact, {}, scratch.path / "new");
  const SafetensorsFile file((scratch.path / "new/W_enc_2.safetensors").string());
  float stored[d * d], read[d * d];
  file.read(*file.find("W_skip_2"), 0, d * d, stored);
  CHECK(stored[1 * d + 3] == 231.0f);  // input 1, output 3 of layer 2
  open_directory(scratch.path / "new").rows->read(Part::skip, 2, {0, d}, read);
  CHECK(read[3 * d + 1] == 231.0f);
  CHECK(has(refusal(ExitCode::usage,
                    [&] {
                      write_directory(Model(false, true), Format::crosslayer_coding, kExact, {},
                                      scratch.path / "other");
                    }),
            "skip"));
  CHECK(!fs::exists(scratch.path / "other"));
  CHECK(!fs::exists(scratch.path / "other.tmp"));
}

TEST_CASE("folding: the formulas, with biases of the rounded matrices") {
  dataset::Normalisation normalisation;
  for (std::int64_t j = 0; j < L * d; ++j) {
    normalisation.inputs.mean.push_back(static_cast<float>(j) - 3);
    normalisation.inputs.scale.push_back(1 + 0.1f * static_cast<float>(j));
    normalisation.targets.mean.push_back(2 - static_cast<float>(j));
    normalisation.targets.scale.push_back(3 + 0.1f * static_cast<float>(j));
  }
  const Model model(true, true);
  for (const kernels::Scalar type : {kernels::Scalar::fp32, kernels::Scalar::bf16}) {
    const FoldedRows folded(model, normalisation, type);
    const auto read = [&](Part part, std::int64_t layer) {
      const Extent extent = extent_of(model.contents(), part, layer);
      std::vector<float> values(static_cast<std::size_t>(extent.rows * extent.columns));
      folded.read(part, layer, {0, 1}, values.data());
      folded.read(part, layer, {1, extent.rows}, values.data() + extent.columns);
      return values;
    };
    const auto rounded = [&](float value) {
      return static_cast<double>(type == kernels::Scalar::bf16 ? float(kernels::to_bf16(value)) : value);
    };
    for (std::int64_t l = 0; l < L; ++l) {
      const auto at = [&](const std::vector<float>& all, std::int64_t layer, std::int64_t i) {
        return static_cast<double>(all[static_cast<std::size_t>(layer * d + i)]);
      };
      const std::vector<float> w = read(Part::encoder, l), b = read(Part::encoder_bias, l),
                               rows = read(Part::decoder, l), c = read(Part::decoder_bias, l),
                               skip = read(Part::skip, l);
      for (std::int64_t f = 0; f < F; ++f) {
        double shift = 0;
        for (std::int64_t i = 0; i < d; ++i) {
          const auto index = static_cast<std::size_t>(f * d + i);
          CHECK(w[index] ==
                static_cast<float>(static_cast<double>(encoder(l, f, i)) * at(normalisation.inputs.scale, l, i)));
          shift += rounded(w[index]) * at(normalisation.inputs.mean, l, i);
        }
        CHECK(b[static_cast<std::size_t>(f)] == static_cast<float>(encoder_bias(l, f) - shift));
        for (std::int64_t t = l; t < L; ++t)
          for (std::int64_t i = 0; i < d; ++i)
            CHECK(rows[static_cast<std::size_t>((f * (L - l) + t - l) * d + i)] ==
                  static_cast<float>(decoder(l, t, f, i) / at(normalisation.targets.scale, t, i)));
      }
      for (std::int64_t i = 0; i < d; ++i) {
        double shift = 0;
        for (std::int64_t j = 0; j < d; ++j)
          shift += rounded(skip[static_cast<std::size_t>(i * d + j)]) * at(normalisation.inputs.mean, l, j);
        CHECK(c[static_cast<std::size_t>(i)] ==
              static_cast<float>(decoder_bias(l, i) / at(normalisation.targets.scale, l, i) +
                                 at(normalisation.targets.mean, l, i) - shift));
      }
      CHECK(read(Part::threshold, l)[2] == theta(l, 2));
    }
  }
}

namespace {

/// The first `columns` columns of a decoder row are those of the own layer.
Contents single_layers(bool thresholds, bool skip, std::int64_t k = 0, bool autoencoder = false) {
  return {
      .sizes = kSizes, .thresholds = thresholds, .skip = skip, .per_layer = true, .autoencoder = autoencoder, .k = k};
}

}  // namespace

TEST_CASE("saelens and sparsify: a directory for each layer, read back the same") {
  struct Case {
    Format format;
    Contents contents;
    const char* architecture;  // of saelens
  };
  for (const Case& each : {Case{Format::saelens, single_layers(false, false), "transcoder"},
                           {Format::saelens, single_layers(false, true), "skip_transcoder"},
                           {Format::saelens, single_layers(true, false), "jumprelu_transcoder"},
                           {Format::saelens, single_layers(true, true), "jumprelu_skip_transcoder"},
                           {Format::saelens, single_layers(false, false, 0, true), "standard"},
                           {Format::saelens, single_layers(true, false, 0, true), "jumprelu"},
                           {Format::saelens, single_layers(false, false, 2, true), "topk"},
                           {Format::sparsify, single_layers(false, false, 2), nullptr},
                           {Format::sparsify, single_layers(false, true, 2), nullptr},
                           {Format::sparsify, single_layers(false, false, 2, true), nullptr}}) {
    const Scratch scratch;
    write_directory(Model(each.contents), each.format, kExact,
                    {"gpt2", each.architecture != nullptr ? "blocks.{}.in" : "h.{}.mlp", "h.{}.mlp"},
                    scratch.path / "new");
    const Opened opened = open_directory(scratch.path / "new");
    check_rows(*opened.rows, 2);
    const Contents& read = opened.rows->contents();
    CHECK(read.thresholds == each.contents.thresholds);
    CHECK(read.skip == each.contents.skip);
    CHECK(read.k == each.contents.k);
    CHECK(read.per_layer);
    CHECK(read.autoencoder == each.contents.autoencoder);
    if (each.architecture != nullptr) {
      const SortedJson config = json_object(scratch.path / "new/layer_1/cfg.json");
      CHECK(config["architecture"] == each.architecture);
      CHECK(config["metadata"]["hook_name"] == "blocks.1.in");
    } else {
      CHECK(fs::exists(scratch.path / "new/h.2.mlp/sae.safetensors"));
    }
    // One layer alone.
    const fs::path layer = scratch.path / "new" / (each.architecture != nullptr ? "layer_2" : "h.2.mlp");
    const Opened alone = open_directory(layer);
    CHECK(alone.rows->contents().sizes.n_layers == 1);
    float bias[d];
    alone.rows->read(Part::decoder_bias, 0, {0, d}, bias);
    CHECK(bias[1] == decoder_bias(2, 1));
  }
}

TEST_CASE("saelens and sparsify: an autoencoder that reads x - b_dec, layers in the order of their numbers") {
  for (const bool saelens : {true, false}) {
    const Scratch scratch;
    constexpr std::int64_t n_layers = 11;
    for (std::int64_t s = 0; s < n_layers; ++s) {
      const fs::path layer = scratch.path / fmt::format("layers.{}", s);
      fs::create_directories(layer);
      const auto weight = [=](auto j) { return saelens ? encoder(0, j % F, j / F) : encoder(0, j / d, j % d); };
      write_file(layer / (saelens ? "sae_weights.safetensors" : "sae.safetensors"),
                 {{saelens ? "W_enc" : "encoder.weight",
                   saelens ? std::vector<std::int64_t>{d, F} : std::vector<std::int64_t>{F, d}, weight},
                  {saelens ? "b_enc" : "encoder.bias", {F}, [=](auto) { return static_cast<float>(s); }},
                  {"W_dec", {F, d}, [=](auto) { return 1.0f; }},
                  {"b_dec", {d}, [=](auto j) { return static_cast<float>(j); }}});
      write_text(layer / "cfg.json", saelens ? R"({"architecture": "standard", "d_in": 4, "d_sae": 5})"
                                             : R"({"d_in": 4, "num_latents": 5, "k": 3})");
    }
    const Opened opened = open_directory(scratch.path);
    CHECK(opened.rows->contents().sizes.n_layers == n_layers);
    CHECK(opened.rows->contents().autoencoder);
    CHECK(opened.rows->contents().k == (saelens ? 0 : 3));
    for (const std::int64_t layer : {2, 10}) {
      float values[2];
      opened.rows->read(Part::encoder_bias, layer, {1, 3}, values);
      for (std::int64_t f = 1; f < 3; ++f) {
        double shift = 0;
        for (std::int64_t i = 0; i < d; ++i) shift += static_cast<double>(encoder(0, f, i)) * static_cast<double>(i);
        CHECK(values[f - 1] == static_cast<float>(static_cast<double>(layer) - shift));
      }
    }
  }
}

TEST_CASE("saelens and sparsify: what cannot be expressed or read is refused with its name") {
  const Scratch scratch;
  const auto refused = [&](const Contents& contents, Format format) {
    return refusal(ExitCode::usage,
                   [&] { write_directory(Model(contents), format, kExact, {}, scratch.path / "refused"); });
  };
  CHECK(has(refused({.sizes = kSizes}, Format::saelens), "per_layer"));
  CHECK(has(refused(single_layers(true, false), Format::sparsify), "threshold"));
  CHECK(has(refused(single_layers(false, false, 2), Format::saelens), "sparsify"));
  CHECK(!fs::exists(scratch.path / "refused"));

  write_directory(Model(single_layers(false, false, 2)), Format::sparsify, kExact, {}, scratch.path / "sparsify");
  write_directory(Model(single_layers(true, false)), Format::saelens, kExact, {}, scratch.path / "saelens");
  const auto changed = [&](const char* directory, const char* key, const SortedJson& value, ExitCode code) {
    const fs::path path = scratch.path / directory / "cfg.json";
    const SortedJson good = json_object(path);
    SortedJson bad = good;
    bad[key] = value;
    write_text(path, json_text(bad));
    const std::string message = refusal(code, [&] { open_directory(path.parent_path().parent_path()); });
    CHECK_MESSAGE(has(message, scratch.path.string()), message);
    write_text(path, json_text(good));
    return message;
  };
  CHECK(has(changed("saelens/layer_1", "architecture", "gated", ExitCode::usage), "gated"));
  CHECK(has(changed("saelens/layer_0", "normalize_activations", "layer_norm", ExitCode::usage), "layer_norm"));
  CHECK(has(changed("saelens/layer_0", "d_sae", "five", ExitCode::data), "d_sae"));
  CHECK(has(changed("saelens/layer_2", "d_sae", 6, ExitCode::usage), "layer_2"));
  CHECK(has(changed("saelens/layer_0", "d_out", 3, ExitCode::usage), "width"));
  CHECK(has(changed("sparsify/layers.1.mlp", "activation", "groupmax", ExitCode::usage), "groupmax"));
  CHECK(has(changed("sparsify/layers.0.mlp", "k", -1, ExitCode::data), "\"k\""));
  CHECK(has(changed("sparsify/layers.0.mlp", "embed_skip", true, ExitCode::usage), "embed_skip"));
  const fs::path weights = scratch.path / "sparsify/layers.1.mlp/sae.safetensors";
  fs::resize_file(weights, fs::file_size(weights) - 1);
  CHECK(has(refusal(ExitCode::data, [&] { open_directory(scratch.path / "sparsify"); }), "layers.1.mlp"));
}

namespace {

/// Header and values of a safetensors file.
struct Container {
  SortedJson header;
  std::string values;

  explicit Container(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    header = parse_json<SortedJson>(bytes.substr(8, length));
    values = bytes.substr(8 + length);
  }
  void write(const fs::path& path) const {
    const std::string text = json_text(header);
    const std::uint64_t length = text.size();
    std::string head(8, '\0');
    std::memcpy(head.data(), &length, 8);
    std::ofstream(path, std::ios::binary) << head << text << values;
  }
};

/// Directories of all formats, with the model above.
void write_all_formats(const fs::path& directory) {
  write_directory(Model(true, true), Format::circuit_tracer, kExact, {}, directory / "circuit-tracer");
  write_directory(Model(true), Format::crosslayer_coding, kExact, {}, directory / "crosslayer-coding");
  write_directory(
      Model(Contents{.sizes = kSizes, .thresholds = true, .skip = true, .tying = Tying::per_target, .affine = true}),
      Format::crosslayer_coding, kExact, {}, directory / "crosslayer-coding.tied");
  write_directory(Model(single_layers(true, true)), Format::saelens, kExact, {}, directory / "saelens");
  write_directory(Model(single_layers(false, true, 2)), Format::sparsify, kExact, {}, directory / "sparsify");
  const auto one = [](auto) { return 1.0f; };
  fs::create_directories(directory / "clt-forge");
  write_text(directory / "clt-forge/clt_cfg.json", "{}");
  write_file(directory / "clt-forge/clt_weights.safetensors", {{"W_enc", {L, d, F}, one},
                                                               {"b_enc", {L, F}, one},
                                                               {"W_dec", {6, F, d}, one},
                                                               {"b_dec", {6, d}, one},
                                                               {"log_threshold", {L, F}, one},
                                                               {"estimated_norm_scaling_factor_in", {L}, one},
                                                               {"estimated_norm_scaling_factor_out", {L}, one}});
  fs::create_directories(directory / "crosslayer-transcoder");
  write_text(directory / "crosslayer-transcoder/config.yaml",
             "nonlinearity:\n  class_path: a.JumpReLU\ninput_standardizer:\n  class_path: a.DimensionwiseS\n"
             "output_standardizer:\n  class_path: a.LayerwiseS\n");
  write_file(directory / "crosslayer-transcoder/checkpoint.safetensors", {{"encoder.W", {L, d, F}, one},
                                                                          {"encoder.b", {L, F}, one},
                                                                          {"decoder.W_0", {1, F, d}, one},
                                                                          {"decoder.W_1", {2, F, d}, one},
                                                                          {"decoder.W_2", {3, F, d}, one},
                                                                          {"decoder.b", {L, d}, one},
                                                                          {"nonlinearity.theta", {1, L, F}, one},
                                                                          {"input_standardizer.mean", {L, d}, one},
                                                                          {"input_standardizer.std", {L, d}, one},
                                                                          {"output_standardizer.mean", {L}, one},
                                                                          {"output_standardizer.std", {L}, one}});
}

}  // namespace

TEST_CASE("every tensor of every format: of another type or shape, missing or cut off, it is named with its file") {
  const Scratch scratch;
  write_all_formats(scratch.path);
  int tensors = 0;
  for (const fs::directory_entry& format : fs::directory_iterator(scratch.path)) {
    const auto refused = [&](const std::string& path, const std::string& tensor) {
      const std::string message = refusal(ExitCode::data, [&] { open_directory(format.path()); });
      CHECK_MESSAGE(has(message, path), message);
      CHECK_MESSAGE(has(message, tensor), message);
    };
    CHECK(open_directory(format.path()).format == format.path().stem().string());
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(format.path())) {
      if (entry.path().extension() != ".safetensors") continue;
      const std::string path = entry.path().string();
      const Container good(path);
      for (const auto& [name, described] : good.header.items()) {
        if (name == "__metadata__") continue;
        ++tensors;
        Container bad = good;
        bad.header[name]["dtype"] = "I32";
        bad.write(path);
        refused(path, name);
        bad = good;
        std::vector<std::int64_t> shape = described["shape"];
        shape.push_back(1);
        bad.header[name]["shape"] = shape;
        bad.write(path);
        refused(path, name);
        bad = good;
        bad.header.erase(name);
        bad.header["another"] = described;
        bad.write(path);
        // Without thresholds or skip matrix in the first file the others have one too many, which has no counterpart.
        const bool optional = name == "threshold_0" || name == "W_skip_0" || name == "nonlinearity.theta";
        if (!optional) refused(path, name);
      }
      Container bad = good;
      bad.values.pop_back();
      bad.write(path);
      refused(path, "");
      good.write(path);
    }
  }
  CHECK(tensors == 3 * 6 + (3 * 2 + 6 * 2 + 1) + (3 * 7 + 1) + 3 * 6 + 3 * 5 + 7 + 11);
}
