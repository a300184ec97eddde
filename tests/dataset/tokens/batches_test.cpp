// SPDX-License-Identifier: Apache-2.0
//
// Sequences of ids: what a window holds, which ids and predictions an epoch covers, that a sequence depends on seed and
// position alone, and what the document mask changes.
#include "dataset/tokens/batches.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "dataset/tokens/segment_order.hpp"
#include "kernels/language/head/cross_entropy.hpp"
#include "storage/token_file.hpp"
#include "tests/test.hpp"

namespace weft::dataset {
namespace {

using kernels::kIgnored;

/// Ids 0, 1, 2, …: an id is its own position.
TokenSet counting(std::int64_t n) {
  std::vector<std::uint32_t> ids(static_cast<std::size_t>(n));
  std::iota(ids.begin(), ids.end(), 0u);
  return TokenSet("counting", ids, n, 0);
}

TokenSettings settings(std::int64_t sequences, std::int64_t length, TokenOrder order) {
  TokenSettings data;
  data.batch_tokens = sequences * length;
  data.sequence = length;
  data.order = order;
  return data;
}

}  // namespace

TEST_CASE("random windows are windows of the set; their starts are uniform and reach both ends") {
  constexpr std::int64_t kLength = 7, kSize = 20;
  const TokenBatches batches(counting(kSize), settings(13, kLength, TokenOrder::random_windows), 5);
  TokenRows rows(13, kLength, false);
  std::vector<std::int64_t> starts(static_cast<std::size_t>(kSize), 0);
  constexpr std::int64_t kSteps = 1000;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    batches.fill(step * 13 * kLength, 0, rows.batch());
    REQUIRE(rows.batch().counted == 13 * kLength);
    for (std::size_t s = 0; s < 13; ++s) {
      const std::uint32_t first = rows.batch().ids[s * kLength];
      ++starts[first];
      for (std::size_t t = 0; t < kLength; ++t) {
        REQUIRE(rows.batch().ids[s * kLength + t] == first + t);
        REQUIRE(rows.batch().targets[s * kLength + t] == static_cast<std::int32_t>(first + t + 1));
        REQUIRE(rows.batch().positions[s * kLength + t] == static_cast<std::int32_t>(t));
      }
    }
  }
  // 13 starts are possible. The expected count is 1000; its standard deviation is 30, of which six never occur by
  // chance.
  for (std::int64_t start = 0; start < kSize; ++start)
    if (start < kSize - kLength)
      CHECK(std::abs(starts[static_cast<std::size_t>(start)] - kSteps) < 180);
    else
      CHECK(starts[static_cast<std::size_t>(start)] == 0);
}

TEST_CASE("a sequence depends on seed and position alone: any rank can fill any part of a step") {
  for (const TokenOrder order :
       {TokenOrder::random_windows, TokenOrder::sequential, TokenOrder::shuffled, TokenOrder::curriculum}) {
    TokenSettings data = settings(12, 5, order);
    data.curriculum_steps = order == TokenOrder::curriculum ? 20 : 0;
    const TokenBatches batches(counting(1000), data, 3);
    TokenRows all(12, 5, true), part(4, 5, true);
    batches.fill(720, 0, all.batch());
    for (const std::int64_t first : {8, 0, 4}) {
      batches.fill(720, first, part.batch());
      const auto from = static_cast<std::size_t>(first * 5);
      CHECK(std::equal(part.batch().ids.begin(), part.batch().ids.end(),
                       all.batch().ids.begin() + static_cast<std::ptrdiff_t>(from)));
      CHECK(std::equal(part.batch().targets.begin(), part.batch().targets.end(),
                       all.batch().targets.begin() + static_cast<std::ptrdiff_t>(from)));
    }
    TokenRows other(12, 5, true);
    TokenBatches(counting(1000), data, 4).fill(720, 0, other.batch());
    const bool same = std::equal(other.batch().ids.begin(), other.batch().ids.end(), all.batch().ids.begin());
    CHECK(same == (order == TokenOrder::sequential));
  }
}

TEST_CASE("a curriculum draws the easiest windows first, then any as random windows are drawn") {
  // Window i has i % 50 rare ids, the others are 0: window 0 and 50 are the easiest, 49 and 99 the hardest.
  constexpr std::int64_t kWindows = 100, kLength = 64, kSequences = 8, kSteps = 40;
  std::vector<std::uint32_t> ids;
  for (std::int64_t window = 0; window < kWindows; ++window)
    for (std::int64_t t = 0; t < kLength; ++t) ids.push_back(t < window % 50 ? static_cast<std::uint32_t>(1 + t) : 0);
  ids.push_back(0);
  const TokenSet set("curriculum", ids, 64, 0);
  TokenSettings data = settings(kSequences, kLength, TokenOrder::curriculum);
  data.curriculum_steps = kSteps;
  const TokenBatches batches(set, data, 5), random(set, settings(kSequences, kLength, TokenOrder::random_windows), 5);
  TokenRows rows(kSequences, kLength, false), other(kSequences, kLength, false);
  const auto rare = [&](std::size_t s) {
    const auto ids_of = rows.batch().ids.subspan(s * kLength, kLength);
    return kLength - std::count(ids_of.begin(), ids_of.end(), 0u);
  };
  std::int64_t hardest_of_all = 0;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    batches.fill(step * kSequences * kLength, 0, rows.batch());
    CHECK(rows.batch().counted == kSequences * kLength);
    for (std::size_t s = 0; s < kSequences; ++s) {
      const double done = (static_cast<double>(step) * kSequences + static_cast<double>(s)) / (kSteps * kSequences);
      const double fraction = std::sqrt(1e-4 + (1 - 1e-4) * done);
      CHECK(static_cast<double>(rare(s)) <= std::ceil(fraction * kWindows) / 2);  // two windows of each difficulty
      hardest_of_all = std::max(hardest_of_all, rare(s));
      if (step == 0 && s == 0) CHECK(rare(s) == 0);
    }
  }
  CHECK(hardest_of_all > 40);
  batches.fill(kSteps * kSequences * kLength, 0, rows.batch());
  random.fill(kSteps * kSequences * kLength, 0, other.batch());
  CHECK(std::equal(rows.batch().ids.begin(), rows.batch().ids.end(), other.batch().ids.begin()));

  // Shorter sequences are parts of the windows: 16 of the first window's ids are all 0.
  TokenRows shorter(4 * kSequences, kLength / 4, false);
  batches.fill(0, 0, shorter.batch());
  CHECK(shorter.batch().counted == kSequences * kLength);
  CHECK(std::count(shorter.batch().ids.begin(), shorter.batch().ids.begin() + kLength / 4, 0u) == kLength / 4);
}

TEST_CASE("sequential order counts each prediction once per epoch, then begins again") {
  constexpr std::int64_t kSize = 23, kLength = 5;  // 22 predictions: 4 windows of 5 and one of 2
  const TokenBatches batches(counting(kSize), settings(5, kLength, TokenOrder::sequential), 1);
  TokenRows rows(5, kLength, false), next(5, kLength, false);
  batches.fill(0, 0, rows.batch());
  CHECK(rows.batch().counted == kSize - 1);
  std::vector<std::int32_t> targets;
  for (std::size_t i = 0; i < 25; ++i)
    if (rows.batch().targets[i] != kIgnored) {
      targets.push_back(rows.batch().targets[i]);
      CHECK(rows.batch().ids[i] + 1 == static_cast<std::uint32_t>(rows.batch().targets[i]));
    } else {
      CHECK(rows.batch().ids[i] == 0);
    }
  CHECK(targets.size() == kSize - 1);
  CHECK(std::is_sorted(targets.begin(), targets.end()));
  batches.fill(25, 0, next.batch());
  CHECK(std::equal(next.batch().ids.begin(), next.batch().ids.end(), rows.batch().ids.begin()));
}

TEST_CASE("shuffled order has each segment once per epoch, in another order each time, on any number of ranks") {
  constexpr std::int64_t kSize = 94, kLength = 5;  // 93 predictions: 18 segments of 5 and one of 3
  constexpr std::int64_t kSegments = 19, kSequences = 8, kEpochs = 8;
  const TokenBatches batches(counting(kSize), settings(kSequences, kLength, TokenOrder::shuffled), 7);
  CHECK(batches.epoch_tokens() == kSegments * kLength);
  std::vector<std::int64_t> expected(kSegments);
  std::iota(expected.begin(), expected.end(), 0);
  for (const std::int64_t ranks : {1, 2, 4}) {
    std::vector<std::int64_t> segments;
    const std::int64_t own = kSequences / ranks;
    TokenRows rows(own, kLength, false);
    std::int64_t counted = 0;
    for (std::int64_t step = 0; step < kEpochs * kSegments / kSequences; ++step)  // batches span the ends of epochs
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        batches.fill(step * kSequences * kLength, rank * own, rows.batch());
        counted += rows.batch().counted;
        for (std::int64_t s = 0; s < own; ++s)
          segments.push_back(rows.batch().ids[static_cast<std::size_t>(s * kLength)] / kLength);
      }
    CHECK(counted == kEpochs * (kSize - 1));
    std::set<std::vector<std::int64_t>> orders;
    for (std::int64_t epoch = 0; epoch < kEpochs; ++epoch) {
      std::vector<std::int64_t> order(segments.begin() + epoch * kSegments, segments.begin() + (epoch + 1) * kSegments);
      orders.insert(order);
      std::sort(order.begin(), order.end());
      CHECK(order == expected);
    }
    CHECK(orders.size() == kEpochs);
  }
}

TEST_CASE("a shuffled segment is any segment with the same probability") {
  // 20,000 permutations of 5: each number is 4,000 times at each place, with a standard deviation of 57.
  std::vector<std::int64_t> counts(25, 0);
  for (std::int64_t epoch = 0; epoch < 20000; ++epoch)
    for (std::int64_t i = 0; i < 5; ++i) ++counts[static_cast<std::size_t>(5 * i + shuffled_segment(i, 5, 3, epoch))];
  for (const std::int64_t count : counts) CHECK(std::abs(count - 4000) < 6 * 57);
  for (const std::int64_t n : {1, 2, 3, 4, 5, 16, 17, 1000}) {
    std::set<std::int64_t> seen;
    for (std::int64_t i = 0; i < n; ++i) seen.insert(shuffled_segment(i, n, 1, 0));
    CHECK(std::ssize(seen) == n);
    CHECK(*seen.begin() == 0);
    CHECK(*seen.rbegin() == n - 1);
  }
}

TEST_CASE("evaluation windows count each prediction once, whatever their number per batch") {
  const TokenSet set = counting(38);
  CHECK(Segments(set).count(9) == 5);   // 37 predictions: four windows of 9 and one of 1
  CHECK(Segments(set).count(37) == 1);  // the whole set
  CHECK(Segments(set).count(100) == 1);
  for (const std::int64_t sequences : {1, 2, 3, 7}) {
    TokenRows rows(sequences, 9, false);
    std::vector<std::int32_t> targets;
    for (std::int64_t first = 0; first < Segments(set).count(9); first += sequences) {
      Segments(set).fill(first, rows.batch());
      const std::size_t before = targets.size();
      for (const std::int32_t target : rows.batch().targets)
        if (target != kIgnored) targets.push_back(target);
      CHECK(rows.batch().counted == static_cast<std::int64_t>(targets.size() - before));
    }
    std::vector<std::int32_t> expected(37);
    std::iota(expected.begin(), expected.end(), 1);
    CHECK(targets == expected);
  }
}

TEST_CASE("the document mask restarts positions and ignores targets across borders") {
  const std::filesystem::path path = std::filesystem::temp_directory_path() / fmt::format("weft_mask_{}.h5", getpid());
  std::vector<std::uint32_t> ids(12);
  std::iota(ids.begin(), ids.end(), 0u);
  const std::vector<std::int64_t> documents{0, 3, 4, 9};
  storage::write_token_file(path, ids, documents, 12, 0, "");
  const TokenSet set = TokenSet::open(path.string());

  std::vector<std::int64_t> starts;
  set.document_starts(0, 12, starts);
  CHECK(starts == std::vector<std::int64_t>{3, 4, 9});  // positions after the first
  set.document_starts(3, 9, starts);
  CHECK(starts == std::vector<std::int64_t>{1});
  set.part(2, 12, 0).document_starts(0, 10, starts);
  CHECK(starts == std::vector<std::int64_t>{1, 2, 7});

  TokenRows masked(2, 6, true), plain(2, 6, false);
  Segments(set).fill(0, masked.batch());  // rows 0..5 and 6..11 of ids 0..11
  CHECK(std::vector(masked.batch().positions.begin(), masked.batch().positions.end()) ==
        std::vector<std::int32_t>{0, 1, 2, 0, 0, 1, 0, 1, 2, 0, 1, 2});
  CHECK(std::vector(masked.batch().first_key.begin(), masked.batch().first_key.end()) ==
        std::vector<std::int32_t>{0, 0, 0, 3, 4, 4, 0, 0, 0, 3, 3, 3});
  CHECK(std::vector(masked.batch().targets.begin(), masked.batch().targets.end()) ==
        std::vector<std::int32_t>{1, 2, kIgnored, kIgnored, 5, 6, 7, 8, kIgnored, 10, 11, kIgnored});
  CHECK(masked.batch().counted == 8);
  Segments(set).fill(0, plain.batch());
  CHECK(plain.batch().counted == 11);
  CHECK(plain.batch().positions[5] == 5);
  CHECK(plain.batch().targets[2] == 3);
  std::filesystem::remove(path);
}

TEST_CASE("ids that do not count in the loss are read and are no targets, with and without the document mask") {
  std::vector<std::uint32_t> ids(8);
  std::iota(ids.begin(), ids.end(), 0u);
  const TokenSet set("marked", ids, 8, 0, {{0, 4}, {1, 0, 1, 1, 1, 0, 1, 0}});
  for (const bool mask : {false, true}) {
    TokenRows rows(2, 4, mask);
    Segments(set, settings(4, 4, TokenOrder::sequential)).fill(0, rows.batch());
    CHECK(std::vector(rows.batch().targets.begin(), rows.batch().targets.end()) ==
          std::vector<std::int32_t>{kIgnored, 2, 3, mask ? kIgnored : 4, kIgnored, 6, kIgnored, kIgnored});
    CHECK(rows.batch().counted == (mask ? 3 : 4));
    CHECK(rows.batch().ids[5] == 5);
  }
  TokenRows rows(2, 4, false);
  Segments(set.counting_all(), settings(4, 4, TokenOrder::sequential)).fill(0, rows.batch());
  CHECK(rows.batch().counted == 7);
}

TEST_CASE("rows of documents in which no id counts are left out, and counted") {
  std::vector<std::uint32_t> ids(20);
  std::iota(ids.begin(), ids.end(), 0u);
  // Documents of 6, 4 and 10 ids, in rows of at most 6: of the last one what counts does not fit.
  std::vector<std::uint8_t> counted(20);
  counted[5] = counted[8] = counted[17] = 1;
  TokenSettings data = settings(5, 5, TokenOrder::sequential);
  data.pack = Pack::documents;
  const Segments rows(TokenSet("marked", ids, 20, 0, {{0, 6, 10}, counted}), data);
  CHECK(rows.documents()->rows().size() == 2);
  CHECK(rows.documents()->summary() ==
        "3 documents in 2 rows of 6 ids, 83 % filled; longer documents cut: 1; rows in which no token counts left out: "
        "1; "
        "ids left out: 10");
  std::fill(counted.begin(), counted.end(), std::uint8_t{0});
  counted[17] = 1;
  CHECK_THROWS_WITH_AS(Segments(TokenSet("marked", ids, 20, 0, {{0, 6, 10}, counted}), data),
                       doctest::Contains("no row of whole documents"), Error);
}

TEST_CASE("rows of documents have whole documents, each once per epoch; longer ones are cut or dropped, and counted") {
  const std::filesystem::path path = std::filesystem::temp_directory_path() / fmt::format("weft_rows_{}.h5", getpid());
  // Documents of 3, 4, 1, 9, 2, 7, 8 and 5 ids, in rows of at most 8.
  std::vector<std::uint32_t> ids(39);
  std::iota(ids.begin(), ids.end(), 0u);
  const std::vector<std::int64_t> documents{0, 3, 7, 8, 17, 19, 26, 34};
  storage::write_token_file(path, ids, documents, 39, 0, "");
  TokenSettings data = settings(6, 7, TokenOrder::shuffled);
  data.pack = Pack::documents;
  const auto rows_of = [&](const Segments& segments) {
    std::vector<std::vector<std::int64_t>> rows;
    for (const DocumentRows::Row& row : segments.documents()->rows()) rows.push_back({row.begin, row.ids});
    return rows;
  };
  const Segments cut(TokenSet::open(path.string()), data);
  CHECK(rows_of(cut) == std::vector<std::vector<std::int64_t>>{{0, 8}, {8, 8}, {17, 2}, {19, 7}, {26, 8}, {34, 5}});
  CHECK(cut.documents()->summary() ==
        "8 documents in 6 rows of 8 ids, 79 % filled; longer documents cut: 1; ids left out: 1");
  CHECK(epoch_tokens(cut, data) == 6 * 7);

  // Two epochs over 6 rows: the document mask counts a prediction of each id that is not the first of its document.
  TokenRows batch(6, 7, true);
  std::vector<std::vector<std::uint32_t>> orders;
  for (std::int64_t epoch = 0; epoch < 2; ++epoch) {
    TokenBatches(cut, data, 4).fill(epoch * 6 * 7, 0, batch.batch());
    CHECK(batch.batch().counted == 39 - 1 - 8);
    std::vector<std::int32_t> targets;
    for (std::size_t i = 0; i < 42; ++i) {
      if (batch.batch().targets[i] == kIgnored) continue;
      targets.push_back(batch.batch().targets[i]);
      CHECK(targets.back() == static_cast<std::int32_t>(batch.batch().ids[i]) + 1);
    }
    std::sort(targets.begin(), targets.end());
    CHECK(std::adjacent_find(targets.begin(), targets.end()) == targets.end());
    for (const std::int64_t start : documents)
      CHECK(!std::binary_search(targets.begin(), targets.end(), static_cast<std::int32_t>(start)));
    orders.emplace_back(batch.batch().ids.begin(), batch.batch().ids.end());
  }
  CHECK(orders[0] != orders[1]);

  data.long_documents = LongDocuments::drop;
  const Segments dropped(TokenSet::open(path.string()), data);
  CHECK(rows_of(dropped) == std::vector<std::vector<std::int64_t>>{{0, 8}, {17, 2}, {19, 7}, {26, 8}, {34, 5}});
  CHECK(dropped.documents()->summary() ==
        "8 documents in 5 rows of 8 ids, 75 % filled; longer documents dropped: 1; ids left out: 9");
  data.sequence = 1;
  data.batch_tokens = 6;
  CHECK(rows_of(Segments(TokenSet::open(path.string()), data)) == std::vector<std::vector<std::int64_t>>{{17, 2}});
  std::filesystem::remove(path);
  CHECK_THROWS_WITH_AS(Segments(counting(9), data), doctest::Contains("no row of whole documents"), Error);
}

TEST_CASE("a document is a record of several sequences; of a long one some are chosen by the seed") {
  std::vector<std::uint16_t> ids(40);
  std::iota(ids.begin(), ids.end(), std::uint16_t{0});
  // Documents of 5, 1, 20 and 14 ids, in sequences of 6 predictions.
  const TokenSet set("text", ids, 40, 0, {.documents = {0, 5, 6, 26}, .counted = {}});
  using Grouping = DocumentRecords::Grouping;
  const DocumentRecords records(set, Grouping::by_document, 6, 3, 1);
  CHECK(records.count() == 3);
  CHECK(records.sequences() == 1 + 3 + 3);
  const auto begins = [&](const DocumentRecords& of, std::int64_t record) {
    std::set<std::int64_t> all;
    for (const DocumentRecords::Sequence& sequence : of.of(record)) all.insert(sequence.begin);
    return all;
  };
  CHECK(begins(records, 0) == std::set<std::int64_t>{0});
  CHECK(begins(records, 2) == std::set<std::int64_t>{26, 32, 38});
  std::set<std::set<std::int64_t>> choices;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::set<std::int64_t> chosen = begins(DocumentRecords(set, Grouping::by_document, 6, 3, seed), 1);
    CHECK(chosen.size() == 3);
    for (const std::int64_t begin : chosen) CHECK((begin >= 6 && begin < 26 && begin % 6 == 0));
    choices.insert(chosen);
  }
  CHECK(choices.size() == 4);
  // No sequence goes beyond its document.
  TokenRows rows(3, 6, false);
  fill_sequences(set, records.of(2), rows.batch());
  CHECK(rows.batch().counted == 13);
  CHECK(rows.batch().targets[12] == 39);
  CHECK_THROWS_WITH_AS(DocumentRecords(counting(9), Grouping::by_document, 6, 3, 1),
                       doctest::Contains("where documents begin"), Error);
  CHECK_THROWS_WITH_AS(DocumentRecords(set, Grouping::by_owner, 6, 3, 1),
                       doctest::Contains("whom its documents belong to"), Error);
}

TEST_CASE("the documents of an owner are one record, and what is chosen of it does not depend on the others") {
  // 30 documents of 2 to 20 ids, the same ids wherever they are stored.
  constexpr std::int64_t kLength = 3, kOwners = 5, kMost = 4;
  const auto set_without = [&](std::int64_t left_out) {
    std::vector<std::uint16_t> ids;
    TokenMarks marks;
    for (std::int64_t document = 0; document < 30; ++document) {
      const std::int64_t owner = document * document % kOwners;
      if (owner == left_out) continue;
      marks.documents.push_back(std::ssize(ids));
      marks.owners.push_back(owner);
      for (std::int64_t i = 0; i < 2 + document * 7 % 19; ++i)
        ids.push_back(static_cast<std::uint16_t>(100 * document + i));
    }
    return TokenSet("text", std::move(ids), 4000, 0, std::move(marks));
  };
  // What each record is trained on.
  const auto records_of = [&](const TokenSet& set, std::uint64_t seed = 1) {
    const DocumentRecords records(set, DocumentRecords::Grouping::by_owner, kLength, kMost, seed);
    std::vector<std::vector<std::uint32_t>> all;
    for (std::int64_t record = 0; record < records.count(); ++record) {
      TokenRows rows(std::ssize(records.of(record)), kLength, false);
      fill_sequences(set, records.of(record), rows.batch());
      all.emplace_back(rows.batch().ids.begin(), rows.batch().ids.end());
    }
    return all;
  };
  const TokenSet set = set_without(-1);
  const std::vector<std::vector<std::uint32_t>> all = records_of(set);
  REQUIRE(all.size() == 3);  // squares modulo 5: 0, 1, 4
  CHECK(all != records_of(set, 2));
  for (std::size_t record = 0; record < all.size(); ++record) {
    CHECK(std::ssize(all[record]) == kMost * kLength);
    std::vector<std::vector<std::uint32_t>> others = all;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(record));
    const std::int64_t owner = set.owners()[static_cast<std::size_t>(all[record].front() / 100)];
    CHECK(records_of(set_without(owner)) == others);
    for (const std::uint32_t id : all[record])
      if (id != 0) CHECK(set.owners()[id / 100] == owner);
  }
  // A part of the set has the owners of its documents.
  std::vector<std::int64_t> starts;
  set.document_starts(0, set.size(), starts);
  CHECK(set.part(starts[9], starts[12], 0).owners() == std::vector<std::int64_t>{0, 1, 4});
}

TEST_CASE("windows of records share no id, and the last one may be short") {
  for (const std::int64_t size : {21, 22, 23, 24, 27, 28}) {
    CAPTURE(size);
    constexpr std::int64_t kLength = 6;
    const TokenSet set = counting(size);
    const std::int64_t count = disjoint_windows(size, kLength);
    CHECK(count == size / 7 + (size % 7 >= 2));
    std::vector<std::int64_t> windows(static_cast<std::size_t>(count)), uses(static_cast<std::size_t>(size), 0);
    std::iota(windows.rbegin(), windows.rend(), 0);  // in any order
    TokenRows rows(count, kLength, false);
    std::vector<DocumentRecords::Sequence> sequences;
    for (const std::int64_t window : windows) sequences.push_back(disjoint_window(size, kLength, window));
    fill_sequences(set, sequences, rows.batch());
    std::int64_t counted = 0;
    for (std::int64_t s = 0; s < count; ++s) {
      std::set<std::int64_t> ids;
      for (std::int64_t t = 0; t < kLength; ++t) {
        const auto at = static_cast<std::size_t>(s * kLength + t);
        if (rows.batch().targets[at] == kIgnored) continue;
        CHECK(rows.batch().targets[at] == static_cast<std::int32_t>(rows.batch().ids[at]) + 1);
        CHECK(static_cast<std::int64_t>(rows.batch().ids[at]) / 7 == windows[static_cast<std::size_t>(s)]);
        ids.insert(rows.batch().ids[at]);
        ids.insert(rows.batch().targets[at]);
        ++counted;
      }
      for (const std::int64_t id : ids) ++uses[static_cast<std::size_t>(id)];
    }
    CHECK(counted == rows.batch().counted);
    CHECK(*std::max_element(uses.begin(), uses.end()) == 1);
    CHECK(std::count(uses.begin(), uses.end(), 0) == (size % 7 == 1 ? 1 : 0));
  }
}

}  // namespace weft::dataset
