// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/names.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include "base/error.hpp"

namespace weft::language_model {
namespace {

using model::ParameterSpec;

/// The name of a parameter in its block.
std::string_view in_block(std::string_view name) {
  return name.starts_with("block_") ? name.substr(name.find('/') + 1) : name;
}

const TensorName& library_name(const Family& family, std::string_view own) {
  for (const std::span<const TensorName> names : {family.tensors, family.norms})
    for (const TensorName& name : names)
      if (name.own == own) return name;
  throw collective_error(
      ExitCode::usage,
      "the parameter {} of this model has no counterpart in the transformers library's {}; it cannot "
      "be exported",
      own, family.name);
}

Place place(const Family& family, const ParameterSpec& spec) {
  const std::string_view rest = in_block(spec.name);
  const bool embedding = rest.starts_with("embedding/");
  const std::string_view own = embedding ? rest : rest.substr(0, rest.rfind('/'));
  const TensorName& name = library_name(family, own);
  Place place{.tensor = std::string(name.library), .other = std::string(name.other), .shape = spec.shape};
  if (const std::size_t hole = place.tensor.find("{}"); hole != std::string::npos) {
    constexpr std::string_view kBlock = "block_";
    place.tensor.replace(hole, 2, spec.name.substr(kBlock.size(), spec.name.find('/') - kBlock.size()));
    place.inputs_first = family.inputs_first && spec.is_matrix();
  }
  const char* const suffix = rest.ends_with("/bias") ? ".bias" : ".weight";
  place.tensor += suffix;
  if (!place.other.empty()) place.other += suffix;
  if (own.ends_with("norm")) place.offset = family.norm_offset;
  return place;
}

std::string_view last_word(std::string_view name) { return name.substr(name.rfind('.') + 1); }

}  // namespace

std::vector<Place> places(const Family& family, const Architecture& architecture) {
  std::vector<Place> all;
  std::map<std::string, std::vector<std::size_t>> parts;  // by tensor
  for (const ParameterSpec& spec : parameter_specs(architecture)) {
    all.push_back(place(family, spec));
    parts[all.back().tensor].push_back(all.size() - 1);
  }
  for (const auto& [tensor, places] : parts) {
    std::int64_t outputs = 0, part = 0;
    for (const std::size_t i : places) {
      all[i].part = part++;
      all[i].parts = std::ssize(places);
      all[i].first_output = outputs;
      outputs += all[i].shape[0];
    }
    for (const std::size_t i : places) {
      if (family.heads_together && places.size() > 1) {
        all[i].unit = architecture.model.head_size();
        all[i].pitch = std::ssize(places) * all[i].unit;
        all[i].first_output = all[i].part * all[i].unit;
      }
      all[i].shape[0] = outputs;
      if (all[i].inputs_first) std::swap(all[i].shape[0], all[i].shape[1]);
    }
  }
  return all;
}

std::string peft_target(const Family& family, const std::string& layer) {
  bool ambiguous = false;
  for (const TensorName& one : family.tensors)
    for (const TensorName& other : family.tensors)
      ambiguous |= one.library != other.library && last_word(one.library) == last_word(other.library);
  std::size_t dot = layer.rfind('.');
  if (ambiguous) dot = layer.rfind('.', dot - 1);
  return layer.substr(dot + 1);
}

}  // namespace weft::language_model
