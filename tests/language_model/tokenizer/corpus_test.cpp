// SPDX-License-Identifier: Apache-2.0
//
// From paths to ids on several ranks: text, token files, splits, fingerprints, and every kind of bad input.
#include "language_model/tokenizer/corpus.hpp"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "storage/token_file.hpp"
#include "tests/scratch.hpp"

namespace weft::language_model {
namespace {

using dataset::TokenSet;
using dataset::TokenSettings;
using testing::world;

/// Rank 0 makes the files.
struct Folder : testing::Scratch {
  std::string text(const std::string& name, std::string_view contents) const {
    if (world().is_root()) write(name, contents);
    world().all().barrier();
    return *this / name;
  }
  std::string tokens(const std::string& name, const std::vector<std::uint32_t>& ids, std::int64_t vocabulary,
                     std::string_view tokenizer = "") const {
    if (world().is_root())
      storage::write_token_file(*this / name, ids, std::vector<std::int64_t>{0}, vocabulary, 0, tokenizer);
    world().all().barrier();
    return *this / name;
  }
};

TokenSettings on(const std::string& train, std::int64_t sequence = 4) {
  TokenSettings data;
  data.train = train;
  data.sequence = sequence;
  data.batch_tokens = sequence;
  return data;
}

std::vector<std::uint32_t> all_of(const TokenSet& set) {
  std::vector<std::uint32_t> ids(static_cast<std::size_t>(set.size()));
  set.read(0, ids);
  return ids;
}

/// The message of the error of `load_corpus`, the same on every rank, after a check of its code.
std::string refusal(const TokenSettings& data, ExitCode code) {
  try {
    load_corpus(data, world());
  } catch (const Error& failure) {
    CHECK(failure.code() == code);
    CHECK(failure.known_to() == KnownTo::all_ranks);
    return failure.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("a text becomes the same ids and tokeniser on every rank") {
  const Folder folder;
  const std::string path = folder.text("a.txt", "bananá band");
  const Corpus corpus = load_corpus(on(path), world());
  CHECK(corpus.vocabulary == 6);  // space a b d n á
  CHECK(corpus.tokenizer->kind() == "character");
  CHECK(corpus.tokenizer->detokenise(all_of(corpus.train)) == "bananá band");
  CHECK(corpus.train.text_bytes() == 12);
  CHECK(corpus.train.n_files() == 0);
  CHECK(!corpus.validation);
  CHECK(corpus.fingerprint == load_corpus(on(path), world()).fingerprint);
  CHECK(corpus.fingerprint != load_corpus(on(folder.text("b.txt", "bananá bond")), world()).fingerprint);
}

TEST_CASE("validation: a file of its own, or the tail of the text") {
  const Folder folder;
  TokenSettings data = on(folder.text("a.txt", "aábcabcabcabcabcabcá"));
  data.validation = folder.text("v.txt", "cabá");
  const Corpus given = load_corpus(data, world());
  CHECK(given.tokenizer->detokenise(all_of(*given.validation)) == "cabá");
  CHECK(given.validation->text_bytes() == 5);
  data.validation.clear();
  data.validation_fraction = 0.2;
  const Corpus split = load_corpus(data, world());
  CHECK(split.train.size() == 16);
  CHECK(split.tokenizer->detokenise(all_of(*split.validation)) == "abcá");
  CHECK(split.validation->text_bytes() == 5);
  CHECK(split.train.text_bytes() == 17);
}

TEST_CASE("what the post-processor of a tokenizer.json adds is in every text, and the files beside it count") {
  const Folder folder;
  const std::string tokens = folder.text("tokenizer.json", R"({"format":"weft-tokenizer","version":1,"kind":"bytes",
      "special":["BOS","EOS"],"begin":[256],"end":[257],"ends":[3]})");
  TokenSettings data = on(folder.text("a.txt", "abcdefgh"), 3);
  data.tokens = tokens;
  data.validation = folder.text("v.txt", "xy");
  const Corpus with = load_corpus(data, world());
  CHECK(all_of(with.train) == std::vector<std::uint32_t>{256, 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 257});
  CHECK(all_of(*with.validation) == std::vector<std::uint32_t>{256, 'x', 'y', 257});
  CHECK(with.tokenizer->special_tokens().ends == std::vector<std::uint32_t>{3});
  data.add_special_tokens = false;
  const Corpus without = load_corpus(data, world());
  CHECK(all_of(without.train) == std::vector<std::uint32_t>{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'});
  CHECK(all_of(*without.validation) == std::vector<std::uint32_t>{'x', 'y'});
  CHECK(without.fingerprint != with.fingerprint);
  // The ids mean the same: the checkpoint of one is not refused with the other.
  CHECK(without.tokenizer->text() == with.tokenizer->text());
  CHECK(without.tokenizer->stored_text() == with.tokenizer->stored_text());

  folder.text("generation_config.json", R"({"eos_token_id": [5, 6]})");
  folder.text("config.json", R"({"eos_token_id": 6})");
  folder.text("tokenizer_config.json", R"({"eos_token": {"content": "EOS"}})");
  const Corpus beside = load_corpus(data, world());
  CHECK(beside.tokenizer->special_tokens().ends == std::vector<std::uint32_t>{5, 6});
  CHECK(beside.tokenizer->special_tokens().files.size() == 2);
  CHECK(beside.tokenizer->special_tokens().begin == std::vector<std::uint32_t>{256});
  for (const char* ends : {R"({"eos_token_id": "x"})", R"({"eos_token_id": [1, -1]})", "[]", "{"}) {
    folder.text("generation_config.json", ends);
    CHECK(refusal(data, ExitCode::data).find("generation_config.json: ") != std::string::npos);
  }
  folder.text("generation_config.json", "{}");
  folder.text("config.json", "{}");
  CHECK(load_corpus(data, world()).tokenizer->special_tokens().ends == std::vector<std::uint32_t>{257});
}

TEST_CASE("JSON Lines are not learned as text") {
  const Folder folder;
  const char* const lines = "{\"text\": \"abc\"}\n\n  {\"text\": \"def\"}\n";
  for (const char* name : {"a.json", "a.txt", "a"})
    CHECK(refusal(on(folder.text(name, lines)), ExitCode::data).find(": its lines are JSON objects") !=
          std::string::npos);
  for (const std::string& text : {"\xef\xbb\xbf" + std::string(lines), "[\n" + std::string(lines) + ",\n]\n"})
    CHECK(refusal(on(folder.text("c.txt", text)), ExitCode::data).find("data.format = \"jsonl\"") != std::string::npos);
  TokenSettings data = on(folder.text("text.txt", "abcabcabc{\"def\": 1}\n"));
  data.validation = folder.text("v.txt", lines);
  CHECK(refusal(data, ExitCode::data).find("v.txt: its lines are JSON objects") != std::string::npos);
  CHECK(refusal(on(folder.text("p.parquet", "PAR1abcPAR1")), ExitCode::data).find("weft prepare") != std::string::npos);
  // Other texts with braces are texts.
  for (const char* text : {"{\n  \"text\": \"abc\"\n}\n", "{a} and\n{b}\n", "{\"a\": 1}\ntext\n"})
    CHECK(load_corpus(on(folder.text("c.json", text)), world()).tokenizer->kind() == "character");
}

TEST_CASE("rows of JSON Lines are documents, and completions alone count, unless all is to count") {
  const Folder folder;
  TokenSettings data =
      on(folder.text("a.jsonl", "{\"prompt\": \"ab\", \"completion\": \"ca\"}\n{\"text\": \"áb\"}\r\n"), 3);
  data.special = {"EOS"};
  const Corpus corpus = load_corpus(data, world());
  CHECK(corpus.vocabulary == 5);  // a b c á EOS
  CHECK(all_of(corpus.train) == std::vector<std::uint32_t>{0, 1, 2, 0, 4, 3, 1, 4});
  CHECK(corpus.train.text_bytes() == 0);
  std::vector<std::uint8_t> counted(8);
  corpus.train.read_counted(0, counted);
  CHECK(counted == std::vector<std::uint8_t>{0, 0, 1, 1, 1, 1, 1, 1});
  std::vector<std::int64_t> starts;
  corpus.train.document_starts(0, 8, starts);
  CHECK(starts == std::vector<std::int64_t>{5});

  data.loss_on = dataset::LossOn::all;
  const Corpus all = load_corpus(data, world());
  CHECK(!all.train.has_counted());
  CHECK(all.train.text_bytes() == 7);
  CHECK(all.fingerprint == corpus.fingerprint);

  // Whole rows are held out; the format may be declared for another name.
  data.train = folder.text("a.txt", "{\"text\": \"abca\"}\n{\"text\": \"caá\"}\n");
  data.format = dataset::DataFormat::jsonl;
  data.validation_fraction = 0.1;
  const Corpus split = load_corpus(data, world());
  CHECK(split.tokenizer->detokenise(all_of(split.train)) == "abca");
  CHECK(split.tokenizer->detokenise(all_of(*split.validation)) == "caá");

  // Owners are numbered as they occur; those of lines without text are no documents.
  data = on(folder.text("owners.jsonl",
                        "{\"text\": \"ab\", \"by\": \"x\"}\n{\"text\": \"\", \"by\": \"z\"}\n"
                        "{\"text\": \"ba\", \"by\": 7}\n{\"text\": \"b\", \"by\": \"x\"}\n"),
            3);
  CHECK(load_corpus(data, world()).train.owners().empty());
  CHECK(load_corpus(data, world(), std::nullopt, "by").train.owners() == std::vector<std::int64_t>{0, 1, 0});

  data.format = dataset::DataFormat::text;
  data.train = folder.text("b.jsonl", "{\"text\": \"abca\"}\n");
  CHECK(refusal(data, ExitCode::usage).find("data.format = \"text\"") != std::string::npos);
  data.format = dataset::DataFormat::by_name;
  data.loss_on = dataset::LossOn::completion;
  data.train = folder.text("c.jsonl", "{\"segments\": [{\"text\": \"abca\", \"loss\": false}]}\n");
  CHECK(refusal(data, ExitCode::data).find("no token is in a completion") != std::string::npos);
}

TEST_CASE("token files: with and without a tokeniser, several as one stream") {
  const Folder folder;
  const std::string form = Tokenizer::bytes({}).text();
  if (world().is_root()) std::filesystem::create_directory(folder / "set");
  folder.tokens("set/part_1.h5", {5, 6, 255}, 256, form);
  folder.tokens("set/part_0.h5", {1, 2, 3, 4}, 256, form);
  const Corpus corpus = load_corpus(on(folder / "set"), world());
  CHECK(all_of(corpus.train) == std::vector<std::uint32_t>{1, 2, 3, 4, 5, 6, 255});
  CHECK(corpus.train.n_files() == 2);
  CHECK(corpus.tokenizer->kind() == "bytes");
  CHECK(corpus.vocabulary == 256);
  CHECK(!load_corpus(on(folder.tokens("plain.h5", {1, 2, 3, 4, 5}, 70000)), world()).tokenizer);

  TokenSettings data = on(folder / "set");
  data.tokens = folder / "model";  // a directory, with a tokeniser
  if (world().is_root()) std::filesystem::create_directory(folder / "model");
  world().all().barrier();
  folder.text("model/tokenizer.json", form);
  CHECK(load_corpus(data, world()).tokenizer->kind() == "bytes");
  data.tokens.clear();
  data.validation = folder.text("v.txt", "xyz");  // encoded with the tokeniser of the token files
  CHECK(all_of(*load_corpus(data, world()).validation) == std::vector<std::uint32_t>{'x', 'y', 'z'});
}

TEST_CASE("bad data are refused on every rank, with code, path and place") {
  const Folder folder;
  CHECK(refusal(on(folder / "none.txt"), ExitCode::usage) ==
        "data.train = \"" + (folder / "none.txt") + "\": no such file or directory; correct the path");
  CHECK(refusal(on(folder.text("empty.txt", "")), ExitCode::data).find("empty.txt: is empty") != std::string::npos);
  CHECK(refusal(on(folder.text("short.txt", "abcd")), ExitCode::data).find("short.txt: 4 tokens for training") !=
        std::string::npos);
  CHECK(refusal(on(folder.text("bad.txt", "abcdef\xe9t\xe9")), ExitCode::data).find("bad.txt: byte 6 (0xe9)") !=
        std::string::npos);
  if (world().is_root()) mkfifo((folder / "fifo").c_str(), 0600);
  world().all().barrier();
  CHECK(refusal(on(folder / "fifo"), ExitCode::data).find("is a FIFO") != std::string::npos);
  if (world().is_root()) std::filesystem::create_directory(folder / "nothing");
  CHECK(refusal(on(folder / "nothing"), ExitCode::data).find("no token files found") != std::string::npos);

  TokenSettings data = on(folder.text("a.txt", "abcabcabc"));
  data.validation = folder.text("v.txt", "abz");
  CHECK(refusal(data, ExitCode::data).find("v.txt: byte 2 is U+007A (\"z\")") != std::string::npos);
  data.validation = folder.text("one.txt", "a");
  CHECK(refusal(data, ExitCode::data).find("1 tokens for validation") != std::string::npos);
  data.validation = folder.tokens("v.h5", {1, 2}, 256);
  CHECK(refusal(data, ExitCode::data).find("was written for a vocabulary of 256, not of 3") != std::string::npos);
  data.validation.clear();
  data.tokens = folder / "tokenizer.json";
  CHECK(refusal(data, ExitCode::usage).find("no such file") != std::string::npos);
  folder.text("tokenizer.json", "{}");
  CHECK(refusal(data, ExitCode::data).find("tokenizer.json: ") != std::string::npos);
  data.tokens = folder / "nothing";
  CHECK(refusal(data, ExitCode::usage).find("nothing/tokenizer.json\": no such file") != std::string::npos);

  data = on(folder.tokens("t.h5", {1, 2, 3, 4, 5}, 256, Tokenizer::bytes({}).text()));
  data.tokens = "character";
  CHECK(refusal(data, ExitCode::usage).find("remove data.tokens") != std::string::npos);
  data = on(folder.tokens("u.h5", {1, 2, 3, 4, 5}, 300, Tokenizer::bytes({}).text()));
  CHECK(refusal(data, ExitCode::data).find("vocabulary of 300, not of 256") != std::string::npos);
}

}  // namespace weft::language_model
