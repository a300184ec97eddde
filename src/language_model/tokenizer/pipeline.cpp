// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/pipeline.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace weft::language_model {
namespace {

// Bounds of the memory of the cache: rare and long pieces are encoded again.
constexpr std::size_t kMostCached = std::size_t{1} << 20, kLongestCached = 256;
constexpr const char* kSentencePieceMark = "▁";

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
  Encoding(const Pipeline& parts, std::string_view text, std::string_view source, std::size_t offset, PieceCache& cache)
      : parts_(parts), text_(text), source_(source), offset_(offset), cache_(cache) {}

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
    if (const auto known = cache_.places.find(piece); known != cache_.places.end()) {
      const auto first = cache_.ids.begin() + static_cast<std::ptrdiff_t>(known->second.first);
      ids_.insert(ids_.end(), first, first + static_cast<std::ptrdiff_t>(known->second.second));
      return;
    }
    const std::size_t begin = ids_.size();
    parts_.model_->encode(piece, place, ids_);
    if (cache_.places.size() == kMostCached || piece.size() > kLongestCached) return;
    cache_.places.emplace(piece, std::pair(cache_.ids.size(), ids_.size() - begin));
    cache_.ids.insert(cache_.ids.end(), ids_.begin() + static_cast<std::ptrdiff_t>(begin), ids_.end());
  }

  const Pipeline& parts_;
  std::string_view text_, source_;
  std::size_t offset_;
  std::vector<std::uint32_t> ids_;
  PieceCache& cache_;
};

std::vector<std::uint32_t> Pipeline::encode(std::string_view text, std::string_view source, std::size_t offset,
                                            PieceCache& cache) const {
  return Encoding(*this, text, source, offset, cache).ids();
}

}  // namespace weft::language_model
