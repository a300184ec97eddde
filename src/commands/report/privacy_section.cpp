// SPDX-License-Identifier: Apache-2.0
#include "commands/report/privacy_section.hpp"

#include <fmt/format.h>

#include <string>

namespace weft::commands {

using report::Json;

std::vector<report::Section> privacy_sections(const RunFacts& facts) {
  const Json& settings = member(facts.record, {"input", "privacy"});
  const Json& enabled = member(settings, {"enabled"});
  if (!enabled.is_boolean() || !enabled.get<bool>()) return {};
  report::Section section("Privacy");
  section.paragraph("There is no curve of the training loss: it is not recorded, because no noise protects it.",
                    report::Tone::faint);
  const Json& result = member(facts.record, {"result", "privacy"});
  if (!result.is_object()) {
    section.paragraph("The training is private; epsilon is known when the run has ended.", report::Tone::missing);
  } else {
    if (const Json& is_private = member(result, {"private"}); is_private.is_boolean() && !is_private.get<bool>())
      section.paragraph(
          "Not private: the noise follows from run.seed (privacy.noise_key = \"test\"). The epsilon is that of the "
          "same "
          "run with a secret key.",
          report::Tone::bad);
    section.paragraph(fmt::format("Protected: {}.", text_of(member(result, {"protects"}))));
  }
  std::vector<std::vector<std::string>> rows;
  for (const char* name :
       {"epsilon", "delta", "accountant", "noise_multiplier", "sample_rate", "steps", "records", "clip"})
    if (const Json& value = member(result, {name}); !value.is_null()) rows.push_back({name, text_of(value)});
  for (const char* name :
       {"algorithm", "mode", "scheme", "clip_function", "sampling", "unit", "record_rows", "noise_key"})
    if (const Json& value = member(settings, {name}); !value.is_null()) rows.push_back({name, text_of(value)});
  section.table({"privacy", "value"}, rows, 1);
  return {section};
}

}  // namespace weft::commands
