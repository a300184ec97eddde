// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/row_sample.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/error.hpp"
#include "base/system.hpp"
#include "kernels/random.hpp"
#include "storage/digest.hpp"
#include "storage/posix_file.hpp"

namespace weft::dataset {
namespace {

using storage::Side;

// All constants are part of the fingerprint.
constexpr std::int64_t kSampledRows = 64;
constexpr std::int64_t kProbedRows = 16;
constexpr std::int64_t kFingerprintReads = 65536;  // reads of small pieces, over all files
constexpr std::int64_t kLargestPiece = 16 << 10;   // bytes of one row
constexpr std::uint64_t kSeed = 0x726f7773;        // no run draws from this stream
constexpr std::int64_t kComparedFiles = 64;        // when a run starts, on every rank

/// Digest of `n_rows` rows, one from each of as many equal parts of the file, each in `n_turns` of the datasets.
std::string digest_of_rows(storage::ActivationFile& file, const std::string& path, std::int64_t number,
                           std::int64_t n_rows, std::int64_t n_turns) {
  const storage::ActivationHeader& header = file.header();
  const std::int64_t rows = header.inputs[0].rows, n_datasets = 2 * header.n_layers();
  n_rows = std::min(n_rows, rows);
  struct Place {
    std::int64_t dataset, row;
    auto operator<=>(const Place&) const = default;
  };
  std::vector<Place> places;
  for (std::int64_t i = 0; i < n_rows; ++i) {
    const std::int64_t begin = rows * i / n_rows, end = rows * (i + 1) / n_rows;
    const kernels::Random4 random = kernels::philox(kSeed, kernels::Purpose::row_order,
                                                    static_cast<std::uint64_t>(number), static_cast<std::uint64_t>(i));
    const auto within =
        static_cast<std::int64_t>(kernels::uniform_below(random, static_cast<std::uint64_t>(end - begin)));
    for (std::int64_t turn = 0; turn < n_turns; ++turn)
      places.push_back({(number + i + turn) % n_datasets, begin + within});
  }
  // Dataset by dataset: opening one costs more than reading a row.
  std::sort(places.begin(), places.end());

  const storage::PosixFile bytes(path);
  std::string sample;
  std::vector<std::byte> row;
  for (const auto& [dataset, index] : places) {
    const Side side = dataset < header.n_layers() ? Side::inputs : Side::targets;
    const std::int64_t layer = dataset % header.n_layers();
    const storage::MatrixHeader& matrix = header.matrix(side, layer);
    std::int64_t n = matrix.columns * kernels::bytes_of(matrix.type);
    if (const auto stored = file.stored_row(side, layer, index)) {
      n = std::min(stored->bytes, kLargestPiece);
      row.resize(static_cast<std::size_t>(n));
      bytes.read(row.data(), n, stored->offset + stored->bytes - n);
    } else {
      row.resize(static_cast<std::size_t>(n));
      file.read(side, layer, index, 1, row.data(), n);
    }
    sample += storage::sha256(std::string_view(reinterpret_cast<const char*>(row.data()), row.size()));
  }
  return storage::sha256(sample);
}

}  // namespace

std::string row_sample(storage::ActivationFile& file, const std::string& path, std::int64_t number,
                       std::int64_t n_files) {
  return digest_of_rows(
      file, path, number, kSampledRows,
      std::clamp<std::int64_t>(kFingerprintReads / kSampledRows / n_files, 1, 2 * file.header().n_layers()));
}

std::string row_probe(storage::ActivationFile& file, const std::string& path, std::int64_t number) {
  return digest_of_rows(file, path, number, kProbedRows, 1);
}

void require_described(storage::ActivationFile& file, const Description& description, std::int64_t number) {
  const FileDescription& described = description.files[static_cast<std::size_t>(number)];
  const std::string path = description.file_path(number);
  std::string difference;
  if (file.bytes() != described.bytes)
    difference = fmt::format("it has {} bytes instead of {}", file.bytes(), described.bytes);
  else if (file.header().n_layers() != description.n_layers || file.header().inputs[0].rows != described.rows)
    difference = fmt::format("it has {} rows in {} layers instead of {} in {}", file.header().inputs[0].rows,
                             file.header().n_layers(), described.rows, description.n_layers);
  else if (!described.probe.empty() && row_probe(file, path, number) != described.probe)
    difference = "its rows have other values";
  if (!difference.empty())
    throw error(ExitCode::data,
                "{} on host {} is not the file that rank 0 found when the run began ({}); do all hosts see the same "
                "dataset, and was it replaced?",
                path, host_name(), difference);
}

void require_same_files(const parallel::World& world, const Description& description) {
  if (world.size() == 1) return;
  const auto n_files = static_cast<std::int64_t>(description.files.size());
  const std::int64_t n = world.is_root() ? 0 : std::min(kComparedFiles, n_files);
  parallel::on_all(world.all(), [&] {
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t number = i * n_files / n;
      std::optional<storage::ActivationFile> file;
      try {
        file.emplace(description.file_path(number));
      } catch (const Error& failure) {
        throw error(ExitCode::data, "{} (on host {}; rank 0 can read it); do all hosts see the same dataset?",
                    failure.what(), host_name());
      }
      require_described(*file, description, number);
    }
  });
}

}  // namespace weft::dataset
