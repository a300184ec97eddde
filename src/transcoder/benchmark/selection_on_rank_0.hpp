// SPDX-License-Identifier: Apache-2.0
//
// Baseline (parallel.selection = "rank_0"): every rank computes its pre-activations, rank 0 collects all of them,
// selects like a single process and sends the lists to all ranks, each of which keeps its own part. Same result bit for
// bit as the selectors of transcoder/selection/; measures what selecting on all ranks saves (docs/performance.md).
// batch_topk only.
//
//   bytes sent per rank and step   its own pre-activations: N/D * L * F/G * (2 or 4); rank 0 the lists to each: K * 8
//   memory of rank 0               all pre-activations, N * L * F * (2 or 4)
#pragma once

#include "transcoder/selection/selection.hpp"

namespace weft::transcoder {

/// Sets sizes.rank_0_device_bytes and rank_0_host_bytes: the additional memory of rank 0, which needs most.
void add_bytes_on_rank_0(const SelectionSpec&, SelectionSizes& sizes);

/// Collective over the grid. `select` waits on the host.
std::unique_ptr<Selector> make_selector_on_rank_0(const SelectionSpec&, const SelectionSizes&, const parallel::Grid&,
                                                  const kernels::Execution&);

}  // namespace weft::transcoder
