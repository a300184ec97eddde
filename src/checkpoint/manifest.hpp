// SPDX-License-Identifier: Apache-2.0
//
// manifest.json: the description of a checkpoint, written after its shards. It contains the sha256 of its own text
// (with the 64 digits of that field replaced by zeros) and the size and digests of every shard.
//
// A manifest is untrusted input: `parse` checks every type, bounds every number and requires that the shards cover each
// tensor exactly once. Every format version begins with the same two lines (format and sha256), so that a newer
// manifest is distinguished from a damaged one.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/array.hpp"
#include "parallel/grid.hpp"

namespace weft::checkpoint {

/// 1: the grid has the axes data and feature, the cursor epoch and position. 2: grid and cursor are maps with any
/// names.
constexpr std::int64_t kFormatVersion = 2;
constexpr const char* kManifestName = "manifest.json";
constexpr std::int64_t kLargestManifest = std::int64_t{64} << 20;  // bytes

struct TensorEntry {
  std::string name;
  kernels::Scalar type = kernels::Scalar::fp32;
  std::vector<std::int64_t> shape;  ///< global
};

struct ShardEntry {
  std::string file;  ///< name in the directory of the manifest
  std::int64_t bytes = 0;
  std::vector<std::string> sha256;     ///< one per 64 MiB of the file (storage::kDigestSegment); 64 hex digits each
  std::vector<parallel::Range> owned;  ///< rows of each tensor, in the order of Manifest::tensors
};

struct Manifest {
  // Set by the caller at a step boundary.
  std::int64_t step = 0;    ///< completed steps
  std::int64_t tokens = 0;  ///< tokens used for training
  /// Position in the training data, by names that the model defines.
  std::map<std::string, std::int64_t> cursor;
  std::map<std::string, std::int64_t> grid;  ///< the process grid: axis -> ranks along it
  std::string input;                         ///< resolved input; can be loaded again
  std::string original_input;                ///< the unmodified input file
  std::string code_revision;
  std::map<std::string, std::string> libraries;  ///< name -> version
  std::string dataset_fingerprint;
  std::int64_t fence = 0;    ///< fence of the run that wrote it (checkpoint/lease.hpp); 0: not known
  std::string owner;         ///< token of that run
  std::string extra = "{}";  ///< JSON object: the algorithm table and other data needed to resume

  // Set by the writer.
  std::int64_t format_version = kFormatVersion;
  std::int64_t world = 1;  ///< number of ranks that wrote it; shards.size()
  std::vector<TensorEntry> tensors;
  std::vector<ShardEntry> shards;

  /// The entry of `cursor`. Throws Error(io) if there is none: the checkpoint belongs to another kind of model.
  std::int64_t cursor_at(const std::string& name) const;
};

/// The text of manifest.json.
std::string to_text(const Manifest& manifest);

/// Throws Error(io) with the reason but without a path ("its text has sha256 …, not the recorded …"), and NewerFormat
/// for a newer format.
Manifest parse(std::string_view text);

/// An intact manifest of a later format than this program reads.
class NewerFormat : public std::exception {
 public:
  explicit NewerFormat(std::int64_t version) : version(version) {}
  const char* what() const noexcept override { return "newer checkpoint format"; }
  std::int64_t version;
};

/// Bytes of the whole tensor. Throws Error(io) on overflow.
std::int64_t bytes_of(const TensorEntry& tensor);

/// Names and numbers as text: "data 2 x feature 4" of a grid, "epoch 0, position 512" of a cursor with separator ", ".
std::string to_text(const std::map<std::string, std::int64_t>& numbers, std::string_view separator = " x ");

/// "fp32", "bf16", …
std::string_view name_of(kernels::Scalar type);

/// "step_00001200"
std::string directory_name(std::int64_t step);
/// "rank_00003.h5"
std::string shard_name(int rank);

}  // namespace weft::checkpoint
