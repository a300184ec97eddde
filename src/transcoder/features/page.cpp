// SPDX-License-Identifier: Apache-2.0
#include "transcoder/features/page.hpp"

#include <algorithm>
#include <numeric>

#include "report/format.hpp"
#include "transcoder/features/browser.hpp"

namespace weft::transcoder {
namespace {

/// Four significant digits: the page is read by people.
double rounded(double value) { return std::stod(fmt::format("{:.4g}", value)); }

}  // namespace

CataloguePage::CataloguePage(const CatalogueFacts& facts, const dataset::Vocabulary& vocabulary)
    : facts_(facts), vocabulary_(vocabulary) {}

void CataloguePage::add(const LayerCatalogue& layer) {
  const auto row = [](const auto& values, std::int64_t per_feature, std::int64_t feature) {
    return values.data() + feature * per_feature;
  };
  std::vector<std::int64_t> shown(static_cast<std::size_t>(facts_.n_features));
  std::iota(shown.begin(), shown.end(), 0);
  const std::int64_t of_layer = std::max<std::int64_t>(1, kMostOnPage / facts_.n_layers);
  if (facts_.n_features > of_layer) {
    std::stable_sort(shown.begin(), shown.end(), [&](std::int64_t a, std::int64_t b) {
      return layer.fired[static_cast<std::size_t>(a)] > layer.fired[static_cast<std::size_t>(b)];
    });
    shown.resize(static_cast<std::size_t>(of_layer));
    std::sort(shown.begin(), shown.end());
  }
  const std::int64_t n_fired = facts_.n_features - std::count(layer.fired.begin(), layer.fired.end(), 0);
  fired_ += n_fired;
  layers_.push_back({std::to_string(layer.layer), report::grouped(facts_.n_features), report::grouped(n_fired),
                     report::grouped(static_cast<std::int64_t>(shown.size()))});

  for (const std::int64_t f : shown) {
    // [layer, feature, tokens fired, mean, histogram, shares, nearest, examples], as browser.js reads it.
    report::Json histogram = report::Json::array(), shares = report::Json::array(), nearest = report::Json::array(),
                 examples = report::Json::array();
    for (int bin = 0; bin < kHistogramBins; ++bin) histogram.push_back(row(layer.histogram, kHistogramBins, f)[bin]);
    for (std::int64_t t = 0; t < layer.targets; ++t) shares.push_back(rounded(row(layer.share, layer.targets, f)[t]));
    for (std::int64_t i = 0; i < facts_.n_nearest; ++i)
      if (const std::int64_t other = row(layer.nearest, facts_.n_nearest, f)[i]; other >= 0)
        nearest.push_back({other, rounded(static_cast<double>(row(layer.cosine, facts_.n_nearest, f)[i]))});
    for (std::int64_t i = 0; i < std::min(kMostExamples, facts_.n_top); ++i) {
      const std::int64_t place = row(layer.top_row, facts_.n_top, f)[i];
      if (place < 0) break;
      report::Json tokens = report::Json::array();
      for (std::int64_t w = 0; w < facts_.window(); ++w) {
        const std::int32_t id = row(layer.token, facts_.n_top * facts_.window(), f)[i * facts_.window() + w];
        if (id >= 0) ids_.insert(id);
        tokens.push_back(id);
      }
      examples.push_back({rounded(static_cast<double>(row(layer.top_value, facts_.n_top, f)[i])), place,
                          facts_.has_tokens ? row(layer.position, facts_.n_top, f)[i] : -1, std::move(tokens)});
    }
    features_.push_back({layer.layer, f, layer.fired[static_cast<std::size_t>(f)],
                         rounded(layer.mean[static_cast<std::size_t>(f)]), std::move(histogram), std::move(shares),
                         std::move(nearest), std::move(examples)});
  }
}

std::string CataloguePage::html() const {
  const std::int64_t all = facts_.n_layers * facts_.n_features;
  const auto shown = static_cast<std::int64_t>(features_.size());
  report::Page page;
  page.title = "Features of " + facts_.checkpoint;
  page.kind = "weft features";
  page.source = "from a checkpoint and its activations on a dataset";
  page.state = fmt::format("Step {}, on {} tokens of {}.", report::grouped(facts_.step), report::grouped(facts_.tokens),
                           facts_.data);
  page.tiles = {{report::grouped(all), "features"},
                {report::grouped(fired_), "fired"},
                {report::grouped(facts_.n_layers), "layers"},
                {report::grouped(facts_.tokens), "tokens"}};

  report::Json texts = report::Json::object();
  for (const std::int32_t id : ids_)
    if (static_cast<std::size_t>(id) < vocabulary_.size())
      texts[std::to_string(id)] = vocabulary_[static_cast<std::size_t>(id)];
  report::Section browse("Features");
  if (shown < all)
    browse.paragraph(
        fmt::format("The page holds {} of {} features: of each layer those that fired on most tokens. "
                    "features.h5 has all; weft features --feature LAYER:INDEX prints one.",
                    report::grouped(shown), report::grouped(all)));
  if (!facts_.has_tokens)
    browse.paragraph("The dataset has no token ids: examples are rows of the dataset.", report::Tone::missing);
  browse.application(report::Json{{"tokens", facts_.tokens},
                                  {"layers", facts_.n_layers},
                                  {"context", facts_.context},
                                  {"edges", histogram_edges()},
                                  {"texts", std::move(texts)},
                                  {"features", features_}},
                     browser_script);
  page.sections.push_back(std::move(browse));
  report::Section layers("Layers");
  layers.table({"layer", "features", "fired", "on this page"}, layers_, 1);
  page.sections.push_back(std::move(layers));
  return report::to_html(page);
}

}  // namespace weft::transcoder
