// SPDX-License-Identifier: Apache-2.0
#include "commands/report/page.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "checkpoint/directory.hpp"
#include "report/build.hpp"
#include "report/chart.hpp"
#include "report/html.hpp"
#include "report/log.hpp"

namespace weft::commands {
namespace {

using report::escaped;
using report::Json;
using report::short_number;

constexpr std::size_t kMostRows = 64;  // of a table
constexpr std::size_t kMostStartsDrawn = 24;
constexpr std::size_t kMostLayersDrawn = 256;

constexpr const char* kStyle =
    R"(body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0 0 0.2rem; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 0.4rem; font-size: 1.2rem; border-bottom: 1px solid var(--rule); padding-bottom: 0.2rem; }
p { margin: 0.4rem 0; max-width: 60rem; }
.state { color: var(--faint); overflow-wrap: anywhere; }
.bad { color: var(--orange); font-weight: 600; }
.missing { color: var(--faint); font-style: italic; }
.tiles { display: flex; flex-wrap: wrap; gap: 0.6rem; margin: 1rem 0; padding: 0; list-style: none; }
.tiles li { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: 0.5rem 0.9rem; min-width: 7rem; }
.tiles b { display: block; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--faint); font-size: 0.85rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; padding: 0.8rem; background: var(--card); border: 1px solid var(--rule); border-radius: 6px; break-inside: avoid; min-width: 0; }
figcaption { color: var(--faint); font-size: 0.88rem; margin-top: 0.4rem; }
figure h3 { margin: 0 0 0.3rem; font-size: 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.15rem 0.9rem 0.15rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); overflow-wrap: break-word; }
th { font-weight: 600; color: var(--faint); }
td.n, th.n { text-align: right; }
td.n { white-space: nowrap; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; white-space: pre-wrap; overflow-wrap: anywhere; }
footer { margin-top: 2.5rem; color: var(--faint); font-size: 0.85rem; }
@media print { html { font-size: 11px; } body { max-width: none; padding: 0; font-size: 1rem; } pre { columns: 2; } .figures { grid-template-columns: 1fr 1fr; } h2 { break-after: avoid; } tr { break-inside: avoid; } }
)";

// --- small parts ---------------------------------------------------------------------------------------------------

std::string text_of(const Json& json) {
  if (json.is_string()) return json.get<std::string>();
  if (json.is_null()) return "";
  return report::to_text(json);
}

std::string percent(double fraction) {
  return std::isfinite(fraction) ? short_number(100 * fraction) + " %" : "not finite";
}

/// For columns of a table, which compare by eye.
std::string fixed(double value, int decimals) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, decimals) : "not finite";
}

/// "1,234,567"; "unknown" where the number is not there.
std::string whole(double value) {
  return std::isfinite(value) && std::abs(value) < 1e18 ? report::grouped(std::llround(value)) : "unknown";
}

std::string missing(const std::string& what) { return fmt::format("<p class=\"missing\">{}</p>\n", escaped(what)); }

std::string figure(const std::string& title, const std::string& picture, const std::string& caption) {
  return fmt::format("<figure>\n<h3>{}</h3>\n{}<figcaption>{}</figcaption>\n</figure>\n", escaped(title), picture,
                     escaped(caption));
}

std::string section(const std::string& title, const std::string& body) {
  return fmt::format("<section>\n<h2>{}</h2>\n{}</section>\n", escaped(title), body);
}

/// Cells are escaped here; columns from `numbers_from` on stand to the right.
std::string table(const std::vector<std::string>& head, const std::vector<std::vector<std::string>>& rows,
                  std::size_t numbers_from) {
  const auto row_text = [&](const std::vector<std::string>& cells, const char* element) {
    std::string text = "<tr>";
    for (std::size_t i = 0; i < cells.size(); ++i)
      text += fmt::format("<{0}{1}>{2}</{0}>", element, i >= numbers_from ? " class=\"n\"" : "", escaped(cells[i]));
    return text + "</tr>\n";
  };
  std::string text = "<div class=\"wide\"><table>\n";
  if (!head.empty()) text += "<thead>" + row_text(head, "th") + "</thead>\n";
  text += "<tbody>\n";
  for (const auto& row : rows) text += row_text(row, "td");
  return text + "</tbody></table></div>\n";
}

bool any_finite(const std::vector<double>& values) {
  return std::any_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); });
}

/// An array of numbers, at most kMostLayersDrawn.
std::vector<double> numbers(const Json& json) {
  std::vector<double> values;
  if (json.is_array())
    for (std::size_t i = 0; i < json.size() && i < kMostLayersDrawn; ++i) values.push_back(number(json[i]));
  return values;
}

// --- what the page is about ----------------------------------------------------------------------------------------

/// Measures on held-out data: of the run itself, else of an evaluation beside it.
struct HeldOut {
  const Json* measures = nullptr;
  const Json* recovery = nullptr;
  std::string source;
};

HeldOut held_out(const RunFacts& facts) {
  HeldOut result;
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

double steps_done(const RunFacts& facts) {
  const double recorded = number(member(facts.record, {"result", "step"}));
  return std::isfinite(recorded) ? recorded : facts.course.last_step();
}

std::string state_line(const RunFacts& facts) {
  const Json& code = member(facts.record, {"exit", "code"});
  const std::string reason = text_of(member(facts.record, {"exit", "reason"}));
  if (!code.is_number())
    return "<p class=\"state\">The record says that the run is still going on (or was killed without a word).</p>\n";
  const double value = number(code);
  const bool fine = value == 75 || value > 128;  // stopped on request, to go on later
  const double step = number(member(facts.record, {"exit", "step"}));
  if (value == 0) return "<p class=\"state\">Finished.</p>\n";
  return fmt::format("<p class=\"state\"><span class=\"{}\">{}</span>{}: {}</p>\n", fine ? "" : "bad",
                     fmt::format("Ended with exit code {}", short_number(value)),
                     std::isfinite(step) ? fmt::format(" in step {}", whole(step)) : "", escaped(reason));
}

std::string tiles(const RunFacts& facts, const HeldOut& held_out) {
  std::string text;
  const auto tile = [&](const std::string& value, const std::string& name) {
    text += fmt::format("<li><b>{}</b><span>{}</span></li>\n", escaped(value), escaped(name));
  };
  const auto tile_if = [&](double value, const std::string& shown, const std::string& name) {
    if (std::isfinite(value)) tile(shown, name);
  };
  const Json& result = member(facts.record, {"result"});
  const double planned = number(member(facts.record, {"input", "run", "steps"}));
  tile(whole(steps_done(facts)), std::isfinite(planned) ? "of " + whole(planned) + " steps" : "steps");
  const double tokens = number(member(result, {"tokens"}));
  tile_if(tokens, whole(tokens), "training tokens");
  const double speed = number(member(result, {"tokens_per_second"}));
  tile_if(speed, short_number(speed), "tokens a second");
  const double seconds = number(member(facts.record, {"seconds"}));
  tile_if(seconds, report::duration(seconds), "h:mm:ss, last start");
  tile(whole(number(member(facts.record, {"ranks"}))), "ranks");
  if (held_out.measures != nullptr) {
    const auto measure = [&](const char* key) { return number(member(*held_out.measures, {key})); };
    const double nmse = measure("nmse_standardised_mean"), explained = measure("explained_variance_mean");
    const double l0 = measure("l0_mean"), dead = measure("dead_fraction_mean");
    tile_if(nmse, short_number(nmse), "NMSE held out, standardised");
    tile_if(explained, percent(explained), "variance explained");
    tile_if(l0, short_number(l0), "active a token and layer");
    tile_if(dead, percent(dead), "features dead, held out");
  } else {
    const double nmse = number(member(result, {"train", "nmse_standardised"}));
    tile_if(nmse, short_number(nmse), "NMSE in training, standardised");
  }
  if (held_out.recovery != nullptr) {
    const double fraction = number(member(*held_out.recovery, {"fraction"}));
    tile_if(fraction, percent(fraction), "planted features recovered");
  }
  return "<ul class=\"tiles\">\n" + text + "</ul>\n";
}

// --- sections ------------------------------------------------------------------------------------------------------

std::string course_section(const RunFacts& facts, const HeldOut& held_out) {
  const Course& course = facts.course;
  if (course.step.empty())
    return missing(
        "No curves: metrics.jsonl is missing or has no records (the run ended before its first logged step).");
  std::vector<double> restarts;
  for (std::size_t i = 1; i < facts.starts.size(); ++i) restarts.push_back(static_cast<double>(facts.starts[i].begin));
  std::sort(restarts.begin(), restarts.end());
  restarts.erase(std::unique(restarts.begin(), restarts.end()), restarts.end());
  std::erase(restarts, 0.0);
  if (restarts.size() > 100) restarts.erase(restarts.begin(), restarts.end() - 100);

  const auto chart = [&](const char* y_label, const std::vector<double>& y) {
    report::LineChart one;
    one.x_label = "step";
    one.y_label = y_label;
    one.x = course.step;
    one.y = y;
    one.marks = restarts;
    one.marks_name = "restart";
    return one;
  };
  std::string text = "<div class=\"figures\">\n";
  const auto add = [&](const std::string& title, const report::LineChart& one, const std::string& caption) {
    if (any_finite(one.y)) text += figure(title, report::line_chart(one), caption);
  };

  report::LineChart loss = chart("loss", course.loss);
  add("Training loss", loss, "Sum over layers of the mean squared error in the normalised space, as logged.");

  report::LineChart nmse = chart("NMSE, standardised", course.nmse);
  nmse.line_name = "training mean";
  if (any_finite(course.nmse_low)) {
    nmse.low = course.nmse_low;
    nmse.high = course.nmse_high;
    nmse.band_name = "best to worst layer";
  }
  if (held_out.measures != nullptr) {
    const double level = number(member(*held_out.measures, {"nmse_standardised_mean"}));
    if (level >= 0) {
      nmse.level = level;
      nmse.level_name = "held out";
    }
  }
  add("Normalised error", nmse,
      "Squared error over squared target, each dimension divided by its standard deviation on the training set.");

  report::LineChart l0 = chart("active features a token and layer", course.l0);
  l0.line_name = "mean over layers";
  if (any_finite(course.l0_low)) {
    l0.low = course.l0_low;
    l0.high = course.l0_high;
    l0.band_name = "fewest to most";
  }
  l0.from_zero = true;
  add("L0", l0, "How many features are active for a token in one layer.");

  report::LineChart dead = chart("dead features, %", course.dead_percent);
  dead.from_zero = true;
  add("Dead features", dead,
      fmt::format("Features that did not fire within {} tokens (transcoder.dead_window).",
                  whole(number(member(facts.record, {"input", "transcoder", "dead_window"})))));

  report::LineChart rate = chart("learning rate", course.learning_rate);
  rate.from_zero = true;
  add("Learning rate", rate, "Of the logged step.");

  if (std::any_of(course.gradient_norm.begin(), course.gradient_norm.end(), [](double value) { return value > 0; }))
    add("Gradient norm", chart("norm", course.gradient_norm), "Global norm of the logged step, before clipping.");

  report::LineChart speed = chart("tokens a second", course.tokens_per_second);
  speed.from_zero = true;
  add("Speed", speed, "All ranks together, since the line logged before.");
  text += "</div>\n";
  if (course.records_per_point > 1)
    text += fmt::format("<p>The {} records are drawn as means of up to {} neighbours.</p>\n",
                        whole(static_cast<double>(course.records)), course.records_per_point);
  if (course.not_finite > 0)
    text += fmt::format("<p class=\"bad\">{} logged step{} had a loss that is not finite; curves break there.</p>\n",
                        course.not_finite, course.not_finite == 1 ? "" : "s");
  return text;
}

std::string layers_section(const HeldOut& held_out) {
  if (held_out.measures == nullptr)
    return missing(
        "No measures on held-out data: the run did not finish, or its input names no data.validation. weft evaluate "
        "RUN "
        "--data DIR --output RUN adds them to this page.");
  const Json& measures = *held_out.measures;
  const std::vector<double> nmse = numbers(member(measures, {"nmse_standardised"})),
                            raw = numbers(member(measures, {"nmse"})),
                            explained = numbers(member(measures, {"explained_variance"})),
                            l0 = numbers(member(measures, {"l0"}));
  std::vector<double> dead = numbers(member(measures, {"dead_fraction"}));
  for (double& value : dead) value *= 100;
  std::string text = fmt::format("<p>{} tokens, {}.</p>\n<div class=\"figures\">\n",
                                 whole(number(member(measures, {"tokens"}))), escaped(held_out.source));
  const auto add = [&](const char* title, const char* y_label, const std::vector<double>& values, const char* mean,
                       double factor, const char* caption) {
    if (values.empty()) return;
    report::BarChart chart;
    chart.x_label = "layer";
    chart.y_label = y_label;
    chart.values = values;
    for (std::size_t i = 0; i < values.size(); ++i) chart.categories.push_back(std::to_string(i));
    if (const double level = factor * number(member(measures, {mean})); level >= 0) {
      chart.level = level;
      chart.level_name = "mean " + short_number(level);
    }
    text += figure(title, report::bar_chart(chart), caption);
  };
  add("Normalised error", "NMSE, standardised", nmse, "nmse_standardised_mean", 1,
      "Squared error over squared target, each dimension divided by its standard deviation on the training set.");
  add("L0", "active features a token", l0, "l0_mean", 1, "Features of the layer that are active for a token.");
  add("Dead features", "dead features, %", dead, "dead_fraction_mean", 100,
      "Features of the layer that never fired on the held-out data.");

  const Json& bins = member(measures, {"density_bins"});
  const Json& histogram = member(measures, {"density_histogram"});
  if (bins.is_array() && histogram.is_array() && !bins.empty() && bins.size() <= 64) {
    report::BarChart chart;
    chart.x_label = "part of the tokens on which a feature fires";
    chart.y_label = "features of all layers, %";
    chart.values.assign(bins.size(), 0.0);
    for (const Json& bin : bins) chart.categories.push_back(text_of(bin));
    double total = 0;
    for (const Json& layer : histogram) {
      const std::vector<double> counts = numbers(layer);
      for (std::size_t bin = 0; bin < counts.size() && bin < chart.values.size(); ++bin)
        if (counts[bin] >= 0) {
          chart.values[bin] += counts[bin];
          total += counts[bin];
        }
    }
    for (double& value : chart.values) value = total > 0 ? 100 * value / total : 0;
    text += figure("Feature density", report::bar_chart(chart),
                   fmt::format("How often features fire: {} features of all layers, by decades.", whole(total)));
  } else {
    text += missing("No feature densities were recorded.");
  }
  text += "</div>\n";

  std::vector<std::vector<std::string>> rows;
  // The decimals of the table in the log.
  const auto at = [](const std::vector<double>& values, std::size_t i, int decimals) {
    return i < values.size() ? fixed(values[i], decimals) : std::string("-");
  };
  for (std::size_t i = 0; i < nmse.size(); ++i)
    rows.push_back(
        {std::to_string(i), at(nmse, i, 4), at(raw, i, 4), at(explained, i, 4), at(l0, i, 2), at(dead, i, 1)});
  const auto mean = [&](const char* key, int decimals, double factor = 1) {
    return fixed(factor * number(member(measures, {key})), decimals);
  };
  rows.push_back({"mean", mean("nmse_standardised_mean", 4), mean("nmse_mean", 4), mean("explained_variance_mean", 4),
                  mean("l0_mean", 2), mean("dead_fraction_mean", 1, 100)});
  return text + table({"layer", "NMSE standardised", "NMSE raw", "variance explained", "L0", "dead, %"}, rows, 1);
}

std::string mass_section(const DecoderMass& mass) {
  if (!mass.problem.empty()) return missing("No decoder weights: " + mass.problem + ".");
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
      notes.push_back(t < s ? ""
                            : fmt::format("layer {} to layer {}: {}; {} of what layer {} writes", s, t,
                                          short_number(mass.magnitude[s][t]), percent(mass.share[s][t]), s));
    map.notes.push_back(std::move(notes));
  }
  std::vector<std::vector<std::string>> rows;
  for (std::size_t s = 0; s < mass.magnitude.size() && s < kMostRows; ++s)
    rows.push_back({std::to_string(s), whole(static_cast<double>(mass.features[s])), fixed(100 * mass.share[s][s], 1),
                    fixed(100 * (1 - mass.share[s][s]), 1)});
  return "<div class=\"figures\">\n" +
         figure("Decoder mass, source to target", report::heat_map(map),
                fmt::format(
                    "Size of a feature's decoder vector from source to target layer (root of the mean squared norm, "
                    "normalised space), from checkpoint {}. Counted: {} of {} features, those that fired lately.",
                    checkpoint::directory_name(mass.step), whole(static_cast<double>(counted)),
                    whole(static_cast<double>(all)))) +
         "<div>\n" +
         table({"source layer", "live features", "mass to its own layer, %", "to later layers, %"}, rows, 1) +
         "<p class=\"state\">Mass: the squared norm of decoder vectors, summed over the layer's live "
         "features.</p>\n</div>\n</div>\n";
}

std::string time_section(const RunFacts& facts) {
  const Json& timings = member(facts.record, {"timings"});
  std::string text;
  if (timings.is_object() && !timings.empty()) {
    double total = 0;
    for (const auto& [name, region] : timings.items()) {
      const double mean = number(member(region, {"mean"}));
      if (mean > 0) total += mean;
    }
    report::LyingBars bars;
    bars.x_label = "seconds, mean over ranks";
    const double ranks = number(member(facts.record, {"ranks"}));
    if (ranks > 1) bars.whisker_name = "fastest to slowest rank, mean at the end of the bar";
    for (const auto& [name, region] : timings.items()) {
      const double mean = number(member(region, {"mean"}));
      if (bars.bars.size() == kMostRows || !(mean >= 0)) continue;
      report::Bar bar;
      bar.name = name;
      bar.value = mean;
      bar.text = fmt::format("{} s, {}", short_number(mean), percent(total > 0 ? mean / total : 0));
      if (ranks > 1) {
        bar.low = number(member(region, {"min"}));
        bar.high = number(member(region, {"max"}));
      }
      bars.bars.push_back(bar);
    }
    std::stable_sort(bars.bars.begin(), bars.bars.end(),
                     [](const report::Bar& a, const report::Bar& b) { return a.value > b.value; });
    const double seconds = number(member(facts.record, {"seconds"}));
    text += figure(
        "Phases of the step", report::lying_bars(bars),
        fmt::format("Steps of the last start: {} s{}. {}", short_number(total),
                    std::isfinite(seconds) ? fmt::format(" of the program's {} s", short_number(seconds)) : "",
                    facts.benchmark.is_object()
                        ? "The benchmark beside holds a step's phases against the hardware's limits."
                        : "Against the hardware's limits: weft benchmark INPUT --output RUN adds its phases here."));
  } else {
    text += missing("No timings were recorded: the run ended before its steps did.");
  }

  const Json& cases = member(facts.benchmark, {"cases"});
  if (cases.is_array())
    for (std::size_t i = 0; i < cases.size() && i < 8; ++i) {
      const Json& phases = member(cases[i], {"phases"});
      if (!phases.is_array()) continue;
      report::LyingBars bars;
      bars.x_label = "milliseconds a step, median";
      bars.limit_name = "what the hardware's limit allows";
      for (const Json& phase : phases) {
        const double ms = number(member(phase, {"ms"})), share = number(member(phase, {"percent_of_limit"}));
        if (!(ms >= 0) || bars.bars.size() == kMostRows) continue;
        report::Bar bar;
        bar.name = text_of(member(phase, {"name"}));
        bar.value = ms;
        bar.text = short_number(ms) + " ms";
        if (share >= 0) {
          bar.limit = ms * share / 100;
          bar.text += fmt::format("; {} % of limit", short_number(share));
        }
        bars.bars.push_back(bar);
      }
      text += figure("Benchmark, case " + text_of(member(cases[i], {"name"})), report::lying_bars(bars),
                     fmt::format("{} ms a step, {} tokens a second on batches in memory. Limits: memory copy {} GB/s, "
                                 "encoder product {} GFLOP/s.",
                                 short_number(number(member(cases[i], {"ms_per_step"}))),
                                 whole(number(member(cases[i], {"tokens_per_second"}))),
                                 short_number(number(member(facts.benchmark, {"machine", "copy_gb_per_second"}))),
                                 short_number(number(member(facts.benchmark, {"machine", "gemm_gflops"})))));
    }
  return "<div class=\"figures\">\n" + text + "</div>\n";
}

std::string life_section(const RunFacts& facts) {
  report::TimeLine line;
  line.x_label = "step";
  const double planned = number(member(facts.record, {"input", "run", "steps"}));
  line.last = std::max(std::isfinite(planned) ? planned : 0, facts.course.last_step());
  const bool running = !member(facts.record, {"exit", "code"}).is_number();
  const std::size_t first = facts.starts.size() - std::min(facts.starts.size(), kMostStartsDrawn);
  for (std::size_t i = first; i < facts.starts.size(); ++i) {
    const StartFact& start = facts.starts[i];
    const bool newest = i + 1 == facts.starts.size();
    report::Span span;
    span.name = fmt::format("start {}", i + 1);
    span.begin = static_cast<double>(start.begin);
    span.end = static_cast<double>(start.end);
    span.clean = start.end >= 0 || (newest && running);
    if (start.end < 0)
      // Where it died is not recorded; it came at least as far as what was gone on from.
      span.end =
          std::max(span.begin, newest ? facts.course.last_step() : static_cast<double>(facts.starts[i + 1].begin));
    span.note = fmt::format("start {}: from step {} to step {}{}", i + 1, whole(span.begin), whole(span.end),
                            start.end >= 0      ? ""
                            : newest && running ? ", not ended yet"
                                                : " at least, ended without an orderly stop");
    line.spans.push_back(span);
  }
  for (const CheckpointFact& fact : facts.checkpoints)
    if (fact.problem.empty()) line.points.push_back(static_cast<double>(fact.step));
  line.points_name = "checkpoints kept";

  std::string text;
  if (facts.starts.empty() && line.points.empty()) {
    text += missing("No starts and no checkpoints were recorded.");
  } else {
    text +=
        figure("Course of the run", report::time_line(line),
               fmt::format("{} start{}{}; a cross is a start that ended without an orderly stop (killed, or an error). "
                           "{} checkpoint{} kept.",
                           facts.starts.size(), facts.starts.size() == 1 ? "" : "s",
                           first > 0 ? fmt::format(" (the last {} are drawn)", kMostStartsDrawn) : "",
                           facts.checkpoints_kept, facts.checkpoints_kept == 1 ? "" : "s"));
  }
  if (facts.checkpoints.empty())
    return "<div class=\"figures\">\n" + text + missing("The run has no checkpoint.") + "</div>\n";
  std::vector<std::vector<std::string>> rows;
  for (const CheckpointFact& fact : facts.checkpoints)
    rows.push_back({checkpoint::directory_name(fact.step), fact.written, fact.problem.empty() ? fact.grid : "-",
                    fact.problem.empty() ? report::bytes_text(static_cast<double>(fact.bytes)) : "-",
                    fact.problem.empty() ? "manifest whole" : fact.problem});
  return "<div class=\"figures\">\n" + text +
         table({"checkpoint", "written (UTC)", "grid, data x feature", "bytes", "state"}, rows, 5) + "</div>\n";
}

std::string environment_section(const RunFacts& facts) {
  const Json& record = facts.record;
  std::vector<std::vector<std::string>> rows;
  const auto row = [&](const std::string& name, const std::string& value) {
    if (!value.empty()) rows.push_back({name, value});
  };
  row("directory", facts.path.string());
  row("command", text_of(member(record, {"command"})));
  row("started", text_of(member(record, {"started"})));
  row("ended", text_of(member(record, {"ended"})));
  const Json& build = member(record, {"build"});
  if (build.is_object())
    row("program",
        fmt::format("weft {}, revision {}{}, {}, {}{}{}", text_of(member(build, {"version"})),
                    text_of(member(build, {"revision"})),
                    member(build, {"modified"}) == Json(true) ? " (modified)" : "",
                    text_of(member(build, {"compiler"})), text_of(member(build, {"build_type"})),
                    text_of(member(build, {"cuda"})).empty() ? "" : ", CUDA ", text_of(member(build, {"cuda"}))));
  const Json& libraries = member(record, {"libraries"});
  if (libraries.is_object())
    for (const auto& [name, version] : libraries.items())
      if (rows.size() < kMostRows) row(name, text_of(version));
  const double host_peak = number(member(record, {"host_peak_bytes"}));
  const double device_peak = number(member(record, {"device", "peak_bytes"}));
  if (host_peak > 0) row("host memory, most allocated", report::bytes_text(host_peak));
  if (device_peak > 0) row("device memory, most allocated", report::bytes_text(device_peak));
  std::string text = table({}, rows, 2);

  const Json& hosts = member(record, {"hosts"});
  if (!hosts.is_array() || hosts.empty()) return text + missing("Hosts and devices were not recorded.");
  rows.clear();
  for (const Json& host : hosts) {
    if (rows.size() == kMostRows) {
      rows.push_back({fmt::format("… and {} more", hosts.size() - kMostRows), "", ""});
      break;
    }
    const Json& ranks = member(host, {"ranks"});
    rows.push_back(
        {text_of(member(host, {"host"})), text_of(member(host, {"device"})),
         ranks.is_array() && ranks.size() <= 16 ? report::to_text(ranks) : fmt::format("{} ranks", ranks.size())});
  }
  return text + table({"host", "device", "ranks"}, rows, 3);
}

std::string input_section(const RunFacts& facts) {
  if (!facts.input.empty())
    return fmt::format("<p>Every key as the run took it (input.toml).</p>\n<pre>{}</pre>\n", escaped(facts.input));
  const Json& input = member(facts.record, {"input"});
  if (!input.is_object()) return missing("The input was not recorded: the run ended before it was accepted.");
  return fmt::format(
      "<p>Every key, from run.json (input.toml is missing: the run ended before it began to train).</p>\n"
      "<pre>{}</pre>\n",
      escaped(report::to_text(input, 2)));
}

}  // namespace

std::string report_page(const RunFacts& facts) {
  const HeldOut measures = held_out(facts);
  std::filesystem::path named = facts.path.lexically_normal();
  if (!named.has_filename()) named = named.parent_path();
  const std::string name =
      named.filename().empty() || named.filename() == "." ? facts.path.string() : named.filename().string();
  std::string notes;
  for (const std::string& note : facts.notes) notes += fmt::format("<p class=\"bad\">{}</p>\n", escaped(note));
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<meta name=\"color-scheme\" "
      "content=\"light dark\"/>\n<title>{0}: weft report</title>\n<style>\n{1}{2}</style>\n</head>\n<body>\n<header>\n"
      "<h1>{0}</h1>\n{3}{4}{5}</header>\n{6}{7}{8}{9}{10}{11}{12}<footer>Written by weft {13} from the files of the "
      "run "
      "directory; nothing in this page is fetched.</footer>\n</body>\n</html>\n",
      escaped(name), report::chart_style(), kStyle, state_line(facts), tiles(facts, measures), notes,
      section("Training", course_section(facts, measures)),
      section("Held-out data, by layer", layers_section(measures)), section("Decoder", mass_section(facts.mass)),
      section("Time", time_section(facts)), section("Starts and checkpoints", life_section(facts)),
      section("Environment", environment_section(facts)), section("Input", input_section(facts)),
      report::build_record.version);
}

}  // namespace weft::commands
