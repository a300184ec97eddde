// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/resume.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "base/format.hpp"
#include "base/log.hpp"
#include "base/progress.hpp"
#include "checkpoint/best.hpp"
#include "checkpoint/checkpoint_directory.hpp"
#include "checkpoint/lease.hpp"
#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "parallel/failure.hpp"
#include "parallel/watchdog.hpp"
#include "storage/digest.hpp"
#include "storage/durable.hpp"
#include "storage/retry.hpp"
#include "storage/tensor_file.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
namespace {

/// Pieces of a tensor that are read at a time if it is copied to a device or unpacked: about 32 MiB.
constexpr std::int64_t kPieces = 8;

constexpr const char* kBestName = "best";

std::string text_of(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

/// Runs `check`. A defect that it finds in a file is thrown as Error(data): the checkpoint is damaged. A file that
/// cannot be read is a SystemError(io), which is no evidence of damage.
template <class Check>
void finding_damage(Check&& check) {
  try {
    check();
  } catch (const SystemError&) {
    throw;
  } catch (const Error& wrong) {
    throw Error(wrong.code() == ExitCode::io ? ExitCode::data : wrong.code(), wrong.what());
  }
}

/// `not_found` if there is no file of this name. Throws SystemError if that is not known.
fs::file_type type_of(const fs::path& path) {
  std::error_code failed;
  const fs::file_type type = fs::status(path, failed).type();
  if (type == fs::file_type::none)
    throw SystemError(ExitCode::io, failed.value(), fmt::format("{}: {}", path.string(), failed.message()));
  return type;
}

/// The manifest of a step directory, on all ranks. Throws a collective Error(data) or Error(io), or NewerFormat on
/// every rank.
Manifest read_manifest(const parallel::Communicator& world, const fs::path& directory) {
  std::string text;
  std::int64_t newer = 0;
  const auto read = [&] {
    if (type_of(directory) != fs::file_type::directory) throw error(ExitCode::io, "it is not a directory");
    if (type_of(directory / kManifestName) == fs::file_type::not_found)
      throw error(ExitCode::io, "{} is missing (incomplete write)", kManifestName);
    return storage::read_text(directory / kManifestName, kLargestManifest);
  };
  parallel::on_root(world, [&] {
    finding_damage([&] {
      text = storage::retried(read);
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
  });
  world.broadcast(&newer, sizeof newer);
  if (newer > 0) throw NewerFormat(newer);
  return parse(world.broadcast(std::move(text)));
}

void require_size(const fs::path& directory, const ShardEntry& shard) {
  const fs::path path = directory / shard.file;
  const auto size_of = [&] {
    const fs::file_type type = type_of(path);
    if (type == fs::file_type::not_found) throw error(ExitCode::io, "shard {} is missing", shard.file);
    if (type != fs::file_type::regular) throw error(ExitCode::io, "shard {} is not a regular file", shard.file);
    std::error_code failed;
    const auto size = static_cast<std::int64_t>(fs::file_size(path, failed));
    if (failed)
      throw SystemError(ExitCode::io, failed.value(),
                        fmt::format("shard {} cannot be read ({})", shard.file, failed.message()));
    return size;
  };
  const std::int64_t size = storage::retried(size_of);
  if (size != shard.bytes)
    throw error(ExitCode::io, "shard {} is {} bytes, manifest says {} ({})", shard.file, format::grouped(size),
                format::grouped(shard.bytes), size < shard.bytes ? "torn write" : "not the file that was written");
}

/// Tags of the blocks of each shard.
using Tags = std::vector<std::vector<storage::BlockTag>>;

/// Compares the digests of the shards with the manifest; the work is divided over the ranks. Returns the tags of all
/// blocks on every rank.
Tags verify_digests(const parallel::Communicator& world, const fs::path& directory, const Manifest& manifest) {
  std::vector<std::int64_t> blocks;  // blocks of each segment of each shard
  for (const ShardEntry& shard : manifest.shards)
    for (std::int64_t at = 0; at < shard.bytes; at += storage::kDigestSegment)
      blocks.push_back(storage::tagged_blocks(std::min(shard.bytes - at, storage::kDigestSegment)));
  const auto n_segments = static_cast<std::int64_t>(blocks.size());
  std::vector<storage::BlockTag> mine_tags;
  const auto verify = [&] {
    const parallel::Range mine = parallel::part(n_segments, world.size(), world.rank());
    std::int64_t first = 0;
    for (const ShardEntry& shard : manifest.shards) {
      const auto count = static_cast<std::int64_t>(shard.sha256.size());
      const std::int64_t begin = std::clamp<std::int64_t>(mine.begin - first, 0, count);
      const std::int64_t end = std::clamp<std::int64_t>(mine.end - first, 0, count);
      const auto found = storage::sha256_segments(directory / shard.file, shard.bytes, begin, end,
                                                  storage::digest_threads(), &mine_tags);
      for (std::int64_t i = begin; i < end; ++i)
        if (found[static_cast<std::size_t>(i - begin)] != shard.sha256[static_cast<std::size_t>(i)])
          throw error(ExitCode::io, "shard {} differs from its sha256 between byte {} and {} (damaged on disk)",
                      shard.file, format::grouped(i * storage::kDigestSegment),
                      format::grouped(std::min(shard.bytes, (i + 1) * storage::kDigestSegment)));
      first += count;
    }
  };
  parallel::on_all(world, [&] { finding_damage(verify); });

  std::vector<std::int64_t> bytes(static_cast<std::size_t>(world.size()), 0);
  std::int64_t n_blocks = 0;
  for (int rank = 0; rank < world.size(); ++rank) {
    const parallel::Range theirs = parallel::part(n_segments, world.size(), rank);
    for (std::int64_t i = theirs.begin; i < theirs.end; ++i) {
      n_blocks += blocks[static_cast<std::size_t>(i)];
      bytes[static_cast<std::size_t>(rank)] +=
          blocks[static_cast<std::size_t>(i)] * static_cast<std::int64_t>(sizeof(storage::BlockTag));
    }
  }
  std::vector<storage::BlockTag> all(static_cast<std::size_t>(n_blocks));
  world.all_gather_uneven(mine_tags.data(), all.data(), bytes);
  Tags tags;
  auto at = all.begin();
  for (const ShardEntry& shard : manifest.shards) {
    const auto end = at + storage::tagged_blocks(shard.bytes);
    tags.emplace_back(at, end);
    at = end;
  }
  return tags;
}

/// Reads the manifest and compares the shards with it. Throws a collective Error(data) if the checkpoint is damaged and
/// Error(io) if it cannot be read; their text does not name the directory. Throws NewerFormat.
Found examine(const parallel::Communicator& world, const fs::path& directory, Verify verify) {
  parallel::note_phase("verifying a checkpoint");
  Found found{directory, read_manifest(world, directory), {}};
  if (verify == Verify::none) return found;
  const std::vector<ShardEntry>& shards = found.manifest.shards;
  parallel::on_all(world, [&] {
    finding_damage([&] {
      const parallel::Range mine = parallel::part(static_cast<std::int64_t>(shards.size()), world.size(), world.rank());
      for (std::int64_t i = mine.begin; i < mine.end; ++i) require_size(directory, shards[static_cast<std::size_t>(i)]);
    });
  });
  if (verify == Verify::full) found.tags = verify_digests(world, directory, found.manifest);
  return found;
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

/// Not known to be damaged: an older checkpoint must not replace it silently. `older` < 0: there is none.
[[noreturn]] void refuse_unreadable(const fs::path& directory, const char* why, std::int64_t older) {
  const std::string other = older < 0 ? "from step 0 (--resume never)"
                                      : fmt::format("from an older one (--resume {})",
                                                    (directory.parent_path() / directory_name(older)).string());
  throw collective_error(
      ExitCode::io, "{}: cannot be read, {} (it is not known to be damaged); start again when it can be read, or {}",
      directory.string(), why, other);
}

/// Gives every rank the steps of rank 0.
void share(const parallel::Communicator& world, std::vector<std::int64_t>& steps) {
  auto count = static_cast<std::int64_t>(steps.size());
  world.broadcast(&count, sizeof count);
  steps.resize(static_cast<std::size_t>(count));
  world.broadcast(steps.data(), count * static_cast<std::int64_t>(sizeof(std::int64_t)));
}

/// Reads rows of tensors from one shard, which is opened at the first read.
class ShardReader {
 public:
  ShardReader(const Found& found, std::size_t index)
      : manifest_(found.manifest), index_(index), path_(found.path / shard().file) {
    if (!found.tags.empty()) verified_.emplace(path_, shard().bytes, found.tags[index]);
    leading_ = storage::kTagBlock;
    for (std::size_t t = 0; t < manifest_.tensors.size(); ++t)
      if (shard().owned[t].size() > 0)
        leading_ +=
            storage::metadata_bytes(manifest_.tensors[t].type, shape_of(manifest_.tensors[t], shard().owned[t]));
  }

  /// Rows of a tensor of which the shard contains the rows `stored`.
  void read(const TensorEntry& tensor, parallel::Range stored, parallel::Range rows, void* to) {
    const std::int64_t begin = rows.begin - stored.begin, count = rows.size();
    if (!verified_) return storage::read_rows(dataset(tensor, stored), begin, count, to);
    std::vector<storage::VerifiedFile::Part> parts;
    try {
      parts = storage::locate_rows(dataset(tensor, stored), begin, count, to);
    } catch (const SystemError&) {
      throw;
    } catch (const Error&) {
      if (leading_ >= shard().bytes) throw;
      // The writer reserves space for all metadata at the beginning; HDF5 has placed some elsewhere.
      leading_ = shard().bytes;
      dataset_ = {};
      file_ = {};
      parts = storage::locate_rows(dataset(tensor, stored), begin, count, to);
    }
    verified_->read(parts);
  }

 private:
  const ShardEntry& shard() const { return manifest_.shards[index_]; }

  static std::vector<std::int64_t> shape_of(const TensorEntry& tensor, parallel::Range stored) {
    std::vector<std::int64_t> shape = tensor.shape;
    shape[0] = stored.size();
    return shape;
  }

  hid_t dataset(const TensorEntry& tensor, parallel::Range stored) {
    if (file_ < 0) {
      file_ = verified_ ? verified_->open_hdf5(leading_) : storage::open_file(path_);
      name_.clear();
      if (storage::read_integer_attribute(file_, "step") != manifest_.step ||
          storage::read_integer_attribute(file_, "rank") != static_cast<std::int64_t>(index_))
        throw error(ExitCode::io, "belongs to another step or rank");
    }
    if (name_ == tensor.name) return dataset_;
    name_.clear();
    dataset_ = storage::open_dataset(file_, tensor.name, tensor.type, shape_of(tensor, stored));
    if (storage::read_integer_attribute(dataset_, "first_row") != stored.begin)
      throw error(ExitCode::io, "contains other rows than the manifest says");
    name_ = tensor.name;
    return dataset_;
  }

  const Manifest& manifest_;
  std::size_t index_;
  fs::path path_;
  std::optional<storage::VerifiedFile> verified_;  ///< if the digests were verified
  std::int64_t leading_ = 0;                       ///< bytes of the file that HDF5 reads
  storage::Handle file_, dataset_;
  std::string name_;  ///< name of dataset_
};

/// The directory of the checkpoint with the lowest validation loss of a run, as the newest valid one says. Collective.
/// Throws a collective Error(usage) if the run has none, Error(io) as `find`.
fs::path best_directory(const parallel::Communicator& world, const fs::path& run) {
  const fs::path checkpoints = run / "checkpoints";
  const std::optional<Found> newest = find(world, checkpoints, "auto", Verify::size, Leftovers::keep);
  const std::optional<Best> best = newest ? best_of(newest->manifest) : std::nullopt;
  if (!best || best->step < 0)
    throw collective_error(
        ExitCode::usage,
        "{}: the run has no best checkpoint ({}); name one of its checkpoints, or the run for the "
        "newest",
        (run / kBestName).string(),
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

}  // namespace

bool is_run(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path / "checkpoints", ignored) || fs::exists(path / "run.json", ignored);
}

bool names_best(const fs::path& path) {
  std::error_code ignored;
  return path.filename() == kBestName && !fs::exists(path, ignored) && is_run(path.parent_path());
}

Found open(const parallel::Communicator& world, const fs::path& step_directory, Verify verify) {
  // "runs/a/checkpoints/step_00000100/" names the same directory.
  fs::path path = step_directory.has_filename() ? step_directory : step_directory.parent_path();
  bool best = false;
  parallel::on_root(world, [&] { best = names_best(path); });
  world.broadcast(&best, sizeof best);
  if (best) path = best_directory(world, path.parent_path());
  parallel::on_root(world, [&] { require_no_other_kind(path); });
  try {
    return examine(world, path, verify);
  } catch (const NewerFormat& later) {
    refuse_newer(path, later.version);
  } catch (const Error& failure) {
    throw collective_error(failure.code() == ExitCode::data ? ExitCode::io : failure.code(), "{}: cannot be used, {}",
                           path.string(), failure.what());
  }
}

std::optional<Found> find(const parallel::Communicator& world, const fs::path& directory, const std::string& resume,
                          Verify verify, Leftovers leftovers, const Lease* lease) {
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

  share(world, steps);
  auto count = static_cast<std::int64_t>(steps.size());
  for (std::size_t i = steps.size(); i-- > 0;) {
    const fs::path path = directory / directory_name(steps[i]);
    try {
      Found found = examine(world, path, verify);
      if (lease != nullptr && lease->stale(found.manifest)) {
        log::warning("{}: not used, a run that had lost the directory wrote it", path.string());
        --count;
        continue;
      }
      return found;
    } catch (const NewerFormat& later) {
      refuse_newer(path, later.version);
    } catch (const Error& failure) {
      if (failure.code() == ExitCode::io) refuse_unreadable(path, failure.what(), i > 0 ? steps[i - 1] : -1);
      if (failure.code() != ExitCode::data) throw;
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

bool reaches(const parallel::Communicator& world, const fs::path& directory, std::int64_t step, Verify verify,
             const Lease* lease) {
  std::vector<std::int64_t> steps;
  parallel::on_root(world, [&] { steps = steps_in(directory); });
  share(world, steps);
  for (std::size_t i = steps.size(); i-- > 0 && steps[i] >= step;) {
    try {
      const Found found = examine(world, directory / directory_name(steps[i]), verify);
      if (lease == nullptr || !lease->stale(found.manifest)) return true;
    } catch (const NewerFormat&) {
      return true;
    } catch (const Error& failure) {
      if (failure.code() != ExitCode::data) return true;
    }
  }
  return false;
}

void load(const parallel::Communicator& world, const Found& found, const Registry& registry,
          const kernels::Execution& execution, Load what) {
  parallel::note_phase("loading the checkpoint");
  const Manifest& manifest = found.manifest;
  // The entry of a tensor in the manifest; nothing for an optional one that is not there in this form.
  const auto entry_of = [&](const Tensor& tensor) -> std::optional<std::size_t> {
    const auto at = std::find_if(manifest.tensors.begin(), manifest.tensors.end(),
                                 [&](const TensorEntry& entry) { return entry.name == tensor.name; });
    const bool same = at != manifest.tensors.end() && at->type == tensor.type && at->shape == tensor.shape;
    if (!same && registry.is_optional(tensor.name)) return std::nullopt;
    if (at == manifest.tensors.end())
      throw error(ExitCode::usage, "{}: has no tensor {} (was it written with other settings?)", found.path.string(),
                  tensor.name);
    if (!same)
      throw error(ExitCode::usage, "{}: {} is {} {}, this run has {} {} (was it written with other settings?)",
                  found.path.string(), tensor.name, name_of(at->type), text_of(at->shape), name_of(tensor.type),
                  text_of(tensor.shape));
    return static_cast<std::size_t>(at - manifest.tensors.begin());
  };
  // Names, types and shapes are checked before reading: mismatches are the same on every rank.
  parallel::on_all(world, [&] {
    for (const Tensor& tensor : registry.tensors())
      if (!entry_of(tensor))
        log::info("{} starts afresh: the checkpoint was written with other settings; results do not depend on it",
                  tensor.name);
    if (what == Load::part) return;
    for (const TensorEntry& entry : manifest.tensors)
      if (registry.find(entry.name) == nullptr && !registry.is_optional(entry.name))
        throw error(ExitCode::usage,
                    "{}: has tensor {}, which this run does not have (was it written with other settings?)",
                    found.path.string(), entry.name);
  });
  parallel::on_all(world, [&] {
    std::int64_t largest = 0;
    for (const Tensor& tensor : registry.tensors())
      if (tensor.on_device || tensor.scatter)
        largest =
            std::max(largest, std::min(tensor.held.size(), kPieces * storage::piece_rows(tensor.type, tensor.shape)) *
                                  tensor.row_bytes());
    const device::Allocation bounce(largest, device::Allocation::Where::host);
    for (std::size_t s = 0; s < manifest.shards.size(); ++s) {
      const ShardEntry& shard = manifest.shards[s];
      ShardReader reader(found, s);
      for (const Tensor& tensor : registry.tensors()) {
        const std::optional<std::size_t> entry = entry_of(tensor);
        if (!entry) continue;
        const parallel::Range stored = shard.owned[*entry];
        const parallel::Range wanted{std::max(stored.begin, tensor.held.begin), std::min(stored.end, tensor.held.end)};
        if (wanted.size() <= 0) continue;
        note_progress();
        const auto read = [&](parallel::Range rows, void* to) {
          reader.read(manifest.tensors[*entry], stored, rows, to);
        };
        try {
          char* to = static_cast<char*>(tensor.data) + (wanted.begin - tensor.held.begin) * tensor.row_bytes();
          if (!tensor.on_device && !tensor.scatter) {
            read(wanted, to);
            continue;
          }
          const std::int64_t piece = bounce.bytes() / tensor.row_bytes();
          for (std::int64_t begin = wanted.begin; begin < wanted.end; begin += piece) {
            const parallel::Range rows{begin, std::min(wanted.end, begin + piece)};
            read(rows, bounce.data());
            if (tensor.scatter)
              tensor.scatter(rows, bounce.data());
            else
              device::copy(execution, to + (begin - wanted.begin) * tensor.row_bytes(), bounce.data(),
                           rows.size() * tensor.row_bytes(), device::Direction::to_device);
            kernels::fence(execution);
          }
        } catch (const Error& failure) {
          throw error(ExitCode::io, "{}: /{}: {}", (found.path / shard.file).string(), tensor.name, failure.what());
        }
      }
    }
  });
}

}  // namespace weft::checkpoint
