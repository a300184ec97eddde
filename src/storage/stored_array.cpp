// SPDX-License-Identifier: Apache-2.0
#include "storage/stored_array.hpp"

#include <vector>

#include "base/error.hpp"

namespace weft::storage {

using kernels::Scalar;

Handle open_array(hid_t file, const std::string& path, const std::string& name) {
  if (H5Lexists(file, name.c_str(), H5P_DEFAULT) <= 0)
    throw error(ExitCode::data, "{}: /{} is missing; was the file written completely?", path, name);
  if (!is_hard_link(file, name))
    throw error(ExitCode::data, "{}: /{} is an external or soft link (links are not followed); copy the values", path,
                name);
  return Handle(H5Dopen2(file, name.c_str(), H5P_DEFAULT), H5Dclose, path + ": opening /" + name);
}

StoredArray locate_array(hid_t file, const std::string& path, const std::string& name, std::int64_t file_bytes,
                         std::initializer_list<kernels::Scalar> types, const char* types_text) {
  const auto refuse = [&](const std::string& why) { return error(ExitCode::data, "{}: /{} {}", path, name, why); };
  const Handle dataset = open_array(file, path, name);
  const Handle type(H5Dget_type(dataset), H5Tclose, path + ": reading the type of /" + name);
  StoredArray array;
  bool known = scalar_of(type, array.type);
  if (known) {
    known = false;
    for (const Scalar accepted : types) known = known || accepted == array.type;
  }
  if (!known) throw refuse(fmt::format("is {} (expected: {}); convert it", type_text(type), types_text));
  const std::vector<std::int64_t> shape = shape_of(dataset);
  if (shape.size() != 1) throw refuse(fmt::format("has {} dimensions (expected: one)", shape.size()));
  array.count = shape[0];
  if (array.count < 1) throw refuse("is empty; was the file written completely?");
  const Handle creation(H5Dget_create_plist(dataset), H5Pclose, path + ": reading the properties of /" + name);
  if (H5Pget_layout(creation) != H5D_CONTIGUOUS)
    throw refuse(
        fmt::format("is not stored contiguously (it is mapped into memory, which chunks and compression prevent); "
                    "rewrite the file: "
                    "h5repack -f NONE -l {}:CONTI IN OUT",
                    name));
  if (H5Pget_external_count(creation) > 0)
    throw refuse("stores its values in external files (not supported); copy the values into the file");
  const std::int64_t element = kernels::bytes_of(array.type);
  if (array.count > file_bytes / element)
    throw refuse(fmt::format("claims {} values of {} bytes in a file of {} bytes; is the file truncated?", array.count,
                             element, file_bytes));
  const haddr_t offset = H5Dget_offset(dataset);
  if (offset == HADDR_UNDEF) throw refuse("was never written; was the file written completely?");
  if (offset > static_cast<haddr_t>(file_bytes) ||
      static_cast<std::int64_t>(offset) > file_bytes - array.count * element)
    throw refuse(fmt::format("ends at byte {} of a file of {} bytes; is the file truncated?",
                             static_cast<std::uint64_t>(offset) + static_cast<std::uint64_t>(array.count * element),
                             file_bytes));
  array.offset = static_cast<std::int64_t>(offset);
  return array;
}

void write_array(hid_t file, const std::string& path, const char* name, Scalar type, std::int64_t count,
                 const void* data) {
  const std::string what = path + ": writing /" + name;
  const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, what);
  check(H5Pset_layout(creation, H5D_CONTIGUOUS), what);
  check(H5Pset_obj_track_times(creation, false), what);  // files of the same content are identical
  const hsize_t extent = static_cast<hsize_t>(count);
  const Handle space(H5Screate_simple(1, &extent, nullptr), H5Sclose, what);
  const Handle stored = type_of(type);
  Handle dataset(H5Dcreate2(file, name, stored, space, H5P_DEFAULT, creation, H5P_DEFAULT), H5Dclose, what);
  check(H5Dwrite(dataset, stored, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), what);
  dataset.close();
}

}  // namespace weft::storage
