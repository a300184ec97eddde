// SPDX-License-Identifier: Apache-2.0
#include "language_model/settings/position_keys.hpp"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "language_model/blocks/architecture.hpp"
#include "language_model/blocks/model_settings.hpp"

namespace weft::language_model {
namespace {

/// Why RopeScaling is none that its method has; "": it is.
std::string rope_method_problem(const ModelSettings& model) {
  using kernels::RopeMethod;
  const kernels::RopeScaling& scaling = model.rope_scaling;
  if (scaling.method == RopeMethod::bands) {
    if (scaling.length == 0 || scaling.factor > 1) return {};
    return fmt::format("language_model.rope_length = {} has no effect without rope_factor; leave it out",
                       scaling.length);
  }
  // ln(1) is 0: the amplitude of longrope would be infinite.
  if (scaling.length < 2)
    return fmt::format(
        "language_model.rope_length = {} (rope_method compares sequences and wavelengths with it); give the length of "
        "the contexts of the training",
        scaling.length);
  const std::int64_t pairs = model.rotated_columns() / 2;
  if (scaling.method == RopeMethod::dynamic && pairs < 2)
    return "language_model.rope_method = \"dynamic\" with one pair of rotated columns (its base would be infinite); "
           "take rope_columns = 4 or more";
  if (scaling.method != RopeMethod::longrope) return {};
  for (const auto& [name, factors] :
       {std::pair{"rope_short", &scaling.short_factors}, std::pair{"rope_long", &scaling.long_factors}})
    if (std::ssize(*factors) != pairs)
      return fmt::format("language_model.{} has {} numbers for {} pairs of columns; give one for each", name,
                         factors->size(), pairs);
  return {};
}

}  // namespace

void add_rotary_keys(input::Schema& schema, ModelSettings& model) {
  schema.add("language_model.rope_base", model.rope_base, "base of the wavelengths of rotary positions")
      .more_than(1)
      .at_most(kLargest)
      .only_with("language_model.position", {"rope"});
  schema
      .add("language_model.rope_columns", model.rope_columns,
           "columns of a head that rotary positions rotate, the first ones, an even number; 0 = all")
      .at_least(0)
      .at_most(kernels::kLargestHead)
      .only_with("language_model.position", {"rope"});
  schema
      .add("language_model.unrotated_every", model.unrotated_every,
           "every unrotated_every-th block has no rotary positions; 0 = none")
      .in("blocks")
      .at_least(0)
      .at_most(kMostLayers)
      .only_with("language_model.position", {"rope"});
  schema
      .add("language_model.rope_factor", model.rope_scaling.factor,
           "factor of long wavelengths of rotary positions, for contexts longer than those of the training")
      .at_least(1)
      .at_most(kMostScale)
      .only_with("language_model.position", {"rope"});
  schema
      .add("language_model.rope_method", model.rope_scaling.method,
           {{"bands", kernels::RopeMethod::bands},
            {"yarn", kernels::RopeMethod::yarn},
            {"dynamic", kernels::RopeMethod::dynamic},
            {"longrope", kernels::RopeMethod::longrope}},
           "how rope_factor makes wavelengths longer: by bands of wavelengths (Llama 3.1; all with rope_length = 0), "
           "with a ramp over the columns (YaRN), a base that follows data.sequence (dynamic), or factors of their "
           "own (LongRoPE)")
      .only_with("language_model.position", {"rope"});
  schema
      .add("language_model.rope_length", model.rope_scaling.length,
           "length of the contexts of the training; 0 = all wavelengths are multiplied (bands)")
      .in("tokens")
      .at_least(0)
      .at_most(kMostRows)
      .only_with("language_model.position", {"rope"});
  schema
      .add("language_model.rope_low", model.rope_scaling.low,
           "with rope_length: wavelengths that fit into it less often than this are multiplied")
      .more_than(0)
      .at_most(kMostScale)
      .only_with("language_model.position", {"rope"});
  schema
      .add("language_model.rope_high", model.rope_scaling.high,
           "with rope_length: wavelengths that fit into it more often than this are not; between both in part")
      .more_than(0)
      .at_most(kMostScale)
      .only_with("language_model.position", {"rope"});
  schema
      .add("language_model.rope_amplitude", model.rope_scaling.amplitude,
           "factor of cosines and sines; 0 = 1, with yarn 0.1 ln(rope_factor) + 1, with longrope sqrt(1 + "
           "ln(rope_factor) / ln(rope_length))")
      .at_least(0)
      .at_most(kMostScale)
      .only_with("language_model.position", {"rope"});
  schema
      .add("language_model.rope_short", model.rope_scaling.short_factors,
           "factors of the wavelengths, one per pair of columns")
      .more_than(0)
      .at_most(kMostScale)
      .required_with("language_model.rope_method", {"longrope"});
  schema
      .add("language_model.rope_long", model.rope_scaling.long_factors,
           "the same if data.sequence is more than rope_length")
      .more_than(0)
      .at_most(kMostScale)
      .required_with("language_model.rope_method", {"longrope"});
}

void add_rotary_rules(input::Schema& schema, const ModelSettings& model) {
  schema.rule({"language_model.rope_low", "language_model.rope_high"}, [&model]() -> std::string {
    if (model.rope_scaling.low < model.rope_scaling.high) return {};
    return fmt::format("language_model.rope_low = {} is not less than rope_high = {}; swap them",
                       model.rope_scaling.low, model.rope_scaling.high);
  });
  schema.rule(
      {"language_model.rope_columns", "language_model.head_size", "language_model.d_model"}, [&model]() -> std::string {
        if (model.rope_columns % 2 == 0 && model.rope_columns <= model.head_size()) return {};
        return fmt::format(
            "language_model.rope_columns = {} with heads of {} (pairs of columns of a head are rotated); take an "
            "even number up to {}",
            model.rope_columns, model.head_size(), model.head_size());
      });
  schema.rule({"language_model.rope_window_base"}, [&model]() -> std::string {
    if (model.rope_window_base == 0 || (model.rope_window_base > 1 && model.position == Position::rope)) return {};
    return fmt::format(
        "language_model.rope_window_base = {} is not the base of rotary positions (more than 1, with position = "
        "\"rope\"); correct it",
        model.rope_window_base);
  });
  schema.rule({"language_model.rope_method", "language_model.rope_length", "language_model.rope_factor",
               "language_model.rope_short", "language_model.rope_long"},
              [&model] { return rope_method_problem(model); });
}

}  // namespace weft::language_model
