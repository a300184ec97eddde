// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/reader.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "base/error.hpp"
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
  std::vector<std::vector<Extent>> extents;  // [side * n_layers + layer]; direct only
};

/// Rows of one dataset of one file, read by one task.
struct Task {
  std::shared_ptr<PosixFile> file;
  const std::vector<Extent>* extents = nullptr;
  std::int64_t row_begin = 0, rows = 0;
  std::byte* out = nullptr;
};

}  // namespace

struct Reader::State {
  Description description;
  Workers workers;
  std::map<std::int64_t, Access> access;
  std::map<std::int64_t, std::shared_ptr<PosixFile>> open_files;

  State(const Description& d, int n_threads) : description(d), workers(n_threads) {}

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
    if (!description.files[static_cast<std::size_t>(index)].compressed) {
      ActivationFile file(description.file_path(index));
      check_unchanged(index, file.bytes());
      located.direct = true;
      for (const Side side : kSides)
        for (std::int64_t layer = 0; layer < description.n_layers; ++layer)
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
    const std::int64_t bytes = width(), stride = description.row_bytes();
    std::vector<iovec> pieces;
    auto extent = std::upper_bound(task.extents->begin(), task.extents->end(), task.row_begin,
                                   [](std::int64_t row, const Extent& e) { return row < e.row_begin; }) -
                  1;
    for (std::int64_t done = 0; done < task.rows; ++extent) {
      const std::int64_t skipped = task.row_begin + done - extent->row_begin;
      const std::int64_t count = std::min(task.rows - done, extent->rows - skipped);
      pieces.resize(static_cast<std::size_t>(count));
      for (std::int64_t i = 0; i < count; ++i)
        pieces[static_cast<std::size_t>(i)] = {task.out + (done + i) * stride, static_cast<std::size_t>(bytes)};
      task.file->read(pieces, extent->offset + skipped * bytes);
      done += count;
    }
  }

  /// Dataset by dataset, rows ascending, so that each chunk is unpacked once.
  void read_compressed(std::int64_t index, std::span<const RowRead> reads) const {
    ActivationFile file(description.file_path(index));
    check_unchanged(index, file.bytes());
    for (const Side side : kSides)
      for (std::int64_t layer = 0; layer < description.n_layers; ++layer)
        for (const RowRead& read : reads) {
          std::byte* out = side == Side::inputs ? read.inputs : read.targets;
          if (out != nullptr)
            file.read(side, layer, read.row_begin, read.rows, out + layer * width(), description.row_bytes());
        }
  }
};

Reader::Reader(const Description& description, int n_threads)
    : state_(std::make_unique<State>(description, n_threads)) {}
Reader::~Reader() = default;
Workers& Reader::workers() { return state_->workers; }

std::vector<Job> Reader::jobs(std::span<const RowRead> reads) {
  State& state = *state_;
  std::vector<Job> jobs;
  std::map<std::int64_t, std::vector<RowRead>> compressed;
  for (const RowRead& read : reads) {
    if (read.rows == 0) continue;
    const Access& access = state.locate(read.file);
    if (!access.direct) {
      compressed[read.file].push_back(read);
      continue;
    }
    const std::shared_ptr<PosixFile> file = state.open(read.file);
    for (const Side side : kSides)
      for (std::int64_t layer = 0; layer < state.description.n_layers; ++layer) {
        std::byte* out = side == Side::inputs ? read.inputs : read.targets;
        if (out == nullptr) continue;
        const std::int64_t which = (side == Side::inputs ? 0 : state.description.n_layers) + layer;
        jobs.push_back([&state, task = Task{file, &access.extents[static_cast<std::size_t>(which)], read.row_begin,
                                            read.rows, out + layer * state.width()}] { state.read_direct(task); });
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
}

std::int64_t first_non_finite(kernels::Scalar type, const std::byte* values, std::int64_t n) {
  if (type == kernels::Scalar::fp32) {
    for (std::int64_t i = 0; i < n; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, values + 4 * i, 4);
      if ((bits & 0x7f800000u) == 0x7f800000u) return i;
    }
    return -1;
  }
  const std::uint16_t mask = type == kernels::Scalar::fp16 ? 0x7c00u : 0x7f80u;
  for (std::int64_t i = 0; i < n; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, values + 2 * i, 2);
    if ((bits & mask) == mask) return i;
  }
  return -1;
}

std::string find_non_finite(const Description& description, std::int64_t file, std::int64_t row_begin,
                            std::int64_t row_end) {
  // A few rows at a time: a training run occupies the memory.
  constexpr std::int64_t kRows = 256;
  Reader reader(description, 1);
  const std::int64_t row_values = description.n_layers * description.d_model;
  std::vector<std::byte> values(static_cast<std::size_t>(2 * kRows * description.row_bytes()));
  for (std::int64_t begin = row_begin; begin < row_end; begin += kRows) {
    const std::int64_t rows = std::min(kRows, row_end - begin);
    std::byte* inputs = values.data();
    std::byte* targets = inputs + kRows * description.row_bytes();
    reader.read(std::vector<RowRead>{{file, begin, rows, inputs, targets}});
    for (const Side side : kSides) {
      const std::int64_t bad =
          first_non_finite(description.dtype, side == Side::inputs ? inputs : targets, rows * row_values);
      if (bad >= 0)
        return fmt::format("{}: {} row {}, column {} is not finite", description.file_path(file),
                           storage::dataset_name(side, bad % row_values / description.d_model),
                           begin + bad / row_values, bad % description.d_model);
    }
  }
  return "";
}

}  // namespace weft::dataset
