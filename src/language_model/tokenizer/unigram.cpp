// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/unigram.hpp"

#include <algorithm>
#include <cmath>

#include "base/error.hpp"
#include "base/text.hpp"

namespace weft::language_model {
namespace {

constexpr double kUnknownPenalty = 10;  // below the lowest score (SentencePiece)
constexpr std::uint32_t kUnreached = UINT32_MAX;

/// The best way to cut the text up to a place.
struct Best {
  double score = 0;
  std::uint32_t begin = kUnreached;  ///< of its last token
  std::uint32_t id = 0;
};

}  // namespace

Unigram::Unigram(UnigramSettings settings, std::string_view source) : settings_(std::move(settings)) {
  for (std::size_t id = 0; id < settings_.scores.size(); ++id) {
    if (!std::isfinite(settings_.scores[id]))
      throw error(ExitCode::data, "{}: the score of token {} is not finite; is it complete?", source, id);
    ids_[settings_.tokens[id]] = static_cast<std::uint32_t>(id);  // of equal tokens the last one counts
  }
  prefixes_ = Prefixes({ids_.begin(), ids_.end()});
  if (settings_.byte_fallback) bytes_ = ByteTokens(ids_);
  if (!settings_.scores.empty())
    unknown_score_ = *std::min_element(settings_.scores.begin(), settings_.scores.end()) - kUnknownPenalty;
}

void Unigram::encode(std::string_view piece, const TextPlace& place, std::vector<std::uint32_t>& ids) const {
  if (piece.size() >= kUnreached)
    throw error(ExitCode::data, "{}: a run of {} bytes is one piece of the tokeniser (fewer than 2^32 are accepted)",
                place.source, piece.size());
  const auto no_token = [&](std::string_view text) {
    return error(ExitCode::data, "{}: {}: \"{}\" has no token in this tokeniser; remove the character", place.source,
                 place.byte_of(text), printable(text, 20));
  };
  std::vector<Best> best(piece.size() + 1);
  for (std::size_t begin = 0; begin < piece.size();) {
    const std::size_t bytes = first_character(piece.substr(begin)).bytes;
    const double before = best[begin].score;
    const auto consider = [&](std::size_t length, double score, std::uint32_t id) {
      Best& target = best[begin + length];
      if (target.begin == kUnreached || score + before > target.score)
        target = {score + before, static_cast<std::uint32_t>(begin), id};
    };
    bool has_character = false;
    prefixes_.each(piece.substr(begin), [&](std::size_t length, std::uint32_t id) {
      consider(length, settings_.scores[id], id);
      has_character |= length == bytes;
    });
    if (!has_character) {
      if (!settings_.unknown) throw no_token(piece.substr(begin, bytes));
      consider(bytes, unknown_score_, *settings_.unknown);
    }
    begin += bytes;
  }
  // From the end; unknown tokens in a row are one.
  std::vector<std::string_view> texts;
  bool last_unknown = false;
  for (std::size_t end = piece.size(); end > 0; end = best[end].begin) {
    const bool unknown = settings_.unknown && best[end].id == *settings_.unknown;
    const std::size_t begin = best[end].begin;
    if (unknown && last_unknown)
      texts.back() = piece.substr(begin, end - begin + texts.back().size());
    else
      texts.push_back(piece.substr(begin, end - begin));
    last_unknown = unknown;
  }
  for (auto text = texts.rbegin(); text != texts.rend(); ++text) {
    if (const auto found = ids_.find(*text); found != ids_.end())
      ids.push_back(found->second);
    else if (!bytes_.append(*text, ids)) {
      if (!settings_.unknown) throw no_token(*text);
      ids.push_back(*settings_.unknown);
    }
  }
}

}  // namespace weft::language_model
