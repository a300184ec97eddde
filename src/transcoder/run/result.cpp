// SPDX-License-Identifier: Apache-2.0
#include "transcoder/run/result.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/log.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "transcoder/features/decoder_rows.hpp"

namespace weft::transcoder {
namespace {

/// Gathers the whole decoder of a layer in raw space on rank 0, [F, (L - s) * d] (zero for targets that it does not
/// write to); empty elsewhere.
std::vector<float> raw_decoder(const Model& model, std::int64_t layer, const std::vector<float>& spread,
                               const parallel::Grid& grid, const kernels::Execution& execution) {
  const Shape& shape = model.shape();
  const std::int64_t own = row_columns(shape, layer), columns = (shape.n_layers - layer) * shape.d_model;
  const device::Buffer<float> local(model.n_local() * own);
  decoder_rows(model, layer, 0, execution, local.matrix(model.n_local(), own));
  std::vector<float> values(static_cast<std::size_t>(shape.n_features * own));
  float* const mine = values.data() + model.features().begin * own;
  device::copy(execution, mine, local.data(), local.bytes(), device::Direction::to_host);
  kernels::fence(execution);
  std::vector<std::int64_t> bytes;
  for (std::int64_t g = 0; g < grid.size(parallel::kFeatureAxis); ++g)
    bytes.push_back(parallel::part(shape.n_features, grid.size(parallel::kFeatureAxis), g).size() * own * 4);
  grid.axis(parallel::kFeatureAxis).all_gather_uneven(mine, values.data(), bytes);
  std::vector<float> wide(static_cast<std::size_t>(shape.n_features * columns), 0.0f);
  const std::int64_t written = shape.targets(layer) * shape.d_model;  // tied: a copy for each target, in its units
  for (std::int64_t f = 0; f < shape.n_features; ++f)
    for (std::int64_t i = 0; i < written; ++i)
      wide[static_cast<std::size_t>(f * columns + i)] = values[static_cast<std::size_t>(f * own + i % own)] *
                                                        spread[static_cast<std::size_t>(layer * shape.d_model + i)];
  return wide;
}

/// Converts a number to JSON; null if it is not defined.
Json number_or_null(double value) { return std::isnan(value) ? Json() : Json(value); }

Json with_mean(Json json, const char* name, const std::vector<double>& values) {
  Json& layers = json[name] = Json::array();
  for (const double value : values) layers.push_back(number_or_null(value));
  json[std::string(name) + "_mean"] = number_or_null(mean_over_layers(values));
  return json;
}

/// Formats a number right-aligned in a column, with at least one space before it; "-" if it is not defined.
std::string column(double value, int width, int decimals, const char* unit = "") {
  const std::string fixed = fmt::format("{:.{}f}{}", value, decimals, unit);
  const std::string text = std::isnan(value)                        ? "-"
                           : static_cast<int>(fixed.size()) < width ? fixed
                                                                    : fmt::format("{:.1e}{}", value, unit);
  return fmt::format("{:>{}}", text, width);
}

}  // namespace

Json to_json(const EvaluationResult& result) {
  Json json;
  json["tokens"] = result.tokens;
  json = with_mean(std::move(json), "nmse", result.nmse);
  json = with_mean(std::move(json), "nmse_standardised", result.nmse_standardised);
  json = with_mean(std::move(json), "explained_variance", result.explained_variance);
  json = with_mean(std::move(json), "fvu_dimension", result.fvu_dimension);
  json = with_mean(std::move(json), "l0", result.l0);
  json = with_mean(std::move(json), "dead_fraction", result.dead_fraction);
  json["nmse_pooled"] = number_or_null(result.nmse_pooled);
  json["nmse_standardised_pooled"] = number_or_null(result.nmse_standardised_pooled);
  json["explained_variance_pooled"] = number_or_null(result.explained_variance_pooled);
  // These are the names of the same measures in the literature.
  json = with_mean(std::move(json), "fvu", result.nmse);
  json = with_mean(std::move(json), "fvu_dim", result.fvu_dimension);
  json["fvu_pooled"] = json["nmse_pooled"];
  std::vector<std::string> bins;
  for (int bin = 0; bin < kDensityBins; ++bin) bins.emplace_back(density_bin_name(bin));
  json["density_bins"] = bins;
  json["density_histogram"] = result.density_histogram;
  return json;
}

Json to_json(const DecoderSummary& summary) {
  Json json;
  Json& share = json["decoder_share"] = Json::array();
  for (std::size_t source = 0; source < summary.share.size(); ++source) {
    Json row = Json::array();
    for (std::size_t target = 0; target < summary.share.size(); ++target) {
      const std::size_t block = target - source;
      row.push_back(target < source || block >= summary.share[source].size()
                        ? Json()
                        : number_or_null(summary.share[source][block]));
    }
    share.push_back(std::move(row));
  }
  json = with_mean(std::move(json), "redundancy", summary.redundancy);
  return with_mean(std::move(json), "redundant_fraction", summary.redundant_fraction);
}

Json to_json(const dataset::Recovery& recovery) {
  return {{"fraction", recovery.fraction},
          {"recovered", recovery.recovered},
          {"counted", recovery.counted},
          {"per_layer", recovery.per_layer}};
}

std::string to_table(const EvaluationResult& result) {
  std::string text =
      fmt::format("{:>5}{:>12}{:>12}{:>12}{:>10}{:>8}\n", "layer", "NMSE std.", "NMSE raw", "expl. var.", "L0", "dead");
  const auto row = [&](const std::string& name, double standardised, double raw, double explained, double l0,
                       double dead) {
    text += fmt::format("{:>5}{}{}{}{}{}\n", name, column(standardised, 12, 4), column(raw, 12, 4),
                        column(explained, 12, 4), column(l0, 10, 2), column(100 * dead, 8, 1, "%"));
  };
  for (std::size_t i = 0; i < result.nmse.size(); ++i)
    row(std::to_string(i), result.nmse_standardised[i], result.nmse[i], result.explained_variance[i], result.l0[i],
        result.dead_fraction[i]);
  const auto mean = mean_over_layers;
  row("mean", mean(result.nmse_standardised), mean(result.nmse), mean(result.explained_variance), mean(result.l0),
      mean(result.dead_fraction));
  return text;
}

std::string to_table(const EvaluationResult& result, const DecoderSummary& summary) {
  const auto mean = mean_over_layers;
  std::string text = fmt::format("{:>6}{:>10}{:>10}{:>12}{:>12}\n", "layer", "FVU", "FVU dim.", "max cosine",
                                 fmt::format("above {}", kRedundantCosine));
  const auto row = [&](const std::string& name, double fvu, double by_dimension, double cosine, double redundant) {
    text += fmt::format("{:>6}{}{}{}{}\n", name, column(fvu, 10, 4), column(by_dimension, 10, 4), column(cosine, 12, 4),
                        column(100 * redundant, 12, 1, "%"));
  };
  for (std::size_t i = 0; i < result.nmse.size(); ++i)
    row(std::to_string(i), result.nmse[i], result.fvu_dimension[i], summary.redundancy[i],
        summary.redundant_fraction[i]);
  row("mean", mean(result.nmse), mean(result.fvu_dimension), mean(summary.redundancy),
      mean(summary.redundant_fraction));
  text += fmt::format("all layers together: NMSE std.{}, FVU{}, explained variance{}\n\n",
                      column(result.nmse_standardised_pooled, 10, 4), column(result.nmse_pooled, 10, 4),
                      column(result.explained_variance_pooled, 10, 4));

  text += "features by density\n" + fmt::format("{:>6}", "layer");
  for (int bin = 0; bin < kDensityBins; ++bin) text += fmt::format("{:>14}", density_bin_name(bin));
  for (std::size_t i = 0; i < result.density_histogram.size(); ++i) {
    text += fmt::format("\n{:>6}", i);
    for (const std::int64_t count : result.density_histogram[i]) text += fmt::format("{:>14}", count);
  }
  text += "\n\ndecoder norm by target layer, % of the squared norm\n" + fmt::format("{:>6}", "layer");
  for (std::size_t target = 0; target < summary.share.size(); ++target) text += fmt::format("{:>7}", target);
  for (std::size_t source = 0; source < summary.share.size(); ++source) {
    text += fmt::format("\n{:>6}{}", source, std::string(7 * source, ' '));
    for (const double share : summary.share[source]) text += column(100 * share, 7, 1);
  }
  return text + "\n";
}

std::optional<dataset::Recovery> recovered(const dataset::Description& data, const Model& model,
                                           const NormalisationOnDevice& normalisation, const parallel::World& world,
                                           const parallel::Grid& grid, const kernels::Execution& execution,
                                           int threads) {
  if (data.targets_are_inputs) return std::nullopt;  // the planted vectors are decoders to the stored targets
  const std::string path = world.on_root([&] { return dataset::ground_truth_path(data.path); });
  if (path.empty()) return std::nullopt;
  std::vector<float> spread(static_cast<std::size_t>(model.shape().width()));
  device::copy(execution, spread.data(), normalisation.target_spread.data(), normalisation.target_spread.bytes(),
               device::Direction::to_host);
  kernels::fence(execution);
  std::vector<std::vector<float>> decoder;
  std::vector<const float*> strips;
  for (std::int64_t s = 0; s < model.shape().n_layers; ++s) {
    decoder.push_back(raw_decoder(model, s, spread, grid, execution));
    strips.push_back(decoder.back().data());
  }
  dataset::Recovery recovery;
  world.on_root([&]() -> std::string {
    const dataset::GroundTruth truth = dataset::read_ground_truth(path);
    if (truth.n_layers != model.shape().n_layers || truth.d_model != model.shape().d_model)
      throw error(
          ExitCode::data,
          "{}: planted for {} layers and d_model {}, the transcoder has {} and {} (it belongs to another dataset); "
          "give the matching dataset",
          path, truth.n_layers, truth.d_model, model.shape().n_layers, model.shape().d_model);
    recovery = dataset::recovery(truth, strips, model.shape().n_features, threads);
    return {};
  });
  if (world.is_root() && recovery.counted == 0)
    log::info("no planted feature fired 1,000 times: the dataset is too small to measure recovery");
  return recovery;
}

}  // namespace weft::transcoder
