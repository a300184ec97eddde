// SPDX-License-Identifier: Apache-2.0
//
// The parameters of a cross-layer transcoder, with their Adam moments and dead-feature clocks, on one rank.
//
// Invariants. A rank holds the contiguous block grid.part(parallel::kFeatureAxis, F) of the features of every layer.
// Weights of that block are complete on every rank of the data axis. Moments are also divided over the data axis: a
// rank updates the rows `owned` of each matrix and of each encoder bias, and keeps the clocks of those features. With
// one rank on the data axis the owned rows are all rows. Every rank holds and updates the whole decoder bias and the
// whole skip connection.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/manifest.hpp"
#include "checkpoint/registry.hpp"
#include "kernels/optimize/parameter_rows.hpp"
#include "kernels/transcoder/decode/by_target.hpp"
#include "model/parameters.hpp"
#include "parallel/grid.hpp"
#include "transcoder/settings/transcoder_settings.hpp"

namespace weft::transcoder {

using model::moment_bytes;
using model::Moments;
using model::weight_bytes;

/// Sizes of the whole transcoder, over all ranks, and its optional parameters.
struct Shape {
  std::int64_t n_layers = 0;
  std::int64_t d_model = 0;
  std::int64_t n_features = 0;  ///< per layer
  Decoder decoder = Decoder::cross_layer;
  bool skip = false;         ///< there is a linear skip connection
  bool affine = false;       ///< tied_target: offsets and scales
  double scale_initial = 0;  ///< tied_target: initial scale of targets after a feature's own layer
  EncoderInitial encoder_initial = EncoderInitial::features;
  DecoderInitial decoder_initial = DecoderInitial::uniform;
  /// Initial value of the thresholds of jumprelu; none: the model has no thresholds.
  std::optional<double> threshold = {};

  std::int64_t width() const { return n_layers * d_model; }
  /// Number of layers to which a feature of layer s writes: s, s + 1, ...
  std::int64_t targets(std::int64_t source) const { return decoder == Decoder::per_layer ? 1 : n_layers - source; }
  /// Number of columns of row f of Model::decoder()[s]: the vectors of the targets of feature f of source layer s one
  /// after the other; tied: one vector for all; tied_target: the vector that is written to layer s.
  std::int64_t decoder_columns(std::int64_t source) const {
    return decoder == Decoder::cross_layer ? targets(source) * d_model : d_model;
  }
  /// Number of encoder and decoder weights and biases.
  std::int64_t parameters() const;
};

/// Text such as "6 layers, d_model 384, 768 features per layer", with the differences from a plain cross-layer
/// transcoder.
std::string to_text(const Shape&);

/// The transcoder of a run, for activations of `n_layers` layers of width `d_model`.
Shape shape_of(const ModelSettings&, std::int64_t n_layers, std::int64_t d_model);

/// Features per layer that the largest rank updates (Model::owned).
std::int64_t largest_owned(const Shape&, const parallel::GridShape&);

/// The declaration of all parameters, in the order of checkpoints.
std::vector<model::ParameterSpec> parameter_specs(const Shape&);

/// Sizes and storage of a transcoder in a checkpoint.
struct StoredModel {
  Shape shape;
  kernels::StorageType storage = kernels::StorageType::fp32;
};
/// Derives sizes and storage from the tensors' names and from the shapes of the first encoder and decoder; nullopt if
/// the tensors are not those of a transcoder.
std::optional<StoredModel> stored_model(std::span<const checkpoint::TensorEntry> tensors);

class Model {
 public:
  Model(const Shape&, kernels::StorageType, const parallel::Grid&, const kernels::Execution&, Moments);

  /// Fills the weights with their initial values: the same on any grid.
  void initialise(std::uint64_t seed) { parameters_.initialise(seed); }
  /// Registers every tensor for checkpoints.
  void add_to(checkpoint::Registry& registry) const { parameters_.add_to(registry); }

  const Shape& shape() const { return shape_; }
  parallel::Range features() const { return features_; }
  std::int64_t n_local() const { return features_.size(); }
  /// The features that this rank updates, counted from features().begin.
  parallel::Range owned() const { return owned_; }

  /// All rows of this rank's block, by layer: [F_local, d] and [F_local, columns]. They have moments if the data axis
  /// has one rank.
  std::span<const kernels::ParameterRows> encoder() const { return encoder_; }
  std::span<const kernels::ParameterRows> decoder() const { return decoder_; }
  /// Owned rows with their moments, by layer. Row 0 is local row owned().begin.
  std::span<const kernels::ParameterRows> owned_encoder() const { return owned_encoder_; }
  std::span<const kernels::ParameterRows> owned_decoder() const { return owned_decoder_; }

  /// Offsets and scales of a feature's targets, by pair of layers [L (L + 1) / 2, F_local]; then those of owned
  /// features. Without data if the shape has none.
  kernels::PairAffine affine() const { return affine_; }
  kernels::PairAffine owned_affine() const;
  /// All offsets, then all scales, by pair: [owned].
  std::span<const kernels::ParameterVector> owned_affine_vectors() const { return owned_affine_; }

  /// Encoder biases by layer, [F_local], and their owned parts.
  std::span<const kernels::ParameterVector> encoder_bias() const { return encoder_bias_; }
  std::span<const kernels::ParameterVector> owned_encoder_bias() const { return owned_encoder_bias_; }
  /// Encoder biases of all layers, [L, F_local] fp32.
  kernels::AnyMatrix encoder_biases() const { return parameters_.group("encoder_bias"); }
  /// Thresholds of jumprelu: the owned ones by layer, and those of all layers, [L, F_local] fp32. Empty without
  /// thresholds.
  std::span<const kernels::ParameterVector> owned_thresholds() const { return owned_thresholds_; }
  kernels::AnyMatrix thresholds() const {
    return shape_.threshold ? parameters_.group("threshold") : kernels::AnyMatrix{};
  }
  /// All vectors that have an element for each feature of this rank, [n, F_local] fp32 each: encoder biases,
  /// thresholds, offsets and scales.
  std::vector<kernels::AnyMatrix> feature_vectors() const;
  /// Decoder bias, [L * d].
  kernels::ParameterVector decoder_bias() const { return decoder_bias_; }
  /// Matrices of the skip connection by layer, [d, d]: output, input. Empty without a skip connection.
  std::span<const kernels::ParameterRows> skip() const { return skip_; }
  /// Tokens since each owned feature fired, [L * owned].
  kernels::Array<std::int64_t> clocks() const { return clocks_; }

  /// Bytes of weights and moments on this rank.
  std::int64_t state_bytes() const { return parameters_.bytes().weights + parameters_.bytes().moments; }
  const model::Parameters& parameters() const { return parameters_; }

 private:
  Shape shape_;
  model::Parameters parameters_;
  parallel::Range features_;
  parallel::Range owned_;
  std::vector<kernels::ParameterRows> encoder_, owned_encoder_, decoder_, owned_decoder_, skip_;
  std::vector<kernels::ParameterVector> encoder_bias_, owned_encoder_bias_, owned_thresholds_, owned_affine_;
  kernels::PairAffine affine_;
  kernels::ParameterVector decoder_bias_;
  kernels::Array<std::int64_t> clocks_;
};

}  // namespace weft::transcoder
