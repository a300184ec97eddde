// SPDX-License-Identifier: Apache-2.0
//
// Wrapper of the HDF5 C API, serial driver. The library may be built without thread safety, and the prefetch thread,
// the checkpoint writer and the main thread all use it: every call requires `Lock`. Long transfers are split into
// pieces, so that no thread holds the lock for long.
#pragma once

#include <hdf5.h>

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.hpp"
#include "kernels/array.hpp"

namespace weft::storage {

/// Must be held during HDF5 calls. Recursive, so that functions that take it may call one another. The first use
/// disables the exit handler of the library (it would crash after a failed write) and the printing of its error stack.
class Lock {
 public:
  /// Before work, throws std::bad_alloc if less than 1 MiB of memory is left: HDF5 1.10 frees what it could not
  /// allocate in H5Dcreate2, and the process ends with SIGSEGV.
  explicit Lock(bool needs_memory = true);

 private:
  std::unique_lock<std::recursive_mutex> lock_;
};

/// An open HDF5 object, closed by the destructor. Writers must call `close()`, which reports errors.
class Handle {
 public:
  Handle() = default;
  /// Throws Error(io) "what failed (the library's innermost reason)" if id < 0; SystemError if a system call failed.
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

/// Throws like the constructor of Handle if status < 0.
void check(herr_t status, std::string_view what);

/// Opens a regular file read-only, without a lock: some file systems have none. The message says so if this library is
/// too old for the file.
Handle open_file(const std::filesystem::path& path);
/// Opens a file of another program: throws Error(data), but SystemError(io) if a system call of HDF5 failed.
Handle open_data_file(const std::filesystem::path& path);
/// "; is the file damaged?", or nothing for a reason that says what is wrong.
std::string_view damage_question(std::string_view why);
/// Runs `read` on an open file; its Error(io) becomes Error(data) "PATH: …; is the file damaged?". A failed system call
/// stays one of reading.
template <class Read>
auto with_damage_as_data_error(const std::string& path, Read&& read) {
  try {
    return read();
  } catch (const SystemError&) {
    throw;
  } catch (const Error& failure) {
    if (failure.code() != ExitCode::io) throw;
    const std::string_view why = failure.what();
    throw error(ExitCode::data, "{}{}{}", why.starts_with(path) ? "" : path + ": ", why, damage_question(why));
  }
}
/// Creates a new file; never overwrites. Version bounds are 1.10..1.10: all supported libraries read it, and its
/// metadata checksums detect bit flips. Metadata are stored in blocks of `metadata_bytes`, the first one at the start
/// of the file; 2048 is the default of HDF5.
Handle create_file(const std::filesystem::path& path, std::int64_t metadata_bytes = 2048);
/// The two parts of it: the properties, to which a file driver may be added, and the file.
Handle creation_access(std::int64_t metadata_bytes);
Handle create_file(const std::filesystem::path& path, const Handle& access);

/// The 16-bit types in files: IEEE half, and bf16 as an HDF5 float (fields 15,7,8,0,7, bias 127).
Handle bf16_type();
Handle half_type();
/// The stored type of a dataset, by its fields. Returns false for types that Weft does not support.
bool scalar_of(hid_t type, kernels::Scalar& scalar);
/// Any type for messages: "float64", "int32 big-endian", "text".
std::string type_text(hid_t type);
/// File and memory type of a Scalar. Both are equal, so that HDF5 copies raw bytes without conversion.
Handle type_of(kernels::Scalar scalar);

/// False if there is no link of this name, or a soft or external one. All groups on the path must exist.
bool is_hard_link(hid_t parent, const std::string& name);

std::vector<std::int64_t> shape_of(hid_t dataset);

void write_attribute(hid_t object, const std::string& name, std::string_view text);
void write_attribute(hid_t object, const std::string& name, std::int64_t value);
bool has_attribute(hid_t object, const std::string& name);
/// A string of fixed or variable length, at most 1 MiB.
std::string read_text_attribute(hid_t object, const std::string& name);
std::int64_t read_integer_attribute(hid_t object, const std::string& name);

std::string hdf5_version();

}  // namespace weft::storage
