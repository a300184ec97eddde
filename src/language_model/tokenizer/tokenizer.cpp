// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/tokenizer.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <variant>

#include "base/error.hpp"
#include "base/text.hpp"

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

void require_valid(std::string_view text, std::string_view source) {
  if (const std::size_t at = first_invalid(text); at != text.npos)
    throw error(ExitCode::data,
                "{}: byte {} (0x{:02x}) is not valid UTF-8; convert the text, or take data.tokens = \"bytes\"", source,
                at, static_cast<unsigned char>(text[at]));
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

struct Tokenizer::Model {
  std::variant<Characters, Bytes> kind;
  std::vector<std::string> special;  // ids follow those of the text

  std::size_t ordinary() const {
    const auto* characters = std::get_if<Characters>(&kind);
    return characters != nullptr ? characters->codes.size() : 256;
  }
};

Tokenizer Tokenizer::characters_of(std::string_view corpus, const std::vector<std::string>& special,
                                   std::string_view source) {
  require_valid(corpus, source);
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

std::string_view Tokenizer::kind() const {
  return std::holds_alternative<Characters>(model_->kind) ? "character" : "bytes";
}

std::int64_t Tokenizer::vocabulary_size() const {
  return static_cast<std::int64_t>(model_->ordinary() + model_->special.size());
}

std::int64_t Tokenizer::special(std::string_view name) const {
  const auto found = std::find(model_->special.begin(), model_->special.end(), name);
  if (found == model_->special.end()) return -1;
  return static_cast<std::int64_t>(model_->ordinary()) + (found - model_->special.begin());
}

std::vector<std::uint32_t> Tokenizer::encode(std::string_view text, std::string_view source) const {
  std::vector<std::uint32_t> ids;
  if (std::holds_alternative<Bytes>(model_->kind)) {
    ids.reserve(text.size());
    for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
    return ids;
  }
  require_valid(text, source);
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
          source, at, code_point_text(text.substr(at, next.bytes), next.code), characters.codes.size());
    ids.push_back(static_cast<std::uint32_t>(id));
    at += next.bytes;
  }
  return ids;
}

std::string Tokenizer::decode(std::span<const std::uint32_t> ids) const {
  std::string text;
  const std::int64_t unknown = special("UNK");
  const auto* const characters = std::get_if<Characters>(&model_->kind);
  for (const std::uint32_t id : ids) {
    if (id >= static_cast<std::uint64_t>(vocabulary_size()))
      throw error(ExitCode::data, "token {} is not in the vocabulary of {}", id, vocabulary_size());
    if (id >= model_->ordinary()) {
      if (static_cast<std::int64_t>(id) == unknown) append_character(text, kReplacement);
    } else if (characters != nullptr) {
      append_character(text, characters->codes[id]);
    } else {
      text += static_cast<char>(id);
    }
  }
  return text;
}

std::string Tokenizer::text() const {
  json j{{"format", kFormat}, {"version", kVersion}, {"kind", kind()}, {"special", model_->special}};
  if (const auto* characters = std::get_if<Characters>(&model_->kind)) j["characters"] = characters->codes;
  return j.dump();
}

Tokenizer Tokenizer::from_text(std::string_view text, std::string_view source) {
  const json j = json::parse(text, nullptr, false);
  const auto refuse = [&](std::string_view why) {
    return error(ExitCode::data, "{}: {}; is it a tokeniser file, and complete?", source, why);
  };
  if (j.is_discarded() || !j.is_object()) throw refuse("is not a JSON object");
  const auto text_of = [&](const char* key) {
    const auto found = j.find(key);
    return found != j.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  if (text_of("format") != kFormat) throw refuse(fmt::format("has no \"format\": \"{}\"", kFormat));
  const auto version = j.find("version");
  if (version == j.end() || !version->is_number_integer() || *version != kVersion)
    throw refuse(fmt::format("is of a version other than {}", kVersion));
  std::vector<std::string> special;
  if (const auto symbols = j.find("special"); symbols != j.end()) {
    if (!symbols->is_array()) throw refuse("\"special\" is not a list");
    for (const json& symbol : *symbols) {
      if (!symbol.is_string()) throw refuse("\"special\" is not a list of names");
      special.push_back(symbol);
    }
  }
  const std::string kind = text_of("kind");
  if (kind == "bytes") return bytes(special);
  if (kind != "character") throw refuse(fmt::format("is of the unknown kind \"{}\"", printable(kind)));
  const auto characters = j.find("characters");
  if (characters == j.end() || !characters->is_array()) throw refuse("\"characters\" is missing");
  std::vector<long> codes;
  for (const json& code : *characters) {
    const long value = code.is_number_unsigned() && code < kCodePoints ? code.get<long>() : -1;
    if (value < 0 || (value >= 0xd800 && value <= 0xdfff) || (!codes.empty() && value <= codes.back()))
      throw refuse("\"characters\" are not ascending code points");
    codes.push_back(value);
  }
  return Tokenizer(std::make_shared<Model>(Model{Characters(std::move(codes)), std::move(special)}));
}

}  // namespace weft::language_model
