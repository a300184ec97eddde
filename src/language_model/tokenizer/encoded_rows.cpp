// SPDX-License-Identifier: Apache-2.0
#include "language_model/tokenizer/encoded_rows.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/format.hpp"
#include "base/log.hpp"
#include "base/progress.hpp"
#include "dataset/activations/workers.hpp"
#include "language_model/tokenizer/tokenizer_files.hpp"
#include "storage/mapped_file.hpp"

namespace weft::language_model {
namespace {

/// Text that is encoded before it is taken, and rows.
constexpr std::size_t kBytesAtATime = std::size_t{64} << 20, kRowsAtATime = std::size_t{1} << 18;
/// Groups of them, each of which a thread encodes with one cache.
constexpr std::int64_t kGroups = 64;

void log_counts(const std::string& path, const JsonRowReader& reader, const RowCounts& counts) {
  const auto of_form = [](std::int64_t rows, const char* form) {
    return rows == 0 ? "" : fmt::format(", {} {}", format::grouped(rows), form);
  };
  log::info("{}: JSON Lines, {} rows{}{}{}; {} tokens{}", path, format::grouped(counts.rows()),
            of_form(counts.texts, "of text"), of_form(counts.completions, "of prompt and completion"),
            of_form(counts.segments, "of segments"), format::grouped(counts.tokens),
            counts.counted == counts.tokens ? ""
                                            : fmt::format(", of which {} count with data.loss_on = \"completion\"",
                                                          format::grouped(counts.counted)));
  if (counts.joined > 0)
    log::info(
        "{}: {} rows have a token that joins text that counts and text that does not; it belongs to the later one",
        path, format::grouped(counts.joined));
  if (counts.empty > 0) log::warning("{}: {} rows have no text and were left out", path, counts.empty);
  if (counts.skipped == 0) return;
  log::warning("{}: {} bad lines were left out (data.bad_lines = \"skip\"), the first of them:", path, counts.skipped);
  for (const std::string& message : reader.first_skipped()) log::warning("{}", message);
}

}  // namespace

std::int64_t end_symbol(const Tokenizer& tokenizer) {
  if (const std::int64_t end = tokenizer.special(stored_eos_token(tokenizer)); end >= 0) return end;
  if (const std::int64_t end = end_of_text(tokenizer); end >= 0) return end;
  return tokenizer.special("EOS");
}

EncodedRow encode_row(const Tokenizer& tokenizer, std::int64_t last, const JsonRow& row, const std::string& source,
                      PieceCache& cache) {
  EncodedRow encoded;
  if (row.text.empty()) return encoded;
  const std::string_view text = row.text;
  std::vector<std::uint32_t>& ids = encoded.ids;
  ids = tokenizer.encode(text, source, 0, cache);
  encoded.counted.assign(ids.size(), 0);
  std::size_t begin = 0;
  for (std::size_t i = 0; i < row.borders.size(); ++i) {
    std::size_t end = 0;
    if (const std::size_t border = row.borders[i]; border == text.size()) {
      end = ids.size();
    } else if (border > 0) {
      const std::vector<std::uint32_t> before = tokenizer.encode(text.substr(0, border), source, 0, cache);
      const auto differs = std::mismatch(before.begin(), before.end(), ids.begin(), ids.end()).first;
      end = static_cast<std::size_t>(differs - before.begin());
      encoded.joined = encoded.joined || differs != before.end();
    }
    end = std::max(begin, end);
    if (i % 2 == 1) std::fill(encoded.counted.begin() + begin, encoded.counted.begin() + end, std::uint8_t{1});
    begin = end;
  }
  const bool end_counts = row.borders.size() % 2 == 1;
  if (end_counts) std::fill(encoded.counted.begin() + begin, encoded.counted.end(), std::uint8_t{1});
  if (row.form == JsonRow::Form::segments) return encoded;

  const std::size_t n = ids.size();
  ids = tokenizer.with_begin(std::move(ids));
  encoded.counted.insert(encoded.counted.begin(), ids.size() - n, row.form == JsonRow::Form::text ? 1 : 0);
  ids.insert(ids.end(), tokenizer.end().begin(), tokenizer.end().end());
  if (last >= 0 && (ids.empty() || ids.back() != last)) ids.push_back(static_cast<std::uint32_t>(last));
  encoded.counted.resize(ids.size(), 1);
  return encoded;
}

RowCounts encode_rows(const Tokenizer& tokenizer, const std::string& path, dataset::BadLines bad_lines, int n_threads,
                      const TakeRow& take, const std::string& owner_field) {
  const storage::MappedFile file(path);
  JsonRowReader reader(file.text(), path, bad_lines, owner_field);
  const std::int64_t last = end_symbol(tokenizer);
  RowCounts counts;
  dataset::Workers workers(n_threads);
  std::vector<JsonRow> rows;
  std::vector<EncodedRow> encoded;
  const auto encode = [&] {
    encoded.assign(rows.size(), {});
    const auto group_begin = [&](std::int64_t group) {
      return rows.size() * static_cast<std::size_t>(group) / static_cast<std::size_t>(kGroups);
    };
    workers.run(kGroups, [&](std::int64_t group) {
      PieceCache cache;
      for (std::size_t i = group_begin(group); i < group_begin(group + 1); ++i) {
        encoded[i] = encode_row(tokenizer, last, rows[i], fmt::format("{}:{}", path, rows[i].line), cache);
        note_progress();
      }
    });
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const EncodedRow& row = encoded[i];
      if (row.ids.empty()) {
        ++counts.empty;
        continue;
      }
      ++(rows[i].form == JsonRow::Form::text         ? counts.texts
         : rows[i].form == JsonRow::Form::completion ? counts.completions
                                                     : counts.segments);
      counts.joined += row.joined ? 1 : 0;
      counts.tokens += std::ssize(row.ids);
      counts.counted += std::count(row.counted.begin(), row.counted.end(), 1);
      take(row.ids, row.counted, rows[i]);
    }
    rows.clear();
  };
  std::size_t bytes = 0;
  for (JsonRow row; reader.next(row);) {
    bytes += row.text.size();
    rows.push_back(std::move(row));
    if (bytes < kBytesAtATime && rows.size() < kRowsAtATime) continue;
    encode();
    bytes = 0;
  }
  encode();
  counts.skipped = reader.skipped();
  log_counts(path, reader, counts);
  if (counts.rows() == 0)
    throw error(ExitCode::data, "{}: no row has text ({} were left out); give a file with rows", path,
                counts.skipped + counts.empty);
  return counts;
}

void for_each_text(const std::string& path, dataset::BadLines bad_lines,
                   const std::function<void(std::string_view)>& take, const std::string& owner_field) {
  const storage::MappedFile file(path);
  JsonRowReader reader(file.text(), path, bad_lines, owner_field);
  for (JsonRow row; reader.next(row);) take(row.text);
}

}  // namespace weft::language_model
