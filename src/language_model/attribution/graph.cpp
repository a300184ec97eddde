// SPDX-License-Identifier: Apache-2.0
#include "language_model/attribution/graph.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace weft::language_model {
namespace {

/// Rows that sum to less count as this, as in circuit-tracer: a row of zeros stays one.
constexpr double kLeastSum = 1e-10;

double magnitude(float effect) { return std::abs(static_cast<double>(effect)); }

/// The sum of a row's magnitudes over the sources that stay.
double sum_of(std::span<const float> row, const std::vector<char>& stay = {}) {
  double sum = 0;
  for (std::size_t i = 0; i < row.size(); ++i)
    if (stay.empty() || stay[i] != 0) sum += magnitude(row[i]);
  return std::max(sum, kLeastSum);
}

/// The score of the last of the fewest scores that hold `part` of their sum. Reorders the scores.
double threshold(std::vector<double>& scores, double part) {
  if (scores.empty()) return 0;
  const double wanted = part * std::accumulate(scores.begin(), scores.end(), 0.0);
  double above = 0;
  auto begin = scores.begin(), end = scores.end();
  while (end - begin > 1) {
    // The larger half of what is left: the threshold is in it if it reaches the wanted sum.
    const auto middle = begin + (end - begin) / 2;
    std::nth_element(begin, middle, end, std::greater<>());
    const double sum = std::accumulate(begin, middle, 0.0);
    if (above + sum >= wanted) {
      end = middle;
    } else {
      above += sum;
      begin = middle;
    }
  }
  return *begin;
}

/// Influence and p of a target.
double weight_of(const Graph& graph, std::span<const double> influence, std::int64_t target) {
  return target < graph.first_error()
             ? influence[static_cast<std::size_t>(target)]
             : graph.logits[static_cast<std::size_t>(target - graph.first_error())].probability;
}

/// Influence through the effects between the sources that stay.
std::vector<double> influence_within(const Graph& graph, const std::vector<char>& stay) {
  std::vector<double> influence(static_cast<std::size_t>(graph.sources()));
  for (std::int64_t target = graph.targets(); target-- > 0;) {
    if (target < graph.first_error() && stay[static_cast<std::size_t>(target)] == 0) continue;
    const double weight = weight_of(graph, influence, target);
    if (weight == 0) continue;
    const std::span<const float> row = graph.row(target);
    const double share = weight / sum_of(row, stay);
    for (std::size_t i = 0; i < row.size(); ++i)
      if (stay[i] != 0) influence[i] += share * magnitude(row[i]);
  }
  return influence;
}

}  // namespace

std::vector<double> influence(std::span<const TargetRow> rows, std::int64_t sources) {
  std::vector<double> influence(static_cast<std::size_t>(sources));
  for (std::size_t i = rows.size(); i-- > 0;) {
    const double weight =
        rows[i].source < 0 ? rows[i].probability : influence[static_cast<std::size_t>(rows[i].source)];
    if (weight == 0) continue;
    const std::span<const float> row(rows[i].effects, influence.size());
    const double share = weight / sum_of(row);
    for (std::size_t source = 0; source < row.size(); ++source) influence[source] += share * magnitude(row[source]);
  }
  return influence;
}

std::vector<double> influence(const Graph& graph) {
  std::vector<TargetRow> rows;
  for (std::int64_t i = 0; i < graph.targets(); ++i) {
    const std::int64_t logit = i - graph.first_error();
    rows.push_back({logit < 0 ? i : -1, logit < 0 ? 0 : graph.logits[static_cast<std::size_t>(logit)].probability,
                    graph.row(i).data()});
  }
  return influence(rows, graph.sources());
}

std::vector<double> changes_without(const Graph& graph, std::int64_t feature) {
  // Changes of activations, as parts of them.
  std::vector<double> change(graph.features.size());
  const auto read = [&](std::int64_t target) {
    return std::inner_product(change.begin() + feature, change.end(), graph.row(target).begin() + feature, 0.0);
  };
  change[static_cast<std::size_t>(feature)] = -1;
  for (std::int64_t i = feature + 1; i < graph.first_error(); ++i)
    change[static_cast<std::size_t>(i)] =
        read(i) / static_cast<double>(graph.features[static_cast<std::size_t>(i)].activation);
  std::vector<double> logits;
  for (std::int64_t target = graph.first_error(); target < graph.targets(); ++target) logits.push_back(read(target));
  return logits;
}

GraphScores scores(const Graph& graph, std::span<const double> influence) {
  const auto sum = [&](std::int64_t begin, std::int64_t end) {
    return std::accumulate(influence.begin() + begin, influence.begin() + end, 0.0);
  };
  const double of_errors = sum(graph.first_error(), graph.first_token()),
               of_tokens = sum(graph.first_token(), graph.sources());
  // Errors and tokens have no incoming effects: nothing of them comes from errors.
  double complete = of_errors + of_tokens, all = complete;
  for (std::int64_t target = 0; target < graph.targets(); ++target) {
    const std::span<const float> row = graph.row(target);
    double from_errors = 0;
    for (std::int64_t i = graph.first_error(); i < graph.first_token(); ++i)
      from_errors += magnitude(row[static_cast<std::size_t>(i)]);
    const double weight = weight_of(graph, influence, target);
    complete += weight * (1 - from_errors / sum_of(row));
    all += weight;
  }
  return {of_tokens / std::max(of_tokens + of_errors, kLeastSum), complete / std::max(all, kLeastSum)};
}

Pruned prune(const Graph& graph, std::span<const double> influence, double nodes, double edges) {
  Pruned pruned;
  const auto n = static_cast<std::size_t>(graph.sources());

  // 1. Nodes. Logits have no influence on logits.
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return influence[a] > influence[b]; });
  const double all = std::accumulate(influence.begin(), influence.end(), 0.0);
  pruned.cumulative.resize(n);
  double so_far = 0;
  for (const std::size_t i : order) pruned.cumulative[i] = (so_far += influence[i]) / std::max(all, kLeastSum);
  std::vector<double> values(influence.begin(), influence.end());
  const double least = threshold(values, nodes);
  pruned.sources.resize(n);
  for (std::size_t i = 0; i < n; ++i)
    pruned.sources[i] = influence[i] >= least || static_cast<std::int64_t>(i) >= graph.first_token();

  // 2. Effects between them: a row's weight times its parts.
  const auto stays = [&](std::int64_t target) {
    return target >= graph.first_error() || pruned.sources[static_cast<std::size_t>(target)] != 0;
  };
  const std::vector<double> within = influence_within(graph, pruned.sources);
  std::vector<double> shares(static_cast<std::size_t>(graph.targets()));
  values.clear();
  const auto score = [&](std::int64_t target, std::size_t source) {
    return shares[static_cast<std::size_t>(target)] * magnitude(graph.row(target)[source]);
  };
  const auto each_effect = [&](const auto& body) {
    for (std::int64_t target = 0; target < graph.targets(); ++target)
      if (stays(target))
        for (std::size_t source = 0; source < n; ++source)
          if (pruned.sources[source] != 0 && graph.row(target)[source] != 0) body(target, source);
  };
  for (std::int64_t target = 0; target < graph.targets(); ++target)
    if (stays(target))
      shares[static_cast<std::size_t>(target)] =
          weight_of(graph, within, target) / sum_of(graph.row(target), pruned.sources);
  each_effect([&](std::int64_t target, std::size_t source) { values.push_back(score(target, source)); });
  const double least_score = threshold(values, edges);
  each_effect([&](std::int64_t target, std::size_t source) {
    if (score(target, source) >= least_score) pruned.edges.push_back({target, static_cast<std::int64_t>(source)});
  });

  // 3. Features and errors that nothing reads any more, and features that read nothing, until there are none.
  for (bool changed = true; changed;) {
    std::vector<char> reads(n), is_read(n);
    for (const Pruned::Edge& edge : pruned.edges) {
      if (edge.target < graph.first_error()) reads[static_cast<std::size_t>(edge.target)] = 1;
      is_read[static_cast<std::size_t>(edge.source)] = 1;
    }
    changed = false;
    for (std::int64_t i = 0; i < graph.first_token(); ++i) {
      const auto at = static_cast<std::size_t>(i);
      if (pruned.sources[at] == 0 || (is_read[at] != 0 && (i >= graph.first_error() || reads[at] != 0))) continue;
      pruned.sources[at] = 0;
      changed = true;
    }
    std::erase_if(pruned.edges, [&](const Pruned::Edge& edge) {
      return !stays(edge.target) || pruned.sources[static_cast<std::size_t>(edge.source)] == 0;
    });
  }
  return pruned;
}

}  // namespace weft::language_model
