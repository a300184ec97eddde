// SPDX-License-Identifier: Apache-2.0
//
// The list of decoders. A new one is a file with a class and a line in kinds.cpp.
#pragma once

#include <memory>

#include "transcoder/decoder/decoder.hpp"

namespace weft::transcoder {

/// The decoder that the shape requires, with its memory of the forward pass.
std::unique_ptr<SparseDecoder> make_decoder(const SparseDecoder::Sizes&, const SparseDecoder::ForwardSizes&,
                                            model::StepArena&);

}  // namespace weft::transcoder
