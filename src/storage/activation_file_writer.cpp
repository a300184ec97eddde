// SPDX-License-Identifier: Apache-2.0
#include "storage/activation_file_writer.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "storage/stored_array.hpp"

namespace weft::storage {
namespace {

using kernels::Scalar;

constexpr std::int64_t kPieceBytes = 1 << 20;  // gathered in cache, then written

}  // namespace

ActivationFileWriter::ActivationFileWriter(const std::filesystem::path& path, const Shape& shape,
                                           std::int64_t format_version,
                                           const std::map<std::string, std::string>& attributes)
    : path_(path.string()), shape_(shape) {
  const Lock lock;
  file_ = create_file(path);
  for (const auto& [name, text] : attributes) write_attribute(file_, name, text);
  write_attribute(file_, "format_version", format_version);
  type_ = type_of(shape.type);
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "creating dataset properties");
  const Handle access(H5Pcreate(H5P_DATASET_ACCESS), H5Pclose, "creating dataset access properties");
  if (shape.rows > 0) {
    check(H5Pset_alloc_time(creation, H5D_ALLOC_TIME_EARLY), "setting when a dataset is allocated");
    check(H5Pset_fill_time(creation, H5D_FILL_TIME_NEVER), "setting the fill value");
  } else {
    const hsize_t chunk[2] = {static_cast<hsize_t>(shape.chunk_rows), static_cast<hsize_t>(shape.d_model)};
    check(H5Pset_chunk(creation, 2, chunk), "setting chunks");
    if (shape.gzip_level > 0) check(H5Pset_deflate(creation, static_cast<unsigned>(shape.gzip_level)), "setting gzip");
    // The cache holds one row of chunks: partially filled chunks are completed in memory by later calls.
    check(H5Pset_chunk_cache(access, 11,
                             static_cast<std::size_t>(shape.chunk_rows * shape.d_model * bytes_of(shape.type)), 1.0),
          "setting the chunk cache");
  }
  // No time stamps: files with the same rows are identical.
  check(H5Pset_obj_track_times(creation, false), "disabling time stamps");
  const Handle group_creation(H5Pcreate(H5P_GROUP_CREATE), H5Pclose, "creating group properties");
  check(H5Pset_obj_track_times(group_creation, false), "disabling time stamps");
  const hsize_t now[2] = {static_cast<hsize_t>(shape.rows), static_cast<hsize_t>(shape.d_model)};
  const hsize_t most[2] = {shape.rows > 0 ? now[0] : H5S_UNLIMITED, now[1]};
  const Handle space(H5Screate_simple(2, now, most), H5Sclose, "describing a dataset");
  std::vector<Handle> groups;
  for (std::int64_t layer = 0; layer < shape.n_layers; ++layer)
    groups.emplace_back(
        H5Gcreate2(file_, fmt::format("layer_{}", layer).c_str(), H5P_DEFAULT, group_creation, H5P_DEFAULT), H5Gclose,
        fmt::format("{}: creating /layer_{}", path_, layer));
  for (const char* name : {"inputs", "targets"})
    for (std::int64_t layer = 0; layer < shape.n_layers; ++layer)
      datasets_.emplace_back(
          H5Dcreate2(groups[static_cast<std::size_t>(layer)], name, type_, space, H5P_DEFAULT, creation, access),
          H5Dclose, fmt::format("{}: creating /layer_{}/{}", path_, layer, name));
  if (shape.rows > 0) place_matrices();
}

void ActivationFileWriter::place_matrices() {
  for (const Handle& dataset : datasets_) {
    const haddr_t offset = H5Dget_offset(dataset);
    if (offset == HADDR_UNDEF) throw error(ExitCode::io, "{}: HDF5 gives a matrix no place in the file", path_);
    begin_.push_back(static_cast<std::int64_t>(offset));
  }
  plain_ = open_own(path_, O_WRONLY);
}

void ActivationFileWriter::append(std::int64_t rows, const std::byte* inputs, const std::byte* targets) {
  WEFT_ASSERT(shape_.rows == 0 || rows_ + rows <= shape_.rows);
  if (shape_.rows > 0)
    append_in_place(rows, inputs, targets);
  else
    append_chunks(rows, inputs, targets);
  rows_ += rows;
}

void ActivationFileWriter::append_in_place(std::int64_t rows, const std::byte* inputs, const std::byte* targets) const {
  const std::int64_t width = shape_.d_model * bytes_of(shape_.type), stride = shape_.n_layers * width;
  const std::int64_t most = std::clamp<std::int64_t>(kPieceBytes / width, 1, std::max<std::int64_t>(1, rows));
  std::vector<std::byte> piece(static_cast<std::size_t>(most * width));
  for (std::size_t i = 0; i < begin_.size(); ++i) {
    const std::int64_t layer = static_cast<std::int64_t>(i) % shape_.n_layers;
    const std::byte* from = (static_cast<std::int64_t>(i) < shape_.n_layers ? inputs : targets) + layer * width;
    for (std::int64_t done = 0; done < rows; done += most) {
      const std::int64_t count = std::min(most, rows - done);
      for (std::int64_t row = 0; row < count; ++row)
        std::memcpy(piece.data() + row * width, from + (done + row) * stride, static_cast<std::size_t>(width));
      write_at(plain_, piece.data(), count * width, begin_[i] + (rows_ + done) * width, path_);
    }
  }
}

void ActivationFileWriter::append_chunks(std::int64_t rows, const std::byte* inputs, const std::byte* targets) {
  const Lock lock;
  const std::int64_t width = shape_.d_model * bytes_of(shape_.type);
  const hsize_t start[2] = {static_cast<hsize_t>(rows_), 0};
  const hsize_t count[2] = {static_cast<hsize_t>(rows), static_cast<hsize_t>(shape_.d_model)};
  const hsize_t extent[2] = {static_cast<hsize_t>(rows_ + rows), static_cast<hsize_t>(shape_.d_model)};
  const hsize_t memory[2] = {static_cast<hsize_t>(rows), static_cast<hsize_t>(shape_.n_layers * shape_.d_model)};
  const Handle from(H5Screate_simple(2, memory, nullptr), H5Sclose, "describing memory");
  const hsize_t zero[2] = {0, 0};
  check(H5Sselect_hyperslab(from, H5S_SELECT_SET, zero, nullptr, count, nullptr), "describing memory");
  for (std::size_t i = 0; i < datasets_.size(); ++i) {
    const std::int64_t layer = static_cast<std::int64_t>(i) % shape_.n_layers;
    const std::byte* data = (static_cast<std::int64_t>(i) < shape_.n_layers ? inputs : targets) + layer * width;
    check(H5Dset_extent(datasets_[i], extent), path_ + ": extending a dataset");
    const Handle to(H5Dget_space(datasets_[i]), H5Sclose, path_ + ": reading a shape");
    check(H5Sselect_hyperslab(to, H5S_SELECT_SET, start, nullptr, count, nullptr), path_ + ": selecting rows");
    check(H5Dwrite(datasets_[i], type_, from, to, H5P_DEFAULT, data), path_ + ": writing rows");
  }
}

void ActivationFileWriter::write_tokens(std::span<const std::int32_t> ids, std::span<const std::int64_t> documents,
                                        std::span<const std::int32_t> positions) {
  const Lock lock;
  write_array(file_, path_, "tokens", Scalar::i32, static_cast<std::int64_t>(ids.size()), ids.data());
  write_array(file_, path_, "documents", Scalar::i64, static_cast<std::int64_t>(documents.size()), documents.data());
  if (!positions.empty())
    write_array(file_, path_, "positions", Scalar::i32, static_cast<std::int64_t>(positions.size()), positions.data());
}

void ActivationFileWriter::close() {
  if (rows_ < shape_.rows) throw error(ExitCode::internal, "{}: has {} of {} rows", path_, rows_, shape_.rows);
  if (plain_ >= 0 && !plain_.close()) fail_with_errno(path_, "closing");
  const Lock lock;
  for (Handle& dataset : datasets_) dataset.close();
  datasets_.clear();
  check(H5Fflush(file_, H5F_SCOPE_LOCAL), path_ + ": flushing");
  file_.close();
}

}  // namespace weft::storage
