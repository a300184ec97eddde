// SPDX-License-Identifier: Apache-2.0
//
// Activation files as other programs write them: HDF5 in the layout of crosslayer-coding.
#pragma once

#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "storage/hdf5.hpp"
#include "tests/dataset/activations/samples.hpp"

namespace weft::testing {

using kernels::Scalar;
using storage::Handle;

/// Storage of one dataset of a foreign file.
struct Form {
  Scalar type = Scalar::fp32;  // u16: bf16 patterns
  std::int64_t chunk_rows = 0;
  std::int64_t chunk_columns = 0;  // 0 = all
  bool gzip = false;
  std::string declared;
  H5Z_filter_t filter = 0;  // a registered filter, in addition
};

/// The dataset `name` of a group, [rows, columns], from raw bytes.
inline void put(hid_t group, const std::string& name, const Form& form, std::int64_t rows, std::int64_t columns,
                const std::byte* raw) {
  const hsize_t extent[2] = {static_cast<hsize_t>(rows), static_cast<hsize_t>(columns)};
  const Handle space(H5Screate_simple(2, extent, nullptr), H5Sclose, "space");
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "properties");
  if (form.chunk_rows > 0) {
    const hsize_t chunk[2] = {static_cast<hsize_t>(std::min(form.chunk_rows, rows)),
                              static_cast<hsize_t>(form.chunk_columns > 0 ? form.chunk_columns : columns)};
    storage::check(H5Pset_chunk(creation, 2, chunk), "chunk");
    if (form.gzip) storage::check(H5Pset_deflate(creation, 4), "gzip");
    if (form.filter != 0)
      storage::check(H5Pset_filter(creation, form.filter, H5Z_FLAG_MANDATORY, 0, nullptr), "filter");
  }
  const Handle type = storage::type_of(form.type);
  Handle dataset(H5Dcreate2(group, name.c_str(), type, space, H5P_DEFAULT, creation, H5P_DEFAULT), H5Dclose, "dataset");
  if (raw != nullptr) storage::check(H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, raw), "write");
  if (!form.declared.empty()) storage::write_attribute(dataset, "dtype", form.declared);
  dataset.close();
}

/// A file as written by other programs: no attributes, default version bounds. `change` may alter one dataset before it
/// is written, and returns false to omit it.
struct Foreign {
  std::int64_t layers = 3, d = 8;
  Form form;
  std::function<bool(std::int64_t layer, bool target, Form&, std::int64_t& rows, std::int64_t& columns,
                     std::vector<std::byte>& raw)>
      change;
};

inline void write_foreign_file(const std::string& path, const Foreign& foreign, std::int64_t rows,
                               std::int64_t first_row) {
  const storage::Lock lock;
  const Sample sample{foreign.layers,
                      foreign.d,
                      {},
                      foreign.form.type == Scalar::u16 ? Scalar::bf16 : foreign.form.type,
                      dataset::Compression::none};
  Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT), H5Fclose, "file");
  const std::int64_t width = foreign.d * kernels::bytes_of(sample.dtype);
  for (std::int64_t layer = foreign.layers; layer-- > 0;) {  // not in numeric order
    std::optional<Handle> group;
    for (const bool target : {false, true}) {
      std::vector<std::byte> raw;
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::vector<std::byte> row = sample_row(sample, first_row + r, target);
        raw.insert(raw.end(), row.begin() + layer * width, row.begin() + (layer + 1) * width);
      }
      Form form = foreign.form;
      std::int64_t n = rows, columns = foreign.d;
      if (foreign.change && !foreign.change(layer, target, form, n, columns, raw)) continue;
      if (!group)
        group.emplace(H5Gcreate2(file, fmt::format("layer_{}", layer).c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                      H5Gclose, "group");
      put(*group, target ? "targets" : "inputs", form, n, columns, raw.data());
    }
  }
  file.close();
}

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string words(std::initializer_list<std::pair<std::uint64_t, int>> values) {
  std::string bytes;
  for (const auto& [value, n] : values)
    for (int i = 0; i < n; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xff);
  return bytes;
}

inline const std::vector<std::int64_t> kRows = {50, 50, 20};

/// Three files, the last one shorter, with index and metadata in the layout of crosslayer-coding.
inline void write_foreign(const std::string& directory, const Foreign& foreign, const std::string& dtype) {
  std::filesystem::create_directories(directory);
  std::int64_t first = 0;
  std::string index;
  for (std::size_t i = 0; i < kRows.size(); ++i) {
    write_foreign_file(directory + fmt::format("/chunk_{}.{}", i, i == 1 ? "h5" : "hdf5"), foreign, kRows[i], first);
    index += words({{i, 4}, {static_cast<std::uint64_t>(kRows[i]), 4}, {static_cast<std::uint64_t>(first), 8}});
    first += kRows[i];
  }
  write_text(directory + "/index.bin", index);
  write_text(
      directory + "/metadata.json",
      fmt::format(
          R"({{"model_name": "m", "dataset": "t", "split": "train", "num_layers": {}, "d_model": {}, "dtype": "{}", )"
          R"("total_tokens": {}, "chunk_tokens": 50, "created": "x"}})",
          foreign.layers, foreign.d, dtype, first));
}

}  // namespace weft::testing
