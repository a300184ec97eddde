// SPDX-License-Identifier: Apache-2.0
//
// weft lm tokenize FILES --output DIR: text files become token files; a vocabulary is trained on them first if asked.
#include <filesystem>
#include <optional>

#include "base/format.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "commands/commands.hpp"
#include "dataset/tokens/token_settings.hpp"
#include "dataset/tokens/token_writer.hpp"
#include "device/runtime.hpp"
#include "input/read.hpp"
#include "language_model/tokenizer/byte_level_bpe.hpp"
#include "language_model/tokenizer/corpus.hpp"
#include "language_model/tokenizer/encoded_rows.hpp"
#include "language_model/tokenizer/json_lines.hpp"
#include "language_model/tokenizer/parallel_encode.hpp"
#include "storage/mapped_file.hpp"

namespace weft::commands {
namespace {

using language_model::Tokenizer;

using language_model::kEndOfText;

struct TokenizeOptions {
  std::string tokens;          ///< "" or the tokeniser, as data.tokens
  std::int64_t train_bpe = 0;  ///< size of the vocabulary; 0: none is trained
  std::string pattern;         ///< "" or gpt2 | llama3
  std::string separator;       ///< "" or the text between documents
};

void require_consistent(const Request& request, const TokenizeOptions& options) {
  const auto refuse = [](const std::string& why) {
    return collective_error(ExitCode::usage, "weft lm tokenize: {}; see weft lm tokenize --help", why);
  };
  if (request.output.empty()) throw refuse("needs --output DIR");
  if (options.tokens.empty() == (options.train_bpe == 0)) throw refuse("needs one of --tokens and --train-bpe");
  if (options.train_bpe > 0 && options.train_bpe < 257)
    throw refuse(
        fmt::format("--train-bpe {} is too small (256 bytes and {}); take 257 or more", options.train_bpe, kEndOfText));
  if (!options.pattern.empty() && options.train_bpe == 0)
    throw refuse("--pattern belongs to --train-bpe (a tokeniser file has its pattern)");
  for (const std::string& file : request.files)
    if (!std::filesystem::exists(file)) throw refuse(fmt::format("{}: no such file", file));
}

/// The keys that this command uses, from --set.
dataset::TokenSettings token_settings(const Request& request) {
  dataset::TokenSettings data;
  input::Schema schema;
  dataset::add_text_keys(schema, data);
  std::vector<input::Override> overrides;
  for (const std::string& set : request.sets) overrides.push_back({set, ""});
  input::read(schema, "", "", overrides);
  return data;
}

/// Text that is encoded before it is written.
constexpr std::size_t kEncodedAtATime = std::size_t{64} << 20;

/// Calls `document` for each document: the whole text, or its parts between separators.
template <class Function>
void for_each_document(std::string_view text, std::string_view separator, Function&& document) {
  while (!separator.empty()) {
    const std::size_t end = text.find(separator);
    if (end == text.npos) break;
    document(text.substr(0, end));
    text.remove_prefix(end + separator.size());
  }
  document(text);
}

bool is_json_lines(const std::string& path, const dataset::TokenSettings& data) {
  return language_model::format_of(path, "FILES", data.format) == dataset::DataFormat::jsonl;
}

Tokenizer trained(const Request& request, const TokenizeOptions& options, const dataset::TokenSettings& data) {
  language_model::PieceCounts counts(options.pattern.empty() ? "gpt2" : options.pattern);
  for (const std::string& path : request.files) {
    if (is_json_lines(path, data)) {
      language_model::for_each_text(path, data.bad_lines, [&](std::string_view text) { counts.add(text, path); });
      continue;
    }
    const storage::MappedFile file(path);
    language_model::require_utf8(file.text(), path);
    for_each_document(file.text(), options.separator, [&](std::string_view document) { counts.add(document, path); });
  }
  language_model::ByteLevelBpe parts = language_model::train_bpe(counts, options.train_bpe, {kEndOfText});
  if (static_cast<std::int64_t>(parts.model.tokens.size()) < options.train_bpe)
    log::warning("the text gives a vocabulary of {}, not of {} (no pair of tokens is left to join)",
                 parts.model.tokens.size(), options.train_bpe);
  return Tokenizer::bpe(std::move(parts), "the trained vocabulary");
}

/// Throws for what this command does not read.
void require_readable(const std::string& path, const TokenizeOptions& options, const dataset::TokenSettings& data) {
  const dataset::DataFormat format = language_model::format_of(path, "FILES", data.format);
  if (format == dataset::DataFormat::tokens)
    throw error(ExitCode::usage, "{}: has tokens already (texts and JSON Lines become tokens); leave it out", path);
  if (format == dataset::DataFormat::jsonl && !options.separator.empty())
    throw error(ExitCode::usage,
                "{}: is JSON Lines, and --document-separator is given (each row is a document); tokenise such files "
                "without it",
                path);
}

int run_tokenize(const Request& request, const TokenizeOptions& options, const parallel::World& world) {
  require_consistent(request, options);
  // One process writes: the files are the same whatever the number of ranks.
  world.on_root([&] {
    const dataset::TokenSettings data = token_settings(request);
    for (const std::string& path : request.files) require_readable(path, options, data);
    const Tokenizer tokenizer = (options.train_bpe > 0 ? trained(request, options, data)
                                                       : language_model::load_tokenizer(options.tokens, {}, "--tokens"))
                                    .adding_special_tokens(data.add_special_tokens);
    language_model::note_special_tokens(tokenizer);
    const std::int64_t end_of_text = language_model::end_of_text(tokenizer);

    const int threads = device::host_threads({}, world.node_size());
    dataset::TokenWriter writer(request.output, tokenizer.vocabulary_size(), tokenizer.stored_text());
    for (const std::string& path : request.files) {
      if (is_json_lines(path, data)) {
        language_model::encode_rows(
            tokenizer, path, data.bad_lines, threads,
            [&](std::span<const std::uint32_t> ids, std::span<const std::uint8_t> counted,
                const language_model::JsonRow& row) { writer.append(ids, std::ssize(row.text), counted); });
        continue;
      }
      const storage::MappedFile file(path);
      const std::string_view whole = file.text();
      std::vector<std::string_view> documents;
      std::size_t bytes = 0;
      const auto write = [&] {
        std::vector<std::vector<std::uint32_t>> encoded =
            language_model::encode_parallel(tokenizer, whole, documents, path, threads);
        for (std::size_t i = 0; i < documents.size(); ++i) {
          std::vector<std::uint32_t> ids = tokenizer.with_begin(std::move(encoded[i]));
          ids.insert(ids.end(), tokenizer.end().begin(), tokenizer.end().end());
          if (end_of_text >= 0 && (ids.empty() || ids.back() != end_of_text))
            ids.push_back(static_cast<std::uint32_t>(end_of_text));
          writer.append(ids, static_cast<std::int64_t>(documents[i].size()));
        }
        documents.clear();
        bytes = 0;
      };
      for_each_document(whole, options.separator, [&](std::string_view document) {
        if (document.empty()) return;
        documents.push_back(document);
        bytes += document.size();
        if (bytes >= kEncodedAtATime) write();
      });
      write();
    }
    const dataset::TokenWriter::Written written = writer.finish();
    print_written(
        request,
        fmt::format("wrote {}: {} tokens of a vocabulary of {}, {} document{}, {} file{}; {:.3f} bytes per token",
                    request.output, format::grouped(written.tokens), tokenizer.vocabulary_size(),
                    format::grouped(written.documents), written.documents == 1 ? "" : "s", written.files,
                    written.files == 1 ? "" : "s",
                    static_cast<double>(written.text_bytes) / static_cast<double>(written.tokens)),
        {{"output", request.output},
         {"tokens", written.tokens},
         {"vocabulary", tokenizer.vocabulary_size()},
         {"documents", written.documents},
         {"files", written.files},
         {"text_bytes", written.text_bytes}});
  });
  return 0;
}

}  // namespace

extern const Command lm_tokenize_command = with_options(
    {"lm tokenize", "FILES", "text to token files",
     "Writes text files and JSON Lines as token files; with --train-bpe trains a vocabulary on them first.",
     Needs::nothing},
    run_tokenize, [](Options& options, TokenizeOptions& own) {
      options.example("weft lm tokenize corpus.txt --train-bpe 8192 --output tokens");
      options.add("--tokens", own.tokens, "bytes|PATH", "the tokeniser: bytes, a tokeniser file, or a model directory");
      options.add("--train-bpe", own.train_bpe, "SIZE", "train a byte-level BPE of this vocabulary on FILES first", 1,
                  1 << 24);
      options.add("--pattern", own.pattern, "NAME", "how it splits text into words, gpt2 or llama3 (default gpt2)",
                  {"gpt2", "llama3"});
      options.add("--document-separator", own.separator, "TEXT",
                  "text between the documents of a file (default: one document)");
      options
          .set(
              "data.add_special_tokens=false: leave out what the post-processor of a tokenizer.json adds; data.format, "
              "data.bad_lines: docs/own_data.md")
          .output("receives the token files and tokenizer.json (data.tokens)");
    });

}  // namespace weft::commands
