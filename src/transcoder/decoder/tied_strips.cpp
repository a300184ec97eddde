// SPDX-License-Identifier: Apache-2.0
#include "transcoder/decoder/tied_strips.hpp"

#include "kernels/transcoder/decode/tied.hpp"

namespace weft::transcoder {

void Tied::form(parallel::Range tokens, parallel::Range layers, kernels::AnyMatrix partial) const {
  SparseDecoder::form(tokens, layers, partial);
  kernels::sum_to_later_layers(execution_, partial, shape_.d_model);
}

void Tied::prepare(const Lists&, kernels::AnyMatrix gradient_rows, device::Event& read) {
  read.hold_back(execution_);
  kernels::sum_from_later_layers(execution_, gradient_rows, shape_.d_model);
}

}  // namespace weft::transcoder
