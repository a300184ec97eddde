// SPDX-License-Identifier: Apache-2.0
#include "language_model/huggingface/keys/rotary_keys.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/text.hpp"
#include "language_model/settings/configuration.hpp"

namespace weft::language_model {
namespace {

using kernels::RopeMethod;
using kernels::RopeScaling;

struct Rotary {
  double base = 0, share = 1;
  RopeScaling scaling = {};

  bool same_scaling(const Rotary& other) const {
    const auto values = [](const RopeScaling& s) {
      return std::tuple(s.method, s.factor, s.length, s.low, s.high, s.amplitude, s.short_factors, s.long_factors);
    };
    return values(scaling) == values(other.scaling);
  }
};

std::vector<double> factors(ConfigKeys& keys, const char* key, std::int64_t columns) {
  const SortedJson* const list = keys.find(key);
  const auto is_factor = [](const SortedJson& value) {
    return value.is_number() && value.get<double>() > 0 && value.get<double>() <= kFactors.most;
  };
  if (list == nullptr || !list->is_array() || std::ssize(*list) != columns / 2 ||
      !std::all_of(list->begin(), list->end(), is_factor))
    throw keys.damaged("\"{}\" is not a list of {} numbers above 0, one for each pair of rotated columns", key,
                       columns / 2);
  return list->get<std::vector<double>>();
}

/// Amplitude of yarn: given, or from two scales of it; 0: the usual one.
double amplitude(ConfigKeys& keys, double factor) {
  const double given = keys.number_or("attention_factor", 0, kFrequencies),
               scale = keys.number_or("mscale", 0, kFrequencies),
               all = keys.number_or("mscale_all_dim", 0, kFrequencies);
  if (given > 0 || scale == 0 || all == 0) return given;
  const auto of = [&](double by) { return factor <= 1 ? 1 : 0.1 * by * std::log(factor) + 1; };
  return of(scale) / of(all);
}

/// Reads an object of rotary positions.
Rotary read_object(const ConfigKeys& outer, const std::string& name, const SortedJson& object, const Rotary& absent,
                   const HuggingfaceConfig& out, std::int64_t length, bool phi3) {
  if (!object.is_object()) throw outer.damaged("\"{}\" is not an object", name);
  ConfigKeys keys(object, fmt::format("{}, \"{}\"", outer.path(), name));
  Rotary rotary;
  rotary.base = keys.number_or("rope_theta", absent.base, kBases);
  rotary.share = keys.number_or("partial_rotary_factor", absent.share, kShares);
  const std::string old = keys.text_or("type", "default");
  std::string type = keys.text_or("rope_type", old.c_str());
  if (phi3 && (type == "su" || type == "yarn")) type = "longrope";  // its names in earlier versions
  RopeScaling& scaling = rotary.scaling;
  const auto columns = static_cast<std::int64_t>(static_cast<double>(out.model.head_size()) * rotary.share);
  scaling.length = keys.integer_or("original_max_position_embeddings", out.positions, kMostRows);
  if (length > 0) scaling.length = length;
  const double longer = static_cast<double>(out.positions) / static_cast<double>(scaling.length);
  if (type == "default") {
    scaling = {};
  } else if (type == "linear") {
    scaling = {.factor = keys.number("factor", kFactors)};
  } else if (type == "dynamic") {
    scaling = {.factor = keys.number("factor", kFactors), .length = out.positions, .method = RopeMethod::dynamic};
  } else if (type == "llama3") {
    scaling.factor = keys.number("factor", kFactors);
    scaling.low = keys.number("low_freq_factor", kFrequencies);
    scaling.high = keys.number("high_freq_factor", kFrequencies);
    if (scaling.low >= scaling.high) throw keys.damaged("\"low_freq_factor\" is not less than \"high_freq_factor\"");
  } else if (type == "yarn") {
    scaling.method = RopeMethod::yarn;
    scaling.factor = keys.number_or("factor", longer, kFactors);
    scaling.low = keys.number_or("beta_slow", 1, kFrequencies);
    scaling.high = keys.number_or("beta_fast", 32, kFrequencies);
    scaling.amplitude = amplitude(keys, scaling.factor);
    if (scaling.low >= scaling.high) throw keys.damaged("\"beta_slow\" is not less than \"beta_fast\"");
    keys.require("truncate", true);
  } else if (type == "longrope") {
    scaling.method = RopeMethod::longrope;
    scaling.factor = std::max(1.0, keys.number_or("factor", longer, kFactors));
    scaling.amplitude = keys.number_or("attention_factor", 0, kFrequencies);
    scaling.short_factors = factors(keys, "short_factor", columns);
    scaling.long_factors = factors(keys, "long_factor", columns);
  } else {
    throw keys.lacking(
        "rotary positions of type \"{}\" (default, linear, llama3, yarn, dynamic and longrope are supported)",
        printable(type));
  }
  const bool by_factor = scaling.method == RopeMethod::bands || scaling.method == RopeMethod::dynamic;
  if (by_factor && scaling.factor == 1) scaling = {};
  keys.refuse_unknown();
  return rotary;
}

bool is_empty(const SortedJson* object) { return object == nullptr || (object->is_object() && object->empty()); }

/// Rotated columns in the settings, from the share of a head.
void set_columns(const ConfigKeys& keys, HuggingfaceConfig& out, double share) {
  if (share == 1) return;
  if (!out.family->features.partial_rotary)
    throw keys.lacking("\"partial_rotary_factor\" = {} (the {} of the library rotates whole heads)", share,
                       out.family->name);
  out.model.rope_columns = static_cast<std::int64_t>(static_cast<double>(out.model.head_size()) * share);
  if (out.model.rope_columns < 2 || out.model.rope_columns % 2 != 0)
    throw keys.lacking("{} rotated columns of a head (an even number is supported)", out.model.rope_columns);
}

}  // namespace

/// If both objects are there, the library takes rope_scaling and ignores all of rope_parameters, its rope_theta too.
void read_rotary(ConfigKeys& keys, HuggingfaceConfig& out, const RotaryKeys& names) {
  const SortedJson *parameters = keys.find("rope_parameters"), *scaling = keys.find("rope_scaling");
  const bool has_base = keys.find(names.base) != nullptr;
  const Rotary absent{.base = keys.number_or(names.base, names.default_base, kBases),
                      .share = keys.number_or(names.share, names.default_share, kShares)};
  const std::int64_t length =
      names.length == nullptr ? 0 : keys.integer_or(names.length, names.default_length, kMostRows);
  const auto read = [&](const char* name, const SortedJson& object) {
    return read_object(keys, name, object, absent, out, length, names.length != nullptr);
  };
  Rotary rotary = absent;
  if (!is_empty(parameters)) {
    rotary = read("rope_parameters", *parameters);
    if (has_base && rotary.base != absent.base)
      throw keys.lacking("\"{}\" = {} contradicts {} of \"rope_parameters\" (readers differ in what they take)",
                         names.base, absent.base, rotary.base);
  }
  if (!is_empty(scaling)) {
    const Rotary taken = read("rope_scaling", *scaling);
    const bool same_base = taken.base == rotary.base,
               same_scaling = Rotary().same_scaling(rotary) || rotary.same_scaling(taken);
    if (!is_empty(parameters) && !(same_base && same_scaling))
      throw keys.lacking(
          "\"rope_scaling\" contradicts \"rope_parameters\" ({}: the library takes rope_scaling and forgets the rest "
          "of rope_parameters; remove one of them)",
          same_base ? "their scaling differs" : fmt::format("rope_theta {} and {}", taken.base, rotary.base));
    rotary = taken;
  }
  out.model.rope_base = rotary.base;
  out.model.rope_scaling = rotary.scaling;
  set_columns(keys, out, rotary.share);
}

void write_rotary(const ModelSettings& model, Json& config, const RotaryKeys& names) {
  config[names.base] = model.rope_base;
  if (model.rope_columns > 0) {
    const auto columns = static_cast<double>(model.rope_columns), size = static_cast<double>(model.head_size());
    const double share = columns / size;
    // Readers round the product down.
    config[names.share] = size * share < columns ? std::nextafter(share, 1.0) : share;
  }
  const RopeScaling& scaling = model.rope_scaling;
  Json object;
  if (scaling.method == RopeMethod::yarn) {
    object = {{"rope_type", "yarn"},
              {"factor", scaling.factor},
              {"original_max_position_embeddings", scaling.length},
              {"beta_fast", scaling.high},
              {"beta_slow", scaling.low}};
  } else if (scaling.method == RopeMethod::longrope) {
    object = {{"rope_type", "longrope"},
              {"factor", scaling.factor},
              {"original_max_position_embeddings", scaling.length},
              {"short_factor", scaling.short_factors},
              {"long_factor", scaling.long_factors}};
    if (names.length != nullptr) config[names.length] = scaling.length;
  } else if (scaling.method == RopeMethod::dynamic) {
    object = {{"rope_type", "dynamic"}, {"factor", scaling.factor}};
    config["max_position_embeddings"] = scaling.length;
  } else if (scaling.factor > 1 && scaling.length == 0) {
    object = {{"rope_type", "linear"}, {"factor", scaling.factor}};
  } else if (scaling.factor > 1) {
    object = {{"rope_type", "llama3"},
              {"factor", scaling.factor},
              {"original_max_position_embeddings", scaling.length},
              {"low_freq_factor", scaling.low},
              {"high_freq_factor", scaling.high}};
  }
  if (scaling.amplitude > 0) object["attention_factor"] = scaling.amplitude;
  if (!object.is_null()) config["rope_scaling"] = object;
}

void read_two_bases(ConfigKeys& keys, HuggingfaceConfig& out) {
  constexpr const char *kFull = "full_attention", *kWindow = "sliding_attention";
  constexpr double kFullBase = 1'000'000, kWindowBase = 10'000;
  const SortedJson *parameters = keys.find("rope_parameters"), *scaling = keys.find("rope_scaling");
  Rotary full{.base = keys.number_or("rope_theta", kFullBase, kBases)},
      window{.base = keys.number_or("rope_local_base_freq", kWindowBase, kBases)};
  if (!is_empty(parameters) && !is_empty(scaling))
    throw keys.lacking("\"rope_scaling\" next to \"rope_parameters\" (the library merges them); remove one of them");
  if (!is_empty(parameters)) {
    if (!parameters->is_object()) throw keys.damaged("\"rope_parameters\" is not an object");
    ConfigKeys inner(*parameters, fmt::format("{}, \"rope_parameters\"", keys.path()));
    const auto read = [&](const char* name, Rotary& rotary) {
      if (const SortedJson* const object = inner.find(name); !is_empty(object))
        rotary = read_object(inner, name, *object, rotary, out, 0, false);
    };
    read(kFull, full);
    read(kWindow, window);
    inner.refuse_unknown();
  } else if (!is_empty(scaling)) {
    full = read_object(keys, "rope_scaling", *scaling, full, out, 0, false);
  }
  if (!Rotary().same_scaling(window))
    throw keys.lacking("\"rope_parameters\" scales the wavelengths of \"{}\" (only those of \"{}\" can be)", kWindow,
                       kFull);
  set_columns(keys, out, full.share != 1 ? full.share : window.share);
  out.model.rope_base = full.base;
  out.model.rope_scaling = full.scaling;
  if (out.model.window > 0) out.model.rope_window_base = window.base;
}

}  // namespace weft::language_model
