// SPDX-License-Identifier: Apache-2.0
#include "language_model/run/text_rows.hpp"

#include <algorithm>

#include "base/contract.hpp"
#include "dataset/activations/reader.hpp"

namespace weft::language_model {

TextRows::TextRows(const Windows& windows, const TextStream& text, std::int64_t block_rows, MlpRecorder& recorder)
    : windows_(windows), text_(text), block_windows_(block_rows / windows.length), recorder_(recorder) {
  WEFT_ASSERT(block_rows % windows.length == 0);
}

void TextRows::read(std::span<const dataset::RowRead> reads) {
  const std::int64_t block_rows = block_windows_ * windows_.length, row_bytes = recorder_.row_bytes();
  for (const dataset::RowRead& read : reads) {
    const std::int64_t end = read.row_begin + read.rows;
    for (std::int64_t row = read.row_begin; row < end;) {
      const std::int64_t block = row / block_rows, block_begin = block * block_rows,
                         stop = std::min(end, block_begin + block_rows),
                         first = read.file * windows_.windows_per_file + block * block_windows_,
                         count = std::min(block_windows_, windows_.windows_of(read.file) - block * block_windows_);
      if (!recorder_.holds(text_, first, count)) recorder_.record(text_, windows_.length, first, count);
      const auto at = [&](std::byte* rows) {
        return rows == nullptr ? nullptr : rows + (row - read.row_begin) * row_bytes;
      };
      recorder_.copy(row - block_begin, stop - row, at(read.inputs), at(read.targets));
      row = stop;
    }
  }
}

void TextRows::finish() { recorder_.finish(); }

Windows windows_of(std::int64_t ids, std::int64_t length) {
  const std::int64_t windows = ids / length;
  return {length, windows, std::min(windows, std::max<std::int64_t>(1, kRowsPerFile / length))};
}

dataset::Description describe(const Windows& windows, const ModelSettings& model, kernels::Scalar type) {
  dataset::Description description;
  description.own_layout = true;
  description.hook_inputs = kInputHook;
  description.hook_targets = kOutputHook;
  description.n_layers = model.layers;
  description.d_model = model.d_model;
  description.n_rows = windows.windows * windows.length;
  description.dtype = type;
  for (std::int64_t file = 0; file < windows.files(); ++file) {
    dataset::FileDescription part;
    part.name = fmt::format("part {}", file);
    part.rows = windows.rows_of(file);
    description.files.push_back(part);
  }
  return description;
}

}  // namespace weft::language_model
