// SPDX-License-Identifier: Apache-2.0
#include "commands/report/language_model/part.hpp"

#include <fmt/format.h>

#include <cmath>

#include "commands/report/language_model/answers.hpp"
#include "commands/report/privacy_section.hpp"
#include "report/format.hpp"

namespace weft::commands {
namespace {

using report::Json;
using report::short_number;

/// Measures on validation data: the run's own, else those of evaluation.json; null: none.
const Json& validation_of(const RunFacts& facts) {
  const Json& own = member(facts.record, {"result", "validation"});
  return own.is_object() ? own : member(facts.evaluation, {"validation"});
}

std::vector<CurveStyle> curves(const Json& validation) {
  CurveStyle loss{.metric = "loss",
                  .title = "Training loss",
                  .y_label = "nats per token",
                  .caption = "Mean over the predictions of each logged step, before its update."};
  if (const double level = number(member(validation, {"loss"})); std::isfinite(level)) {
    loss.level = level;
    loss.level_name = "validation";
  }
  return {loss,
          {.metric = "validation.loss",
           .title = "Validation loss",
           .y_label = "nats per token",
           .caption = "Mean over all predictions of the validation data (log.evaluate_every)."},
          {.metric = "gradient_norm",
           .title = "Gradient norm",
           .y_label = "norm",
           .caption = "Of the gradients of all parameters together, before clipping.",
           .from_zero = true}};
}

std::vector<report::Tile> tiles(const RunFacts& facts, const Json& validation) {
  std::vector<report::Tile> all;
  const auto add = [&](const Json& value, const char* name) {
    if (std::isfinite(number(value))) all.push_back({short_number(number(value)), name});
  };
  add(member(validation, {"loss"}), "validation loss, nats per token");
  add(member(validation, {"perplexity"}), "perplexity");
  add(member(validation, {"bits_per_byte"}), "bits per byte");
  if (!validation.is_object()) add(member(facts.record, {"result", "train", "loss"}), "training loss, nats per token");
  add(member(facts.record, {"result", "privacy", "epsilon"}), "epsilon");
  return all;
}

report::Section model_section(const RunFacts& facts, const Json& validation) {
  report::Section section("Model");
  if (validation.is_object())
    section.paragraph(fmt::format("Validation: {} predictions, each token of the text once.",
                                  whole(number(member(validation, {"tokens"})))));
  else
    section.paragraph(
        "No validation measures: the run did not finish, or has no validation data. weft lm evaluate RUN --text FILE "
        "--output RUN adds them to this page.",
        report::Tone::missing);
  std::vector<std::vector<std::string>> rows;
  if (const Json& settings = member(facts.record, {"input", "language_model"}); settings.is_object())
    for (const auto& [key, value] : settings.items())
      if (rows.size() < kMostRows && !text_of(value).empty()) rows.push_back({key, text_of(value)});
  if (!rows.empty()) section.table({"language_model", "value"}, rows, 1);
  return section;
}

/// "language model (llama), data/text.txt, 6 layers, d_model 384, learning rate 0.001".
std::string about(const RunFacts& facts) {
  const std::string preset = text_of(member(facts.record, {"input", "language_model", "preset"}));
  const bool is_private = member(facts.record, {"input", "privacy", "enabled"}) == Json(true);
  const bool is_polychromic = member(facts.record, {"result", "answers"}).is_object();
  return joined({"language model" + (preset.empty() ? "" : " (" + preset + ")"), is_private ? "private" : "",
                 is_polychromic ? "polychromic" : "", setting(facts, "data", "train", "data"),
                 text_of(member(facts.record, {"input", "language_model", "layers"})) + " layers",
                 setting(facts, "language_model", "d_model", "d_model"),
                 setting(facts, "optimizer", "learning_rate", "learning rate")});
}

}  // namespace

FamilyPart language_model_part(const RunFacts& facts) {
  const Json& validation = validation_of(facts);
  FamilyPart part{about(facts), curves(validation), tiles(facts, validation), privacy_sections(facts)};
  for (CurveStyle& style : answer_curves(facts)) part.curves.push_back(std::move(style));
  if (std::optional<report::Section> answers = answers_section(facts)) part.sections.push_back(*std::move(answers));
  part.sections.push_back(model_section(facts, validation));
  return part;
}

}  // namespace weft::commands
