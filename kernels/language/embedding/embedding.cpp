// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in embedding_portable.cpp and embedding_cuda.cu.
#include "kernels/language/embedding/embedding.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::embed) embed;
decltype(kernels::dropout) dropout;
}  // namespace portable

namespace cuda {
decltype(kernels::embed) embed;
decltype(kernels::dropout) dropout;
}  // namespace cuda

void embed(const Execution& execution, AnyMatrix tokens, std::int64_t first_id, Array<const std::uint32_t> ids,
           AnyMatrix positions, Array<const std::int32_t> position, AnyMatrix out, Array<Moments> moments) {
  dispatch<portable::embed, cuda::embed>(execution, tokens, first_id, ids, positions, position, out, moments);
}

void dropout(const Execution& execution, const DropoutSite& site, const AdamStep* step, AnyMatrix x) {
  dispatch<portable::dropout, cuda::dropout>(execution, site, step, x);
}

}  // namespace weft::kernels
