// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/expression.hpp"

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

/// Memory of the matches of a thread.
struct Matching {
  std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> match =
      owned(pcre2_match_data_create(1, nullptr), pcre2_match_data_free);
  std::unique_ptr<pcre2_match_context, void (*)(pcre2_match_context*)> context =
      owned(pcre2_match_context_create(nullptr), pcre2_match_context_free);
  std::unique_ptr<pcre2_jit_stack, void (*)(pcre2_jit_stack*)> stack =
      owned(pcre2_jit_stack_create(kSmallestStack, kLargestStack, nullptr), pcre2_jit_stack_free);

  Matching() {
    pcre2_set_match_limit(context.get(), kMatchLimit);
    pcre2_set_heap_limit(context.get(), kHeapLimit);
    pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
  }
};

}  // namespace

Expression::Expression(std::string_view pattern, std::string_view source, std::string_view name)
    : name_(name.empty() ? pattern : name) {
  const std::string begin = source.empty() ? "" : fmt::format("{}: ", source);
  if (pattern.size() > kLongestPattern)
    throw error(ExitCode::data, "{}the splitting pattern \"{}\" has {} bytes (at most {} are accepted)", begin,
                printable(name_, 40), pattern.size(), kLongestPattern);
  const std::string text = pcre2_pattern(pattern, begin);
  int problem = 0;
  PCRE2_SIZE at = 0;
  pcre2_code* const code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                                         PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &problem, &at, nullptr);
  if (code == nullptr)
    throw error(ExitCode::data, "{}the splitting pattern \"{}\" cannot be compiled ({} at {} of \"{}\")", begin,
                printable(name_), message_of(problem), at, printable(text));
  code_ = std::shared_ptr<const void>(code, [](pcre2_code* compiled) { pcre2_code_free(compiled); });
  std::uint32_t matches_nothing = 0;
  pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &matches_nothing);
  if (matches_nothing != 0)
    throw error(ExitCode::data, "{}the splitting pattern \"{}\" can match no character at all (not supported)", begin,
                printable(name_));
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where it is not available, matching interprets the pattern
}

std::optional<Expression::Match> Expression::find(std::string_view text, std::size_t begin,
                                                  const TextPlace& place) const {
  thread_local Matching matching;
  const int result = pcre2_match(static_cast<const pcre2_code*>(code_.get()), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                 text.size(), begin, PCRE2_NO_UTF_CHECK, matching.match.get(), matching.context.get());
  if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (result < 0)
    throw error(ExitCode::data,
                "{}: the splitting pattern \"{}\" fails at {} ({}); is there a very long run of one kind of character?",
                place.source, printable(name_), place.byte_of(text.substr(begin)), message_of(result));
  const PCRE2_SIZE* const found = pcre2_get_ovector_pointer(matching.match.get());
  return Match{found[0], found[1]};
}

}  // namespace weft::language_model
