// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/names.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace weft::language_model {
namespace {

using model::ParameterSpec;

// clang-format off
struct Name { std::string_view own, library; };
/// Names outside the blocks, then of block {}, without "/weight" and "/bias".
constexpr Name kGpt2[] = {
    {"embedding/tokens",      "transformer.wte"},
    {"embedding/positions",   "transformer.wpe"},
    {"final_norm",            "transformer.ln_f"},
    {"head",                  "lm_head"},
    {"attention_norm",        "transformer.h.{}.ln_1"},
    {"attention/query",       "transformer.h.{}.attn.c_attn"},
    {"attention/key",         "transformer.h.{}.attn.c_attn"},
    {"attention/value",       "transformer.h.{}.attn.c_attn"},
    {"attention/output",      "transformer.h.{}.attn.c_proj"},
    {"mlp_norm",              "transformer.h.{}.ln_2"},
    {"mlp/up",                "transformer.h.{}.mlp.c_fc"},
    {"mlp/down",              "transformer.h.{}.mlp.c_proj"}};
constexpr Name kLlama[] = {
    {"embedding/tokens",      "model.embed_tokens"},
    {"final_norm",            "model.norm"},
    {"head",                  "lm_head"},
    {"attention/query",       "model.layers.{}.self_attn.q_proj"},
    {"attention/key",         "model.layers.{}.self_attn.k_proj"},
    {"attention/value",       "model.layers.{}.self_attn.v_proj"},
    {"attention/query_norm",  "model.layers.{}.self_attn.q_norm"},
    {"attention/key_norm",    "model.layers.{}.self_attn.k_norm"},
    {"attention/output",      "model.layers.{}.self_attn.o_proj"},
    {"mlp/gate",              "model.layers.{}.mlp.gate_proj"},
    {"mlp/up",                "model.layers.{}.mlp.up_proj"},
    {"mlp/down",              "model.layers.{}.mlp.down_proj"}};
/// Names of the norms of a block: two before the sublayers; two after them; four.
constexpr Name kPreNorms[] = {
    {"attention_norm",        "model.layers.{}.input_layernorm"},
    {"mlp_norm",              "model.layers.{}.post_attention_layernorm"}};
constexpr Name kPostNorms[] = {
    {"attention_post_norm",   "model.layers.{}.post_attention_layernorm"},
    {"mlp_post_norm",         "model.layers.{}.post_feedforward_layernorm"}};
constexpr Name kBothNorms[] = {
    {"attention_norm",        "model.layers.{}.input_layernorm"},
    {"attention_post_norm",   "model.layers.{}.post_attention_layernorm"},
    {"mlp_norm",              "model.layers.{}.pre_feedforward_layernorm"},
    {"mlp_post_norm",         "model.layers.{}.post_feedforward_layernorm"}};
// clang-format on

std::vector<std::span<const Name>> tables(Family family) {
  switch (family) {
    case Family::gpt2:
      return {kGpt2};
    case Family::olmo2:
      return {kLlama, kPostNorms};
    case Family::gemma2:
      return {kLlama, kBothNorms};
    default:
      return {kLlama, kPreNorms};
  }
}

std::string library_name(Family family, std::string_view own) {
  for (const std::span<const Name> table : tables(family))
    for (const Name& name : table)
      if (name.own == own) return std::string(name.library);
  throw collective_error(
      ExitCode::usage,
      "the parameter {} of this model has no counterpart in the transformers library's {}; it cannot "
      "be exported",
      own, name(family));
}

Place place(Family family, const ParameterSpec& spec) {
  std::string_view rest = spec.name;
  std::string layer;
  if (constexpr std::string_view block = "block_"; rest.starts_with(block)) {
    const std::size_t slash = rest.find('/');
    layer = rest.substr(block.size(), slash - block.size());
    rest.remove_prefix(slash + 1);
  }
  std::string suffix = ".weight";
  if (rest.ends_with("/bias")) suffix = ".bias";
  const bool embedding = rest.starts_with("embedding/");
  const std::string_view own = embedding ? rest : rest.substr(0, rest.rfind('/'));
  Place place{.tensor = library_name(family, own) + suffix, .shape = spec.shape};
  if (const std::size_t hole = place.tensor.find("{}"); hole != std::string::npos) place.tensor.replace(hole, 2, layer);
  if (family == Family::gpt2) {
    constexpr std::string_view kParts[] = {"attention/query", "attention/key", "attention/value"};
    if (const auto part = std::find(std::begin(kParts), std::end(kParts), own); part != std::end(kParts)) {
      place.parts = std::ssize(kParts);
      place.part = part - std::begin(kParts);
      place.shape[0] *= place.parts;
    }
    place.inputs_first = spec.is_matrix() && !embedding && own != "head";
    if (place.inputs_first) std::swap(place.shape[0], place.shape[1]);
  }
  // Gemma's norms multiply by 1 + weight.
  if (family == Family::gemma2 && own.ends_with("norm")) place.offset = 1;
  return place;
}

}  // namespace

std::vector<Place> places(Family family, const Architecture& architecture) {
  std::vector<Place> all;
  for (const ParameterSpec& spec : parameter_specs(architecture)) all.push_back(place(family, spec));
  return all;
}

}  // namespace weft::language_model
