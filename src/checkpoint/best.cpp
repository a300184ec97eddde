// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/best.hpp"

#include "base/error.hpp"

namespace weft::checkpoint {
namespace {

constexpr const char* kBest = "best";

}  // namespace

bool Best::note(std::int64_t step_of_evaluation, double its_loss) {
  if (its_loss < loss) {
    *this = {step_of_evaluation, its_loss, 0};
    return true;
  }
  ++evaluations_since;
  return false;
}

Json to_json(const Best& best) {
  return {{"step", best.step},
          {"loss", best.step < 0 ? Json() : Json(best.loss)},
          {"evaluations_since", best.evaluations_since}};
}

std::optional<Best> best_of(const Manifest& manifest) {
  const Json extra = parse_json(manifest.extra);
  if (!extra.is_object() || !extra.contains(kBest) || !extra[kBest].is_object()) return std::nullopt;
  const Json& stored = extra[kBest];
  const auto integer = [&](const char* name) {
    if (!stored.contains(name) || !stored[name].is_number_integer())
      throw error(ExitCode::io, "the manifest of step {} has no integer \"{}\" in \"{}\"; is it damaged?",
                  manifest.step, name, kBest);
    return stored[name].get<std::int64_t>();
  };
  Best best{.step = integer("step"), .evaluations_since = integer("evaluations_since")};
  if (stored.contains("loss") && stored["loss"].is_number()) best.loss = stored["loss"].get<double>();
  return best;
}

}  // namespace weft::checkpoint
