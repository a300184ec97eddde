// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/reader.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "base/error.hpp"
#include "dataset/activations/row_sample.hpp"
#include "dataset/activations/row_source.hpp"
#include "dataset/activations/unpacked_chunks.hpp"
#include "kernels/bf16.hpp"
#include "storage/activation_file.hpp"
#include "storage/posix_file.hpp"

namespace weft::dataset {
namespace {

using storage::ActivationFile;
using storage::Extent;
using storage::PosixFile;
using storage::Side;

// Files kept open between calls. A common limit is 1,024 open files per process.
constexpr std::size_t kMostOpenFiles = 256;
constexpr Side kSides[] = {Side::inputs, Side::targets};

/// How the rows of one file are read.
struct Access {
  bool direct = false;
  bool whole_rows = false;                   // all layers of a row are in one place
  std::vector<std::vector<Extent>> extents;  // direct only: [side * n_layers + layer], or [side] with whole_rows
};

/// Rows of one dataset of one file, or of all layers of one side, read by one task.
struct Task {
  std::shared_ptr<PosixFile> file;
  const std::vector<Extent>* extents = nullptr;
  std::int64_t row_begin = 0, rows = 0;
  std::int64_t bytes = 0;  // bytes of a row
  std::byte* out = nullptr;
};

}  // namespace

struct Reader::State {
  Description description;
  Workers workers;
  std::map<std::int64_t, Access> access;
  std::map<std::int64_t, std::shared_ptr<PosixFile>> open_files;

  std::mutex unpacking;  // protects `unpacked`: jobs of two calls may run together
  UnpackedChunks unpacked;

  State(const Description& d, int n_threads) : description(d), workers(n_threads), unpacked(bytes_kept_unpacked(d)) {}

  std::int64_t width() const { return description.d_model * kernels::bytes_of(description.dtype); }

  void check_unchanged(std::int64_t file, std::int64_t bytes) const {
    const FileDescription& described = description.files[static_cast<std::size_t>(file)];
    if (bytes != described.bytes)
      throw error(
          ExitCode::data,
          "{}: the file has {} bytes, it had {} when it was first opened (this affects /layer_0/inputs and all other "
          "datasets); was it changed?",
          description.file_path(file), bytes, described.bytes);
  }

  Access& locate(std::int64_t index) {
    const auto found = access.find(index);
    if (found != access.end()) return found->second;
    Access located;
    ActivationFile file(description.file_path(index));
    require_described(file, description, index);
    if (!description.files[static_cast<std::size_t>(index)].compressed) {
      located.direct = true;
      located.whole_rows = file.header().whole_rows.has_value();
      for (const Side side : kSides)
        for (std::int64_t layer = 0; layer < (located.whole_rows ? 1 : description.n_layers); ++layer)
          located.extents.push_back(file.extents(side, layer));
    }
    return access.emplace(index, std::move(located)).first->second;
  }

  std::shared_ptr<PosixFile> open(std::int64_t index) {
    const auto found = open_files.find(index);
    if (found != open_files.end()) return found->second;
    if (open_files.size() >= kMostOpenFiles) open_files.clear();
    auto file = std::make_shared<PosixFile>(description.file_path(index));
    check_unchanged(index, file->bytes());
    return open_files.emplace(index, std::move(file)).first->second;
  }

  /// Reads rows of one dataset directly into the interleaved rows.
  void read_direct(const Task& task) const {
    const std::int64_t bytes = task.bytes, stride = description.row_bytes();
    std::vector<iovec> pieces;
    auto extent = std::upper_bound(task.extents->begin(), task.extents->end(), task.row_begin,
                                   [](std::int64_t row, const Extent& e) { return row < e.row_begin; }) -
                  1;
    for (std::int64_t done = 0; done < task.rows; ++extent) {
      const std::int64_t skipped = task.row_begin + done - extent->row_begin;
      const std::int64_t count = std::min(task.rows - done, extent->rows - skipped);
      const std::int64_t pitch = extent->pitch > 0 ? extent->pitch : bytes, first = extent->offset + skipped * pitch;
      if (pitch == bytes && stride == bytes) {
        task.file->read(task.out + done * stride, count * bytes, first);
      } else if (pitch == bytes) {
        pieces.resize(static_cast<std::size_t>(count));
        for (std::int64_t i = 0; i < count; ++i)
          pieces[static_cast<std::size_t>(i)] = {task.out + (done + i) * stride, static_cast<std::size_t>(bytes)};
        task.file->read(pieces, first);
      } else {
        for (std::int64_t i = 0; i < count; ++i)
          task.file->read(task.out + (done + i) * stride, bytes, first + i * pitch);
      }
      done += count;
    }
  }

  /// Dataset by dataset, rows ascending. A chunk of which a read covers a part is kept for later ones.
  void read_compressed(std::int64_t index, std::span<const RowRead> reads) {
    const std::lock_guard<std::mutex> one_at_a_time(unpacking);
    std::optional<ActivationFile> opened;
    const auto file = [&]() -> ActivationFile& {
      if (!opened) {
        opened.emplace(description.file_path(index));
        check_unchanged(index, opened->bytes());
      }
      return *opened;
    };
    const FileDescription& described = description.files[static_cast<std::size_t>(index)];
    for (const Side side : kSides)
      for (std::int64_t layer = 0; layer < description.n_layers; ++layer)
        for (const RowRead& read : reads) {
          std::byte* const out = side == Side::inputs ? read.inputs : read.targets;
          if (out == nullptr) continue;
          const std::int64_t band_rows = described.chunk_rows > 0 ? described.chunk_rows : described.rows,
                             end = read.row_begin + read.rows;
          for (std::int64_t row = read.row_begin; row < end;) {
            const std::int64_t begin = row / band_rows * band_rows, rows = std::min(band_rows, described.rows - begin),
                               stop = std::min(end, begin + rows);
            std::byte* const to = out + (row - read.row_begin) * description.row_bytes() + layer * width();
            const UnpackedChunks::Key key{index, begin, layer + (side == Side::inputs ? 0 : description.n_layers)};
            const std::byte* const chunk = stop - row < rows ? unpacked_rows(file, side, layer, key, rows) : nullptr;
            if (chunk == nullptr)
              file().read(side, layer, row, stop - row, to, description.row_bytes());
            else
              for (std::int64_t i = row; i < stop; ++i)
                std::memcpy(to + (i - row) * description.row_bytes(), chunk + (i - begin) * width(),
                            static_cast<std::size_t>(width()));
            row = stop;
          }
        }
  }

  /// All rows of a band of one dataset, or null if they are not kept.
  template <class File>
  const std::byte* unpacked_rows(const File& file, Side side, std::int64_t layer, const UnpackedChunks::Key& key,
                                 std::int64_t rows) {
    if (const std::byte* const kept = unpacked.find(key)) return kept;
    std::byte* const chunk = unpacked.insert(key, rows * width());
    if (chunk == nullptr) return nullptr;
    try {
      file().read(side, layer, key.row_begin, rows, chunk, width());
    } catch (...) {
      unpacked.remove(key);
      throw;
    }
    return chunk;
  }
};

Reader::Reader(const Description& description, int n_threads)
    : state_(std::make_unique<State>(description, n_threads)) {}
Reader::~Reader() = default;
Workers& Reader::workers() { return state_->workers; }

std::vector<Job> Reader::jobs(std::span<const RowRead> reads) {
  State& state = *state_;
  std::vector<Job> jobs;
  if (state.description.source != nullptr) {
    state.description.source->read(reads);
    return jobs;
  }
  std::map<std::int64_t, std::vector<RowRead>> compressed;
  for (const RowRead& read : reads) {
    if (read.rows == 0) continue;
    const Access& access = state.locate(read.file);
    if (!access.direct) {
      compressed[read.file].push_back(read);
      continue;
    }
    const std::shared_ptr<PosixFile> file = state.open(read.file);
    const std::int64_t n_datasets = access.whole_rows ? 1 : state.description.n_layers,
                       bytes = access.whole_rows ? state.description.row_bytes() : state.width();
    for (const Side side : kSides)
      for (std::int64_t layer = 0; layer < n_datasets; ++layer) {
        std::byte* out = side == Side::inputs ? read.inputs : read.targets;
        if (out == nullptr) continue;
        const std::int64_t which = (side == Side::inputs ? 0 : n_datasets) + layer;
        jobs.push_back([&state, task = Task{file, &access.extents[static_cast<std::size_t>(which)], read.row_begin,
                                            read.rows, bytes, out + layer * bytes}] { state.read_direct(task); });
      }
  }
  if (compressed.empty()) return jobs;
  for (auto& [file, rows] : compressed)
    std::sort(rows.begin(), rows.end(), [](const RowRead& a, const RowRead& b) { return a.row_begin < b.row_begin; });
  // One job, started first because it takes longest: HDF5 calls are serialised, and each open file keeps an unpacked
  // chunk in memory.
  jobs.insert(jobs.begin(), [&state, compressed = std::move(compressed)] {
    for (const auto& [file, rows] : compressed) state.read_compressed(file, rows);
  });
  return jobs;
}

void Reader::read(std::span<const RowRead> reads) {
  const std::vector<Job> all = jobs(reads);
  state_->workers.run(all);
  finish_source();
}

void Reader::finish_source() {
  if (RowSource* const source = state_->description.source) source->finish();
}

void Reader::wait_for_source() {
  if (RowSource* const source = state_->description.source) source->wait();
}

void conclude_reads(const Description& description) {
  if (description.source != nullptr) description.source->conclude();
}

namespace {

/// `mask`: the exponent, which is all ones in infinities and NaN.
template <class Bits>
std::int64_t first_with_all_ones(const std::byte* values, std::int64_t n, Bits mask) {
  constexpr std::int64_t kBlock = 1024;
  const auto bits = [&](std::int64_t i) {
    Bits value;
    std::memcpy(&value, values + i * static_cast<std::int64_t>(sizeof value), sizeof value);
    return value;
  };
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    const std::int64_t end = std::min(n, begin + kBlock);
    unsigned found = 0;  // without an exit from the loop, which would prevent vector instructions
    for (std::int64_t i = begin; i < end; ++i) found |= static_cast<Bits>(bits(i) & mask) == mask ? 1u : 0u;
    if (found == 0) continue;
    for (std::int64_t i = begin; i < end; ++i)
      if ((bits(i) & mask) == mask) return i;
  }
  return -1;
}

}  // namespace

std::int64_t first_non_finite(kernels::Scalar type, const std::byte* values, std::int64_t n) {
  if (type == kernels::Scalar::fp32) return first_with_all_ones<std::uint32_t>(values, n, 0x7f800000u);
  return first_with_all_ones<std::uint16_t>(values, n, type == kernels::Scalar::fp16 ? 0x7c00u : 0x7f80u);
}

std::string non_finite_text(const Description& description, std::int64_t file, std::int64_t row_begin, bool target,
                            std::int64_t at) {
  const std::int64_t row_values = description.n_layers * description.d_model;
  return fmt::format("{}: {} row {}, column {} is not finite", description.file_path(file),
                     storage::dataset_name(target ? Side::targets : Side::inputs, at % row_values / description.d_model,
                                           description.layout),
                     row_begin + at / row_values, at % description.d_model);
}

std::string non_finite_text(const Description& description, const RowRead& rows) {
  const std::int64_t row_values = description.n_layers * description.d_model, n = rows.rows * row_values;
  const std::int64_t input = first_non_finite(description.dtype, rows.inputs, n),
                     target = first_non_finite(description.dtype, rows.targets, n);
  if (input < 0 && target < 0) return "";
  const bool is_target = input < 0 || (target >= 0 && target / row_values < input / row_values);
  return non_finite_text(description, rows.file, rows.row_begin, is_target, is_target ? target : input);
}

std::string find_non_finite(const Description& description, std::span<const RowRange> ranges) {
  // A few rows at a time: a training run occupies the memory.
  constexpr std::int64_t kRows = 256;
  Reader reader(description, 1);
  const std::int64_t row_bytes = description.row_bytes();
  std::vector<std::byte> inputs(static_cast<std::size_t>(kRows * row_bytes)), targets(inputs.size());
  std::vector<RowRead> reads;
  std::int64_t filled = 0;
  const auto search = [&]() -> std::string {
    reader.read(reads);
    for (const RowRead& read : reads)
      if (const std::string found = non_finite_text(description, read); !found.empty()) return found;
    reads.clear();
    filled = 0;
    return "";
  };
  for (const RowRange& range : ranges)
    for (std::int64_t begin = range.begin; begin < range.end;) {
      const std::int64_t rows = std::min(kRows - filled, range.end - begin);
      reads.push_back(
          {range.file, begin, rows, inputs.data() + filled * row_bytes, targets.data() + filled * row_bytes});
      begin += rows;
      filled += rows;
      if (filled == kRows)
        if (const std::string found = search(); !found.empty()) return found;
    }
  return reads.empty() ? "" : search();
}

}  // namespace weft::dataset
