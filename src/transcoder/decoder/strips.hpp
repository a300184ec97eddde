// SPDX-License-Identifier: Apache-2.0
//
// Strips: a feature's row holds its vectors for all targets one after the other (cross_layer), or for its own layer
// (per_layer). It needs only the products over lists.
#pragma once

#include "transcoder/decoder/decoder.hpp"

namespace weft::transcoder {

class Strips final : public SparseDecoder {
 public:
  explicit Strips(const Shape& shape) : SparseDecoder(shape) {}
};

}  // namespace weft::transcoder
