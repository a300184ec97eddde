// SPDX-License-Identifier: Apache-2.0
//
// Byte-pair encoding: the golden of the definition, training against a recount of all pairs per merge, encoding against
// the plain rule, and imported models against recorded results of the tokenizers library (make_fixtures.py).

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/text.hpp"
#include "kernels/random.hpp"
#include "language_model/tokenizer/byte_level_bpe.hpp"
#include "language_model/tokenizer/parallel_encode.hpp"
#include "language_model/tokenizer/tokenizer.hpp"
#include "tests/scratch.hpp"

namespace weft::language_model {
namespace {

using Ids = std::vector<std::uint32_t>;
using Merges = std::vector<std::pair<std::uint32_t, std::uint32_t>>;

std::string read(const std::string& name) {
  std::ostringstream text;
  text << std::ifstream(std::string(FIXTURES) + "/" + name, std::ios::binary).rdbuf();
  return text.str();
}

ByteLevelBpe trained_on(std::string_view text, std::int64_t size, std::string_view pattern = "gpt2") {
  PieceCounts counts(pattern);
  counts.add(text, "text");
  return train_bpe(counts, size, {});
}

std::vector<std::string> pieces_of(std::string_view text, std::string_view pattern) {
  std::vector<std::string> pieces;
  Splitter(pattern).split({text}, {"text", text}, [&](const Piece& piece) { pieces.emplace_back(piece.text); });
  return pieces;
}

/// Random text of few letters, so that pairs overlap and repeat.
std::string random_text(std::uint64_t seed, std::size_t n, std::string_view letters) {
  std::string text;
  for (std::size_t i = 0; i < n; ++i)
    text += letters[kernels::uniform_below(kernels::philox(seed, kernels::Purpose::test, 0, i), letters.size())];
  return text;
}

void join(Ids& ids, std::uint32_t left, std::uint32_t right, std::uint32_t result) {
  Ids out;
  for (std::size_t i = 0; i < ids.size(); ++i)
    if (i + 1 < ids.size() && ids[i] == left && ids[i + 1] == right) {
      out.push_back(result);
      ++i;
    } else {
      out.push_back(ids[i]);
    }
  ids = out;
}

/// The definition of training: all pairs are counted again for each merge.
Merges plain_training(std::string_view text, std::size_t n_merges, std::string_view pattern) {
  std::map<std::string, std::uint32_t> id_of;
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) {
    tokens.emplace_back(1, static_cast<char>(byte));
    id_of[tokens.back()] = static_cast<std::uint32_t>(byte);
  }
  std::vector<Ids> pieces;
  for (const std::string& piece : pieces_of(text, pattern)) {
    pieces.emplace_back();
    for (const char byte : piece) pieces.back().push_back(static_cast<unsigned char>(byte));
  }
  Merges merges;
  while (tokens.size() < 256 + n_merges) {
    std::map<std::pair<std::uint32_t, std::uint32_t>, std::int64_t> counts;
    for (const Ids& ids : pieces)
      for (std::size_t i = 0; i + 1 < ids.size(); ++i) ++counts[{ids[i], ids[i + 1]}];
    if (counts.empty()) break;
    auto best = counts.begin();  // in the order of (left, right)
    for (auto pair = counts.begin(); pair != counts.end(); ++pair)
      if (pair->second > best->second) best = pair;
    const auto [left, right] = best->first;
    const auto [token, fresh] = id_of.emplace(tokens[left] + tokens[right], tokens.size());
    if (fresh) tokens.push_back(token->first);
    if (std::find(merges.begin(), merges.end(), best->first) == merges.end()) merges.push_back(best->first);
    for (Ids& ids : pieces) join(ids, left, right, token->second);
  }
  return merges;
}

/// The rule of encoding: join the leftmost pair of the lowest rank until there is none.
Ids plain_encoding(const ByteLevelBpe& parts, std::string_view text) {
  std::map<std::string, std::uint32_t> id_of;
  for (std::uint32_t id = 0; id < parts.model.tokens.size(); ++id) id_of[parts.model.tokens[id]] = id;
  Ids all;
  for (const std::string& piece : pieces_of(text, parts.splits.at(0).pattern)) {
    Ids ids;
    for (const char byte : piece) ids.push_back(id_of.at(std::string(1, byte)));
    for (;;) {
      std::size_t rank = parts.model.merges.size(), at = 0;
      for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
        const auto found =
            std::find(parts.model.merges.begin(), parts.model.merges.end(), std::pair(ids[i], ids[i + 1]));
        const auto here = static_cast<std::size_t>(found - parts.model.merges.begin());
        if (here < rank) {
          rank = here;
          at = i;
        }
      }
      if (rank == parts.model.merges.size()) break;
      const auto next = ids.begin() + static_cast<std::ptrdiff_t>(at);
      *next = id_of.at(parts.model.tokens[ids[at]] + parts.model.tokens[ids[at + 1]]);
      ids.erase(next + 1);
    }
    all.insert(all.end(), ids.begin(), ids.end());
  }
  return all;
}

template <class Function>
std::string message_of(Function&& function) {
  return testing::refusal(ExitCode::data, function);
}

}  // namespace

TEST_CASE("three merges on aaabdaaabac") {
  const ByteLevelBpe parts = trained_on("aaabdaaabac", 259);
  CHECK(parts.model.merges == Merges{{97, 97}, {97, 98}, {256, 257}});
  CHECK(Tokenizer::bpe(parts, "trained").encode("aaabdaaabac", "text") == Ids{258, 100, 258, 97, 99});
}

TEST_CASE("training gives the merges of a recount per merge, encoding those of the plain rule") {
  for (std::uint64_t seed = 0; seed < 12; ++seed)
    for (const std::string_view letters : {"ab", "abc ", "aab \n1é", "abcdefgh  "}) {
      // Some letters are single bytes of "é": the texts are not all valid UTF-8, so its bytes come from whole
      // characters.
      std::string text = random_text(seed, 300, letters);
      if (first_invalid(text) != text.npos)
        for (char& byte : text)
          if ((byte & 0x80) != 0) byte = 'z';
      const ByteLevelBpe parts = trained_on(text, 256 + 60);
      REQUIRE(parts.model.merges == plain_training(text, 60, "gpt2"));
      const Tokenizer encoder = Tokenizer::bpe(parts, "trained");
      const std::string other = random_text(seed + 100, 200, "abc ") + text;
      REQUIRE(encoder.encode(text, "text") == plain_encoding(parts, text));
      REQUIRE(encoder.encode(other, "text") == plain_encoding(parts, other));
    }
}

TEST_CASE("a vocabulary is smaller than asked for if no pair is left") {
  const ByteLevelBpe parts = trained_on("abab", 1000);
  CHECK(parts.model.tokens.size() == 258);  // ab, abab
  CHECK(Tokenizer::bpe(parts, "trained").encode("abab", "text") == Ids{257});
}

TEST_CASE("encoding with several threads gives the ids of one") {
  // White space of every kind beside letters, digits, punctuation and added tokens: cuts must fall between pieces.
  std::string text;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    text += random_text(seed, 60, "ab 1.\n' \ts\r");
    text += seed % 3 == 0 ? "\u00e9 caf\u00e9 12345 \u4e2d" : " don't  <|endoftext|> x";
  }
  std::vector<Tokenizer> tokenizers;
  for (const std::string name : {"gpt2", "llama3"})
    tokenizers.push_back(Tokenizer::from_text(read(name + ".json"), name));
  ByteLevelBpe other = trained_on(text, 300);
  other.splits = {{"[^ ]+ "}};  // a piece has the space after it: never cut
  tokenizers.push_back(Tokenizer::bpe(other, "other"));
  tokenizers.push_back(Tokenizer::characters_of(text, {}, "text"));
  tokenizers.push_back(Tokenizer::bytes({}));
  for (const Tokenizer& tokenizer : tokenizers) {
    const std::string_view all = text;
    const std::size_t border = text.find(' ', 900);
    const std::vector<std::string_view> documents{all.substr(0, border), all.substr(border, 0), all.substr(border)};
    for (const std::size_t bytes : {1, 7, 64, 5000}) {
      const auto ids = encode_parallel(tokenizer, text, documents, "text", 3, bytes);
      REQUIRE(ids.size() == documents.size());
      for (std::size_t i = 0; i < ids.size(); ++i) CHECK(ids[i] == tokenizer.encode(documents[i]));
    }
    CHECK((tokenizer.parts(text, 64).size() > 10) == (&tokenizer != &tokenizers[2]));
  }
  // The first problem is named, wherever the threads are.
  const std::string bad = std::string(500, 'a') + " b \xff c" + std::string(500, 'a') + " \xfe";
  const std::string_view whole = bad;
  CHECK(message_of([&] {
          encode_parallel(tokenizers[0], bad, std::span(&whole, 1), "bad.txt", 3, 16);
        }).find("bad.txt: byte 503") == 0);
}

TEST_CASE("imported models give the pieces and ids of the tokenizers library") {
  const nlohmann::json expected = nlohmann::json::parse(read("expected.json"));
  for (const std::string name : {"gpt2", "llama3"}) {
    const Tokenizer tokenizer = Tokenizer::from_text(read(name + ".json"), name);
    const Tokenizer stored = Tokenizer::from_text(tokenizer.text(), "stored");
    CHECK(stored.text() == tokenizer.text());
    const nlohmann::json& model = expected.at("models").at(name);
    for (std::size_t i = 0; i < expected.at("texts").size(); ++i) {
      const std::string text = expected["texts"][i];
      CAPTURE(name);
      CAPTURE(printable(text));
      CHECK(pieces_of(text, name) == model.at("pieces")[i].get<std::vector<std::string>>());
      CHECK(tokenizer.encode(text) == model.at("ids")[i].get<Ids>());
      CHECK(stored.encode(text) == tokenizer.encode(text));
      CHECK(tokenizer.detokenise(tokenizer.encode(text)) == text);
    }
    CHECK(tokenizer.special("<|endoftext|>") >= 0);
    CHECK(tokenizer.special("EOS") == -1);
  }
}

TEST_CASE("random text of all kinds of characters survives encoding and decoding") {
  const Tokenizer tokenizer = Tokenizer::from_text(read("llama3.json"), "llama3");
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::string text;
    for (std::uint64_t i = 0; i < 60; ++i) {
      const auto random = kernels::philox(seed, kernels::Purpose::test, 1, i);
      constexpr long limits[] = {0x80, 0x80, 0x800, 0x3100, 0x10000, 0x110000};
      long code = static_cast<long>(random.word[2] % static_cast<unsigned long>(limits[random.word[3] % 6]));
      if (code >= 0xd800 && code < 0xe000) code = ' ';
      append_character(text, code);
    }
    for (const char* pattern : {"gpt2", "llama3"}) {
      std::string joined;
      for (const std::string& piece : pieces_of(text, pattern)) joined += piece;
      REQUIRE(joined == text);
    }
    REQUIRE(tokenizer.detokenise(tokenizer.encode(text)) == text);
  }
}

TEST_CASE("long runs of one character take little time and memory") {
  const Tokenizer encoder = Tokenizer::bpe(trained_on("aaaaaaaaaaaaaaaa   bbbb", 262), "trained");
  for (const char letter : {'a', ' ', '\n', '!', 'q'}) {
    const std::string text(std::size_t{1} << 20, letter);
    const Ids ids = encoder.encode(text, "text");
    CHECK(encoder.detokenise(ids) == text);
    CHECK(pieces_of(text, "llama3").size() == 1);
  }
  CHECK(trained_on(std::string(std::size_t{1} << 18, 'a'), 270).model.merges.size() == 14);
}

TEST_CASE("a pattern that exceeds PCRE2's limits, or is none, is refused") {
  CHECK(message_of([] { Splitter("a{1,70000}"); }).find("cannot be compiled") != std::string::npos);
  CHECK(message_of([] {
          const std::string text = std::string(64, 'a') + "b";
          Splitter("(a+)+[cd]").split({text}, {"text.txt", text, 7}, [](const Piece&) {});
        }).starts_with("text.txt: the splitting pattern \"(a+)+[cd]\" fails at byte 7"));
}

TEST_CASE("parts of a pattern that mean something else to Oniguruma, or are not known, are refused by name") {
  for (const auto& [pattern, part] :
       std::initializer_list<std::pair<const char*, const char*>>{{"(a", "\"(\" without its"},
                                                                  {"a)", "\")\" too many"},
                                                                  {"[a", "\"[\" without its"},
                                                                  {"\\C", "\"\\C\""},
                                                                  {"\\bfoo", "\"\\b\""},
                                                                  {"^a", "\"^\""},
                                                                  {"(a)\\1", "\"\\1\""},
                                                                  {"(?i)abc", "\"(?i)\""},
                                                                  {"(?x: a)", "\"(?x:\""},
                                                                  {"(?<name>a)", "\"(?<n\""},
                                                                  {"[[:alpha:]]", "\"[:\""},
                                                                  {"[a&&]", "\"&&\""},
                                                                  {"[\\w-x]", "\"-x\""},
                                                                  {"\\p{Alpha}", "\"\\p{Alpha}\""},
                                                                  {"\\pL", "\"\\pL\""},
                                                                  {"\\xff", "\"\\xff\""},
                                                                  {"a{x}", "\"{x}\""},
                                                                  {"(?i:ss)", "ligatures"},
                                                                  {"(?i:[^s])", "a class in (?i:"},
                                                                  {"(?i:\\p{Lu})", "a class in (?i:"},
                                                                  {"x*", "can match no character"}}) {
    const std::string message = message_of([&, text = pattern] { Splitter{text}; });
    CAPTURE(pattern);
    CAPTURE(message);
    CHECK(message.starts_with("the splitting pattern \"" + std::string(pattern) + "\" "));
    CHECK(message.find(part) != std::string::npos);
  }
}

TEST_CASE("variants of a tokenizer.json give the ids of the tokenizers library, also as they are stored and exported") {
  using json = nlohmann::json;
  const json recorded = json::parse(read("variants.json")), base = json::parse(read("gpt2.json"));
  REQUIRE(recorded.at("variants").size() == 20);
  for (const auto& [name, variant] : recorded.at("variants").items()) {
    CAPTURE(name);
    json file = base;
    file.update(variant.at("changes"));
    const Tokenizer tokenizer = Tokenizer::from_text(file.dump(), name);
    const Tokenizer stored = Tokenizer::from_text(tokenizer.stored_text(), "stored"),
                    exported = Tokenizer::from_text(tokenizer.huggingface_text(), "exported");
    CHECK(stored.stored_text() == tokenizer.stored_text());
    CHECK(exported.stored_text() == tokenizer.stored_text());
    const json& with = variant.contains("with_special_tokens") ? variant["with_special_tokens"] : variant.at("ids");
    CHECK(variant.contains("with_special_tokens") == !tokenizer.begin().empty());
    for (std::size_t i = 0; i < recorded["texts"].size(); ++i) {
      const std::string text = recorded["texts"][i];
      for (const Tokenizer& one : {tokenizer, stored, exported}) {
        Ids ids = one.encode(text);
        CHECK(ids == variant.at("ids")[i].get<Ids>());
        CHECK(one.adding_special_tokens(false).with_begin(ids) == ids);
        CHECK(one.adding_special_tokens(false).end().empty());
        ids = one.with_begin(ids);
        CHECK(one.with_begin(ids) == ids);  // not twice
        ids.insert(ids.end(), one.end().begin(), one.end().end());
        CHECK(ids == with[i].get<Ids>());
      }
      CHECK(tokenizer.detokenise(tokenizer.encode(text)) == text);
    }
  }
}

TEST_CASE("characters and bytes are exported as files of which the tokenizers library makes the same ids") {
  using json = nlohmann::json;
  const json recorded = json::parse(read("variants.json"));
  std::string corpus;
  for (const std::string text : recorded["texts"]) corpus += text;
  const auto check = [&](const Tokenizer& tokenizer) {
    const json& own = recorded["own"].at(std::string(tokenizer.kind()));
    CHECK(json::parse(tokenizer.huggingface_text()) == own.at("file"));
    for (std::size_t i = 0; i < own["texts"].size(); ++i)
      CHECK(tokenizer.encode(own["texts"][i].get<std::string>()) == own["ids"][i].get<Ids>());
  };
  check(Tokenizer::characters_of(corpus, {"UNK", "EOS"}, "corpus"));
  check(Tokenizer::bytes({"EOS"}));
}

TEST_CASE("what an import does not support is refused by name") {
  const nlohmann::json good = nlohmann::json::parse(read("gpt2.json"));
  const auto refusal = [&](const std::function<void(nlohmann::json&)>& change) {
    nlohmann::json file = good;
    change(file);
    return message_of([&] { Tokenizer::from_text(file.dump(), "f.json"); });
  };
  using json = nlohmann::json;
  CHECK_NOTHROW(Tokenizer::from_text(good.dump(), "f.json"));
  CHECK(refusal([](json& j) {
          j["normalizer"] = {{"type", "Nmt"}};
        }).starts_with("f.json: has the normaliser \"Nmt\" (not supported); if the texts are normalised already"));
  CHECK(refusal([](json& j) {
          j["pre_tokenizer"] = {{"type", "UnicodeScripts"}};
        }) == "f.json: has the pre-tokeniser \"UnicodeScripts\" (not supported)");
  CHECK(refusal([](json& j) { j["pre_tokenizer"] = nullptr; }).find("decoder \"ByteLevel\"") != std::string::npos);
  CHECK(refusal([](json& j) { j["model"]["type"] = "Unigram"; }).find("model of type Unigram") != std::string::npos);
  CHECK(refusal([](json& j) { j["model"]["byte_fallback"] = true; }).find("byte_fallback") != std::string::npos);
  CHECK(refusal([](json& j) { j["model"]["dropout"] = 0.1; }).find("dropout") != std::string::npos);
  CHECK(refusal([](json& j) { j["model"]["end_of_word_suffix"] = "</w>"; }).find("end_of_word_suffix") !=
        std::string::npos);
  CHECK(refusal([](json& j) { j["model"].erase("merges"); }).find("\"model.merges\" is missing") != std::string::npos);
  CHECK(refusal([](json& j) { j["model"]["merges"][5] = "x yz"; }).find("merge 5 joins") != std::string::npos);
  CHECK(refusal([](json& j) { j["model"]["merges"][5] = 3; }).find("merge 5 joins") != std::string::npos);
  CHECK(refusal([](json& j) { j["model"]["merges"][5] = j["model"]["merges"][4]; }).find("merge 5 of") !=
        std::string::npos);
  CHECK(refusal([](json& j) { j["model"]["vocab"]["a"] = 1u << 21; }).find("ids have no gaps") != std::string::npos);
  CHECK(refusal([](json& j) { j["model"]["vocab"]["a"] = -1; }).find("not an integer") != std::string::npos);
  CHECK(refusal([](json& j) { j["model"]["vocab"]["a"] = j["model"]["vocab"]["b"]; }).find("has two tokens") !=
        std::string::npos);
  CHECK(refusal([](json& j) { j["model"]["vocab"].erase("Ġ"); }).starts_with("f.json: "));
  CHECK(refusal([](json& j) { j["model"]["vocab"]["▁x"] = 700; }).find("alphabet of bytes") != std::string::npos);
  // Every key is known or refused.
  CHECK(refusal([](json& j) { j["extra"] = 1; }) ==
        "f.json: has the key \"extra\" (not known; it could change the ids)");
  CHECK(refusal([](json& j) { j["model"]["extra"] = 1; }).find("the key \"model.extra\"") != std::string::npos);
  CHECK(refusal([](json& j) {
          j["decoder"] = {{"type", "Metaspace"}};
        }).find("the decoder \"Metaspace\"") != std::string::npos);
  CHECK(refusal([](json& j) {
          j["post_processor"] = {{"type", "Other"}};
        }).find("the post-processor \"Other\"") != std::string::npos);
  CHECK(refusal([](json& j) {
          j["post_processor"] = {{"type", "RobertaProcessing"}, {"cls", {"<s>", 5000}}, {"sep", {"</s>", 1}}};
        }).find("begins or ends with the id 5000 of 700 tokens") != std::string::npos);
  const auto split = [](const char* pattern, const char* behavior, bool invert) {
    return json{{"type", "Sequence"},
                {"pretokenizers",
                 {{{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", behavior}, {"invert", invert}},
                  {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  };
  CHECK(refusal([&](json& j) {
          j["pre_tokenizer"] = split("\\ba", "Isolated", false);
        }).starts_with("f.json: the splitting pattern \"\\ba\" has \"\\b\""));
  CHECK(refusal([](json& j) {
          j["added_tokens"].push_back({{"id", 600}, {"content", "th"}});
        }).find("added token \"th\" has the id 600, in the vocabulary ") != std::string::npos);
  CHECK(refusal([](json& j) {
          j["added_tokens"].push_back({{"id", j["model"]["vocab"]["Ġ"]}, {"content", "Ġ"}});
        }).find("added token \"Ġ\" stands for other bytes") != std::string::npos);
  // Bytes without a token are errors of texts that have them; Split Removed would leave text out.
  json file = good;
  file["pre_tokenizer"] = split("[a-z ]+", "Removed", true);
  CHECK(message_of([&] {
          Tokenizer::from_text(file.dump(), "f.json").encode("two words.", "text.txt", 100);
        }).starts_with("text.txt: byte 109: \".\" is matched by no part"));
  ByteLevelBpe parts = trained_on("abab", 258);
  parts.model.tokens[3] = "aba";
  CHECK(message_of([&] {
          Tokenizer::bpe(parts, "m").encode("abab a\x03", "text.txt", 10);
        }).starts_with("text.txt: byte 16 is 0x03, which has no token"));
}

TEST_CASE("damaged stored models are refused") {
  const nlohmann::json good = nlohmann::json::parse(Tokenizer::bpe(trained_on("abcabcab", 258), "t").text());
  const auto refusal = [&](const std::function<void(nlohmann::json&)>& change) {
    nlohmann::json file = good;
    change(file);
    return message_of([&] { Tokenizer::from_text(file.dump(), "f.json"); });
  };
  using json = nlohmann::json;
  CHECK_NOTHROW(Tokenizer::from_text(good.dump(), "f.json"));
  CHECK(refusal([](json& j) { j["tokens"]['z'] = "abc"; }).find("byte 0x7a has no token") != std::string::npos);
  CHECK(refusal([](json& j) { j["tokens"][256] = "▁"; }).find("token 256 is not in the alphabet") != std::string::npos);
  CHECK(refusal([](json& j) { j["tokens"][257] = j["tokens"][256]; }).starts_with("f.json: "));
  CHECK(refusal([](json& j) { j["merges"][0][1] = 258; }).find("not an integer in [0, 258)") != std::string::npos);
  CHECK(refusal([](json& j) { j["merges"][1] = {97, 97}; }).find("makes no token") != std::string::npos);
  CHECK(refusal([](json& j) {
          j["added"] = {{{"id", 97}, {"content", "x"}}};
        }).find("added token 97") != std::string::npos);
  CHECK(refusal([](json& j) { j["pattern"] = "["; }).find("without its \"]\"") != std::string::npos);
  CHECK(refusal([](json& j) { j["pattern"] = {"gpt2"}; }).find("\"pattern\" has an entry") != std::string::npos);
  CHECK(refusal([](json& j) { j["begin"] = {258}; }).find("id 258 of 258 tokens") != std::string::npos);
  CHECK(refusal([](json& j) { j["files"] = {{"../x", "y"}}; }).find("\"files\" are not") != std::string::npos);
}

}  // namespace weft::language_model
