// SPDX-License-Identifier: Apache-2.0
//
// An activation file written by HDF5, hence valid for HDF5, whose layout depends on the bytes: types, shapes, chunks,
// filters, links, attributes, complete or partial data. Reaches the checks of Weft; damaged bytes are mostly rejected
// inside HDF5.
#include <hdf5.h>

#include <algorithm>
#include <array>

#include "storage/hdf5.hpp"
#include "storage/stored_array.hpp"
#include "tests/fuzz/activations.hpp"

namespace weft::fuzz {
namespace {

using storage::Handle;

/// A dimension: mostly small, sometimes larger than any memory.
hsize_t extent(Choices& choices) {
  const int kind = choices.byte();
  if (kind < 200) return static_cast<hsize_t>(1 + kind % 9);
  return choices.of<hsize_t>({0, 1, 64, 4097, (hsize_t{1} << 24), (hsize_t{1} << 24) + 1, hsize_t{1} << 31,
                              hsize_t{1} << 33, hsize_t{1} << 38, (hsize_t{1} << 38) + 1, hsize_t{1} << 46});
}

Handle element_type(Choices& choices) {
  const int kind = choices.byte() % 16;
  const auto copy = [](hid_t predefined) { return Handle(H5Tcopy(predefined), H5Tclose, "a type"); };
  switch (kind) {
    case 0:
      return copy(H5T_IEEE_F32BE);
    case 1:
      return copy(H5T_IEEE_F64LE);
    case 2:
      return copy(H5T_STD_I16LE);
    case 3:
    case 4:
      return copy(H5T_STD_U16LE);
    case 5: {
      Handle type(H5Tcreate(H5T_COMPOUND, 4), H5Tclose, "a type");
      H5Tinsert(type, "a", 0, H5T_IEEE_F32LE);
      return type;
    }
    case 6:
      return Handle(H5Tvlen_create(H5T_IEEE_F32LE), H5Tclose, "a type");
    case 7: {
      const hsize_t two = 2;
      return Handle(H5Tarray_create2(H5T_IEEE_F32LE, 1, &two), H5Tclose, "a type");
    }
    case 8: {
      Handle type = copy(H5T_IEEE_F32LE);  // 32 bits, but with different fields
      H5Tset_fields(type, 31, 20, 8, 0, 20);
      return type;
    }
    case 9:
      return Handle(H5Tcreate(H5T_OPAQUE, 1 + choices.byte()), H5Tclose, "a type");
    case 10:
    case 11:
      return storage::bf16_type();
    case 12:
      return storage::half_type();
    default:
      return copy(H5T_IEEE_F32LE);
  }
}

void filters(Choices& choices, hid_t creation, hid_t type) {
  switch (choices.byte() % 10) {
    case 0:
      H5Pset_deflate(creation, 9);
      break;
    case 1:
      H5Pset_shuffle(creation);
      H5Pset_deflate(creation, 1);
      break;
    case 2:
      H5Pset_fletcher32(creation);
      break;
    case 3:
      H5Pset_nbit(creation);
      break;
    case 4:
      if (H5Tget_class(type) == H5T_INTEGER) H5Pset_scaleoffset(creation, H5Z_SO_INT, 0);
      break;
    default:
      break;
  }
}

/// "inputs" or "targets" of one layer, or another object of that name.
void member(Choices& choices, hid_t file, hid_t group, const char* name) {
  const int kind = choices.byte() % 32;
  if (kind == 0) return;
  if (kind == 1) {
    const Handle other(H5Gcreate2(group, name, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT), H5Gclose, "a group");
    return;
  }
  if (kind == 2) {
    H5Lcreate_soft("/layer_0/inputs", group, name, H5P_DEFAULT, H5P_DEFAULT);
    return;
  }
  if (kind == 3) {
    H5Lcreate_external("chunk_0.hdf5", "/layer_0/inputs", group, name, H5P_DEFAULT, H5P_DEFAULT);
    return;
  }
  if (kind == 4) {
    H5Lcreate_hard(file, "/layer_0/inputs", group, name, H5P_DEFAULT, H5P_DEFAULT);
    return;
  }

  const Handle type = element_type(choices);
  const int rank = choices.one_in(16) ? choices.byte() % 4 : 2;
  std::array<hsize_t, 3> shape{}, chunk{};
  for (hsize_t& dimension : shape) dimension = extent(choices);
  for (hsize_t& dimension : chunk) dimension = std::max<hsize_t>(1, extent(choices));
  const Handle space(choices.one_in(32) ? H5Screate(H5S_NULL) : H5Screate_simple(rank, shape.data(), nullptr), H5Sclose,
                     "a space");
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "properties");
  switch (choices.byte() % 8) {
    case 0:
      H5Pset_layout(creation, H5D_COMPACT);
      break;
    case 1:
    case 2:
    case 3:
      H5Pset_chunk(creation, std::max(rank, 1), chunk.data());
      filters(choices, creation, type);
      break;
    case 4:
      if (choices.one_in(4)) H5Pset_external(creation, "chunk_0.hdf5", 0, H5F_UNLIMITED);
      break;
    case 5:
      if (choices.one_in(4)) H5Pset_virtual(creation, space, "chunk_0.hdf5", "/layer_0/inputs", space);
      break;
    default:
      break;
  }
  if (choices.one_in(4)) H5Pset_alloc_time(creation, choices.of({H5D_ALLOC_TIME_LATE, H5D_ALLOC_TIME_INCR}));
  const hid_t made = H5Dcreate2(group, name, type, space, H5P_DEFAULT, creation, H5P_DEFAULT);
  if (made < 0) return;  // rejected by HDF5
  const Handle dataset(made, H5Dclose, "a dataset");
  if (choices.one_in(8)) storage::write_attribute(dataset, "dtype", choices.of({"bf16", "bfloat16", "fp32", ""}));

  // Values in memory have the stored type: no conversion. Large datasets stay empty or get one row.
  const hssize_t points = H5Sget_simple_extent_npoints(space);
  const std::size_t size = H5Tget_size(type);
  const H5D_layout_t layout = H5Pget_layout(creation);
  const bool external = layout == H5D_VIRTUAL || H5Pget_external_count(creation) > 0;
  // HDF5 would allocate memory for a complete chunk and for the index of all chunks.
  bool large = false;
  for (std::size_t axis = 0; layout == H5D_CHUNKED && axis < 3; ++axis)
    large = large || chunk[axis] > 4097 || shape[axis] / chunk[axis] > 4097;
  if (points <= 0 || H5Tget_class(type) == H5T_VLEN || external || large || choices.one_in(8)) return;
  if (points <= 4096) {
    std::vector<unsigned char> values(static_cast<std::size_t>(points) * size);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<unsigned char>(i * 37 + 5);
    if (choices.one_in(8)) std::fill(values.begin(), values.end(), choices.byte());
    H5Dwrite(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data());
  } else if (rank == 2 && shape[1] <= 4096 && layout == H5D_CHUNKED) {
    const hsize_t start[2] = {0, 0}, count[2] = {1, shape[1]};
    const Handle rows(H5Dget_space(dataset), H5Sclose, "a space"),
        memory(H5Screate_simple(2, count, nullptr), H5Sclose, "a space");
    H5Sselect_hyperslab(rows, H5S_SELECT_SET, start, nullptr, count, nullptr);
    const std::vector<unsigned char> values(shape[1] * size, 1);
    H5Dwrite(dataset, type, memory, rows, H5P_DEFAULT, values.data());
  }
}

void root_attributes(Choices& choices, hid_t file) {
  const int kind = choices.byte() % 16;
  if (kind < 6) return;
  storage::write_attribute(file, "format", choices.of({"weft-activations", "weft-activations", "other", ""}));
  if (kind == 6)
    storage::write_attribute(file, "format_version", "one");
  else
    storage::write_attribute(file, "format_version", choices.of<std::int64_t>({1, 1, 1, 2, -1}));
  if (kind == 7) {  // of variable length
    const Handle type(H5Tcopy(H5T_C_S1), H5Tclose, "a type");
    H5Tset_size(type, H5T_VARIABLE);
    const Handle space(H5Screate(H5S_SCALAR), H5Sclose, "a space");
    const Handle attribute(H5Acreate2(file, "model", type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose, "an attribute");
    const char* text = "a model";
    if (!choices.one_in(4)) H5Awrite(attribute, type, &text);
  } else if (kind == 8) {  // two strings
    const Handle type(H5Tcopy(H5T_C_S1), H5Tclose, "a type");
    const hsize_t two = 2;
    const Handle space(H5Screate_simple(1, &two, nullptr), H5Sclose, "a space");
    const Handle attribute(H5Acreate2(file, "model", type, space, H5P_DEFAULT, H5P_DEFAULT), H5Aclose, "an attribute");
  } else if (kind == 9) {
    storage::write_attribute(file, "model", std::int64_t{7});
  }
}

/// Token ids and documents: mostly of the right type and number, with values from the bytes.
void tokens(Choices& choices, hid_t file, const std::string& path) {
  const auto put = [&](const char* name, kernels::Scalar type, int count) {
    if (choices.one_in(16)) return;
    std::vector<std::int64_t> values(static_cast<std::size_t>(count));
    for (std::int64_t& value : values) value = choices.byte() % 8;
    if (choices.one_in(2)) std::sort(values.begin(), values.end());
    if (choices.one_in(16)) values.assign(values.size(), -1);
    std::vector<std::int32_t> narrow(values.begin(), values.end());
    const bool other = choices.one_in(16);
    if (choices.one_in(32))
      H5Lcreate_soft("/layer_0/inputs", file, name, H5P_DEFAULT, H5P_DEFAULT);
    else if (type == kernels::Scalar::i32)
      storage::write_array(file, path, name, other ? kernels::Scalar::fp32 : type, count, narrow.data());
    else
      storage::write_array(file, path, name, other ? kernels::Scalar::u64 : type, count, values.data());
  };
  put("tokens", kernels::Scalar::i32, 1 + choices.byte() % 9);
  put("documents", kernels::Scalar::i64, 1 + choices.byte() % 4);
}

void build(Choices& choices, const std::string& path) {
  const storage::Lock lock;
  const Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose, "properties"),
      creation(H5Pcreate(H5P_FILE_CREATE), H5Pclose, "properties");
  if (choices.one_in(2)) H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110);
  if (choices.one_in(16)) H5Pset_userblock(creation, 512);
  const Handle file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation, access), H5Fclose, "a file");
  root_attributes(choices, file);
  if (choices.one_in(2)) tokens(choices, file, path);
  const int layers = choices.byte() % 4;
  for (int i = 0; i < layers; ++i) {
    const std::string name =
        choices.one_in(32) ? "layer_" + std::to_string(choices.byte()) : fmt::format("layer_{}", i);
    if (choices.one_in(32)) {
      H5Lcreate_soft("/layer_0", file, name.c_str(), H5P_DEFAULT, H5P_DEFAULT);
      continue;
    }
    const hid_t made = H5Gcreate2(file, name.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    if (made < 0) continue;
    const Handle group(made, H5Gclose, "a group");
    // Inputs and targets are mostly alike, as required.
    Choices same = choices;
    member(choices, file, group, "inputs");
    member(choices.one_in(4) ? choices : same, file, group, "targets");
  }
  H5Eclear2(H5E_DEFAULT);
}

}  // namespace
}  // namespace weft::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  static const fuzz::Scratch scratch;
  fuzz::Choices choices(data, size);
  fuzz::build(choices, scratch / "chunk_0.hdf5");
  fuzz::read_dataset(scratch.path());
  return 0;
}
