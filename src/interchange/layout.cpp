// SPDX-License-Identifier: Apache-2.0
#include "interchange/layout.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include "base/text.hpp"
#include "kernels/bf16.hpp"
#include "storage/durable.hpp"

namespace weft::interchange {
namespace fs = std::filesystem;
namespace {

constexpr parallel::Range whole(std::int64_t n) { return {0, n}; }

std::string text_of(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

/// Intersection of a piece of rows and a block, as runs of consecutive elements of the tensor. Run i begins at
/// element `first` + i * `stride` of the tensor; its element j is element `at` + i * `next` + j * `step` of the piece.
struct Runs {
  std::int64_t count = 0, length = 0;
  std::int64_t first = 0, stride = 0;
  std::int64_t at = 0, next = 0, step = 1;

  /// Number of runs copied together: if a run is a column of the piece, neighbouring columns share cache lines.
  std::int64_t group() const { return step == 1 ? 1 : 8; }

  /// Calls visit(run, element of the run, element of the piece) for runs [begin, begin + n).
  template <class Visit>
  void each(std::int64_t begin, std::int64_t n, Visit&& visit) const {
    for (std::int64_t j = 0; j < length; ++j)
      for (std::int64_t i = begin; i < begin + n; ++i) visit(i, j, at + i * next + j * step);
  }
};

/// Returns the runs of a block. `columns`: columns of the whole part.
Runs runs_of(const Block& block, parallel::Range rows, std::int64_t columns) {
  const parallel::Range both = intersection(rows, block.rows);
  Runs runs;
  runs.first = block.offset + (both.begin - block.rows.begin) * block.row_stride;
  runs.at = (both.begin - rows.begin) * columns + block.columns.begin;
  const std::int64_t width = block.columns.size();
  if (both.size() == 0) return runs;
  if (block.column_stride != 1) {  // the transpose: a run is a column
    runs.count = width;
    runs.length = both.size();
    runs.stride = block.column_stride;
    runs.next = 1;
    runs.step = columns;
  } else if (block.row_stride == width && width == columns) {  // rows that follow one another
    runs.count = 1;
    runs.length = both.size() * columns;
  } else {
    runs.count = both.size();
    runs.length = width;
    runs.stride = block.row_stride;
    runs.next = columns;
  }
  return runs;
}

/// Adds sign W_enc b_dec to `to` [rows.size()], with W_enc rounded to `stored`.
void add_times_bias(const RowSource& source, std::int64_t layer, parallel::Range rows, int sign, kernels::Scalar stored,
                    float* to) {
  const std::int64_t d = source.contents().sizes.d_model, most = piece_rows({rows.size(), d});
  std::vector<float> bias(static_cast<std::size_t>(d)), weights;
  source.read(Part::decoder_bias, layer, {0, d}, bias.data());
  for (std::int64_t begin = rows.begin; begin < rows.end; begin += most) {
    const parallel::Range piece{begin, std::min(rows.end, begin + most)};
    weights.resize(static_cast<std::size_t>(piece.size() * d));
    source.read(Part::encoder, layer, piece, weights.data());
    for (std::int64_t i = 0; i < piece.size(); ++i) {
      double sum = 0;
      for (std::int64_t j = 0; j < d; ++j) {
        const float w = weights[static_cast<std::size_t>(i * d + j)];
        sum += static_cast<double>(stored == kernels::Scalar::bf16 ? float(kernels::to_bf16(w)) : w) *
               static_cast<double>(bias[static_cast<std::size_t>(j)]);
      }
      float& value = to[piece.begin - rows.begin + i];
      value = static_cast<float>(static_cast<double>(value) + sign * sum);
    }
  }
}

/// Adds sign b_dec of a layer to `to`.
void add_bias(const RowSource& source, std::int64_t layer, parallel::Range rows, float sign, float* to) {
  std::vector<float> bias(static_cast<std::size_t>(rows.size()));
  source.read(Part::decoder_bias, layer, rows, bias.data());
  for (const float value : bias) *to++ += sign * value;
}

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
  const Extent extent = extent_of(contents, part, layer);
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
    }
    std::set<std::string> expected(file.ignored.begin(), file.ignored.end());
    for (const LayoutTensor& tensor : file.tensors) expected.insert(tensor.name);
    for (const SafetensorsEntry& entry : opened.file->entries()) {
      if (expected.contains(entry.name)) continue;
      throw error(ExitCode::usage,
                  "{}: has tensor \"{}\", for which Weft has no counterpart (leaving it out would change the result)",
                  path.string(), printable(entry.name));
    }
    files_.push_back(std::move(opened));
  }
}

/// Reads a part as the sum of its blocks, without conversions.
void LayoutRows::read_stored(Part part, std::int64_t layer, parallel::Range rows, float* to) const {
  const std::int64_t columns = extent_of(layout_.contents, part, layer).columns;
  std::fill_n(to, rows.size() * columns, 0.0f);
  const auto found = layout_.blocks.find({part, layer});
  if (found == layout_.blocks.end()) {
    if (part == Part::scale) std::fill_n(to, rows.size(), 1.0f);
    return;
  }
  std::vector<float> values;
  for (const Block& block : found->second) {
    const SafetensorsFile& file = *files_[block.file].file;
    const SafetensorsEntry& entry = *files_[block.file].entries[block.tensor];
    const Runs runs = runs_of(block, rows, columns);
    for (std::int64_t begin = 0; begin < runs.count; begin += runs.group()) {
      const std::int64_t n = std::min(runs.group(), runs.count - begin);
      values.resize(static_cast<std::size_t>(n * runs.length));
      for (std::int64_t i = 0; i < n; ++i)
        file.read(entry, runs.first + (begin + i) * runs.stride, runs.length, values.data() + i * runs.length);
      runs.each(begin, n, [&](std::int64_t i, std::int64_t j, std::int64_t element) {
        to[element] += values[static_cast<std::size_t>((i - begin) * runs.length + j)];
      });
    }
  }
}

/// Implements Layout::unit_decoder: multiplies rows of the encoder and its bias by the norms of the decoder's rows, and
/// divides the decoder's rows by them.
void LayoutRows::scale_by_norms(Part part, std::int64_t layer, parallel::Range rows, float* to) const {
  constexpr double kSmallest = 1e-8;  // SAELens: a row of zeros stays zero
  const std::int64_t d = layout_.contents.sizes.d_model, columns = extent_of(layout_.contents, part, layer).columns,
                     most = piece_rows({rows.size(), d});
  std::vector<float> decoder;
  for (std::int64_t begin = rows.begin; begin < rows.end; begin += most) {
    const parallel::Range piece{begin, std::min(rows.end, begin + most)};
    decoder.resize(static_cast<std::size_t>(piece.size() * d));
    read_stored(Part::decoder, layer, piece, decoder.data());
    for (std::int64_t i = 0; i < piece.size(); ++i) {
      double squares = 0;
      for (std::int64_t j = 0; j < d; ++j) {
        const double value = decoder[static_cast<std::size_t>(i * d + j)];
        squares += value * value;
      }
      const double norm = std::sqrt(squares), factor = part == Part::decoder ? 1 / std::max(norm, kSmallest) : norm;
      float* const row = to + (piece.begin - rows.begin + i) * columns;
      for (std::int64_t j = 0; j < columns; ++j) row[j] = static_cast<float>(static_cast<double>(row[j]) * factor);
    }
  }
}

void LayoutRows::read(Part part, std::int64_t layer, parallel::Range rows, float* to) const {
  read_stored(part, layer, rows, to);
  if (layout_.unit_decoder && (part == Part::encoder || part == Part::encoder_bias || part == Part::decoder))
    scale_by_norms(part, layer, rows, to);
  if (part == Part::encoder_bias && layout_.centred) add_times_bias(*this, layer, rows, -1, kernels::Scalar::fp32, to);
  if (part == Part::decoder_bias && layout_.summed_biases && layer > 0) add_bias(*this, layer - 1, rows, 1, to);
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

namespace {

/// Writes part of a tensor whose values must be finite in its storage type.
void put(SafetensorsWriter& file, const fs::path& path, std::size_t tensor, std::int64_t first,
         std::span<const float> values) {
  const SafetensorsWriter::Tensor& written = file.tensors()[tensor];
  for (const float value : values)
    if (!kernels::is_finite(written.type == kernels::Scalar::bf16 ? float(kernels::to_bf16(value)) : value))
      throw error(ExitCode::numeric, "{}: tensor \"{}\" is not finite{}", path.string(), written.name,
                  kernels::is_finite(value) ? " in bf16; take --type fp32" : "; did the run diverge?");
  file.write(tensor, first, values);
}

}  // namespace

void write(const RowSource& source, const Layout& layout, Storage storage, const fs::path& directory) {
  std::vector<SafetensorsWriter> files;
  for (const LayoutFile& file : layout.files) {
    std::vector<SafetensorsWriter::Tensor> tensors;
    for (const LayoutTensor& tensor : file.tensors) tensors.push_back({tensor.name, storage.vectors, tensor.shape});
    // A tensor counts as a matrix if it contains a part of several columns.
    for (const auto& [key, blocks] : layout.blocks)
      for (const Block& block : blocks)
        if (&layout.files[block.file] == &file && block.columns.size() > 1)
          tensors[block.tensor].type = storage.matrices;
    const fs::path path = directory / file.name;
    storage::make_directory(path.parent_path());
    files.emplace_back(path, std::move(tensors), std::map<std::string, std::string>{{"format", "pt"}});
  }

  std::vector<float> piece, values;
  for (const auto& [part, layer] : parts_of(layout.contents)) {
    const Extent extent = extent_of(layout.contents, part, layer);
    const std::int64_t most = piece_rows(extent);
    for (std::int64_t begin = 0; begin < extent.rows; begin += most) {
      const parallel::Range rows{begin, std::min(extent.rows, begin + most)};
      piece.resize(static_cast<std::size_t>(rows.size() * extent.columns));
      source.read(part, layer, rows, piece.data());
      if (part == Part::threshold && layout.log_thresholds)
        for (float& value : piece) value = std::log(value);
      if (part == Part::encoder_bias && layout.centred)
        add_times_bias(source, layer, rows, 1, storage.matrices, piece.data());
      if (part == Part::decoder_bias && layout.summed_biases && layer > 0)
        add_bias(source, layer - 1, rows, -1, piece.data());
      for (const Block& block : layout.blocks.at({part, layer})) {
        const Runs runs = runs_of(block, rows, extent.columns);
        for (std::int64_t run = 0; run < runs.count; run += runs.group()) {
          const std::int64_t n = std::min(runs.group(), runs.count - run);
          values.resize(static_cast<std::size_t>(n * runs.length));
          runs.each(run, n, [&](std::int64_t i, std::int64_t j, std::int64_t element) {
            values[static_cast<std::size_t>((i - run) * runs.length + j)] = piece[static_cast<std::size_t>(element)];
          });
          for (std::int64_t i = 0; i < n; ++i)
            put(files[block.file], directory / layout.files[block.file].name, block.tensor,
                runs.first + (run + i) * runs.stride,
                std::span(values).subspan(static_cast<std::size_t>(i * runs.length),
                                          static_cast<std::size_t>(runs.length)));
        }
        // If blocks add up, the first has the value and the others are zero.
        if (part == Part::decoder_bias) std::fill(piece.begin(), piece.end(), 0.0f);
      }
    }
  }
  for (SafetensorsWriter& file : files) file.finish();
}

}  // namespace weft::interchange
