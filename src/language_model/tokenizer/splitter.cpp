// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/splitter.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/error.hpp"
#include "base/text.hpp"

namespace weft::language_model {
namespace {

// Bounds of one match: backtracking steps, and memory in KiB.
constexpr std::uint32_t kMatchLimit = 10'000'000;
constexpr std::uint32_t kHeapLimit = 256 * 1024;
constexpr std::size_t kLongestPattern = 4096;
constexpr std::size_t kSmallestStack = 32 * 1024, kLargestStack = 8 * 1024 * 1024;

// PCRE2's \s contains U+180E, which is no white space since Unicode 6.3; the libraries of the published tokenisers do
// without. Hence the classes written out.
#define WHITE "\\t-\\r\\x{85}\\p{Z}"

struct Named {
  const char* name;
  const char* published;
  const char* compiled;
};
constexpr Named kNamed[] = {
    {"gpt2", R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
     "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" WHITE "\\p{L}\\p{N}]+|[" WHITE "]+(?![^" WHITE "])|[" WHITE
     "]+"},
    {"llama3",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^" WHITE
     "\\p{L}\\p{N}]+[\\r\\n]*|[" WHITE "]*[\\r\\n]+|[" WHITE "]+(?![^" WHITE "])|[" WHITE "]+"},
};
#undef WHITE

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

Splitter::Splitter(std::string_view pattern) : name_(pattern) {
  std::string_view text = pattern;
  for (const Named& named : kNamed)
    if (pattern == named.name) {
      text = named.compiled;
      published_ = true;
    }
  if (text.size() > kLongestPattern)
    throw error(ExitCode::data, "the splitting pattern \"{}\" has {} bytes (at most {} are accepted)",
                printable(name_, 40), text.size(), kLongestPattern);
  int problem = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* const code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                         PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &problem, &at, nullptr);
  if (code == nullptr)
    throw error(ExitCode::data, "the splitting pattern \"{}\" cannot be compiled ({} at {})", printable(name_),
                message_of(problem), at);
  code_ = std::shared_ptr<const void>(code, [](pcre2_code* compiled) { pcre2_code_free(compiled); });
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where it is not available, matching interprets the pattern
}

void Splitter::split(std::string_view text, std::string_view source, std::size_t offset,
                     const std::function<void(std::string_view)>& piece) const {
  const auto* const code = static_cast<const pcre2_code*>(code_.get());
  const auto match = owned(pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  const auto context = owned(pcre2_match_context_create(nullptr), pcre2_match_context_free);
  const auto stack = owned(pcre2_jit_stack_create(kSmallestStack, kLargestStack, nullptr), pcre2_jit_stack_free);
  pcre2_set_match_limit(context.get(), kMatchLimit);
  pcre2_set_heap_limit(context.get(), kHeapLimit);
  pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  const PCRE2_SIZE* const found = pcre2_get_ovector_pointer(match.get());

  std::size_t done = 0;  // the pieces so far
  for (std::size_t from = 0; from < text.size();) {
    // Empty matches would not advance.
    const int result = pcre2_match(code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                                   PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match.get(), context.get());
    if (result == PCRE2_ERROR_NOMATCH) break;
    if (result < 0)
      throw error(ExitCode::data,
                  "{}: the splitting pattern \"{}\" fails at byte {} ({}); is there a very long run of one kind of "
                  "character?",
                  source, printable(name_), offset + from, message_of(result));
    const std::size_t begin = found[0], end = found[1];
    if (begin < done || end <= begin)  // \K in a pattern can move the start
      throw error(ExitCode::data, "{}: the splitting pattern \"{}\" does not advance at byte {}", source,
                  printable(name_), offset + from);
    if (begin > done) piece(text.substr(done, begin - done));
    piece(text.substr(begin, end - begin));
    from = done = end;
  }
  if (done < text.size()) piece(text.substr(done));
}

}  // namespace weft::language_model
