// SPDX-License-Identifier: Apache-2.0
//
// The data axis of models whose gradients are formed in memory (AccumulatingSink): ranks that hold the same parameters
// and work on different examples. Gradients are reduced to the rank that owns the rows, which alone has their moments
// and updates them; then the new weights are gathered (ZeRO stage 1; Rajbhandari et al. 2020, arXiv 1910.02054).
//
//   exchange.begin_step();
//   exchange.start_weights();          // those that the last step has updated
//   exchange.use_weights(unit, next);  // before the weights of a unit are read
//   …
//   exchange.reduce_from(first);   // in the last micro-batch: gradients from `first` on are complete
//   exchange.reduce();             // after it: of the others
//   …                              // each rank updates its owned rows
//   exchange.end_step();
//
// Between steps a rank has the new weights of its own rows alone, until `start_weights`.
//
// With `overlap` each exchange starts as early as possible: gradients of a layer while those of earlier layers are
// formed, weights of a layer while earlier layers are computed. Between GPUs exchanges then run on a separate stream;
// on the host they take place at the same points, and the computation waits. Otherwise reduce_from does nothing. The
// bits are the same.
//
// With KeptGradients::of_owned_rows (stage 2) gradients are reduced in every micro-batch, unit by unit, and added to
// those of the owned rows. All ranks then have equally many micro-batches, some of them without examples.
//
// With WeightSlots (stage 3) a rank keeps the weights of its owned rows. Those of a unit are gathered before each use
// unless they are still in their slot, while the unit before is computed.
//
// Contributions are added in rank order, in fp32: the same bits in every run and on every rank. With D ranks and P
// elements of matrices a rank sends 4 P (D - 1) / D bytes of gradients, and as many of fp32 weights; half of bf16
// weights, and of fp32 weights in two planes of which products read one.
// Vectors are few: every rank receives them from all and updates all of them.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "device/stream.hpp"
#include "model/gradient_sink.hpp"
#include "model/parameters.hpp"
#include "model/step_arena.hpp"
#include "model/weight_slots.hpp"
#include "parallel/device_communicator.hpp"

namespace weft::model {

/// Sends the rows that each rank of the data axis has updated of a matrix to all. Collective.
void gather_updated_rows(parallel::DeviceCommunicator& data_axis, const kernels::ParameterRows& matrix,
                         GatheredWeights gathered = GatheredWeights::all);

class DataParallel {
 public:
  static constexpr std::size_t kNoUnit = std::numeric_limits<std::size_t>::max();

  /// Memory of the exchanges; empty if the axis has one rank.
  struct Buffers {
    Buffers() = default;
    /// gathered_bytes: the most that `all_gather` brings together.
    Buffers(std::span<const ParameterSpec> specs, const parallel::GridShape&, std::int64_t gathered_bytes, StepArena&,
            KeptGradients kept = KeptGradients::of_held_rows);
    parallel::ExchangeBuffer received;  ///< [data ranks, largest part] fp32: rows of a matrix, or all vectors
    kernels::Array<std::byte> packed;   ///< rows for all ranks of a matrix that is sent in several parts; or empty
    std::int64_t largest_message = 0;   ///< bytes
  };

  /// References must outlive the object. slots: of the parameters; null: their weights are not gathered in passes.
  /// Collective.
  DataParallel(const Parameters&, AccumulatingSink&, const parallel::Grid&, const kernels::Execution&, Buffers&&,
               bool overlap, GatheredWeights, const WeightSlots* slots = nullptr);

  bool active() const { return ranks_.has_value(); }
  /// True on rank 0 of the axis, which alone counts what is the same on all its ranks.
  bool is_first() const { return !active() || ranks_->rank() == 0; }

  /// The gradients of the owned rows become the sums over all ranks; the others are then undefined. reduce_from: of the
  /// matrices with number >= first. reduce: of those that remain, and of all vectors. Collective.
  void reduce_from(std::size_t first);
  void reduce();
  /// True if matrices are reduced in every micro-batch, from `first` = 0 on at its end.
  bool in_micro_batches() const { return gradients_.kept() == KeptGradients::of_owned_rows; }
  /// Later work may form gradients where those were that have been reduced.
  void await_reductions();

  /// Before the work of a step, where it is not replayed.
  void begin_step();
  /// After each step: each rank has updated the weights of its rows.
  void end_step();
  /// Sends every rank the weights of the rows that the others own, in the order of the parameters, if they have
  /// changed. With slots, those that are there are no longer valid. Collective.
  void start_weights();
  /// Later work of the computation finds the weights of `unit`. With slots: gathers them, unless they are there, and
  /// begins to gather those of `next` (kNoUnit: of none). Units that have one of these slots may no longer be read.
  /// Collective.
  void use_weights(std::size_t unit, std::size_t next);
  /// Later work finds all weights; with slots: nothing, since every pass gathers them.
  void await_weights();

  /// Collectives of DeviceCommunicator over the ranks of the axis, in the order of the computation. `active()` only.
  /// Collective.
  void all_gather(void* all, std::span<const std::int64_t> bytes, const char* name);
  void sum(kernels::Array<double> values, const char* name);
  void maximum(kernels::Array<std::int32_t> values, const char* name);
  /// The largest of the values of the ranks, on the host. Collective.
  std::int64_t most(std::int64_t value) const;
  bool leaves_the_host_free() const { return ranks_->leaves_the_host_free(); }

  /// When the computation waits for exchanges.
  device::IdleClock& idle() { return idle_; }
  const device::IdleClock& idle() const { return idle_; }
  bool is_timed() const { return active() && ranks_->is_timed(); }
  parallel::Exchanges exchanges() const { return active() ? ranks_->exchanges() : parallel::Exchanges(); }

 private:
  const kernels::Execution& communication() const { return stream_ ? stream_->execution() : execution_; }
  void begin();
  void end();
  void await(const device::Event& event);
  void await_exchanges();
  void reduce_matrix(std::size_t parameter);
  void reduce_rows(std::size_t parameter, parallel::Range rows, bool packed);
  void reduce_matrices(std::size_t first);
  void add_up(std::int64_t elements, float* out);
  void await_weights_below(std::size_t end);
  void gather_unit(std::size_t unit);
  void gather_matrix(std::size_t parameter);

  const Parameters& parameters_;
  AccumulatingSink& gradients_;
  const kernels::Execution execution_;
  const bool overlap_;
  const GatheredWeights gathered_;
  const WeightSlots* const slots_;  // null: none
  device::IdleClock idle_;
  std::optional<device::Stream> stream_;  // stream of the exchanges; empty: that of the computation
  std::optional<parallel::DeviceCommunicator> ranks_;
  const parallel::Communicator* host_ranks_ = nullptr;
  Buffers buffers_;
  device::Event computed_, exchanged_, reduced_;
  std::vector<device::Event> arrived_;  // by parameter: its weights, and those of all before it; or by slot
  std::vector<std::size_t> in_slot_;    // by slot: the unit whose weights are there
  std::vector<std::size_t> unit_end_;   // by unit: number of the parameter after it
  bool changed_ = false;                // weights, since they were gathered
  bool adds_ = false;                   // reduced gradients: to those of the micro-batches before
  bool reducing_ = false;               // the computation has not waited for the last reduction of this step
  bool in_step_ = false;                // waits count as idle time of the step
  std::size_t complete_;                // gradients from here on are reduced
  std::size_t awaited_;                 // the computation waits for the weights of parameters below
};

}  // namespace weft::model
