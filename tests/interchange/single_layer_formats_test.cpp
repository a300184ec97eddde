// SPDX-License-Identifier: Apache-2.0
//
// Formats with a directory for each layer, SAELens and sparsify, from the definition of their layout.
#include "tests/interchange/known_model.hpp"

using namespace weft;
using namespace weft::interchange;
using namespace weft::interchange::testing;
using weft::testing::has;
using weft::testing::refusal;
using weft::testing::Scratch;
namespace fs = std::filesystem;

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
