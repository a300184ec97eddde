// SPDX-License-Identifier: Apache-2.0
//
// OLMo 2: as Llama, with norms after the sublayers, and of queries and keys over all heads.
#include "language_model/huggingface/families/decoder_tensors.hpp"
#include "language_model/huggingface/families/families.hpp"
#include "language_model/huggingface/keys/decoder_keys.hpp"
#include "language_model/huggingface/keys/rotary_keys.hpp"

namespace weft::language_model::families {
namespace {

void read_olmo2(ConfigKeys& keys, HuggingfaceConfig& out) {
  read_decoder(keys, out);
  read_gated_mlp(keys, out);
  read_biases(keys, out);
  out.model.qk_norm = QueryKeyNorm::width;
  out.model.norm_position = NormPosition::post;
}

Json write_olmo2(const Architecture& architecture) {
  Json config = decoder_keys(architecture);
  write_rotary(architecture.model, config);
  write_biases(architecture.model, config);
  return config;
}

constexpr Family kOlmo2{.name = "olmo2",
                        .class_name = "Olmo2ForCausalLM",
                        .features = {.biases = kAttentionBiases,
                                     .qk_norm = QueryKeyNorm::width,
                                     .norm_position = NormPosition::post,
                                     .own_head_size = false},
                        .read = read_olmo2,
                        .write = write_olmo2,
                        .tensors = kDecoderTensors,
                        .norms = kPostNorms};

}  // namespace

const Family& olmo2() { return kOlmo2; }

}  // namespace weft::language_model::families
