// SPDX-License-Identifier: Apache-2.0
//
// Qwen 3: as Llama, with norms of queries and keys by head, and windows in the last blocks.
#include "language_model/huggingface/families/decoder_tensors.hpp"
#include "language_model/huggingface/families/families.hpp"
#include "language_model/huggingface/keys/decoder_keys.hpp"
#include "language_model/huggingface/keys/rotary_keys.hpp"

namespace weft::language_model::families {
namespace {

void read_qwen3(ConfigKeys& keys, HuggingfaceConfig& out) {
  read_decoder(keys, out, true);
  out.model.qk_norm = QueryKeyNorm::head;
  read_gated_mlp(keys, out);
  read_biases(keys, out);
  read_windows_of_last_layers(keys, out.model);
}

Json write_qwen3(const Architecture& architecture) {
  Json config = decoder_keys(architecture);
  write_rotary(architecture.model, config);
  write_biases(architecture.model, config);
  write_used_windows(architecture.model, config);
  return config;
}

constexpr Family kQwen3{
    .name = "qwen3",
    .class_name = "Qwen3ForCausalLM",
    .features = {.biases = kAttentionBiases, .qk_norm = QueryKeyNorm::head, .windows = BlockWindows::by_block},
    .read = read_qwen3,
    .write = write_qwen3,
    .tensors = kDecoderTensors,
    .norms = kPreNorms};

}  // namespace

const Family& qwen3() { return kQwen3; }

}  // namespace weft::language_model::families
