// SPDX-License-Identifier: Apache-2.0
//
// Sizes of known models: number of parameters, work per token, and how matrices are cut and initialised.
#include <cmath>

#include "input/read.hpp"
#include "language_model/blocks/model_parameters.hpp"
#include "language_model/run/memory_plan.hpp"
#include "tests/test.hpp"

namespace weft::language_model {
namespace {

Architecture architecture(const std::string& text, std::int64_t vocabulary) {
  Configuration configuration;
  const input::Schema keys = schema(configuration);
  input::read(keys, text, "test.toml");
  return {configuration.language_model, vocabulary, configuration.data.sequence};
}

std::string gpt2(int layers, int width, int heads) {
  return fmt::format(
      "[data]\nsequence = 1024\nbatch_tokens = 1024\n[language_model]\nlayers = {}\nd_model = {}\nheads = {}\n", layers,
      width, heads);
}

const model::ParameterSpec& find(const std::vector<model::ParameterSpec>& specs, const std::string& name) {
  for (const model::ParameterSpec& spec : specs)
    if (spec.name == name) return spec;
  FAIL("no parameter ", name);
  return specs.front();
}

}  // namespace

TEST_CASE("GPT-2 has its published number of parameters") {
  CHECK(parameters_of(architecture(gpt2(12, 768, 12), 50257)) == 124'439'808);
  CHECK(parameters_of(architecture(gpt2(24, 1024, 16), 50257)) == 354'823'168);
  CHECK(parameters_of(architecture(gpt2(36, 1280, 20), 50257)) == 774'030'080);
  CHECK(parameters_of(architecture(gpt2(48, 1600, 25), 50257)) == 1'557'611'200);
}

TEST_CASE("the parity models have the sizes of their PyTorch counterparts") {
  const std::string sizes =
      "[data]\nsequence = 256\nbatch_tokens = 256\n[language_model]\nlayers = 6\nd_model = 384\nheads = 6\n";
  CHECK(parameters_of(architecture(sizes, 63)) == 10'770'048);
  const Architecture llama = architecture(sizes + "preset = \"llama\"\n", 63);
  CHECK(llama.model.d_mlp == 1024);
  CHECK(parameters_of(llama) == 10'670'208);
}

TEST_CASE("work per token is 6 N + 6 L T C") {
  CHECK(flops_per_token(architecture(gpt2(12, 768, 12), 50257), 1024) == doctest::Approx(803.26e6).epsilon(1e-5));
  CHECK(flops_per_token(architecture(gpt2(24, 1024, 16), 50257), 1024) == doctest::Approx(2279.9e6).epsilon(1e-4));
  CHECK(flops_per_token(architecture(gpt2(48, 1600, 25), 50257), 1024) == doctest::Approx(9817.5e6).epsilon(1e-4));
}

TEST_CASE("the plan names what makes the CUDA kernels of a model slow") {
  using kernels::Scalar;
  const auto text = [](const std::string& input, bool library = false) {
    return slow_paths_text(architecture(input, 50257), Scalar::bf16, library);
  };
  CHECK(text(gpt2(12, 768, 12)) == "");
  const std::string of_96 = "preset = \"llama\"\nhead_size = 96\n";
  CHECK(
      text(gpt2(2, 768, 8) + of_96) ==
      "  attention: slow portable kernels, because of head size 96 (tensor cores take 32, 64 and 128)\n"
      "  queries and keys: slow portable kernels, because of head size 96 (powers of two from 16 to 256 are taken)\n");
  CHECK(text(gpt2(2, 768, 8) + of_96, true).find("attention:") == std::string::npos);  // cuDNN takes it
  CHECK(text(gpt2(2, 768, 12) + "attention_dropout = 0.1\n").find("because of dropout") != std::string::npos);
  CHECK(text(gpt2(2, 16384, 128)) ==
        "  norms: slow portable kernels, because of 16384 columns (at most 8192 are taken)\n");
}

TEST_CASE("matrices name the axis that cuts them; only matrices decay") {
  const auto specs = parameter_specs(architecture("[language_model]\npreset = \"llama\"\nqk_norm = \"head\"\n", 50));
  for (const char* name : {"attention/query", "attention/key", "attention/value", "mlp/gate", "mlp/up"}) {
    const model::ParameterSpec& spec = find(specs, fmt::format("block_3/{}/weight", name));
    CHECK(spec.cut.over == parallel::kTensorAxis);
    CHECK(!spec.transposed());
  }
  for (const char* name : {"attention/output", "mlp/down"})
    CHECK(find(specs, fmt::format("block_3/{}/weight", name)).transposed());
  CHECK(find(specs, "embedding/tokens").cut.over == parallel::kTensorAxis);
  CHECK(find(specs, "head/weight").cut.over == parallel::kTensorAxis);
  CHECK(find(specs, "block_0/attention/query_norm/weight").cut.over.empty());
  for (const model::ParameterSpec& spec : specs) CHECK(spec.weight_decay == spec.is_matrix());
}

TEST_CASE("what writes to the residual stream begins smaller by sqrt(2 layers)") {
  const auto specs = parameter_specs(architecture("[language_model]\nlayers = 8\n", 50));
  CHECK(find(specs, "block_0/attention/query/weight").initial.value == 0.02);
  CHECK(find(specs, "block_7/attention/output/weight").initial.value == doctest::Approx(0.02 / 4));
  CHECK(find(specs, "block_7/mlp/down/weight").initial.value == doctest::Approx(0.02 / 4));
  CHECK(find(specs, "block_7/mlp/down/bias").initial.value == 0);
  CHECK(find(specs, "final_norm/weight").initial.value == 1);
}

}  // namespace weft::language_model
