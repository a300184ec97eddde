// SPDX-License-Identifier: Apache-2.0
//
// Gemma 3: as Gemma 2, with norms of queries and keys by head, a base of rotary positions for the blocks with a window
// and another one, whose wavelengths can be longer, for every sixth block.
#include "language_model/huggingface/families/decoder_tensors.hpp"
#include "language_model/huggingface/families/families.hpp"
#include "language_model/huggingface/keys/decoder_keys.hpp"
#include "language_model/huggingface/keys/rotary_keys.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::language_model::families {
namespace {

void read_gemma3(ConfigKeys& keys, HuggingfaceConfig& out) {
  read_sizes(keys, out, true);
  read_gemma(keys, out, 0, 0);
  out.model.qk_norm = QueryKeyNorm::head;
  const std::int64_t every = keys.integer_or("sliding_window_pattern",
                                             keys.integer_or("_sliding_window_pattern", 6, kMostLayers), kMostLayers);
  std::vector<bool> blocks;
  for (std::int64_t layer = 0; layer < out.model.layers; ++layer) blocks.push_back((layer + 1) % every != 0);
  read_windows(keys, out.model, blocks);
  read_two_bases(keys, out);
}

Json write_gemma3(const Architecture& architecture) {
  const ModelSettings& model = architecture.model;
  Json config = gemma_keys(architecture);
  write_rotary(model, config);
  config["rope_local_base_freq"] = model.rope_window_base > 0 ? model.rope_window_base : model.rope_base;
  return config;
}

constexpr Family kGemma3{.name = "gemma3_text",
                         .class_name = "Gemma3ForCausalLM",
                         .features = {.biases = kAttentionBiases,
                                      .qk_norm = QueryKeyNorm::head,
                                      .norm_position = NormPosition::both,
                                      .windows = BlockWindows::by_block,
                                      .window_base = true,
                                      .caps_and_scale = true,
                                      .scaled_embedding = true},
                         .read = read_gemma3,
                         .write = write_gemma3,
                         .tensors = kDecoderTensors,
                         .norms = kBothNorms,
                         .tied_by_default = true,
                         .norm_offset = 1};

}  // namespace

const Family& gemma3_text() { return kGemma3; }

}  // namespace weft::language_model::families
