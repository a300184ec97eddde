// SPDX-License-Identifier: Apache-2.0
#include "language_model/attribution/graph_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>

#include "base/progress.hpp"
#include "kernels/convert/affine.hpp"
#include "kernels/gemm/gemm.hpp"
#include "kernels/language/residual/residual.hpp"

namespace weft::language_model {

using kernels::AnyMatrix;
using kernels::Form;
using kernels::Scalar;

namespace {

std::int64_t workspace_bytes(std::int64_t tokens, std::int64_t columns, std::int64_t most) {
  return std::max({kernels::gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::fp32, tokens, most, columns),
                   kernels::gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::fp32, tokens, columns, most),
                   kernels::gemm_workspace(Scalar::fp32, Scalar::fp32, Scalar::fp32, tokens, columns, columns)});
}

AnyMatrix any(float* data, std::int64_t rows, std::int64_t columns) {
  return {data, Scalar::fp32, rows, columns, columns};
}

/// The forward passes with interventions.
class Passes {
 public:
  Passes(const Graph& graph, const ActiveFeatures& features, const CheckedModel& model,
         const kernels::Execution& execution)
      : graph_(graph),
        features_(features),
        model_(model),
        execution_(execution),
        frozen_(model.settings, model.tokens.rows(), model.transformer, execution),
        first_(first_of_layers(graph.layers, features)),
        responds_(members(graph, features)),
        difference_(graph.tokens() * width()),
        written_(graph.tokens() * graph.layers * width()),
        products_(graph.tokens() * most()),
        negative_(width()),
        workspace_(workspace_bytes(graph.tokens(), graph.layers * width(), most())) {
    const std::vector<float> host(static_cast<std::size_t>(width()), -1.0f);
    device::copy(execution, negative_.data(), host.data(), negative_.bytes(), device::Direction::to_device);
    kernels::fence(execution);
    frozen_.record();
    unchanged_ = logits();
    unchanged_frozen_ = frozen_logits(-1);
  }
  ~Passes() { model_.transformer.tap({}); }

  /// Changes of the logit nodes if the feature, a number in the list of all that are active, is 0.
  std::vector<double> frozen(std::int64_t feature) { return changes(frozen_logits(feature), unchanged_frozen_); }
  std::vector<double> recomputed(std::int64_t feature) {
    const ActiveFeature& place = features_.list[static_cast<std::size_t>(feature)];
    const AnyMatrix written = decoders(place.layer);
    model_.transformer.tap([&](std::int64_t layer, const AnyMatrix&, const AnyMatrix& output) {
      if (layer < place.layer || (features_.per_layer && layer > place.layer)) return;
      const AnyMatrix row = output.rows_from(place.token, 1);
      kernels::affine_rows(execution_,
                           written.rows_from(feature - first_[static_cast<std::size_t>(place.layer)], 1)
                               .columns_from((layer - place.layer) * width(), width()),
                           negative_.array(), {}, row, row);
    });
    frozen_.release();
    return changes(logits(), unchanged_);
  }
  /// The number of a node among all features that are active.
  std::int64_t number_of(std::int64_t node) const {
    return std::find(responds_.begin(), responds_.end(), node) - responds_.begin();
  }

 private:
  static std::vector<std::int64_t> first_of_layers(std::int64_t layers, const ActiveFeatures& features) {
    std::vector<std::int64_t> first(static_cast<std::size_t>(layers + 1));
    for (const ActiveFeature& feature : features.list) ++first[static_cast<std::size_t>(feature.layer + 1)];
    std::partial_sum(first.begin(), first.end(), first.begin());
    return first;
  }
  /// The node of each feature; -1: it is none, and its activation stays.
  static std::vector<std::int64_t> members(const Graph& graph, const ActiveFeatures& features) {
    std::vector<std::int64_t> nodes;
    std::int64_t next = 0;
    const auto place = [](const ActiveFeature& feature) {
      return std::tie(feature.layer, feature.token, feature.index);
    };
    for (const ActiveFeature& feature : features.list) {
      const bool member =
          next < std::ssize(graph.features) && place(graph.features[static_cast<std::size_t>(next)]) == place(feature);
      nodes.push_back(member ? next++ : -1);
    }
    return nodes;
  }
  std::int64_t width() const { return model_.text.model().d_model; }
  std::int64_t count(std::int64_t layer) const {
    return first_[static_cast<std::size_t>(layer + 1)] - first_[static_cast<std::size_t>(layer)];
  }
  std::int64_t most() const {
    std::int64_t most = 1;
    for (std::int64_t layer = 0; layer < graph_.layers; ++layer) most = std::max(most, count(layer));
    return most;
  }
  AnyMatrix decoders(std::int64_t layer) const {
    const device::Buffer<float>& all = features_.decoders[static_cast<std::size_t>(layer)];
    return any(all.data(), count(layer), all.size() / std::max<std::int64_t>(1, count(layer)));
  }
  AnyMatrix of_layer(const AnyMatrix& all, std::int64_t layer) const {
    return all.columns_from(layer * width(), width());
  }

  /// The logit nodes less the mean of all logits, after a forward pass.
  std::vector<double> logits() {
    note_progress();
    model_.transformer.forward(model_.tokens, nullptr);
    const std::vector<float> all = model_.transformer.logits(graph_.tokens() - 1, false);
    const double mean = std::accumulate(all.begin(), all.end(), 0.0) / static_cast<double>(all.size());
    std::vector<double> values;
    for (const Graph::Logit& logit : graph_.logits) values.push_back(static_cast<double>(all[logit.id]) - mean);
    return values;
  }
  static std::vector<double> changes(std::vector<double> after, const std::vector<double>& before) {
    for (std::size_t i = 0; i < after.size(); ++i) after[i] -= before[i];
    return after;
  }

  std::vector<double> frozen_logits(std::int64_t changed) {
    device::zero(execution_, written_.array());
    model_.transformer.tap([&, changed](std::int64_t layer, const AnyMatrix& input, const AnyMatrix& output) {
      respond(layer, changed, input, output);
    });
    frozen_.apply();
    return logits();
  }
  /// The output of an MLP, from the change of its input.
  void respond(std::int64_t layer, std::int64_t changed, const AnyMatrix& input, const AnyMatrix& output) {
    const std::int64_t tokens = graph_.tokens(), n = count(layer), first = first_[static_cast<std::size_t>(layer)];
    const AnyMatrix written = any(written_.data(), tokens, graph_.layers * width()),
                    difference = any(difference_.data(), tokens, width());
    kernels::affine_rows(execution_, of_layer(model_.text.mlp_inputs(), layer), negative_.array(), {}, input,
                         difference);
    if (n > 0) {
      // Each feature reads its own token.
      const AnyMatrix products = any(products_.data(), tokens, n);
      kernels::gemm(execution_, 1, difference, Form::plain,
                    any(features_.encoders.data() + first * width(), n, width()), Form::transposed, 0, products,
                    workspace_.array());
      std::vector<float> read(static_cast<std::size_t>(tokens * n)), relative(read.size());
      const std::int64_t bytes = 4 * tokens * n;
      device::copy(execution_, read.data(), products.data, bytes, device::Direction::to_host);
      kernels::fence(execution_);
      for (std::int64_t i = 0; i < n; ++i) {
        const ActiveFeature& feature = features_.list[static_cast<std::size_t>(first + i)];
        const auto at = static_cast<std::size_t>(feature.token * n + i);
        if (first + i == changed)
          relative[at] = -1;
        else if (responds_[static_cast<std::size_t>(first + i)] >= 0)
          relative[at] = read[at] / feature.activation;
      }
      device::copy(execution_, products.data, relative.data(), bytes, device::Direction::to_device);
      const AnyMatrix vectors = decoders(layer);
      kernels::gemm(execution_, 1, products, Form::plain, vectors, Form::plain, 1,
                    written.columns_from(layer * width(), vectors.columns), workspace_.array());
      kernels::fence(execution_);  // `relative` is destroyed
    }
    if (!model_.skip.empty())
      kernels::gemm(execution_, 1, difference, Form::plain, model_.skip[static_cast<std::size_t>(layer)],
                    Form::transposed, 1, of_layer(written, layer), workspace_.array());
    kernels::add_rows(execution_, of_layer(model_.text.mlp_outputs(), layer), of_layer(written, layer), output);
  }

  const Graph& graph_;
  const ActiveFeatures& features_;
  const CheckedModel model_;
  const kernels::Execution execution_;
  FrozenPass frozen_;
  const std::vector<std::int64_t> first_, responds_;
  const device::Buffer<float> difference_, written_;  // [tokens, C], [tokens, L * C]: of inputs, of outputs
  const device::Buffer<float> products_;              // [tokens, features of a layer]
  const device::Buffer<float> negative_;              // [C] of -1
  const device::Buffer<std::byte> workspace_;
  std::vector<double> unchanged_, unchanged_frozen_;
};

}  // namespace

std::int64_t check_bytes(const TransformerSettings& settings, std::int64_t tokens, std::int64_t most) {
  const std::int64_t width = settings.architecture.model.d_model, columns = settings.architecture.model.layers * width;
  return FrozenPass::bytes(settings, tokens) + 4 * (tokens * (width + columns + most) + width) +
         workspace_bytes(tokens, columns, most);
}

std::vector<CheckedFeature> check_graph(const Graph& graph, std::span<const double> influence, std::int64_t count,
                                        const ActiveFeatures& features, const CheckedModel& model,
                                        const kernels::Execution& execution) {
  std::vector<std::int64_t> order(graph.features.size());
  std::iota(order.begin(), order.end(), std::int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return influence[static_cast<std::size_t>(a)] > influence[static_cast<std::size_t>(b)];
  });
  order.resize(std::min(order.size(), static_cast<std::size_t>(count)));
  Passes passes(graph, features, model, execution);
  std::vector<CheckedFeature> checked;
  for (const std::int64_t node : order)
    checked.push_back({node, changes_without(graph, node), passes.frozen(passes.number_of(node)), {}});
  for (CheckedFeature& one : checked) one.recomputed = passes.recomputed(passes.number_of(one.feature));
  return checked;
}

Json to_json(std::span<const CheckedFeature> checked, const Graph& graph) {
  Json json = Json::array();
  for (const CheckedFeature& one : checked) {
    const ActiveFeature& feature = graph.features[static_cast<std::size_t>(one.feature)];
    json.push_back({{"layer", feature.layer},
                    {"feature", feature.index},
                    {"token", feature.token},
                    {"activation", feature.activation},
                    {"logits", Json::array()}});
    for (std::size_t i = 0; i < graph.logits.size(); ++i)
      json.back()["logits"].push_back({{"id", graph.logits[i].id},
                                       {"predicted", one.predicted[i]},
                                       {"frozen", one.frozen[i]},
                                       {"recomputed", one.recomputed[i]}});
  }
  return json;
}

std::string to_table(std::span<const CheckedFeature> checked, const Graph& graph, const std::string& logit) {
  std::string text = fmt::format("features set to 0, change of the logit of \"{}\"\n{:<22}{:>7}{:>12}{:>12}{:>12}",
                                 logit, "layer:feature", "token", "predicted", "frozen", "recomputed");
  double largest = 0, difference = 0, product = 0, squares = 0, measured = 0;
  for (const CheckedFeature& one : checked) {
    const ActiveFeature& feature = graph.features[static_cast<std::size_t>(one.feature)];
    text += fmt::format("\n{:<22}{:>7}{:>12.4g}{:>12.4g}{:>12.4g}", fmt::format("{}:{}", feature.layer, feature.index),
                        feature.token, one.predicted[0], one.frozen[0], one.recomputed[0]);
    for (std::size_t i = 0; i < one.predicted.size(); ++i) {
      largest = std::max(largest, std::abs(one.predicted[i]));
      difference = std::max(difference, std::abs(one.predicted[i] - one.frozen[i]));
      product += one.predicted[i] * one.recomputed[i];
      squares += one.predicted[i] * one.predicted[i];
      measured += one.recomputed[i] * one.recomputed[i];
    }
  }
  return text + fmt::format(
                    "\nall {} logits: predicted and frozen differ by at most {:.2g} (largest change {:.4g}); "
                    "cosine of predicted and recomputed {:.4f}",
                    graph.logits.size(), difference, largest,
                    squares * measured > 0 ? product / std::sqrt(squares * measured) : 0.0);
}

}  // namespace weft::language_model
