// SPDX-License-Identifier: Apache-2.0
//
// The safetensors container: an unsigned 64-bit little-endian length, a JSON header of that length, and the tensors'
// values, row-major, little-endian and without holes:
//
//   {"__metadata__": {"name": "text"}, "tensor": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …}
//
// A file is untrusted input. The header is bounded by the file and by kLargestHeader, names are unique, a tensor's
// bytes equal its shape times its type, and the tensors cover the rest of the file exactly once. Values are read and
// written in parts, so that memory does not depend on the size of a tensor.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.hpp"
#include "kernels/array.hpp"
#include "storage/posix_file.hpp"

namespace weft::storage {

constexpr std::int64_t kLargestHeader = std::int64_t{16} << 20;  // bytes; a tensor takes about 100

struct SafetensorsEntry {
  std::string name;
  std::string dtype;                    ///< type as named in the file: "F32", "BF16", …
  std::optional<kernels::Scalar> type;  ///< type of floating-point values that can be read: fp32, fp16, bf16, fp64
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0, end = 0;  ///< bytes of the file

  std::int64_t elements() const;
};

/// "[2, 3]", for messages.
std::string shape_text(const std::vector<std::int64_t>& shape);

/// Checks a header and returns its tensors in the order of their values. `data_begin`, `file_bytes`: where the values
/// begin, and the size of the file. Texts of "__metadata__" are added to `metadata`. Throws Error(data) that begins
/// with `path`.
std::vector<SafetensorsEntry> parse_safetensors_header(const std::string& path, std::string_view header,
                                                       std::int64_t data_begin, std::int64_t file_bytes,
                                                       std::map<std::string, std::string>& metadata);

class SafetensorsFile {
 public:
  /// Opens read-only and checks the header. Throws Error(data) for a file that is not one, SystemError(io) if it cannot
  /// be read.
  explicit SafetensorsFile(std::string path);

  const std::string& path() const { return path_; }
  std::span<const SafetensorsEntry> entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// nullptr if there is no tensor of this name.
  const SafetensorsEntry* find(std::string_view name) const;

  /// Reads elements [first, first + count) in row-major order; fp64 is rounded to fp32, the other types are exact.
  /// Throws Error(data) that names file and tensor if it has no floating-point values.
  void read(const SafetensorsEntry& entry, std::int64_t first, std::int64_t count, float* to) const;

 private:
  std::string path_;
  PosixFile file_;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::size_t, std::less<>> index_;  // name -> place in entries_
  std::map<std::string, std::string> metadata_;
};

/// Writes one file: first the header, then parts of the tensors in any order, each element once.
class SafetensorsWriter {
 public:
  struct Tensor {
    std::string name;
    kernels::Scalar type = kernels::Scalar::fp32;  ///< fp32 or bf16
    std::vector<std::int64_t> shape;
  };

  /// Creates the file, in place of a file or symbolic link of this name. Throws Error(io).
  SafetensorsWriter(std::filesystem::path path, std::vector<Tensor> tensors,
                    const std::map<std::string, std::string>& metadata = {});

  std::span<const Tensor> tensors() const { return tensors_; }
  /// Writes elements [first, first + values.size()) of a tensor; bf16 is rounded to nearest even.
  void write(std::size_t tensor, std::int64_t first, std::span<const float> values);
  /// Syncs and closes the file. Throws Error(io), and Error(internal) unless every element was written.
  void finish();

 private:
  std::filesystem::path path_;
  std::vector<Tensor> tensors_;
  Descriptor file_;
  std::vector<std::int64_t> begin_, left_;  // by tensor: offset of its values in the file, elements not yet written
  std::vector<std::uint16_t> packed_;       // bf16 patterns of one write
};

}  // namespace weft::storage
