// SPDX-License-Identifier: Apache-2.0
//
// Typed arrays from one piece of memory. The code that places them also measures: without memory a Workspace only
// counts bytes, so that a plan and an allocation cannot differ.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/array.hpp"

namespace weft::kernels {

class Workspace {
 public:
  static constexpr std::int64_t kAlignment = 256;  ///< alignment of every array, in bytes from `base`

  /// base = null: measure.
  explicit Workspace(void* base) : base_(static_cast<std::byte*>(base)) {}

  /// The next array. Its data are null when measuring, and for size 0.
  template <class T>
  Array<T> take(std::int64_t size) {
    const Array<T> array{base_ == nullptr || size == 0 ? nullptr : reinterpret_cast<T*>(base_ + bytes_), size};
    bytes_ += (size * static_cast<std::int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return array;
  }
  /// Taken so far.
  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::int64_t bytes_ = 0;
};

}  // namespace weft::kernels
