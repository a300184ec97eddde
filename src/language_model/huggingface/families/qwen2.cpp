// SPDX-License-Identifier: Apache-2.0
//
// Qwen 2 and 2.5: as Llama, with biases of queries, keys and values, and windows in the last blocks.
#include "language_model/huggingface/families/decoder_tensors.hpp"
#include "language_model/huggingface/families/families.hpp"
#include "language_model/huggingface/keys/decoder_keys.hpp"
#include "language_model/huggingface/keys/rotary_keys.hpp"

namespace weft::language_model::families {
namespace {

void read_qwen2(ConfigKeys& keys, HuggingfaceConfig& out) {
  read_decoder(keys, out);
  read_gated_mlp(keys, out);
  set_biases(out.model, Biases::query_key_value);
  read_windows_of_last_layers(keys, out.model);
}

Json write_qwen2(const Architecture& architecture) {
  Json config = decoder_keys(architecture);
  write_rotary(architecture.model, config);
  write_used_windows(architecture.model, config);
  return config;
}

constexpr Biases kQwen2Biases[] = {Biases::query_key_value};
constexpr Family kQwen2{.name = "qwen2",
                        .class_name = "Qwen2ForCausalLM",
                        .features = {.biases = kQwen2Biases, .windows = BlockWindows::by_block},
                        .read = read_qwen2,
                        .write = write_qwen2,
                        .tensors = kDecoderTensors,
                        .norms = kPreNorms};

}  // namespace

const Family& qwen2() { return kQwen2; }

}  // namespace weft::language_model::families
