// SPDX-License-Identifier: Apache-2.0
//
// The data axis: ranks that hold the same features and work on different tokens.
//
// Not gradients travel but what they are made of. After the selection the ranks gather one another's sparse lists,
// inputs and gradient rows; then each forms the gradients of the features it owns over the tokens of the whole batch,
// updates them by the same kernels as a single rank, and the new weights are gathered. Sums over tokens are therefore
// formed in token order on one rank, as without a data axis: given the same products the result has the same bits.
//
// A rank sends to each of the D - 1 others, with N tokens a batch, L layers of width d, and P parameters of its shard:
//
//   rows      2 * N/D * L*d elements (2 or 4 bytes): inputs and gradient rows of its group
//   lists     8 bytes an entry and 8 a token, at the full capacity of the lists, so that no rank needs a count
//   weights   P/D of 2 or 4 bytes
//
// Gradients in fp32 instead of rows and lists would be 4 more bytes a parameter; rows are fewer unless the batch has
// far more tokens than a feature has columns. The price is memory: inputs and gradient rows of all N tokens on every
// rank, not of N/D (Forward::all_inputs, Trainer), and the lists below.
//
// Everything is of fixed size and stays where the kernels run: the host waits for nothing, and a graph can hold it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/memory.hpp"
#include "device/stream.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "parallel/device_communicator.hpp"
#include "transcoder/configuration.hpp"
#include "transcoder/model.hpp"

namespace weft::transcoder {

class DataAxis {
 public:
  /// Bytes of all buffers of this class on one rank; 0 when the axis has one rank.
  static std::int64_t bytes(const Configuration&, const Shape&, const parallel::GridShape&, kernels::Backend);
  /// What a rank (the largest) sends in a step.
  static std::int64_t sent_bytes(const Configuration&, const Shape&, const parallel::GridShape&);
  /// Entries that the lists of the owned features must hold: enough for every input.
  static std::int64_t capacity(const Configuration&, const Shape&, const parallel::GridShape&);

  DataAxis(const Configuration&, const Model&, const parallel::Grid&, const kernels::Execution&);

  /// Whether there is anybody to exchange with. If not, nothing below may be called but `ranks`.
  bool active() const { return ranks_.size() > 1; }

  /// Takes the lists of this rank's group, of a batch of `n_tokens`, and forms those of the owned features over all
  /// tokens. Collective.
  void gather_lists(const kernels::SparseActivations& of_group, std::int64_t n_tokens);
  /// Of the owned features, numbered from 0, over the tokens of the whole batch; by token ...
  const kernels::SparseActivations& activations() const { return activations_; }
  /// ... and by feature, once `by_feature` has formed them.
  void by_feature();
  const kernels::FeatureHits& hits() const { return hits_; }

  /// rows [all tokens of the batch, L * d], contiguous: each group's rows, in their place, go to all. Collective.
  void gather_rows(kernels::AnyMatrix rows);

  /// The rows that each rank has updated of every layer's matrix (Model::encoder, Model::decoder) go to all.
  /// Collective.
  void gather_weights(std::span<const kernels::ParameterRows> matrices);
  /// The same beside the computation, which goes on with them after `await_weights`.
  void start_weights(std::span<const kernels::ParameterRows> matrices);
  void await_weights(device::IdleClock&);
  /// The same of the encoder biases of all layers.
  void gather_biases();

  parallel::DeviceCommunicator& ranks() { return ranks_; }
  const parallel::DeviceCommunicator& ranks() const { return ranks_; }
  /// What works beside the computation.
  parallel::DeviceCommunicator& beside() { return beside_; }
  const parallel::DeviceCommunicator& beside() const { return beside_; }
  const kernels::Execution& beside_execution() const { return stream_.execution(); }

 private:
  void gather(parallel::DeviceCommunicator&, const kernels::ParameterRows& matrix);

  /// The lists of one group, at their capacity.
  struct Lists {
    Lists(const Configuration&, const Shape&, const parallel::GridShape&);
    std::int64_t offsets, entries;
    std::int64_t bytes() const { return 8 * (offsets + entries); }
  };

  const Model& model_;
  kernels::Execution execution_;
  parallel::DeviceCommunicator ranks_;
  device::Stream stream_;
  parallel::DeviceCommunicator beside_;
  device::Event updated_, gathered_;
  const Lists lists_;
  device::Buffer<std::int64_t> group_offsets_;  // [data ranks, lists_.offsets]
  device::Buffer<std::uint32_t> group_key_;     // [data ranks, lists_.entries]
  device::Buffer<float> group_value_;
  device::Buffer<std::int64_t> row_offsets_, hit_offsets_;  // of the owned features
  device::Buffer<std::uint32_t> key_, hit_token_, hit_position_;
  device::Buffer<float> value_;
  device::Buffer<std::byte> transpose_workspace_;
  device::Buffer<float> biases_;  // [L * F_local], by owner
  kernels::SparseActivations activations_;
  kernels::FeatureHits hits_;
};

}  // namespace weft::transcoder
