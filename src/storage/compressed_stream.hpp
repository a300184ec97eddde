// SPDX-License-Identifier: Apache-2.0
//
// Unpacks a range of bytes of a file in order: zstd frames, an lz4 frame, or plain bytes. Memory is that of the
// library's history buffer (at most 128 MiB) and does not depend on sizes in the file.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "storage/posix_file.hpp"

namespace weft::storage {

enum class Compression { none, zstd, lz4 };
/// "zstd", "lz4", "none".
std::string_view name_of(Compression);
/// True if this program was built with the library that decompresses this form.
bool can_unpack(Compression);

class CompressedStream {
 public:
  /// Bytes [begin, begin + bytes) of `file`, which must outlive this. `what` begins the messages: file and item. Throws
  /// Error(usage) if this program cannot unpack them.
  CompressedStream(const PosixFile& file, std::string what, std::int64_t begin, std::int64_t bytes, Compression);
  CompressedStream(CompressedStream&&) noexcept;
  ~CompressedStream();

  /// The next `bytes` unpacked bytes. Throws Error(data) if the values are damaged or end before.
  void read(void* to, std::int64_t bytes);
  /// Throws Error(data) if values are left.
  void require_end();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft::storage
