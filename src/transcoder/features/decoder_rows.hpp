// SPDX-License-Identifier: Apache-2.0
//
// Properties of the features that follow from the decoder rows alone: how their norm is divided over the target layers,
// and which rows of a layer point in nearly the same direction. Rows are taken in normalised space, as they are
// trained.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "parallel/grid.hpp"
#include "transcoder/forward/normalisation.hpp"
#include "transcoder/parameters/model.hpp"

namespace weft::transcoder {

/// Number of columns of `decoder_rows`: the targets of a feature of the layer, d_model each; tied decoders: d_model.
std::int64_t row_columns(const Shape&, std::int64_t layer);
/// Forms the vectors that the features [begin, begin + out.rows) of this rank in a source layer write per unit of
/// activation, in normalised space, fp32: one vector for each target, scales included; tied decoders: the one
/// vector. out [rows, row_columns]; where the kernels run.
void decoder_rows(const Model&, std::int64_t layer, std::int64_t begin, const kernels::Execution&,
                  kernels::Matrix<float> out);

/// Returns ||w_f^{s->t}||^2 of the features of this rank in source layer s, [F_local, targets of s], t = s, s + 1, ...
std::vector<double> squared_norms(const Model&, std::int64_t layer, const kernels::Execution&);

/// The k largest entries of each row of a matrix, descending, equal ones by index; index -1: there are fewer.
struct LargestEntries {
  std::vector<float> value;         ///< [rows, k]
  std::vector<std::int64_t> index;  ///< [rows, k]
};
/// For each feature f of this rank in a layer the k features g != f of that layer with the largest cosines between the
/// whole decoder rows, [F_local, k], by their global indices. A row of norm 0 has cosine 0 with all. Compares all pairs
/// of features, in blocks: memory does not depend on the square of their number. Collective over the feature axis.
LargestEntries nearest_features(const Model&, std::int64_t layer, std::int64_t k, const parallel::Grid&,
                                const kernels::Execution&);

/// Rows of a matrix that are formed in blocks, in fp32, where the kernels run.
struct RowBlocks {
  std::int64_t rows = 0;
  std::function<void(std::int64_t begin, kernels::Matrix<float> out)> form;
};
/// What the features of this rank in a layer write to the residual stream, in raw space, up to and including the target
/// layer `last`: [F_local, d_model].
RowBlocks written_rows(const Model&, const NormalisationOnDevice&, std::int64_t layer, std::int64_t last,
                       const kernels::Execution&);

/// The k tokens of a vocabulary whose logits each feature of this rank in a layer raises (sign 1) or lowers (-1) most,
/// per unit of its activation: products of all that it writes with the rows of the unembedding, without the last norm.
LargestEntries logit_effects(const Model&, const NormalisationOnDevice&, std::int64_t layer, std::int64_t k, float sign,
                             const RowBlocks& unembedding, const kernels::Execution&);

/// The k features of later layers whose pre-activations each feature of this rank in a layer raises most, per unit of
/// its activation: products of what it writes before that layer with the rows of the encoder there, without norms and
/// attention. Index: layer * F + feature. Collective over the feature axis.
LargestEntries downstream_features(const Model&, const NormalisationOnDevice&, std::int64_t layer, std::int64_t k,
                                   const parallel::Grid&, const kernels::Execution&);

/// Summary of the decoder rows of all features, by source layer.
struct DecoderSummary {
  /// [s][t - s]: part of the squared norm of the rows of layer s that is written to layer t; sums to 1. NaN if all rows
  /// are 0.
  std::vector<std::vector<double>> share;
  /// Largest cosine with another feature of the layer: mean over the features (NaN with one feature), and the part of
  /// the features whose is above kRedundantCosine.
  std::vector<double> redundancy, redundant_fraction;
};
inline constexpr double kRedundantCosine = 0.9;
/// Forms the summary of the decoder, the same on every rank. Collective.
DecoderSummary summarise_decoder(const Model&, const parallel::Grid&, const kernels::Execution&);

}  // namespace weft::transcoder
