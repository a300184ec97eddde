// SPDX-License-Identifier: Apache-2.0
//
// The forward half of a step, shared by training and evaluation: raw rows -> normalised inputs -> sparse activations ->
// partial reconstructions, exchanged so that each rank receives all parts of its own tokens.
//
// Tokens. A batch of N tokens is cut over the data axis into groups and each group over the feature axis into own
// slices (parallel/grid.hpp). All ranks of a group see the group's inputs; each forms the residual of its own slice
// only. Invariant. Every buffer is allocated once, for the largest batch; a smaller batch uses the front of it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "dataset/loader.hpp"
#include "dataset/statistics.hpp"
#include "device/memory.hpp"
#include "parallel/device_communicator.hpp"
#include "report/timers.hpp"
#include "transcoder/configuration.hpp"
#include "transcoder/model.hpp"
#include "transcoder/row_exchange.hpp"
#include "transcoder/selection.hpp"

namespace weft::transcoder {

/// Who has which tokens of a batch of `total`.
struct TokenLayout {
  TokenLayout(std::int64_t total, const parallel::Grid& grid);

  std::int64_t total;
  parallel::Range group;                     ///< of the batch: tokens this rank's feature group works on
  parallel::Range own;                       ///< of the group: tokens whose residual this rank forms
  std::vector<parallel::Range> own_of_rank;  ///< of the group, by feature rank
};

/// Normalisation vectors on the device, all [L * d].
struct NormalisationOnDevice {
  NormalisationOnDevice(const dataset::Normalisation&, const dataset::Statistics&, const kernels::Execution&);

  device::Buffer<float> input_mean, input_scale;  ///< x~ = (x - mean) * scale
  device::Buffer<float> target_mean, target_scale;
  device::Buffer<float> target_spread;        ///< 1 / target_scale: back to raw space
  device::Buffer<float> centre, standardise;  ///< normalised targets -> (y - training mean) / training deviation
  device::Buffer<float> pivot;                ///< raw training mean: what metrics are summed about
};

kernels::Scalar scalar_of(Precision);

/// What the selection of batches of at most `max_tokens` works on.
SelectionShape selection_shape(const Configuration&, const Shape&, std::int64_t max_tokens);

class Forward {
 public:
  /// Bytes of all buffers of this class on one rank, for the memory plan.
  static std::int64_t bytes(const Configuration&, const Shape&, parallel::GridShape, std::int64_t max_tokens,
                            kernels::Backend);

  /// `max_tokens`: the largest batch, over all ranks.
  Forward(const Configuration&, const Model&, const NormalisationOnDevice&, const parallel::Grid&,
          const kernels::Execution&, report::Timers&, std::int64_t max_tokens);

  /// Takes a batch: its inputs, normalised. They may be anywhere the kernels reach.
  void load(const dataset::RawBatch& batch);
  /// Encodes and selects: `activations`. Collective.
  void encode();

  /// One stretch of this rank's own tokens with the partial reconstructions of all feature ranks.
  struct OwnPart {
    std::int64_t begin;  ///< first token, counted from the first own token
    std::int64_t count;
    kernels::AnyMatrix partial;  ///< [n_parts * count, L * d], part after part in rank order
    std::int64_t n_parts;
  };
  /// Decodes chunk by chunk and hands over what arrives for the own tokens (chunks without own tokens are passed over).
  /// Collective.
  void decode(const std::function<void(const OwnPart&)>& consume);

  const TokenLayout& layout() const { return *layout_; }
  kernels::AnyMatrix inputs() const;  ///< x~ [group tokens, L * d]
  const kernels::SparseActivations& activations() const { return selection_.activations(); }
  /// The same entries by feature, once `by_feature` has formed them.
  void by_feature();
  const kernels::FeatureHits& hits() const { return selection_.hits(); }
  Selection& selection() { return selection_; }
  const Selection& selection() const { return selection_; }
  parallel::DeviceCommunicator& exchange() { return exchange_; }
  const parallel::DeviceCommunicator& exchange() const { return exchange_; }
  /// Where the kernels run: not zero when a raw input of this rank's group was not finite. Others may add their
  /// findings; `load` clears it.
  std::int32_t* not_finite() const { return not_finite_.data(); }

 private:
  const Model& model_;
  const NormalisationOnDevice& normalisation_;
  const parallel::Grid& grid_;
  kernels::Execution execution_;
  report::Timers& timers_;
  kernels::Scalar scalar_;
  std::int64_t chunk_tokens_;
  std::optional<TokenLayout> layout_;
  Selection selection_;
  parallel::DeviceCommunicator exchange_;
  std::int64_t received_rows_;  // n_parts * chunk's own tokens; only with several feature ranks
  RowExchange row_exchange_;
  device::Buffer<std::byte> inputs_;  // [largest group, L * d]
  ExchangeBuffer partial_;            // [chunk_tokens, L * d]
  ExchangeBuffer received_;           // [received_rows, L * d]
  device::Buffer<std::byte> encode_workspace_;
  device::Buffer<std::int32_t> not_finite_;
};

/// Tokens decoded at a time on a rank that works on `group_tokens`: data.micro_tokens, or as many as keep the partial
/// reconstructions within 512 MiB.
std::int64_t decoded_at_a_time(std::int64_t micro_tokens, std::int64_t group_tokens, std::int64_t width,
                               kernels::Scalar);

}  // namespace weft::transcoder
