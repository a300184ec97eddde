// SPDX-License-Identifier: Apache-2.0
//
// Text <-> ids. One value type for all kinds:
//
//   character   one id per code point of a corpus, in ascending order
//   bytes       one id per byte
//   bpe         byte-pair encoding: byte-level, as Weft trains it, or of a tokenizer.json
//   unigram     of a tokenizer.json, as SentencePiece trains it
//   wordpiece   of a tokenizer.json, as BERT has it
//
// detokenise(encode(text)) == text for every valid UTF-8 text, except for unknown characters, and for tokenisers of a
// tokenizer.json that change the text before they cut it.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "language_model/tokenizer/special_tokens.hpp"

namespace weft::language_model {

struct ByteLevelBpe;
struct PieceCache;

/// Throws Error(data) "SOURCE: byte N …" for invalid UTF-8.
void require_utf8(std::string_view text, std::string_view source, std::size_t offset = 0);

/// `source` names a text or file in messages.
class Tokenizer {
 public:
  /// Tokeniser of the characters of a corpus, then the special symbols (PAD, UNK, BOS, EOS) in the given order. Throws
  /// Error(data) "SOURCE: …" for invalid UTF-8.
  static Tokenizer characters_of(std::string_view corpus, const std::vector<std::string>& special,
                                 std::string_view source);
  /// Tokeniser of 256 bytes, then the special symbols.
  static Tokenizer bytes(const std::vector<std::string>& special);
  /// Tokeniser of a byte-level BPE. Throws Error(data) "SOURCE: …" for an inconsistent model.
  static Tokenizer bpe(ByteLevelBpe parts, std::string_view source);

  /// Tokeniser from `stored_text()`, or from a Hugging Face tokenizer.json (huggingface.hpp).
  /// Throws Error(data) "SOURCE: …".
  static Tokenizer from_text(std::string_view text, std::string_view source);

  /// Data that determine the ids of a text, as JSON, without special_tokens(). Tokenisers with equal data give ids the
  /// same meaning.
  std::string text() const;
  /// The complete tokeniser as JSON.
  std::string stored_text() const;
  /// The text of a tokenizer.json of Hugging Face with the same ids.
  std::string huggingface_text() const;

  const SpecialTokens& special_tokens() const { return *special_; }
  Tokenizer with(SpecialTokens) const;
  /// Copy that adds `begin` and `end` of special_tokens() to texts, or with false does not.
  Tokenizer adding_special_tokens(bool adds) const;
  /// Ids that begin and end a document: those of special_tokens(), if they are to be added.
  std::span<const std::uint32_t> begin() const { return adds_ ? special_->begin : std::span<const std::uint32_t>(); }
  std::span<const std::uint32_t> end() const { return adds_ ? special_->end : std::span<const std::uint32_t>(); }
  /// Puts begin() before the ids of a text that does not begin so already.
  std::vector<std::uint32_t> with_begin(std::vector<std::uint32_t> ids) const;

  /// Kind of the tokeniser, as above.
  std::string_view kind() const;
  std::int64_t vocabulary_size() const;
  /// Id of a special symbol; -1 if there is none of this name.
  std::int64_t special(std::string_view name) const;

  /// Throws Error(data) "SOURCE: byte N …" for invalid UTF-8 (not of kind "bytes") and for a character that is not in
  /// the vocabulary, unless UNK is. `offset`: of the text in its source.
  std::vector<std::uint32_t> encode(std::string_view text, std::string_view source = "text",
                                    std::size_t offset = 0) const;
  /// The same with what earlier texts of this tokeniser left in the cache, which makes short texts faster.
  std::vector<std::uint32_t> encode(std::string_view text, std::string_view source, std::size_t offset,
                                    PieceCache& cache) const;
  /// The text in parts of about `bytes` bytes, whose ids one after the other are those of the text. One part if the
  /// text cannot be cut.
  std::vector<std::string_view> parts(std::string_view text, std::size_t bytes) const;
  /// Text of ids. Special symbols of "character" and "bytes" are detokenised to nothing, UNK to U+FFFD. The bytes of
  /// single ids need not be valid UTF-8. `continues`: the ids follow others, so that the text of the first may begin
  /// with a space; detokenise(a + b) == detokenise(a) + detokenise(b, true). Throws Error(data) for an id that is not
  /// in the vocabulary.
  std::string detokenise(std::span<const std::uint32_t> ids, bool continues = false) const;

  struct Model;

 private:
  static Tokenizer of_huggingface(const nlohmann::json& file, std::string_view source);
  explicit Tokenizer(std::shared_ptr<const Model> model)
      : model_(std::move(model)), special_(std::make_shared<SpecialTokens>()) {}
  std::shared_ptr<const Model> model_;
  std::shared_ptr<const SpecialTokens> special_;
  bool adds_ = true;
};

/// The symbol that ends a document in the vocabularies that Weft trains.
inline constexpr const char* kEndOfText = "<|endoftext|>";
/// Id of the end of a text, or that of Llama's "<|end_of_text|>"; -1: the tokeniser has neither.
std::int64_t end_of_text(const Tokenizer&);

/// The name that a symbol of a character or byte tokeniser has in a tokenizer.json: "<|EOS|>" for "EOS", so that
/// programs that look for it do not find it in the words of a text.
std::string exported_symbol(std::string_view name);

}  // namespace weft::language_model
