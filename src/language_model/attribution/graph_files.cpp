// SPDX-License-Identifier: Apache-2.0
#include "language_model/attribution/graph_files.hpp"

#include <fmt/format.h>

#include <iterator>
#include <set>
#include <utility>

#include "run/build.hpp"
#include "storage/pending_output.hpp"
#include "storage/tensor_file.hpp"

namespace weft::language_model {
namespace {

using kernels::Scalar;

/// One number for a pair (Cantor), as circuit-tracer numbers the features of all layers.
std::int64_t pair_number(std::int64_t a, std::int64_t b) { return (a + b) * (a + b + 1) / 2 + b; }

/// Nodes and their names.
class Nodes {
 public:
  explicit Nodes(const Graph& graph) : graph_(graph) {
    for (const ActiveFeature& feature : graph.features)
      if (feature.layer == 0 && feature.index < graph.layers) taken_.insert({feature.index, feature.token});
  }

  std::string id_of_source(std::int64_t source) const {
    if (source < graph_.first_error()) {
      const ActiveFeature& feature = graph_.features[static_cast<std::size_t>(source)];
      return fmt::format("{}_{}_{}", feature.layer, feature.index, feature.token);
    }
    if (source < graph_.first_token()) {
      const auto [layer, token] = place_of_error(source);
      // circuit-tracer's name of an error is that of a feature of layer 0.
      return fmt::format("0_{}_{}{}", layer, token, taken_.contains({layer, token}) ? "_error" : "");
    }
    const std::int64_t token = source - graph_.first_token();
    return fmt::format("E_{}_{}", graph_.ids[static_cast<std::size_t>(token)], token);
  }
  std::string id_of_target(std::int64_t target) const {
    if (target < graph_.first_error()) return id_of_source(target);
    return fmt::format("{}_{}_{}", graph_.layers + 1, logit(target - graph_.first_error()).id, graph_.tokens() - 1);
  }

  Json source(std::int64_t source, double cumulative) const {
    if (source < graph_.first_error()) {
      const ActiveFeature& feature = graph_.features[static_cast<std::size_t>(source)];
      return node(id_of_source(source), pair_number(feature.layer, feature.index), std::to_string(feature.layer),
                  feature.token, "cross layer transcoder", fmt::format("{}_{}-0", feature.layer, feature.index), "",
                  cumulative, feature.activation);
    }
    if (source < graph_.first_token()) {
      const auto [layer, token] = place_of_error(source);
      return node(id_of_source(source), -1, std::to_string(layer), token, "mlp reconstruction error",
                  fmt::format("{}_{}-0", layer, token), "", cumulative, {});
    }
    const std::int64_t token = source - graph_.first_token();
    return node(id_of_source(source), token, "E", token, "embedding",
                fmt::format("E_{}-{}", graph_.ids[static_cast<std::size_t>(token)], token), "", cumulative, {});
  }
  Json logit(std::int64_t number, const std::string& text) const {
    const Graph::Logit& logit = this->logit(number);
    Json json = node(id_of_target(graph_.first_error() + number), logit.id, std::to_string(graph_.layers + 1),
                     graph_.tokens() - 1, "logit", fmt::format("L_{}-{}", logit.id, graph_.tokens() - 1),
                     fmt::format("Output \"{}\" (p={:.3f})", text, logit.probability), {}, {});
    json["token_prob"] = logit.probability;
    json["is_target_logit"] = number == 0;
    return json;
  }

 private:
  const Graph::Logit& logit(std::int64_t number) const { return graph_.logits[static_cast<std::size_t>(number)]; }
  std::pair<std::int64_t, std::int64_t> place_of_error(std::int64_t source) const {
    const std::int64_t number = source - graph_.first_error();
    return {number / graph_.tokens(), number % graph_.tokens()};
  }
  static Json node(const std::string& id, std::int64_t feature, const std::string& layer, std::int64_t token,
                   const char* type, const std::string& js_id, const std::string& label, const Json& influence,
                   const Json& activation) {
    return {{"node_id", id},           {"feature", feature}, {"layer", layer},           {"ctx_idx", token},
            {"feature_type", type},    {"token_prob", 0.0},  {"is_target_logit", false}, {"run_idx", 0},
            {"reverse_ctx_idx", 0},    {"jsNodeId", js_id},  {"clerp", label},           {"influence", influence},
            {"activation", activation}};
  }

  const Graph& graph_;
  std::set<std::pair<std::int64_t, std::int64_t>> taken_;  // indices and tokens of features that errors are named like
};

}  // namespace

std::string graph_json(const Graph& graph, const Pruned& pruned, const GraphScores& scores, const GraphFacts& facts) {
  const Nodes nodes(graph);
  const Json metadata = {
      {"slug", facts.slug},
      {"scan", facts.scan},
      {"transcoder_list", Json::array()},
      {"prompt_tokens", facts.tokens},
      {"prompt", facts.prompt},
      {"node_threshold", facts.prune_nodes},
      {"schema_version", 1},
      {"info",
       {{"generator", {{"name", "weft attribute"}, {"version", run::build_record.version}}},
        {"source_urls", Json::array()},
        {"model", facts.model},
        {"transcoder", facts.transcoder}}},
      {"generation_settings", facts.generation},
      {"pruning_settings", {{"node_threshold", facts.prune_nodes}, {"edge_threshold", facts.prune_edges}}},
      {"scores", {{"replacement", scores.replacement}, {"completeness", scores.completeness}}}};
  std::string text =
      fmt::format("{{\n\"metadata\": {},\n\"qParams\": {},\n\"nodes\": [", json_text(metadata),
                  R"({"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""})");
  const char* separator = "\n";
  const auto add = [&](const Json& node) {
    text += separator + json_text(node);
    separator = ",\n";
  };
  for (std::int64_t i = 0; i < graph.sources(); ++i)
    if (pruned.sources[static_cast<std::size_t>(i)] != 0)
      add(nodes.source(i, pruned.cumulative[static_cast<std::size_t>(i)]));
  for (std::size_t i = 0; i < graph.logits.size(); ++i) add(nodes.logit(static_cast<std::int64_t>(i), facts.logits[i]));
  text += "\n],\n\"links\": [";
  separator = "\n";
  for (const Pruned::Edge& edge : pruned.edges) {
    fmt::format_to(std::back_inserter(text), "{}{{\"source\": \"{}\", \"target\": \"{}\", \"weight\": {}}}", separator,
                   nodes.id_of_source(edge.source), nodes.id_of_target(edge.target),
                   graph.row(edge.target)[static_cast<std::size_t>(edge.source)]);
    separator = ",\n";
  }
  return text + "\n]\n}\n";
}

void write_graph_matrix(const std::filesystem::path& path, const Graph& graph, std::span<const double> influence,
                        const GraphScores& scores, const GraphFacts& facts) {
  storage::PendingOutput output(path, storage::PendingOutput::Kind::file);
  {
    storage::Handle file = storage::create_file(output.place());
    storage::write_attribute(file, "format", "weft-graph");
    storage::write_attribute(file, "format_version", std::int64_t{1});
    for (const auto& [name, value] :
         {std::pair{"prompt", &facts.prompt}, {"model", &facts.model}, {"transcoder", &facts.transcoder}})
      storage::write_attribute(file, name, *value);
    storage::write_attribute(file, "layers", graph.layers);
    storage::write_attribute(file, "active_features", graph.active);
    const auto write = [&]<class T>(const char* name, Scalar type, std::vector<std::int64_t> shape,
                                    const std::vector<T>& values) {
      storage::write_tensor(file, name, type, shape, values.data());
    };
    const std::int64_t n = std::ssize(graph.features), logits = std::ssize(graph.logits);
    std::vector<std::int64_t> places;
    std::vector<float> activations;
    for (const ActiveFeature& feature : graph.features) {
      places.insert(places.end(), {feature.layer, feature.token, feature.index});
      activations.push_back(feature.activation);
    }
    std::vector<std::uint32_t> ids;
    std::vector<double> probabilities;
    for (const Graph::Logit& logit : graph.logits) {
      ids.push_back(logit.id);
      probabilities.push_back(logit.probability);
    }
    if (n > 0) write("features", Scalar::i64, {n, 3}, places);
    if (n > 0) write("activations", Scalar::fp32, {n}, activations);
    write("tokens", Scalar::u32, {graph.tokens()}, graph.ids);
    write("logits", Scalar::u32, {logits}, ids);
    write("probabilities", Scalar::fp64, {logits}, probabilities);
    write("influence", Scalar::fp64, {graph.sources()}, std::vector<double>(influence.begin(), influence.end()));
    write("scores", Scalar::fp64, {2}, std::vector<double>{scores.replacement, scores.completeness});
    write("effects", Scalar::fp32, {graph.targets(), graph.sources()}, graph.effects);
    file.close();
  }
  output.publish();
}

}  // namespace weft::language_model
