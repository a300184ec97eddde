// SPDX-License-Identifier: Apache-2.0
//
// HDF5 as Weft uses it: serial driver, C API, one mutex. The library may be built without thread safety, and the
// prefetch thread, the checkpoint writer and the main thread all use it: every call is made while holding `Lock`. Long
// transfers go in pieces, so that no thread holds it for long.
#pragma once

#include <hdf5.h>

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/array.hpp"

namespace weft::storage {

/// Held around HDF5 calls; recursive, so that functions which take it may call one another. The first use anywhere
/// tells the library not to install an exit handler (it would crash after a failed write) and not to print its error
/// stack.
class Lock {
 public:
  Lock();

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

/// An open HDF5 object. Closes itself; errors of closing after a write are reported by `close()`, which a writer must
/// call.
class Handle {
 public:
  Handle() = default;
  /// Throws Error(io) naming `what` and the library's reason when id < 0.
  Handle(hid_t id, herr_t (*close)(hid_t), std::string_view what);
  Handle(Handle&& other) noexcept;
  Handle& operator=(Handle&& other) noexcept;
  ~Handle();

  void close();
  operator hid_t() const { return id_; }

 private:
  hid_t id_ = -1;
  herr_t (*close_)(hid_t) = nullptr;
  std::string what_;
};

/// Throws Error(io) "what (the library's innermost reason)" when status < 0.
void check(herr_t status, std::string_view what);

/// Opens read-only. A layout that this library is too old for is named as such.
Handle open_file(const std::filesystem::path& path);
/// Creates a new file (never overwrites) with version bounds 1.10..1.10, which every supported library reads and whose
/// metadata checksums leave no bit flip unnoticed. What describes the data goes in blocks of `metadata_bytes`, the
/// first at the file's beginning; 2048 is HDF5's own choice.
Handle create_file(const std::filesystem::path& path, std::int64_t metadata_bytes = 2048);

/// The 16-bit types in files: IEEE half, and bf16 as a true HDF5 float (fields 15,7,8,0,7, bias 127).
Handle bf16_type();
Handle half_type();
/// The stored type of a dataset, by its fields. Returns false for what Weft does not read.
bool scalar_of(hid_t type, kernels::Scalar& scalar);
/// File and memory type of a Scalar: equal, so that HDF5 moves raw bytes and converts nothing.
Handle type_of(kernels::Scalar scalar);

std::vector<std::int64_t> shape_of(hid_t dataset);

void write_attribute(hid_t object, const std::string& name, std::string_view text);
void write_attribute(hid_t object, const std::string& name, std::int64_t value);
bool has_attribute(hid_t object, const std::string& name);
/// Fixed or variable length; at most 1 MiB is accepted.
std::string read_text_attribute(hid_t object, const std::string& name);
std::int64_t read_integer_attribute(hid_t object, const std::string& name);

std::string hdf5_version();

}  // namespace weft::storage
