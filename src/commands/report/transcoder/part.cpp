// SPDX-License-Identifier: Apache-2.0
#include "commands/report/transcoder/part.hpp"

#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "checkpoint/directory.hpp"
#include "commands/report/privacy_section.hpp"
#include "commands/report/transcoder/decoder_mass.hpp"
#include "report/chart.hpp"
#include "report/format.hpp"

namespace weft::commands {
namespace {

using report::Json;
using report::short_number;

constexpr const char* kNmseCaption =
    "Squared error over squared target, each dimension divided by its standard deviation on the training set.";

/// Measures on validation data: the run's own, else those of evaluation.json.
struct Validation {
  const Json* measures = nullptr;  // null: none
  const Json* recovery = nullptr;
  std::string source;

  double of(const char* key) const { return measures != nullptr ? number(member(*measures, {key})) : kNoNumber; }
};

Validation validation_of(const RunFacts& facts) {
  Validation result;
  if (const Json& own = member(facts.record, {"result", "validation"}); own.is_object()) {
    result.measures = &own;
    result.source = "measured by the run after its last step";
  } else if (const Json& later = member(facts.evaluation, {"validation"}); later.is_object()) {
    result.measures = &later;
    result.source =
        fmt::format("from evaluation.json (checkpoint {}, data {})", text_of(member(facts.evaluation, {"checkpoint"})),
                    text_of(member(facts.evaluation, {"data"})));
  }
  for (const Json* recovery : {&member(facts.record, {"result", "recovery"}), &member(facts.evaluation, {"recovery"})})
    if (result.recovery == nullptr && recovery->is_object()) result.recovery = recovery;
  return result;
}

std::vector<CurveStyle> curves(const RunFacts& facts, const Validation& validation) {
  CurveStyle nmse{.metric = "nmse_standardised",
                  .title = "Normalised error",
                  .y_label = "NMSE (standardised)",
                  .caption = kNmseCaption,
                  .line_name = "training mean",
                  .band_name = "best to worst layer"};
  nmse.level = validation.of("nmse_standardised_mean");
  nmse.level_name = "validation";
  return {{.metric = "loss",
           .title = "Training loss",
           .y_label = "loss",
           .caption = "Sum over layers of the mean squared error in the normalised space, as logged."},
          nmse,
          {.metric = "validation.nmse_standardised",
           .title = "Validation error",
           .y_label = "NMSE (standardised)",
           .caption = "Mean over layers on the validation data (log.evaluate_every)."},
          {.metric = "l0",
           .title = "L0",
           .y_label = "active features per token and layer",
           .caption = "How many features are active for a token in one layer.",
           .line_name = "mean over layers",
           .band_name = "fewest to most",
           .from_zero = true},
          {.metric = "validation.l0",
           .title = "Validation: L0",
           .y_label = "active features per token and layer",
           .caption = "Mean over layers on the validation data.",
           .from_zero = true},
          {.metric = "dead_fraction",
           .title = "Dead features",
           .y_label = "dead features, %",
           .caption = fmt::format("Features that did not fire within {} tokens (transcoder.dead_window).",
                                  whole(number(member(facts.record, {"input", "transcoder", "dead_window"})))),
           .factor = 100,
           .from_zero = true}};
}

std::vector<report::Tile> tiles(const RunFacts& facts, const Validation& validation) {
  std::vector<report::Tile> all;
  const auto add = [&](double value, const std::string& shown, const char* name) {
    if (std::isfinite(value)) all.push_back({shown, name});
  };
  const double nmse = validation.of("nmse_standardised_mean"), explained = validation.of("explained_variance_mean");
  const double l0 = validation.of("l0_mean"), dead = validation.of("dead_fraction_mean");
  add(nmse, short_number(nmse), "validation NMSE (standardised)");
  add(explained, percent(explained), "explained variance");
  add(l0, short_number(l0), "active per token and layer");
  add(dead, percent(dead), "features dead on validation data");
  if (validation.measures == nullptr) {
    const double trained = number(member(facts.record, {"result", "train", "nmse_standardised"}));
    add(trained, short_number(trained), "training NMSE (standardised)");
  }
  if (validation.recovery != nullptr) {
    const double fraction = number(member(*validation.recovery, {"fraction"}));
    add(fraction, percent(fraction), "planted features recovered");
  }
  return all;
}

/// Features of all layers by how often they fire, in % of all features; nullopt when it was not recorded.
std::optional<report::BarChart> density_chart(const Json& measures, double& n_features) {
  const Json& bins = member(measures, {"density_bins"});
  const Json& histogram = member(measures, {"density_histogram"});
  if (!bins.is_array() || !histogram.is_array() || bins.empty() || bins.size() > 64) return std::nullopt;
  report::BarChart chart;
  chart.x_label = "part of the tokens on which a feature fires";
  chart.y_label = "features of all layers, %";
  chart.values.assign(bins.size(), 0.0);
  for (const Json& bin : bins) chart.categories.push_back(text_of(bin));
  n_features = 0;
  for (const Json& layer : histogram) {
    const std::vector<double> counts = numbers(layer);
    for (std::size_t bin = 0; bin < counts.size() && bin < chart.values.size(); ++bin)
      if (counts[bin] >= 0) {
        chart.values[bin] += counts[bin];
        n_features += counts[bin];
      }
  }
  for (double& value : chart.values) value = n_features > 0 ? 100 * value / n_features : 0;
  return chart;
}

report::Section layers_section(const Validation& validation) {
  report::Section section("Validation, by layer");
  if (validation.measures == nullptr) {
    section.paragraph(
        "No validation measures: the run did not finish, or its input names no data.validation. weft evaluate RUN "
        "--data DIR --output RUN adds them to this page.",
        report::Tone::missing);
    return section;
  }
  const Json& measures = *validation.measures;
  const auto of_layers = [&](const char* key) { return numbers(member(measures, {key})); };
  const std::vector<double> nmse = of_layers("nmse_standardised"), raw = of_layers("nmse"),
                            explained = of_layers("explained_variance"), l0 = of_layers("l0");
  std::vector<double> dead = of_layers("dead_fraction");
  for (double& value : dead) value *= 100;
  section.paragraph(fmt::format("{} tokens, {}.", whole(validation.of("tokens")), validation.source));

  section.begin_columns();
  const auto add = [&](const char* title, const char* y_label, const std::vector<double>& values, double mean,
                       const char* caption) {
    if (values.empty()) return;
    report::BarChart chart;
    chart.x_label = "layer";
    chart.y_label = y_label;
    chart.values = values;
    for (std::size_t i = 0; i < values.size(); ++i) chart.categories.push_back(std::to_string(i));
    if (mean >= 0) {
      chart.level = mean;
      chart.level_name = "mean " + short_number(mean);
    }
    section.figure(title, report::bar_chart(chart), caption);
  };
  add("Normalised error", "NMSE (standardised)", nmse, validation.of("nmse_standardised_mean"), kNmseCaption);
  add("L0", "active features per token", l0, validation.of("l0_mean"),
      "Features of the layer that are active for a token.");
  add("Dead features", "dead features, %", dead, 100 * validation.of("dead_fraction_mean"),
      "Features of the layer that never fired on the validation data.");
  double n_features = 0;
  if (const auto density = density_chart(measures, n_features))
    section.figure("Feature density", report::bar_chart(*density),
                   fmt::format("How often features fire: {} features of all layers, by decades.", whole(n_features)));
  else
    section.paragraph("No feature densities were recorded.", report::Tone::missing);
  section.end_columns();

  // The decimals of the table in the log.
  const auto shown = [](double value, int decimals) {  // "-": not defined
    return std::isfinite(value) ? fixed(value, decimals) : std::string("-");
  };
  const auto at = [&](const std::vector<double>& values, std::size_t i, int decimals) {
    return i < values.size() ? shown(values[i], decimals) : std::string("-");
  };
  std::vector<std::vector<std::string>> rows;
  for (std::size_t i = 0; i < nmse.size(); ++i)
    rows.push_back(
        {std::to_string(i), at(nmse, i, 4), at(raw, i, 4), at(explained, i, 4), at(l0, i, 2), at(dead, i, 1)});
  rows.push_back({"mean", shown(validation.of("nmse_standardised_mean"), 4), shown(validation.of("nmse_mean"), 4),
                  shown(validation.of("explained_variance_mean"), 4), shown(validation.of("l0_mean"), 2),
                  shown(100 * validation.of("dead_fraction_mean"), 1)});
  section.table({"layer", "NMSE (standardised)", "NMSE raw", "explained variance", "L0", "dead, %"}, rows, 1);
  return section;
}

report::Section decoder_section(const RunFacts& facts) {
  report::Section section("Decoder");
  DecoderMass mass;
  try {
    if (!facts.newest) throw error(ExitCode::io, "{}", facts.newest_problem);
    const double window = number(member(facts.record, {"input", "transcoder", "dead_window"}));
    mass =
        decoder_mass(*facts.newest, *facts.alone, window > 0 ? static_cast<std::int64_t>(std::min(window, 1e15)) : 0);
  } catch (const Error& failure) {
    section.paragraph(fmt::format("No decoder weights: {}.", failure.what()), report::Tone::missing);
    return section;
  }
  report::HeatMap map;
  map.x_label = "target layer, written to";
  map.y_label = "source layer, read from";
  map.values = mass.magnitude;
  std::int64_t counted = 0, all = 0;
  for (std::size_t s = 0; s < mass.magnitude.size(); ++s) {
    counted += mass.features[s];
    all += mass.all_features[s];
    std::vector<std::string> notes;
    for (std::size_t t = 0; t < mass.magnitude.size(); ++t)
      notes.push_back(std::isnan(mass.magnitude[s][t])
                          ? ""
                          : fmt::format("layer {} to layer {}: {}; {} of what layer {} writes", s, t,
                                        short_number(mass.magnitude[s][t]), percent(mass.share[s][t]), s));
    map.notes.push_back(std::move(notes));
  }
  std::vector<std::vector<std::string>> rows;
  for (std::size_t s = 0; s < mass.magnitude.size() && s < kMostRows; ++s)
    rows.push_back({std::to_string(s), whole(static_cast<double>(mass.features[s])), fixed(100 * mass.share[s][s], 1),
                    fixed(100 * (1 - mass.share[s][s]), 1)});
  section.begin_columns();
  section.figure(
      "Decoder mass, source to target", report::heat_map(map),
      fmt::format("Size of a feature's decoder vector from source to target layer (root of the mean squared norm, "
                  "normalised space), from checkpoint {}. Counted: {} of {} features, those that fired recently.",
                  checkpoint::directory_name(mass.step), whole(static_cast<double>(counted)),
                  whole(static_cast<double>(all))));
  section.begin_block();
  section.table({"source layer", "live features", "mass to its own layer, %", "to later layers, %"}, rows, 1);
  section.paragraph("Mass: the squared norm of decoder vectors, summed over the layer's live features.",
                    report::Tone::faint);
  section.end_block();
  section.end_columns();
  return section;
}

/// "transcoder of gpt2, data/train, 768 features per layer, batch_topk, k 16, learning rate 0.001".
std::string about(const RunFacts& facts) {
  const std::string model = text_of(member(facts.record, {"data", "model"}));
  return joined({"transcoder" + (model.empty() ? "" : " of " + model), setting(facts, "data", "train", "data"),
                 text_of(member(facts.record, {"input", "transcoder", "features"})) + " features per layer",
                 text_of(member(facts.record, {"input", "transcoder", "activation"})),
                 setting(facts, "transcoder", "k", "k"),
                 setting(facts, "optimizer", "learning_rate", "learning rate")});
}

}  // namespace

FamilyPart transcoder_part(const RunFacts& facts) {
  const Validation validation = validation_of(facts);
  std::vector<report::Section> sections = privacy_sections(facts);
  sections.push_back(layers_section(validation));
  sections.push_back(decoder_section(facts));
  return {about(facts), curves(facts, validation), tiles(facts, validation), std::move(sections)};
}

}  // namespace weft::commands
