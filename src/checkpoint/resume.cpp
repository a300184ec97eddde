// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/resume.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "checkpoint/directory.hpp"
#include "device/memory.hpp"
#include "kernels/runtime.hpp"
#include "parallel/failure.hpp"
#include "report/format.hpp"
#include "storage/digest.hpp"
#include "storage/durable.hpp"
#include "storage/tensor_file.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr std::int64_t kLargestManifest = std::int64_t{64} << 20;

std::string text_of(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

/// The manifest of a step directory, on all ranks. Throws a collective Error(io), or NewerFormat on every rank.
Manifest read_manifest(const parallel::Communicator& world, const fs::path& directory) {
  std::string text;
  std::int64_t newer = 0;
  parallel::on_root(world, [&] {
    std::error_code ignored;
    if (!fs::is_directory(directory, ignored)) throw error(ExitCode::io, "it is not a directory");
    if (!fs::exists(directory / kManifestName, ignored))
      throw error(ExitCode::io, "{} is missing (incomplete write)", kManifestName);
    text = storage::read_text(directory / kManifestName, kLargestManifest);
    try {
      const Manifest manifest = parse(text);
      const std::int64_t step = step_of(directory.filename().string());
      if (step >= 0 && step != manifest.step)
        throw error(ExitCode::io, "{} is of step {} (was the directory renamed?)", kManifestName, manifest.step);
    } catch (const NewerFormat& later) {
      newer = later.version;
    } catch (const Error& unreadable) {
      throw error(ExitCode::io, "{}: {}", kManifestName, unreadable.what());
    }
  });
  world.broadcast(&newer, sizeof newer);
  if (newer > 0) throw NewerFormat(newer);
  return parse(world.broadcast(std::move(text)));
}

void require_size(const fs::path& directory, const ShardEntry& shard) {
  std::error_code failed;
  const fs::path path = directory / shard.file;
  if (!fs::exists(path, failed)) throw error(ExitCode::io, "shard {} is missing", shard.file);
  if (!fs::is_regular_file(path, failed)) throw error(ExitCode::io, "shard {} is not a regular file", shard.file);
  const auto size = static_cast<std::int64_t>(fs::file_size(path, failed));
  if (failed) throw error(ExitCode::io, "shard {} cannot be read ({})", shard.file, failed.message());
  if (size != shard.bytes)
    throw error(ExitCode::io, "shard {} is {} bytes, manifest says {} ({})", shard.file, report::grouped(size),
                report::grouped(shard.bytes), size < shard.bytes ? "torn write" : "not the file that was written");
}

/// Compares the shards with the manifest before HDF5 opens them; the work is divided over the ranks. Throws a
/// collective Error(io).
void verify_shards(const parallel::Communicator& world, const fs::path& directory, const Manifest& manifest,
                   Verify verify) {
  if (verify == Verify::none) return;
  const auto n_shards = static_cast<std::int64_t>(manifest.shards.size());
  parallel::on_all(world, [&] {
    const parallel::Range mine = parallel::part(n_shards, world.size(), world.rank());
    for (std::int64_t i = mine.begin; i < mine.end; ++i)
      require_size(directory, manifest.shards[static_cast<std::size_t>(i)]);
  });
  if (verify == Verify::size) return;
  std::int64_t n_segments = 0;
  for (const ShardEntry& shard : manifest.shards) n_segments += static_cast<std::int64_t>(shard.sha256.size());
  parallel::on_all(world, [&] {
    const parallel::Range mine = parallel::part(n_segments, world.size(), world.rank());
    std::int64_t first = 0;
    for (const ShardEntry& shard : manifest.shards) {
      const auto count = static_cast<std::int64_t>(shard.sha256.size());
      const std::int64_t begin = std::clamp<std::int64_t>(mine.begin - first, 0, count);
      const std::int64_t end = std::clamp<std::int64_t>(mine.end - first, 0, count);
      const auto found =
          storage::sha256_segments(directory / shard.file, shard.bytes, begin, end, storage::digest_threads());
      for (std::int64_t i = begin; i < end; ++i)
        if (found[static_cast<std::size_t>(i - begin)] != shard.sha256[static_cast<std::size_t>(i)])
          throw error(ExitCode::io, "shard {} differs from its sha256 between byte {} and {} (damaged on disk)",
                      shard.file, report::grouped(i * storage::kDigestSegment),
                      report::grouped(std::min(shard.bytes, (i + 1) * storage::kDigestSegment)));
      first += count;
    }
  });
}

/// Throws Errors whose text does not name the directory, and NewerFormat.
Manifest examine(const parallel::Communicator& world, const fs::path& directory, Verify verify) {
  Manifest manifest = read_manifest(world, directory);
  verify_shards(world, directory, manifest, verify);
  return manifest;
}

/// Throws Error(usage) if `path` is clearly not a checkpoint. A directory without a manifest may be a damaged one.
void require_no_other_kind(const fs::path& path) {
  const auto refuse = [&](std::string_view what) {
    throw error(ExitCode::usage, "{}: {}; name a checkpoint (RUN/checkpoints/step_XXXXXXXX)", path.string(), what);
  };
  std::error_code ignored;
  if (!fs::exists(path, ignored)) refuse("no such directory");
  if (!fs::is_directory(path, ignored)) refuse("a file, not a checkpoint");
  if (fs::exists(path / kManifestName, ignored)) return;
  if (is_run(path)) refuse("a run, not one of its checkpoints");
  if (fs::exists(path / "metadata.json", ignored)) refuse("a dataset, not a checkpoint");
}

[[noreturn]] void refuse_newer(const fs::path& directory, std::int64_t version) {
  throw collective_error(ExitCode::io,
                         "{}: has checkpoint format {} (this program reads up to {}); use the newer Weft that wrote it",
                         directory.string(), version, kFormatVersion);
}

}  // namespace

bool is_run(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path / "checkpoints", ignored) || fs::exists(path / "run.json", ignored);
}

Found open(const parallel::Communicator& world, const fs::path& step_directory, Verify verify) {
  // "runs/a/checkpoints/step_00000100/" names the same directory.
  const fs::path path = step_directory.has_filename() ? step_directory : step_directory.parent_path();
  parallel::on_root(world, [&] { require_no_other_kind(path); });
  try {
    return {path, examine(world, path, verify), verify == Verify::full};
  } catch (const NewerFormat& later) {
    refuse_newer(path, later.version);
  } catch (const Error& failure) {
    throw collective_error(failure.code(), "{}: cannot be used, {}", path.string(), failure.what());
  }
}

std::optional<Found> find(const parallel::Communicator& world, const fs::path& directory, const std::string& resume,
                          Verify verify, Leftovers leftovers) {
  std::vector<std::int64_t> steps;
  const auto unreadable = parallel::attempt_on_root(world, [&] {
    if (leftovers == Leftovers::remove) remove_leftovers(directory);
    steps = steps_in(directory);
  });
  if (unreadable)
    throw collective_error(ExitCode::io, "{}: cannot be searched for checkpoints ({})", directory.string(),
                           unreadable->message);
  if (resume == "never") return std::nullopt;
  if (resume != "auto") {
    try {
      return open(world, resume, verify);
    } catch (const Error& failure) {
      if (failure.code() != ExitCode::usage) throw;
      throw collective_error(ExitCode::usage, "--resume {}, auto or never", failure.what());
    }
  }

  auto count = static_cast<std::int64_t>(steps.size());
  world.broadcast(&count, sizeof count);
  steps.resize(static_cast<std::size_t>(count));
  world.broadcast(steps.data(), count * static_cast<std::int64_t>(sizeof(std::int64_t)));
  for (std::size_t i = steps.size(); i-- > 0;) {
    const fs::path path = directory / directory_name(steps[i]);
    try {
      return Found{path, examine(world, path, verify), verify == Verify::full};
    } catch (const NewerFormat& later) {
      refuse_newer(path, later.version);
    } catch (const Error& failure) {
      if (failure.code() != ExitCode::io) throw;
      if (world.rank() == 0)
        log::warning("{}: rejected, {}; {}", path.string(), failure.what(),
                     i > 0 ? "trying " + directory_name(steps[i - 1]) : "there is no older one");
    }
  }
  if (count == 0) return std::nullopt;
  throw collective_error(ExitCode::io,
                         "{}: contains {} checkpoint{} and none is valid (see the reasons above); start again from "
                         "step 0 with --resume never "
                         "or another --output",
                         directory.string(), count, count == 1 ? "" : "s");
}

void load(const parallel::Communicator& world, const Found& found, const Registry& registry,
          const kernels::Execution& execution, Load what) {
  const Manifest& manifest = found.manifest;
  const auto entry_of = [&](const Tensor& tensor) {
    const auto at = std::find_if(manifest.tensors.begin(), manifest.tensors.end(),
                                 [&](const TensorEntry& entry) { return entry.name == tensor.name; });
    if (at == manifest.tensors.end())
      throw error(ExitCode::usage, "{}: has no tensor {} (was it written with other settings?)", found.path.string(),
                  tensor.name);
    if (at->type != tensor.type || at->shape != tensor.shape)
      throw error(ExitCode::usage, "{}: {} is {} {}, this run has {} {} (was it written with other settings?)",
                  found.path.string(), tensor.name, name_of(at->type), text_of(at->shape), name_of(tensor.type),
                  text_of(tensor.shape));
    return static_cast<std::size_t>(at - manifest.tensors.begin());
  };
  // Names, types and shapes are checked before reading: mismatches are the same on every rank.
  parallel::on_all(world, [&] {
    for (const Tensor& tensor : registry.tensors()) entry_of(tensor);
    if (what == Load::part) return;
    for (const TensorEntry& entry : manifest.tensors)
      if (registry.find(entry.name) == nullptr)
        throw error(ExitCode::usage,
                    "{}: has tensor {}, which this run does not have (was it written with other settings?)",
                    found.path.string(), entry.name);
  });
  parallel::on_all(world, [&] {
    std::int64_t largest = 0;
    for (const Tensor& tensor : registry.tensors())
      if (tensor.on_device || tensor.scatter)
        largest = std::max(
            largest, std::min(tensor.held.size(), storage::piece_rows(tensor.type, tensor.shape)) * tensor.row_bytes());
    const device::Allocation bounce(largest, device::Allocation::Where::host);
    for (std::size_t s = 0; s < manifest.shards.size(); ++s) {
      const ShardEntry& shard = manifest.shards[s];
      const fs::path path = found.path / shard.file;
      storage::Handle file;
      std::optional<storage::PosixFile> bytes;  // for reads without a second check
      const auto read = [&](hid_t dataset, std::int64_t begin, std::int64_t count, void* to) {
        if (found.verified)
          storage::read_rows_verified(dataset, *bytes, begin, count, to);
        else
          storage::read_rows(dataset, begin, count, to);
      };
      for (const Tensor& tensor : registry.tensors()) {
        const parallel::Range stored = shard.owned[entry_of(tensor)];
        const parallel::Range wanted{std::max(stored.begin, tensor.held.begin), std::min(stored.end, tensor.held.end)};
        if (wanted.size() <= 0) continue;
        try {
          if (file < 0) {
            file = storage::open_file(path);
            if (found.verified) bytes.emplace(path.string());
            if (storage::read_integer_attribute(file, "step") != manifest.step ||
                storage::read_integer_attribute(file, "rank") != static_cast<std::int64_t>(s))
              throw error(ExitCode::io, "belongs to another step or rank");
          }
          std::vector<std::int64_t> shape = tensor.shape;
          shape[0] = stored.size();
          const storage::Handle dataset = storage::open_dataset(file, tensor.name, tensor.type, shape);
          if (storage::read_integer_attribute(dataset, "first_row") != stored.begin)
            throw error(ExitCode::io, "contains other rows than the manifest says");
          char* to = static_cast<char*>(tensor.data) + (wanted.begin - tensor.held.begin) * tensor.row_bytes();
          if (!tensor.on_device && !tensor.scatter) {
            read(dataset, wanted.begin - stored.begin, wanted.size(), to);
            continue;
          }
          const std::int64_t piece = bounce.bytes() / tensor.row_bytes();
          for (std::int64_t begin = wanted.begin; begin < wanted.end; begin += piece) {
            const parallel::Range rows{begin, std::min(wanted.end, begin + piece)};
            read(dataset, rows.begin - stored.begin, rows.size(), bounce.data());
            if (tensor.scatter)
              tensor.scatter(rows, bounce.data());
            else
              device::copy(execution, to + (begin - wanted.begin) * tensor.row_bytes(), bounce.data(),
                           rows.size() * tensor.row_bytes(), device::Direction::to_device);
            kernels::fence(execution);
          }
        } catch (const Error& failure) {
          throw error(ExitCode::io, "{}: /{}: {}", path.string(), tensor.name, failure.what());
        }
      }
    }
  });
}

}  // namespace weft::checkpoint
