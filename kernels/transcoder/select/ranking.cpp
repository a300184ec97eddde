// SPDX-License-Identifier: Apache-2.0
//
// Connects the implementations in ranking_portable.cpp and ranking_cuda.cu of the kernels that run for every tile of a
// selection, also in its recorded loop. The others run through Kokkos everywhere.
#include "kernels/transcoder/select/ranking.hpp"

#include "kernels/dispatch.hpp"

namespace weft::kernels {

namespace portable {
decltype(kernels::rank_tile) rank_tile;
decltype(kernels::standardise_tile) standardise_tile;
}  // namespace portable

namespace cuda {
decltype(kernels::rank_tile) rank_tile;
decltype(kernels::standardise_tile) standardise_tile;
}  // namespace cuda

void rank_tile(const Execution& execution, AnyMatrix product, Array<const float> bias, Array<const float> norm) {
  dispatch<portable::rank_tile, cuda::rank_tile>(execution, product, bias, norm);
}

void standardise_tile(const Execution& execution, AnyMatrix product, Array<const float> bias, Array<const float> mean,
                      Array<const float> spread) {
  dispatch<portable::standardise_tile, cuda::standardise_tile>(execution, product, bias, mean, spread);
}

}  // namespace weft::kernels
