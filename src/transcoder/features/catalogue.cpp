// SPDX-License-Identifier: Apache-2.0
#include "transcoder/features/catalogue.hpp"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <tuple>
#include <type_traits>

#include "parallel/failure.hpp"
#include "storage/durable.hpp"
#include "storage/tensor_file.hpp"

namespace weft::transcoder {
namespace {

using kernels::Scalar;

constexpr std::int64_t kLargestLabels = std::int64_t{256} << 20;  // bytes

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

LayerCatalogue gather_layer(const CatalogueFacts& facts, std::int64_t layer, const CatalogueSources& sources,
                            const parallel::Grid& grid, const kernels::Execution& execution) {
  const FeatureCollection& collection = sources.collection;
  const Model& model = sources.model;
  const std::int64_t n_local = model.n_local(), n_examples = facts.n_examples();
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
  all.value = gather(collection.value(), n_examples);
  all.row = gather(collection.row(), n_examples);
  if (sources.tokens != nullptr) {
    Contexts contexts;
    parallel::on_all(grid.world(), [&] {
      contexts = contexts_of(of_layer(collection.row(), layer, n_local, n_examples), facts, *sources.tokens);
    });
    all.position = on_rank_0(contexts.position, n_examples, facts, grid);
    all.token = on_rank_0(contexts.token, n_examples * facts.window(), facts, grid);
    all.shade = gather(sources.shades->values(), n_examples * facts.window());
    for (std::size_t i = 0; i < all.shade.size(); ++i)
      if (all.token[i] < 0) all.shade[i] = 0;  // of another document
  }

  std::vector<double> share = squared_norms(model, layer, execution);
  for (auto row = share.begin(); row != share.end(); row += all.targets) {
    const double total = std::accumulate(row, row + all.targets, 0.0);
    if (total > 0) std::transform(row, row + all.targets, row, [&](double square) { return square / total; });
  }
  all.share = on_rank_0(share, all.targets, facts, grid);
  const LargestEntries nearest = nearest_features(model, layer, facts.n_nearest, grid, execution);
  all.nearest = on_rank_0(nearest.index, facts.n_nearest, facts, grid);
  all.cosine = on_rank_0(nearest.value, facts.n_nearest, facts, grid);
  const auto gather_largest = [&](const LargestEntries& entries, std::int64_t k) {
    return LargestEntries{on_rank_0(entries.value, k, facts, grid), on_rank_0(entries.index, k, facts, grid)};
  };
  if (sources.unembedding != nullptr)
    for (const float sign : {1.0f, -1.0f})
      (sign > 0 ? all.raised : all.lowered) = gather_largest(
          logit_effects(model, sources.normalisation, layer, facts.n_logits, sign, *sources.unembedding, execution),
          facts.n_logits);
  if (facts.n_downstream > 0)
    all.downstream =
        gather_largest(downstream_features(model, sources.normalisation, layer, facts.n_downstream, grid, execution),
                       facts.n_downstream);
  if (facts.n_coactive > 0)
    all.coactive = gather_largest(
        coactive_features(sources.drawn, layer, facts.n_features, facts.n_coactive, grid.axis(parallel::kFeatureAxis)),
        facts.n_coactive);
  return all;
}

CatalogueFile::CatalogueFile(const std::filesystem::path& path, const CatalogueFacts& facts,
                             const dataset::Vocabulary& vocabulary, const Labels& labels)
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
                                    {"sample", facts_.n_sample},
                                    {"context", facts_.context}})
    storage::write_attribute(file_, name, value);
  const auto edges = histogram_edges();
  storage::write_tensor(file_, "histogram_edges", Scalar::fp64, {kHistogramBins}, edges.data());
  if (!vocabulary.empty()) {
    const std::string text = dataset::vocabulary_text(vocabulary);
    storage::write_tensor(file_, "vocabulary", Scalar::u8, {static_cast<std::int64_t>(text.size())}, text.data());
  }
  std::string lines;
  for (const auto& [name, label] : labels)
    lines += json_text(Json{{"layer", name.first}, {"feature", name.second}, {"label", label}}) + "\n";
  if (!lines.empty())
    storage::write_tensor(file_, "labels", Scalar::u8, {static_cast<std::int64_t>(lines.size())}, lines.data());
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
  const std::int64_t n_examples = facts_.n_examples();
  for (const bool sample : {false, true}) {
    // The examples of one kind, `width` values each.
    const std::int64_t first = sample ? facts_.n_top : 0, count = sample ? facts_.n_sample : facts_.n_top;
    const auto write_part = [&](const char* name, Scalar type, const auto& values, std::int64_t width, bool has_width) {
      std::remove_cvref_t<decltype(values)> part;
      for (std::int64_t f = 0; f < n; ++f) {
        const auto begin = values.begin() + (f * n_examples + first) * width;
        part.insert(part.end(), begin, begin + count * width);
      }
      std::vector<std::int64_t> shape{count};
      if (has_width) shape.push_back(width);
      write(fmt::format("{}_{}", sample ? "sample" : "top", name).c_str(), type, shape, part.data());
    };
    write_part("value", Scalar::fp32, layer.value, 1, false);
    write_part("row", Scalar::i64, layer.row, 1, false);
    if (!facts_.has_tokens) continue;
    write_part("position", Scalar::i64, layer.position, 1, false);
    write_part("tokens", Scalar::i32, layer.token, facts_.window(), true);
    write_part("shade", Scalar::u8, layer.shade, facts_.window(), true);
  }
  write("target_share", Scalar::fp64, {layer.targets}, layer.share.data());
  write("nearest", Scalar::i64, {facts_.n_nearest}, layer.nearest.data());
  write("nearest_cosine", Scalar::fp32, {facts_.n_nearest}, layer.cosine.data());
  for (const auto& [name, value, entries, k] :
       {std::tuple{"raised", "raised_effect", &layer.raised, facts_.n_logits},
        {"lowered", "lowered_effect", &layer.lowered, facts_.n_logits},
        {"downstream", "downstream_effect", &layer.downstream, facts_.n_downstream},
        {"coactive", "coactive_part", &layer.coactive, facts_.n_coactive}}) {
    write(name, Scalar::i64, {k}, entries->index.data());
    write(value, Scalar::fp32, {k}, entries->value.data());
  }
}

void CatalogueFile::finish() {
  file_.close();
  output_.publish();
}

Json to_json(const CatalogueFacts& facts, const LayerCatalogue& layer, std::int64_t feature,
             const dataset::Vocabulary& vocabulary, const Labels& labels) {
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
  if (const auto label = labels.find({layer.layer, feature}); label != labels.end()) json["label"] = label->second;
  Json& bins = json["histogram"] = {{"edges", histogram_edges()}, {"counts", Json::array()}};
  for (int bin = 0; bin < kHistogramBins; ++bin) bins["counts"].push_back(at(layer.histogram, kHistogramBins, bin));
  Json& targets = json["targets"] = Json::array();
  for (std::int64_t t = 0; t < layer.targets; ++t)
    targets.push_back({{"layer", layer.layer + t}, {"share", at(layer.share, layer.targets, t)}});
  Json& nearest = json["nearest"] = Json::array();
  for (std::int64_t i = 0; i < facts.n_nearest && at(layer.nearest, facts.n_nearest, i) >= 0; ++i)
    nearest.push_back(
        {{"feature", at(layer.nearest, facts.n_nearest, i)}, {"cosine", at(layer.cosine, facts.n_nearest, i)}});
  const auto with_text = [&](std::int64_t id) {
    Json token = {{"id", id}};
    if (static_cast<std::size_t>(id) < vocabulary.size()) token["text"] = vocabulary[static_cast<std::size_t>(id)];
    return token;
  };
  for (const auto& [name, entries] : {std::pair{"raised", &layer.raised}, {"lowered", &layer.lowered}})
    for (std::int64_t i = 0; i < facts.n_logits && at(entries->index, facts.n_logits, i) >= 0; ++i) {
      Json token = with_text(at(entries->index, facts.n_logits, i));
      token["effect"] = at(entries->value, facts.n_logits, i);
      json[name].push_back(std::move(token));
    }
  for (std::int64_t i = 0; i < facts.n_coactive && at(layer.coactive.index, facts.n_coactive, i) >= 0; ++i) {
    const std::int64_t other = at(layer.coactive.index, facts.n_coactive, i) % facts.n_features;
    const double part = at(layer.coactive.value, facts.n_coactive, i);
    const auto fired = static_cast<double>(layer.fired[static_cast<std::size_t>(other)]);
    json["coactive"].push_back(
        {{"feature", other}, {"part", part}, {"lift", part * static_cast<double>(facts.tokens) / fired}});
  }
  for (std::int64_t i = 0; i < facts.n_downstream && at(layer.downstream.index, facts.n_downstream, i) >= 0; ++i) {
    const std::int64_t index = at(layer.downstream.index, facts.n_downstream, i);
    json["downstream"].push_back({{"layer", index / facts.n_features},
                                  {"feature", index % facts.n_features},
                                  {"effect", at(layer.downstream.value, facts.n_downstream, i)}});
  }
  const std::int64_t n_examples = facts.n_examples();
  const double strongest = n_examples > 0 ? static_cast<double>(at(layer.value, n_examples, 0)) : 0;
  for (const char* const kind : {"top", "sample"}) json[kind] = Json::array();
  for (std::int64_t i = 0; i < n_examples; ++i) {
    if (at(layer.row, n_examples, i) < 0) continue;
    Json example = {{"activation", at(layer.value, n_examples, i)}, {"row", at(layer.row, n_examples, i)}};
    if (facts.has_tokens) {
      example["position"] = at(layer.position, n_examples, i);
      Json& context = example["context"] = Json::array();
      for (std::int64_t w = 0; w < facts.window(); ++w) {
        const std::int64_t place = i * facts.window() + w;
        const std::int32_t id = at(layer.token, n_examples * facts.window(), place);
        if (id < 0) continue;
        Json token = with_text(id);
        if (w == facts.context) token["here"] = true;
        if (const int shade = at(layer.shade, n_examples * facts.window(), place); shade > 0)
          token["activation"] = strongest * shade / 255;
        context.push_back(std::move(token));
      }
    }
    json[i < facts.n_top ? "top" : "sample"].push_back(std::move(example));
  }
  return json;
}

Labels read_labels(const std::string& path, std::int64_t n_layers, std::int64_t n_features) {
  Labels labels;
  std::istringstream file(storage::read_text(path, kLargestLabels));
  std::int64_t number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const Json object = parse_json(line);
    const auto refuse = [&](const std::string& why) {
      return error(ExitCode::data, "{}:{}: {} (a line is {{\"layer\": 3, \"feature\": 17, \"label\": \"text\"}})", path,
                   number, why);
    };
    if (!object.is_object()) throw refuse("no JSON object");
    const auto index = [&](const char* name, std::int64_t n) {
      const auto found = object.find(name);
      const bool integer = found != object.end() && found->is_number_integer();
      const std::int64_t value = integer ? found->get<std::int64_t>() : -1;
      if (value < 0 || value >= n) throw refuse(fmt::format("\"{}\" is not a number from 0 to {}", name, n - 1));
      return value;
    };
    const std::int64_t layer = index("layer", n_layers), feature = index("feature", n_features);
    const auto label = object.find("label");
    if (label == object.end() || !label->is_string()) throw refuse("\"label\" is not a text");
    if (!labels.try_emplace({layer, feature}, label->get<std::string>()).second)
      throw refuse("the feature has a label already");
  }
  return labels;
}

}  // namespace weft::transcoder
