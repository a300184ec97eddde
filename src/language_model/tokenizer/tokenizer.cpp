// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/tokenizer.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <variant>

#include "base/error.hpp"
#include "base/text.hpp"
#include "language_model/tokenizer/bpe.hpp"
#include "language_model/tokenizer/huggingface.hpp"

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

}  // namespace

void require_utf8(std::string_view text, std::string_view source, std::size_t offset) {
  if (const std::size_t at = first_invalid(text); at != text.npos)
    throw error(ExitCode::data,
                "{}: byte {} (0x{:02x}) is not valid UTF-8; convert the text, or take data.tokens = \"bytes\"", source,
                offset + at, static_cast<unsigned char>(text[at]));
}

struct Tokenizer::Model {
  std::variant<Characters, Bytes, BpeEncoder> kind;
  std::vector<std::string> special;  // of characters and bytes; their ids follow those of the text

  /// Ids without special symbols.
  std::size_t ordinary() const {
    if (const auto* characters = std::get_if<Characters>(&kind)) return characters->codes.size();
    if (const auto* bpe = std::get_if<BpeEncoder>(&kind)) return bpe->model().tokens.size();
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

Tokenizer Tokenizer::bpe(Bpe model, std::string_view source) {
  return Tokenizer(std::make_shared<Model>(Model{BpeEncoder(std::move(model), source), {}}));
}

std::string_view Tokenizer::kind() const {
  constexpr std::string_view names[] = {"character", "bytes", "bpe"};
  return names[model_->kind.index()];
}

std::int64_t Tokenizer::vocabulary_size() const {
  return static_cast<std::int64_t>(model_->ordinary() + model_->special.size());
}

std::int64_t Tokenizer::special(std::string_view name) const {
  if (const auto* bpe = std::get_if<BpeEncoder>(&model_->kind)) {
    for (const Bpe::Added& added : bpe->model().added)
      if (added.content == name) return added.id;
    return -1;
  }
  const auto found = std::find(model_->special.begin(), model_->special.end(), name);
  if (found == model_->special.end()) return -1;
  return static_cast<std::int64_t>(model_->ordinary()) + (found - model_->special.begin());
}

std::vector<std::uint32_t> Tokenizer::encode(std::string_view text, std::string_view source, std::size_t offset) const {
  std::vector<std::uint32_t> ids;
  if (std::holds_alternative<Bytes>(model_->kind)) {
    ids.reserve(text.size());
    for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
    return ids;
  }
  require_utf8(text, source, offset);
  if (const auto* bpe = std::get_if<BpeEncoder>(&model_->kind)) return bpe->encode(text, source, offset);
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
  const auto* const bpe = std::get_if<BpeEncoder>(&model_->kind);
  if (bpe == nullptr || bpe->cuts_before_spaces())
    for (std::size_t at = std::max<std::size_t>(1, bytes); at < text.size(); ++at) {
      if (text[at] != ' ' || text[at - 1] < '!' || text[at - 1] > '~') continue;
      parts.push_back(text.substr(0, at));
      text.remove_prefix(at);
      at = std::max<std::size_t>(1, bytes) - 1;
    }
  parts.push_back(text);
  return parts;
}

std::string Tokenizer::decode(std::span<const std::uint32_t> ids) const {
  std::string text;
  const std::int64_t unknown = special("UNK");
  const auto* const characters = std::get_if<Characters>(&model_->kind);
  const auto* const bpe = std::get_if<BpeEncoder>(&model_->kind);
  for (const std::uint32_t id : ids) {
    if (id >= static_cast<std::uint64_t>(vocabulary_size()))
      throw error(ExitCode::data, "token {} is not in the vocabulary of {}", id, vocabulary_size());
    if (id >= model_->ordinary()) {
      if (static_cast<std::int64_t>(id) == unknown) append_character(text, kReplacement);
    } else if (bpe != nullptr) {
      text += bpe->bytes_of(id);
    } else if (characters != nullptr) {
      append_character(text, characters->codes[id]);
    } else {
      text += static_cast<char>(id);
    }
  }
  return text;
}

std::string Tokenizer::text() const {
  json j{{"format", kFormat}, {"version", kVersion}, {"kind", kind()}};
  if (const auto* bpe = std::get_if<BpeEncoder>(&model_->kind)) {
    const Bpe& model = bpe->model();
    json tokens = json::array(), added = json::array();
    for (const std::string& token : model.tokens) tokens.push_back(to_alphabet(token));
    for (const Bpe::Added& token : model.added) added.push_back({{"id", token.id}, {"content", token.content}});
    j.update({{"pattern", model.pattern},
              {"ignore_merges", model.ignore_merges},
              {"tokens", tokens},
              {"merges", model.merges},
              {"added", added}});
    return j.dump();
  }
  j["special"] = model_->special;
  if (const auto* characters = std::get_if<Characters>(&model_->kind)) j["characters"] = characters->codes;
  return j.dump();
}

std::string Tokenizer::huggingface_text() const {
  const auto* const bpe = std::get_if<BpeEncoder>(&model_->kind);
  return bpe == nullptr ? "" : huggingface_of_bpe(bpe->model()).dump() + "\n";
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

  Bpe bpe() const {
    Bpe model;
    model.pattern = text("pattern");
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
      model.added.push_back({number(token["id"], n, "added"), token["content"]});
    }
    return model;
  }

 private:
  const json& file_;
  std::string_view source_;
};

}  // namespace

Tokenizer Tokenizer::from_text(std::string_view text, std::string_view source) {
  const json file = json::parse(text, nullptr, false);
  const Stored stored(file, source);
  if (file.is_discarded() || !file.is_object()) throw stored.refuse("is not a JSON object");
  if (file.contains("model") && !file.contains("format")) return bpe(bpe_of_huggingface(file, source), source);
  if (const std::string format = stored.text("format"); format != kFormat)
    throw stored.refuse(fmt::format("\"format\" is \"{}\", not \"{}\"", printable(format), kFormat));
  if (stored.member("version", json::value_t::number_unsigned) != kVersion)
    throw stored.refuse(fmt::format("is of a version other than {}", kVersion));
  const std::string kind = stored.text("kind");
  if (kind == "bpe") return bpe(stored.bpe(), source);
  if (kind == "bytes") return bytes(stored.texts("special"));
  if (kind != "character") throw stored.refuse(fmt::format("is of the unknown kind \"{}\"", printable(kind)));
  return Tokenizer(std::make_shared<Model>(Model{Characters(stored.characters()), stored.texts("special")}));
}

}  // namespace weft::language_model
