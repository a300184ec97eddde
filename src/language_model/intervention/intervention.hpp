// SPDX-License-Identifier: Apache-2.0
//
// Interventions on features of a transcoder in the forward pass of a language model. At a layer with such features the
// transcoder encodes the input of the MLP; with a the activation of a feature and a' the one that it is to have, its
// own layer and the later ones that it writes to receive
//
//   output of the MLP += (a' - a) w_dec
//
// so that what the transcoder does not reconstruct stays as it is. Activations are those of the changed pass: an
// intervention in an earlier layer changes the a of a later one.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/transcoder/sparse/feature_changes.hpp"
#include "language_model/attribution/active_features.hpp"
#include "language_model/attribution/frozen_pass.hpp"

namespace weft::language_model {

struct Intervention {
  std::int64_t layer = 0, feature = 0;
  float value = 0;      ///< of the activation, or
  bool scales = false;  ///< its factor
  /// Positions in the text, inclusive; those of the whole text if it has none.
  std::optional<std::pair<std::int64_t, std::int64_t>> positions = {};
  std::string text = {};  ///< as given, for messages
};

/// Interventions "LAYER:FEATURE=VALUE[@FIRST[-LAST]]" of --set-feature and --scale-feature, ascending by layer and
/// feature. Throws a collective Error(usage).
std::vector<Intervention> interventions(std::span<const std::string> set, std::span<const std::string> scale);
/// Throws a collective Error(usage) if a transcoder of these sizes does not have a feature, or texts of up to
/// `positions` tokens not a position.
void require_fit(std::span<const Intervention>, std::int64_t layers, std::int64_t features, std::int64_t positions);

/// The changed features of a transcoder.
struct ChangedFeatures {
  std::vector<Intervention> changes;  ///< ascending by layer
  std::int64_t n_features = 0;        ///< of a layer
  ActiveFeatures vectors;             ///< of these features, with an activation of 1
  /// Function that encodes inputs [rows, layers * C] in the type of the model's activations. The activations of a layer
  /// depend on its inputs alone, and are valid until the next call.
  std::function<const kernels::SparseActivations&(const kernels::AnyMatrix& inputs)> encode;
  kernels::Array<const float> mean;  ///< [layers * C] of the inputs, where the kernels run
};

class InterventionPass {
 public:
  /// For passes over up to `rows` rows. Until the object is destroyed the forward passes of the transformer, which must
  /// outlive it, are changed. freezes: only by `forward`, with the attention patterns and norm denominators of the
  /// unchanged model.
  InterventionPass(ChangedFeatures, const TransformerSettings&, std::int64_t rows, bool freezes, Transformer&,
                   const kernels::Execution&);
  InterventionPass(const InterventionPass&) = delete;
  ~InterventionPass() { transformer_.tap({}); }

  /// Device memory of `count` interventions.
  static std::int64_t bytes(const TransformerSettings& settings, std::int64_t rows, std::int64_t count, bool freezes) {
    const ModelSettings& model = settings.architecture.model;
    return rows * (model.layers * model.d_model * kernels::bytes_of(settings.type) + 4 * count) +
           (freezes ? FrozenPass::bytes(settings, rows) : 0);
  }

  void forward(const Tokens&);

 private:
  /// Features of one layer.
  struct Source {
    std::int64_t layer = 0, first = 0, count = 0;
  };
  void tap();
  void change(std::int64_t layer, const kernels::AnyMatrix& input, const kernels::AnyMatrix& output);

  const ChangedFeatures features_;
  const std::int64_t width_, columns_;  // of a layer, and of all
  const kernels::Scalar type_;
  Transformer& transformer_;
  const kernels::Execution execution_;
  std::vector<Source> sources_;
  const device::Buffer<kernels::FeatureChange> changes_;
  const device::Buffer<std::byte> inputs_;  // [rows, layers * C]
  const device::Buffer<float> changed_;     // a' - a, by source, [rows, features]
  device::Buffer<std::byte> workspace_;
  std::optional<FrozenPass> frozen_;
};

}  // namespace weft::language_model
