// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/unpacked_chunks.hpp"

#include <algorithm>

namespace weft::dataset {

std::int64_t bytes_kept_unpacked(const Description& description) {
  constexpr std::int64_t kLeast = std::int64_t{256} << 20, kMost = std::int64_t{4} << 30;
  std::int64_t rows = 0;
  for (const FileDescription& file : description.files)
    if (file.compressed) rows = std::max(rows, std::min(file.chunk_rows, file.rows));
  return std::clamp(rows * 2 * description.row_bytes(), kLeast, kMost);
}

const std::byte* UnpackedChunks::find(const Key& key) {
  const auto found = chunks_.find(key);
  if (found == chunks_.end()) return nullptr;
  found->second.used = ++now_;
  return found->second.values.data();
}

std::byte* UnpackedChunks::insert(const Key& key, std::int64_t bytes) {
  remove(key);
  while (bytes_ + bytes > most_) {
    auto oldest = chunks_.end();
    for (auto at = chunks_.begin(); at != chunks_.end(); ++at)
      if ((at->first.file != key.file || at->first.row_begin != key.row_begin) &&
          (oldest == chunks_.end() || at->second.used < oldest->second.used))
        oldest = at;
    if (oldest == chunks_.end()) return nullptr;
    remove(Key(oldest->first));
  }
  Chunk& chunk = chunks_[key];
  chunk.values.resize(static_cast<std::size_t>(bytes));
  chunk.used = ++now_;
  bytes_ += bytes;
  return chunk.values.data();
}

void UnpackedChunks::remove(const Key& key) {
  const auto found = chunks_.find(key);
  if (found == chunks_.end()) return;
  bytes_ -= static_cast<std::int64_t>(found->second.values.size());
  chunks_.erase(found);
}

}  // namespace weft::dataset
