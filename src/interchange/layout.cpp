// SPDX-License-Identifier: Apache-2.0
#include "interchange/layout.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "base/text.hpp"
#include "kernels/bf16.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;
namespace {

constexpr parallel::Range whole(std::int64_t n) { return {0, n}; }

std::string text_of(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

}  // namespace

std::size_t Layout::add_file(std::string name) {
  files.push_back({std::move(name), {}, {}});
  return files.size() - 1;
}

std::size_t Layout::add_tensor(std::size_t file, std::string name, std::vector<std::int64_t> shape) {
  files[file].tensors.push_back({std::move(name), std::move(shape)});
  return files[file].tensors.size() - 1;
}

void Layout::add_whole(std::size_t file, std::string name, std::vector<std::int64_t> shape, Part part,
                       std::int64_t layer, bool transposed) {
  const Extent extent = extent_of(contents.sizes, part, layer);
  const std::size_t tensor = add_tensor(file, std::move(name), std::move(shape));
  blocks[{part, layer}].push_back({.rows = whole(extent.rows),
                                   .columns = whole(extent.columns),
                                   .file = file,
                                   .tensor = tensor,
                                   .row_stride = transposed ? 1 : extent.columns,
                                   .column_stride = transposed ? extent.rows : 1});
}

parallel::Range Layout::strip(std::int64_t source, std::int64_t target) const {
  const std::int64_t d = contents.sizes.d_model;
  return {(target - source) * d, (target - source + 1) * d};
}

LayoutRows::LayoutRows(const fs::path& directory, Layout layout) : layout_(std::move(layout)) {
  for (const LayoutFile& file : layout_.files) {
    const fs::path path = directory / file.name;
    if (!fs::exists(path))
      throw error(ExitCode::data,
                  "{}: is missing (the other files of the directory need it); was it copied completely?",
                  path.string());
    Opened opened{std::make_unique<SafetensorsFile>(path.string()), {}};
    std::size_t known = 0;
    for (const LayoutTensor& tensor : file.tensors) {
      const SafetensorsEntry* const entry = opened.file->find(tensor.name);
      if (entry == nullptr)
        throw error(ExitCode::data, "{}: tensor \"{}\" is missing; was the file written by the named program?",
                    path.string(), tensor.name);
      if (entry->shape != tensor.shape)
        throw error(ExitCode::data, "{}: tensor \"{}\" has shape {}, the others require {}", path.string(), tensor.name,
                    text_of(entry->shape), text_of(tensor.shape));
      if (!entry->type)
        throw error(ExitCode::data, "{}: tensor \"{}\" has dtype {} (floating-point values are needed)", path.string(),
                    tensor.name, entry->dtype);
      opened.entries.push_back(entry);
      ++known;
    }
    for (const SafetensorsEntry& entry : opened.file->entries()) {
      const auto named = [&](const auto& list, auto&& name) {
        return std::any_of(list.begin(), list.end(), [&](const auto& item) { return name(item) == entry.name; });
      };
      if (named(file.tensors, [](const LayoutTensor& tensor) { return tensor.name; }) ||
          named(file.ignored, [](const std::string& name) { return name; }))
        continue;
      throw error(ExitCode::usage,
                  "{}: has tensor \"{}\", for which Weft has no counterpart (leaving it out would change the result)",
                  path.string(), printable(entry.name));
    }
    files_.push_back(std::move(opened));
  }
}

void LayoutRows::read(Part part, std::int64_t layer, parallel::Range rows, float* to) const {
  const std::int64_t columns = extent_of(layout_.contents.sizes, part, layer).columns;
  std::fill_n(to, rows.size() * columns, 0.0f);
  const auto found = layout_.blocks.find({part, layer});
  if (found == layout_.blocks.end()) return;
  std::vector<float> run;
  for (const Block& block : found->second) {
    const parallel::Range both = intersection(rows, block.rows);
    if (both.size() == 0) continue;
    const SafetensorsFile& file = *files_[block.file].file;
    const SafetensorsEntry& entry = *files_[block.file].entries[block.tensor];
    const std::int64_t first = block.offset + (both.begin - block.rows.begin) * block.row_stride;
    float* const corner = to + (both.begin - rows.begin) * columns + block.columns.begin;
    const bool by_row = block.column_stride == 1;
    // Rows that follow one another are one run; otherwise a run is a row, or a column of the transpose.
    const bool one_run = by_row && block.row_stride == block.columns.size() && block.columns.size() == columns;
    const std::int64_t n_runs = one_run ? 1 : by_row ? both.size() : block.columns.size();
    const std::int64_t length = one_run ? both.size() * columns : by_row ? block.columns.size() : both.size();
    run.resize(static_cast<std::size_t>(length));
    for (std::int64_t i = 0; i < n_runs; ++i) {
      file.read(entry, first + i * (by_row ? block.row_stride : block.column_stride), length, run.data());
      float* const at = corner + i * (by_row ? columns : 1);
      const std::int64_t step = by_row ? 1 : columns;
      for (std::int64_t j = 0; j < length; ++j) at[j * step] += run[static_cast<std::size_t>(j)];
    }
  }
  if (part != Part::threshold) return;
  for (float* theta = to; theta != to + rows.size(); ++theta) {
    if (layout_.log_thresholds) *theta = std::exp(*theta);
    if (layout_.positive_entries) *theta = std::max(*theta, 0.0f);
  }
}

std::map<std::string, std::int64_t> LayoutRows::bytes_by_dtype() const {
  std::map<std::string, std::int64_t> bytes;
  for (const Opened& opened : files_)
    for (const SafetensorsEntry* entry : opened.entries) bytes[entry->dtype] += entry->end - entry->begin;
  return bytes;
}

void write(const RowSource& source, const Layout& layout, Storage storage, const fs::path& directory) {
  std::vector<SafetensorsWriter> files;
  for (const LayoutFile& file : layout.files) {
    std::vector<SafetensorsWriter::Tensor> tensors;
    for (const LayoutTensor& tensor : file.tensors) tensors.push_back({tensor.name, storage.vectors, tensor.shape});
    // A tensor is a matrix if a part of several columns lies in it.
    for (const auto& [key, blocks] : layout.blocks)
      for (const Block& block : blocks)
        if (&layout.files[block.file] == &file && block.columns.size() > 1)
          tensors[block.tensor].type = storage.matrices;
    files.emplace_back(directory / file.name, std::move(tensors), std::map<std::string, std::string>{{"format", "pt"}});
  }

  std::vector<float> piece, run;
  for (const auto& [part, layer] : parts_of(layout.contents)) {
    const Extent extent = extent_of(layout.contents.sizes, part, layer);
    const std::int64_t most = piece_rows(extent);
    for (std::int64_t begin = 0; begin < extent.rows; begin += most) {
      const parallel::Range rows{begin, std::min(extent.rows, begin + most)};
      piece.resize(static_cast<std::size_t>(rows.size() * extent.columns));
      source.read(part, layer, rows, piece.data());
      if (part == Part::threshold && layout.log_thresholds)
        for (float& value : piece) value = std::log(value);
      bool first = true;
      for (const Block& block : layout.blocks.at({part, layer})) {
        // The first of several blocks that add up takes the value.
        if (part == Part::decoder_bias && !first) std::fill(piece.begin(), piece.end(), 0.0f);
        first = false;
        const parallel::Range both = intersection(rows, block.rows);
        if (both.size() == 0) continue;
        SafetensorsWriter& file = files[block.file];
        const bool bf16 = file.tensors()[block.tensor].type == kernels::Scalar::bf16;
        const auto put = [&](std::int64_t at, std::span<const float> values) {
          for (const float value : values)
            if (!kernels::is_finite(bf16 ? float(kernels::to_bf16(value)) : value))
              throw error(ExitCode::numeric, "{}: tensor \"{}\" is not finite{}; was the run diverging?",
                          (directory / layout.files[block.file].name).string(), file.tensors()[block.tensor].name,
                          kernels::is_finite(value) ? " in bf16 (take --type fp32)" : "");
          file.write(block.tensor, at, values);
        };
        const std::int64_t offset = block.offset + (both.begin - block.rows.begin) * block.row_stride;
        const float* const corner = piece.data() + (both.begin - rows.begin) * extent.columns + block.columns.begin;
        const std::int64_t columns = block.columns.size();
        if (block.column_stride == 1 && block.row_stride == columns && columns == extent.columns) {
          put(offset, {corner, static_cast<std::size_t>(both.size() * columns)});
        } else if (block.column_stride == 1) {
          for (std::int64_t i = 0; i < both.size(); ++i)
            put(offset + i * block.row_stride, {corner + i * extent.columns, static_cast<std::size_t>(columns)});
        } else {
          run.resize(static_cast<std::size_t>(both.size()));
          for (std::int64_t j = 0; j < columns; ++j) {
            for (std::int64_t i = 0; i < both.size(); ++i)
              run[static_cast<std::size_t>(i)] = corner[i * extent.columns + j];
            put(offset + j * block.column_stride, run);
          }
        }
      }
    }
  }
  for (SafetensorsWriter& file : files) file.finish();
}

}  // namespace weft::interchange
