// SPDX-License-Identifier: Apache-2.0
//
// Learning of merges. The pieces of the text, each once, form one array of parts that are linked to their neighbours.
// For every pair of ids its exact count and the positions at which it has occurred are kept up to date while parts are
// joined, so that a merge costs time in proportion to its occurrences.
#include "language_model/tokenizer/byte_level_bpe.hpp"

#include <algorithm>
#include <queue>
#include <unordered_set>

#include "base/error.hpp"
#include "base/progress.hpp"

namespace weft::language_model {
namespace {

constexpr std::uint32_t kNoPart =
    UINT32_MAX;  // no neighbour; also the id of a part that was joined to its left neighbour

struct Part {
  std::uint32_t id, previous, next, piece;
};

struct Pair {
  std::int64_t count = 0;
  std::vector<std::uint32_t> at;  // positions of its left part, in the order of their creation; some are out of date
};

std::uint64_t key_of_pair(std::uint32_t left, std::uint32_t right) {
  return static_cast<std::uint64_t>(left) << 32 | right;
}

/// A pair and its count when it was pushed. A pair that has since become rarer comes up too early.
struct Candidate {
  std::int64_t count;
  std::uint64_t key;
  bool operator<(const Candidate& other) const {  // the top is the most frequent, of these the smallest (left, right)
    return count != other.count ? count < other.count : key > other.key;
  }
};

class Trainer {
 public:
  explicit Trainer(const std::unordered_map<std::string, std::int64_t>& pieces) {
    for (const auto& [piece, count] : pieces) {
      if (parts_.size() + piece.size() >= kNoPart)
        throw error(ExitCode::data,
                    "the text has more than {} bytes of different pieces; train the vocabulary on a part of it",
                    parts_.size());
      const auto begin = static_cast<std::uint32_t>(parts_.size()),
                 end = begin + static_cast<std::uint32_t>(piece.size());
      for (std::uint32_t i = begin; i < end; ++i)
        parts_.push_back({static_cast<unsigned char>(piece[i - begin]), i > begin ? i - 1 : kNoPart,
                          i + 1 < end ? i + 1 : kNoPart, static_cast<std::uint32_t>(weights_.size())});
      weights_.push_back(count);
    }
    for (std::uint32_t i = 0; i < parts_.size(); ++i)
      if (parts_[i].next != kNoPart) add(parts_[i].id, parts_[parts_[i].next].id, i);
    push_grown();
  }

  /// The most frequent pair, removed from the candidates; false if none is left.
  bool next(std::uint32_t& left, std::uint32_t& right) {
    while (!candidates_.empty()) {
      const Candidate best = candidates_.top();
      candidates_.pop();
      const auto pair = pairs_.find(best.key);
      if (pair == pairs_.end() || pair->second.count == 0) continue;
      if (pair->second.count != best.count) {
        candidates_.push({pair->second.count, best.key});
        continue;
      }
      left = static_cast<std::uint32_t>(best.key >> 32);
      right = static_cast<std::uint32_t>(best.key);
      return true;
    }
    return false;
  }

  /// Replaces the pair by `id` everywhere, from left to right.
  void merge(std::uint32_t left, std::uint32_t right, std::uint32_t id) {
    std::vector<std::uint32_t> at = std::move(pairs_.at(key_of_pair(left, right)).at);
    pairs_.erase(key_of_pair(left, right));
    std::sort(at.begin(), at.end());
    for (const std::uint32_t i : at) {
      const std::uint32_t j = parts_[i].next;
      if (parts_[i].id != left || j == kNoPart || parts_[j].id != right)
        continue;  // joined with another neighbour before
      const std::uint32_t before = parts_[i].previous, after = parts_[j].next;
      if (before != kNoPart) {
        remove(parts_[before].id, left, i);
        add(parts_[before].id, id, before);
      }
      if (after != kNoPart) {
        remove(right, parts_[after].id, i);
        add(id, parts_[after].id, i);
        parts_[after].previous = i;
      }
      parts_[i].id = id;
      parts_[i].next = after;
      parts_[j].id = kNoPart;
    }
    push_grown();
  }

 private:
  std::int64_t weight(std::uint32_t part) const { return weights_[parts_[part].piece]; }

  void add(std::uint32_t left, std::uint32_t right, std::uint32_t at) {
    Pair& pair = pairs_[key_of_pair(left, right)];
    pair.count += weight(at);
    pair.at.push_back(at);
    grown_.push_back(key_of_pair(left, right));
  }
  /// Lowers the count of a pair. The pair that is being merged has already been removed.
  void remove(std::uint32_t left, std::uint32_t right, std::uint32_t at) {
    if (const auto pair = pairs_.find(key_of_pair(left, right)); pair != pairs_.end()) pair->second.count -= weight(at);
  }
  void push_grown() {
    std::sort(grown_.begin(), grown_.end());
    grown_.erase(std::unique(grown_.begin(), grown_.end()), grown_.end());
    for (const std::uint64_t key : grown_)
      if (const std::int64_t count = pairs_.at(key).count; count > 0) candidates_.push({count, key});
    grown_.clear();
  }

  std::vector<Part> parts_;
  std::vector<std::int64_t> weights_;  // [piece] its count
  std::unordered_map<std::uint64_t, Pair> pairs_;
  std::vector<std::uint64_t> grown_;  // pairs that became more frequent: their candidates are too low
  std::priority_queue<Candidate> candidates_;
};

}  // namespace

Pipeline pipeline_of(ByteLevelBpe byte_level, std::string_view source) {
  Pipeline::Parts parts;
  parts.added = std::move(byte_level.added);
  parts.pre_tokenisers.push_back(std::make_unique<Splitter>(byte_level.splits, source));
  parts.model = std::make_unique<Bpe>(std::move(byte_level.model), source);
  return Pipeline(std::move(parts), source);
}

void PieceCounts::add(std::string_view text, std::string_view source) {
  // Views first: most pieces are known.
  std::unordered_map<std::string_view, std::int64_t> here;
  splitter_.split({text}, {source, text}, [&](const Piece& piece) { ++here[piece.text]; });
  for (const auto& [piece, count] : here) counts_[std::string(piece)] += count;
}

ByteLevelBpe train_bpe(const PieceCounts& pieces, std::int64_t size, const std::vector<std::string>& added) {
  ByteLevelBpe parts;
  BpeSettings& model = parts.model;
  parts.splits = {{pieces.pattern()}};
  for (int byte = 0; byte < 256; ++byte) model.tokens.emplace_back(1, static_cast<char>(byte));
  const std::int64_t with_merges = size - static_cast<std::int64_t>(added.size());
  Trainer trainer(pieces.counts());
  std::uint32_t left = 0, right = 0;
  // "abc" may come from "ab" + "c" and from "a" + "bc": tokens of the same bytes have one id.
  std::unordered_map<std::string, std::uint32_t> ids;
  for (std::uint32_t id = 0; id < 256; ++id) ids.emplace(model.tokens[id], id);
  std::unordered_set<std::uint64_t> learned;
  while (static_cast<std::int64_t>(model.tokens.size()) < with_merges && trainer.next(left, right)) {
    const auto [token, fresh] = ids.emplace(model.tokens[left] + model.tokens[right], model.tokens.size());
    if (fresh) model.tokens.push_back(token->first);
    // A pair occurs again after its merge where a later merge makes one of its tokens anew.
    if (learned.insert(key_of_pair(left, right)).second) model.merges.emplace_back(left, right);
    trainer.merge(left, right, token->second);
    note_progress();
  }
  for (const std::string& content : added) {
    parts.added.push_back({static_cast<std::uint32_t>(model.tokens.size()), content});
    model.tokens.emplace_back();
  }
  return parts;
}

}  // namespace weft::language_model
