// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/pipeline.hpp"

#include <algorithm>
#include <unordered_map>

#include "base/error.hpp"

namespace weft::language_model {
namespace {

// Bounds of the memory of the cache: rare and long pieces are encoded again.
constexpr std::size_t kMostCached = std::size_t{1} << 20, kLongestCached = 256;
constexpr const char* kSentencePieceMark = "▁";

struct ViewHash {
  using is_transparent = void;
  std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};

}  // namespace

Pipeline::Pipeline(Parts parts, std::string_view source)
    : normalisers_(std::move(parts.normalisers)),
      pre_tokenisers_(std::move(parts.pre_tokenisers)),
      model_(std::move(parts.model)),
      decoder_(std::move(parts.decoder)) {
  const auto refuse = [&](const std::string& why) {
    return error(ExitCode::data, "{}: {}; is it complete?", source, why);
  };
  const std::vector<std::string>& tokens = model_->tokens();
  for (const AddedToken& token : parts.added) {
    if (token.id >= tokens.size()) throw refuse(fmt::format("added token {} has an id that is not its own", token.id));
    if (!tokens[token.id].empty() && tokens[token.id] != token.content)
      throw refuse(fmt::format("added token {} has the id of another token", token.id));
  }
  added_ = AddedTokens(std::move(parts.added), normalisers_, source);
  for (std::size_t id = 0; id < tokens.size(); ++id)
    if (tokens[id].empty() && added_.find(static_cast<std::uint32_t>(id)) == nullptr)
      throw refuse(fmt::format("id {} has no token", id));
  if (model_->separates(kSentencePieceMark))
    pre_tokenisers_.push_back(std::make_unique<MarkedWords>(kSentencePieceMark));
}

bool Pipeline::cuts_before_spaces() const {
  bool cuts = false;
  for (const auto& step : pre_tokenisers_) {
    if (step->space_cuts() == SpaceCuts::may_join) return false;
    cuts |= step->space_cuts() == SpaceCuts::cuts;
  }
  return cuts && added_.cuts_before_spaces() &&
         std::all_of(normalisers_.begin(), normalisers_.end(), [](const auto& one) { return one->is_local(); });
}

std::string Pipeline::text_of(std::uint32_t id, bool first) const {
  if (model_->is_byte_level()) {
    if (const std::string& bytes = model_->tokens()[id]; !bytes.empty()) return bytes;
    const AddedToken* const added = added_.find(id);
    return added == nullptr ? "" : added_.form(*added);
  }
  const AddedToken* const added = added_.find(id);
  std::string text = added == nullptr ? model_->tokens()[id] : added_.form(*added);
  for (const auto& step : decoder_) step->apply(text, first);
  return text;
}

/// One text on its way through the parts.
class Pipeline::Encoding {
 public:
  Encoding(const Pipeline& parts, std::string_view text, std::string_view source, std::size_t offset)
      : parts_(parts), text_(text), source_(source), offset_(offset) {}

  std::vector<std::uint32_t> ids() && {
    split(text_, false, [&](std::string_view part) { normalise_and_cut(part); });
    return std::move(ids_);
  }

 private:
  void split(std::string_view text, bool normalized, const AddedTokens::TextSink& between) {
    parts_.added_.split(text, normalized, between, [&](std::uint32_t id) { ids_.push_back(id); });
  }

  void normalise_and_cut(std::string_view part) {
    TextPlace place{source_, text_, offset_};
    const bool at_start = part.data() == text_.data();
    if (parts_.normalisers_.empty()) {
      split(part, true, [&](std::string_view rest) { cut(0, {rest, at_start && rest.data() == part.data()}, place); });
      return;
    }
    NormalisedText text{std::string(part), at_start};
    place.offset += static_cast<std::size_t>(part.data() - text_.data());
    place.text = part;
    normalise(parts_.normalisers_, text, place);
    place.text = text.text;
    place.is_normalised = true;
    split(text.text, true, [&](std::string_view rest) {
      cut(0, {rest, text.at_start && rest.data() == text.text.data()}, place);
    });
  }

  void cut(std::size_t step, const Piece& piece, const TextPlace& place) {
    if (step == parts_.pre_tokenisers_.size()) return encode(piece.text, place);
    parts_.pre_tokenisers_[step]->split(piece, place, [&](const Piece& next) { cut(step + 1, next, place); });
  }

  void encode(std::string_view piece, const TextPlace& place) {
    if (const auto known = cache_.find(piece); known != cache_.end()) {
      const auto [begin, count] = known->second;
      for (std::size_t i = begin; i < begin + count; ++i) ids_.push_back(ids_[i]);
      return;
    }
    const std::size_t begin = ids_.size();
    parts_.model_->encode(piece, place, ids_);
    if (cache_.size() < kMostCached && piece.size() <= kLongestCached)
      cache_.emplace(piece, std::pair(begin, ids_.size() - begin));
  }

  const Pipeline& parts_;
  std::string_view text_, source_;
  std::size_t offset_;
  std::vector<std::uint32_t> ids_;
  /// Piece -> place of its ids in the output.
  std::unordered_map<std::string, std::pair<std::size_t, std::size_t>, ViewHash, std::equal_to<>> cache_;
};

std::vector<std::uint32_t> Pipeline::encode(std::string_view text, std::string_view source, std::size_t offset) const {
  return Encoding(*this, text, source, offset).ids();
}

}  // namespace weft::language_model
