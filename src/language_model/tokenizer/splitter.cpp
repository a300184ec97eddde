// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/splitter.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.hpp"
#include "base/text.hpp"
#include "language_model/tokenizer/pattern.hpp"

namespace weft::language_model {
namespace {

// Bounds of one match: backtracking steps, and memory in KiB.
constexpr std::uint32_t kMatchLimit = 10'000'000;
constexpr std::uint32_t kHeapLimit = 256 * 1024;
constexpr std::size_t kLongestPattern = 4096;
constexpr std::size_t kSmallestStack = 32 * 1024, kLargestStack = 8 * 1024 * 1024;

struct Named {
  const char *name, *published;
};
constexpr Named kNamed[] = {
    {"gpt2", R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {"llama3",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
};

std::string message_of(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

template <class T>
std::unique_ptr<T, void (*)(T*)> owned(T* object, void (*release)(T*)) {
  if (object == nullptr) throw std::bad_alloc();
  return {object, release};
}

}  // namespace

std::string pattern_name(std::string_view pattern) {
  for (const Named& named : kNamed)
    if (pattern == named.published) return named.name;
  return std::string(pattern);
}

std::string published_pattern(std::string_view name) {
  for (const Named& named : kNamed)
    if (name == named.name) return named.published;
  return std::string(name);
}

Splitter::Splitter(const std::vector<SplitRule>& rules, std::string_view source) {
  const std::string begin = source.empty() ? "" : fmt::format("{}: ", source);
  cuts_before_spaces_ = !rules.empty();
  for (const SplitRule& rule : rules) {
    const std::string& name = rule.pattern;
    const std::string published = published_pattern(name);
    if (published == name && name != kSingleDigits && name != kRunsOfDigits) cuts_before_spaces_ = false;
    if (published.size() > kLongestPattern)
      throw error(ExitCode::data, "{}the splitting pattern \"{}\" has {} bytes (at most {} are accepted)", begin,
                  printable(name, 40), published.size(), kLongestPattern);
    const std::string text = pcre2_pattern(published, begin);
    int problem = 0;
    PCRE2_SIZE at = 0;
    pcre2_code* const code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                           PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &problem, &at, nullptr);
    if (code == nullptr)
      throw error(ExitCode::data, "{}the splitting pattern \"{}\" cannot be compiled ({} at {} of \"{}\")", begin,
                  printable(name), message_of(problem), at, printable(text));
    stages_.push_back(
        {rule, std::shared_ptr<const void>(code, [](pcre2_code* compiled) { pcre2_code_free(compiled); })});
    std::uint32_t matches_nothing = 0;
    pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &matches_nothing);
    if (matches_nothing != 0)
      throw error(ExitCode::data, "{}the splitting pattern \"{}\" can match no character at all (not supported)", begin,
                  printable(name));
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where it is not available, matching interprets the pattern
  }
}

/// Memory of one call of `split`, and what its messages need.
struct Splitter::Matching {
  std::string_view text, source;
  std::size_t offset;
  const std::function<void(std::string_view)>& piece;
  std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> match =
      owned(pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  std::unique_ptr<pcre2_match_context, void (*)(pcre2_match_context*)> context =
      owned(pcre2_match_context_create(nullptr), pcre2_match_context_free);
  std::unique_ptr<pcre2_jit_stack, void (*)(pcre2_jit_stack*)> stack =
      owned(pcre2_jit_stack_create(kSmallestStack, kLargestStack, nullptr), pcre2_jit_stack_free);

  std::size_t place(std::string_view part) const {
    return offset + static_cast<std::size_t>(part.data() - text.data());
  }
};

void Splitter::split(std::string_view text, std::string_view source, std::size_t offset,
                     const std::function<void(std::string_view)>& piece) const {
  Matching matching{text, source, offset, piece};
  pcre2_set_match_limit(matching.context.get(), kMatchLimit);
  pcre2_set_heap_limit(matching.context.get(), kHeapLimit);
  pcre2_jit_stack_assign(matching.context.get(), nullptr, matching.stack.get());
  if (!text.empty()) split(0, text, matching);
}

/// Each stage sees a piece of the one before as a text of its own. `text` is not empty.
void Splitter::split(std::size_t stage, std::string_view text, Matching& matching) const {
  if (stage == stages_.size()) return matching.piece(text);
  const auto& [stage_rule, code] = stages_[stage];
  const auto& rule = stage_rule;  // clang before 16 captures no structured binding
  const PCRE2_SIZE* const found = pcre2_get_ovector_pointer(matching.match.get());
  std::size_t done = 0;  // the pieces so far
  const auto between = [&](std::size_t end) {
    if (end == done) return;
    const std::string_view rest = text.substr(done, end - done);
    if (rule.covers_text)
      throw error(
          ExitCode::data,
          "{}: byte {}: \"{}\" is matched by no part of the splitting pattern \"{}\" (the tokeniser leaves such "
          "text out); remove it from the text",
          matching.source, matching.place(rest), printable(rest, 20), printable(rule.pattern));
    split(stage + 1, rest, matching);
  };
  while (done < text.size()) {
    const int result =
        pcre2_match(static_cast<const pcre2_code*>(code.get()), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                    done, PCRE2_NO_UTF_CHECK, matching.match.get(), matching.context.get());
    if (result == PCRE2_ERROR_NOMATCH) break;
    if (result < 0)
      throw error(ExitCode::data,
                  "{}: the splitting pattern \"{}\" fails at byte {} ({}); is there a very long run of one kind of "
                  "character?",
                  matching.source, printable(rule.pattern), matching.place(text.substr(done)), message_of(result));
    const std::size_t begin = found[0], end = found[1];
    between(begin);
    split(stage + 1, text.substr(begin, end - begin), matching);
    done = end;
  }
  between(text.size());
}

}  // namespace weft::language_model
