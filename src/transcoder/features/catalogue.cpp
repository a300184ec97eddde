// SPDX-License-Identifier: Apache-2.0
#include "transcoder/features/catalogue.hpp"

#include <algorithm>
#include <numeric>

#include "parallel/failure.hpp"
#include "storage/durable.hpp"
#include "storage/tensor_file.hpp"

namespace weft::transcoder {
namespace {

using kernels::Scalar;

/// Gathers the values of all features on rank 0, by feature; empty elsewhere. `mine`: `per_feature` values of each
/// feature of this rank.
template <class T>
std::vector<T> on_rank_0(const std::vector<T>& mine, std::int64_t per_feature, const CatalogueFacts& facts,
                         const parallel::Grid& grid) {
  const parallel::Communicator& ranks = grid.axis(parallel::kFeatureAxis);
  const auto bytes_of_features = [&](std::int64_t n) { return n * per_feature * static_cast<std::int64_t>(sizeof(T)); };
  std::vector<std::int64_t> send(static_cast<std::size_t>(ranks.size()), 0), receive(send);
  send[0] = static_cast<std::int64_t>(mine.size() * sizeof(T));
  std::vector<T> all;
  if (ranks.rank() == 0) {
    for (std::int64_t g = 0; g < ranks.size(); ++g)
      receive[static_cast<std::size_t>(g)] =
          bytes_of_features(parallel::part(facts.n_features, ranks.size(), g).size());
    all.resize(static_cast<std::size_t>(facts.n_features * per_feature));
  }
  ranks.all_to_all(mine.data(), send, all.data(), receive);
  return all;
}

/// Returns the `per_feature` values of each feature of a layer on this rank, from the values of all layers.
template <class T>
std::vector<T> of_layer(const std::vector<T>& values, std::int64_t layer, std::int64_t n_local,
                        std::int64_t per_feature) {
  const auto begin = values.begin() + layer * n_local * per_feature;
  return {begin, begin + n_local * per_feature};
}

/// Positions and ids around rows of the dataset, in the order of the rows, so that each file is opened once.
struct Contexts {
  std::vector<std::int64_t> position;
  std::vector<std::int32_t> token;
};
Contexts contexts_of(const std::vector<std::int64_t>& rows, const CatalogueFacts& facts, dataset::RowTokens& tokens) {
  const std::int64_t window = facts.window();
  Contexts contexts;
  contexts.position.assign(rows.size(), -1);
  contexts.token.assign(rows.size() * static_cast<std::size_t>(window), -1);
  std::vector<std::size_t> order(rows.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return rows[a] < rows[b]; });
  for (const std::size_t i : order) {
    if (rows[i] < 0) continue;
    const auto [file, row] = tokens.place(rows[i]);
    const parallel::Range document = tokens.document(file, row);
    const std::int64_t begin = std::max(document.begin, row - facts.context),
                       end = std::min(document.end, row + facts.context + 1);
    std::int32_t* const first =
        contexts.token.data() + static_cast<std::int64_t>(i) * window + facts.context - (row - begin);
    tokens.read(file, begin, std::span(first, static_cast<std::size_t>(end - begin)));
    contexts.position[i] = row - document.begin;
  }
  return contexts;
}

}  // namespace

LayerCatalogue gather_layer(const CatalogueFacts& facts, std::int64_t layer, const FeatureCollection& collection,
                            const Model& model, dataset::RowTokens* tokens, const parallel::Grid& grid,
                            const kernels::Execution& execution) {
  const std::int64_t n_local = model.n_local();
  LayerCatalogue all;
  all.layer = layer;
  all.targets = row_columns(model.shape(), layer) / facts.d_model;
  const auto gather = [&](const auto& values, std::int64_t per_feature) {
    return on_rank_0(of_layer(values, layer, n_local, per_feature), per_feature, facts, grid);
  };
  all.fired = gather(collection.fired(), 1);
  all.mean = gather(collection.sum(), 1);
  for (std::size_t i = 0; i < all.mean.size(); ++i)
    if (all.fired[i] > 0) all.mean[i] /= static_cast<double>(all.fired[i]);
  all.histogram = gather(collection.histogram(), kHistogramBins);
  all.top_value = gather(collection.top_value(), facts.n_top);
  all.top_row = gather(collection.top_row(), facts.n_top);
  if (tokens != nullptr) {
    Contexts contexts;
    parallel::on_all(grid.world(), [&] {
      contexts = contexts_of(of_layer(collection.top_row(), layer, n_local, facts.n_top), facts, *tokens);
    });
    all.position = on_rank_0(contexts.position, facts.n_top, facts, grid);
    all.token = on_rank_0(contexts.token, facts.n_top * facts.window(), facts, grid);
  }

  std::vector<double> share = squared_norms(model, layer, execution);
  for (auto row = share.begin(); row != share.end(); row += all.targets) {
    const double total = std::accumulate(row, row + all.targets, 0.0);
    if (total > 0) std::transform(row, row + all.targets, row, [&](double square) { return square / total; });
  }
  all.share = on_rank_0(share, all.targets, facts, grid);
  const Neighbours neighbours = nearest_features(model, layer, facts.n_nearest, grid, execution);
  all.nearest = on_rank_0(neighbours.feature, facts.n_nearest, facts, grid);
  all.cosine = on_rank_0(neighbours.cosine, facts.n_nearest, facts, grid);
  return all;
}

CatalogueFile::CatalogueFile(const std::filesystem::path& path, const CatalogueFacts& facts,
                             const dataset::Vocabulary& vocabulary)
    : output_(path, storage::PendingOutput::Kind::file), facts_(facts), file_(storage::create_file(output_.place())) {
  storage::write_attribute(file_, "format", "weft-features");
  storage::write_attribute(file_, "format_version", std::int64_t{1});
  for (const auto& [name, text] : {std::pair{"checkpoint", &facts_.checkpoint},
                                   {"data", &facts_.data},
                                   {"dataset_fingerprint", &facts_.dataset_fingerprint},
                                   {"model", &facts_.model}})
    storage::write_attribute(file_, name, *text);
  for (const auto& [name, value] : {std::pair{"step", facts_.step},
                                    {"tokens", facts_.tokens},
                                    {"n_layers", facts_.n_layers},
                                    {"d_model", facts_.d_model},
                                    {"n_features", facts_.n_features},
                                    {"top", facts_.n_top},
                                    {"context", facts_.context}})
    storage::write_attribute(file_, name, value);
  const auto edges = histogram_edges();
  storage::write_tensor(file_, "histogram_edges", Scalar::fp64, {kHistogramBins}, edges.data());
  if (!vocabulary.empty()) {
    const std::string text = dataset::vocabulary_text(vocabulary);
    storage::write_tensor(file_, "vocabulary", Scalar::u8, {static_cast<std::int64_t>(text.size())}, text.data());
  }
}

void CatalogueFile::add(const LayerCatalogue& layer) {
  const std::string group = fmt::format("layer_{}/", layer.layer);
  const std::int64_t n = facts_.n_features;
  const auto write = [&](const char* name, Scalar type, std::vector<std::int64_t> shape, const void* data) {
    shape.insert(shape.begin(), n);
    if (std::find(shape.begin(), shape.end(), 0) == shape.end())
      storage::write_tensor(file_, group + name, type, shape, data);
  };
  write("fired", Scalar::i64, {}, layer.fired.data());
  write("mean", Scalar::fp64, {}, layer.mean.data());
  write("histogram", Scalar::i64, {kHistogramBins}, layer.histogram.data());
  write("top_value", Scalar::fp32, {facts_.n_top}, layer.top_value.data());
  write("top_row", Scalar::i64, {facts_.n_top}, layer.top_row.data());
  if (facts_.has_tokens) {
    write("top_position", Scalar::i64, {facts_.n_top}, layer.position.data());
    write("top_tokens", Scalar::i32, {facts_.n_top, facts_.window()}, layer.token.data());
  }
  write("target_share", Scalar::fp64, {layer.targets}, layer.share.data());
  write("nearest", Scalar::i64, {facts_.n_nearest}, layer.nearest.data());
  write("nearest_cosine", Scalar::fp32, {facts_.n_nearest}, layer.cosine.data());
}

void CatalogueFile::finish() {
  file_.close();
  output_.publish();
}

Json to_json(const CatalogueFacts& facts, const LayerCatalogue& layer, std::int64_t feature,
             const dataset::Vocabulary& vocabulary) {
  const auto at = [&](const auto& values, std::int64_t per_feature, std::int64_t i) {
    return values[static_cast<std::size_t>(feature * per_feature + i)];
  };
  Json json = {{"layer", layer.layer},
               {"feature", feature},
               {"checkpoint", facts.checkpoint},
               {"data", facts.data},
               {"tokens", facts.tokens},
               {"fired", at(layer.fired, 1, 0)},
               {"density", static_cast<double>(at(layer.fired, 1, 0)) / static_cast<double>(facts.tokens)},
               {"mean", at(layer.mean, 1, 0)}};
  Json& bins = json["histogram"] = {{"edges", histogram_edges()}, {"counts", Json::array()}};
  for (int bin = 0; bin < kHistogramBins; ++bin) bins["counts"].push_back(at(layer.histogram, kHistogramBins, bin));
  Json& targets = json["targets"] = Json::array();
  for (std::int64_t t = 0; t < layer.targets; ++t)
    targets.push_back({{"layer", layer.layer + t}, {"share", at(layer.share, layer.targets, t)}});
  Json& nearest = json["nearest"] = Json::array();
  for (std::int64_t i = 0; i < facts.n_nearest && at(layer.nearest, facts.n_nearest, i) >= 0; ++i)
    nearest.push_back(
        {{"feature", at(layer.nearest, facts.n_nearest, i)}, {"cosine", at(layer.cosine, facts.n_nearest, i)}});
  Json& top = json["top"] = Json::array();
  for (std::int64_t i = 0; i < facts.n_top && at(layer.top_row, facts.n_top, i) >= 0; ++i) {
    Json example = {{"activation", at(layer.top_value, facts.n_top, i)}, {"row", at(layer.top_row, facts.n_top, i)}};
    if (facts.has_tokens) {
      example["position"] = at(layer.position, facts.n_top, i);
      Json& context = example["context"] = Json::array();
      for (std::int64_t w = 0; w < facts.window(); ++w) {
        const std::int32_t id = at(layer.token, facts.n_top * facts.window(), i * facts.window() + w);
        if (id < 0) continue;
        Json token = {{"id", id}};
        if (static_cast<std::size_t>(id) < vocabulary.size()) token["text"] = vocabulary[static_cast<std::size_t>(id)];
        if (w == facts.context) token["here"] = true;
        context.push_back(std::move(token));
      }
    }
    top.push_back(std::move(example));
  }
  return json;
}

}  // namespace weft::transcoder
