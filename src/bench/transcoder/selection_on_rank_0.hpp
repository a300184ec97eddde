// SPDX-License-Identifier: Apache-2.0
//
// Baseline (benchmark.selection = "rank_0"): every rank computes its pre-activations, rank 0 collects all of them,
// selects like a single process and sends the lists to all ranks, each of which keeps its own part. Same result bit for
// bit as the drivers of transcoder/selection/; measures what selecting on all ranks saves (docs/performance.md).
// batch_topk only, with a constant k.
//
//   bytes sent per rank and step   its own pre-activations: N/D * L * F/G * (2 or 4); rank 0 the lists to each: K * 8
//   memory of rank 0               all pre-activations, N * L * F * (2 or 4)
#pragma once

#include "transcoder/selection/drivers.hpp"

namespace weft::bench {

/// `select` of the selectors waits on the host. A single rank has the driver of its backend.
class SelectionOnRankZero final : public transcoder::SelectorFactory {
 public:
  /// Counts the memory of rank 0, which needs most.
  void take(const transcoder::SelectionSpec&, transcoder::SelectionBuffers&, model::StepArena&) const override;
  std::unique_ptr<transcoder::Selector> make(const transcoder::SelectionSpec&, const transcoder::SelectionBuffers&,
                                             const parallel::Grid&, const kernels::Execution&) const override;
};

}  // namespace weft::bench
