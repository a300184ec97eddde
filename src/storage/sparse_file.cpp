// SPDX-License-Identifier: Apache-2.0
#include "storage/sparse_file.hpp"

#include "storage/stored_array.hpp"

namespace weft::storage {
namespace {

using kernels::Scalar;

constexpr hsize_t kChunkEntries = 1 << 18;  // 1 MiB

Handle extendible(hid_t file, const std::string& path, const char* name, Scalar type) {
  const std::string what = path + ": creating /" + name;
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, what);
  check(H5Pset_chunk(creation, 1, &kChunkEntries), what);
  check(H5Pset_fill_time(creation, H5D_FILL_TIME_ALLOC), what);  // the end of the last chunk is zero
  check(H5Pset_obj_track_times(creation, false), what);
  const hsize_t none = 0, unlimited = H5S_UNLIMITED;
  const Handle space(H5Screate_simple(1, &none, &unlimited), H5Sclose, what), stored = type_of(type);
  return Handle(H5Dcreate2(file, name, stored, space, H5P_DEFAULT, creation, H5P_DEFAULT), H5Dclose, what);
}

void append_to(hid_t dataset, const std::string& path, Scalar type, std::int64_t begin, std::int64_t count,
               const void* data) {
  const std::string what = path + ": writing entries";
  const hsize_t first = static_cast<hsize_t>(begin), n = static_cast<hsize_t>(count), extent = first + n;
  check(H5Dset_extent(dataset, &extent), what);
  const Handle to(H5Dget_space(dataset), H5Sclose, what), from(H5Screate_simple(1, &n, nullptr), H5Sclose, what);
  check(H5Sselect_hyperslab(to, H5S_SELECT_SET, &first, nullptr, &n, nullptr), what);
  const Handle stored = type_of(type);
  check(H5Dwrite(dataset, stored, from, to, H5P_DEFAULT, data), what);
}

}  // namespace

SparseFileWriter::SparseFileWriter(const std::filesystem::path& path, const std::map<std::string, std::string>& texts,
                                   const std::map<std::string, std::int64_t>& numbers)
    : path_(path.string()) {
  const Lock lock;
  file_ = create_file(path);
  for (const auto& [name, text] : texts) write_attribute(file_, name, text);
  for (const auto& [name, number] : numbers) write_attribute(file_, name, number);
  feature_ = extendible(file_, path_, "feature", Scalar::u32);
  value_ = extendible(file_, path_, "value", Scalar::fp32);
}

void SparseFileWriter::append(std::span<const std::int64_t> counts, std::span<const std::uint32_t> feature,
                              std::span<const float> value) {
  const std::int64_t begin = entries();
  for (const std::int64_t count : counts) offsets_.push_back(offsets_.back() + count);
  const auto n = static_cast<std::int64_t>(feature.size());
  if (n == 0) return;
  const Lock lock;
  append_to(feature_, path_, Scalar::u32, begin, n, feature.data());
  append_to(value_, path_, Scalar::fp32, begin, n, value.data());
}

void SparseFileWriter::close() {
  const Lock lock;
  write_array(file_, path_, "offsets", Scalar::i64, static_cast<std::int64_t>(offsets_.size()), offsets_.data());
  feature_.close();
  value_.close();
  file_.close();
}

}  // namespace weft::storage
