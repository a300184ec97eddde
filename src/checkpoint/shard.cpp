// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/shard.hpp"

#include <algorithm>
#include <cstring>

#include "base/fault.hpp"
#include "parallel/failure.hpp"
#include "parallel/watchdog.hpp"
#include "storage/checksum.hpp"
#include "storage/digested_file.hpp"
#include "storage/metadata_image.hpp"
#include "storage/posix_file.hpp"
#include "storage/tensor_file.hpp"

namespace weft::checkpoint {
namespace fs = std::filesystem;
namespace {

template <class Bits>
std::int64_t first_with_exponent(const void* data, std::int64_t count, Bits exponent) {
  const auto* bits = static_cast<const Bits*>(data);
  Bits any = 0;
  for (std::int64_t i = 0; i < count; ++i) any |= static_cast<Bits>((bits[i] & exponent) == exponent);  // vectorises
  if (any == 0) return -1;
  for (std::int64_t i = 0; i < count; ++i)
    if ((bits[i] & exponent) == exponent) return i;
  return -1;
}

/// Index of the first number that is not finite; -1 if all are finite.
std::int64_t first_nonfinite(kernels::Scalar type, const void* data, std::int64_t count) {
  switch (type) {
    case kernels::Scalar::fp32:
      return first_with_exponent<std::uint32_t>(data, count, 0x7f800000u);
    case kernels::Scalar::bf16:
      return first_with_exponent<std::uint16_t>(data, count, 0x7f80u);
    case kernels::Scalar::fp16:
      return first_with_exponent<std::uint16_t>(data, count, 0x7c00u);
    case kernels::Scalar::fp64:
      return first_with_exponent<std::uint64_t>(data, count, 0x7ff0000000000000u);
    default:
      return -1;
  }
}

/// Bytes to reserve at the beginning of the shard for HDF5 metadata.
std::int64_t metadata_bytes(const Registry& registry) {
  std::int64_t bytes = 4096;
  for (const Tensor& tensor : registry.tensors())
    if (tensor.owned.size() > 0) bytes += storage::metadata_bytes(tensor.type, owned_shape(tensor));
  return bytes;
}

/// The file as HDF5 lays it out: everything but the numbers.
struct Layout {
  struct Chunk : storage::StoredChunk {
    std::size_t tensor;  ///< index in the registry; `begin` counts from its first owned row
  };
  storage::MetadataImage metadata;
  std::vector<Chunk> chunks;  ///< by place in the file
};

void lay_out(Layout& layout, const fs::path& path, int rank, const Manifest& manifest, const Registry& registry) {
  storage::Handle file = layout.metadata.create(path, metadata_bytes(registry));
  storage::write_attribute(file, "format", "weft-checkpoint-shard");
  storage::write_attribute(file, "format_version", kFormatVersion);
  storage::write_attribute(file, "step", manifest.step);
  storage::write_attribute(file, "rank", std::int64_t{rank});
  storage::write_attribute(file, "n_ranks", manifest.world);
  storage::write_attribute(file, "code_revision", manifest.code_revision);
  storage::write_attribute(file, "dataset_fingerprint", manifest.dataset_fingerprint);
  for (std::size_t t = 0; t < registry.tensors().size(); ++t) {
    const Tensor& tensor = registry.tensors()[t];
    if (tensor.owned.size() == 0) continue;
    storage::Handle dataset = storage::create_dataset(file, tensor.name, tensor.type, owned_shape(tensor));
    storage::write_attribute(dataset, "first_row", tensor.owned.begin);
    storage::write_attribute(dataset, "global_rows", tensor.shape[0]);
    for (const storage::StoredChunk& chunk : storage::allocate_chunks(dataset)) layout.chunks.push_back({{chunk}, t});
    dataset.close();
    parallel::note_progress();
  }
  file.close();
  std::sort(layout.chunks.begin(), layout.chunks.end(), [](const auto& a, const auto& b) { return a.at < b.at; });
}

/// Produces the bytes of a shard, in the order of the file from any byte on.
class ShardBytes {
 public:
  ShardBytes(const Layout& layout, const Registry& registry, const RowSource& source,
             const std::function<void()>& after_chunk)
      : layout_(layout), registry_(registry), source_(source), after_chunk_(after_chunk) {}

  void copy(std::int64_t begin, std::int64_t end, char* to) {
    while (begin < end) {
      const auto chunk = std::partition_point(layout_.chunks.begin(), layout_.chunks.end(),
                                              [&](const Layout::Chunk& one) { return one.end() <= begin; });
      std::int64_t next = end;
      if (chunk == layout_.chunks.end() || chunk->at > begin) {
        if (chunk != layout_.chunks.end()) next = std::min(end, chunk->at);
        layout_.metadata.copy(begin, next, to);
      } else {
        next = std::min(end, chunk->end());
        copy_chunk(*chunk, begin - chunk->at, next - chunk->at, to);
      }
      to += next - begin;
      begin = next;
    }
  }

 private:
  /// Bytes [begin, end) of a chunk: numbers, zeros, checksum of both.
  void copy_chunk(const Layout::Chunk& chunk, std::int64_t begin, std::int64_t end, char* to) {
    const std::int64_t summed = chunk.stored - storage::kChunkSumBytes;
    if (begin == 0 || &chunk != chunk_) {
      chunk_ = &chunk;
      sum_ = {};
      // A segment may begin inside the chunk: the checksum is that of all its bytes.
      std::vector<char> before(static_cast<std::size_t>(std::min(begin, summed)));
      copy_numbers(chunk, 0, static_cast<std::int64_t>(before.size()), before.data());
    }
    const std::int64_t numbers_end = std::min(end, summed);
    if (begin < numbers_end) copy_numbers(chunk, begin, numbers_end, to);
    if (end <= summed) return;
    const std::uint32_t sum = sum_.value();
    const std::int64_t from = std::max(begin, summed);
    std::memcpy(to + (from - begin), reinterpret_cast<const char*>(&sum) + (from - summed),
                static_cast<std::size_t>(end - from));
    if (end == chunk.stored) after_chunk_();
  }

  /// Bytes [begin, end) of the numbers and zeros of a chunk, added to its checksum.
  void copy_numbers(const Layout::Chunk& chunk, std::int64_t begin, std::int64_t end, char* to) {
    const std::int64_t used = std::clamp(chunk.used, begin, end);
    if (begin < used) {
      const Tensor& tensor = registry_.tensors()[chunk.tensor];
      const std::int64_t first = chunk.begin + begin, last = chunk.begin + used;  // bytes of the owned rows
      const std::int64_t row = tensor.row_bytes(), element = kernels::bytes_of(tensor.type);
      const char* const data = owned_rows(chunk.tensor, first / row) - piece_.begin * row;
      // A block may begin and end inside an element.
      const std::int64_t from = first / element, until = (last + element - 1) / element;
      if (const std::int64_t at = first_nonfinite(tensor.type, data + from * element, until - from); at >= 0)
        throw error(ExitCode::numeric,
                    "{} is not finite in row {} (checkpoint not written; the last valid one is kept)", tensor.name,
                    tensor.owned.begin + (from + at) * element / row);
      std::memcpy(to, data + first, static_cast<std::size_t>(used - begin));
    }
    std::memset(to + (used - begin), 0, static_cast<std::size_t>(end - used));
    sum_.add(to, static_cast<std::size_t>(end - begin));
  }

  /// The piece that holds row `row` of those owned. Chunks do not cross pieces.
  const char* owned_rows(std::size_t t, std::int64_t row) {
    if (data_ == nullptr || tensor_ != t || row < piece_.begin || row >= piece_.end) {
      const Tensor& tensor = registry_.tensors()[t];
      const std::int64_t size = storage::piece_rows(tensor.type, owned_shape(tensor));
      tensor_ = t;
      piece_.begin = row / size * size;
      piece_.end = std::min(tensor.owned.size(), piece_.begin + size);
      data_ =
          static_cast<const char*>(source_(t, {tensor.owned.begin + piece_.begin, tensor.owned.begin + piece_.end}));
    }
    return data_;
  }

  const Layout& layout_;
  const Registry& registry_;
  const RowSource& source_;
  const std::function<void()>& after_chunk_;
  const Layout::Chunk* chunk_ = nullptr;  ///< the last one
  storage::Fletcher32 sum_;               ///< checksum of its bytes so far
  std::size_t tensor_ = 0;
  parallel::Range piece_{0, 0};  ///< rows of the piece, counted from the first owned row
  const char* data_ = nullptr;   ///< memory of the piece
};

}  // namespace

std::vector<std::int64_t> owned_shape(const Tensor& tensor) {
  std::vector<std::int64_t> shape = tensor.shape;
  shape[0] = tensor.owned.size();
  return shape;
}

Shard write_shard(const fs::path& path, int rank, const Manifest& manifest, const Registry& registry,
                  const RowSource& source, int threads) {
  const auto pass = [&](const char* point) { fault::point(point, rank, manifest.step); };
  Layout layout;
  lay_out(layout, path, rank, manifest, registry);
  Shard shard;
  shard.bytes = layout.metadata.bytes();
  const bool secret = std::any_of(registry.tensors().begin(), registry.tensors().end(), [&](const Tensor& tensor) {
    return tensor.owned.size() > 0 && registry.is_secret(tensor.name);
  });
  storage::DigestedFile file(path, shard.bytes, storage::DigestedFile::Cache::avoid,
                             secret ? Access::owner : Access::usual);
  pass("after-open");
  const std::function<void()> after_chunk = [&] { pass("mid-dataset"); };
  shard.sha256 = file.write(threads, [&] {
    return [bytes = ShardBytes(layout, registry, source, after_chunk)](
               std::int64_t begin, std::int64_t end, char* to) mutable { bytes.copy(begin, end, to); };
  });
  shard.direct = file.is_direct();
  pass("before-close");
  {
    // What has been written is what HDF5 reads.
    const storage::Handle written = storage::open_file(path);
    for (const Tensor& tensor : registry.tensors())
      if (tensor.owned.size() > 0)
        storage::require_complete(storage::open_dataset(written, tensor.name, tensor.type, owned_shape(tensor)),
                                  tensor.name);
  }
  pass("before-fsync");
  file.sync();
  return shard;
}

void copy_shard(const fs::path& from, const fs::path& to, const ShardEntry& shard, const std::atomic<bool>& cancelled,
                const std::function<void(const char* point)>& pass) {
  const storage::PosixFile source(from.string());
  if (source.bytes() != shard.bytes)
    throw error(ExitCode::io, "{}: has {} bytes, its manifest says {}", from.string(), source.bytes(), shard.bytes);
  // A shard with a secret is copied into such a file.
  const fs::perms others = fs::perms::group_all | fs::perms::others_all;
  storage::DigestedFile file(
      to, shard.bytes, storage::DigestedFile::Cache::avoid,
      (fs::status(from).permissions() & others) == fs::perms::none ? Access::owner : Access::usual);
  const auto bytes_of_source = [&](std::int64_t begin, std::int64_t end, char* bytes) {
    if (cancelled) throw error(ExitCode::io, "abandoned, the run ends");
    source.read(bytes, end - begin, begin);
    pass("mid-copy");
  };
  const std::vector<std::string> sha256 =
      file.write(storage::kWritingThreads, [&] { return storage::DigestedFile::Source(bytes_of_source); });
  pass("before-copy-fsync");
  if (sha256 != shard.sha256)
    throw error(ExitCode::io, "{}: differs from its sha256 (damaged on the disk of the node)", from.string());
  file.sync();
}

}  // namespace weft::checkpoint
