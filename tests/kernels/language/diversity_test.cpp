// SPDX-License-Identifier: Apache-2.0
//
// Diversity and advantages of sets of answers against all pairs and all sets in fp64, the published values, answers
// that are nearly equal or empty; the baseline of the benchmark; pooled rows.
#include "kernels/language/diversity/pool_rows.hpp"
#include "kernels/language/diversity/set_advantages.hpp"
#include "kernels/language/diversity/unfused_diversity.hpp"
#include "tests/kernels/language/set_reference.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {
namespace {

using kernels::SetObjective;
using kernels::SetRule;

struct Result {
  std::vector<std::int64_t> counts;
  std::vector<double> diversity, objective, distances, advantages;
};

Result run(const kernels::Execution& execution, const SetRule& rule, const TestMatrix& embeddings,
           const std::vector<double>& rewards, std::int64_t prompts) {
  const std::int64_t rows = std::ssize(rewards);
  const DeviceArray<double> device_rewards(rewards);
  const DeviceArray<std::int64_t> counts(prompts);
  const DeviceArray<double> workspace(kernels::set_advantages_workspace(prompts, rows / prompts)), diversity(prompts),
      objective(prompts), distances(rows), advantages(rows);
  kernels::set_advantages(
      execution, rule, {prompts, rows / prompts, embeddings.view(), {device_rewards.data(), rows}}, workspace.array(),
      {counts.array(), diversity.array(), objective.array(), distances.array(), advantages.array()});
  kernels::fence(execution);
  return {counts.values(), diversity.values(), objective.values(), distances.values(), advantages.values()};
}

/// Embeddings with a common direction, as those of answers to one prompt are.
std::vector<float> random_embeddings(std::int64_t rows, std::int64_t columns, std::uint64_t stream) {
  std::vector<float> values = random_floats(rows * columns, stream);
  for (std::int64_t i = 0; i < rows * columns; ++i) values[i] += 0.4f * std::cos(static_cast<float>(i % columns));
  return values;
}
std::vector<double> random_rewards(std::int64_t rows, std::uint64_t stream) {
  const std::vector<float> values = random_floats(rows, stream);
  return {values.begin(), values.end()};
}

double sum_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum;
}

TEST_CASE("published values of advantages") {
  // Four answers, E = 2. fp32 embeddings: (0.6, 0.8) has a relative error of 2^-25.
  const std::vector<float> rows = {1, 0, 0, 1, -1, 0, 0.6f, 0.8f};
  const std::vector<double> rewards = {1, 0.5, 0, 1};
  const struct {
    std::int64_t n;
    double objective;
    std::vector<double> advantages;
  } cases[] = {{2, 0.5583333, {0.1583333, -0.175, 0.125, -0.1083333}},
               {3, 0.6166667, {0.05, -0.0907407, 0.0574074, -0.0166667}},
               {4, 0.6458333, {0, 0, 0, 0}}};
  for_each_backend([&](const kernels::Execution& execution) {
    for (const auto& one : cases) {
      const Result result = run(execution, {.set_size = one.n}, TestMatrix(rows, 4, 2, Scalar::fp32), rewards, 1);
      CHECK(std::abs(result.objective[0] - one.objective) <= 1e-7);  // seven decimals are published
      for (std::size_t i = 0; i < 4; ++i) CHECK(std::abs(result.advantages[i] - one.advantages[i]) <= 1e-7);
      if (one.n == 4) CHECK(sum_of(result.advantages) == 0);
    }
  });
}

TEST_CASE("diversity, sums of distances and advantages agree with all pairs and all sets") {
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Scalar type : kRowTypes)
      for (const auto& [prompts, samples, columns] :
           {std::array<std::int64_t, 3>{1, 2, 1}, {3, 5, 7}, {2, 8, 384}, {4, 10, 770}, {1, 12, 1537}}) {
        const std::int64_t rows = prompts * samples;
        const TestMatrix embeddings(random_embeddings(rows, columns, 3), rows, columns, type);
        const std::vector<float> values = embeddings.values();
        const std::vector<double> rewards = random_rewards(rows, 4);
        for (const SetObjective objective : {SetObjective::product, SetObjective::additive})
          for (const std::int64_t n : {2, 3, 4, 7}) {
            if (n > samples) continue;
            const SetRule rule{objective, n, 0.5};
            const Result result = run(execution, rule, embeddings, rewards, prompts);
            for (std::int64_t prompt = 0; prompt < prompts; ++prompt) {
              const auto begin = prompt * samples;
              const std::vector<float> own(values.begin() + begin * columns,
                                           values.begin() + (begin + samples) * columns);
              const std::vector<double> own_rewards(rewards.begin() + begin, rewards.begin() + begin + samples),
                  distances = cosine_distances(own, static_cast<std::size_t>(columns));
              const SetReference reference = all_sets(rule, own_rewards, distances);
              // Everything is fp64 from the stored values on: 1e-12 is some thousand roundings.
              CHECK(result.counts[prompt] == samples);
              CHECK(std::abs(result.diversity[prompt] - sum_of(distances) / (samples * (samples - 1.0))) <= 1e-12);
              CHECK(std::abs(result.objective[prompt] - reference.objective) <= 1e-12);
              double sum = 0;
              for (std::int64_t i = 0; i < samples; ++i) {
                double s = 0;
                for (std::int64_t j = 0; j < samples; ++j) s += distances[i * samples + j];
                CHECK(std::abs(result.distances[begin + i] - s) <= 1e-12 * samples);
                CHECK(std::abs(result.advantages[begin + i] - reference.advantages[i]) <= 1e-12);
                sum += result.advantages[begin + i];
              }
              CHECK(std::abs(sum) <= 1e-12);
            }
          }
      }
  });
}

TEST_CASE("many answers, with columns that several blocks share: sums of distances and diversity") {
  // On a GPU: clusters of 6, 8 and 3 blocks; and more answers than shared memory holds the sums of.
  for (const auto& [prompts, samples, columns] :
       {std::array<std::int64_t, 3>{2, 64, 768}, {1, 37, 1030}, {1, 900, 384}, {1, 700, 770}}) {
    const std::int64_t rows = prompts * samples;
    const std::vector<float> values = random_embeddings(rows, columns, 14);
    const std::vector<double> rewards = random_rewards(rows, 15);
    // s_i = m - z_i . Z, in fp64.
    std::vector<double> z(values.begin(), values.end()), sums(prompts * columns), distances(rows);
    for (std::int64_t i = 0; i < rows; ++i) {
      double square = 0;
      for (std::int64_t c = 0; c < columns; ++c) square += z[i * columns + c] * z[i * columns + c];
      for (std::int64_t c = 0; c < columns; ++c) {
        z[i * columns + c] /= std::sqrt(square);
        sums[i / samples * columns + c] += z[i * columns + c];
      }
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      distances[i] = static_cast<double>(samples);
      for (std::int64_t c = 0; c < columns; ++c) distances[i] -= z[i * columns + c] * sums[i / samples * columns + c];
    }
    for_each_backend([&](const kernels::Execution& execution) {
      const Result result =
          run(execution, {.set_size = 4}, TestMatrix(values, rows, columns, Scalar::fp32), rewards, prompts);
      for (std::int64_t prompt = 0; prompt < prompts; ++prompt) {
        double pairs = 0, advantages = 0;
        for (std::int64_t i = prompt * samples; i < (prompt + 1) * samples; ++i) {
          // Up to 900 terms of at most 2 in fp64.
          CHECK(std::abs(result.distances[i] - distances[i]) <= 1e-12 * samples);
          pairs += distances[i] / 2;
          advantages += result.advantages[i];
        }
        CHECK(result.counts[prompt] == samples);
        CHECK(std::abs(result.diversity[prompt] - pairs / (samples * (samples - 1.0) / 2)) <= 1e-12);
        CHECK(std::abs(advantages) <= 1e-12 * samples);
      }
    });
  }
}

TEST_CASE("answers that are nearly equal keep their digits") {
  // Rows differ in the last bits of fp32: 1 - cosine is about 1e-13, below the rounding of 1 in fp32 and near that of
  // fp64, so that (m^2 - |Z|^2) / (m (m - 1)) would have no correct digit.
  const std::int64_t samples = 6, columns = 200;
  std::vector<float> rows(samples * columns);
  for (std::int64_t i = 0; i < samples * columns; ++i) {
    rows[i] = 1.0f + 0.5f * std::sin(static_cast<float>(i % columns));
    if (i % 7 == i / columns % 7) rows[i] = std::nextafter(rows[i], 4.0f);
  }
  const std::vector<double> rewards = random_rewards(samples, 7), distances = cosine_distances(rows, columns);
  const SetReference reference = all_sets({}, rewards, distances);
  const double expected = sum_of(distances) / (samples * (samples - 1.0));
  CHECK(expected < 1e-12);
  for_each_backend([&](const kernels::Execution& execution) {
    const Result result = run(execution, {}, TestMatrix(rows, samples, columns, Scalar::fp32), rewards, 1);
    // The z have relative errors of 2^-52 each, differences of z are 1e-8 to 1e-7 of them.
    CHECK(std::abs(result.diversity[0] - expected) <= 1e-6 * expected);
    for (std::int64_t i = 0; i < samples; ++i)
      CHECK(std::abs(result.advantages[i] - reference.advantages[i]) <= 1e-6 * expected);
    const std::vector<float> equal(4 * columns, 0.7f);
    // Where products and sums are fused, a difference of equal z is the rounding error of one product: 2^-53 |z|.
    CHECK(run(execution, {}, TestMatrix(equal, 4, columns, Scalar::fp32), {1, 2, 3, 4}, 1).diversity[0] <= 0x1p-104);
  });
}

TEST_CASE("empty answers are no answers; prompts do not affect one another") {
  const std::int64_t samples = 9, columns = 33;
  const std::vector<float> all = random_embeddings(3 * samples, columns, 8);
  std::vector<float> rows = all;
  std::vector<double> rewards = random_rewards(3 * samples, 9);
  const std::vector<std::int64_t> empty = {0, 4, 8};  // of the second prompt; of the third all but one
  for (const std::int64_t i : empty) {
    std::fill_n(rows.begin() + (samples + i) * columns, columns, 0.0f);
    rewards[samples + i] = std::nan("");  // not read
  }
  std::fill(rows.begin() + (2 * samples + 1) * columns, rows.end(), 0.0f);
  for_each_backend([&](const kernels::Execution& execution) {
    for (const SetObjective objective : {SetObjective::product, SetObjective::additive}) {
      const SetRule rule{objective, 4, 0.5};
      const Result result = run(execution, rule, TestMatrix(rows, 3 * samples, columns, Scalar::fp32), rewards, 3);
      CHECK(result.counts == std::vector<std::int64_t>{samples, samples - 3, 1});
      std::vector<float> kept;
      std::vector<double> kept_rewards, kept_advantages;
      for (std::int64_t i = 0; i < samples; ++i) {
        if (std::find(empty.begin(), empty.end(), i) != empty.end()) {
          CHECK(result.advantages[samples + i] == 0);
          CHECK(result.distances[samples + i] == 0);
          continue;
        }
        kept.insert(kept.end(), rows.begin() + (samples + i) * columns, rows.begin() + (samples + i + 1) * columns);
        kept_rewards.push_back(rewards[samples + i]);
        kept_advantages.push_back(result.advantages[samples + i]);
      }
      const SetReference reference = all_sets(rule, kept_rewards, cosine_distances(kept, columns));
      CHECK(std::abs(result.objective[1] - reference.objective) <= 1e-12);
      for (std::size_t i = 0; i < kept.size() / columns; ++i)
        CHECK(std::abs(kept_advantages[i] - reference.advantages[i]) <= 1e-12);
      CHECK(result.diversity[2] == 0);
      CHECK(result.objective[2] == 0);
      for (std::int64_t i = 0; i < samples; ++i) CHECK(result.advantages[2 * samples + i] == 0);

      const std::vector<float> alone(rows.begin(), rows.begin() + samples * columns);
      const std::vector<double> alone_rewards(rewards.begin(), rewards.begin() + samples);
      const Result first = run(execution, rule, TestMatrix(alone, samples, columns, Scalar::fp32), alone_rewards, 1);
      for (std::int64_t i = 0; i < samples; ++i) CHECK(first.advantages[i] == result.advantages[i]);
    }
    // A value that is not finite is not taken for an empty answer.
    rows[5] = std::numeric_limits<float>::infinity();
    const Result damaged = run(execution, {}, TestMatrix(rows, 3 * samples, columns, Scalar::fp32), rewards, 3);
    CHECK(!std::isfinite(damaged.diversity[0]));
    CHECK(std::isfinite(damaged.diversity[1]));
    rows[5] = all[5];
  });
}

TEST_CASE("the baseline of the benchmark computes the same diversity") {
  const std::int64_t prompts = 3, samples = 10, columns = 384, rows = prompts * samples;
  const std::vector<float> values = random_embeddings(rows, columns, 11);
  const DeviceArray<float> embeddings(values), out(prompts),
      workspace(kernels::unfused_diversity_workspace(prompts, samples, columns));
  for_each_backend([&](const kernels::Execution& execution) {
    const Result result = run(execution, {}, TestMatrix(values, rows, columns, Scalar::fp32),
                              std::vector<double>(static_cast<std::size_t>(rows), 1), prompts);
    kernels::unfused_diversity(execution, prompts, {embeddings.data(), rows, columns, columns}, workspace.array(),
                               out.array());
    kernels::fence(execution);
    // fp32 sums of 384 terms below 1 and of 100 distances.
    for (std::int64_t prompt = 0; prompt < prompts; ++prompt)
      CHECK(std::abs(static_cast<double>(out.values()[prompt]) - result.diversity[prompt]) <= 500 * kRoundoff);
  });
}

TEST_CASE("pool_rows adds scaled sums of ranges of rows") {
  const std::int64_t rows = 37, texts = 4;
  const std::vector<kernels::PooledRows> ranges = {{0, 5, 2, 0.2f}, {6, 7, 0, 1.0f}, {9, 37, 3, 0.5f}};
  for_each_backend([&](const kernels::Execution& execution) {
    for (const Scalar type : kRowTypes)
      for (const std::int64_t columns : {1, 300, 770}) {
        const TestMatrix in(random_floats(rows * columns, 12), rows, columns, type);
        const std::vector<float> values = in.values(), before = random_floats(texts * columns, 13);
        const DeviceArray<float> out(before);
        const DeviceArray<kernels::PooledRows> device_ranges(ranges);
        kernels::pool_rows(execution, in.view(), {device_ranges.data(), device_ranges.size()},
                           out.matrix(texts, columns));
        kernels::fence(execution);
        std::vector<double> expected(before.begin(), before.end());
        for (const kernels::PooledRows& range : ranges)
          for (std::int64_t row = range.begin; row < range.end; ++row)
            for (std::int64_t c = 0; c < columns; ++c)
              expected[range.to * columns + c] += static_cast<double>(range.scale * values[row * columns + c]);
        // Up to 28 values below 1 in fp32, and three further roundings.
        const std::vector<float> pooled = out.values();
        for (std::size_t i = 0; i < expected.size(); ++i)
          CHECK(std::abs(static_cast<double>(pooled[i]) - expected[i]) <= 28 * 28 * kRoundoff);
      }
  });
}

}  // namespace
}  // namespace weft::testing
