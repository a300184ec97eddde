// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/tokenizer.hpp"

#include <algorithm>
#include <variant>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "language_model/tokenizer/byte_alphabet.hpp"
#include "language_model/tokenizer/huggingface.hpp"
#include "language_model/tokenizer/huggingface_export.hpp"

namespace weft::language_model {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "weft-tokenizer";
constexpr int kVersion = 1;
constexpr long kReplacement = 0xfffd;
constexpr long kCodePoints = 0x110000;

std::string code_point_text(std::string_view character, long code) {
  return fmt::format("U+{:04X} (\"{}\")", code, printable(character));
}

/// One id per code point of a corpus.
struct Characters {
  std::vector<long> codes;       // ascending; id = index
  std::vector<std::int32_t> id;  // by code point, -1: none

  explicit Characters(std::vector<long> all) : codes(std::move(all)) {
    id.assign(codes.empty() ? 0 : static_cast<std::size_t>(codes.back()) + 1, -1);
    for (std::size_t i = 0; i < codes.size(); ++i)
      id[static_cast<std::size_t>(codes[i])] = static_cast<std::int32_t>(i);
  }
};

struct Bytes {};

/// A tokeniser with a vocabulary.
struct Learned {
  Pipeline pipeline;
  std::vector<SplitRule> splits;  ///< of a byte-level BPE in Weft's own form
  std::string file;               ///< the tokenizer.json of another one, else ""

  const BpeSettings& bpe() const { return dynamic_cast<const Bpe&>(pipeline.model()).settings(); }
};

constexpr const char* kFileKind = "tokenizer.json";

}  // namespace

void require_utf8(std::string_view text, std::string_view source, std::size_t offset) {
  if (const std::size_t at = first_invalid(text); at != text.npos)
    throw error(ExitCode::data,
                "{}: byte {} (0x{:02x}) is not valid UTF-8; convert the text, or take data.tokens = \"bytes\"", source,
                offset + at, static_cast<unsigned char>(text[at]));
}

struct Tokenizer::Model {
  std::variant<Characters, Bytes, Learned> kind;
  std::vector<std::string> special;  // of characters and bytes; their ids follow those of the text

  /// Number of ids without special symbols.
  std::size_t ordinary() const {
    if (const auto* characters = std::get_if<Characters>(&kind)) return characters->codes.size();
    if (const auto* learned = std::get_if<Learned>(&kind)) return learned->pipeline.vocabulary_size();
    return 256;
  }
};

Tokenizer Tokenizer::characters_of(std::string_view corpus, const std::vector<std::string>& special,
                                   std::string_view source) {
  require_utf8(corpus, source);
  std::vector<bool> seen(static_cast<std::size_t>(kCodePoints), false);
  for (std::string_view rest = corpus; !rest.empty();) {
    const Character next = first_character(rest);
    seen[static_cast<std::size_t>(next.code)] = true;
    rest.remove_prefix(next.bytes);
  }
  std::vector<long> codes;
  for (long code = 0; code < kCodePoints; ++code)
    if (seen[static_cast<std::size_t>(code)]) codes.push_back(code);
  return Tokenizer(std::make_shared<Model>(Model{Characters(std::move(codes)), special}));
}

Tokenizer Tokenizer::bytes(const std::vector<std::string>& special) {
  return Tokenizer(std::make_shared<Model>(Model{Bytes{}, special}));
}

Tokenizer Tokenizer::bpe(ByteLevelBpe parts, std::string_view source) {
  std::vector<SplitRule> splits = parts.splits;
  return Tokenizer(
      std::make_shared<Model>(Model{Learned{pipeline_of(std::move(parts), source), std::move(splits), ""}, {}}));
}

std::string_view Tokenizer::kind() const {
  if (const auto* learned = std::get_if<Learned>(&model_->kind)) return learned->pipeline.model().name();
  return std::holds_alternative<Bytes>(model_->kind) ? "bytes" : "character";
}

std::int64_t Tokenizer::vocabulary_size() const {
  return static_cast<std::int64_t>(model_->ordinary() + model_->special.size());
}

std::int64_t Tokenizer::special(std::string_view name) const {
  if (const auto* learned = std::get_if<Learned>(&model_->kind)) {
    for (const AddedToken& added : learned->pipeline.added())
      if (added.content == name) return added.id;
    return -1;
  }
  const auto found = std::find(model_->special.begin(), model_->special.end(), name);
  if (found == model_->special.end()) return -1;
  return static_cast<std::int64_t>(model_->ordinary()) + (found - model_->special.begin());
}

std::vector<std::uint32_t> Tokenizer::encode(std::string_view text, std::string_view source, std::size_t offset) const {
  PieceCache cache;
  return encode(text, source, offset, cache);
}

std::vector<std::uint32_t> Tokenizer::encode(std::string_view text, std::string_view source, std::size_t offset,
                                             PieceCache& cache) const {
  std::vector<std::uint32_t> ids;
  if (std::holds_alternative<Bytes>(model_->kind)) {
    ids.reserve(text.size());
    for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
    return ids;
  }
  require_utf8(text, source, offset);
  if (const auto* learned = std::get_if<Learned>(&model_->kind))
    return learned->pipeline.encode(text, source, offset, cache);
  const Characters& characters = std::get<Characters>(model_->kind);
  const std::int64_t unknown = special("UNK");
  for (std::size_t at = 0; at < text.size();) {
    const Character next = first_character(text.substr(at));
    const auto code = static_cast<std::size_t>(next.code);
    std::int64_t id = code < characters.id.size() ? characters.id[code] : -1;
    if (id < 0) id = unknown;
    if (id < 0)
      throw error(
          ExitCode::data,
          "{}: byte {} is {}, which is not in the vocabulary (the {} characters of the training text); remove it, "
          "or add data.special = [\"UNK\"]",
          source, offset + at, code_point_text(text.substr(at, next.bytes), next.code), characters.codes.size());
    ids.push_back(static_cast<std::uint32_t>(id));
    at += next.bytes;
  }
  return ids;
}

std::vector<std::string_view> Tokenizer::parts(std::string_view text, std::size_t bytes) const {
  std::vector<std::string_view> parts;
  const auto* const learned = std::get_if<Learned>(&model_->kind);
  if (learned == nullptr || learned->pipeline.cuts_before_spaces())
    for (std::size_t at = std::max<std::size_t>(1, bytes); at < text.size(); ++at) {
      if (text[at] != ' ' || text[at - 1] < '!' || text[at - 1] > '~') continue;
      parts.push_back(text.substr(0, at));
      text.remove_prefix(at);
      at = std::max<std::size_t>(1, bytes) - 1;
    }
  parts.push_back(text);
  return parts;
}

std::string Tokenizer::detokenise(std::span<const std::uint32_t> ids, bool continues) const {
  std::string text;
  const std::int64_t unknown = special("UNK");
  const auto* const characters = std::get_if<Characters>(&model_->kind);
  const auto* const learned = std::get_if<Learned>(&model_->kind);
  for (const std::uint32_t id : ids) {
    if (id >= static_cast<std::uint64_t>(vocabulary_size()))
      throw error(ExitCode::data, "token {} is not in the vocabulary of {}", id, vocabulary_size());
    if (id >= model_->ordinary()) {
      if (static_cast<std::int64_t>(id) == unknown) append_character(text, kReplacement);
    } else if (learned != nullptr) {
      text += learned->pipeline.text_of(id, !continues);
      continues = true;
    } else if (characters != nullptr) {
      append_character(text, characters->codes[id]);
    } else {
      text += static_cast<char>(id);
    }
  }
  return text;
}

namespace {

/// A pattern alone as its text.
json json_of(const std::vector<SplitRule>& rules) {
  if (rules.size() == 1 && !rules[0].covers_text) return rules[0].pattern;
  json list = json::array();
  for (const SplitRule& rule : rules) list.push_back({{"pattern", rule.pattern}, {"covers_text", rule.covers_text}});
  return list;
}

/// Which tokens are looked for first decides ids only if there are both kinds.
bool has_two_kinds(const std::vector<AddedToken>& added) {
  return std::any_of(added.begin(), added.end(),
                     [&](const AddedToken& token) { return token.normalized != added[0].normalized; });
}

/// JSON of a tokeniser. complete: with data that do not affect ids.
json json_of(const Tokenizer::Model& tokenizer, std::string_view kind, bool complete) {
  json j{{"format", kFormat}, {"version", kVersion}, {"kind", kind}};
  if (const auto* learned = std::get_if<Learned>(&tokenizer.kind); learned != nullptr && !learned->file.empty()) {
    j["kind"] = kFileKind;
    json& file = j["file"] = parse_json<json>(learned->file);
    for (const char* name : {"post_processor", "truncation", "padding"})
      if (!complete) file.erase(name);
    return j;
  }
  if (const auto* learned = std::get_if<Learned>(&tokenizer.kind)) {
    const BpeSettings& model = learned->bpe();
    json tokens = json::array(), added = json::array();
    for (const std::string& token : model.tokens) tokens.push_back(to_alphabet(token));
    const std::vector<AddedToken>& all_added = learned->pipeline.added();
    for (const AddedToken& token : all_added) {
      added.push_back({{"id", token.id}, {"content", token.content}});
      if (complete && !token.special) added.back()["special"] = false;
      if (token.normalized && (complete || has_two_kinds(all_added))) added.back()["normalized"] = true;
    }
    j.update({{"pattern", json_of(learned->splits)},
              {"ignore_merges", model.ignore_merges},
              {"tokens", tokens},
              {"merges", model.merges},
              {"added", added}});
    return j;
  }
  j["special"] = tokenizer.special;
  if (const auto* characters = std::get_if<Characters>(&tokenizer.kind)) j["characters"] = characters->codes;
  return j;
}

}  // namespace

std::string Tokenizer::text() const { return json_text(json_of(*model_, kind(), false)); }

std::string Tokenizer::stored_text() const {
  json j = json_of(*model_, kind(), true);
  const auto add = [&](const char* name, const auto& list) {
    if (!list.empty()) j[name] = list;
  };
  add("begin", special_->begin);
  add("end", special_->end);
  add("ends", special_->ends);
  add("files", special_->files);
  return json_text(j);
}

std::string Tokenizer::huggingface_text() const {
  const auto* const learned = std::get_if<Learned>(&model_->kind);
  if (learned != nullptr && !learned->file.empty()) return learned->file + "\n";
  std::vector<std::string> symbols;
  for (const std::string& symbol : model_->special) symbols.push_back(exported_symbol(symbol));
  json file;
  if (learned != nullptr)
    file = huggingface_of_bpe(learned->splits, learned->bpe(), learned->pipeline.added(), *special_);
  else if (const auto* characters = std::get_if<Characters>(&model_->kind))
    file = huggingface_of_characters(characters->codes, symbols, exported_symbol("UNK"));
  else
    file = huggingface_of_bytes(symbols);
  return file.dump() + "\n";
}

std::int64_t end_of_text(const Tokenizer& tokenizer) {
  const std::int64_t id = tokenizer.special(kEndOfText);
  return id >= 0 ? id : tokenizer.special("<|end_of_text|>");
}

std::string exported_symbol(std::string_view name) { return fmt::format("<|{}|>", name); }

Tokenizer Tokenizer::with(SpecialTokens special) const {
  Tokenizer changed = *this;
  changed.special_ = std::make_shared<SpecialTokens>(std::move(special));
  return changed;
}

Tokenizer Tokenizer::adding_special_tokens(bool adds) const {
  Tokenizer changed = *this;
  changed.adds_ = adds;
  return changed;
}

std::vector<std::uint32_t> Tokenizer::with_begin(std::vector<std::uint32_t> ids) const {
  const std::span<const std::uint32_t> first = begin();
  if (ids.size() < first.size() || !std::equal(first.begin(), first.end(), ids.begin()))
    ids.insert(ids.begin(), first.begin(), first.end());
  return ids;
}

namespace {

/// Reader of the stored form. Throws Error(data) for whatever is missing or of another type.
class Stored {
 public:
  Stored(const json& file, std::string_view source) : file_(file), source_(source) {}

  Error refuse(std::string_view why) const {
    return error(ExitCode::data, "{}: {}; is it a tokeniser file, and complete?", source_, why);
  }
  const json& member(const char* name, json::value_t type) const {
    const auto found = file_.find(name);
    if (found == file_.end() || found->type() != type) throw refuse(fmt::format("\"{}\" is missing or wrong", name));
    return *found;
  }
  std::string text(const char* name) const { return member(name, json::value_t::string); }
  std::vector<std::string> texts(const char* name) const {
    std::vector<std::string> all;
    for (const json& one : member(name, json::value_t::array)) {
      if (!one.is_string()) throw refuse(fmt::format("\"{}\" is not a list of texts", name));
      all.push_back(one);
    }
    return all;
  }
  /// An integer in [0, bound).
  std::uint32_t number(const json& value, std::int64_t bound, const char* name) const {
    if (!value.is_number_unsigned() || value >= bound)
      throw refuse(fmt::format("\"{}\" has a value that is not an integer in [0, {})", name, bound));
    return value;
  }

  std::vector<long> characters() const {
    std::vector<long> codes;
    for (const json& code : member("characters", json::value_t::array)) {
      const long value = number(code, kCodePoints, "characters");
      if ((value >= 0xd800 && value <= 0xdfff) || (!codes.empty() && value <= codes.back()))
        throw refuse("\"characters\" are not ascending code points");
      codes.push_back(value);
    }
    return codes;
  }

  std::vector<SplitRule> splits() const {
    const auto found = file_.find("pattern");
    if (found == file_.end() || !found->is_array()) return {{text("pattern")}};
    std::vector<SplitRule> rules;
    for (const json& rule : *found) {
      if (!rule.is_object() || !rule.contains("pattern") || !rule["pattern"].is_string() ||
          !rule.contains("covers_text") || !rule["covers_text"].is_boolean())
        throw refuse("\"pattern\" has an entry without pattern and covers_text");
      rules.push_back({rule["pattern"], rule["covers_text"]});
    }
    return rules;
  }

  ByteLevelBpe bpe() const {
    ByteLevelBpe parts;
    BpeSettings& model = parts.model;
    parts.splits = splits();
    model.ignore_merges = member("ignore_merges", json::value_t::boolean);
    for (const std::string& token : texts("tokens"))
      if (!from_alphabet(token, model.tokens.emplace_back()))
        throw refuse(fmt::format("token {} is not in the alphabet of bytes", model.tokens.size() - 1));
    const auto n = static_cast<std::int64_t>(model.tokens.size());
    for (const json& merge : member("merges", json::value_t::array)) {
      if (!merge.is_array() || merge.size() != 2) throw refuse("\"merges\" is not a list of pairs");
      model.merges.emplace_back(number(merge[0], n, "merges"), number(merge[1], n, "merges"));
    }
    for (const json& token : member("added", json::value_t::array)) {
      if (!token.is_object() || !token.contains("id") || !token.contains("content") || !token["content"].is_string())
        throw refuse("\"added\" has an entry without id and content");
      parts.added.push_back({number(token["id"], n, "added"), token["content"], flag(token, "special", true),
                             flag(token, "normalized", false)});
    }
    return parts;
  }

  SpecialTokens special_tokens() const {
    SpecialTokens special;
    special.begin = ids("begin");
    special.end = ids("end");
    special.ends = ids("ends");
    if (!file_.contains("files")) return special;
    for (const auto& [name, contents] : member("files", json::value_t::object).items()) {
      if (!contents.is_string() || name.empty() || name[0] == '.' || name.find('/') != name.npos)
        throw refuse("\"files\" are not texts by name");
      special.files[name] = contents;
    }
    return special;
  }

 private:
  /// Optional boolean of an entry.
  bool flag(const json& entry, const char* name, bool missing) const {
    if (!entry.contains(name)) return missing;
    if (!entry[name].is_boolean()) throw refuse(fmt::format("\"{}\" is neither true nor false", name));
    return entry[name];
  }
  /// Optional list of ids.
  std::vector<std::uint32_t> ids(const char* name) const {
    std::vector<std::uint32_t> all;
    if (!file_.contains(name)) return all;
    for (const json& id : member(name, json::value_t::array)) all.push_back(number(id, UINT32_MAX, name));
    return all;
  }

  const json& file_;
  std::string_view source_;
};

}  // namespace

Tokenizer Tokenizer::of_huggingface(const json& file, std::string_view source) {
  std::variant<ByteLevelBpe, Pipeline> read = tokeniser_of_huggingface(file, source);
  if (auto* const parts = std::get_if<ByteLevelBpe>(&read)) return bpe(std::move(*parts), source);
  Learned learned{std::get<Pipeline>(std::move(read)), {}, json_text(file)};
  return Tokenizer(std::make_shared<Model>(Model{std::move(learned), {}}));
}

Tokenizer Tokenizer::from_text(std::string_view text, std::string_view source) {
  const json file = parse_json<json>(text);
  const Stored stored(file, source);
  if (file.is_discarded() || !file.is_object()) throw stored.refuse("is not a JSON object");
  const bool foreign = file.contains("model") && !file.contains("format");
  const Tokenizer tokenizer = [&] {
    if (foreign) return of_huggingface(file, source);
    if (const std::string format = stored.text("format"); format != kFormat)
      throw stored.refuse(fmt::format("\"format\" is \"{}\", not \"{}\"", printable(format), kFormat));
    if (stored.member("version", json::value_t::number_unsigned) != kVersion)
      throw stored.refuse(fmt::format("is of a version other than {}", kVersion));
    const std::string kind = stored.text("kind");
    if (kind == "bpe") return bpe(stored.bpe(), source);
    if (kind == kFileKind) return of_huggingface(stored.member("file", json::value_t::object), source);
    if (kind == "bytes") return bytes(stored.texts("special"));
    if (kind != "character") throw stored.refuse(fmt::format("is of the unknown kind \"{}\"", printable(kind)));
    return Tokenizer(std::make_shared<Model>(Model{Characters(stored.characters()), stored.texts("special")}));
  }();
  SpecialTokens special = foreign ? special_tokens_of_huggingface(file, source) : stored.special_tokens();
  for (const auto* ids : {&special.begin, &special.end})
    for (const std::uint32_t id : *ids)
      if (id >= tokenizer.vocabulary_size())
        throw stored.refuse(
            fmt::format("a text begins or ends with the id {} of {} tokens", id, tokenizer.vocabulary_size()));
  return tokenizer.with(std::move(special));
}

}  // namespace weft::language_model
