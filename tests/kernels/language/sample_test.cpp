// SPDX-License-Identifier: Apache-2.0
//
// Draws: the distribution of 10^6 of them for every rule, which tokens the rules keep, and what a draw depends on.
#include "kernels/language/sample/sample.hpp"

#include <numeric>

#include "tests/kernels/support.hpp"

namespace weft::testing {
namespace {

using namespace weft::kernels;

constexpr std::int64_t kMost = 256;  // positions of a row

/// One draw for each row at its position.
class Draws {
 public:
  Draws(std::vector<SampleStream> streams, std::vector<std::int32_t> positions)
      : sequences_(std::vector<CachedSequence>(streams.size(), CachedSequence{.end = kMost})),
        streams_(streams),
        positions_(positions),
        ids_(std::ssize(streams)),
        drawn_(std::ssize(streams) * kMost),
        rows_(std::ssize(streams)) {}

  GrowingSequences view() const {
    return {sequences_.array(), streams_.array(), positions_.array(), ids_.array(), drawn_.matrix(rows_, kMost)};
  }
  void end_at(const std::vector<std::int32_t>& ends) {
    std::vector<CachedSequence> sequences;
    for (const std::int32_t end : ends) sequences.push_back({.end = end});
    sequences_.set(sequences);
  }
  std::vector<std::uint32_t> ids() const { return ids_.values(); }
  std::vector<std::int32_t> positions() const { return positions_.values(); }
  std::vector<Drawn> drawn() const { return drawn_.values(); }

 private:
  DeviceArray<CachedSequence> sequences_;
  DeviceArray<SampleStream> streams_;
  DeviceArray<std::int32_t> positions_;
  DeviceArray<std::uint32_t> ids_;
  DeviceArray<Drawn> drawn_;
  std::int64_t rows_;
};

void draw(const Execution& execution, const SampleRule& rule, AnyMatrix logits, const GrowingSequences& sequences) {
  const std::int64_t blocks = draw_blocks(rule.vocabulary);
  const DeviceArray<BlockSum> sums(logits.rows * blocks);
  sample(execution, rule, logits, sums.matrix(logits.rows, blocks), sequences);
}

/// The distribution by its definition, in float64.
std::vector<double> distribution(const std::vector<float>& logits, const SampleRule& rule) {
  const std::size_t n = logits.size();
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  std::vector<double> p(n);
  const auto capped = [&](float z) {
    return rule.softcap > 0 ? rule.softcap * std::tanh(static_cast<double>(z) / rule.softcap) : static_cast<double>(z);
  };
  double total = 0;
  const std::size_t most = rule.temperature == 0 ? 1 : rule.top_k > 0 ? static_cast<std::size_t>(rule.top_k) : n;
  for (std::size_t i = 0; i < std::min(n, most); ++i)
    total += p[order[i]] =
        rule.temperature == 0 ? 1 : std::exp((capped(logits[order[i]]) - capped(logits[order[0]])) / rule.temperature);
  double reached = 0, kept = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double one = p[order[i]] / total;
    if (reached >= rule.top_p) p[order[i]] = 0;
    reached += one;
    kept += p[order[i]];
  }
  for (double& one : p) one /= kept;
  return p;
}

/// The first `vocabulary` logits of a row with padding.
std::vector<float> logits_of(const std::vector<float>& row, std::int64_t vocabulary) {
  return {row.begin(), row.begin() + vocabulary};
}

std::vector<float> spread_logits(std::int64_t vocabulary) {
  std::vector<float> logits = random_floats(vocabulary, 21, 3.0f);
  // Equal ones, at both ends of the ids and of the order.
  for (std::int64_t i = 0; i < vocabulary; i += 5) logits[static_cast<std::size_t>(i)] = logits[1];
  return logits;
}

const SampleRule kRules[] = {{.temperature = 1},
                             {.temperature = 0.7f},
                             {.temperature = 1.3f, .top_k = 9},
                             {.temperature = 1, .top_p = 0.8},
                             {.softcap = 2, .temperature = 0.9f, .top_k = 20, .top_p = 0.6}};

}  // namespace

TEST_CASE("10^6 draws have the distribution of each rule (chi-square)") {
  constexpr std::int64_t kVocabulary = 37, kColumns = 40, kRows = 1000, kRounds = 200;
  const std::vector<float> logits = spread_logits(kVocabulary);
  for_each_backend([&](const Execution& execution) {
    for (SampleRule rule : kRules) {
      rule.vocabulary = kVocabulary;
      std::vector<float> all;
      std::vector<SampleStream> streams;
      for (std::int64_t row = 0; row < kRows; ++row) {
        all.insert(all.end(), logits.begin(), logits.end());
        all.resize(all.size() + (kColumns - kVocabulary), 100.0f);  // padding, never drawn
        streams.push_back({.seed = 5, .step = 1, .index = static_cast<std::uint64_t>(row) << 24});
      }
      const TestMatrix matrix(all, kRows, kColumns, Scalar::fp32);
      std::vector<double> counts(kVocabulary);
      for (std::int64_t round = 0; round < kRounds; ++round) {
        Draws draws(streams, std::vector<std::int32_t>(kRows, static_cast<std::int32_t>(round)));
        draw(execution, rule, matrix.view(), draws.view());
        for (const std::uint32_t id : draws.ids()) {
          REQUIRE(id < kVocabulary);
          ++counts[id];
        }
      }
      const std::vector<double> p = distribution(logits, rule);
      double chi_square = 0;
      std::int64_t cells = 0;
      for (std::size_t i = 0; i < p.size(); ++i) {
        const double expected = p[i] * kRows * kRounds;
        if (p[i] == 0) CHECK(counts[i] == 0);
        if (p[i] == 0) continue;
        chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
        ++cells;
      }
      // Mean cells - 1, variance 2 (cells - 1): five standard deviations. Seed and draws are fixed.
      const double freedom = static_cast<double>(cells - 1);
      CAPTURE(cells);
      CHECK(chi_square <= freedom + 5 * std::sqrt(2 * freedom) + 5);
    }
  });
}

TEST_CASE("blocks of ids whose largest logits differ: draws have the distribution of all ids") {
  // Few ids that are drawn, at both ends of blocks; the weights of the others are a millionth of these.
  constexpr std::int64_t kVocabulary = 3 * kDrawBlock + 5, kRows = 1000, kRounds = 200;
  std::vector<float> logits(kVocabulary, -25.0f);
  const std::vector<std::pair<std::size_t, float>> likely = {{0, 0.0f},    {127, -1.0f}, {128, -6.5f},
                                                             {200, -5.0f}, {383, -2.0f}, {388, 0.5f}};
  for (const auto& [id, z] : likely) logits[id] = z;
  std::vector<float> all;
  std::vector<SampleStream> streams;
  for (std::int64_t row = 0; row < kRows; ++row) {
    all.insert(all.end(), logits.begin(), logits.end());
    streams.push_back({.seed = 8, .index = static_cast<std::uint64_t>(row) << 24});
  }
  for_each_backend([&](const Execution& execution) {
    const TestMatrix matrix(all, kRows, kVocabulary, Scalar::fp32);
    const SampleRule rules[] = {{.vocabulary = kVocabulary},
                                {.vocabulary = kVocabulary, .temperature = 1.5f, .top_k = kVocabulary}};
    for (const SampleRule& rule : rules) {
      std::vector<double> counts(kVocabulary);
      for (std::int32_t round = 0; round < kRounds; ++round) {
        Draws draws(streams, std::vector<std::int32_t>(kRows, round));
        draw(execution, rule, matrix.view(), draws.view());
        for (const std::uint32_t id : draws.ids()) ++counts[id];
      }
      const std::vector<double> p = distribution(logits, rule);
      double chi_square = 0;
      for (const auto& [id, z] : likely) {
        const double expected = p[id] * kRows * kRounds;
        chi_square += (counts[id] - expected) * (counts[id] - expected) / expected;
      }
      // Mean 5, variance 10: five standard deviations. Seed and draws are fixed.
      CHECK(chi_square <= 5 + 5 * std::sqrt(10.0));
    }
  });
}

TEST_CASE("a draw gives its probabilities and moves the sequence on") {
  constexpr std::int64_t kVocabulary = 3000;
  std::vector<float> logits = random_floats(kVocabulary, 4, 4.0f);
  for (float& z : logits) z = stored_as(Scalar::bf16, z);
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : {Scalar::fp32, Scalar::bf16})
      for (SampleRule rule : kRules) {
        rule.vocabulary = kVocabulary;
        Draws draws({{.seed = 9}}, {7});
        draw(execution, rule, TestMatrix(logits, 1, kVocabulary, type).view(), draws.view());
        const std::uint32_t id = draws.ids()[0];
        const Drawn drawn = draws.drawn()[7];
        CHECK(drawn.token == id);
        CHECK(draws.positions()[0] == 8);
        // fp32 exponentials of arguments up to 8, and of capped logits a tanh: some units of 2^-24 times 8.
        SampleRule plain{.vocabulary = kVocabulary, .softcap = rule.softcap};
        CHECK(drawn.log_probability == doctest::Approx(std::log(distribution(logits, plain)[id])).epsilon(1e-5));
        CHECK(drawn.log_drawn == doctest::Approx(std::log(distribution(logits, rule)[id])).epsilon(1e-5));
      }
  });
}

TEST_CASE("temperature 0 takes the most probable token, of equal ones the lowest id") {
  for_each_backend([&](const Execution& execution) {
    std::vector<float> logits = random_floats(5000, 8);
    for (const std::size_t id : {4999, 1203, 1204, 3000}) logits[id] = 2.0f;
    for (std::int32_t position = 0; position < 20; ++position) {
      Draws draws({{.seed = 1}}, {position});
      draw(execution, {.vocabulary = 5000, .temperature = 0}, TestMatrix(logits, 1, 5000, Scalar::fp32).view(),
           draws.view());
      REQUIRE(draws.ids()[0] == 1203);
    }
  });
}

TEST_CASE("large vocabularies: blocks that share a row draw as one, whatever their number") {
  // One row, which several blocks share on a GPU, and the same row among others; whole words and not.
  const std::vector<std::int64_t> row_counts =
      kCudaBuild ? std::vector<std::int64_t>{1, 70, 140} : std::vector<std::int64_t>{1, 3};
  for (const std::int64_t columns : {50264, 50257}) {
    constexpr std::int64_t kVocabulary = 50257;
    std::vector<float> logits = random_floats(columns, 41, 3.0f);
    for (std::int64_t i = 0; i < columns; i += 3) logits[static_cast<std::size_t>(i)] = 1.0f;  // ties everywhere
    for (std::int64_t i = kVocabulary; i < columns; ++i) logits[static_cast<std::size_t>(i)] = 100.0f;
    for (float& z : logits) z = stored_as(Scalar::bf16, z);
    for (SampleRule rule : {SampleRule{}, SampleRule{.temperature = 0.7f}, SampleRule{.top_k = 9000},
                            SampleRule{.temperature = 1.2f, .top_k = 30000, .top_p = 0.9}}) {
      rule.vocabulary = kVocabulary;
      const std::vector<double> p = distribution(logits_of(logits, kVocabulary), rule);
      std::vector<std::uint32_t> first;  // by the first backend
      for_each_backend([&](const Execution& execution) {
        std::vector<std::uint32_t> ids;
        for (const std::int64_t rows : row_counts)
          for (std::int32_t position = 0; position < (rows == 1 ? 20 : 1); ++position) {
            std::vector<float> all;
            for (std::int64_t row = 0; row < rows; ++row) all.insert(all.end(), logits.begin(), logits.end());
            Draws draws(std::vector<SampleStream>(static_cast<std::size_t>(rows), SampleStream{.seed = 6}),
                        std::vector<std::int32_t>(static_cast<std::size_t>(rows), position));
            draw(execution, rule, TestMatrix(all, rows, columns, Scalar::bf16).view(), draws.view());
            const std::vector<std::uint32_t> drawn = draws.ids();
            for (const std::uint32_t id : drawn) REQUIRE(id == drawn[0]);
            if (rows > 1) CHECK(drawn[0] == ids[0]);  // position 0 as well
            ids.push_back(drawn[0]);
            REQUIRE(drawn[0] < kVocabulary);
            CHECK(p[drawn[0]] > 0);
            CHECK(draws.drawn()[static_cast<std::size_t>(position)].log_drawn ==
                  doctest::Approx(std::log(p[drawn[0]])).epsilon(1e-5));
          }
        if (first.empty()) first = ids;
        CHECK(ids == first);
      });
    }
  }
}

TEST_CASE("top_k and top_p keep the lowest ids of equal logits over many ids") {
  constexpr std::int64_t kVocabulary = 40000;
  const std::vector<float> logits(kVocabulary, -1.5f);
  for_each_backend([&](const Execution& execution) {
    const SampleRule rules[2] = {{.vocabulary = kVocabulary, .top_k = 30000},
                                 {.vocabulary = kVocabulary, .top_p = 0.75}};
    for (const SampleRule& rule : rules) {
      std::uint32_t least = kVocabulary, largest = 0;
      for (std::int32_t position = 0; position < 60; ++position) {
        Draws draws({{.seed = 3}}, {position});
        draw(execution, rule, TestMatrix(logits, 1, kVocabulary, Scalar::bf16).view(), draws.view());
        least = std::min(least, draws.ids()[0]);
        largest = std::max(largest, draws.ids()[0]);
      }
      // Of 60 equally likely draws from 30,000 ids; seed and draws are fixed.
      CHECK(largest < 30000);
      CHECK(largest > 25000);
      CHECK(least < 5000);
    }
  });
}

TEST_CASE("top_k and top_p keep the lowest ids of equal logits") {
  for_each_backend([&](const Execution& execution) {
    // All equal: the first 6, and of 300 those that reach 0.02.
    const std::vector<float> logits(300, -1.5f);
    std::uint32_t largest[2] = {};
    for (std::int32_t position = 0; position < 200; ++position) {
      const SampleRule rules[2] = {{.vocabulary = 300, .top_k = 6}, {.vocabulary = 300, .top_p = 0.02}};
      for (int i = 0; i < 2; ++i) {
        Draws draws({{.seed = 2}}, {position});
        draw(execution, rules[i], TestMatrix(logits, 1, 300, Scalar::fp32).view(), draws.view());
        largest[i] = std::max(largest[i], draws.ids()[0]);
      }
    }
    CHECK(largest[0] == 5);
    CHECK(largest[1] == 5);
  });
}

TEST_CASE("keep_probable leaves what top_p keeps, and the targets") {
  constexpr std::int64_t kColumns = 5008;
  for_each_backend([&](const Execution& execution) {
    for (const std::int64_t vocabulary : {std::int64_t{37}, std::int64_t{5003}})
      for (const double top_p : {0.05, 0.6, 0.95}) {
        CAPTURE(vocabulary);
        CAPTURE(top_p);
        const SampleRule rule{.vocabulary = vocabulary, .temperature = 0.9f, .top_p = top_p};
        // Multiples of 1/8, which are exact in bf16: many equal ones. The last row is not counted.
        std::vector<float> row(kColumns, 3.0f);
        const std::vector<float> spread = random_floats(vocabulary, 31, 2.0f);
        for (std::size_t i = 0; i < spread.size(); ++i) row[i] = std::round(8 * spread[i]) / 8;
        std::vector<float> all = row;
        all.insert(all.end(), row.begin(), row.end());
        all.insert(all.end(), row.begin(), row.end());
        const std::vector<double> p = distribution(logits_of(row, vocabulary), rule);
        const auto least =
            static_cast<std::int32_t>(std::min_element(row.begin(), row.begin() + vocabulary) - row.begin());
        const std::vector<std::int32_t> target_ids = {
            static_cast<std::int32_t>(std::max_element(p.begin(), p.end()) - p.begin()), least, -1};
        const DeviceArray<std::int32_t> targets(target_ids);
        for (const Scalar type : {Scalar::fp32, Scalar::bf16, Scalar::fp16}) {
          const TestMatrix logits(all, 3, kColumns, type);
          keep_probable(execution, rule, logits.view(), targets.array());
          const std::vector<float> found = logits.values();
          int different = 0;
          for (std::int64_t i = 0; i < 3 * kColumns; ++i) {
            const std::int64_t r = i / kColumns, id = i % kColumns;
            const bool stays = r == 2 || id >= vocabulary || p[static_cast<std::size_t>(id)] > 0 ||
                               id == target_ids[static_cast<std::size_t>(r)];
            const float expected = stays ? row[static_cast<std::size_t>(id)] : -std::numeric_limits<float>::infinity();
            if (found[static_cast<std::size_t>(i)] != expected) ++different;
          }
          CHECK(different == 0);
        }
      }
  });
}

TEST_CASE("a draw depends on stream and position alone; rows that do not run stay as they are") {
  constexpr std::int64_t kVocabulary = 700;
  const std::vector<float> first = random_floats(kVocabulary, 31, 2.0f), second = random_floats(kVocabulary, 32, 2.0f);
  const SampleRule rule{.vocabulary = kVocabulary, .temperature = 0.8f, .top_k = 200, .top_p = 0.9};
  const SampleStream a{.seed = 1, .step = 2, .index = 3}, b{.seed = 1, .step = 2, .index = std::uint64_t{1} << 44};
  for_each_backend([&](const Execution& execution) {
    std::vector<float> both = second;
    both.insert(both.end(), first.begin(), first.end());
    both.insert(both.end(), first.begin(), first.end());
    bool differ = false;
    for (std::int32_t position = 0; position < 40; ++position) {
      Draws alone({a}, {position}), together({b, a, a}, {3, position, position});
      together.end_at({kMost, kMost, position});
      draw(execution, rule, TestMatrix(first, 1, kVocabulary, Scalar::fp32).view(), alone.view());
      draw(execution, rule, TestMatrix(both, 3, kVocabulary, Scalar::fp32).view(), together.view());
      REQUIRE(together.ids()[1] == alone.ids()[0]);
      CHECK(together.ids()[2] == 0);
      CHECK(together.positions() == std::vector<std::int32_t>{4, position + 1, position});
      differ = differ || together.ids()[0] != alone.ids()[0];
    }
    CHECK(differ);
  });
}

TEST_CASE("logits that are not finite are reported") {
  for_each_backend([&](const Execution& execution) {
    for (const float bad : {std::nanf(""), -std::nanf(""), INFINITY}) {
      std::vector<float> logits = random_floats(100, 1);
      logits[60] = bad;
      Draws draws({{.seed = 1}}, {0});
      draw(execution, {.vocabulary = 100}, TestMatrix(logits, 1, 100, Scalar::fp32).view(), draws.view());
      CHECK(std::isnan(draws.drawn()[0].log_probability));
    }
    // -infinity is a probability of 0.
    std::vector<float> logits(100, -INFINITY);
    logits[42] = 0.0f;
    Draws draws({{.seed = 1}}, {0});
    draw(execution, {.vocabulary = 100}, TestMatrix(logits, 1, 100, Scalar::fp32).view(), draws.view());
    CHECK(draws.ids()[0] == 42);
    CHECK(draws.drawn()[0].log_drawn == 0.0f);
  });
}

}  // namespace weft::testing
