// SPDX-License-Identifier: Apache-2.0
//
// What makes a step private (DP-SGD, Abadi et al. 2016, arXiv 1607.00133): the gradient of each record is clipped, and
// noise is added to the sum.
//
//   da = <W_dec, g>                          a pass of the decoder that changes nothing
//   |g_b|^2 for each record b                from the entries of the lists
//   (kernels/transcoder/records/sparse_records.hpp), summed
//                                            over all ranks, since each has the gradients of its own features
//   a, da <- c_b a, c_b da                   c_b = clip factor of |g_b|
//   backward pass and update                 of the step without privacy, with these lists; noise is added to the
//                                            gradients where they are formed: (sum + sigma C xi) / expected records
//
// A record is a row of the activations (privacy.unit = "token"), or several consecutive ones ("sequence"). The batch
// has those that were drawn, one after the other, and may have rows of no record, which contribute nothing. A record
// whose rows are not finite is left out.
#pragma once

#include <span>
#include <vector>

#include "checkpoint/registry.hpp"
#include "kernels/privacy/row_noise.hpp"
#include "privacy/correlated_noise.hpp"
#include "privacy/noise_key.hpp"
#include "transcoder/parts/part.hpp"

namespace weft::transcoder {

class RecordClipping {
 public:
  /// Steps whose records the host may have announced before a step has read its own.
  static constexpr std::int64_t kSlots = 4;

  struct Buffers {
    Buffers() = default;
    /// data.batch_tokens: rows of the largest batch (largest_batch).
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, model::StepArena&);
    kernels::Array<std::int32_t> host_record, record;    ///< of each row, -1: of none; on the host in slots
    kernels::Array<std::int64_t> host_offsets, offsets;  ///< of the rows of records; likewise
    kernels::Array<const float*> host_given, given;      ///< privacy.bands: noise by kind and layer; likewise
    kernels::Array<std::int32_t> flags;                  ///< of the own rows: not finite
    kernels::Array<float> alpha;                         ///< da by position, then scaled
    kernels::Array<float> dz, by_threshold;              ///< by position; with thresholds
    kernels::Array<double> by_position;                  ///< where a record may have several entries of a feature
    kernels::Array<double> row_squares, squares;         ///< [L, rows]
    kernels::Array<double> norms, gathered;              ///< squares, [parts, records]; of all ranks
    kernels::Array<float> factors;                       ///< [parts, records]
    kernels::Array<float> partial_sums;                  ///< of kernels::clipped_column_sums
    kernels::Array<float> record_sums;                   ///< sums of gradient rows of records of several rows
    kernels::Array<std::byte> bias_rows;                 ///< gradient rows, where the decoder converts them in place
    kernels::Array<double> bound;                        ///< [2]: C; kernels::add_clip_balance of the step
    kernels::Array<std::byte> workspace;
  };
  /// Bytes of the messages between all ranks.
  static std::int64_t largest_message(const Configuration&, const Shape&, std::int64_t n_ranks);

  /// world: all ranks. What is passed by reference must outlive this object.
  RecordClipping(const Configuration&, const Model&, Forward&, const kernels::Execution&, run::Timers&,
                 parallel::DeviceCommunicator& world, const Buffers&);

  /// Adds the state of the run: the bound of adaptive clipping, and the noise of earlier steps (privacy.bands).
  void register_in(checkpoint::Registry&, bool writes);
  /// C of the next step. With adaptive clipping waits for the last one.
  double clip_bound() const;

  /// Sets the noise of all steps. Call it before the first step.
  void set_noise(const privacy::Noise& noise) { noise_ = noise; }
  double expected() const { return noise_.expected; }
  /// Announces the records of the step that begins: record b has the rows [offsets[b], offsets[b + 1]) of the batch.
  void begin(std::int64_t step, std::span<const std::int64_t> offsets, std::int64_t rows);
  /// Sets own rows that are not finite, as stored, to 0, and remembers their records.
  void screen(kernels::AnyMatrix inputs, kernels::AnyMatrix targets);

  /// Keeps what `clip` needs of the gradient rows before the decoder converts them.
  void keep(const BackwardPass&);
  /// Scales the entries of the lists by the factors of their records, and overwrites bias_gradient [L * d] with the
  /// noisy gradient of the decoder bias. Called once per step, before any parameter is updated. Collective.
  void clip(BackwardPass&, SparseDecoder&, kernels::Array<float> bias_gradient);
  /// Copies the scaled da into the gradient of the pass.
  void restore(kernels::Array<float> gradient) const;
  /// Moves the bound of adaptive clipping. After the last use of the noise of a step.
  void finish();

  /// Kinds of parameters that have rows or elements in each layer.
  enum Kind { kEncoder, kEncoderBias, kThreshold, kDecoder, kKinds };
  /// The noise of a kind in the present step.
  const kernels::RowNoise& noise(Kind kind) const { return kinds_[kind]; }
  /// Adds the noise of a vector of a layer to its gradient, elements of the owned features.
  void add_noise(Kind, std::int64_t layer, kernels::Array<float> gradient) const;

 private:
  bool apart() const { return settings_.scheme != privacy::Scheme::flat; }
  std::int64_t parts() const;
  std::int64_t n_records() const { return static_cast<std::int64_t>(offsets_.size()) - 1; }
  kernels::Matrix<double> norms_of(Kind) const;
  kernels::Array<double> bias_norms() const;
  kernels::Matrix<const float> factors_of(Kind) const;
  kernels::AnyMatrix bias_rows(const BackwardPass&) const;
  void form_norms(const BackwardPass&, SparseDecoder&);
  void add_bias_norms(const BackwardPass&);
  void sum_over_ranks();
  void draw_noise();
  std::uint64_t first_element(std::size_t parameter) const;

  const privacy::Settings settings_;
  const Configuration& configuration_;
  const Model& model_;
  Forward& forward_;
  const kernels::Execution execution_;
  run::Timers& timers_;
  parallel::DeviceCommunicator& world_;
  const Buffers buffers_;
  privacy::CorrelatedNoise earlier_;
  privacy::Noise noise_;
  std::size_t first_[kKinds] = {};  // parameter of layer 0 of each kind
  std::size_t stride_ = 0;          // from one layer to the next
  // The present step:
  std::int64_t step_ = 0;
  std::span<const std::int64_t> offsets_;  // on the host
  kernels::Array<const std::int32_t> record_;
  kernels::RowNoise kinds_[kKinds];
};

}  // namespace weft::transcoder
