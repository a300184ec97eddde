// SPDX-License-Identifier: Apache-2.0
//
// The data axis: ranks that hold the same features and work on different tokens.
//
// Ranks exchange the factors of gradients, not gradients. After the selection they gather the sparse lists, inputs
// and gradient rows of all groups; then each rank forms the gradients of the features it owns over the tokens of the
// whole batch, updates them by the same kernels as a single rank, and the new weights are gathered. Sums over tokens
// are therefore formed in token order on one rank, as without a data axis: equal products give equal bits.
//
// With D ranks on the axis, N tokens per batch, L layers of width d, and P parameters of its shard, a rank sends to
// each of the D - 1 others per step:
//
//   rows      2 * N/D * L*d elements (2 or 4 bytes): inputs and gradient rows of its group
//   lists     8 bytes per entry and 8 per token, at the full capacity of the lists, so that no rank needs a count
//   weights   P/D of 2 or 4 bytes
//
// Gradients in fp32 instead of rows and lists would be 4 more bytes per parameter; rows are fewer unless the batch has
// far more tokens than a feature has columns. The price is memory: inputs and gradient rows of all N tokens on every
// rank, not of N/D (Forward::all_inputs, GradientRows), and the lists below.
//
// All messages have fixed sizes and stay where the kernels run: the host does not wait, and a graph can hold them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/stream.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "model/step_arena.hpp"
#include "parallel/device_communicator.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/selection/selection_sizes.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

class DataAxis {
 public:
  /// Sizes of the lists of one group, at the capacity of a selection by `settings`.
  struct Lists {
    explicit Lists(const SelectionSpec&);
    std::int64_t offsets, entries;
    std::int64_t bytes() const { return 8 * (offsets + entries); }
  };

  /// Memory of the data axis; empty if the axis has one rank.
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);
    kernels::Array<std::int64_t> group_offsets;  ///< [data ranks, Lists::offsets]
    kernels::Array<std::uint32_t> group_key;     ///< [data ranks, Lists::entries]
    kernels::Array<float> group_value;           ///< [data ranks, Lists::entries]
    // Lists of the owned features:
    kernels::Array<std::int64_t> row_offsets;  ///< by token ...
    kernels::Array<std::uint32_t> key;
    kernels::Array<float> value;
    kernels::Array<std::int64_t> hit_offsets;  ///< ... and by feature
    kernels::Array<std::uint32_t> hit_token, hit_position;
    kernels::Array<std::byte> transpose_workspace;
    kernels::Array<float> vectors;  ///< [vectors gathered together, F_local], by owner
  };

  /// Bytes that a rank (the largest) sends per step.
  static std::int64_t sent_bytes(const Configuration&, const Shape&, const parallel::GridShape&);
  /// Entries that the lists of the owned features hold: enough for the lists of all groups.
  static std::int64_t capacity(const Configuration&, const Shape&, const parallel::GridShape&);

  DataAxis(const Configuration&, const Model&, const parallel::Grid&, const kernels::Execution&, model::StepArena&);

  /// True if the axis has more than one rank. If not, this object has no lists of the whole batch (`gather_lists`,
  /// `by_feature` must not be called), and all other functions do nothing.
  bool active() const { return ranks_.size() > 1; }

  /// Gathers the lists of all groups of a batch of `n_tokens` and forms the lists of the owned features over all
  /// tokens. `of_group`: lists of this rank's group. Collective.
  void gather_lists(const kernels::SparseActivations& of_group, std::int64_t n_tokens);
  /// Lists of all groups, one after the other, each at its capacity.
  struct GroupLists {
    kernels::Array<std::int64_t> offsets;
    kernels::Array<std::uint32_t> key;
    kernels::Array<float> value;
  };
  /// Gathers the lists of another selection into `groups`; `out` receives the lists of the owned features. Collective.
  void gather_lists(const kernels::SparseActivations& of_group, std::int64_t n_tokens, const GroupLists& groups,
                    const kernels::SparseActivations& out);
  /// Lists of the owned features, numbered from 0, over the tokens of the whole batch; by token ...
  const kernels::SparseActivations& activations() const { return activations_; }
  /// ... and by feature, after `by_feature` has formed them.
  void by_feature();
  const kernels::FeatureHits& hits() const { return hits_; }

  /// Sends the rows of this rank's group to all. rows: [all tokens of the batch, L * d], contiguous; each group's rows
  /// in their place. Collective.
  void gather_rows(kernels::AnyMatrix rows);

  /// Sends the rows that each rank has updated of every layer's matrix (Model::encoder, Model::decoder) to all.
  /// Collective.
  void gather_weights(std::span<const kernels::ParameterRows> matrices);
  /// Starts `gather_weights` on the communication stream; work that is enqueued on the computation's stream after
  /// `await_weights` waits for the weights.
  void start_weights(std::span<const kernels::ParameterRows> matrices);
  void await_weights(device::IdleClock&);
  /// Sends the elements of vectors that each rank has updated to all, as `gather_weights` does for matrices. all
  /// [vectors, F_local] fp32: one vector of each layer (encoder biases, thresholds), or of each pair of layers if the
  /// shape has offsets and scales. Collective.
  void gather_vectors(kernels::AnyMatrix all);

  /// Communicators on the computation's stream, and on the communication stream.
  parallel::DeviceCommunicator& ranks() { return ranks_; }
  const parallel::DeviceCommunicator& ranks() const { return ranks_; }
  parallel::DeviceCommunicator& overlapped() { return overlapped_; }
  const parallel::DeviceCommunicator& overlapped() const { return overlapped_; }
  const kernels::Execution& communication() const { return stream_.execution(); }

 private:
  const Model& model_;
  kernels::Execution execution_;
  parallel::DeviceCommunicator ranks_;
  device::Stream stream_;
  parallel::DeviceCommunicator overlapped_;
  device::Event updated_, gathered_;
  const Buffers buffers_;
  kernels::SparseActivations activations_;
  kernels::FeatureHits hits_;
};

}  // namespace weft::transcoder
