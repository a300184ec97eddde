// SPDX-License-Identifier: Apache-2.0
#include "dataset/tokens/batches.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>

#include "base/contract.hpp"
#include "base/error.hpp"
#include "base/progress.hpp"
#include "dataset/tokens/segment_order.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "kernels/random.hpp"
#include "storage/digest.hpp"

namespace weft::dataset {
namespace {

/// Fills sequence `s` of the batch with `predictions` ids from `begin` on and the id after each of them; the rest of
/// the sequence is padding. Temporary memory is passed by the caller.
void fill_window(const TokenSet& set, std::int64_t begin, std::int64_t predictions, std::int64_t s, TokenBatch& batch,
                 std::vector<std::uint32_t>& window, std::vector<std::int64_t>& starts) {
  const std::int64_t length = batch.length;
  const auto row = [&](auto span) {
    return span.subspan(static_cast<std::size_t>(s * length), static_cast<std::size_t>(length));
  };
  const auto ids = row(batch.ids);
  const auto targets = row(batch.targets), positions = row(batch.positions);
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };

  if (predictions > 0) {
    window.resize(at(predictions + 1));
    set.read(begin, window);
  }
  for (std::int64_t t = 0; t < length; ++t) {
    const bool given = t < predictions;
    ids[at(t)] = given ? window[at(t)] : 0;
    targets[at(t)] = given ? static_cast<std::int32_t>(window[at(t + 1)]) : kernels::kIgnored;
    positions[at(t)] = static_cast<std::int32_t>(t);
  }
  batch.counted += predictions;
  const auto leave_out = [&](std::int64_t t) {
    if (targets[at(t)] == kernels::kIgnored) return;
    targets[at(t)] = kernels::kIgnored;
    --batch.counted;
  };
  if (predictions > 0 && set.has_counted()) {
    std::vector<std::uint8_t> counted(at(predictions));
    set.read_counted(begin + 1, counted);
    for (std::int64_t t = 0; t < predictions; ++t)
      if (counted[at(t)] == 0) leave_out(t);
  }
  if (batch.first_key.empty()) return;

  const auto first_key = row(batch.first_key);
  std::fill(first_key.begin(), first_key.end(), 0);
  if (predictions == 0) return;
  set.document_starts(begin, begin + predictions + 1, starts);
  for (std::size_t d = 0; d < starts.size(); ++d) {
    const std::int64_t start = starts[d], end = d + 1 < starts.size() ? starts[d + 1] : length;
    leave_out(start - 1);  // the last id of a document does not predict the next document
    for (std::int64_t t = start; t < std::min(end, length); ++t) {
      positions[at(t)] = static_cast<std::int32_t>(t - start);
      first_key[at(t)] = static_cast<std::int32_t>(start);
    }
  }
}

constexpr std::int64_t kIdsRead = std::int64_t{1} << 20;  // ids read at a time
constexpr double kFirstFraction = 0.01;                   // fraction of the segments at the begin of a curriculum

struct RankedSegment {
  std::int64_t difficulty;
  std::uint32_t number;
  bool operator<(const RankedSegment& other) const {
    return difficulty != other.difficulty ? difficulty < other.difficulty : number < other.number;
  }
};

/// piece(first position, ids) for all ids of a set, in order.
template <class Piece>
void for_each_piece(const TokenSet& set, const Piece& piece) {
  std::vector<std::uint32_t> ids;
  for (std::int64_t begin = 0; begin < set.size(); begin += kIdsRead) {
    ids.resize(static_cast<std::size_t>(std::min(kIdsRead, set.size() - begin)));
    set.read(begin, ids);
    piece(begin, ids);
    note_progress();
  }
}

/// Numbers of the segments of `length` ids, the easiest first; equal ones in stored order. Costs are integers, so that
/// the order does not depend on rounding in sums.
std::vector<std::uint32_t> windows_by_difficulty(const TokenSet& set, std::int64_t length) {
  constexpr double kUnits = 1 << 16;  // per bit
  const std::int64_t n = (set.size() - 1) / length;
  if (n > std::numeric_limits<std::uint32_t>::max())
    throw error(ExitCode::usage,
                "{}: has {} windows of {} tokens (a curriculum orders 2^32); take a longer data.sequence", set.name(),
                n, length);
  std::vector<std::int64_t> cost(static_cast<std::size_t>(set.vocabulary()), 0);
  for_each_piece(set, [&](std::int64_t, const std::vector<std::uint32_t>& ids) {
    for (const std::uint32_t id : ids) ++cost[id];
  });
  for (std::int64_t& of_id : cost)
    if (of_id > 0)
      of_id = std::llround(kUnits * std::log2(static_cast<double>(set.size()) / static_cast<double>(of_id)));
  std::vector<RankedSegment> windows(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < windows.size(); ++i) windows[i] = {0, static_cast<std::uint32_t>(i)};
  for_each_piece(set, [&](std::int64_t begin, const std::vector<std::uint32_t>& ids) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto window = static_cast<std::size_t>((begin + static_cast<std::int64_t>(i)) / length);
      if (window < windows.size()) windows[window].difficulty += cost[ids[i]];
    }
  });
  std::sort(windows.begin(), windows.end());
  std::vector<std::uint32_t> numbers;
  numbers.reserve(windows.size());
  for (const RankedSegment& window : windows) numbers.push_back(window.number);
  return numbers;
}

}  // namespace

TokenRows::TokenRows(std::int64_t sequences, std::int64_t length, bool document_mask) {
  const auto rows = static_cast<std::size_t>(sequences * length);
  ids_.resize(rows);
  targets_.resize(rows);
  positions_.resize(rows);
  first_key_.resize(document_mask ? rows : 0);
  batch_ = {sequences, length, ids_, targets_, positions_, first_key_, 0};
}

Segments::Segments(TokenSet set, const TokenSettings& settings) : set_(std::move(set)) {
  if (settings.pack == Pack::documents) rows_ = std::make_shared<const DocumentRows>(set_, settings);
}

std::int64_t Segments::count(std::int64_t length) const {
  return rows_ ? std::ssize(rows_->rows()) : (set_.size() - 1 + length - 1) / length;
}

Segments::Place Segments::place(std::int64_t number, std::int64_t length) const {
  if (rows_) {
    const DocumentRows::Row& row = rows_->rows()[static_cast<std::size_t>(number)];
    WEFT_ASSERT(row.ids <= length + 1);
    return {row.begin, row.ids - 1};
  }
  return {number * length, std::min(length, set_.size() - 1 - number * length)};
}

void Segments::fill(std::int64_t first, TokenBatch& batch) const {
  std::vector<std::uint32_t> window;
  std::vector<std::int64_t> starts;
  batch.counted = 0;
  const std::int64_t end = count(batch.length);
  for (std::int64_t s = 0; s < batch.sequences; ++s) {
    const Place segment = first + s < end ? place(first + s, batch.length) : Place{};
    fill_window(set_, segment.begin, segment.predictions, s, batch, window, starts);
  }
}

std::int64_t epoch_tokens(const Segments& segments, const TokenSettings& settings) {
  if (settings.order != TokenOrder::sequential && settings.order != TokenOrder::shuffled) return segments.set().size();
  return segments.count(settings.sequence) * settings.sequence;
}

TokenBatches::TokenBatches(Segments segments, const TokenSettings& settings, std::uint64_t seed)
    : segments_(std::move(segments)), settings_(settings), seed_(seed) {
  const TokenSet& set = segments_.set();
  WEFT_ASSERT(set.size() > settings.sequence);
  WEFT_ASSERT((settings.pack == Pack::documents) == (segments_.documents() != nullptr));
  if (settings.order == TokenOrder::curriculum)
    windows_ = std::make_shared<const std::vector<std::uint32_t>>(windows_by_difficulty(set, settings.sequence));
}

std::int64_t order_bytes(const TokenSettings& settings, std::int64_t tokens, std::int64_t vocabulary) {
  if (settings.pack == Pack::documents) return document_rows_bytes(settings, tokens);
  if (settings.order != TokenOrder::curriculum) return 0;
  constexpr std::int64_t kWindowBytes = sizeof(RankedSegment) + sizeof(std::uint32_t);
  return (tokens - 1) / settings.sequence * kWindowBytes + 8 * vocabulary + 4 * kIdsRead;
}

/// Start of the segment whose first token has this number in the run.
std::int64_t TokenBatches::random_begin(std::int64_t token, std::int64_t length) const {
  const auto below = [](const kernels::Random4& random, std::int64_t bound) {
    return static_cast<std::int64_t>(kernels::uniform_below(random, static_cast<std::uint64_t>(bound)));
  };
  const kernels::Random4 random =
      kernels::philox(seed_, kernels::Purpose::token_window, 0, static_cast<std::uint64_t>(token));
  const double done = windows_ ? static_cast<double>(token) / static_cast<double>(settings_.batch_tokens) /
                                     static_cast<double>(settings_.curriculum_steps)
                               : 1;
  if (done >= 1) return below(random, segments_.set().size() - length);
  const double first = kFirstFraction * kFirstFraction, fraction = std::sqrt(first + (1 - first) * done);
  const auto easy =
      std::max<std::int64_t>(1, static_cast<std::int64_t>(std::ceil(fraction * static_cast<double>(windows_->size()))));
  const std::int64_t window = (*windows_)[static_cast<std::size_t>(below(random, easy))];
  // A shorter sequence is any part of the segment.
  return window * settings_.sequence + below({{random.word[2], random.word[3]}}, settings_.sequence - length + 1);
}

void TokenBatches::fill(std::int64_t cursor, std::int64_t first, TokenBatch& batch) const {
  const std::int64_t length = batch.length;
  std::vector<std::uint32_t> window;
  std::vector<std::int64_t> starts;
  batch.counted = 0;
  for (std::int64_t s = 0; s < batch.sequences; ++s) {
    const std::int64_t token = cursor + (first + s) * length;  // number of the sequence's first token in the run
    Segments::Place segment;
    if (settings_.order == TokenOrder::sequential || settings_.order == TokenOrder::shuffled) {
      const std::int64_t count = segments_.count(length), epoch = token / length / count,
                         number = token / length % count;
      segment = segments_.place(
          settings_.order == TokenOrder::shuffled ? shuffled_segment(number, count, seed_, epoch) : number, length);
    } else {
      segment = {random_begin(token, length), length};
    }
    fill_window(segments_.set(), segment.begin, segment.predictions, s, batch, window, starts);
  }
}

std::int64_t disjoint_windows(std::int64_t ids, std::int64_t length) {
  return ids / (length + 1) + (ids % (length + 1) >= 2 ? 1 : 0);
}

DocumentRecords::Sequence disjoint_window(std::int64_t ids, std::int64_t length, std::int64_t number) {
  const std::int64_t begin = number * (length + 1);
  return {begin, std::clamp<std::int64_t>(ids - 1 - begin, 0, length)};
}

namespace {

/// A number below 2^56 that follows from the ids of a sequence.
std::int64_t number_of(const TokenSet& set, const DocumentRecords::Sequence& sequence) {
  std::vector<std::uint32_t> ids(static_cast<std::size_t>(sequence.predictions + 1));
  set.read(sequence.begin, ids);
  const std::string digest = storage::sha256({reinterpret_cast<const char*>(ids.data()), 4 * ids.size()});
  return std::stoll(digest.substr(0, 14), nullptr, 16);
}

}  // namespace

DocumentRecords::DocumentRecords(const TokenSet& set, Grouping grouping, std::int64_t length,
                                 std::int64_t most_sequences, std::uint64_t seed) {
  if (!set.has_documents())
    throw collective_error(ExitCode::usage,
                           "{}: does not say where documents begin (a record is a document); take JSON Lines or token "
                           "files, or privacy.unit = \"sequence\"",
                           set.name());
  std::vector<std::int64_t> starts, owners;
  set.document_starts(0, set.size(), starts);
  starts.insert(starts.begin(), 0);
  starts.push_back(set.size());
  std::vector<std::size_t> documents(starts.size() - 1);
  std::iota(documents.begin(), documents.end(), std::size_t{0});
  if (grouping == Grouping::by_owner) {
    owners = set.owners();
    if (owners.empty())
      throw collective_error(ExitCode::usage,
                             "{}: does not say whom its documents belong to (a record is all that an owner has); take "
                             "JSON Lines, or privacy.unit = \"document\"",
                             set.name());
    std::stable_sort(documents.begin(), documents.end(),
                     [&](std::size_t a, std::size_t b) { return owners[a] < owners[b]; });
  }
  std::vector<Sequence> all;  // of a record
  for (std::size_t i = 0; i < documents.size(); ++i) {
    const std::size_t document = documents[i];
    const std::int64_t last = starts[document + 1] - 1;
    for (std::int64_t begin = starts[document]; begin < last; begin += length)
      all.push_back({begin, std::min(length, last - begin)});
    const bool more = !owners.empty() && i + 1 < documents.size() && owners[document] == owners[documents[i + 1]];
    if (more || all.empty()) continue;
    const std::int64_t count = std::ssize(all);
    if (count > most_sequences) {
      // Not the number of the record, which depends on the others.
      const std::int64_t number = number_of(set, all.front());
      for (std::int64_t s = 0; s < most_sequences; ++s)
        sequences_.push_back(all[static_cast<std::size_t>(shuffled_segment(s, count, seed, number))]);
    } else {
      sequences_.insert(sequences_.end(), all.begin(), all.end());
    }
    first_.push_back(std::ssize(sequences_));
    all.clear();
  }
  if (count() == 0)
    throw collective_error(ExitCode::usage, "{}: no document has two ids; give other training data", set.name());
}

std::span<const DocumentRecords::Sequence> DocumentRecords::of(std::int64_t record) const {
  const auto first = static_cast<std::size_t>(first_.at(static_cast<std::size_t>(record))),
             end = static_cast<std::size_t>(first_.at(static_cast<std::size_t>(record) + 1));
  return std::span(sequences_).subspan(first, end - first);
}

void fill_sequences(const TokenSet& set, std::span<const DocumentRecords::Sequence> sequences, TokenBatch& batch,
                    const TokenSet* added) {
  WEFT_ASSERT(std::ssize(sequences) == batch.sequences);
  std::vector<std::uint32_t> window;
  std::vector<std::int64_t> starts;
  batch.counted = 0;
  for (std::int64_t s = 0; s < batch.sequences; ++s) {
    const DocumentRecords::Sequence& sequence = sequences[static_cast<std::size_t>(s)];
    const bool beyond = added != nullptr && sequence.begin >= set.size();
    fill_window(beyond ? *added : set, sequence.begin - (beyond ? set.size() : 0), sequence.predictions, s, batch,
                window, starts);
  }
}

}  // namespace weft::dataset
