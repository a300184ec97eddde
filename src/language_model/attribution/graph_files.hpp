// SPDX-License-Identifier: Apache-2.0
//
// Files of a graph (docs/file_formats.md): JSON that circuit-tracer's viewer and Neuronpedia read, with the nodes and
// effects that pruning leaves, and HDF5 with all of them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "language_model/attribution/graph.hpp"

namespace weft::language_model {

struct GraphFacts {
  std::string slug;  ///< name of the graph
  std::string scan;  ///< name of model and transcoder in programs that show graphs
  std::string prompt;
  std::vector<std::string> tokens;  ///< texts of its ids
  std::vector<std::string> logits;  ///< texts of the logit nodes
  std::string model, transcoder;    ///< paths
  Json generation;                  ///< settings, for people
  double prune_nodes = 0.8, prune_edges = 0.98;
};

/// The text of the JSON file.
std::string graph_json(const Graph&, const Pruned&, const GraphScores&, const GraphFacts&);

/// Throws Error(io).
void write_graph_matrix(const std::filesystem::path&, const Graph&, std::span<const double> influence,
                        const GraphScores&, const GraphFacts&);

}  // namespace weft::language_model
