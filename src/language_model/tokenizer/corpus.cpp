// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/corpus.hpp"

#include <fmt/ranges.h>

#include <cmath>
#include <filesystem>
#include <set>
#include <unordered_map>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "device/runtime.hpp"
#include "language_model/tokenizer/encoded_rows.hpp"
#include "language_model/tokenizer/json_lines.hpp"
#include "language_model/tokenizer/parallel_encode.hpp"
#include "language_model/tokenizer/tokenizer_files.hpp"
#include "parallel/affinity.hpp"
#include "parallel/failure.hpp"
#include "storage/digest.hpp"
#include "storage/mapped_file.hpp"
#include "storage/token_file.hpp"

namespace weft::language_model {
namespace {

using dataset::DataFormat;
using dataset::TokenSet;

/// What a path is. Collective.
DataFormat shared_format(const std::string& path, std::string_view key, const dataset::TokenSettings& data,
                         const parallel::World& world) {
  const std::string name = world.on_root([&] { return std::string(name_of(format_of(path, key, data.format))); });
  return name == "tokens" ? DataFormat::tokens : name == "jsonl" ? DataFormat::jsonl : DataFormat::text;
}

/// Tokeniser that the settings name; nullopt: that of the data. Collective.
std::optional<Tokenizer> named_tokenizer(const dataset::TokenSettings& data, const parallel::World& world) {
  if (data.tokens.empty() || data.tokens == "character") return std::nullopt;
  return Tokenizer::from_text(
      world.on_root([&] { return load_tokenizer(data.tokens, data.special, "data.tokens").stored_text(); }),
      data.tokens);
}

/// A text as ids, on rank 0.
struct EncodedText {
  std::vector<std::uint32_t> ids;
  std::int64_t bytes = 0;  ///< of text
  dataset::TokenMarks marks;
};

template <class T>
void broadcast(std::vector<T>& values, const parallel::World& world) {
  std::int64_t size = std::ssize(values);
  world.all().broadcast(&size, sizeof size);
  values.resize(static_cast<std::size_t>(size));
  if (size > 0) world.all().broadcast(values.data(), size * static_cast<std::int64_t>(sizeof(T)));
}

/// The text of rank 0 as a set on every rank.
TokenSet broadcast(const std::string& path, EncodedText text, const Tokenizer& tokenizer,
                   const parallel::World& world) {
  world.all().broadcast(&text.bytes, sizeof text.bytes);
  broadcast(text.marks.documents, world);
  broadcast(text.marks.counted, world);
  broadcast(text.marks.owners, world);
  const std::int64_t vocabulary = tokenizer.vocabulary_size();
  if (vocabulary > 65536) {
    broadcast(text.ids, world);
    return TokenSet(path, std::move(text.ids), vocabulary, text.bytes, std::move(text.marks));
  }
  std::vector<std::uint16_t> ids(text.ids.begin(), text.ids.end());
  text.ids = {};
  broadcast(ids, world);
  return TokenSet(path, std::move(ids), vocabulary, text.bytes, std::move(text.marks));
}

/// Encodes a text file with a tokeniser. Collective.
TokenSet encode_text(const std::string& path, const Tokenizer& tokenizer, const parallel::World& world) {
  parallel::note_phase("encoding the text");
  EncodedText encoded;
  world.on_root([&] {
    const storage::MappedFile file(path);
    const std::string_view text = file.text();
    std::vector<std::uint32_t>& ids = encoded.ids;
    ids = std::move(encode_parallel(tokenizer, text, std::span(&text, 1), path,
                                    device::host_threads({}, parallel::processes_sharing_cpus(world)))
                        .front());
    ids = tokenizer.with_begin(std::move(ids));
    ids.insert(ids.end(), tokenizer.end().begin(), tokenizer.end().end());
    encoded.bytes = static_cast<std::int64_t>(file.bytes().size());
  });
  return broadcast(path, std::move(encoded), tokenizer, world);
}

/// Encodes JSON Lines with a tokeniser: each row is a document. Collective.
TokenSet encode_json_lines(const std::string& path, const Tokenizer& tokenizer, const dataset::TokenSettings& data,
                           const parallel::World& world, const std::string& owner_field) {
  parallel::note_phase("encoding the text");
  EncodedText encoded;
  world.on_root([&] {
    std::unordered_map<std::string, std::int64_t> owners;  // name -> number
    const RowCounts counts = encode_rows(
        tokenizer, path, data.bad_lines, device::host_threads({}, parallel::processes_sharing_cpus(world)),
        [&](std::span<const std::uint32_t> ids, std::span<const std::uint8_t> counted, const JsonRow& row) {
          if (!owner_field.empty())
            encoded.marks.owners.push_back(owners.try_emplace(row.owner, std::ssize(owners)).first->second);
          encoded.marks.documents.push_back(std::ssize(encoded.ids));
          encoded.ids.insert(encoded.ids.end(), ids.begin(), ids.end());
          encoded.marks.counted.insert(encoded.marks.counted.end(), counted.begin(), counted.end());
          encoded.bytes += std::ssize(row.text);
        },
        owner_field);
    if (data.loss_on == dataset::LossOn::all || counts.counted == counts.tokens) encoded.marks.counted = {};
    if (data.loss_on == dataset::LossOn::completion && counts.counted == 0)
      throw error(ExitCode::data,
                  "{}: no token is in a completion (data.loss_on = \"completion\"), so that there is no loss; give "
                  "completions, or data.loss_on = \"all\"",
                  path);
    if (!encoded.marks.counted.empty()) encoded.bytes = 0;  // the loss is not that of the whole text
  });
  return broadcast(path, std::move(encoded), tokenizer, world);
}

/// The ids of token files that count with these settings.
TokenSet counting(const TokenSet& set, const dataset::TokenSettings& data) {
  return data.loss_on == dataset::LossOn::all ? set.counting_all() : set;
}

/// Throws if the ids were not written with this tokeniser, as far as the files say.
void require_match(const TokenSet& set, const std::optional<Tokenizer>& tokenizer, std::int64_t vocabulary) {
  if (set.vocabulary() != vocabulary)
    throw collective_error(ExitCode::data,
                           "{}: was written for a vocabulary of {}, not of {} (training, validation and tokeniser must "
                           "agree); tokenise all texts with one tokeniser",
                           set.name(), set.vocabulary(), vocabulary);
  if (tokenizer && !set.tokenizer().empty() &&
      Tokenizer::from_text(set.tokenizer(), set.name() + ": /tokenizer").text() != tokenizer->text())
    throw collective_error(ExitCode::data,
                           "{}: was written with another tokeniser of the same size; tokenise all texts with one "
                           "tokeniser",
                           set.name());
}

void require_prediction(const TokenSet& set) {
  if (set.size() < 2)
    throw collective_error(ExitCode::data, "{}: {} tokens for validation (a prediction needs two); take a longer text",
                           set.name(), set.size());
}

/// Text that lists ids; "" for no ids.
std::string ids_text(std::string_view name, std::span<const std::uint32_t> ids) {
  return ids.empty() ? "" : fmt::format("{}{}", name, fmt::join(ids, " "));
}

/// Number of bytes of text that the ids represent.
std::int64_t text_bytes(const TokenSet& set, const Tokenizer& tokenizer) {
  constexpr std::int64_t kPiece = std::int64_t{1} << 20;
  std::int64_t bytes = 0;
  std::vector<std::uint32_t> ids;
  for (std::int64_t begin = 0; begin < set.size(); begin += kPiece) {
    ids.resize(static_cast<std::size_t>(std::min(kPiece, set.size() - begin)));
    set.read(begin, ids);
    bytes += static_cast<std::int64_t>(tokenizer.detokenise(ids, begin > 0).size());
  }
  return bytes;
}

/// The tokeniser of the characters of all rows.
Tokenizer characters_of_rows(const dataset::TokenSettings& data, const std::string& owner_field) {
  std::set<long> codes;
  const auto add = [&](std::string_view text) {
    while (!text.empty()) {
      const Character next = first_character(text);
      codes.insert(next.code);
      text.remove_prefix(next.bytes);
    }
  };
  for_each_text(data.train, data.bad_lines, add, owner_field);
  std::string characters;
  for (const long code : codes) append_character(characters, code);
  return Tokenizer::characters_of(characters, data.special, data.train);
}

/// The first position of the row that has an id.
std::int64_t row_begin(const TokenSet& set, std::int64_t position) {
  std::vector<std::int64_t> starts;
  set.document_starts(0, position + 1, starts);
  return starts.empty() ? 0 : starts.back();
}

}  // namespace

void note_special_tokens(const Tokenizer& tokenizer) {
  const auto note = [&](const char* verb, std::span<const std::uint32_t> ids) {
    if (!ids.empty())
      log::info("texts {} with {} (post-processor of the tokeniser; data.add_special_tokens = false leaves it out)",
                verb, printable(tokenizer.detokenise(ids)));
  };
  note("begin", tokenizer.begin());
  note("end", tokenizer.end());
}

Tokenizer load_tokenizer(const std::string& tokens, const std::vector<std::string>& special, std::string_view key) {
  if (tokens == "bytes") return Tokenizer::bytes(special);
  const std::filesystem::path path = tokenizer_file(tokens);
  if (!std::filesystem::exists(path))
    throw error(ExitCode::usage, "{} = \"{}\": no such file (it is \"bytes\", or a tokeniser file or its directory)",
                key, path.string());
  const storage::MappedFile file(path);
  if (static_cast<std::int64_t>(file.bytes().size()) > storage::kLargestTokenizer)
    throw error(ExitCode::data, "{}: has {} bytes (a tokeniser file has at most {}); is it another kind of file?",
                path.string(), file.bytes().size(), storage::kLargestTokenizer);
  const Tokenizer tokenizer = Tokenizer::from_text(file.text(), path.string());
  const bool of_model = path.filename() == kHuggingFaceTokenizer || path.filename() == kWeftTokenizer;
  return of_model ? with_files_of(tokenizer, path.parent_path()) : tokenizer;
}

TokenSet load_tokens(const std::string& path, std::string_view key, const dataset::TokenSettings& data,
                     const std::optional<Tokenizer>& tokenizer, std::int64_t vocabulary, const parallel::World& world) {
  std::optional<TokenSet> set;
  const DataFormat format = shared_format(path, key, data, world);
  if (format == DataFormat::tokens) {
    set = counting(dataset::open_tokens(world, path), data);
    require_match(*set, tokenizer, vocabulary);
  } else if (tokenizer) {
    set = format == DataFormat::jsonl ? encode_json_lines(path, *tokenizer, data, world, "")
                                      : encode_text(path, *tokenizer, world);
  } else {
    throw collective_error(
        ExitCode::usage,
        "{}: has texts, and there is no tokeniser (the training set is token files without one); give "
        "data.tokens",
        path);
  }
  require_prediction(*set);
  return *set;
}

Corpus load_corpus(const dataset::TokenSettings& data, const parallel::World& world,
                   const std::optional<Tokenizer>& of_model, const std::string& owner_field) {
  std::optional<Tokenizer> tokenizer = named_tokenizer(data, world);
  const DataFormat format = shared_format(data.train, "data.train", data, world);
  std::optional<TokenSet> train;
  std::string fingerprint;
  const auto choose_special_tokens = [&] {
    if (tokenizer) tokenizer = tokenizer->adding_special_tokens(data.add_special_tokens);
  };
  if (format == DataFormat::tokens) {
    train = counting(dataset::open_tokens(world, data.train), data);
    if (data.tokens == "character")
      throw collective_error(ExitCode::usage,
                             "data.tokens = \"character\" and data.train = \"{}\" (token files have their tokeniser); "
                             "remove data.tokens",
                             data.train);
    if (!tokenizer && !train->tokenizer().empty())
      tokenizer = Tokenizer::from_text(train->tokenizer(), data.train + ": /tokenizer");
    if (!tokenizer && of_model && of_model->vocabulary_size() == train->vocabulary()) tokenizer = of_model;
    choose_special_tokens();
    require_match(*train, tokenizer, tokenizer ? tokenizer->vocabulary_size() : train->vocabulary());
    fingerprint = train->fingerprint();
  } else {
    parallel::note_phase("reading the text");
    if (data.tokens.empty() && data.special.empty()) tokenizer = of_model;
    std::string digest = world.on_root([&]() -> std::string {
      const storage::MappedFile file(data.train);
      if (!tokenizer && format == DataFormat::text)
        tokenizer = Tokenizer::characters_of(file.text(), data.special, data.train);
      if (!tokenizer) tokenizer = characters_of_rows(data, owner_field);
      return fmt::format("{}:{}", name_of(format), storage::sha256(file.text()));
    });
    const std::string form = world.on_root([&] { return tokenizer->stored_text(); });
    if (!world.is_root()) tokenizer = Tokenizer::from_text(form, data.train);
    choose_special_tokens();
    train = format == DataFormat::jsonl ? encode_json_lines(data.train, *tokenizer, data, world, owner_field)
                                        : encode_text(data.train, *tokenizer, world);
    fingerprint = fmt::format("{},tokens:{}{}{}", digest, storage::sha256(tokenizer->text()),
                              ids_text(",begin:", tokenizer->begin()), ids_text(",end:", tokenizer->end()));
  }

  if (tokenizer && world.is_root()) note_special_tokens(*tokenizer);
  const std::int64_t vocabulary = train->vocabulary();
  std::optional<TokenSet> validation;
  if (!data.validation.empty()) {
    validation = load_tokens(data.validation, "data.validation", data, tokenizer, vocabulary, world);
  } else if (data.validation_fraction > 0) {
    const auto held_out =
        static_cast<std::int64_t>(std::ceil(static_cast<double>(train->size()) * data.validation_fraction));
    std::int64_t border = std::max<std::int64_t>(0, train->size() - held_out);
    if (format == DataFormat::jsonl) border = row_begin(*train, border);
    const TokenSet tail = train->part(border, train->size(), 0);
    // Token files may be large, and rows have symbols between their texts: their bytes stay unknown.
    const std::int64_t bytes = format == DataFormat::text ? text_bytes(tail, *tokenizer) : 0;
    validation = tail.part(0, tail.size(), bytes);
    train = train->part(0, border, bytes > 0 ? train->text_bytes() - bytes : 0);
  }
  if (train->size() < data.sequence + 1)
    throw collective_error(ExitCode::data,
                           "{}: {} tokens for training (a sequence of {} needs one more, its last target); take a "
                           "smaller data.sequence or a longer text",
                           train->name(), train->size(), data.sequence);
  if (validation) require_prediction(*validation);
  if (train->has_counted() && data.pack == dataset::Pack::stream && world.is_root())
    log::info(
        "{}: a sequence may begin inside a row, without the prompt of its completion; data.pack = \"documents\" keeps "
        "rows whole",
        data.train);
  return {*train, validation, vocabulary, tokenizer, fingerprint, {*train, data}};
}

}  // namespace weft::language_model
