// SPDX-License-Identifier: Apache-2.0
//
// The forward pass of a step, shared by training and evaluation: raw activations -> normalised inputs -> sparse
// activations -> partial reconstructions, exchanged so that each rank receives all parts of its own tokens.
//
// Three files: forward.cpp (memory, loading of a batch), encode_select.cpp, decode_exchange.cpp. The assignment of
// tokens to ranks: axes/token_layout.hpp.
//
// On several GPUs, inputs and partial reconstructions are sent in blocks of layers on the communication stream
// (axes/feature_axis.hpp): inputs of a block arrive while layers before it are encoded; those of the first block
// arrive while this rank's own tokens are encoded; a block's partial reconstructions are sent while the next block is
// decoded.
//
// Invariant. Every buffer is allocated once, for the largest batch; a smaller batch uses the front of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dataset/activations/loader.hpp"
#include "device/memory.hpp"
#include "kernels/optimize/guard.hpp"
#include "kernels/transcoder/activation/threshold_band.hpp"
#include "model/step_arena.hpp"
#include "parallel/device_communicator.hpp"
#include "run/timers.hpp"
#include "transcoder/axes/feature_axis.hpp"
#include "transcoder/axes/row_gather.hpp"
#include "transcoder/axes/token_layout.hpp"
#include "transcoder/decoder/decoder.hpp"
#include "transcoder/forward/feature_statistics.hpp"
#include "transcoder/forward/normalisation.hpp"
#include "transcoder/parameters/model.hpp"
#include "transcoder/selection/selection.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

class Forward {
 public:
  /// Sizes on the largest rank.
  struct Sizes : FeatureAxisSizes {
    Sizes(const Configuration&, const Shape&, const parallel::GridShape&, std::int64_t max_tokens);

    std::int64_t chunk;     ///< tokens decoded at a time
    std::int64_t inputs;    ///< elements of the whole batch; twice as many with dead features (parts/dead_features.hpp)
    std::int64_t partial;   ///< elements of a chunk and the largest block of layers
    std::int64_t received;  ///< elements of the own tokens of a chunk, from all feature ranks; 0 with one
    std::size_t n_slots;    ///< slots for both: two where exchange and computation overlap
  };

  /// Partial reconstructions that this rank decodes, and those that it receives.
  struct ChunkBuffers {
    parallel::ExchangeBuffer partial;   ///< [chunk, columns of the largest block]
    parallel::ExchangeBuffer received;  ///< [n_parts * chunk's own tokens, columns of the largest block]
  };

  /// Memory of the forward pass, including that of the selection. GPUs that write rows directly to their place need
  /// less, which a plan cannot know.
  struct Buffers {
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, std::int64_t max_tokens, model::StepArena&);
    SelectionBuffers selection;
    parallel::ExchangeBuffer staging;  ///< FeatureAxis::staging
    parallel::ExchangeBuffer inputs;   ///< [largest batch, L * d]
    RowGather::Buffers own_inputs;
    std::vector<ChunkBuffers> chunks;  ///< by slot
    kernels::Array<std::byte> encode_workspace, skip_workspace;
    std::unique_ptr<SparseDecoder> decoder;
    kernels::Array<float> bounds;                 ///< [L * F_local]; with thresholds
    kernels::Array<float> band_bounds;            ///< [L * F_local]; if the settings list bands, as
    kernels::Array<std::int64_t> active_offsets;  ///< [group tokens + 1], and
    kernels::Array<std::uint32_t> active_key;     ///< [capacity],
    kernels::Array<float> active_value;           ///< the lists without entries that are not active
    kernels::Array<float> norms;    ///< [L * F_local] norms of decoder rows; with Ranking::decoder_norm, as
    kernels::Array<float> no_bias;  ///< [F_local] zeros; also with Ranking::z_score, as
    FeatureStatistics::Buffers statistics;
    kernels::Array<kernels::StepFlags> flags;  ///< [1]
  };

  /// `max_tokens`: the largest batch, over all ranks. What is passed by reference must outlive this object. Collective.
  Forward(const Configuration&, const Model&, const NormalisationOnDevice&, const parallel::Grid&,
          const kernels::Execution&, run::Timers&, std::int64_t max_tokens, model::StepArena&);

  /// Loads a batch: normalises the inputs of the own tokens, which may be in any memory that the kernels can read.
  void load(const dataset::RawBatch& batch);
  /// True if `encode` needs the decoder's weights.
  bool ranks_by_decoder() const { return settings_.ranking == Ranking::decoder_norm; }
  /// Gathers all inputs of the group, for use before `encode`, which gathers them again. Collective.
  void gather_inputs();
  /// Encodes and selects: forms `activations`. With a ThresholdBand, which the settings must request, `listed` also has
  /// the entries in the band. `follower` also takes the products of all tiles, before they are ranked
  /// (Selector::follow). Collective.
  void encode(const kernels::ThresholdBand* band = nullptr, Selector* follower = nullptr);

  /// A range of layers and of this rank's own tokens, with the partial reconstructions of all feature ranks.
  struct OwnPart {
    std::int64_t begin;  ///< first token, counted from the first own token
    std::int64_t count;
    std::size_t block;           ///< index in `axis().blocks`
    parallel::Range layers;      ///< layers of that block
    kernels::AnyMatrix partial;  ///< [n_parts * count, layers * d], part after part in rank order
    std::int64_t n_parts;
  };
  /// Decodes block by block of layers, in ascending order, in chunks of tokens, and passes what arrives for this rank's
  /// own tokens to `consume`. The skip connection is added to the first part. Collective.
  void decode(const std::function<void(const OwnPart&)>& consume) {
    decode(activations(), model_.shape().skip, consume);
  }
  /// Decodes another selection of the batch, without a skip connection.
  void decode(const kernels::SparseActivations& of, const std::function<void(const OwnPart&)>& consume) {
    decode(of, false, consume);
  }

  /// False if a selection since construction was not valid on some rank: `activations` must not be read then. Waits for
  /// the device. Collective.
  bool selections_are_valid();
  /// Throws a collective Error with layer and counts if a selection since construction was not valid on some rank:
  /// usage if more features were active than there is room for, else internal. `which`: "of step 7". Waits for the
  /// device.
  void require_valid_selections(const std::string& which);

  /// The decoder, with the memory of the forward pass; training takes the memory of the backward pass.
  SparseDecoder& decoder() { return *buffers_.decoder; }
  const Shape& shape() const { return model_.shape(); }
  const TokenLayout& layout() const { return *layout_; }
  kernels::AnyMatrix inputs() const;  ///< x~ [group tokens, L * d]
  /// [all tokens of the batch, L * d]: space for x~ of every group, this one's in its place. The backward pass of the
  /// data axis gathers the others (axes/data_axis.hpp).
  kernels::AnyMatrix all_inputs() const;
  const kernels::SparseActivations& activations() const { return activations_; }
  /// Entries that the selection has listed: with a ThresholdBand more than `activations`, and the values are
  /// pre-activations.
  const kernels::SparseActivations& listed() const { return selection_->activations(); }
  /// The entries of `listed` by feature, after `by_feature` has formed them.
  void by_feature();
  const kernels::FeatureHits& hits() const { return selection_->hits(); }
  Selector& selection() { return *selection_; }
  const Selector& selection() const { return *selection_; }
  /// The feature axis, which all exchanges of a step along it share.
  const FeatureAxis& axis() const { return axis_; }
  /// Time for which the computation has waited for exchanges since the last `encode` began.
  device::IdleClock& idle() { return idle_; }
  const device::IdleClock& idle() const { return idle_; }
  /// Flags of the step, in memory of the kernels: not_finite is set if a raw input of this rank was not finite,
  /// model_fault if its selection is not valid. Other code may set them, too; `load` clears both.
  kernels::StepFlags* flags() const { return buffers_.flags.data; }
  std::int32_t* not_finite() const { return &flags()->not_finite; }

 private:
  void decode(const kernels::SparseActivations&, bool with_skip, const std::function<void(const OwnPart&)>& consume);
  void encode_tile(const kernels::Execution&, const kernels::TileRange&, kernels::AnyMatrix product);
  void select(std::span<const kernels::Array<const float>> bias, std::span<const kernels::Array<const float>> bounds);
  void encode_by_norm();
  void encode_by_z_score();
  void await_inputs(std::int64_t layer, const kernels::Execution&);
  bool begins_with_own_inputs() const;
  std::vector<kernels::EncoderOperands::Part> parts_to_encode() const;
  void select_above_bounds(std::span<const kernels::Array<const float>> bias, const kernels::ThresholdBand*);
  void activate(const kernels::ThresholdBand*);

  const ModelSettings settings_;
  const Model& model_;
  const NormalisationOnDevice& normalisation_;
  const parallel::Grid& grid_;
  kernels::Execution execution_;
  run::Timers& timers_;
  const Sizes sizes_;
  device::IdleClock idle_;
  std::unique_ptr<device::Stream> stream_;  // null without overlap
  kernels::Execution communication_;
  parallel::DeviceCommunicator exchange_;
  Buffers buffers_;
  FeatureStatistics statistics_;
  FeatureAxis axis_;
  std::optional<TokenLayout> layout_;
  std::unique_ptr<Selector> selection_;
  kernels::SparseActivations activations_;
  RowGather input_gather_;
  Selector* follower_ = nullptr;  // follower of this `encode`
  std::size_t blocks_here_ = 0;   // blocks of inputs for which the computation has waited
  struct ChunkEvents {
    device::Event decoded, arrived;
  };
  std::vector<ChunkEvents> events_;  // by slot
};

/// Number of tokens decoded at a time on a rank that works on `group_tokens`: data.micro_tokens, or as many as keep
/// partial reconstructions of `columns` within 512 MiB.
std::int64_t decoded_at_a_time(std::int64_t micro_tokens, std::int64_t group_tokens, std::int64_t columns,
                               kernels::Scalar);

}  // namespace weft::transcoder
