// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/rotary_keys.hpp"

#include <tuple>

#include "base/text.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::language_model {
namespace {

struct Rotary {
  double base = 10'000;
  kernels::RopeScaling scaling = {};

  bool same_scaling(const Rotary& other) const {
    const auto values = [](const kernels::RopeScaling& s) { return std::tuple(s.factor, s.length, s.low, s.high); };
    return values(scaling) == values(other.scaling);
  }
};

/// Reads the rotary positions "default", "linear" and "llama3" of the library.
Rotary read_rotary_object(const ConfigKeys& keys, const char* key, const SortedJson& object, double base) {
  if (!object.is_object()) throw keys.damaged("\"{}\" is not an object", key);
  ConfigKeys inner(object, fmt::format("{}, \"{}\"", keys.path(), key));
  if (const double share = inner.number_or("partial_rotary_factor", 1, kFactors); share != 1)
    throw inner.lacking("\"partial_rotary_factor\" = {} (whole heads are rotated)", share);
  Rotary model;
  model.base = inner.number_or("rope_theta", base, kBases);
  const std::string old = inner.text_or("type", "default"), type = inner.text_or("rope_type", old.c_str());
  if (type == "linear" || type == "llama3") {
    model.scaling.factor = inner.number("factor", kFactors);
  } else if (type != "default") {
    throw inner.lacking("rotary positions of type \"{}\" (default, linear and llama3 are supported)", printable(type));
  }
  if (type == "llama3") {
    model.scaling.length = inner.integer("original_max_position_embeddings", kMostRows);
    model.scaling.low = inner.number("low_freq_factor", kFrequencies);
    model.scaling.high = inner.number("high_freq_factor", kFrequencies);
    if (model.scaling.low >= model.scaling.high)
      throw inner.damaged("\"low_freq_factor\" is not less than \"high_freq_factor\"");
  } else {
    inner.find("original_max_position_embeddings");  // not read by the other types
  }
  if (model.scaling.factor == 1) model.scaling = {};
  inner.refuse_unknown();
  return model;
}

}  // namespace

/// Of both objects the library takes rope_scaling and ignores all of the other, including its rope_theta.
void read_rotary(ConfigKeys& keys, ModelSettings& model) {
  const SortedJson *parameters = keys.find("rope_parameters"), *scaling = keys.find("rope_scaling");
  const bool has_base = keys.find("rope_theta") != nullptr;
  const double base = keys.number_or("rope_theta", Rotary().base, kBases);
  const auto is_empty = [](const SortedJson* object) {
    return object == nullptr || (object->is_object() && object->empty());
  };
  Rotary rotary{.base = base};
  if (!is_empty(parameters)) {
    rotary = read_rotary_object(keys, "rope_parameters", *parameters, base);
    if (has_base && rotary.base != base)
      throw keys.lacking("\"rope_theta\" = {} contradicts {} of \"rope_parameters\" (readers differ in what they take)",
                         base, rotary.base);
  }
  if (!is_empty(scaling)) {
    const Rotary taken = read_rotary_object(keys, "rope_scaling", *scaling, base);
    const bool same_base = taken.base == rotary.base,
               same_scaling = rotary.scaling.factor == 1 || rotary.same_scaling(taken);
    if (!is_empty(parameters) && !(same_base && same_scaling))
      throw keys.lacking(
          "\"rope_scaling\" contradicts \"rope_parameters\" ({}: the library takes rope_scaling and forgets the rest "
          "of "
          "rope_parameters; remove one of them)",
          same_base ? "their scaling differs" : fmt::format("rope_theta {} and {}", taken.base, rotary.base));
    rotary = taken;
  }
  model.rope_base = rotary.base;
  model.rope_scaling = rotary.scaling;
}

void write_rotary(const ModelSettings& model, Json& config) {
  config["rope_theta"] = model.rope_base;
  const kernels::RopeScaling& scaling = model.rope_scaling;
  if (scaling.factor > 1 && scaling.length == 0)
    config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", scaling.factor}};
  else if (scaling.factor > 1)
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", scaling.factor},
                              {"original_max_position_embeddings", scaling.length},
                              {"low_freq_factor", scaling.low},
                              {"high_freq_factor", scaling.high}};
}

}  // namespace weft::language_model
