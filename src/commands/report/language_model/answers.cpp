// SPDX-License-Identifier: Apache-2.0
#include "commands/report/language_model/answers.hpp"

#include <fmt/format.h>

#include <cmath>

#include "base/text.hpp"
#include "report/format.hpp"

namespace weft::commands {
namespace {

using report::Json;

/// Prompts and answers that are shown.
constexpr std::size_t kPrompts = 4, kAnswers = 8, kLongest = 600;

const Json& answers_of(const RunFacts& facts) { return member(facts.record, {"result", "answers"}); }

struct Measure {
  const char *key, *name;
};
constexpr Measure kMeasures[] = {{"reward", "mean reward"},
                                 {"diversity", "semantic diversity"},
                                 {"distinct_2", "distinct-2"},
                                 {"self_bleu", "self-BLEU"},
                                 {"objective", "objective of sets"},
                                 {"answer_tokens", "tokens of an answer"},
                                 {"empty_answers", "share of empty answers"}};

std::string value_text(double value) { return std::isfinite(value) ? fmt::format("{:.4f}", value) : "not known"; }

std::string change_text(double before, double after) {
  if (!std::isfinite(before) || !std::isfinite(after) || before == 0) return "";
  return fmt::format("{:+.1f} %", 100 * (after / before - 1));
}

void samples(report::Section& section, const Json& of_step, std::string_view when) {
  const Json& all = member(of_step, {"samples"});
  if (!all.is_array() || all.empty()) return;
  section.begin_block();
  section.paragraph(fmt::format("Answers {} the training:", when));
  std::string text;
  for (std::size_t p = 0; p < std::min(all.size(), kPrompts); ++p) {
    text += "> " + printable(text_of(member(all[p], {"prompt"})), kLongest) + "\n";
    const Json& answers = member(all[p], {"answers"});
    for (std::size_t i = 0; answers.is_array() && i < std::min(answers.size(), kAnswers); ++i)
      text += fmt::format("  {}. {}\n", i + 1, printable(text_of(answers[i]), kLongest));
  }
  section.listing(text);
  section.end_block();
}

void stages(report::Section& section, const RunFacts& facts) {
  const Json& timings = member(facts.record, {"timings"});
  if (!timings.is_object()) return;
  double total = 0;
  for (const auto& [name, times] : timings.items())
    if (const double seconds = number(member(times, {"mean"})); std::isfinite(seconds)) total += seconds;
  std::vector<std::vector<std::string>> rows;
  for (const char* stage : {"generate", "embed", "reward", "diversity and advantage", "policy backward"}) {
    const double seconds = number(member(timings, {stage, "mean"}));
    if (std::isfinite(seconds) && total > 0)
      rows.push_back({stage, fmt::format("{:.3g}", seconds), fmt::format("{:.1f} %", 100 * seconds / total)});
  }
  if (!rows.empty()) section.table({"stage", "seconds", "of all phases"}, rows, 1);
}

}  // namespace

std::optional<report::Section> answers_section(const RunFacts& facts) {
  const Json& answers = answers_of(facts);
  if (!answers.is_object()) return std::nullopt;
  report::Section section("Diversity of answers");
  const Json &before = member(answers, {"before"}), &after = member(answers, {"after"});
  section.paragraph(
      fmt::format("The same prompts and random numbers before the training and after step {}. Diversity is the mean of "
                  "1 - cosine over pairs of answers to a prompt, embedded by the initial model.",
                  whole(number(member(after, {"step"})))));
  std::vector<std::vector<std::string>> rows;
  for (const Measure& measure : kMeasures) {
    const double first = number(member(before, {measure.key})), last = number(member(after, {measure.key}));
    rows.push_back({measure.name, value_text(first), value_text(last), change_text(first, last)});
  }
  section.table({"measure", "before the training", "after", "change"}, rows, 1);
  stages(section, facts);
  section.begin_columns();
  samples(section, before, "before");
  samples(section, after, "after");
  section.end_columns();
  return section;
}

std::vector<CurveStyle> answer_curves(const RunFacts& facts) {
  if (facts.curves.find("answers.diversity") == nullptr) return {};
  const std::string drawn = "Mean over the answers since the last record, drawn for training.",
                    fixed_prompts = "The evaluation prompts, with the same random numbers each time.";
  return {{.metric = "validation.diversity",
           .title = "Semantic diversity",
           .y_label = "mean of 1 - cosine",
           .caption = fixed_prompts},
          {.metric = "validation.reward", .title = "Reward", .y_label = "mean reward", .caption = fixed_prompts},
          {.metric = "validation.distinct_2",
           .title = "distinct-2",
           .y_label = "different bigrams / bigrams",
           .caption = fixed_prompts},
          {.metric = "answers.diversity",
           .title = "Semantic diversity in training",
           .y_label = "mean of 1 - cosine",
           .caption = drawn},
          {.metric = "answers.reward", .title = "Reward in training", .y_label = "mean reward", .caption = drawn}};
}

}  // namespace weft::commands
