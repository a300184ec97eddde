// SPDX-License-Identifier: Apache-2.0
//
// One shard of a checkpoint: the file of one rank, with the rows of the tensors that it owns.
#pragma once

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
};

/// Shape of the owned rows: that of the dataset in the shard.
std::vector<std::int64_t> owned_shape(const Tensor& tensor);

/// Returns owned rows of tensor `index` as contiguous host memory, valid until the next call.
using RowSource = std::function<const void*(std::size_t index, parallel::Range rows)>;

/// Writes, closes, checks, syncs and digests the file of this rank. Throws Error(io), or Error(numeric), which names
/// tensor and row, if a number is not finite.
Shard write_shard(const std::filesystem::path& path, int rank, const Manifest& manifest, const Registry& registry,
                  const RowSource& source);

}  // namespace weft::checkpoint
