// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/bpe.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"

namespace weft::language_model {
namespace {

constexpr std::uint32_t kNone = UINT32_MAX;  // no neighbour; also the id of a part joined to its left neighbour

std::uint64_t key_of(std::uint32_t left, std::uint32_t right) { return static_cast<std::uint64_t>(left) << 32 | right; }

/// A piece as a list: ids of its parts and the positions of their neighbours.
struct LinkedPart {
  std::uint32_t id, previous, next;
};
/// A pair of neighbours; out of date if they have changed since.
struct PairCandidate {
  std::uint32_t rank, left, right, at;
  bool operator<(const PairCandidate& other) const {  // the top of the heap is the lowest rank, then the leftmost
    return rank != other.rank ? rank > other.rank : at > other.at;
  }
};

}  // namespace

Bpe::Bpe(BpeSettings settings, std::string_view source) : settings_(std::move(settings)) {
  const auto refuse = [&](const std::string& why) {
    return error(ExitCode::data, "{}: {}; is it {}, and complete?", source, why,
                 settings_.is_byte_level ? "a byte-level BPE" : "a BPE");
  };
  const std::vector<std::string>& tokens = settings_.tokens;
  ids_.reserve(tokens.size());
  for (std::size_t id = 0; id < tokens.size(); ++id)
    if (!tokens[id].empty() && !ids_.emplace(tokens[id], static_cast<std::uint32_t>(id)).second)
      throw refuse(fmt::format("id {} is the same token as another one", id));
  if (settings_.byte_fallback) bytes_ = ByteTokens(ids_);
  for (int byte = 0; byte < 256 && settings_.is_byte_level; ++byte) {
    const auto found = ids_.find(std::string(1, static_cast<char>(byte)));
    if (found == ids_.end() && byte >= ' ' && byte <= '~')
      throw refuse(fmt::format("byte 0x{:02x} has no token", byte));
    byte_ids_[static_cast<std::size_t>(byte)] = found == ids_.end() ? kNone : found->second;
  }
  merges_.reserve(settings_.merges.size());
  for (std::size_t rank = 0; rank < settings_.merges.size(); ++rank) {
    const auto [left, right] = settings_.merges[rank];
    if (left >= tokens.size() || right >= tokens.size() || tokens[left].empty() || tokens[right].empty())
      throw refuse(fmt::format("merge {} joins {} and {}, which are not both tokens", rank, left, right));
    const auto result = ids_.find(tokens[left] + tokens[right]);
    if (result == ids_.end())
      throw refuse(fmt::format("merge {} of {} and {} makes no token of the vocabulary", rank, left, right));
    if (!merges_.emplace(key_of(left, right), Merge{static_cast<std::uint32_t>(rank), result->second}).second)
      throw refuse(fmt::format("merge {} of {} and {} exists twice", rank, left, right));
  }
}

/// True if no merge joins a token that ends with another character to one that begins with the mark, and the mark is a
/// token, which ends a row of unknown characters.
bool Bpe::separates(std::string_view mark) const {
  if (settings_.is_byte_level || settings_.ignore_merges || !ids_.contains(mark)) return false;
  return std::none_of(settings_.merges.begin(), settings_.merges.end(), [&](const auto& merge) {
    return settings_.tokens[merge.second].starts_with(mark) && !settings_.tokens[merge.first].ends_with(mark);
  });
}

/// Ids of the bytes or characters of a piece.
void Bpe::units_of(std::string_view piece, const TextPlace& place, std::vector<std::uint32_t>& units) const {
  units.reserve(piece.size());
  if (settings_.is_byte_level) {
    for (const char& byte : piece) {
      const std::uint32_t id = byte_ids_[static_cast<unsigned char>(byte)];
      if (id == kNone)
        throw error(ExitCode::data, "{}: {} is 0x{:02x}, which has no token in this tokeniser; remove the character",
                    place.source, place.byte_of({&byte, 1}), static_cast<unsigned char>(byte));
      units.push_back(id);
    }
    return;
  }
  // An unknown id is appended when the row of unknown characters ends; as in the library, bytes come before it.
  bool pending = false;
  while (!piece.empty()) {
    const std::string_view character = piece.substr(0, first_character(piece).bytes);
    piece.remove_prefix(character.size());
    if (const auto found = ids_.find(character); found != ids_.end()) {
      if (pending) units.push_back(*settings_.unknown);
      pending = false;
      units.push_back(found->second);
    } else if (!bytes_.append(character, units)) {
      if (!settings_.unknown)
        throw error(ExitCode::data, "{}: {}: \"{}\" has no token in this tokeniser; remove the character", place.source,
                    place.byte_of(character), printable(character));
      if (pending && !settings_.fuse_unknown) units.push_back(*settings_.unknown);
      pending = true;
    }
  }
  if (pending) units.push_back(*settings_.unknown);
}

/// Appends what the merges make of the units.
void Bpe::join(std::span<const std::uint32_t> units, std::vector<std::uint32_t>& ids) const {
  std::vector<LinkedPart> parts;
  std::vector<PairCandidate> heap;
  const auto n = static_cast<std::uint32_t>(units.size());
  parts.reserve(n);
  for (std::uint32_t i = 0; i < n; ++i) parts.push_back({units[i], i > 0 ? i - 1 : kNone, i + 1 < n ? i + 1 : kNone});
  const auto consider = [&](std::uint32_t at) {
    if (at == kNone || parts[at].next == kNone) return;
    const std::uint32_t left = parts[at].id, right = parts[parts[at].next].id;
    const auto merge = merges_.find(key_of(left, right));
    if (merge == merges_.end()) return;
    heap.push_back({merge->second.rank, left, right, at});
    std::push_heap(heap.begin(), heap.end());
  };
  for (std::uint32_t i = 0; i + 1 < n; ++i) consider(i);

  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end());
    const PairCandidate best = heap.back();
    heap.pop_back();
    LinkedPart& part = parts[best.at];
    const std::uint32_t right = part.next;
    if (part.id != best.left || right == kNone || parts[right].id != best.right) continue;
    part.id = merges_.at(key_of(best.left, best.right)).result;
    part.next = parts[right].next;
    if (part.next != kNone) parts[part.next].previous = best.at;
    parts[right].id = kNone;
    consider(part.previous);
    consider(best.at);
  }
  for (std::uint32_t at = 0; at < n; at = parts[at].next) ids.push_back(parts[at].id);
}

void Bpe::encode(std::string_view piece, const TextPlace& place, std::vector<std::uint32_t>& ids) const {
  if (settings_.ignore_merges)
    if (const auto whole = ids_.find(piece); whole != ids_.end()) {
      ids.push_back(whole->second);
      return;
    }
  if (piece.size() >= kNone)
    throw error(ExitCode::data, "{}: a run of {} bytes is one piece of the tokeniser (fewer than 2^32 are accepted)",
                place.source, piece.size());
  std::vector<std::uint32_t> units;
  units_of(piece, place, units);
  join(units, ids);
}

}  // namespace weft::language_model
