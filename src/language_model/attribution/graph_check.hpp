// SPDX-License-Identifier: Apache-2.0
//
// What a graph predicts of interventions, compared with the model: a feature is set to 0, and the change of each logit
// node (before the soft cap, less the mean of all logits) is
//
//   predicted    the sum over all paths of the graph: each feature changes by what it reads, as if it were linear
//   frozen       measured in a forward pass with the patterns and denominators of the text, in which the outputs of
//   MLPs
//                change by what features write, and these by what they read: the prediction, but for rounding
//   recomputed   measured in the model itself, of which one MLP output (cross-layer: several) lacks what the feature
//                writes: patterns, denominators and MLPs follow
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "language_model/attribution/frozen_pass.hpp"
#include "language_model/attribution/frozen_text.hpp"
#include "language_model/attribution/graph.hpp"

namespace weft::language_model {

struct CheckedFeature {
  std::int64_t feature = 0;                           ///< number in the graph
  std::vector<double> predicted, frozen, recomputed;  ///< by logit node
};

/// The model whose graph is checked; its text is frozen.
struct CheckedModel {
  const TransformerSettings& settings;
  Transformer& transformer;
  const FrozenText& text;
  Tokens tokens;
  std::span<const kernels::AnyMatrix> skip;  ///< as FrozenBackward takes them
};

/// The `count` features with most influence, descending. features: all that are active. Runs 2 count + 2 forward
/// passes; the text is no longer frozen then.
std::vector<CheckedFeature> check_graph(const Graph&, std::span<const double> influence, std::int64_t count,
                                        const ActiveFeatures& features, const CheckedModel&, const kernels::Execution&);
/// Device memory of a check, with at most so many active features in a layer.
std::int64_t check_bytes(const TransformerSettings&, std::int64_t tokens, std::int64_t most);

Json to_json(std::span<const CheckedFeature>, const Graph&);
/// A table of the changes of the most probable next token, and how well all changes agree.
std::string to_table(std::span<const CheckedFeature>, const Graph&, const std::string& logit);

}  // namespace weft::language_model
