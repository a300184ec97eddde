// SPDX-License-Identifier: Apache-2.0
//
// manifest.json: what makes a directory of shards a checkpoint. It is written last, carries the sha256 of its own text
// (with the 64 digits of that field replaced by zeros) and says how long every shard is and what its bytes digest to.
//
// A manifest is untrusted input: `parse` checks every type, bounds every number and lets nothing through whose shards
// do not cover each tensor exactly once. Every version of the format begins with the same two lines (format and
// sha256), so that a newer manifest is told from a damaged one.
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

/// 1: the grid is data x feature, the cursor epoch and position. 2: grid and cursor are maps of any names.
constexpr std::int64_t kFormatVersion = 2;
constexpr const char* kManifestName = "manifest.json";

struct TensorEntry {
  std::string name;
  kernels::Scalar type = kernels::Scalar::fp32;
  std::vector<std::int64_t> shape;  ///< global
};

struct ShardEntry {
  std::string file;  ///< beside the manifest; no directory part
  std::int64_t bytes = 0;
  std::vector<std::string> sha256;     ///< one per 64 MiB of the file (storage::kDigestSegment), 64 hex digits each
  std::vector<parallel::Range> owned;  ///< rows of each tensor, in the order of Manifest::tensors
};

struct Manifest {
  // What the caller says at a step boundary.
  std::int64_t step = 0;    ///< steps finished
  std::int64_t tokens = 0;  ///< tokens trained on
  /// Where the model continues in its data: name -> number, as the model that wrote it defines them (a transcoder:
  /// `epoch`, and `position` in that epoch's order of rows).
  std::map<std::string, std::int64_t> cursor;
  std::map<std::string, std::int64_t> grid;  ///< the process grid: axis -> ranks along it
  std::string input;                         ///< resolved input, loadable again
  std::string original_input;                ///< the input file as the user wrote it
  std::string code_revision;
  std::map<std::string, std::string> libraries;  ///< name -> version
  std::string dataset_fingerprint;
  std::string extra = "{}";  ///< a JSON object: recorded GEMM algorithms and whatever else resume needs

  // What the writer adds.
  std::int64_t format_version = kFormatVersion;
  std::int64_t world = 1;  ///< ranks that wrote; shards.size()
  std::vector<TensorEntry> tensors;
  std::vector<ShardEntry> shards;

  /// An entry of `cursor`. Throws Error(io) when this checkpoint has none of that name: it belongs to another kind of
  /// model.
  std::int64_t cursor_at(const std::string& name) const;
};

/// The text of manifest.json.
std::string to_text(const Manifest& manifest);

/// Throws Error(io) naming the reason, without a path ("sha256 of the text is …, the manifest says …"). A newer format
/// throws NewerFormat.
Manifest parse(std::string_view text);

/// A manifest that is whole, but of a later format than this program reads.
class NewerFormat : public std::exception {
 public:
  explicit NewerFormat(std::int64_t version) : version(version) {}
  const char* what() const noexcept override { return "newer checkpoint format"; }
  std::int64_t version;
};

/// Bytes of the whole tensor. Throws Error(io) on overflow.
std::int64_t bytes_of(const TensorEntry& tensor);

/// "data 2 x feature 4"
std::string to_text(const std::map<std::string, std::int64_t>& grid);

/// "fp32", "bf16", …
std::string_view name_of(kernels::Scalar type);

/// "step_00001200"
std::string directory_name(std::int64_t step);
/// "rank_00003.h5"
std::string shard_name(int rank);

}  // namespace weft::checkpoint
