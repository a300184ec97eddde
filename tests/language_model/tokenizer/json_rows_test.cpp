// SPDX-License-Identifier: Apache-2.0
//
// Rows of JSON Lines: every form, every kind of bad line with its place, and which ids count in the loss.
#include "language_model/tokenizer/json_rows.hpp"

#include "language_model/tokenizer/encoded_rows.hpp"
#include "language_model/tokenizer/lines.hpp"
#include "tests/scratch.hpp"

namespace weft::language_model {
namespace {

using dataset::BadLines;
using testing::refusal;

std::vector<JsonRow> rows_of(std::string_view text, BadLines bad_lines = BadLines::stop) {
  JsonRowReader reader(text, "a.jsonl", bad_lines);
  std::vector<JsonRow> rows;
  for (JsonRow row; reader.next(row);) rows.push_back(row);
  return rows;
}

std::string message_of(const std::string& line) {
  return refusal(ExitCode::data, [&] { rows_of("{\"text\": \"x\"}\n" + line + "\n"); });
}

JsonRow row_of(JsonRow::Form form, const std::string& text, std::vector<std::size_t> borders) {
  return {form, text, std::move(borders), 1};
}

}  // namespace

TEST_CASE("rows of each form; blank lines, a byte order mark and \\r are left out") {
  const std::vector<JsonRow> rows = rows_of(
      "\xef\xbb\xbf{\"text\": \"a\\u00e9\\ud83d\\ude00\", \"id\": 7}\r\n\r\n   \n"
      "{\"completion\": \"c\", \"prompt\": \"pp\"}\n"
      "{\"segments\": [{\"text\": \"u\", \"loss\": false}, {\"text\": \"\", \"loss\": true}, {\"text\": \"v\", "
      "\"loss\": false},"
      "{\"text\": \"aa\", \"loss\": true}, {\"text\": \"b\", \"loss\": true}, {\"text\": \"w\", \"loss\": false}]}");
  REQUIRE(rows.size() == 3);
  CHECK(rows[0].text == "aé😀");
  CHECK(rows[0].borders == std::vector<std::size_t>{0});
  CHECK(rows[0].line == 1);
  CHECK(rows[1].text == "ppc");
  CHECK(rows[1].borders == std::vector<std::size_t>{2});
  CHECK(rows[1].line == 4);
  CHECK(rows[2].text == "uvaabw");
  CHECK(rows[2].borders == std::vector<std::size_t>{2, 5});
}

TEST_CASE("a bad line is an error with its place, or is left out and counted") {
  const std::pair<const char*, const char*> lines[] = {
      {"{\"text\": \"a\"", "a.jsonl:2: byte 13: "},
      {"{\"text\": \"\\ud800\"}", "a.jsonl:2: byte 17: invalid string: surrogate"},
      {"{\"text\": \"\\udc00x\"}", "a.jsonl:2: byte 16: invalid string: surrogate"},
      {"{\"text\": \"a\xff\"}", "a.jsonl:2: byte 12: invalid string: ill-formed UTF-8"},
      {"{\"text\": \"a\xed\xa0\x80\"}", "a.jsonl:2: byte 13: invalid string: ill-formed UTF-8"},
      {"{\"text\": \"a\"} {}", "a.jsonl:2: byte 15: "},
      {"[\"text\"]", "a.jsonl:2: not a JSON object"},
      {"{}", "a.jsonl:2: has no \"text\""},
      {"{\"prompt\": \"a\"}", "a.jsonl:2: has no \"text\""},
      {"{\"text\": 1}", "a.jsonl:2: \"text\" is not a string"},
      {"{\"text\": \"a\", \"segments\": []}", "has more than one"},
      {"{\"completion\": \"a\"}", "\"prompt\" is missing"},
      {"{\"prompt\": \"a\", \"completion\": null}", "\"completion\" is not a string"},
      {"{\"segments\": 1}", "\"segments\" is not a list"},
      {"{\"segments\": [{\"text\": \"a\"}]}", "a segment is not"},
      {"{\"segments\": [{\"text\": \"a\", \"loss\": 1}]}", "a segment is not"}};
  std::string all = "{\"text\": \"x\"}\n";
  for (const auto& [line, said] : lines) {
    INFO(line);
    CHECK(message_of(line).find(said) != std::string::npos);
    CHECK(message_of(line).find("data.bad_lines = \"skip\"") != std::string::npos);
    all += std::string(line) + "\n";
  }
  std::string many, deep;
  for (std::size_t i = 0; i <= kMostBorders; ++i)
    many += std::string(i == 0 ? "" : ",") + "{\"text\": \"a\", \"loss\": " + (i % 2 == 0 ? "true}" : "false}");
  for (int i = 0; i < 100; ++i) deep += "[";
  CHECK(message_of("{\"segments\": [" + many + "]}").find("begin or cease to count 4097 times") != std::string::npos);
  CHECK(message_of("{\"text\": " + deep).find("nested more than 64 levels") != std::string::npos);
  const std::string marked = refusal(ExitCode::data, [&] { rows_of("\xef\xbb\xbf{\"text\": \"\xff\"}"); });
  CHECK(marked.find("a.jsonl:1: byte 14: ") != std::string::npos);

  all += "{\"text\": \"y\"}";
  JsonRowReader reader(all, "a.jsonl", BadLines::skip);
  JsonRow row;
  REQUIRE(reader.next(row));
  REQUIRE(reader.next(row));
  CHECK(row.text == "y");
  CHECK(!reader.next(row));
  CHECK(reader.skipped() == std::ssize(lines));
  CHECK(reader.first_skipped().size() == 3);

  // A conversation is an error in any case, with the command that converts it.
  for (const char* line : {"{\"messages\": []}", "{\"prompt\": [], \"completion\": []}"})
    CHECK(refusal(ExitCode::data, [&] {
            rows_of(line, BadLines::skip);
          }).find("weft prepare a.jsonl --model DIRECTORY") != std::string::npos);
}

TEST_CASE("a row has the owner that a field names, as text; without one it is a bad line") {
  const auto owner_of = [](const std::string& value) {
    const std::string text = "{\"text\": \"x\", \"user\": \"a\"}\n{\"text\": \"y\"" + value + "}";
    JsonRowReader reader(text, "a.jsonl", BadLines::stop, "user");
    JsonRow row;
    const bool first = reader.next(row) && row.owner == "a";
    return first && reader.next(row) ? row.owner : "no row";
  };
  CHECK(owner_of(", \"user\": \"b c\"") == "b c");
  CHECK(owner_of(", \"user\": -7") == "-7");
  CHECK(owner_of(", \"user\": 18446744073709551615") == "18446744073709551615");
  const std::pair<const char*, const char*> lines[] = {
      {"", "a.jsonl:2: has no \"user\" (privacy.owner_field"},
      {", \"user\": \"\"", "a.jsonl:2: \"user\" is empty"},
      {", \"user\": null", "a.jsonl:2: \"user\" is not a string or an integer"},
      {", \"user\": 1.5", "a.jsonl:2: \"user\" is not a string or an integer"},
      {", \"user\": 18446744073709551616", "a.jsonl:2: \"user\" is not a string or an integer"},
      {", \"user\": [\"b\"]", "a.jsonl:2: \"user\" is not a string or an integer"}};
  for (const auto& [value, said] : lines)
    CHECK(refusal(ExitCode::data, [&, value = value] { owner_of(value); }).find(said) != std::string::npos);
}

TEST_CASE("a line of 100 MB is a row; one of more than 256 MiB is a bad line") {
  const std::string long_line = "{\"text\": \"" + std::string(100'000'000, 'a') + "\"}";
  const std::vector<JsonRow> rows = rows_of(long_line);
  REQUIRE(rows.size() == 1);
  CHECK(rows[0].text.size() == 100'000'000);
  const std::string too_long = std::string(kLongestLine + 1, ' ') + "{}\n{\"text\": \"b\"}";
  CHECK(rows_of(too_long, BadLines::skip).size() == 1);
}

TEST_CASE("ids that count: completions and their end, segments, and a token that joins both") {
  const Tokenizer bytes = Tokenizer::bytes({"BOS", "EOS"});
  SpecialTokens special;
  special.begin = {256};
  const Tokenizer tokenizer = bytes.with(special);
  PieceCache cache;
  const auto encoded = [&](const JsonRow& row) {
    return encode_row(tokenizer, end_symbol(tokenizer), row, "a", cache);
  };
  using Ids = std::vector<std::uint32_t>;
  using Marks = std::vector<std::uint8_t>;
  const EncodedRow completion = encoded(row_of(JsonRow::Form::completion, "abc", {2}));
  CHECK(completion.ids == Ids{256, 'a', 'b', 'c', 257});
  CHECK(completion.counted == Marks{0, 0, 0, 1, 1});
  const EncodedRow text = encoded(row_of(JsonRow::Form::text, "ab", {0}));
  CHECK(text.ids == Ids{256, 'a', 'b', 257});
  CHECK(text.counted == Marks{1, 1, 1, 1});
  const EncodedRow segments = encoded(row_of(JsonRow::Form::segments, "abcd", {1, 3}));
  CHECK(segments.ids == Ids{'a', 'b', 'c', 'd'});
  CHECK(segments.counted == Marks{0, 1, 1, 0});
  CHECK(!segments.joined);
  CHECK(encoded(row_of(JsonRow::Form::text, "", {0})).ids.empty());
  // An empty completion still says that the text ends.
  CHECK(encoded(row_of(JsonRow::Form::completion, "a", {1})).counted == Marks{0, 0, 1});

  // "b" and "c" are one token of the whole text.
  const Tokenizer pairs = Tokenizer::from_text(
      R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "bc": 3}, "merges": ["b c"]},
          "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}})",
      "pairs");
  PieceCache of_pairs;
  const EncodedRow joined = encode_row(pairs, -1, row_of(JsonRow::Form::completion, "abca", {2}), "a", of_pairs);
  CHECK(joined.ids == Ids{0, 3, 0});
  CHECK(joined.counted == Marks{0, 1, 1});
  CHECK(joined.joined);
  // The eos_token of tokenizer_config.json ends a row.
  SpecialTokens of_model;
  of_model.files["tokenizer_config.json"] = R"({"eos_token": "BOS"})";
  CHECK(end_symbol(bytes.with(of_model)) == 256);
}

TEST_CASE("rows that weft prepare writes are prompts up to the first text that counts") {
  const std::vector<PromptLine> prompts = prompt_lines(
      "{\"segments\": [{\"text\": \"ab\", \"loss\": false}, {\"text\": \"c\", \"loss\": true}], \"reference\": \"d\"}\n"
      "{\"prompt\": \"p\", \"completion\": \"c\"}\n",
      "a.jsonl");
  REQUIRE(prompts.size() == 2);
  CHECK(prompts[0].text == "ab");
  CHECK(prompts[0].reference == "d");
  CHECK(prompts[0].rendered);
  CHECK(prompts[1].text == "p");
  CHECK(!prompts[1].rendered);
  CHECK(refusal(ExitCode::data, [] { prompt_lines("{\"messages\": []}", "a.jsonl"); }).find("--generation-prompt") !=
        std::string::npos);
}

}  // namespace weft::language_model
