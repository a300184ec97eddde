// SPDX-License-Identifier: Apache-2.0
//
// Mistral: as Llama, with a window in all blocks.
#include "language_model/huggingface/families/decoder_tensors.hpp"
#include "language_model/huggingface/families/families.hpp"
#include "language_model/huggingface/keys/decoder_keys.hpp"
#include "language_model/huggingface/keys/rotary_keys.hpp"

namespace weft::language_model::families {
namespace {

void read_mistral(ConfigKeys& keys, HuggingfaceConfig& out) {
  read_decoder(keys, out);
  read_gated_mlp(keys, out);
  read_window(keys, out.model, 4096);
}

Json write_mistral(const Architecture& architecture) {
  Json config = decoder_keys(architecture);
  write_rotary(architecture.model, config);
  config["sliding_window"] = architecture.model.window > 0 ? Json(architecture.model.window) : Json();
  return config;
}

constexpr Family kMistral{.name = "mistral",
                          .class_name = "MistralForCausalLM",
                          .features = {.windows = BlockWindows::all},
                          .read = read_mistral,
                          .write = write_mistral,
                          .tensors = kDecoderTensors,
                          .norms = kPreNorms};

}  // namespace

const Family& mistral() { return kMistral; }

}  // namespace weft::language_model::families
