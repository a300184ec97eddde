// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/best.hpp"

#include "base/error.hpp"
#include "checkpoint/resume.hpp"
#include "parallel/failure.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
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

bool names_best(const fs::path& path) {
  std::error_code ignored;
  return path.filename() == kBest && !fs::exists(path, ignored) && is_run(path.parent_path());
}

fs::path best_directory(const parallel::Communicator& world, const fs::path& run) {
  const fs::path checkpoints = run / "checkpoints";
  const std::optional<Found> newest = find(world, checkpoints, "auto", Verify::size, Leftovers::keep);
  const std::optional<Best> best = newest ? best_of(newest->manifest) : std::nullopt;
  if (!best || best->step < 0)
    throw collective_error(
        ExitCode::usage,
        "{}: the run has no best checkpoint ({}); name one of its checkpoints, or the run for the "
        "newest",
        (run / kBest).string(),
        newest ? "checkpoint.keep_best was not set, or it has not evaluated yet" : "it has written no checkpoint yet");
  const fs::path path = checkpoints / directory_name(best->step);
  parallel::on_root(world, [&] {
    if (!fs::is_directory(path))
      throw error(ExitCode::usage,
                  "{}: does not exist (of step {}, with the lowest validation loss, {:.6g}; only a run with "
                  "checkpoint.keep_best = true keeps it); name another checkpoint",
                  path.string(), best->step, best->loss);
  });
  return path;
}

}  // namespace weft::checkpoint
