// SPDX-License-Identifier: Apache-2.0
//
// Selector by the portable kernels: tile by tile; the host controls the passes, ranks communicate by MPI.
//
// batch_topk. Each rank filters its tiles with one threshold per group into a bounded list. If too many entries pass,
// the tiles are computed again: histograms of all keys give a threshold that at least K of this rank's entries reach
// (the K-th key of one rank is never above that of all), and if ties alone overflow the list, only the first of them in
// (token, layer, feature) order enter. Then three rounds of histograms, summed over all ranks, give the exact K-th key;
// ties at it are admitted by exchanged counts per (token, layer). The first threshold is slightly below the last
// batch's K-th key. If it is wrong, another pass is made.
//
//   bytes sent per rank and step   3 * groups * 2048 * 8; if ties are cut also N/D * L * 4 on the feature axis
//
// topk. Each rank keeps the best `budget` entries of each token (and layer). On the feature axis each rank merges the
// lists of a slice of the tokens and returns a cut-off per token (and layer): N/D * groups * (budget + 1) * 8 bytes.
//
// relu. All positive entries, without communication.
#pragma once

#include "transcoder/selection/selection.hpp"

namespace weft::transcoder {

/// Sets buffers.host.
void take_host_selector_buffers(const SelectionSpec&, SelectionBuffers& buffers, model::StepArena&);

std::unique_ptr<Selector> make_host_selector(const SelectionSpec&, const SelectionBuffers&, const parallel::Grid&,
                                             const kernels::Execution&, const SumDecorator&);

}  // namespace weft::transcoder
