// SPDX-License-Identifier: Apache-2.0
//
// The modes of clipping, one class in a file of its own each: materialise.cpp, book_keeping.cpp, two_pass.cpp,
// naive.cpp.
#pragma once

#include <memory>

#include "privacy/clipping.hpp"

namespace weft::privacy {

std::unique_ptr<Clipping> make_materialise(const ClippingContext&, ClippingBuffers&&);
std::unique_ptr<Clipping> make_book_keeping(const ClippingContext&, ClippingBuffers&&);
std::unique_ptr<Clipping> make_two_pass(const ClippingContext&, ClippingBuffers&&);
std::unique_ptr<Clipping> make_naive(const ClippingContext&, ClippingBuffers&&);

/// Makes the mode that settings.algorithm and settings.mode select; the mode is not automatic unless the algorithm is
/// naive.
std::unique_ptr<Clipping> make_clipping(const ClippingContext&, ClippingBuffers&&);

}  // namespace weft::privacy
