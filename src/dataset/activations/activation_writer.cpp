// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/activation_writer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <vector>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "dataset/activations/row_tokens.hpp"
#include "kernels/bf16.hpp"
#include "storage/activation_file.hpp"
#include "storage/durable.hpp"

namespace weft::dataset {
namespace {

using kernels::Scalar;

// About 1 MiB for common widths: small enough to unpack in memory, large enough to read fast.
constexpr std::int64_t kChunkRows = 1024;
constexpr int kGzipLevel = 4;

/// Rounds to nearest, ties to even. Overflow gives infinity; NaN stays NaN.
std::uint16_t to_half(float value) {
  const std::uint32_t bits = kernels::float_bits(value);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u)
    return sign | 0x7c00u;      // 65520: halfway between the largest half and the next power of two
  if (magnitude < 0x38800000u)  // below 2^-14: subnormal, a multiple of 2^-24
    return sign | static_cast<std::uint16_t>(std::nearbyint(kernels::bits_float(magnitude) * 0x1p24f));
  return sign | static_cast<std::uint16_t>((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

void append_word(std::string& bytes, std::uint64_t value, int n) {
  for (int i = 0; i < n; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xffu);
}

}  // namespace

struct ActivationWriter::State {
  WriterSettings settings;
  std::optional<storage::ActivationFileWriter> file;
  std::int64_t rows_in_file = 0;
  std::vector<std::int32_t> ids;        // ids of the open file
  std::vector<std::int64_t> documents;  // first rows of the documents of the open file
  std::vector<std::int64_t> rows_per_file;
  bool created = false;  // the directory
  bool finished = false;

  std::filesystem::path path_of(std::size_t i) const { return settings.path + fmt::format("/chunk_{}.hdf5", i); }

  void close_file() {
    if (!file) return;
    if (settings.tokens) file->write_tokens(ids, documents);
    ids.clear();
    documents.clear();
    file->close();
    file.reset();
    rows_per_file.push_back(rows_in_file);
    rows_in_file = 0;
  }
};

ActivationWriter::ActivationWriter(const WriterSettings& settings) : state_(new State) {
  state_->settings = settings;
  if (settings.n_layers < 1 || settings.d_model < 1 || settings.rows_per_file < 1 ||
      settings.rows_per_file > std::numeric_limits<std::int32_t>::max())
    throw error(
        ExitCode::usage,
        "cannot write a dataset of {} layers, d_model {} and {} rows per file (each must be at least 1, rows at most "
        "2^31 - 1)",
        settings.n_layers, settings.d_model, settings.rows_per_file);
  std::error_code failure;
  state_->created = std::filesystem::create_directories(settings.path, failure);
  if (failure) throw error(ExitCode::io, "{}: cannot be created ({})", settings.path, failure.message());
  for (const auto& entry : std::filesystem::directory_iterator(settings.path)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("chunk_") || name == "index.bin" || name == "metadata.json")
      throw error(ExitCode::io,
                  "{}: already holds {} (datasets are never overwritten); remove it or choose another directory",
                  settings.path, name);
  }
}

ActivationWriter::~ActivationWriter() {
  State& state = *state_;
  if (state.finished) return;
  const std::size_t n_files = state.rows_per_file.size() + (state.file ? 1 : 0);
  state.file.reset();
  std::error_code ignored;
  for (std::size_t i = 0; i < n_files; ++i) std::filesystem::remove(state.path_of(i), ignored);
  for (const char* name : {"/vocabulary.json", "/index.bin"})
    std::filesystem::remove(state.settings.path + name, ignored);
  if (state.created) std::filesystem::remove(state.settings.path, ignored);  // fails if it is not empty
}

void ActivationWriter::append(std::int64_t rows, const std::byte* inputs, const std::byte* targets,
                              std::span<const std::int32_t> ids, std::span<const std::int64_t> documents) {
  State& state = *state_;
  const WriterSettings& settings = state.settings;
  const std::int64_t row_bytes = settings.n_layers * settings.d_model * kernels::bytes_of(settings.dtype);
  WEFT_ASSERT(!settings.tokens || static_cast<std::int64_t>(ids.size()) == rows);
  std::int64_t done = 0;
  while (rows > 0) {
    if (!state.file)
      state.file.emplace(state.path_of(state.rows_per_file.size()), file_shape(settings),
                         settings.tokens ? storage::kActivationFormatWithTokens : 1, root_attributes(settings));
    const std::int64_t count = std::min(rows, settings.rows_per_file - state.rows_in_file);
    state.file->append(count, inputs, targets);
    if (settings.tokens) {
      if (state.rows_in_file == 0) state.documents.push_back(0);  // the first row of a file always begins a document
      for (const std::int64_t row : documents)
        if (row >= done && row < done + count && (row > done || state.rows_in_file > 0))
          state.documents.push_back(state.rows_in_file + row - done);
      state.ids.insert(state.ids.end(), ids.begin() + done, ids.begin() + done + count);
    }
    state.rows_in_file += count;
    rows -= count;
    done += count;
    inputs += count * row_bytes;
    targets += count * row_bytes;
    if (state.rows_in_file == settings.rows_per_file) state.close_file();
  }
}

void ActivationWriter::finish() {
  state_->close_file();
  write_index(state_->settings, state_->rows_per_file);
  state_->finished = true;
}

std::map<std::string, std::string> root_attributes(const WriterSettings& settings) {
  return {{"format", storage::kActivationFormat},
          {"model", settings.model},
          {"hook_inputs", settings.hook_inputs},
          {"hook_targets", settings.hook_targets},
          {"software", "weft"}};
}

storage::ActivationFileWriter::Shape file_shape(const WriterSettings& settings) {
  return {settings.n_layers, settings.d_model, settings.dtype, std::min(kChunkRows, settings.rows_per_file),
          settings.compression == Compression::gzip ? kGzipLevel : 0};
}

storage::ActivationFileWriter::Shape whole_file_shape(const WriterSettings& settings, std::int64_t rows) {
  storage::ActivationFileWriter::Shape shape = file_shape(settings);
  if (settings.compression == Compression::none) shape.rows = rows;
  return shape;
}

void write_index(const WriterSettings& settings, std::span<const std::int64_t> rows_of_files) {
  std::string index;
  std::int64_t first_row = 0;
  for (std::size_t i = 0; i < rows_of_files.size(); ++i) {
    append_word(index, i, 4);
    append_word(index, static_cast<std::uint64_t>(rows_of_files[i]), 4);
    append_word(index, static_cast<std::uint64_t>(first_row), 8);
    first_row += rows_of_files[i];
  }
  const char* dtype = settings.dtype == Scalar::fp32   ? "float32"
                      : settings.dtype == Scalar::fp16 ? "float16"
                                                       : "bfloat16";
  const Json metadata = {{"model_name", settings.model}, {"dataset", settings.dataset},
                         {"split", settings.split},      {"num_layers", settings.n_layers},
                         {"d_model", settings.d_model},  {"dtype", dtype},
                         {"total_tokens", first_row},    {"chunk_tokens", settings.rows_per_file}};
  if (!settings.vocabulary.empty())
    storage::write_text_atomically(settings.path + "/vocabulary.json", vocabulary_text(settings.vocabulary));
  storage::write_text_atomically(settings.path + "/index.bin", index);
  storage::write_text_atomically(settings.path + "/metadata.json", json_text(metadata, 2) + "\n");
}

void store_as(Scalar type, const float* values, std::int64_t n, std::byte* raw) {
  WEFT_ASSERT(type == Scalar::fp32 || type == Scalar::fp16 || type == Scalar::bf16);
  if (type == Scalar::fp32) {
    std::memcpy(raw, values, static_cast<std::size_t>(n) * 4);
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint16_t bits = type == Scalar::fp16 ? to_half(values[i]) : kernels::to_bf16(values[i]).bits;
    std::memcpy(raw + 2 * i, &bits, 2);
  }
}

}  // namespace weft::dataset
