// SPDX-License-Identifier: Apache-2.0
//
// Llama: RMSNorm, rotary positions, a gated MLP, heads of keys that serve several heads of queries.
#include "language_model/huggingface/families/decoder_tensors.hpp"
#include "language_model/huggingface/families/families.hpp"
#include "language_model/huggingface/keys/decoder_keys.hpp"
#include "language_model/huggingface/keys/rotary_keys.hpp"

namespace weft::language_model::families {
namespace {

void read_llama(ConfigKeys& keys, HuggingfaceConfig& out) {
  read_decoder(keys, out);
  read_gated_mlp(keys, out);
  read_biases(keys, out);
  keys.require("rope_interleaved", false);
}

Json write_llama(const Architecture& architecture) {
  Json config = decoder_keys(architecture);
  write_rotary(architecture.model, config);
  write_biases(architecture.model, config);
  return config;
}

constexpr Biases kLlamaBiases[] = {Biases::none, Biases::attention, Biases::mlp, Biases::all};

constexpr Family kLlama{.name = "llama",
                        .class_name = "LlamaForCausalLM",
                        .features = {.biases = kLlamaBiases},
                        .read = read_llama,
                        .write = write_llama,
                        .tensors = kDecoderTensors,
                        .norms = kPreNorms};

}  // namespace

const Family& llama() { return kLlama; }

}  // namespace weft::language_model::families
