// SPDX-License-Identifier: Apache-2.0
//
// SmolLM 3: as Llama, without rotary positions in every fourth block.
#include <algorithm>
#include <vector>

#include "base/text.hpp"
#include "language_model/huggingface/families/decoder_tensors.hpp"
#include "language_model/huggingface/families/families.hpp"
#include "language_model/huggingface/keys/decoder_keys.hpp"
#include "language_model/huggingface/keys/rotary_keys.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::language_model::families {
namespace {

constexpr RotaryKeys kSmollm3Rotary{.default_base = 2'000'000};

/// Sets the blocks without rotary positions, from a list that has 0 for them, or every n-th.
void read_unrotated(ConfigKeys& keys, ModelSettings& model) {
  const std::int64_t every = keys.integer_or("no_rope_layer_interval", 4, kMostLayers);
  model.unrotated_every = every <= model.layers ? every : 0;
  const SortedJson* const list = keys.find("no_rope_layers");
  if (list == nullptr) return;
  if (!list->is_array() || std::ssize(*list) < model.layers)
    throw keys.damaged("\"no_rope_layers\" is not a list of {} numbers", model.layers);
  std::vector<bool> rotated;
  for (const SortedJson& value : *list) {
    if (!value.is_number_integer() || (value != 0 && value != 1))
      throw keys.damaged("\"no_rope_layers\" has {} (0 and 1 are possible)", printable(json_text(value)));
    rotated.push_back(value == 1);
  }
  const auto first = std::find(rotated.begin(), rotated.begin() + model.layers, false);
  model.unrotated_every = first == rotated.begin() + model.layers ? 0 : first - rotated.begin() + 1;
  for (std::int64_t layer = 0; layer < model.layers; ++layer)
    if (rotated[static_cast<std::size_t>(layer)] != (model.rotary_table_of(layer) >= 0))
      throw keys.lacking(
          "layer {} breaks the pattern of \"no_rope_layers\" (every n-th layer without rotary positions is supported)",
          layer);
}

void read_smollm3(ConfigKeys& keys, HuggingfaceConfig& out) {
  read_sizes(keys, out);
  read_rotary(keys, out, kSmollm3Rotary);
  read_gated_mlp(keys, out);
  read_biases(keys, out);
  read_unrotated(keys, out.model);
  // Blocks without rotary positions have the windows, if there are any.
  std::vector<bool> blocks;
  for (std::int64_t layer = 0; layer < out.model.layers; ++layer)
    blocks.push_back(keys.find("sliding_window") != nullptr && out.model.rotary_table_of(layer) < 0);
  read_used_windows(keys, out.model, blocks);
  keys.find("max_window_layers");  // not read
}

Json write_smollm3(const Architecture& architecture) {
  const ModelSettings& model = architecture.model;
  Json config = decoder_keys(architecture);
  write_rotary(model, config, kSmollm3Rotary);
  write_biases(model, config);
  Json rotated = Json::array();
  for (std::int64_t layer = 0; layer < model.layers; ++layer)
    rotated.push_back(model.rotary_table_of(layer) < 0 ? 0 : 1);
  config["no_rope_layers"] = rotated;
  write_used_windows(model, config);
  return config;
}

constexpr Biases kSmollm3Biases[] = {Biases::none, Biases::attention, Biases::mlp, Biases::all};
constexpr Family kSmollm3{.name = "smollm3",
                          .class_name = "SmolLM3ForCausalLM",
                          .features = {.biases = kSmollm3Biases,
                                       .own_head_size = false,
                                       .windows = BlockWindows::by_block,
                                       .unrotated_blocks = true},
                          .read = read_smollm3,
                          .write = write_smollm3,
                          .tensors = kDecoderTensors,
                          .norms = kPreNorms,
                          .tied_by_default = true};

}  // namespace

const Family& smollm3() { return kSmollm3; }

}  // namespace weft::language_model::families
