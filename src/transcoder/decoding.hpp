// SPDX-License-Identifier: Apache-2.0
//
// What distinguishes the kinds of decoders (transcoder.decoder) in a step. All of them are products over sparse lists
// (kernels/transcoder/decode/decode.hpp), with something before or after:
//
//   cross_layer   the product itself: rows of all targets, one after the other
//   per_layer     the same, rows of one target
//   tied          per layer, then sums over the sources up to a target; the gradient rows of the targets from a source
//                 on are summed before the backward pass (tied.hpp)
//   tied_target   per layer, over lists by target (by_target.hpp)
//   low_rank      codes h_s[t] = a_s U_s[t] by the product; then y^_t = sum over s <= t of h_s[t] V_t[s], dense. Before
//                 the backward pass dV_t[s] = h_s[t]^T g_t and the gradient rows of the codes, g_t V_t[s]^T
//
// Each part of a step that depends on the kind is a function of one of the two classes below; forward.cpp and
// trainer.cpp call them at their place. A kind that needs no memory of its own takes none.
#pragma once

#include <cstdint>

#include "kernels/transcoder/decode/by_target.hpp"
#include "kernels/transcoder/decode/decode.hpp"
#include "kernels/transcoder/sparse/sparse.hpp"
#include "parallel/device_communicator.hpp"
#include "training/step_arena.hpp"
#include "transcoder/model.hpp"
#include "transcoder/settings.hpp"

namespace weft::transcoder {

/// Memory of the lists of a decoder tied per target (kernels/transcoder/decode/by_target.hpp).
struct TargetLists {
  TargetLists() = default;
  /// For lists of n_tokens, n_layers and at most `entries`. Throws a collective Error(usage) for 2^32 entries or more.
  TargetLists(std::int64_t n_tokens, std::int64_t n_layers, std::int64_t entries, training::StepArena&);

  kernels::Array<std::int64_t> begin, row_offsets;
  kernels::Array<std::uint32_t> key;
  kernels::Array<float> value;

  /// Where the lists of `of` come.
  kernels::SparseActivations lists(const kernels::SparseActivations& of) const {
    return {of.n_tokens, of.n_layers, of.n_features, row_offsets, key, value};
  }
};

/// From sparse activations to partial reconstructions, over the features of this rank.
class DecoderForward {
 public:
  /// Of chunks of at most `chunk` tokens out of `group`.
  struct Buffers {
    Buffers() = default;
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, std::int64_t max_tokens, std::int64_t group,
            std::int64_t chunk, training::StepArena&);
    TargetLists lists;                    ///< tied_target
    kernels::Array<std::byte> codes;      ///< low_rank: [chunk, rank L (L + 1) / 2],
    kernels::Array<std::byte> of_target;  ///< those of one target, [chunk, rank L]
    kernels::Array<std::byte> workspace;
  };

  DecoderForward(const Model&, const kernels::Execution&, const Buffers&);

  /// Takes the lists of a group of tokens, which must stay until `form` is done with them.
  void begin(const kernels::SparseActivations&);
  /// Overwrites partial [tokens.size(), layers.size() * d] with what they contribute to these layers.
  void form(parallel::Range tokens, parallel::Range layers, kernels::AnyMatrix partial) const;

 private:
  void form_low_rank(parallel::Range tokens, parallel::Range layers, kernels::AnyMatrix partial) const;

  const Model& model_;
  const kernels::Execution execution_;
  const Buffers buffers_;
  kernels::SparseActivations lists_;
};

/// The gradients of all parameters of the decoder but its bias, over the features that this rank updates and the tokens
/// of the whole batch.
class DecoderBackward {
 public:
  /// entries: of the lists of the backward pass, over n_tokens (twice the batch with dead features).
  struct Buffers {
    Buffers() = default;
    Buffers(const Configuration&, const Shape&, const parallel::GridShape&, std::int64_t n_tokens, std::int64_t entries,
            training::StepArena&);
    kernels::Array<std::byte> workspace;  ///< of the products over lists
    // tied_target:
    TargetLists lists;
    kernels::Array<std::int64_t> hit_offsets;
    kernels::Array<std::uint32_t> hit_token, hit_position;
    kernels::Array<float> delta;                            ///< by position in the lists
    kernels::Array<float> offset_gradient, scale_gradient;  ///< by pair, [owned] each; with offsets and scales
    // low_rank:
    kernels::Array<std::byte> codes;        ///< [n_tokens, rank L (L + 1) / 2], then their gradient rows
    kernels::Array<float> basis_gradients;  ///< [ranks, rank L (L + 1) / 2 * d]
    kernels::Array<float> basis_gradient;   ///< their sum
    kernels::Array<std::byte> dense_workspace;
  };

  /// Bytes of the largest message of n_ranks to one another.
  static std::int64_t largest_message(const Shape&, std::int64_t n_ranks);
  /// Rows of basis_gradient: parameters that every rank updates whole.
  static std::int64_t basis_rows(const Shape&);

  /// world: of all ranks. What is passed by reference must outlive this object.
  DecoderBackward(const Model&, parallel::DeviceCommunicator& world, const kernels::Execution&, const Buffers&);

  /// The lists of the owned features and the gradient rows of the reconstruction [tokens, L * d].
  struct Batch {
    const kernels::SparseActivations& activations;
    const kernels::FeatureHits& hits;
    kernels::AnyMatrix gradient_rows;
  };
  /// What gradients need of the batch before any parameter is updated. Before `prepare_rows`. Collective.
  void form_basis_gradient(const Batch&);
  /// low_rank: [rank L (L + 1) / 2, d], the bases one after the other. Else no rows.
  kernels::Matrix<float> basis_gradient() const;
  void update_basis(const kernels::AdamStep*) const;

  /// Once per batch, before `rows` and `run`: brings the gradient rows into the form that `rows` has. tied: in place.
  void prepare_rows(const Batch&);
  /// What rows of Model::decoder() are multiplied with: layer s from column Shape::decoder_begin(s) on.
  kernels::AnyMatrix rows(kernels::AnyMatrix gradient_rows) const;

  /// Gradient of the activations (by position), and with a step the update of decoder, offsets and scales; else squared
  /// norms alone: arguments as of kernels::decode_backward_update.
  void run(const Batch&, const kernels::AdamStep* step, kernels::Array<float> activation_gradient,
           kernels::Array<double> squared_norm, const kernels::LateRows& late, kernels::Array<const float> factors,
           kernels::Array<float> new_norms);
  /// Adds the squares of the gradients of offsets and scales, of the clipped ones with a step: [L * owned].
  void add_affine_norms(const kernels::AdamStep* step, kernels::Array<double> squared_norm) const;
  void update_affine(const kernels::AdamStep*) const;

 private:
  kernels::PairAffine affine_gradient() const;

  const Model& model_;
  parallel::DeviceCommunicator& world_;
  const kernels::Execution execution_;
  const Buffers buffers_;
};

/// Norms nu of the features' decoder rows over all their targets, by key [L * features]: tied rows count once, offsets
/// and scales do not. decoder: of Model, all rows of this rank or the owned ones. Not of low_rank.
void feature_norms(const kernels::Execution&, const Shape&, std::span<const kernels::ParameterRows> decoder,
                   kernels::Array<float> norm);

}  // namespace weft::transcoder
