// SPDX-License-Identifier: Apache-2.0
#include "commands/report/page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "checkpoint/directory.hpp"
#include "report/chart.hpp"
#include "report/format.hpp"

namespace weft::commands {

using report::Json;
using report::short_number;

std::string percent(double fraction) {
  return std::isfinite(fraction) ? short_number(100 * fraction) + " %" : "not finite";
}

std::string fixed(double value, int decimals) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, decimals) : "not finite";
}

std::string whole(double value) {
  return std::isfinite(value) && std::abs(value) < 1e18 ? report::grouped(std::llround(value)) : "unknown";
}

namespace {

constexpr std::size_t kMostStartsDrawn = 24;
constexpr std::size_t kMostRestartsMarked = 100;
constexpr std::size_t kMostCases = 8;  // of a benchmark

/// Metrics that every model has.
const std::vector<CurveStyle>& common_curves() {
  static const std::vector<CurveStyle> all = {
      {.metric = "loss", .title = "Training loss", .y_label = "loss", .caption = "Of the logged step."},
      {.metric = "learning_rate",
       .title = "Learning rate",
       .y_label = "learning rate",
       .caption = "Of the logged step.",
       .from_zero = true},
      {.metric = "gradient_norm",
       .title = "Gradient norm",
       .y_label = "norm",
       .caption = "Global norm of the logged step, before clipping.",
       .skip_if_zero = true},
      {.metric = "tokens_per_second",
       .title = "Speed",
       .y_label = "tokens per second",
       .caption = "All ranks together, since the previous logged step.",
       .from_zero = true}};
  return all;
}
/// Numbers of a record that locate the step; they do not measure training.
constexpr const char* kNotDrawn[] = {"step", "tokens", "epoch", "seconds", "data_wait_seconds", "skipped_steps"};

/// Metrics of a group, as "validation.loss", are in some records only.
bool is_grouped(const std::string& metric) { return metric.find('.') != std::string::npos; }

/// Steps at which the run was started again, ascending.
std::vector<double> restarts_of(const RunFacts& facts) {
  std::vector<double> restarts;
  for (std::size_t i = 1; i < facts.starts.size(); ++i) restarts.push_back(static_cast<double>(facts.starts[i].begin));
  std::sort(restarts.begin(), restarts.end());
  restarts.erase(std::unique(restarts.begin(), restarts.end()), restarts.end());
  std::erase(restarts, 0.0);
  if (restarts.size() > kMostRestartsMarked) restarts.erase(restarts.begin(), restarts.end() - kMostRestartsMarked);
  return restarts;
}

}  // namespace

std::vector<CurveStyle> styles_of(const Curves& curves, const std::vector<CurveStyle>& of_family) {
  std::vector<CurveStyle> styles = of_family;
  const auto has = [&](const std::string& metric) {
    return std::any_of(styles.begin(), styles.end(), [&](const CurveStyle& style) { return style.metric == metric; }) ||
           std::find(std::begin(kNotDrawn), std::end(kNotDrawn), metric) != std::end(kNotDrawn);
  };
  for (const CurveStyle& style : common_curves())
    if (!has(style.metric)) styles.push_back(style);
  for (const Curve& curve : curves.metrics) {
    if (has(curve.metric)) continue;
    // "answers.empty_fraction" is the title "Answers: empty fraction".
    std::string name = curve.metric, title;
    std::replace(name.begin(), name.end(), '_', ' ');
    const std::size_t dot = name.find('.');
    if (is_grouped(curve.metric)) title = name.substr(0, dot) + ": ";
    name = name.substr(dot + 1);
    title += name;
    title[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(title[0])));
    styles.push_back({.metric = curve.metric,
                      .title = title,
                      .y_label = name,
                      .caption = "As logged.",
                      .line_name = "mean over layers",
                      .band_name = "lowest to highest layer"});
  }
  return styles;
}

namespace {

std::vector<double> scaled(std::vector<double> values, double factor) {
  for (double& value : values) value *= factor;
  return values;
}

/// Points without a value are no gaps.
void keep_measured(report::LineChart& chart) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < chart.x.size(); ++i) {
    if (!std::isfinite(chart.y[i])) continue;
    chart.x[kept] = chart.x[i];
    chart.y[kept++] = chart.y[i];
  }
  chart.x.resize(kept);
  chart.y.resize(kept);
}

bool any_finite(const std::vector<double>& values) {
  return std::any_of(values.begin(), values.end(), [](double value) { return std::isfinite(value); });
}

report::Section training_section(const RunFacts& facts, const FamilyPart& family) {
  report::Section section("Training");
  const Curves& curves = facts.curves;
  if (curves.step.empty()) {
    section.paragraph(
        "No curves: metrics.jsonl is missing or has no records (the run ended before its first logged step).",
        report::Tone::missing);
    return section;
  }
  const std::vector<double> restarts = restarts_of(facts);
  section.begin_columns();
  for (const CurveStyle& style : styles_of(curves, family.curves)) {
    const Curve* const curve = curves.find(style.metric);
    if (curve == nullptr || !any_finite(curve->mean)) continue;
    if (style.skip_if_zero &&
        std::none_of(curve->mean.begin(), curve->mean.end(), [](double value) { return value > 0; }))
      continue;
    report::LineChart chart;
    chart.x_label = "step";
    chart.y_label = style.y_label;
    chart.x = curves.step;
    chart.y = scaled(curve->mean, style.factor);
    if (is_grouped(style.metric)) keep_measured(chart);
    chart.marks = restarts;
    chart.marks_name = "restart";
    chart.from_zero = style.from_zero;
    if (!style.band_name.empty() && any_finite(curve->low)) {
      chart.low = scaled(curve->low, style.factor);
      chart.high = scaled(curve->high, style.factor);
      chart.line_name = style.line_name;
      chart.band_name = style.band_name;
    }
    if (style.level >= 0) {
      chart.line_name = style.line_name;
      chart.level = style.level;
      chart.level_name = style.level_name;
    }
    section.figure(style.title, report::line_chart(chart), style.caption);
  }
  section.end_columns();
  if (curves.records_per_point > 1)
    section.paragraph(fmt::format("The {} records are drawn as means of up to {} neighbours.",
                                  whole(static_cast<double>(curves.records)), curves.records_per_point));
  if (curves.not_finite > 0)
    section.paragraph(fmt::format("{} logged step{} had a loss that is not finite; curves break there.",
                                  curves.not_finite, curves.not_finite == 1 ? "" : "s"),
                      report::Tone::bad);
  return section;
}

void add_phases(report::Section& section, const RunFacts& facts) {
  const Json& timings = member(facts.record, {"timings"});
  if (!timings.is_object() || timings.empty()) {
    section.paragraph("No timings were recorded: the run ended before its steps did.", report::Tone::missing);
    return;
  }
  double total = 0;
  for (const auto& [name, phase] : timings.items())
    if (const double mean = number(member(phase, {"mean"})); mean > 0) total += mean;
  report::HorizontalBars bars;
  bars.x_label = "seconds, mean over ranks";
  const double ranks = number(member(facts.record, {"ranks"}));
  if (ranks > 1) bars.whisker_name = "fastest to slowest rank, mean at the end of the bar";
  for (const auto& [name, phase] : timings.items()) {
    const double mean = number(member(phase, {"mean"}));
    if (bars.bars.size() == kMostRows || !(mean >= 0)) continue;
    report::Bar bar;
    bar.name = name;
    bar.value = mean;
    bar.text = fmt::format("{} s, {}", short_number(mean), percent(total > 0 ? mean / total : 0));
    if (ranks > 1) {
      bar.low = number(member(phase, {"min"}));
      bar.high = number(member(phase, {"max"}));
    }
    bars.bars.push_back(bar);
  }
  std::stable_sort(bars.bars.begin(), bars.bars.end(),
                   [](const report::Bar& a, const report::Bar& b) { return a.value > b.value; });
  const double seconds = number(member(facts.record, {"seconds"}));
  section.figure("Phases of the step", report::horizontal_bars(bars),
                 fmt::format("Steps of the last start: {} s{}. {}", short_number(total),
                             std::isfinite(seconds) ? fmt::format(" of the program's {} s", short_number(seconds)) : "",
                             facts.benchmark.is_object()
                                 ? "The benchmark compares the phases of a step with the hardware's limits."
                                 : "weft benchmark INPUT --output RUN adds a comparison with the hardware's limits."));
}

void add_benchmark_case(report::Section& section, const Json& one, const Json& machine) {
  const Json& phases = member(one, {"phases"});
  if (!phases.is_array()) return;
  report::HorizontalBars bars;
  bars.x_label = "ms/step, median";
  bars.limit_name = "time at the hardware's limit";
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
  section.figure(
      "Benchmark, case " + text_of(member(one, {"name"})), report::horizontal_bars(bars),
      fmt::format("{} ms/step, {} tokens/s on batches in memory. Limits: memory copy {} GB/s, encoder product {} "
                  "GFLOP/s.",
                  short_number(number(member(one, {"ms_per_step"}))), whole(number(member(one, {"tokens_per_second"}))),
                  short_number(number(member(machine, {"copy_gb_per_second"}))),
                  short_number(number(member(machine, {"gemm_gflops"})))));
}

/// The figures of --profile.
void add_profile(report::Section& section, const RunFacts& facts) {
  const Json& profile = member(facts.record, {"profile"});
  if (!profile.is_object()) return;
  std::vector<std::vector<std::string>> rows;
  const auto row = [&](const char* name, const char* key, const auto& shown) {
    if (const double value = number(member(profile, {key})); std::isfinite(value)) rows.push_back({name, shown(value)});
  };
  const auto ms = [](double value) { return short_number(value) + " ms"; };
  const auto share = [](double value) { return short_number(value) + " %"; };
  row("time per step", "ms_per_step", ms);
  row("device memory, peak", "device_peak_bytes",
      [](double value) { return report::binary_bytes_text(static_cast<std::int64_t>(std::clamp(value, 0.0, 1e18))); });
  row("utilisation", "utilisation_percent", share);
  row("kernel time per step", "kernel_ms_per_step", ms);
  row("memory bandwidth, of the measured limit", "bandwidth_percent_of_limit", share);
  if (rows.empty()) return;
  section.begin_block();
  section.table({"profile", ""}, rows, 1);
  section.paragraph("From the traced steps of --profile; profile.json shows them in Perfetto.", report::Tone::faint);
  section.end_block();
}

report::Section time_section(const RunFacts& facts) {
  report::Section section("Time");
  section.begin_columns();
  add_phases(section, facts);
  add_profile(section, facts);
  const Json& cases = member(facts.benchmark, {"cases"});
  if (cases.is_array())
    for (std::size_t i = 0; i < cases.size() && i < kMostCases; ++i)
      add_benchmark_case(section, cases[i], member(facts.benchmark, {"machine"}));
  section.end_columns();
  return section;
}

/// Drawn spans of the last starts; `first` is the index of the first one.
std::vector<report::Span> spans_of(const RunFacts& facts, std::size_t first) {
  const bool running = !member(facts.record, {"exit", "code"}).is_number();
  std::vector<report::Span> spans;
  for (std::size_t i = first; i < facts.starts.size(); ++i) {
    const StartFact& start = facts.starts[i];
    const bool newest = i + 1 == facts.starts.size();
    report::Span span;
    span.name = fmt::format("start {}", i + 1);
    span.begin = static_cast<double>(start.begin);
    span.end = static_cast<double>(start.end);
    span.clean = start.end >= 0 || (newest && running);
    // The step of an abnormal end is not recorded; it is at least the step from which the next start resumed.
    if (start.end < 0)
      span.end =
          std::max(span.begin, newest ? facts.curves.last_step() : static_cast<double>(facts.starts[i + 1].begin));
    span.note = fmt::format("start {}: from step {} to step {}{}", i + 1, whole(span.begin), whole(span.end),
                            start.end >= 0      ? ""
                            : newest && running ? ", not ended yet"
                                                : " at least, ended without an orderly stop");
    spans.push_back(span);
  }
  return spans;
}

/// Settings that a restart changed, with the step from which they apply.
void add_changes(report::Section& section, const RunFacts& facts) {
  std::vector<std::vector<std::string>> rows;
  const Json* last = nullptr;
  for (std::size_t i = 0; i < facts.starts.size(); ++i) {
    const Json& changed = facts.starts[i].changed;
    // A start that died before its first checkpoint is followed by one with the same change.
    if (!changed.is_object() ||
        (last != nullptr && *last == changed && facts.starts[i].begin == facts.starts[i - 1].begin))
      continue;
    last = &changed;
    for (const auto& [key, values] : changed.items())
      if (rows.size() < kMostRows && values.is_array() && values.size() == 2)
        rows.push_back({key, text_of(values[0]), text_of(values[1]), whole(static_cast<double>(facts.starts[i].begin)),
                        fmt::format("{}", i + 1)});
  }
  if (rows.empty()) return;
  section.paragraph("Settings that changed when the run was started again:");
  section.table({"setting", "before", "after", "from step", "start"}, rows, 3);
}

report::Section starts_section(const RunFacts& facts) {
  report::Section section("Starts and checkpoints");
  const std::size_t first = facts.starts.size() - std::min(facts.starts.size(), kMostStartsDrawn);
  const double planned = number(member(facts.record, {"input", "run", "steps"}));
  report::TimeLine line;
  line.x_label = "step";
  line.last = std::max(std::isfinite(planned) ? planned : 0, facts.curves.last_step());
  line.spans = spans_of(facts, first);
  for (const CheckpointFact& fact : facts.checkpoints)
    if (fact.problem.empty()) line.points.push_back(static_cast<double>(fact.step));
  line.points_name = "checkpoints kept";

  section.begin_columns();
  if (line.spans.empty() && line.points.empty())
    section.paragraph("No starts and no checkpoints were recorded.", report::Tone::missing);
  else
    section.figure(
        "Course of the run", report::time_line(line),
        fmt::format("{} start{}{}; a cross is a start that ended without an orderly stop (killed, or an error). "
                    "{} checkpoint{} kept.",
                    facts.starts.size(), facts.starts.size() == 1 ? "" : "s",
                    first > 0 ? fmt::format(" (the last {} are drawn)", kMostStartsDrawn) : "", facts.checkpoints_kept,
                    facts.checkpoints_kept == 1 ? "" : "s"));
  std::vector<std::vector<std::string>> rows;
  for (const CheckpointFact& fact : facts.checkpoints)
    rows.push_back({checkpoint::directory_name(fact.step), fact.written, fact.problem.empty() ? fact.grid : "-",
                    fact.problem.empty() ? report::decimal_bytes_text(static_cast<double>(fact.bytes)) : "-",
                    fact.problem.empty() ? "manifest valid" : fact.problem});
  if (rows.empty())
    section.paragraph("The run has no checkpoint.", report::Tone::missing);
  else
    section.table({"checkpoint", "written (UTC)", "grid", "bytes", "state"}, rows, 5);
  section.end_columns();
  add_changes(section, facts);
  return section;
}

report::Section environment_section(const RunFacts& facts) {
  report::Section section("Environment");
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
  const auto memory = [&](const char* name, double bytes) {
    if (bytes > 0) row(name, report::binary_bytes_text(static_cast<std::int64_t>(std::min(bytes, 1e18))));
  };
  memory("host memory, peak", number(member(record, {"host_peak_bytes"})));
  memory("device memory, peak", number(member(record, {"device", "peak_bytes"})));
  section.table({}, rows, 2);

  const Json& hosts = member(record, {"hosts"});
  if (!hosts.is_array() || hosts.empty()) {
    section.paragraph("Hosts and devices were not recorded.", report::Tone::missing);
    return section;
  }
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
  section.table({"host", "device", "ranks"}, rows, 3);
  return section;
}

report::Section input_section(const RunFacts& facts) {
  report::Section section("Input");
  const Json& input = member(facts.record, {"input"});
  if (!facts.input.empty()) {
    section.paragraph("Every key as the run used it (input.toml).");
    section.listing(facts.input, report::Listing::columns);
  } else if (input.is_object()) {
    section.paragraph("Every key, from run.json (input.toml is missing: the run ended before it began to train).");
    section.listing(report::to_text(input, 2), report::Listing::columns);
  } else {
    section.paragraph("The input was not recorded: the run ended before it was accepted.", report::Tone::missing);
  }
  return section;
}

void describe_end(const RunFacts& facts, report::Page& page) {
  const Json& code = member(facts.record, {"exit", "code"});
  const double value = number(code);
  if (!code.is_number()) {
    page.state = "The record says that the run is still active (or was killed without a record).";
  } else if (value == 0) {
    page.state = "Finished.";
  } else {
    const double step = number(member(facts.record, {"exit", "step"}));
    page.state = fmt::format("Ended with exit code {}", short_number(value));
    page.state_detail = fmt::format("{}: {}", std::isfinite(step) ? fmt::format(" in step {}", whole(step)) : "",
                                    text_of(member(facts.record, {"exit", "reason"})));
    page.state_is_bad = value != 75 && !(value > 128);  // those are stops on request, resumable
  }
}

std::vector<report::Tile> common_tiles(const RunFacts& facts) {
  std::vector<report::Tile> tiles;
  const Json& result = member(facts.record, {"result"});
  const double recorded = number(member(result, {"step"})),
               planned = number(member(facts.record, {"input", "run", "steps"}));
  tiles.push_back({whole(std::isfinite(recorded) ? recorded : facts.curves.last_step()),
                   std::isfinite(planned) ? "of " + whole(planned) + " steps" : "steps"});
  if (const double tokens = number(member(result, {"tokens"})); std::isfinite(tokens))
    tiles.push_back({whole(tokens), "training tokens"});
  if (const double speed = number(member(result, {"tokens_per_second"})); std::isfinite(speed))
    tiles.push_back({short_number(speed), "tokens per second"});
  if (const double seconds = number(member(facts.record, {"seconds"})); std::isfinite(seconds))
    tiles.push_back({report::duration(seconds), "h:mm:ss, last start"});
  tiles.push_back({whole(number(member(facts.record, {"ranks"}))), "ranks"});
  return tiles;
}

}  // namespace

const Family* family_of(const RunFacts& facts) {
  for (const Family& one : families())
    if (member(facts.record, {"input", one.table}).is_object()) return &one;
  return nullptr;
}

std::string state_of(const RunFacts& facts) {
  const Json& code = member(facts.record, {"exit", "code"});
  if (!code.is_number()) return "running, or killed";
  return number(code) == 0 ? "finished" : "exit code " + short_number(number(code));
}

std::string setting(const RunFacts& facts, const char* table, const char* key, const char* word) {
  const std::string value = text_of(member(facts.record, {"input", table, key}));
  return value.empty() ? "" : fmt::format("{} {}", word, value);
}

std::string joined(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts)
    if (!part.empty()) text += (text.empty() ? "" : ", ") + part;
  return text;
}

std::string report_page(const RunFacts& facts) {
  FamilyPart family;
  if (const Family* const one = family_of(facts)) family = one->part(facts);

  report::Page page;
  page.title = name_of(facts.path);
  page.subtitle = family.about;
  describe_end(facts, page);
  page.tiles = common_tiles(facts);
  page.tiles.insert(page.tiles.end(), family.tiles.begin(), family.tiles.end());
  page.notes = facts.notes;
  page.sections.push_back(training_section(facts, family));
  for (report::Section& section : family.sections) page.sections.push_back(std::move(section));
  page.sections.push_back(time_section(facts));
  page.sections.push_back(starts_section(facts));
  page.sections.push_back(environment_section(facts));
  page.sections.push_back(input_section(facts));
  return report::to_html(page);
}

}  // namespace weft::commands
