// SPDX-License-Identifier: Apache-2.0
//
// One shard of a checkpoint: the file of one rank, with the rows of the tensors that it owns.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/manifest.hpp"
#include "checkpoint/registry.hpp"

namespace weft::checkpoint {

/// What the manifest says of a shard.
struct Shard {
  std::int64_t bytes = 0;
  std::vector<std::string> sha256;
  bool direct = false;  ///< written past the page cache
};

/// Shape of the owned rows: that of the dataset in the shard.
std::vector<std::int64_t> owned_shape(const Tensor& tensor);

/// Returns owned rows of tensor `index` as contiguous host memory: a piece (storage::piece_rows). With one thread the
/// memory is needed until the next call only.
using RowSource = std::function<const void*(std::size_t index, parallel::Range rows)>;

/// Writes, checks, syncs and digests the file of this rank by `threads` threads, this one among them, which all call
/// `source`. Throws Error(io), or Error(numeric), which names tensor and row, if a number is not finite.
Shard write_shard(const std::filesystem::path& path, int rank, const Manifest& manifest, const Registry& registry,
                  const RowSource& source, int threads);

/// Copies a shard to a new file and compares it with its digests; the copy is durable afterwards. `pass` is called at
/// points where a fault may be injected. Throws Error(io), also if `cancelled` becomes true.
void copy_shard(const std::filesystem::path& from, const std::filesystem::path& to, const ShardEntry& shard,
                const std::atomic<bool>& cancelled, const std::function<void(const char* point)>& pass);

}  // namespace weft::checkpoint
