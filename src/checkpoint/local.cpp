// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/local.hpp"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "base/system.hpp"
#include "checkpoint/checkpoint_directory.hpp"
#include "checkpoint/checkpoint_writer.hpp"
#include "checkpoint/lease.hpp"
#include "checkpoint/resume.hpp"
#include "parallel/failure.hpp"
#include "parallel/watchdog.hpp"
#include "storage/digest.hpp"
#include "storage/durable.hpp"
#include "storage/ownership.hpp"
#include "storage/posix_file.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr const char* kIdName = "local_id";
constexpr std::size_t kIdDigits = 16;

/// The id that the last start has chosen; "" if there is none. Read by rank 0. Collective.
std::string last_id(const parallel::Communicator& world, const fs::path& directory) {
  return parallel::on_root(world, [&]() -> std::string {
    std::error_code ignored;
    if (!fs::exists(directory / kIdName, ignored)) return "";
    const std::string id = storage::read_text(directory / kIdName, 2 * kIdDigits).substr(0, kIdDigits);
    if (id.size() == kIdDigits && id.find_first_not_of("0123456789abcdef") == id.npos) return id;
    log::warning("{}: is not an id of checkpoint.local; ignored", (directory / kIdName).string());
    return "";
  });
}

/// The checkpoint of `step` on the nodes, and the shards that this rank copies. Throws a collective Error(io) unless
/// every shard is on some node. Collective.
struct OnNodes {
  Manifest manifest;
  std::vector<ShardSource> mine;
};
OnNodes look_on_nodes(const parallel::Communicator& world, const parallel::Communicator& node, const fs::path& here,
                      std::int64_t step) {
  const fs::path path = here / directory_name(step);
  std::string text;
  OnNodes found;
  const auto unusable = parallel::attempt([&] {
    text = storage::read_text(path / kManifestName, kLargestManifest);
    found.manifest = parse(text);
  });
  // The manifest of the lowest rank that has one; those of other nodes must be the same.
  std::int64_t first = unusable ? world.size() : world.rank();
  world.minimum({&first, 1});
  if (first == world.size())
    throw collective_error(ExitCode::io, "its manifest is on no node ({})", unusable ? unusable->message : "");
  const std::string agreed = world.broadcast(unusable ? "" : text, static_cast<int>(first));
  const bool same = !unusable && text == agreed;
  found.manifest = parse(agreed);
  // Each shard is copied by one rank of a node that has it; the shards of a node are spread over its ranks.
  constexpr std::int64_t kNoRank = std::numeric_limits<std::int64_t>::max();
  const std::size_t n_shards = found.manifest.shards.size();
  std::vector<std::int64_t> copier(n_shards, kNoRank);
  for (std::size_t i = 0; same && i < n_shards; ++i) {
    std::error_code ignored;
    const fs::path file = path / found.manifest.shards[i].file;
    if (static_cast<int>(i % static_cast<std::size_t>(node.size())) == node.rank() &&
        fs::is_regular_file(file, ignored))
      copier[i] = world.rank();
  }
  world.minimum(copier);
  for (std::size_t i = 0; i < n_shards; ++i) {
    if (copier[i] == kNoRank)
      throw collective_error(ExitCode::io, "shard {} is on no node of this job", found.manifest.shards[i].file);
    if (copier[i] == world.rank()) found.mine.push_back({i, path / found.manifest.shards[i].file});
  }
  return found;
}

/// True if a shard that a rank copies differs from its digests or cannot be read. Collective.
bool is_damaged(const parallel::Communicator& world, const OnNodes& found) {
  const auto damage = parallel::attempt([&] {
    for (const ShardSource& source : found.mine) {
      const ShardEntry& shard = found.manifest.shards[source.shard];
      if (storage::PosixFile(source.file.string()).bytes() != shard.bytes ||
          storage::sha256_segments(source.file, shard.bytes, 0, storage::digest_segments(shard.bytes),
                                   storage::digest_threads()) != shard.sha256)
        throw error(ExitCode::io, "{}: is damaged", source.file.string());
    }
  });
  return parallel::agree(world, damage).has_value();
}

/// Publishes it in `directory`. Throws a collective Error(io). Collective.
void copy(const parallel::Communicator& world, const fs::path& directory, const OnNodes& found, Settings settings,
          const Lease* lease) {
  Manifest manifest = found.manifest;
  if (lease != nullptr) {
    manifest.fence = lease->fence();
    manifest.owner = lease->token();
  }
  std::int64_t older = -1;
  parallel::on_root(world, [&] {
    for (const std::int64_t one : steps_in(directory))
      if (one < manifest.step) older = one;
  });
  world.broadcast(&older, sizeof older);
  settings.failures_allowed = 1;
  const Registry none;
  Writer writer(world, directory, settings, none, kernels::Execution{},
                older < 0 ? fs::path() : directory / directory_name(older));
  writer.start_copy(manifest, found.mine);
  if (const auto report = writer.finish(); report && report->durable && world.rank() == 0)
    log::info("{} was only in checkpoint.local; {}", directory_name(manifest.step), report->line());
}

}  // namespace

fs::path local_directory(const std::string& local, const std::string& id) {
  return local.empty() || id.empty() ? fs::path() : fs::path(local) / ("weft_" + id) / host_name();
}

void copy_left_on_nodes(const parallel::Communicator& world, const parallel::Communicator& node,
                        const fs::path& directory, const Settings& settings, const Lease* lease) {
  const fs::path here = local_directory(settings.local, last_id(world, directory));
  if (here.empty()) return;
  parallel::note_phase("looking for checkpoints on the nodes");
  parallel::on_root(world, [&] { remove_leftovers(directory); });
  std::vector<std::int64_t> steps;
  parallel::on_all(world, [&] { steps = steps_in(here); });
  for (std::int64_t before = std::numeric_limits<std::int64_t>::max();;) {
    // The newest step below `before` that any node has.
    std::int64_t step = -1;
    for (const std::int64_t one : steps)
      if (one < before) step = std::max(step, one);
    world.maximum({&step, 1});
    if (step < 0 || reaches(world, directory, step, settings.verify, lease)) return;
    before = step;
    const auto unusable = [&](const Error& failure) {
      if (failure.code() != ExitCode::io || failure.known_to() != KnownTo::all_ranks) throw;
      if (world.rank() == 0)
        log::warning("{}: {} in checkpoint.local cannot be used, {}", settings.local, directory_name(step),
                     failure.what());
    };
    OnNodes found;
    try {
      found = look_on_nodes(world, node, here, step);
      if (lease != nullptr && lease->stale(found.manifest))
        throw collective_error(ExitCode::io, "a run that had lost the directory wrote it");
    } catch (const Error& failure) {
      unusable(failure);
      continue;
    }
    try {
      copy(world, directory, found, settings, lease);
      return;
    } catch (const Error& failure) {
      if (failure.code() == ExitCode::io && failure.known_to() == KnownTo::all_ranks && !is_damaged(world, found))
        throw collective_error(
            ExitCode::io,
            "{}: {} on the nodes is newer and cannot be copied there ({}); free disk space and start "
            "again, or give it up with --set checkpoint.local=\"\"",
            directory.string(), directory_name(step), failure.what());
      unusable(failure);
    }
  }
}

fs::path begin_local(const parallel::Communicator& world, const parallel::Communicator& node, const fs::path& directory,
                     const std::string& local) {
  const fs::path old = local_directory(local, last_id(world, directory));
  const std::string id = parallel::on_root(world, [&] {
    const std::string text = random_hex(kIdDigits);
    storage::require_ownership();
    storage::write_text_atomically(directory / kIdName, text + "\n");
    return text;
  });
  const fs::path here = local_directory(local, id);
  if (!old.empty()) remove_local(world, node, old);
  parallel::on_all(world, [&] {
    std::error_code failed;
    fs::create_directories(here, failed);
    if (failed || ::access(here.c_str(), W_OK | X_OK) != 0)
      throw error(
          ExitCode::io,
          "checkpoint.local = \"{}\": cannot be written on {} ({}); choose a directory that exists on every node",
          local, host_name(), failed ? failed.message() : "no permission");
  });
  return here;
}

void remove_local(const parallel::Communicator& world, const parallel::Communicator& node, const fs::path& here) {
  world.barrier();  // no rank of the node still uses it
  if (node.rank() != 0) return;
  storage::require_ownership();
  std::error_code failed;
  fs::remove_all(here, failed);
  if (failed) {
    log::warning("{}: cannot be removed ({}); remove it manually", here.string(), failed.message());
    return;
  }
  fs::remove(here.parent_path(), failed);  // directory of the run; not empty if nodes share it
}

}  // namespace weft::checkpoint
