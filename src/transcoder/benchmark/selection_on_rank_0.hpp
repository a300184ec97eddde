// SPDX-License-Identifier: Apache-2.0
//
// Selection over the batch in the way that comes to mind first: every rank makes its pre-activations, rank 0 collects
// them all and selects as if it were alone, everybody is sent the lists and keeps its own part. The result is that of
// transcoder/selection.hpp; it is there to measure what selecting everywhere saves (docs/performance.md).
//
//   bytes a rank sends per step   its own pre-activations: N/D * L * F/G * (2 or 4); rank 0 the lists to each: K * 8
//   memory of rank 0              all of them, N * L * F * (2 or 4)
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "parallel/device_communicator.hpp"
#include "transcoder/selection/selection.hpp"

namespace weft::transcoder {

class SelectionOnRankZero {
 public:
  /// Bytes where the kernels run and on the host: of rank 0, which needs most.
  struct Memory {
    std::int64_t device = 0, host = 0;
  };
  static Memory memory(const ModelSettings&, const SelectionShape&, const parallel::GridShape&, Precision,
                       kernels::Backend);

  /// Collective over the grid. `sizes`: of this rank's tiles.
  SelectionOnRankZero(const ModelSettings&, const SelectionShape&, const SelectionSizes& sizes, const parallel::Grid&,
                      const kernels::Execution&, Precision);

  /// As Selection::select. Sets all arrays of `activations`, whose sizes the caller has set, and `statistics` but for
  /// the entries. Collective; the host waits.
  void select(std::int64_t n_tokens_total, std::span<const kernels::Array<const float>> bias_of_layer,
              const Selection::Producer&, const kernels::SparseActivations& activations,
              SelectionStatistics& statistics);

  /// Of rank 0's selection, which alone has any.
  std::optional<Selection::ControllerState> controller_state();
  parallel::DeviceCommunicator& exchange() { return exchange_; }
  const parallel::DeviceCommunicator& exchange() const { return exchange_; }

 private:
  /// The products of one layer on one rank: where they lie among all, and what they are of.
  struct Piece {
    parallel::Range tokens, features;
    std::int64_t offset, stride;  // elements
  };
  parallel::ExchangeBuffer buffer(std::int64_t bytes) const;
  std::vector<Piece> pieces_of_layer(std::int64_t n_tokens_total) const;  // of all ranks, in their order
  void gather(std::int64_t n_tokens_total, std::span<const kernels::Array<const float>> bias_of_layer,
              const Selection::Producer&);
  void fill(const kernels::Execution&, std::int64_t n_tokens_total, const TileRequest&,
            kernels::AnyMatrix product) const;
  void share_lists(std::int64_t n_tokens_total, const kernels::SparseActivations&, SelectionStatistics&);

  SelectionShape shape_;
  SelectionSizes sizes_;         // of a selection everywhere: its tiles
  std::int64_t lists_capacity_;  // entries of all ranks
  const parallel::Grid& grid_;
  kernels::Execution execution_;
  kernels::Scalar type_;
  parallel::Grid alone_;
  parallel::DeviceCommunicator exchange_;
  parallel::ExchangeBuffer own_;                        // this rank's products of a layer
  parallel::ExchangeBuffer all_;                        // rank 0: [L] products of a layer, rank after rank
  parallel::ExchangeBuffer bias_;                       // rank 0: [L, F]
  std::optional<Selection> select_;                     // rank 0
  parallel::ExchangeBuffer row_offsets_, key_, value_;  // other ranks: the lists of rank 0
  kernels::SparseActivations lists_;
};

}  // namespace weft::transcoder
