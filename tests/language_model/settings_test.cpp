// SPDX-License-Identifier: Apache-2.0
//
// The keys of language models: presets, defaults of the family, and refusals with their reasons.
#include "base/error.hpp"
#include "input/print.hpp"
#include "input/read.hpp"
#include "language_model/settings/configuration.hpp"
#include "tests/test.hpp"

namespace weft::language_model {
namespace {

Configuration read(const std::string& text) {
  Configuration configuration;
  const input::Schema keys = schema(configuration);
  input::read(keys, text, "test.toml");
  return configuration;
}

std::string problem(const std::string& text) {
  try {
    read(text);
  } catch (const Error& error) {
    CHECK(error.code() == ExitCode::usage);
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a preset fills in what the input does not give") {
  const ModelSettings gpt2 = read("").language_model;
  CHECK(gpt2.norm == Norm::layer);
  CHECK(gpt2.mlp == MlpActivation::gelu);
  CHECK(gpt2.position == Position::learned);
  CHECK(gpt2.tied);
  CHECK(gpt2.bias);
  CHECK(gpt2.kv_heads == 12);
  CHECK(gpt2.d_mlp == 3072);
  const ModelSettings llama =
      read("[language_model]\npreset = \"llama\"\nheads = 8\nd_model = 512\ntied = true\n").language_model;
  CHECK(llama.norm == Norm::rms);
  CHECK(llama.mlp == MlpActivation::swiglu);
  CHECK(llama.position == Position::rope);
  CHECK(llama.tied);  // given
  CHECK(!llama.bias);
  CHECK(llama.kv_heads == 8);
  CHECK(llama.d_mlp == 1408);  // 8/3 * 512 = 1365.3, in multiples of 64
}

TEST_CASE("the resolved input gives the same configuration") {
  Configuration first;
  const input::Schema keys = schema(first);
  input::read(keys, "[language_model]\npreset = \"llama\"\nmlp = \"relu2\"\n", "test.toml");
  CHECK(first.language_model.d_mlp == 3072);
  const std::string resolved = input::print(keys);
  Configuration second;
  const input::Schema again = schema(second);
  input::read(again, resolved, "resolved.toml");
  CHECK(input::print(again) == resolved);
  // So does the template, in which keys that follow from others are comments.
  Configuration third, fourth;
  const input::Schema of_template = schema(third), of_nothing = schema(fourth);
  input::read(of_template, input::defaults(of_template), "template.toml");
  input::read(of_nothing, "", "empty.toml");
  CHECK(input::print(of_template) == input::print(of_nothing));
}

TEST_CASE("the optimizer has the defaults of language models") {
  const optimizer::Settings adam = read("").optimizer;
  CHECK(adam.beta1 == 0.9);
  CHECK(adam.beta2 == 0.95);
  CHECK(adam.epsilon == 1e-8);
  CHECK(adam.weight_decay == 0.1);
  CHECK(adam.clip_norm == 1.0);
  CHECK(adam.schedule == optimizer::Schedule::cosine);
  CHECK(adam.final_fraction == 0.1);
}

TEST_CASE("sequences double in equal stretches until they have their length") {
  const dataset::TokenSettings data = read("[data]\nsequence_start = 32\nsequence_growth_steps = 30\n").data;
  CHECK(data.sequence == 256);
  CHECK(data.shortest() == 32);
  for (std::int64_t step = 1; step <= 40; ++step)
    CHECK(data.length_at(step) == (step <= 10 ? 32 : step <= 20 ? 64 : step <= 30 ? 128 : 256));
  const dataset::TokenSettings same = read("").data;
  CHECK(same.length_at(1) == 256);
  CHECK(same.shortest() == 256);
}

TEST_CASE("inputs that make no sense are refused with the reason") {
  const auto refused = [](const std::string& text, const std::string& reason) {
    const std::string message = problem(text);
    CHECK_MESSAGE(message.find(reason) != std::string::npos, text, " -> ", message);
  };
  refused("[language_model]\nheads = 7\n", "no multiple of language_model.heads = 7");
  refused("[language_model]\nd_model = 36\nheads = 3\n", "heads of 12 (the size of a head is a multiple of 8");
  refused("[language_model]\nd_model = 768\nheads = 2\n", "at most 256");
  refused("[language_model]\nkv_heads = 5\n", "does not divide language_model.heads = 12");
  for (const char* key : {"rope_columns = 8", "rope_base = 500", "rope_method = \"yarn\"", "rope_length = 64",
                          "rope_low = 0.5", "rope_high = 9", "rope_amplitude = 2"})
    refused(std::string("[language_model]\n") + key + "\n", "position = \"rope\"");
  const std::string rope = "[language_model]\nposition = \"rope\"\n";
  refused(rope + "rope_columns = 7\n", "take an even number up to 64");
  refused(rope + "rope_length = 64\n", "no effect without rope_factor");
  refused(rope + "rope_method = \"yarn\"\nrope_factor = 2\n", "rope_length = 0");
  refused(rope + "rope_method = \"longrope\"\nrope_length = 64\nrope_short = [1, 2.5]\nrope_long = [1, 2]\n",
          "rope_short has 2 numbers for 32 pairs");
  refused(rope + "rope_short = [1]\n", "rope_short");
  refused(rope + "rope_long = [\"a\"]\n", "must be a list of numbers");
  refused(rope + "rope_window_base = 100\n", "rope_window_base");
  refused(rope + "rope_method = \"dynamic\"\nrope_factor = 2\nrope_length = 64\n[log]\nsample_tokens = 5\n",
          "shorter texts have others");
  refused("[language_model]\nresidual = \"parallel\"\nnorm_position = \"post\"\n", "no memory of its input");
  refused("[language_model]\nbiases = [\"query\"]\n", "some of query, key, value (they are one product)");
  refused("[language_model]\nbiases = [\"up\", \"up\"]\n", "\"up\" twice");
  refused("[language_model]\nbiases = [\"gate\"]\n", "\"gate\", which is no product");
  refused("[language_model]\nkv_heads = 0\n", "language_model.kv_heads");
  refused("[language_model]\ndropout = 1.0\n", "language_model.dropout");
  refused("[language_model]\nnorm = \"batch\"\n", "batch");
  refused("[language_model]\nnorm_epsilon = 1e-300\n", "language_model.norm_epsilon");
  refused("[language_model]\nlogit_softcap = 1e-30\n", "leaves nothing");
  refused("[language_model]\nd_model = 8\nheads = 3\n", "take d_model = 24");
  refused("[language_model]\nwindw = 4\n", "window");
  refused("[data]\nbatch_tokens = 100\nsequence = 64\n", "not a multiple of data.sequence");
  refused("[data]\nsequence_start = 48\nsequence_growth_steps = 9\n", "take 32");
  refused("[data]\nsequence_start = 512\nsequence_growth_steps = 9\n", "does not become data.sequence = 256");
  refused("[data]\nsequence_start = 64\n", "data.sequence_start needs data.sequence_growth_steps");
  refused("[data]\nsequence_growth_steps = 5\n", "no effect without data.sequence_start");
  refused("[data]\nsequence_start = 64\nsequence_growth_steps = 2000\n", "more than run.steps = 1000");
  refused("[data]\norder = \"curriculum\"\n", "data.order = \"curriculum\" needs data.curriculum_steps");
  refused("[data]\ncurriculum_steps = 5\n", "is for data.order = \"curriculum\" only");
  refused("[data]\norder = \"curriculum\"\ncurriculum_steps = 2000\n", "more than run.steps = 1000");
  refused("[language_model]\nsparse_local = 4\n", "64 tokens of language_model.window");
  refused("[language_model]\nattention_dropout = 1.0\n", "language_model.attention_dropout");
  if (!kernels::kCudaBuild) refused("[device]\nprecision = \"tf32\"\n", "needs a GPU");
  refused("[device]\nfp8_forward = true\n", "device.fp8 multiplies in 8 bits in both passes");
  refused("[device]\nfp8 = true\n", "is for device.precision = \"bf16\" only");
  constexpr const char* kFp8 = "[device]\nprecision = \"bf16\"\nfp8 = true\n";
  refused(kFp8 + std::string("[language_model]\nheads = 3\nd_model = 24\n"), "multiples of 16");
  refused(kFp8 + std::string("[language_model]\nlayers = 2\n"), "the first and the last block multiply in bf16");
  refused(kFp8 + std::string("[data]\nsequence = 24\n"), "sequences of 24 tokens");
  refused(kFp8 + std::string("[data]\nsequence_start = 8\nsequence_growth_steps = 9\n"), "sequences of 8 tokens");
  refused(kFp8 + std::string("[memory]\nswap_activations = true\n"), "does not go with memory.swap_activations");
  refused(kFp8 + std::string("[parallel]\ntensor = 2\n"), "does not go with parallel.tensor");
  refused(kFp8 + std::string("[parallel]\nshard = \"full\"\n"), "does not go with parallel.shard");
  refused(kFp8 + std::string("[privacy]\nenabled = true\nepsilon = 8\ndelta = 1e-5\nclip = 1\n"),
          "does not go with privacy.enabled");
  refused("[data]\nmicro_tokens = 100\n", "not a multiple of data.sequence");
  refused("[run]\nsteps = 10\n", "optimizer.warmup_steps = 100 is more than run.steps = 10");
  refused("[optimizer]\nclip_mode = \"previous\"\n", "for transcoders");
  refused("[transcoder]\nfeatures = 8\n", "transcoder");
  refused("[memory]\nrecompute = \"all\"\n", "recompute");
  refused("[memory]\nswap_activations = true\n[language_model]\nlayers = 2\n", "memory.swap_activations = true has no");
  if (!kernels::kCudaBuild) {
    refused("[memory]\noffload_optimizer = true\n", "offload_optimizer = true has no effect without a GPU");
    refused("[memory]\nswap_activations = true\n", "swap_activations = true has no effect without a GPU");
  }
}

}  // namespace weft::language_model
