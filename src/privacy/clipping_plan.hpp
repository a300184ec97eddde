// SPDX-License-Identifier: Apache-2.0
//
// What clipping.cpp and the plan of its memory share: which products there are, and how their norms are formed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "privacy/clipping.hpp"

namespace weft::privacy {

inline constexpr std::int64_t kKeptAlignment = 256;  ///< bytes, of kept rows

/// True for a parameter that is the table of a lookup and no matrix of a product.
bool is_table(const ClippingShape&, std::size_t parameter);

/// each(first parameter, rows of all, columns) for the matrices of products that take their gradients together.
template <class Each>
void for_each_product(std::span<const training::ParameterSpec> specs, const ClippingShape& shape, const Each& each) {
  for (std::size_t i = 0; i < specs.size();) {
    std::int64_t out = specs[i].rows();
    std::size_t next = i + 1;
    while (next < specs.size() && !specs[i].group.empty() && specs[next].group == specs[i].group)
      out += specs[next++].rows();
    if (specs[i].is_matrix() && !is_table(shape, i)) each(i, out, specs[i].columns());
    i = next;
  }
}

/// Rows of a gradient as products form it where its rows of output gradients have columns of zeros for the rows of
/// zeros after the parameter (ParameterSpec::row_multiple). `out`: those of the parameters themselves.
std::int64_t padded_rows(const training::ParameterSpec&, std::int64_t out);

/// How the norms of a product are formed.
kernels::NormMethod method_of(const Settings&, std::int64_t in, std::int64_t out, const ClippingShape&);

}  // namespace weft::privacy
