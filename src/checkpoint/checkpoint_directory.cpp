// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint_directory.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "checkpoint/manifest.hpp"
#include "storage/durable.hpp"
#include "storage/ownership.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr const char* kAbandoned = ".abandoned";

/// The step in "step_00001200.abandoned" and "step_00001200.abandoned.2"; -1 for any other name.
std::int64_t abandoned_step(const std::string& name) {
  const std::size_t at = name.find(kAbandoned);
  return at == std::string::npos || name.ends_with(".tmp") ? -1 : step_of(name.substr(0, at));
}

std::size_t kept(const Settings& settings) {
  return static_cast<std::size_t>(std::max<std::int64_t>(2, settings.keep));
}

}  // namespace

std::int64_t step_of(const std::string& name) {
  constexpr std::string_view kPrefix = "step_";
  constexpr std::size_t kMostDigits = 18;  // fits 64 bits
  if (!name.starts_with(kPrefix) || name.size() == kPrefix.size() || name.size() > kPrefix.size() + kMostDigits)
    return -1;
  std::int64_t step = 0;
  for (const char c : name.substr(kPrefix.size())) {
    if (c < '0' || c > '9') return -1;
    step = 10 * step + (c - '0');
  }
  return name == directory_name(step) ? step : -1;
}

std::vector<std::int64_t> steps_in(const fs::path& directory) {
  std::vector<std::int64_t> steps;
  if (!fs::exists(directory)) return steps;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    if (const std::int64_t step = step_of(entry.path().filename().string()); step >= 0 && entry.is_directory())
      steps.push_back(step);
  std::sort(steps.begin(), steps.end());
  return steps;
}

fs::path replaced_name(const fs::path& step_directory) { return step_directory.string() + ".replaced"; }

void remove_leftovers(const fs::path& directory) {
  if (!fs::exists(directory)) return;
  storage::require_ownership();
  std::vector<fs::path> leftovers;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    if (const fs::path kind = entry.path().extension(); kind == ".tmp" || kind == ".replaced")
      leftovers.push_back(entry.path());
  std::sort(leftovers.begin(), leftovers.end());
  for (const fs::path& path : leftovers) {
    const fs::path step = directory / path.stem();
    if (path.extension() == ".replaced" && !fs::exists(step)) {
      storage::rename_durably(path, step);
      log::warning("{}: its replacement was not published; renamed back to {}", path.string(),
                   step.filename().string());
      continue;
    }
    std::error_code failed;
    fs::remove_all(path, failed);
    if (failed)
      log::warning("{}: left by an interrupted write; cannot be removed ({})", path.string(), failed.message());
    else
      log::warning("{}: left by an interrupted write; removed", path.string());
  }
}

void set_aside(const fs::path& step_directory) {
  fs::path target = step_directory.string() + kAbandoned;
  for (int n = 2; fs::exists(target); ++n) target = step_directory.string() + kAbandoned + "." + std::to_string(n);
  storage::require_ownership();
  storage::rename_durably(step_directory, target);
  log::warning("{}: newer than the checkpoint this run resumes from; renamed to {}", step_directory.string(),
               target.filename().string());
}

std::vector<std::int64_t> expired(const std::vector<std::int64_t>& durable, const Settings& settings,
                                  std::int64_t best) {
  const std::size_t keep = kept(settings);
  std::vector<std::int64_t> old;
  for (std::size_t i = 0; i + keep < durable.size(); ++i)
    if ((settings.keep_every <= 0 || durable[i] % settings.keep_every != 0) && durable[i] != settings.protected_step &&
        !(settings.keep_best && durable[i] == best))
      old.push_back(durable[i]);
  return old;
}

std::vector<fs::path> abandoned_in(const fs::path& directory) {
  std::vector<std::pair<std::int64_t, fs::path>> found;
  if (!fs::exists(directory)) return {};
  for (const fs::directory_entry& entry : fs::directory_iterator(directory))
    if (const std::int64_t step = abandoned_step(entry.path().filename().string()); step >= 0)
      found.emplace_back(step, entry.path());
  std::sort(found.begin(), found.end());
  std::vector<fs::path> paths;
  for (auto& [step, path] : found) paths.push_back(std::move(path));
  return paths;
}

std::vector<fs::path> expired_abandoned(const fs::path& directory, std::size_t n_durable, const Settings& settings) {
  std::vector<fs::path> old = abandoned_in(directory);
  const std::size_t keep = kept(settings) - std::min(kept(settings), n_durable);
  old.resize(old.size() - std::min(old.size(), keep));
  return old;
}

}  // namespace weft::checkpoint
