// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/bpe.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"

namespace weft::language_model {
namespace {

// Bounds the memory of the cache; rare pieces are encoded again.
constexpr std::size_t kMostCached = std::size_t{1} << 20;
constexpr std::uint32_t kNone = UINT32_MAX;  // no neighbour; also the id of a part joined to its left neighbour

std::uint64_t key_of(std::uint32_t left, std::uint32_t right) { return static_cast<std::uint64_t>(left) << 32 | right; }

/// The character of each byte: printable ones of Latin-1 stand for themselves, the others for U+0100, U+0101, …
/// (bytes_to_unicode of GPT-2's encoder.py).
const std::array<long, 256>& alphabet() {
  static const std::array<long, 256> characters = [] {
    std::array<long, 256> all{};
    long next = 0x100;
    for (long byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
      all[static_cast<std::size_t>(byte)] = printable ? byte : next++;
    }
    return all;
  }();
  return characters;
}

}  // namespace

std::string to_alphabet(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) append_character(text, alphabet()[static_cast<unsigned char>(byte)]);
  return text;
}

bool from_alphabet(std::string_view text, std::string& bytes) {
  static const std::array<int, 0x200> byte_of = [] {
    std::array<int, 0x200> all;
    all.fill(-1);
    for (int byte = 0; byte < 256; ++byte)
      all[static_cast<std::size_t>(alphabet()[static_cast<std::size_t>(byte)])] = byte;
    return all;
  }();
  bytes.clear();
  while (!text.empty()) {
    const Character next = first_character(text);
    if (next.code < 0 || next.code >= 0x200 || byte_of[static_cast<std::size_t>(next.code)] < 0) return false;
    bytes += static_cast<char>(byte_of[static_cast<std::size_t>(next.code)]);
    text.remove_prefix(next.bytes);
  }
  return true;
}

BpeEncoder::BpeEncoder(Bpe model, std::string_view source)
    : model_(std::move(model)), splitter_(model_.splits, source) {
  const auto refuse = [&](const std::string& why) {
    return error(ExitCode::data, "{}: {}; is it a byte-level BPE, and complete?", source, why);
  };
  std::vector<bool> is_added(model_.tokens.size(), false);
  for (const Bpe::Added& added : model_.added) {
    if (added.id >= model_.tokens.size() || is_added[added.id])
      throw refuse(fmt::format("added token {} has an id that is not its own", added.id));
    if (const std::string& token = model_.tokens[added.id]; !token.empty() && token != added.content)
      throw refuse(fmt::format("added token {} has the id of another token", added.id));
    if (added.content.empty()) throw refuse(fmt::format("added token {} is empty", added.id));
    is_added[added.id] = true;
    has_normalized_ |= added.normalized;
    added_[static_cast<unsigned char>(added.content[0])].push_back(&added);
  }
  for (auto& candidates : added_) {
    std::sort(candidates.begin(), candidates.end(), [](const Bpe::Added* a, const Bpe::Added* b) {
      return std::pair(b->content.size(), std::string_view(a->content)) <
             std::pair(a->content.size(), std::string_view(b->content));
    });
    for (std::size_t i = 1; i < candidates.size(); ++i)
      if (candidates[i]->content == candidates[i - 1]->content)
        throw refuse(fmt::format("added token \"{}\" exists twice", printable(candidates[i]->content)));
  }
  ids_.reserve(model_.tokens.size());
  for (std::size_t id = 0; id < model_.tokens.size(); ++id) {
    if (model_.tokens[id].empty() && is_added[id]) continue;
    if (model_.tokens[id].empty()) throw refuse(fmt::format("id {} has no token", id));
    if (!ids_.emplace(model_.tokens[id], static_cast<std::uint32_t>(id)).second)
      throw refuse(fmt::format("id {} is the same token as another one", id));
  }
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = ids_.find(std::string(1, static_cast<char>(byte)));
    if (found == ids_.end() && byte >= ' ' && byte <= '~')
      throw refuse(fmt::format("byte 0x{:02x} has no token", byte));
    byte_ids_[static_cast<std::size_t>(byte)] = found == ids_.end() ? kNone : found->second;
  }
  merges_.reserve(model_.merges.size());
  for (std::size_t rank = 0; rank < model_.merges.size(); ++rank) {
    const auto [left, right] = model_.merges[rank];
    if (left >= model_.tokens.size() || right >= model_.tokens.size() || model_.tokens[left].empty() ||
        model_.tokens[right].empty())
      throw refuse(fmt::format("merge {} joins {} and {}, which are not both tokens", rank, left, right));
    const auto result = ids_.find(model_.tokens[left] + model_.tokens[right]);
    if (result == ids_.end())
      throw refuse(fmt::format("merge {} of {} and {} makes no token of the vocabulary", rank, left, right));
    if (!merges_.emplace(key_of(left, right), Merge{static_cast<std::uint32_t>(rank), result->second}).second)
      throw refuse(fmt::format("merge {} of {} and {} exists twice", rank, left, right));
  }
}

bool BpeEncoder::cuts_before_spaces() const {
  return splitter_.cuts_before_spaces() &&
         std::none_of(model_.added.begin(), model_.added.end(),
                      [](const Bpe::Added& added) { return added.content.find(' ') != added.content.npos; });
}

std::string_view BpeEncoder::bytes_of(std::uint32_t id) const {
  if (!model_.tokens[id].empty()) return model_.tokens[id];
  for (const Bpe::Added& added : model_.added)
    if (added.id == id) return added.content;
  return {};
}

const Bpe::Added* BpeEncoder::added_at(std::string_view text, bool normalized) const {
  for (const Bpe::Added* added : added_[static_cast<unsigned char>(text[0])])
    if (added->normalized == normalized && text.starts_with(added->content)) return added;
  return nullptr;
}

/// Memory of one call of `encode`.
struct BpeEncoder::Workspace {
  /// A piece as a list: ids of its parts and the positions of their neighbours.
  struct Part {
    std::uint32_t id, previous, next;
  };
  /// A pair of neighbours; out of date if they have changed since.
  struct Candidate {
    std::uint32_t rank, left, right, at;
    bool operator<(const Candidate& other) const {  // the top of the heap is the lowest rank, then the leftmost
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  std::vector<Part> parts;
  std::vector<Candidate> heap;
};

void BpeEncoder::encode_piece(std::string_view piece, std::vector<std::uint32_t>& ids, Workspace& work) const {
  if (model_.ignore_merges)
    if (const auto whole = ids_.find(piece); whole != ids_.end()) {
      ids.push_back(whole->second);
      return;
    }
  if (piece.size() >= kNone)
    throw error(ExitCode::data,
                "a run of {} bytes is one piece of the splitting pattern (fewer than 2^32 are accepted)", piece.size());
  auto& parts = work.parts;
  auto& heap = work.heap;
  parts.clear();
  heap.clear();
  const auto n = static_cast<std::uint32_t>(piece.size());
  for (std::uint32_t i = 0; i < n; ++i)
    parts.push_back(
        {byte_ids_[static_cast<unsigned char>(piece[i])], i > 0 ? i - 1 : kNone, i + 1 < n ? i + 1 : kNone});
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
    const Workspace::Candidate best = heap.back();
    heap.pop_back();
    Workspace::Part& part = parts[best.at];
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

std::vector<std::uint32_t> BpeEncoder::encode(std::string_view text, std::string_view source,
                                              std::size_t offset) const {
  std::vector<std::uint32_t> ids;
  Workspace work;
  // Piece -> place of its ids in the output.
  std::unordered_map<std::string_view, std::pair<std::size_t, std::size_t>> cache;
  const auto encode_piece = [&](std::string_view piece) {
    if (const auto known = cache.find(piece); known != cache.end()) {
      const auto [begin, count] = known->second;
      for (std::size_t i = begin; i < begin + count; ++i) ids.push_back(ids[i]);
      return;
    }
    const std::size_t begin = ids.size();
    this->encode_piece(piece, ids, work);
    if (const auto missing = std::find(ids.begin() + static_cast<std::ptrdiff_t>(begin), ids.end(), kNone);
        missing != ids.end()) {
      const auto byte = std::find_if(piece.begin(), piece.end(),
                                     [&](char one) { return byte_ids_[static_cast<unsigned char>(one)] == kNone; });
      throw error(ExitCode::data, "{}: byte {} is 0x{:02x}, which has no token in this tokeniser; remove the character",
                  source, offset + static_cast<std::size_t>(&*byte - text.data()), static_cast<unsigned char>(*byte));
    }
    if (cache.size() < kMostCached) cache.emplace(piece, std::pair(begin, ids.size() - begin));
  };
  const auto encode_part = [&](std::string_view part) {
    splitter_.split(part, source, offset + static_cast<std::size_t>(part.data() - text.data()), encode_piece);
  };
  const auto between_added = [&](std::string_view part, bool normalized, const auto& rest) {
    std::size_t done = 0;
    for (std::size_t at = 0; at < part.size();) {
      if (const Bpe::Added* const added = added_at(part.substr(at), normalized)) {
        rest(part.substr(done, at - done));
        ids.push_back(added->id);
        done = at += added->content.size();
      } else {
        ++at;
      }
    }
    rest(part.substr(done));
  };
  // Order as in the tokenizers library: added tokens that are matched in the original text, then those that are matched
  // in the normalised text.
  between_added(text, false, [&](std::string_view part) {
    if (has_normalized_) return between_added(part, true, encode_part);
    encode_part(part);
  });
  return ids;
}

}  // namespace weft::language_model
