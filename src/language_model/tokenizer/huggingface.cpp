// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/huggingface.hpp"

#include <algorithm>
#include <unordered_map>

#include "base/text.hpp"
#include "language_model/tokenizer/byte_alphabet.hpp"
#include "language_model/tokenizer/huggingface_parts.hpp"
#include "language_model/tokenizer/unigram.hpp"
#include "language_model/tokenizer/wordpiece.hpp"

namespace weft::language_model {
namespace {

using nlohmann::json;

/// The ids of a file: those of its model and those of its added tokens, without a gap.
class Vocabulary {
 public:
  Vocabulary(const JsonPart& file, bool is_byte_level) : file_(file), is_byte_level_(is_byte_level) {
    if (const json* added = file.member("added_tokens"); added != nullptr) {
      if (!added->is_array()) throw file.refuse("\"added_tokens\" is not a list");
      for (const json& token : *added) read_added({token, file.source(), "added_tokens."});
    }
  }

  /// Tokens by id, as bytes of a byte-level model; "" for added tokens alone.
  std::vector<std::string> tokens;
  std::vector<AddedToken> added;  ///< by id

  /// Reads the ids of an object {token: id}.
  void read(const JsonPart& vocabulary) {
    begin(vocabulary.value().size());
    for (const auto& [token, value] : vocabulary.value().items()) add(token, id_of(value, token));
    finish();
  }
  /// Begins to read ids one by one.
  void begin(std::size_t size) {
    size_ = size;
    if (size_ + by_content_.size() > kMostTokens)
      throw file_.refuse("has {} tokens (at most {} are accepted)", size_ + by_content_.size(), kMostTokens);
  }
  void add(const std::string& token, std::size_t id) {
    const auto also_added = by_content_.find(token);
    if (also_added != by_content_.end() && also_added->second.id != id)
      throw file_.refuse("added token \"{}\" has the id {}, in the vocabulary {} (one of them counts)",
                         printable(token), also_added->second.id, id);
    if (also_added != by_content_.end()) in_vocabulary_.emplace(token, static_cast<std::uint32_t>(id));
    // An added token of a byte-level model is one of the model's too only if merges use it (as_token).
    if (also_added != by_content_.end() && is_byte_level_) return;
    require_dense(id, token);
    place(id);
    if (!tokens[id].empty()) throw file_.refuse("id {} has two tokens", id);
    if (token.empty()) throw file_.refuse("id {} has an empty token", id);
    if (!is_byte_level_)
      tokens[id] = token;
    else if (!from_alphabet(token, tokens[id]))
      throw file_.refuse("token \"{}\" is not in the alphabet of bytes (the pre-tokeniser is ByteLevel)",
                         printable(token));
    ids_.emplace(token, static_cast<std::uint32_t>(id));
  }
  void finish() {
    for (const auto& [content, token] : by_content_) {
      require_dense(token.id, content);
      place(token.id);
      added.push_back(token);
    }
    std::sort(added.begin(), added.end(), [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
    // The library counts on from the vocabulary, whatever the file says.
    std::size_t next = size_;
    for (const std::string& content : order_)
      if (const std::uint32_t id = by_content_.at(content).id; !in_vocabulary_.contains(content) && id != next++)
        throw file_.refuse("added token \"{}\" has the id {} (the tokenizers library gives it {})", printable(content),
                           id, next - 1);
    // Added tokens of single bytes are tokens of the text too; merges find other ones.
    for (int byte = 0; byte < 256 && is_byte_level_; ++byte)
      as_token(to_alphabet(std::string(1, static_cast<char>(byte))));
  }

  /// The id of a token of the model.
  std::optional<std::uint32_t> find(const std::string& token) const {
    const auto found = ids_.find(token);
    if (found == ids_.end()) return std::nullopt;
    return found->second;
  }
  /// Makes an added token that the vocabulary of a byte-level model has a token of merges too.
  void as_token(const std::string& token) {
    const auto found = in_vocabulary_.find(token);
    if (!is_byte_level_ || found == in_vocabulary_.end() || !ids_.emplace(token, found->second).second) return;
    if (!from_alphabet(token, tokens[found->second]))
      throw file_.refuse("added token \"{}\" belongs to a merge and is not in the alphabet of bytes", printable(token));
    if (tokens[found->second] != token)
      throw file_.refuse("added token \"{}\" stands for other bytes in the vocabulary (not supported)",
                         printable(token));
  }

 private:
  void read_added(const JsonPart& token) {
    token.require_known({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    const std::string content = token.text("content");
    const json* id = token.member("id");
    if (id == nullptr) throw file_.refuse("added token \"{}\" has no id", printable(content));
    AddedToken entry;
    entry.id = static_cast<std::uint32_t>(id_of(*id, content));
    entry.content = content;
    entry.special = token.flag("special", true);
    entry.normalized = token.flag("normalized");
    entry.lstrip = token.flag("lstrip");
    entry.rstrip = token.flag("rstrip");
    entry.single_word = token.flag("single_word");
    if (!by_content_.emplace(content, entry).second)
      throw file_.refuse("added token \"{}\" exists twice", printable(content));
    order_.push_back(content);
  }

  std::size_t id_of(const json& value, const std::string& token) const {
    if (!value.is_number_unsigned() || value >= kMostTokens)
      throw file_.refuse("the id of \"{}\" is not an integer below {}", printable(token), kMostTokens);
    return value.get<std::size_t>();
  }
  // There are as many ids as entries if none is missing, which Pipeline checks.
  void require_dense(std::size_t id, const std::string& token) const {
    if (const std::size_t most = size_ + by_content_.size(); id >= most)
      throw file_.refuse("the id of \"{}\" is {} (of {} tokens; ids have no gaps)", printable(token), id, most);
  }
  void place(std::size_t id) {
    if (id >= tokens.size()) tokens.resize(id + 1);
  }

  const JsonPart& file_;
  bool is_byte_level_;
  std::size_t size_ = 0;  // of the model's vocabulary
  std::unordered_map<std::string, std::uint32_t> ids_;
  std::unordered_map<std::string, AddedToken> by_content_;
  std::vector<std::string> order_;                                // of the added tokens in the file
  std::unordered_map<std::string, std::uint32_t> in_vocabulary_;  // added tokens that the vocabulary has
};

std::vector<std::pair<std::uint32_t, std::uint32_t>> merges_of(const JsonPart& model, Vocabulary& vocabulary) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> merges;
  for (const json& merge : model.list("merges")) {
    std::string left, right;
    if (merge.is_string()) {  // "a b", older files
      const std::string both = merge.get<std::string>();
      const std::size_t space = both.find(' ');
      left = both.substr(0, space);
      right = space == both.npos ? "" : both.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0];
      right = merge[1];
    }
    for (const std::string& token : {left, right, left + right}) vocabulary.as_token(token);
    const auto a = vocabulary.find(left), b = vocabulary.find(right);
    if (!a || !b)
      throw model.refuse("merge {} joins \"{}\" and \"{}\", which are not both in the vocabulary", merges.size(),
                         printable(left), printable(right));
    merges.emplace_back(*a, *b);
  }
  return merges;
}

BpeSettings bpe_of(const JsonPart& model, Vocabulary& vocabulary, bool is_byte_level) {
  model.require_known({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                       "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (const json* dropout = model.member("dropout"); dropout != nullptr && *dropout != 0)
    throw model.refuse("has BPE dropout (not supported)");
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!model.text(name).empty()) throw model.refuse("has a {} (not supported)", name);
  BpeSettings settings;
  settings.is_byte_level = is_byte_level;
  settings.ignore_merges = model.flag("ignore_merges");
  settings.byte_fallback = model.flag("byte_fallback");
  settings.fuse_unknown = model.flag("fuse_unk");
  if (is_byte_level && settings.byte_fallback)
    throw model.refuse("has byte_fallback with a ByteLevel pre-tokeniser (not supported)");
  vocabulary.read(model.object("vocab"));
  settings.merges = merges_of(model, vocabulary);
  const std::string unknown = model.text("unk_token");
  for (int byte = 0; byte < 256 && is_byte_level; ++byte)
    if (!unknown.empty() && !vocabulary.find(to_alphabet(std::string(1, static_cast<char>(byte)))))
      throw model.refuse("has no token for byte 0x{:02x}, which becomes the unk_token \"{}\" (not supported)", byte,
                         printable(unknown));
  if (!unknown.empty() && !is_byte_level) {
    settings.unknown = vocabulary.find(unknown);
    if (!settings.unknown) throw model.refuse("has the unk_token \"{}\", which is no token", printable(unknown));
  }
  settings.tokens = std::move(vocabulary.tokens);
  return settings;
}

std::unique_ptr<const PieceModel> unigram_of(const JsonPart& model, Vocabulary& vocabulary) {
  model.require_known({"type", "unk_id", "vocab", "byte_fallback"});
  const json& entries = model.list("vocab");
  UnigramSettings settings;
  vocabulary.begin(entries.size());
  for (const json& entry : entries) {
    const std::size_t id = settings.scores.size();
    if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_number())
      throw model.refuse("\"model.vocab\" has an entry {} that is not a token and its score", id);
    vocabulary.add(entry[0], id);
    settings.scores.push_back(entry[1]);
  }
  vocabulary.finish();
  settings.tokens = std::move(vocabulary.tokens);
  settings.byte_fallback = model.flag("byte_fallback");
  if (model.member("unk_id") != nullptr)
    settings.unknown = static_cast<std::uint32_t>(model.number("unk_id", settings.scores.size()));
  return std::make_unique<Unigram>(std::move(settings), model.source());
}

std::unique_ptr<const PieceModel> wordpiece_of(const JsonPart& model, Vocabulary& vocabulary) {
  model.require_known({"type", "unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab"});
  constexpr std::size_t longest = std::size_t{1} << 16;
  vocabulary.read(model.object("vocab"));
  WordPieceSettings settings;
  settings.continuation = model.text("continuing_subword_prefix");
  settings.longest_word = model.number("max_input_chars_per_word", longest);
  const std::string name = model.text("unk_token");
  const std::optional<std::uint32_t> unknown = vocabulary.find(name);
  if (!unknown) throw model.refuse("has the unk_token \"{}\", which is no token", printable(name));
  settings.unknown = *unknown;
  settings.tokens = std::move(vocabulary.tokens);
  return std::make_unique<WordPiece>(std::move(settings), model.source());
}

/// True if the file has nothing that Weft's own form of a byte-level BPE has no place for.
bool has_own_form(const Normalisers& normalisers, const PreTokeniserParts& pre, const std::vector<AddedToken>& added) {
  return normalisers.empty() && pre.is_byte_level && pre.has_rules_alone &&
         std::all_of(pre.rules.begin(), pre.rules.end(),
                     [](const SplitRule& rule) { return rule.cut == Cut::isolated && !rule.inverted; }) &&
         std::none_of(added.begin(), added.end(),
                      [](const AddedToken& token) { return token.lstrip || token.rstrip || token.single_word; });
}

}  // namespace

std::variant<ByteLevelBpe, Pipeline> tokeniser_of_huggingface(const json& json_file, std::string_view source) {
  const JsonPart file(json_file, source);
  file.require_known({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                      "post_processor", "decoder", "model"});
  const JsonPart model = file.object("model");
  const auto part = [&](const char* name) { return JsonPart(*file.member(name), source, fmt::format("{}.", name)); };
  Pipeline::Parts parts;
  if (file.member("normalizer") != nullptr) parts.normalisers = normalisers_of(part("normalizer"));
  PreTokeniserParts pre;
  if (file.member("pre_tokenizer") != nullptr) pre = pre_tokenisers_of(part("pre_tokenizer"));
  const bool has_decoder = file.member("decoder") != nullptr;
  if (has_decoder && pre.is_byte_level)
    require_byte_level_decoder(part("decoder"));
  else if (has_decoder)
    parts.decoder = decoder_of(part("decoder"));
  else
    parts.decoder.push_back(spacing_decoder());
  Vocabulary vocabulary(file, pre.is_byte_level);
  const std::string type = model.type();
  if (pre.is_byte_level && type != "BPE" && !type.empty())
    throw file.refuse("has a model of type {} with a ByteLevel pre-tokeniser (only BPE is supported)", printable(type));
  if (type == "BPE" || type.empty()) {
    BpeSettings bpe = bpe_of(model, vocabulary, pre.is_byte_level);
    if (has_own_form(parts.normalisers, pre, vocabulary.added))
      return ByteLevelBpe{std::move(pre.rules), std::move(bpe), std::move(vocabulary.added)};
    parts.model = std::make_unique<Bpe>(std::move(bpe), source);
  } else if (type == "Unigram") {
    parts.model = unigram_of(model, vocabulary);
  } else if (type == "WordPiece") {
    parts.model = wordpiece_of(model, vocabulary);
  } else {
    throw file.refuse("has a model of type {} (BPE, Unigram and WordPiece are supported)", printable(type));
  }
  parts.added = std::move(vocabulary.added);
  parts.pre_tokenisers = std::move(pre.steps);
  return Pipeline(std::move(parts), source);
}

SpecialTokens special_tokens_of_huggingface(const json& file, std::string_view source) {
  const auto found = file.find("post_processor");
  return found == file.end() || found->is_null() ? SpecialTokens{}
                                                 : special_tokens_of({*found, source, "post_processor."});
}

}  // namespace weft::language_model
