// SPDX-License-Identifier: Apache-2.0
//
// Byte-level byte-pair encoding. A text is cut into added tokens and pieces (splitter.hpp). A piece starts as the ids
// of its bytes; as long as two neighbours have a merge, the pair with the lowest rank, of these the leftmost, is
// replaced by the id of both joined (Sennrich, Haddow and Birch 2016; Radford et al. 2019).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "language_model/tokenizer/splitter.hpp"

namespace weft::language_model {

/// A model as it is stored.
struct Bpe {
  /// Found in the text before anything else, leftmost and longest first: "<|endoftext|>".
  struct Added {
    std::uint32_t id = 0;
    std::string content;
    bool special = true;      ///< to other programs, which may leave it out of detokenised text
    bool normalized = false;  ///< looked for in the text between the others
  };
  std::vector<SplitRule> splits;  ///< of the splitter
  /// Bytes of each id; empty: an added token alone. A token of a byte or of a merge may be an added token besides.
  std::vector<std::string> tokens;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> merges;  ///< left and right id, by rank
  std::vector<Added> added;
  bool ignore_merges = false;  ///< a piece that is a token as a whole is that token
};

/// A model ready to encode. Immutable.
class BpeEncoder {
 public:
  /// Throws Error(data) "SOURCE: …" if a printable ASCII character has no id, a merge makes no token, or ids, merges or
  /// contents repeat.
  BpeEncoder(Bpe model, std::string_view source);
  BpeEncoder(BpeEncoder&&) = default;  // not copied: members refer to the model

  const Bpe& model() const { return model_; }
  /// Ids of a text, valid UTF-8; `offset`: of the text in its source, for messages. Throws Error(data) for a byte
  /// without a token.
  std::vector<std::uint32_t> encode(std::string_view text, std::string_view source, std::size_t offset = 0) const;
  /// Splitter::cuts_before_spaces for the ids of this model.
  bool cuts_before_spaces() const;
  /// The bytes of an id below model().tokens.size().
  std::string_view bytes_of(std::uint32_t id) const;

 private:
  struct Merge {
    std::uint32_t rank, result;
  };
  struct Workspace;

  void encode_piece(std::string_view piece, std::vector<std::uint32_t>& ids, Workspace&) const;
  const Bpe::Added* added_at(std::string_view text, bool normalized) const;

  Bpe model_;
  Splitter splitter_;
  std::array<std::uint32_t, 256> byte_ids_{};
  std::unordered_map<std::uint64_t, Merge> merges_;
  std::unordered_map<std::string_view, std::uint32_t> ids_;  ///< views of model_.tokens
  std::array<std::vector<const Bpe::Added*>, 256> added_{};  ///< by first byte, longest first
  bool has_normalized_ = false;
};

/// The alphabet in which GPT-2 writes bytes as printable characters, "Ġ" for a space: bytes <-> UTF-8.
std::string to_alphabet(std::string_view bytes);
/// Converts from the alphabet to bytes. False for a text with other characters.
bool from_alphabet(std::string_view text, std::string& bytes);

/// Counts of pieces of a training text.
class PieceCounts {
 public:
  explicit PieceCounts(std::string_view pattern) : pattern_(pattern), splitter_(pattern) {}
  /// Adds a text, valid UTF-8. Throws Error(data) "SOURCE: …".
  void add(std::string_view text, std::string_view source);

  const std::string& pattern() const { return pattern_; }
  const std::unordered_map<std::string, std::int64_t>& counts() const { return counts_; }

 private:
  std::string pattern_;
  Splitter splitter_;
  std::unordered_map<std::string, std::int64_t> counts_;
};

/// Learns a vocabulary of `size` ids: the 256 bytes in order, one id per merge, then `added`. A merge joins the most
/// frequent pair of neighbours (each pair of adjacent positions counts, "aaa" has two pairs "aa"), of equally frequent
/// ones the smallest (left, right), everywhere from left to right; a token of the same bytes as an earlier one has its
/// id. The vocabulary is smaller if no pair is left.
Bpe train_bpe(const PieceCounts&, std::int64_t size, const std::vector<std::string>& added);

}  // namespace weft::language_model
