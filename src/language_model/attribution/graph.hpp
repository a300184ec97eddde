// SPDX-License-Identifier: Apache-2.0
//
// The attribution graph of a text: direct effects between its nodes, with scores and pruning as circuit-tracer defines
// them. With A the matrix of the absolute effects, each row (target) divided by its sum, and p the probabilities of the
// logit nodes:
//
//   influence     of a node on the logits: p (A + A² + ...). Features read earlier layers only, so one sweep over the
//                 rows from the last to the first forms it
//   replacement   influence of tokens / influence of tokens and errors
//   completeness  mean over nodes, weighted by influence + p, of the part of a row that does not come from errors
//   pruning       the fewest nodes that hold `nodes` of all influence, tokens and logits; of the effects between these
//                 the fewest that hold `edges` of their influence; then nodes without effects go, again and again
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "language_model/attribution/active_features.hpp"

namespace weft::language_model {

struct Graph {
  struct Logit {
    std::uint32_t id = 0;
    double probability = 0;
  };
  std::vector<std::uint32_t> ids;  ///< of the text
  std::int64_t layers = 0;
  std::int64_t active = 0;              ///< active features of the text, of which
  std::vector<ActiveFeature> features;  ///< these are nodes
  std::vector<Logit> logits;            ///< descending by probability
  /// [targets(), sources()]: targets are features, then logits; sources are features, errors by layer and token,
  /// tokens.
  std::vector<float> effects;

  std::int64_t tokens() const { return std::ssize(ids); }
  std::int64_t targets() const { return std::ssize(features) + std::ssize(logits); }
  std::int64_t first_error() const { return std::ssize(features); }
  std::int64_t first_token() const { return first_error() + layers * tokens(); }
  std::int64_t sources() const { return first_token() + tokens(); }
  std::span<const float> row(std::int64_t target) const {
    return {effects.data() + target * sources(), static_cast<std::size_t>(sources())};
  }
};

/// Effects on one target.
struct TargetRow {
  std::int64_t source = 0;         ///< the target as a source; -1: a logit
  double probability = 0;          ///< of a logit
  const float* effects = nullptr;  ///< [sources]
};
/// Influence of each source on the logits. A row comes after those of all its sources.
std::vector<double> influence(std::span<const TargetRow> rows, std::int64_t sources);
std::vector<double> influence(const Graph&);

/// Changes of the logits if a feature were 0 and the others followed linearly: the sum over all paths to each logit.
std::vector<double> changes_without(const Graph&, std::int64_t feature);

struct GraphScores {
  double replacement = 0, completeness = 0;
};
GraphScores scores(const Graph&, std::span<const double> influence);

struct Pruned {
  struct Edge {
    std::int64_t target = 0, source = 0;
  };
  std::vector<double> cumulative;  ///< by source: part of all influence that nodes with at least as much hold
  std::vector<char> sources;       ///< by source: it stays
  std::vector<Edge> edges;
};
Pruned prune(const Graph&, std::span<const double> influence, double nodes, double edges);

}  // namespace weft::language_model
