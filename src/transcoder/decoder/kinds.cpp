// SPDX-License-Identifier: Apache-2.0
#include "transcoder/decoder/kinds.hpp"

#include "transcoder/decoder/strips.hpp"
#include "transcoder/decoder/tied_by_target.hpp"
#include "transcoder/decoder/tied_strips.hpp"

namespace weft::transcoder {

std::unique_ptr<SparseDecoder> make_decoder(const SparseDecoder::Sizes& sizes,
                                            const SparseDecoder::ForwardSizes& forward, model::StepArena& arena) {
  switch (sizes.shape.decoder) {
    case Decoder::cross_layer:
    case Decoder::per_layer:
      return std::make_unique<Strips>(sizes.shape);
    case Decoder::tied:
      return std::make_unique<Tied>(sizes.shape);
    case Decoder::tied_target:
      return std::make_unique<TiedByTarget>(sizes, forward, arena);
  }
  return nullptr;
}

}  // namespace weft::transcoder
