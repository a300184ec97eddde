// SPDX-License-Identifier: Apache-2.0
#include "commands/report/comparison.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "report/chart.hpp"
#include "report/format.hpp"

namespace weft::commands {
namespace {

namespace fs = std::filesystem;
using report::Json;
using report::short_number;

constexpr std::size_t kMostKeys = 24;  // columns of settings

/// Results that runs of every family have.
const std::vector<ResultColumn>& common_results() {
  static const std::vector<ResultColumn> all = {{"epsilon", {"privacy", "epsilon"}},
                                                {"steps", {"step"}},
                                                {"tokens", {"tokens"}},
                                                {"tokens per second", {"tokens_per_second"}}};
  return all;
}

const Json& follow(const Json& from, const std::vector<std::string>& path) {
  const Json* at = &from;
  for (const std::string& name : path) at = &member(*at, {name.c_str()});
  return *at;
}

double own_result_of(const RunFacts& facts, const std::vector<std::string>& path) {
  return number(follow(member(facts.record, {"result"}), path));
}

/// The run's own result, else that of evaluation.json, whose members have the same names.
double result_of(const RunFacts& facts, const std::vector<std::string>& path) {
  const double own = own_result_of(facts, path);
  return std::isfinite(own) ? own : number(follow(facts.evaluation, path));
}

/// "": the run has the results itself, or none. Results of `weft evaluate` can be of any data.
std::string note_on_evaluation(const RunFacts& facts, const std::vector<ResultColumn>& columns) {
  std::string names;
  for (const ResultColumn& column : columns)
    if (!std::isfinite(own_result_of(facts, column.path)) && std::isfinite(result_of(facts, column.path)))
      names += (names.empty() ? "" : ", ") + column.name;
  return names.empty()
             ? ""
             : fmt::format("{}: of evaluation.json, on {}", names, text_of(member(facts.evaluation, {"data"})));
}

/// "table.key" -> value, of all tables of the input but for the directory of the run.
std::map<std::string, std::string> settings_of(const RunFacts& facts) {
  std::map<std::string, std::string> settings;
  const Json& input = member(facts.record, {"input"});
  if (input.is_object())
    for (const auto& [table, keys] : input.items())
      if (keys.is_object())
        for (const auto& [key, value] : keys.items()) settings[table + "." + key] = text_of(value);
  settings.erase("run.output");
  return settings;
}

/// The paths without the components that all of them begin with; of the same path, the path and a number.
std::vector<std::string> names_of(const std::vector<RunFacts>& runs) {
  std::vector<std::vector<std::string>> parts;
  for (const RunFacts& run : runs) {
    std::vector<std::string>& own = parts.emplace_back();
    for (const fs::path& part : run.path.lexically_normal())
      if (!part.empty() && part != ".") own.push_back(part.string());
  }
  std::size_t common = 0;
  const auto shared = [&] {
    return std::all_of(parts.begin(), parts.end(), [&](const std::vector<std::string>& own) {
      return own.size() > common + 1 && own[common] == parts.front()[common];
    });
  };
  while (shared()) ++common;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    std::string name;
    for (std::size_t j = common; j < parts[i].size(); ++j) name += (name.empty() ? "" : "/") + parts[i][j];
    if (name.empty()) name = runs[i].path.string();
    if (std::find(names.begin(), names.end(), name) != names.end()) name += fmt::format(" ({})", i + 1);
    names.push_back(name);
  }
  return names;
}

std::string shown(double value) { return std::isfinite(value) ? short_number(value) : "-"; }

/// Head and rows: name, settings, results, state.
std::pair<std::vector<std::string>, std::vector<std::vector<std::string>>> table_of(const Comparison& comparison) {
  const std::size_t keys = std::min(comparison.keys.size(), kMostKeys);
  std::vector<std::string> head = {"run"};
  head.insert(head.end(), comparison.keys.begin(), comparison.keys.begin() + static_cast<std::ptrdiff_t>(keys));
  head.insert(head.end(), comparison.results.begin(), comparison.results.end());
  head.emplace_back("state");
  std::vector<std::vector<std::string>> rows;
  for (const Comparison::Run& run : comparison.runs) {
    std::vector<std::string>& row = rows.emplace_back(std::vector<std::string>{run.name});
    for (std::size_t i = 0; i < keys; ++i) row.push_back(run.settings[i].empty() ? "-" : run.settings[i]);
    for (const double value : run.results) row.push_back(shown(value));
    row.push_back(run.state);
  }
  return {head, rows};
}

report::Section table_section(const Comparison& comparison) {
  report::Section section("Settings and results");
  const auto [head, rows] = table_of(comparison);
  section.paragraph(comparison.results.empty() ? "No run has a result yet."
                    : comparison.ranked        ? fmt::format("Sorted by {}.", comparison.results.front())
                                               : "No run has a validation or training loss: sorted by name.");
  if (comparison.keys.empty())
    section.paragraph("The inputs are the same, but for the directory.", report::Tone::faint);
  else if (comparison.keys.size() > kMostKeys)
    section.paragraph(
        fmt::format("The first {} of {} settings that differ are shown.", kMostKeys, comparison.keys.size()),
        report::Tone::faint);
  section.table(head, rows, 1);
  return section;
}

report::Section curves_section(const Comparison& comparison) {
  report::Section section("Curves");
  // All metrics that any of the runs has, in the order of its page.
  std::vector<CurveStyle> styles;
  for (const Comparison::Run& run : comparison.runs)
    for (const CurveStyle& style : styles_of(run.facts.curves, comparison.family->part(run.facts).curves))
      if (std::none_of(styles.begin(), styles.end(), [&](const CurveStyle& one) { return one.metric == style.metric; }))
        styles.push_back(style);
  section.begin_columns();
  bool any = false;
  for (const CurveStyle& style : styles) {
    report::Overlay chart{.x_label = "step", .y_label = style.y_label, .lines = {}, .from_zero = style.from_zero};
    bool drawn = false;
    for (const Comparison::Run& run : comparison.runs) {
      const Curve* const curve = run.facts.curves.find(style.metric);
      report::Overlay::Line& line = chart.lines.emplace_back();
      line.name = run.name;
      if (curve == nullptr) continue;
      line.x = run.facts.curves.step;
      line.y = curve->mean;
      for (double& value : line.y) {
        value *= style.factor;
        drawn = drawn || (std::isfinite(value) && (!style.skip_if_zero || value > 0));
      }
    }
    if (!drawn) continue;
    any = true;
    section.figure(style.title, report::overlay(chart), style.caption);
  }
  section.end_columns();
  if (!any)
    section.paragraph("No curves: the runs have no records in metrics.jsonl.", report::Tone::missing);
  else if (comparison.runs.size() > report::kColours)
    section.paragraph(fmt::format("The {} best of {} runs are drawn.", report::kColours, comparison.runs.size()),
                      report::Tone::faint);
  return section;
}

}  // namespace

Comparison compare(std::vector<RunFacts> runs) {
  Comparison comparison;
  comparison.family = family_of(runs.front());
  for (const RunFacts& run : runs) {
    const Family* const family = family_of(run);
    if (family == nullptr)
      throw error(ExitCode::usage,
                  "{}: cannot be compared (its run.json has no input: it ended before it was accepted); leave it out",
                  run.path.string());
    if (family != comparison.family)
      throw error(ExitCode::usage,
                  "{} and {} cannot be compared (one of {}, one of {}: their losses measure different things); give "
                  "runs of one kind",
                  runs.front().path.string(), run.path.string(), comparison.family->name, family->name);
  }
  const std::vector<std::string> names = names_of(runs);
  std::vector<std::map<std::string, std::string>> settings;
  std::map<std::string, std::set<std::string>> values;  // "" stands for a key that a run lacks
  for (const RunFacts& run : runs)
    for (const auto& [key, value] : settings.emplace_back(settings_of(run))) values[key].insert(value);
  for (auto& [key, of_key] : values) {
    for (const auto& own : settings)
      if (!own.contains(key)) of_key.insert("");
    if (of_key.size() > 1) comparison.keys.push_back(key);
  }
  std::vector<ResultColumn> columns = comparison.family->results;
  columns.insert(columns.end(), common_results().begin(), common_results().end());
  std::erase_if(columns, [&](const ResultColumn& column) {
    return std::none_of(runs.begin(), runs.end(),
                        [&](const RunFacts& run) { return std::isfinite(result_of(run, column.path)); });
  });
  for (const ResultColumn& column : columns) comparison.results.push_back(column.name);
  comparison.ranked =
      !columns.empty() && std::any_of(comparison.family->results.begin(), comparison.family->results.end(),
                                      [&](const ResultColumn& one) { return one.name == columns[0].name; });
  for (std::size_t i = 0; i < runs.size(); ++i) {
    Comparison::Run& run = comparison.runs.emplace_back();
    run.name = names[i];
    run.state = state_of(runs[i]);
    for (const std::string& key : comparison.keys) run.settings.push_back(settings[i][key]);
    for (const ResultColumn& column : columns) run.results.push_back(result_of(runs[i], column.path));
    run.facts = std::move(runs[i]);
    if (std::string note = note_on_evaluation(run.facts, columns); !note.empty())
      run.facts.notes.push_back(std::move(note));
  }
  std::sort(comparison.runs.begin(), comparison.runs.end(), [&](const Comparison::Run& a, const Comparison::Run& b) {
    const bool has_a = comparison.ranked && std::isfinite(a.results[0]),
               has_b = comparison.ranked && std::isfinite(b.results[0]);
    if (has_a != has_b) return has_a;
    if (has_a && a.results[0] != b.results[0]) return a.results[0] < b.results[0];
    return a.name < b.name;
  });
  return comparison;
}

std::string comparison_page(const Comparison& comparison) {
  report::Page page;
  page.title = fmt::format("{} {}", comparison.runs.size(), comparison.family->name);
  std::string keys;
  for (std::size_t i = 0; i < std::min(comparison.keys.size(), std::size_t{6}); ++i)
    keys += (i == 0 ? "" : ", ") + comparison.keys[i];
  if (!keys.empty()) page.subtitle = fmt::format("differ in {}{}", keys, comparison.keys.size() > 6 ? ", …" : "");
  page.source = "from the files of the run directories";
  const Comparison::Run& best = comparison.runs.front();
  page.state = fmt::format("{} of {} finished.",
                           std::count_if(comparison.runs.begin(), comparison.runs.end(),
                                         [](const Comparison::Run& run) { return run.state == "finished"; }),
                           comparison.runs.size());
  if (comparison.ranked && std::isfinite(best.results.front()))
    page.tiles = {{best.name, "best run"}, {short_number(best.results.front()), comparison.results.front()}};
  for (const Comparison::Run& run : comparison.runs)
    for (const std::string& note : run.facts.notes) page.notes.push_back(run.name + ": " + note);
  page.sections.push_back(table_section(comparison));
  page.sections.push_back(curves_section(comparison));
  report::Section runs("Runs");
  std::vector<std::vector<std::string>> rows;
  for (const Comparison::Run& run : comparison.runs)
    rows.push_back({run.name, run.facts.path.string(), comparison.family->part(run.facts).about});
  runs.table({"run", "directory", "what"}, rows, 3);
  page.sections.push_back(std::move(runs));
  return report::to_html(page);
}

std::string to_text(const Comparison& comparison) {
  auto [head, rows] = table_of(comparison);
  rows.insert(rows.begin(), head);
  std::vector<std::size_t> widths(head.size());
  for (const auto& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (const auto& row : rows) {
    if (!text.empty()) text += "\n";
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i)
      line += i == 0 || i + 1 == row.size() ? fmt::format("{}{:<{}}", i == 0 ? "" : "  ", row[i], widths[i])
                                            : fmt::format("  {:>{}}", row[i], widths[i]);
    text += line.substr(0, line.find_last_not_of(' ') + 1);
  }
  return text;
}

std::string to_csv(const Comparison& comparison) {
  const auto quoted = [](const std::string& text) {
    if (text.find_first_of(",\"\n\r") == std::string::npos) return text;
    std::string out = "\"";
    for (const char c : text) out += c == '"' ? std::string("\"\"") : std::string(1, c);
    return out + "\"";
  };
  std::string out = "run,path";
  for (const std::string& key : comparison.keys) out += "," + quoted(key);
  for (const std::string& name : comparison.results) out += "," + quoted(name);
  out += ",state\n";
  for (const Comparison::Run& run : comparison.runs) {
    out += quoted(run.name) + "," + quoted(run.facts.path.string());
    for (const std::string& value : run.settings) out += "," + quoted(value);
    for (const double value : run.results) out += "," + (std::isfinite(value) ? fmt::format("{:.9g}", value) : "");
    out += "," + quoted(run.state) + "\n";
  }
  return out;
}

report::Json to_json(const Comparison& comparison) {
  Json runs = Json::array();
  for (const Comparison::Run& run : comparison.runs) {
    Json one = {{"name", run.name}, {"path", run.facts.path.string()}, {"state", run.state}};
    one["exit_code"] = member(run.facts.record, {"exit", "code"});
    one["settings"] = Json::object();
    for (const std::string& key : comparison.keys) {
      const std::size_t dot = key.find('.');
      one["settings"][key] =
          member(run.facts.record, {"input", key.substr(0, dot).c_str(), key.substr(dot + 1).c_str()});
    }
    one["results"] = Json::object();
    for (std::size_t i = 0; i < comparison.results.size(); ++i)
      one["results"][comparison.results[i]] = std::isfinite(run.results[i]) ? Json(run.results[i]) : Json();
    runs.push_back(std::move(one));
  }
  return {{"family", comparison.family->table},
          {"sorted_by", comparison.ranked ? Json(comparison.results.front()) : Json()},
          {"runs", std::move(runs)}};
}

}  // namespace weft::commands
