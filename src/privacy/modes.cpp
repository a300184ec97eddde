// SPDX-License-Identifier: Apache-2.0
#include "privacy/modes.hpp"

#include <utility>

namespace weft::privacy {

std::unique_ptr<Clipping> make_clipping(const ClippingContext& context, ClippingBuffers&& buffers) {
  if (context.settings.algorithm == Algorithm::naive) return make_naive(context, std::move(buffers));
  if (context.settings.mode == Mode::materialise) return make_materialise(context, std::move(buffers));
  if (context.settings.mode == Mode::two_pass) return make_two_pass(context, std::move(buffers));
  return make_book_keeping(context, std::move(buffers));
}

}  // namespace weft::privacy
