// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/splitter.hpp"

#include "base/error.hpp"
#include "base/text.hpp"

namespace weft::language_model {
namespace {

struct Named {
  const char *name, *published;
};
constexpr Named kNamed[] = {
    {"gpt2", R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {"llama3",
     R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
};

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
  if (!rules.empty()) space_cuts_ = SpaceCuts::cuts;
  for (const SplitRule& rule : rules) {
    const std::string published = published_pattern(rule.pattern);
    if (published == rule.pattern && rule.pattern != kSingleDigits && rule.pattern != kRunsOfDigits)
      space_cuts_ = SpaceCuts::may_join;
    stages_.push_back({rule, Expression(published, source, rule.pattern)});
  }
  if (!rules.empty() && rules[0].pattern == kWhiteSpace && rules[0].cut == Cut::removed && !rules[0].inverted)
    space_cuts_ = SpaceCuts::cuts;
}

void Splitter::split(const Piece& piece, const TextPlace& place, const PieceSink& sink) const {
  if (!piece.text.empty()) split_at(0, piece, place, sink);
}

namespace {

/// Joins matches and texts between them to pieces.
class Joiner {
 public:
  using Emit = std::function<void(std::size_t begin, std::size_t end)>;
  Joiner(Cut cut, const Emit& emit) : cut_(cut), emit_(emit) {}

  void add(std::size_t begin, std::size_t end, bool is_match) {
    if (begin == end) return;
    if (cut_ == Cut::isolated) return emit_(begin, end);
    if (cut_ == Cut::removed) {
      if (!is_match) emit_(begin, end);
      return;
    }
    const bool joins = end_ > begin_ && (cut_ == Cut::runs            ? is_match == was_match_
                                         : cut_ == Cut::with_previous ? is_match && !was_match_
                                                                      : !is_match && was_match_);
    if (!joins) {
      finish();
      begin_ = begin;
    }
    end_ = end;
    was_match_ = is_match;
  }
  /// Emits what waits for a piece to join.
  void finish() {
    if (end_ > begin_) emit_(begin_, end_);
    begin_ = end_;
  }

 private:
  Cut cut_;
  const Emit& emit_;
  std::size_t begin_ = 0, end_ = 0;
  bool was_match_ = false;
};

}  // namespace

/// Each stage sees a piece of the one before as a text of its own. The piece is not empty.
void Splitter::split_at(std::size_t stage, const Piece& piece, const TextPlace& place, const PieceSink& sink) const {
  if (stage == stages_.size()) return sink(piece);
  const SplitRule& rule = stages_[stage].rule;
  const Expression& expression = stages_[stage].expression;
  const std::string_view text = piece.text;
  const Joiner::Emit emit = [&](std::size_t begin, std::size_t end) {
    split_at(stage + 1, {text.substr(begin, end - begin), piece.at_start && begin == 0}, place, sink);
  };
  Joiner joiner(rule.cut, emit);
  const auto between = [&](std::size_t begin, std::size_t end) {
    if (begin == end) return;
    const std::string_view rest = text.substr(begin, end - begin);
    if (rule.covers_text)
      throw error(ExitCode::data,
                  "{}: {}: \"{}\" is matched by no part of the splitting pattern \"{}\" (the tokeniser leaves such "
                  "text out); remove it from the text",
                  place.source, place.byte_of(rest), printable(rest, 20), printable(rule.pattern));
    joiner.add(begin, end, rule.inverted);
  };
  std::size_t done = 0;
  while (done < text.size()) {
    const std::optional<Expression::Match> match = expression.find(text, done, place);
    if (!match) break;
    between(done, match->begin);
    joiner.add(match->begin, match->end, !rule.inverted);
    done = match->end;
  }
  between(done, text.size());
  joiner.finish();
}

}  // namespace weft::language_model
