// SPDX-License-Identifier: Apache-2.0
//
// Division of a kernel's workspace into arrays. One function lays a workspace out; called without memory it counts the
// bytes, so the size asked for and the size used cannot differ.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft::kernels {

class WorkspaceLayout {
 public:
  /// data == nullptr: only counts.
  explicit WorkspaceLayout(std::byte* data) : data_(data) {}

  /// The next `count` elements; arrays begin at multiples of 256 bytes.
  template <class T>
  T* take(std::int64_t count) {
    T* const array = reinterpret_cast<T*>(data_ + bytes_);
    bytes_ += (count * static_cast<std::int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }

  std::int64_t bytes() const { return bytes_; }

 private:
  static constexpr std::int64_t kAlignment = 256;
  std::byte* data_;
  std::int64_t bytes_ = 0;
};

}  // namespace weft::kernels
