// SPDX-License-Identifier: Apache-2.0
#include "dataset/tokens/document_rows.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/format.hpp"
#include "base/progress.hpp"

namespace weft::dataset {
namespace {

constexpr std::int64_t kIdsSearched = std::int64_t{1} << 20;  // ids whose documents are listed at a time

/// Two rows in sequence have more than length + 1 ids together.
std::int64_t most_rows(const TokenSettings& settings, std::int64_t tokens) {
  return 2 * tokens / (settings.sequence + 1) + 1;
}

/// True if an id of the row that can be a target counts in the loss.
bool any_counts(const TokenSet& set, const DocumentRows::Row& row) {
  if (!set.has_counted()) return true;
  std::vector<std::uint8_t> counted(static_cast<std::size_t>(row.ids - 1));
  set.read_counted(row.begin + 1, counted);
  return std::any_of(counted.begin(), counted.end(), [](std::uint8_t one) { return one != 0; });
}

}  // namespace

DocumentRows::DocumentRows(const TokenSet& set, const TokenSettings& settings)
    : most_(settings.sequence + 1), cut_(settings.long_documents == LongDocuments::cut) {
  // Not enlarged later: that would take twice the memory.
  rows_.reserve(static_cast<std::size_t>(most_rows(settings, set.size())));
  std::vector<std::int64_t> starts;
  std::int64_t begin = 0;  // of the present document
  for (std::int64_t from = 0; from < set.size(); from += kIdsSearched) {
    // Starts after `from`, up to the first position of the next piece.
    set.document_starts(from, std::min(from + kIdsSearched + 1, set.size()), starts);
    for (const std::int64_t start : starts) {
      add(set, {begin, from + start - begin});
      begin = from + start;
    }
    note_progress();
  }
  add(set, {begin, set.size() - begin});
  close(set);
  if (rows_.empty())
    throw collective_error(ExitCode::data,
                           "{}: no row of whole documents ({}); take a longer data.sequence or data.long_documents = "
                           "\"cut\"",
                           set.name(), summary());
}

void DocumentRows::add(const TokenSet& set, const Row& document) {
  ++documents_;
  const bool fits = document.ids <= most_;
  if (!fits || open_.begin + open_.ids != document.begin || open_.ids + document.ids > most_) close(set);
  if (!fits) {
    ++long_;
    left_out_ += document.ids - (cut_ ? most_ : 0);
    if (!cut_) return;
    open_ = {document.begin, most_};
    return close(set);
  }
  open_ = open_.ids == 0 ? document : Row{open_.begin, open_.ids + document.ids};
}

/// Ends the present row. One id alone predicts nothing.
void DocumentRows::close(const TokenSet& set) {
  if (open_.ids == 1) {
    ++single_;
    ++left_out_;
  } else if (open_.ids > 1 && !any_counts(set, open_)) {
    ++without_loss_;
    left_out_ += open_.ids;
  } else if (open_.ids > 1) {
    rows_.push_back(open_);
    kept_ += open_.ids;
  }
  open_ = {};
}

std::string DocumentRows::summary() const {
  const auto n_rows = static_cast<std::int64_t>(rows_.size());
  std::string text = fmt::format("{} documents in {} rows of {} ids", format::grouped(documents_),
                                 format::grouped(n_rows), format::grouped(most_));
  if (n_rows > 0)
    text += fmt::format(", {:.0f} % filled",
                        100 * static_cast<double>(kept_) / static_cast<double>(most_) / static_cast<double>(n_rows));
  if (long_ > 0) text += fmt::format("; longer documents {}: {}", cut_ ? "cut" : "dropped", format::grouped(long_));
  if (single_ > 0) text += fmt::format("; rows of a single id left out: {}", format::grouped(single_));
  if (without_loss_ > 0)
    text += fmt::format("; rows in which no token counts left out: {}", format::grouped(without_loss_));
  if (left_out_ > 0) text += fmt::format("; ids left out: {}", format::grouped(left_out_));
  return text;
}

std::int64_t document_rows_bytes(const TokenSettings& settings, std::int64_t tokens) {
  return most_rows(settings, tokens) * static_cast<std::int64_t>(sizeof(DocumentRows::Row)) + 8 * kIdsSearched;
}

}  // namespace weft::dataset
