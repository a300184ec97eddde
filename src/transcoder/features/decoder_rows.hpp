// SPDX-License-Identifier: Apache-2.0
//
// Properties of the features that follow from the decoder rows alone: how their norm is divided over the target layers,
// and which rows of a layer point in nearly the same direction. Rows are taken in normalised space, as they are
// trained.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/grid.hpp"
#include "transcoder/parameters/model.hpp"

namespace weft::transcoder {

/// Number of columns of `decoder_rows`: the targets of a feature of the layer, d_model each; tied decoders: d_model.
std::int64_t row_columns(const Shape&, std::int64_t layer);
/// Forms the vectors that the features [begin, begin + out.rows) of this rank in a source layer write per unit of
/// activation, in normalised space, fp32: one vector for each target, the products of a low-rank decoder and scales
/// included; tied decoders: the one vector. out [rows, row_columns]; where the kernels run.
void decoder_rows(const Model&, std::int64_t layer, std::int64_t begin, const kernels::Execution&,
                  kernels::Matrix<float> out);

/// Returns ||w_f^{s->t}||^2 of the features of this rank in source layer s, [F_local, targets of s], t = s, s + 1, ...
std::vector<double> squared_norms(const Model&, std::int64_t layer, const kernels::Execution&);

/// For each feature f of this rank in a layer the features g != f of that layer with the largest cosines between the
/// whole decoder rows, [F_local, k]: descending by cosine, equal ones by index. A row of norm 0 has cosine 0 with all.
struct Neighbours {
  std::vector<std::int64_t> feature;  ///< global index in the layer; -1 where the layer has fewer features
  std::vector<float> cosine;
};
/// Compares all pairs of features, in blocks: memory does not depend on the number of features. Collective over the
/// feature axis.
Neighbours nearest_features(const Model&, std::int64_t layer, std::int64_t k, const parallel::Grid&,
                            const kernels::Execution&);

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
