// SPDX-License-Identifier: Apache-2.0
#include "commands/language_model/encoded_prompts.hpp"

#include <utility>

#include "base/error.hpp"
#include "language_model/tokenizer/corpus.hpp"
#include "language_model/tokenizer/lines.hpp"

namespace weft::commands {

using namespace language_model;

std::vector<Prompt> encoded_prompts(std::span<const std::string> texts, const std::string& file,
                                    const Tokenizer& tokenizer, std::int64_t longest, const char* context) {
  std::vector<Prompt> prompts;
  for (const std::string& text : texts) prompts.push_back({text, "--prompt"});
  if (!file.empty())
    for (PromptLine& line : prompt_lines(text_of_file(file, "--prompts"), file))
      prompts.push_back({std::move(line.text), std::move(line.source), line.rendered});
  for (Prompt& prompt : prompts) {
    prompt.ids = tokenizer.encode(prompt.text, prompt.source);
    if (!prompt.rendered) prompt.ids = tokenizer.with_begin(std::move(prompt.ids));
    if (prompt.ids.empty())
      throw error(ExitCode::data, "{}: has no token (a text begins with at least one); give a longer prompt",
                  prompt.source);
    if (std::ssize(prompt.ids) > longest)
      throw error(file.empty() ? ExitCode::usage : ExitCode::data,
                  "{}: {} tokens do not fit {}, which is {} tokens; shorten the prompt", prompt.source,
                  prompt.ids.size(), context, longest);
  }
  return prompts;
}

}  // namespace weft::commands
