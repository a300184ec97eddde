// SPDX-License-Identifier: Apache-2.0
//
// Gemma 2: norms before and after the sublayers, which multiply by 1 + weight, soft caps, windows in every second
// block, an embedding that is scaled by sqrt(d_model).
#include "language_model/huggingface/families/decoder_tensors.hpp"
#include "language_model/huggingface/families/families.hpp"
#include "language_model/huggingface/keys/decoder_keys.hpp"
#include "language_model/huggingface/keys/rotary_keys.hpp"

namespace weft::language_model::families {
namespace {

void read_gemma2(ConfigKeys& keys, HuggingfaceConfig& out) {
  read_decoder(keys, out, true);
  read_gemma(keys, out, 50, 30);
  std::vector<bool> blocks;
  for (std::int64_t layer = 0; layer < out.model.layers; ++layer) blocks.push_back(layer % 2 == 0);
  read_windows(keys, out.model, blocks);
}

Json write_gemma2(const Architecture& architecture) {
  Json config = gemma_keys(architecture);
  write_rotary(architecture.model, config);
  return config;
}

constexpr Family kGemma2{.name = "gemma2",
                         .class_name = "Gemma2ForCausalLM",
                         .features = {.biases = kAttentionBiases,
                                      .norm_position = NormPosition::both,
                                      .windows = BlockWindows::by_block,
                                      .caps_and_scale = true,
                                      .scaled_embedding = true},
                         .read = read_gemma2,
                         .write = write_gemma2,
                         .tensors = kDecoderTensors,
                         .norms = kBothNorms,
                         .tied_by_default = true,
                         .norm_offset = 1};

}  // namespace

const Family& gemma2() { return kGemma2; }

}  // namespace weft::language_model::families
