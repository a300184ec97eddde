// SPDX-License-Identifier: Apache-2.0
//
// Tokenisers of all kinds that are read from a tokenizer.json, against recorded results of the tokenizers library
// (make_kinds.py): ids and decoded text of 1,050 odd texts, also as they are stored and exported, and token by token.
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/text.hpp"
#include "language_model/tokenizer/parallel_encode.hpp"
#include "language_model/tokenizer/tokenizer.hpp"
#include "tests/scratch.hpp"

namespace weft::language_model {
namespace {

using nlohmann::json;
using Ids = std::vector<std::uint32_t>;

const json& recorded() {
  static const json all = [] {
    std::ostringstream text;
    text << std::ifstream(std::string(FIXTURES) + "/kinds.json", std::ios::binary).rdbuf();
    return json::parse(text.str());
  }();
  return all;
}

json file_of(const json& kind) {
  json file = recorded().at("bases").at(kind.at("base").get<std::string>());
  file.update(kind.at("keys"));
  file["model"].update(kind.at("model"));
  return file;
}

/// FNV-1a of 32 bits, as make_kinds.py has it.
std::string hash_of(std::string_view text) {
  std::uint32_t value = 0x811c9dc5;
  for (const char byte : text) value = (value ^ static_cast<unsigned char>(byte)) * 0x01000193;
  return fmt::format("{:08x}", value);
}

std::string hash_of(const Ids& ids) {
  std::string text;
  for (const std::uint32_t id : ids) text += (text.empty() ? "" : " ") + std::to_string(id);
  return hash_of(text);
}

}  // namespace

TEST_CASE("ids and decoded texts are those of the tokenizers library") {
  REQUIRE(recorded().at("texts").size() >= 1000);
  REQUIRE(recorded().at("kinds").size() == 17);
  for (const auto& [name, kind] : recorded()["kinds"].items()) {
    const json file = file_of(kind);
    const Tokenizer tokenizer = Tokenizer::from_text(file.dump(), name);
    const Tokenizer stored = Tokenizer::from_text(tokenizer.stored_text(), "stored"),
                    exported = Tokenizer::from_text(tokenizer.huggingface_text(), "exported");
    CHECK(stored.stored_text() == tokenizer.stored_text());
    CHECK(exported.stored_text() == tokenizer.stored_text());
    CHECK(Tokenizer::from_text(tokenizer.text(), "text").text() == tokenizer.text());
    if (name != "flags") CHECK(json::parse(tokenizer.huggingface_text()) == file);
    const std::string ids_recorded = kind.at("ids"), decoded_recorded = kind.at("decoded");
    int wrong = 0;
    for (std::size_t i = 0; i < recorded()["texts"].size(); ++i) {
      const std::string text = recorded()["texts"][i];
      const Ids ids = tokenizer.encode(text);
      const std::string decoded = tokenizer.detokenise(ids);
      std::string grown;
      for (std::size_t at = 0; at < ids.size(); ++at)
        grown += tokenizer.detokenise(std::span(ids).subspan(at, 1), at > 0);
      const bool as_recorded = hash_of(ids) == ids_recorded.substr(8 * i, 8);
      const bool decoded_as_recorded = hash_of(decoded) == decoded_recorded.substr(8 * i, 8);
      if (as_recorded && decoded_as_recorded && grown == decoded && stored.encode(text) == ids) continue;
      if (++wrong > 8) continue;
      CAPTURE(name);
      CAPTURE(i);
      CAPTURE(printable(text));
      CAPTURE(json(ids).dump());
      CAPTURE(printable(decoded));
      CHECK(as_recorded);
      CHECK(decoded_as_recorded);
      CHECK(grown == decoded);
      CHECK(stored.encode(text) == ids);
    }
    CAPTURE(name);
    CHECK(wrong == 0);
  }
}

TEST_CASE("texts that are cut for several threads have the ids of the whole") {
  std::string text;
  for (const json& one : recorded().at("texts")) text += one.get<std::string>() + " of the, x ";
  for (const auto& [name, kind] : recorded().at("kinds").items()) {
    const Tokenizer tokenizer = Tokenizer::from_text(file_of(kind).dump(), name);
    const std::string_view whole = text;
    CAPTURE(name);
    CHECK(encode_parallel(tokenizer, text, std::span(&whole, 1), "text", 2, 100).front() == tokenizer.encode(text));
    // Where a part of the tokeniser may join what is cut, the text stays whole.
    const bool cuts = name == "bert" || name == "bert_cased";
    if (cuts) CHECK((tokenizer.parts(text, 100).size() > 10));
    if (name == "llama" || name == "flags" || name == "t5") CHECK(tokenizer.parts(text, 100).size() == 1);
  }
}

TEST_CASE("what is wrong in a part of a tokenizer.json is an error that names it") {
  const auto refusal = [](const char* name, const std::function<void(json&)>& change) {
    json file = file_of(recorded().at("kinds").at(name));
    change(file);
    return testing::refusal(ExitCode::data, [&] { Tokenizer::from_text(file.dump(), "f.json"); });
  };
  struct Case {
    const char* kind;
    std::function<void(json&)> change;
    const char* named;
  };
  const Case cases[] = {
      {"llama",
       [](json& j) {
         j["normalizer"] = {{"type", "Nmt"}};
       },
       "the normaliser \"Nmt\""},
      {"llama", [](json& j) { j["normalizer"]["normalizers"][1]["extra"] = 1; }, "normalizer.extra"},
      {"llama",
       [](json& j) {
         j["normalizer"]["normalizers"][1]["pattern"] = {{"Regex", "^ "}};
       },
       "\"^\""},
      {"llama", [](json& j) { j["normalizer"]["normalizers"][0]["prepend"] = std::string(300, 'x'); }, "300 bytes"},
      {"llama", [](json& j) { j["normalizer"] = 3; }, "normalizer"},
      {"llama", [](json& j) { j["model"]["byte_fallback"] = "yes"; }, "\"model.byte_fallback\" is neither"},
      {"llama", [](json& j) { j["model"]["unk_token"] = "<none>"; }, "the unk_token \"<none>\""},
      {"llama", [](json& j) { j["model"]["type"] = "WordLevel"; }, "a model of type WordLevel"},
      {"llama", [](json& j) { j["model"]["vocab"]["zz"] = 1u << 30; }, "the id of \"zz\""},
      {"llama",
       [](json& j) {
         j["decoder"]["decoders"].push_back({{"type", "Metaspace"}, {"replacement", "x"}});
       },
       "the decoder \"Metaspace\" after Fuse"},
      {"llama", [](json& j) { j["decoder"]["decoders"][3]["start"] = 2; }, "Strip after Fuse"},
      {"llama",
       [](json& j) {
         j["decoder"] = {{"type", "CTC"}};
       },
       "the decoder \"CTC\""},
      {"llama",
       [](json& j) {
         j["decoder"] = {{"type", "ByteLevel"}};
       },
       "the decoder \"ByteLevel\""},
      {"llama", [](json& j) { j["added_tokens"][0]["id"] = 700; }, "\"<pad>\" has the id 700"},
      {"llama_first", [](json& j) { std::swap(j["added_tokens"][4]["id"], j["added_tokens"][5]["id"]); },
       "the tokenizers library gives it"},
      {"llama_first", [](json& j) { j["added_tokens"][4]["lstrip"] = 1; }, "\"added_tokens.lstrip\" is neither"},
      {"llama_first", [](json& j) { j["pre_tokenizer"]["prepend_scheme"] = "last"; }, "the prepend_scheme \"last\""},
      {"llama_first", [](json& j) { j["pre_tokenizer"]["replacement"] = "ab"; }, "not one character"},
      {"llama_first",
       [](json& j) {
         j["pre_tokenizer"] = {{"type", "UnicodeScripts"}};
       },
       "the pre-tokeniser \"UnicodeScripts\""},
      {"nfkc_lowercase",
       [](json& j) {
         j["added_tokens"].push_back(j["added_tokens"].back());
         j["added_tokens"].back()["content"] = "ＬＯＲＤ";
         j["added_tokens"].back()["id"] = j["added_tokens"].back()["id"].get<int>() + 1;
       },
       "is equal to another one when normalised"},
      {"gemma", [](json& j) { j["pre_tokenizer"]["behavior"] = "Mixed"; }, "the behavior \"Mixed\""},
      {"t5", [](json& j) { j["model"]["unk_id"] = 4000; }, "\"model.unk_id\" is not an integer in [0, "},
      {"t5", [](json& j) { j["model"]["vocab"][7] = "x"; }, "an entry 7 that is not a token and its score"},
      {"t5", [](json& j) { j["model"]["vocab"][7][0] = ""; }, "id 7 has an empty token"},
      {"t5", [](json& j) { j["model"]["alpha"] = 0.1; }, "the key \"model.alpha\""},
      {"precompiled", [](json& j) { j["normalizer"]["normalizers"][0]["precompiled_charsmap"] = "AA=A"; }, "base64"},
      {"precompiled", [](json& j) { j["normalizer"]["normalizers"][0]["precompiled_charsmap"] = "AAAAAQ=="; },
       "shorter than its trie"},
      {"bert", [](json& j) { j["model"]["unk_token"] = "[X]"; }, "the unk_token \"[X]\""},
      {"bert", [](json& j) { j["model"]["max_input_chars_per_word"] = -1; }, "max_input_chars_per_word"},
      {"qwen", [](json& j) { j["model"]["byte_fallback"] = true; }, "byte_fallback with a ByteLevel"}};
  for (const Case& one : cases) {
    const std::string message = refusal(one.kind, one.change);
    CAPTURE(message);
    CAPTURE(one.named);
    CHECK(message.starts_with("f.json: "));
    CHECK(message.find(one.named) != std::string::npos);
  }
}

TEST_CASE("characters without a token are an error that names their place") {
  json file = file_of(recorded().at("kinds").at("gemma"));
  file["model"]["byte_fallback"] = false;
  file["model"]["unk_token"] = nullptr;
  const auto refusal = [&](const char* text) {
    const Tokenizer tokenizer = Tokenizer::from_text(file.dump(), "f.json");
    return testing::refusal(ExitCode::data, [&] { tokenizer.encode(text, "text.txt", 100); });
  };
  CHECK(refusal("the <s>\u4e2d").starts_with("text.txt: byte 107 or later: \"\u4e2d\" has no token"));
  file["normalizer"] = nullptr;
  CHECK(refusal("the\u4e2d").starts_with("text.txt: byte 103: \"\u4e2d\" has no token"));
  // A normaliser of a damaged file must not fill the memory.
  const std::string long_text(200, 'x');
  for (int i = 0; i < 3; ++i)
    file["normalizer"]["normalizers"].push_back(
        {{"type", "Replace"}, {"pattern", {{"String", "x"}}}, {"content", long_text}});
  file["normalizer"]["type"] = "Sequence";
  CHECK(refusal(long_text.c_str()).find("more than 64 times as long") != std::string::npos);
}

}  // namespace weft::language_model
