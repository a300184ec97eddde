// SPDX-License-Identifier: Apache-2.0
//
// The examples of a micro-batch: the units whose gradients differentially private training bounds one by one.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/array.hpp"

namespace weft::kernels {

/// Example e has the rows [offsets[e], offsets[e + 1]), which may be none; rows outside all examples are ignored.
/// Products are launched from the offsets on the host: in a captured graph they are constants.
struct Examples {
  std::span<const std::int64_t> offsets = {};     ///< on the host, one more than examples; empty: no examples
  Array<const std::int64_t> device_offsets = {};  ///< the same numbers in the memory of the kernels

  std::int64_t count() const { return offsets.empty() ? 0 : static_cast<std::int64_t>(offsets.size()) - 1; }
  std::int64_t rows_of(std::int64_t e) const { return offsets[e + 1] - offsets[e]; }
  /// Number of rows of the longest example.
  std::int64_t most_rows() const {
    std::int64_t most = 0;
    for (std::int64_t e = 0; e < count(); ++e) most = rows_of(e) > most ? rows_of(e) : most;
    return most;
  }
};

/// Implementation that forms the products of examples. Results differ by rounding.
enum class ProductImplementation {
  library,  ///< the dense library, into a bounded workspace
  fused,    ///< tensor-core kernels without it (fused.hpp), where they apply; else the library
};

/// Bounds that hold for every call and determine the workspace of an operation on examples.
struct ExampleSizes {
  std::int64_t examples = 0;   ///< the most in one call
  std::int64_t most_rows = 0;  ///< the most of one example
  std::int64_t rows = 0;       ///< the most of all examples of a call
};

}  // namespace weft::kernels
