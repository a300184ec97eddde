// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/shard.hpp"

#include <algorithm>
#include <future>
#include <thread>

#include "base/fault.hpp"
#include "parallel/failure.hpp"
#include "parallel/watchdog.hpp"
#include "storage/digest.hpp"
#include "storage/durable.hpp"
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

void require_finite(const Tensor& tensor, parallel::Range rows, const void* data) {
  const std::int64_t row_numbers = tensor.row_bytes() / kernels::bytes_of(tensor.type);
  const std::int64_t at = first_nonfinite(tensor.type, data, rows.size() * row_numbers);
  if (at >= 0)
    throw error(ExitCode::numeric, "{} is not finite in row {} (checkpoint not written; the last valid one is kept)",
                tensor.name, rows.begin + at / row_numbers);
}

/// Bytes to reserve at the beginning of the shard for HDF5 metadata.
std::int64_t metadata_bytes(const Registry& registry) {
  std::int64_t bytes = 4096;
  for (const Tensor& tensor : registry.tensors())
    if (tensor.owned.size() > 0) bytes += storage::metadata_bytes(tensor.type, owned_shape(tensor));
  return bytes;
}

}  // namespace

std::vector<std::int64_t> owned_shape(const Tensor& tensor) {
  std::vector<std::int64_t> shape = tensor.shape;
  shape[0] = tensor.owned.size();
  return shape;
}

Shard write_shard(const fs::path& path, int rank, const Manifest& manifest, const Registry& registry,
                  const RowSource& source) {
  const auto pass = [&](const char* point) { fault::point(point, rank, manifest.step); };
  storage::Handle file = storage::create_file(path, metadata_bytes(registry));
  pass("after-open");
  // Both process what has been written so far, in parallel with the writing.
  const storage::Writeback disk(path);
  storage::FollowingDigests digests(path, disk);
  std::vector<storage::PreparedChunk> chunks, next;
  {
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
      const std::vector<std::int64_t> shape = owned_shape(tensor);
      storage::Handle dataset = storage::create_dataset(file, tensor.name, tensor.type, shape);
      storage::write_attribute(dataset, "first_row", tensor.owned.begin);
      storage::write_attribute(dataset, "global_rows", tensor.shape[0]);
      const std::int64_t piece = storage::piece_rows(tensor.type, shape);
      // Another thread checks and prepares the next piece while this one is written.
      std::future<void> prepared;
      const auto prepare = [&](std::int64_t begin) {
        const std::int64_t end = std::min(shape[0], begin + piece);
        const parallel::Range rows{tensor.owned.begin + begin, tensor.owned.begin + end};
        const void* data = source(t, rows);
        prepared = std::async(std::launch::async, [&, rows, data, begin, end] {
          require_finite(tensor, rows, data);
          storage::prepare_rows(dataset, begin, end - begin, data, next);
        });
      };
      prepare(0);
      for (std::int64_t begin = 0; begin < shape[0]; begin += piece) {
        prepared.get();
        std::swap(chunks, next);
        if (begin + piece < shape[0]) prepare(begin + piece);
        for (const storage::FileRange& range : storage::write_rows(dataset, chunks))
          digests.add_final(range.begin, range.end);
        parallel::note_progress();
        pass("mid-dataset");
      }
      dataset.close();
    }
    pass("before-close");
    file.close();
  }
  {
    // With these version bounds HDF5 may report success on a full disk: check what has been written.
    const storage::Handle written = storage::open_file(path);
    for (const Tensor& tensor : registry.tensors())
      if (tensor.owned.size() > 0)
        storage::require_complete(storage::open_dataset(written, tensor.name, tensor.type, owned_shape(tensor)),
                                  tensor.name);
  }
  pass("before-fsync");
  Shard shard;
  shard.bytes = static_cast<std::int64_t>(fs::file_size(path));
  // Sync and digest concurrently: one is bound by the disk, the other by the processor.
  std::optional<parallel::Failure> unsynced;
  std::thread syncing([&] { unsynced = parallel::attempt([&] { disk.finish(); }); });
  const auto undigested = parallel::attempt([&] { shard.sha256 = digests.finish(shard.bytes); });
  syncing.join();
  for (const auto& failure : {unsynced, undigested})
    if (failure) throw Error(failure->code, failure->message);
  return shard;
}

}  // namespace weft::checkpoint
