// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/corpus.hpp"

#include <fmt/ranges.h>

#include <cmath>
#include <filesystem>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "device/runtime.hpp"
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

using dataset::TokenSet;

std::string_view text_of(const storage::MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

/// Contents of a path. Collective.
enum class Contents { text, tokens };
Contents contents_of(const std::string& path, std::string_view key, const parallel::World& world) {
  const std::string kind = world.on_root([&]() -> std::string {
    if (!std::filesystem::exists(path))
      throw error(ExitCode::usage, "{} = \"{}\": no such file or directory; correct the path", key, path);
    if (std::filesystem::is_directory(path) || dataset::is_token_file(path)) return "tokens";
    require_plain_text(path);
    return "text";
  });
  return kind == "tokens" ? Contents::tokens : Contents::text;
}

/// Tokeniser that the settings name; nullopt: that of the data. Collective.
std::optional<Tokenizer> named_tokenizer(const dataset::TokenSettings& data, const parallel::World& world) {
  if (data.tokens.empty() || data.tokens == "character") return std::nullopt;
  return Tokenizer::from_text(
      world.on_root([&] { return load_tokenizer(data.tokens, data.special, "data.tokens").stored_text(); }),
      data.tokens);
}

/// Ids of rank 0 as a set on every rank.
template <class Id>
TokenSet broadcast(const std::string& path, std::vector<Id> ids, const Tokenizer& tokenizer, std::int64_t text_bytes,
                   const parallel::World& world) {
  std::int64_t sizes[] = {static_cast<std::int64_t>(ids.size()), text_bytes};
  world.all().broadcast(sizes, sizeof sizes);
  ids.resize(static_cast<std::size_t>(sizes[0]));
  world.all().broadcast(ids.data(), sizes[0] * static_cast<std::int64_t>(sizeof(Id)));
  return TokenSet(path, std::move(ids), tokenizer.vocabulary_size(), sizes[1]);
}

TokenSet broadcast(const std::string& path, std::vector<std::uint32_t> ids, const Tokenizer& tokenizer,
                   std::int64_t text_bytes, const parallel::World& world) {
  if (tokenizer.vocabulary_size() <= 65536)
    return broadcast<std::uint16_t>(path, {ids.begin(), ids.end()}, tokenizer, text_bytes, world);
  return broadcast<std::uint32_t>(path, std::move(ids), tokenizer, text_bytes, world);
}

/// Encodes a text file with a tokeniser. Collective.
TokenSet encode_text(const std::string& path, const Tokenizer& tokenizer, const parallel::World& world) {
  parallel::note_phase("encoding the text");
  std::vector<std::uint32_t> ids;
  std::int64_t bytes = 0;
  world.on_root([&] {
    const storage::MappedFile file(path);
    const std::string_view text = text_of(file);
    ids = std::move(encode_parallel(tokenizer, text, std::span(&text, 1), path,
                                    device::host_threads({}, parallel::processes_sharing_cpus(world)))
                        .front());
    ids = tokenizer.with_begin(std::move(ids));
    ids.insert(ids.end(), tokenizer.end().begin(), tokenizer.end().end());
    bytes = static_cast<std::int64_t>(file.bytes().size());
  });
  return broadcast(path, std::move(ids), tokenizer, bytes, world);
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
  const Tokenizer tokenizer = Tokenizer::from_text(text_of(file), path.string());
  const bool of_model = path.filename() == kHuggingFaceTokenizer || path.filename() == kWeftTokenizer;
  return of_model ? with_files_of(tokenizer, path.parent_path()) : tokenizer;
}

TokenSet load_tokens(const std::string& path, const std::optional<Tokenizer>& tokenizer, std::int64_t vocabulary,
                     const parallel::World& world) {
  std::optional<TokenSet> set;
  if (contents_of(path, "text", world) == Contents::tokens) {
    set = dataset::open_tokens(world, path);
    require_match(*set, tokenizer, vocabulary);
  } else if (tokenizer) {
    set = encode_text(path, *tokenizer, world);
  } else {
    throw collective_error(ExitCode::usage,
                           "{}: is text, and there is no tokeniser (the training set is token files without one); give "
                           "data.tokens",
                           path);
  }
  require_prediction(*set);
  return *set;
}

Corpus load_corpus(const dataset::TokenSettings& data, const parallel::World& world,
                   const std::optional<Tokenizer>& of_model) {
  std::optional<Tokenizer> tokenizer = named_tokenizer(data, world);
  const Contents contents = contents_of(data.train, "data.train", world);
  std::optional<TokenSet> train;
  std::string fingerprint;
  const auto choose_special_tokens = [&] {
    if (tokenizer) tokenizer = tokenizer->adding_special_tokens(data.add_special_tokens);
  };
  if (contents == Contents::tokens) {
    train = dataset::open_tokens(world, data.train);
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
      if (!tokenizer) tokenizer = Tokenizer::characters_of(text_of(file), data.special, data.train);
      return "text:" + storage::sha256(text_of(file));
    });
    const std::string form = world.on_root([&] { return tokenizer->stored_text(); });
    if (!world.is_root()) tokenizer = Tokenizer::from_text(form, data.train);
    choose_special_tokens();
    train = encode_text(data.train, *tokenizer, world);
    fingerprint = fmt::format("{},tokens:{}{}{}", digest, storage::sha256(tokenizer->text()),
                              ids_text(",begin:", tokenizer->begin()), ids_text(",end:", tokenizer->end()));
  }

  if (tokenizer && world.is_root()) note_special_tokens(*tokenizer);
  const std::int64_t vocabulary = train->vocabulary();
  std::optional<TokenSet> validation;
  if (!data.validation.empty()) {
    validation = load_tokens(data.validation, tokenizer, vocabulary, world);
  } else if (data.validation_fraction > 0) {
    const auto held_out =
        static_cast<std::int64_t>(std::ceil(static_cast<double>(train->size()) * data.validation_fraction));
    const std::int64_t border = std::max<std::int64_t>(0, train->size() - held_out);
    const TokenSet tail = train->part(border, train->size(), 0);
    // Token files may be large: their bytes stay unknown.
    const std::int64_t bytes = contents == Contents::text ? text_bytes(tail, *tokenizer) : 0;
    validation = tail.part(0, tail.size(), bytes);
    train = train->part(0, border, bytes > 0 ? train->text_bytes() - bytes : 0);
  }
  if (train->size() < data.sequence + 1)
    throw collective_error(ExitCode::data,
                           "{}: {} tokens for training (a sequence of {} needs one more, its last target); take a "
                           "smaller data.sequence or a longer text",
                           train->name(), train->size(), data.sequence);
  if (validation) require_prediction(*validation);
  return {*train, validation, vocabulary, tokenizer, fingerprint, {*train, data}};
}

}  // namespace weft::language_model
