// SPDX-License-Identifier: Apache-2.0
//
// Every key of a foreign configuration is applied, or is an error that names it; sets of files are complete.
#include "interchange/hooks.hpp"
#include "tests/interchange/known_model.hpp"

using namespace weft;
using namespace weft::interchange;
using namespace weft::interchange::testing;
using weft::testing::has;
using weft::testing::refusal;
using weft::testing::Scratch;
namespace fs = std::filesystem;

namespace {

constexpr Contents kSet{.sizes = kSizes, .thresholds = true, .skip = true, .per_layer = true};

/// Writes clt_cfg.json with `more` and the weights of CLT-Forge in one file, or in parts of 3 and 2 features.
void write_clt_forge(const fs::path& directory, const std::string& more, bool shards = false) {
  const std::vector<std::pair<std::string, std::int64_t>> files =
      shards ? std::vector<std::pair<std::string, std::int64_t>>{{"rank0_", 3}, {"rank1_", 2}}
             : std::vector<std::pair<std::string, std::int64_t>>{{"", F}};
  for (const auto& [prefix, n] : files)
    write_file(directory / (prefix + "clt_weights.safetensors"),
               {{"W_enc", {L, d, n}, [](auto) { return 1.0f; }},
                {"b_enc", {L, n}, [](auto) { return 1.0f; }},
                {"W_dec", {6, n, d}, [](auto) { return 1.0f; }},
                {"b_dec", {6, d}, [](auto) { return 1.0f; }},
                {"log_threshold", {L, n}, [](auto) { return -1.0f; }},
                {"estimated_norm_scaling_factor_in", {L}, [](auto) { return 1.0f; }},
                {"estimated_norm_scaling_factor_out", {L}, [](auto) { return 1.0f; }}});
  write_text(directory / "clt_cfg.json", "{" + more + "}");
}

/// The message of opening `directory` with a key of the JSON file changed.
std::string with_key(const fs::path& file, const fs::path& directory, const char* key, const SortedJson& value,
                     ExitCode code = ExitCode::usage) {
  const SortedJson good = json_object(file);
  SortedJson changed = good;
  changed[key] = value;
  write_text(file, json_text(changed));
  const std::string message = refusal(code, [&] { open_directory(directory); });
  write_text(file, json_text(good));
  CHECK_MESSAGE(has(message, file.string()), message);
  return message;
}

}  // namespace

TEST_CASE("clt-forge: activation_fn is applied, sizes and shards are those of the configuration") {
  {
    const Scratch scratch;
    write_clt_forge(scratch.path, R"("activation_fn": "topk", "k": 2, "d_latent": 5)");
    const Opened opened = open_directory(scratch.path);
    CHECK(opened.rows->contents().k == 2);
    CHECK(!opened.rows->contents().thresholds);
    CHECK(has(summary(opened, scratch.path), "TopK of 2"));
    const fs::path config = scratch.path / "clt_cfg.json";
    CHECK(has(with_key(config, scratch.path, "activation_fn", "groupmax"), "groupmax"));
    CHECK(has(with_key(config, scratch.path, "k", nullptr, ExitCode::data), "\"k\""));
    CHECK(has(with_key(config, scratch.path, "k", 6, ExitCode::data), "6 of 5"));
    CHECK(has(with_key(config, scratch.path, "decoder_type", "lora"), "lora"));
    CHECK(has(with_key(config, scratch.path, "input_bias", true), "\"input_bias\" is not known"));
    CHECK(has(with_key(config, scratch.path, "cross_layer_decoders", "yes", ExitCode::data), "cross_layer_decoders"));
  }
  const Scratch scratch;
  write_clt_forge(scratch.path, R"("feature_sharding": true, "d_latent": 5, "n_layers": 3)", true);
  CHECK(open_directory(scratch.path).rows->contents().sizes.n_features == F);
  // The last shard is missing: the others alone would be read as a smaller model.
  fs::remove(scratch.path / "rank1_clt_weights.safetensors");
  CHECK(has(refusal(ExitCode::data, [&] { open_directory(scratch.path); }), "\"d_latent\" is 5, the tensors have 3"));
}

TEST_CASE("saelens: activation functions, normalisation and unknown keys of any version") {
  const Scratch scratch;
  write_directory(Model(single_layers(false, false, 0, true)), Format::saelens, kExact, {}, scratch.path / "relu");
  const fs::path file = scratch.path / "relu/layer_1/cfg.json", directory = scratch.path / "relu";
  CHECK(json_object(file)["metadata"]["sae_lens_version"] == "6.0.0");
  CHECK(has(with_key(file, directory, "activation_fn_str", "tanh-relu"), "tanh-relu"));
  CHECK(has(with_key(file, directory, "activation_fn", "topk", ExitCode::data), "\"k\""));
  CHECK(has(with_key(file, directory, "normalize_activations", true), "normalize_activations is true"));
  CHECK(has(with_key(file, directory, "normalize_activations", "expected_average_only_in"), "expected_average"));
  CHECK(has(with_key(file, directory, "rescale_acts_by_decoder_norm", true), "rescale_acts_by_decoder_norm"));
  CHECK(has(with_key(file, directory, "reshape_activations", "other"), "reshape_activations"));
  CHECK(has(with_key(file, directory, "k", 3), "k and architecture"));
  CHECK(has(with_key(file, directory, "input_scale", 2.0), "\"input_scale\" is not known"));
  CHECK(has(with_key(file, directory, "apply_b_dec_to_input", 1, ExitCode::data), "apply_b_dec_to_input"));
  SortedJson config = json_object(file);
  for (const auto& [key, value] : std::map<std::string, SortedJson>{
           {"normalize_activations", false}, {"input_scale", nullptr}, {"activation_fn", "relu"}, {"lr", 1e-3}})
    config[key] = value;
  write_text(file, json_text(config));
  CHECK(open_directory(directory).rows->contents().k == 0);
  // TopK of versions before 6.
  for (const char* const layer : {"layer_0", "layer_1", "layer_2"}) {
    config["activation_fn_kwargs"]["k"] = 2;
    config["activation_fn"] = "topk";
    write_text(directory / layer / "cfg.json", json_text(config));
  }
  CHECK(open_directory(directory).rows->contents().k == 2);
  CHECK(has(with_key(file, directory, "activation_fn_kwargs", {{"k", 2}, {"postact_fn", "x"}}), "postact_fn"));
  CHECK(has(with_key(file, directory, "architecture", "jumprelu"), "jumprelu"));
}

TEST_CASE("directories of layers are complete and of one format") {
  for (const Format format : {Format::saelens, Format::sparsify}) {
    const Scratch scratch;
    const bool saelens = format == Format::saelens;
    write_directory(Model(single_layers(false, false, saelens ? 0 : 2)), format, kExact, {}, scratch.path / "set");
    const fs::path layer = scratch.path / "set" / (saelens ? "layer_1" : "layers.1.mlp");
    CHECK(has(summary(open_directory(scratch.path / "set"), scratch.path), layer.filename().string()));
    fs::rename(layer / "cfg.json", scratch.path / "kept");
    CHECK(has(refusal(ExitCode::data, [&] { open_directory(scratch.path / "set"); }), "no cfg.json"));
    fs::rename(scratch.path / "kept", layer / "cfg.json");
    const char* const weights = saelens ? "sae_weights.safetensors" : "sae.safetensors";
    fs::rename(layer / weights, scratch.path / "kept");
    CHECK(has(refusal(ExitCode::data, [&] { open_directory(scratch.path / "set"); }), weights));
    fs::rename(scratch.path / "kept", layer / weights);
    write_text(layer / (saelens ? "sae.safetensors" : "sae_weights.safetensors"), "");
    CHECK(has(refusal(ExitCode::usage, [&] { open_directory(scratch.path / "set"); }), "one format at a time"));
  }
}

TEST_CASE("sparsify and crosslayer-coding: a key that is not known is named") {
  const Scratch scratch;
  write_directory(Model(single_layers(false, false, 2)), Format::sparsify, kExact, {}, scratch.path / "sparsify");
  write_directory(Model(true), Format::crosslayer_coding, kExact, {}, scratch.path / "coding");
  const fs::path layer = scratch.path / "sparsify/layers.2.mlp/cfg.json", coding = scratch.path / "coding/cfg.json";
  CHECK(has(with_key(layer, scratch.path / "sparsify", "coalesce_topk", "concat"), "coalesce_topk"));
  CHECK(has(with_key(layer, scratch.path / "sparsify", "transcode", "yes", ExitCode::data), "transcode"));
  CHECK(has(with_key(coding, scratch.path / "coding", "encoder_norm", "l2"), "encoder_norm"));
  CHECK(has(with_key(coding, scratch.path / "coding", "per_target_scale", true), "per_target_scale"));
  CHECK(has(with_key(coding, scratch.path / "coding", "skip_connection", 1, ExitCode::data), "skip_connection"));
}

TEST_CASE("circuit-tracer: a per-layer transcoder is a transcoder_set, with its skip connections") {
  const Scratch scratch;
  const fs::path set = scratch.path / "set";
  write_directory(Model(kSet), Format::circuit_tracer, kExact, {"gpt2", "blocks.{}.mlp.hook_in", "mlp.hook_out"}, set);
  const Opened opened = open_directory(set);
  check_rows(*opened.rows, 2);
  CHECK(opened.rows->contents().per_layer);
  CHECK(opened.rows->contents().skip);
  const auto config = yaml_scalars(set / "config.yaml");
  CHECK(config.at("model_kind") == "transcoder_set");
  // circuit-tracer puts "blocks.{}." in front.
  CHECK(config.at("feature_input_hook") == "mlp.hook_in");
  // y += x @ W_skip.T: the file holds Weft's matrix.
  const SafetensorsFile file((set / "layer_2.safetensors").string());
  float stored[d * d];
  file.read(*file.find("W_skip"), 0, d * d, stored);
  CHECK(stored[1 * d + 3] == other(2, 1, 3));
  CHECK(file.find("W_dec")->shape == std::vector<std::int64_t>{F, d});

  const auto configured = [&](const std::string& text, ExitCode code) {
    write_text(set / "config.yaml", text);
    return refusal(code, [&] { open_directory(set); });
  };
  CHECK(has(configured("model_kind: cross_layer_transcoder\n", ExitCode::usage), "transcoder_set"));
  CHECK(has(configured("encoder_norm: 2\n", ExitCode::usage), "\"encoder_norm\" is not known"));
  CHECK(has(configured("transcoders:\n- a/layer_0.safetensors\n- a/layer_1.safetensors\n", ExitCode::data), "lists 2"));
  CHECK(has(configured("transcoders:\n  - layer_1.safetensors\n", ExitCode::usage), "transcoders.0"));
  write_text(set / "config.yaml",
             "transcoders:\n  - a/layer_0.safetensors\n  - \"layer_1.safetensors\"\n"
             "  - hf://a/b/layer_2.safetensors\nscan: null\n");
  check_rows(*open_directory(set).rows, 3);
  fs::remove(set / "layer_0.safetensors");
  CHECK(has(refusal(ExitCode::data, [&] { open_directory(set); }), "layer_0.safetensors: is missing"));
}

TEST_CASE("circuit-tracer loads a cross-layer transcoder without its skip connection: it is not written, but read") {
  const Scratch scratch;
  CHECK(has(
      refusal(ExitCode::usage,
              [&] { write_directory(Model(false, true), Format::circuit_tracer, kExact, {}, scratch.path / "new"); }),
      "skip connection"));
  CHECK(!fs::exists(scratch.path / "new"));
  write_directory(Model(false), Format::circuit_tracer, kExact, {}, scratch.path / "old");
  for (std::int64_t s = 0; s < L; ++s) {
    const std::string name = fmt::format("W_enc_{}", s);
    write_file(scratch.path / "old" / (name + ".safetensors"),
               {{name, {F, d}, [=](auto j) { return encoder(s, j / d, j % d); }},
                {fmt::format("b_enc_{}", s), {F}, [=](auto j) { return encoder_bias(s, j); }},
                {fmt::format("b_dec_{}", s), {d}, [=](auto j) { return decoder_bias(s, j); }},
                // The transpose: x W.
                {fmt::format("W_skip_{}", s), {d, d}, [=](auto j) { return other(s, j % d, j / d); }}});
  }
  check_rows(*open_directory(scratch.path / "old").rows, 2);
}

TEST_CASE("hooks of data sets have names in TransformerLens") {
  CHECK(transformer_lens_name("block_{}.mlp.input") == "mlp.hook_in");
  CHECK(transformer_lens_name("model.layers.{}.mlp.output") == "mlp.hook_out");
  CHECK(transformer_lens_name("transformer.h.{}.ln_2.input") == "hook_resid_mid");
  CHECK(transformer_lens_name("blocks.{}.ln2.hook_normalized") == "ln2.hook_normalized");
  CHECK(transformer_lens_name("planted.inputs").empty());
  CHECK(with_block("mlp.hook_in") == "blocks.{}.mlp.hook_in");
  CHECK(with_block("h.{}.mlp") == "h.{}.mlp");
  CHECK(with_block("blocks.5.mlp.hook_in") == "blocks.5.mlp.hook_in");
  CHECK(inside_block("blocks.5.mlp.hook_in") == "mlp.hook_in");
  const auto input = [](const char* given, std::int64_t n_layers) {
    require_same_point("--input-hook", given, "block_{}.mlp.input", "data", n_layers);
  };
  input("blocks.{}.mlp.hook_in", 3);
  input("blocks.0.mlp.hook_in", 1);
  input("transformer.h.{}.mlp", 3);
  input("transformer.h.0.mlp", 1);
  require_same_point("--output-hook", "hook_mlp_out", "block_{}.mlp.output", "data", 3);
  require_same_point("--input-hook", "hook_resid_mid", "planted.inputs", "data", 3);
  require_same_point("--input-hook", "blocks.{}.mlp_in", "planted.inputs", "data", 3);
  for (const char* const wrong : {"hook_resid_mid", "blocks.{}.ln2.hook_normalized", "hook_mlp_in", "blocks.{}.mlp_in",
                                  "mlp_in", "blocks.0.hook_resid_mid"})
    CHECK(has(refusal(ExitCode::usage, [&] { input(wrong, 1); }), "give mlp.hook_in"));
  CHECK(has(refusal(ExitCode::usage, [&] { input("blocks.0.mlp.hook_in", 3); }), "in place of 0"));
}
