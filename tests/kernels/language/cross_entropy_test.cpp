// SPDX-License-Identifier: Apache-2.0
#include "kernels/language/head/cross_entropy.hpp"

#include "tests/kernels/language/rows_support.hpp"

namespace weft::testing {

using namespace weft::kernels;

namespace {

struct Options {
  std::int64_t vocabulary = 0;
  float softcap = 0, z_loss = 0, scale = 1;
  std::vector<float> weights = {};
  float temperature = 1;
};

struct Row64 {
  double loss = 0;
  std::vector<double> gradient;  // without scale and weight
};

/// One row in float64, by the formulas of cross_entropy.hpp.
Row64 row64(const Options& o, const std::vector<double>& stored, std::int64_t target) {
  Row64 out{0, std::vector<double>(stored.size())};
  if (target == kIgnored) return out;
  std::vector<double> z(stored.begin(), stored.begin() + o.vocabulary);
  if (o.softcap > 0)
    for (double& v : z) v = o.softcap * std::tanh(v / o.softcap);
  const std::vector<double> capped = z;
  for (double& v : z) v /= o.temperature;
  const double largest = *std::max_element(z.begin(), z.end());
  double sum = 0;
  for (const double v : z) sum += std::exp(v - largest);
  const double lse = largest + std::log(sum);
  out.loss = lse - z[target] + o.z_loss * lse * lse;
  for (std::int64_t j = 0; j < o.vocabulary; ++j) {
    out.gradient[j] = std::exp(z[j] - lse) * (1 + 2 * o.z_loss * lse) - (j == target ? 1 : 0);
    out.gradient[j] /= o.temperature;
    if (o.softcap > 0) out.gradient[j] *= 1 - (capped[j] / o.softcap) * (capped[j] / o.softcap);
  }
  return out;
}

struct Result {
  std::vector<float> logits, losses;
};

Result run(const Execution& execution, const Options& o, const Rows& logits, const std::vector<std::int32_t>& targets,
           bool gradient) {
  const DeviceArray<std::int32_t> device_targets(targets);
  const DeviceArray<float> losses(std::vector<float>(targets.size(), std::nanf(""))),
      scale(std::vector<float>{o.scale}), weights(o.weights);
  CrossEntropy view{o.vocabulary, o.softcap, o.z_loss, scale.data()};
  if (!o.weights.empty()) view.weights = weights.array();
  view.temperature = o.temperature;
  cross_entropy(execution, view, logits.view(), device_targets.array(), losses.array(), gradient);
  return {logits.values(), losses.values()};
}

}  // namespace

TEST_CASE("cross-entropy agrees with float64: padded vocabularies, ignored targets, softcap, z-loss, weights") {
  for_each_backend([&](const Execution& execution) {
    struct Case {
      std::int64_t rows, vocabulary, columns;
    };
    int margins = 0;
    for (const Case c : {Case{1, 2, 2}, {5, 3, 8}, {33, 65, 128}, {9, 1000, 1024}, {4, 4099, 4224}, {3, 50257, 50304}})
      for (const Scalar type : kRowTypes)
        for (const bool all : {false, true}) {
          CAPTURE(c.vocabulary);
          CAPTURE(all);
          const Margins margin = kMargins[margins++ % 3];
          const float scale = type == Scalar::fp16 ? 64.0f : 0.01f;  // fp16: as large as a scaled loss makes it
          Options o{c.vocabulary, 0, 0, scale};
          if (all) o = {c.vocabulary, 15.0f, 1e-3f, scale, random_floats(c.rows, 3), 0.9f};
          std::vector<float> values = random_floats(c.rows * c.columns, 1, 10.0f);
          for (std::int64_t i = 0; i < std::ssize(values); ++i)
            if (i % c.columns >= c.vocabulary) values[i] = 1e30f;  // padding must not matter
          const Rows logits(values, c.rows, c.columns, type, margin);
          const std::vector<float> stored = logits.values();
          std::vector<std::int32_t> targets;
          for (std::int64_t n = 0; n < c.rows; ++n)
            targets.push_back(n % 4 == 3 ? kIgnored
                                         : static_cast<std::int32_t>((n * 7919 + c.vocabulary - 1) % c.vocabulary));

          const Result only_loss = run(execution, o, logits, targets, false);
          CHECK(only_loss.logits == stored);
          const Result result = run(execution, o, logits, targets, true);
          CHECK(result.losses == only_loss.losses);
          std::vector<double> gradient;
          for (std::int64_t n = 0; n < c.rows; ++n) {
            const Row64 want =
                row64(o, {stored.begin() + n * c.columns, stored.begin() + (n + 1) * c.columns}, targets[n]);
            // exp of differences up to 20 and the logarithm of the sum.
            REQUIRE(std::abs(result.losses[n] - want.loss) <= 2e-6 * (1 + std::abs(want.loss)));
            const double factor = static_cast<double>(o.scale) * (o.weights.empty() ? 1 : o.weights[n]);
            for (std::int64_t j = 0; j < c.columns; ++j) {
              gradient.push_back(factor * want.gradient[j]);
              if (targets[n] == kIgnored || j >= c.vocabulary) REQUIRE(result.logits[n * c.columns + j] == 0.0f);
            }
          }
          CHECK(relative_error(result.logits, gradient) <= row_tolerance(type));
        }
  });
}

TEST_CASE("a vocabulary in parts has the losses and gradients of the whole one") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t rows = 9, vocabulary = 1000, padding = 24;
    const std::vector<std::int64_t> begins = {0, 333, 336, 1000};  // the part in the middle has 3 tokens
    for (const Scalar type : kRowTypes)
      for (const bool all : {false, true}) {
        CAPTURE(all);
        Options o{vocabulary, 0, 0, 0.5f};
        if (all) o = {vocabulary, 15.0f, 1e-3f, 0.5f, random_floats(rows, 3), 0.9f};
        const Rows whole(random_floats(rows * vocabulary, 1, 10.0f), rows, vocabulary, type);
        const std::vector<float> stored = whole.values();
        std::vector<std::int32_t> targets;
        for (std::int64_t n = 0; n < rows; ++n)
          targets.push_back(n == 3 ? kIgnored : static_cast<std::int32_t>((n * 335) % vocabulary));
        targets[1] = 334;
        const DeviceArray<std::int32_t> device_targets(targets);
        const DeviceArray<float> scale(std::vector<float>{o.scale}), weights(o.weights),
            losses(std::vector<float>(targets.size(), std::nanf("")));
        CrossEntropy view{0, o.softcap, o.z_loss, scale.data()};
        if (!o.weights.empty()) view.weights = weights.array();
        view.temperature = o.temperature;
        const std::int64_t n_parts = std::ssize(begins) - 1;
        const DeviceArray<SoftmaxPart> parts(std::vector<SoftmaxPart>(static_cast<std::size_t>(n_parts * rows)));
        std::vector<Rows> logits;
        const auto part = [&](std::int64_t p) {
          CrossEntropy own = view;
          own.first_token = begins[p];
          own.vocabulary = begins[p + 1] - begins[p];
          return own;
        };
        for (std::int64_t p = 0; p < n_parts; ++p) {
          const std::int64_t width = part(p).vocabulary, columns = (width + padding - 1) / padding * padding;
          std::vector<float> values(static_cast<std::size_t>(rows * columns), 1e30f);  // padding must not matter
          for (std::int64_t n = 0; n < rows; ++n)
            for (std::int64_t j = 0; j < width; ++j) values[n * columns + j] = stored[n * vocabulary + begins[p] + j];
          logits.emplace_back(values, rows, columns, type);
          softmax_parts(execution, part(p), logits.back().view(), device_targets.array(),
                        {parts.data() + p * rows, rows});
        }
        std::vector<float> first;
        std::vector<float> gradient(stored.size());
        for (std::int64_t p = 0; p < n_parts; ++p) {
          CrossEntropy own = part(p);
          own.parts = {parts.data(), n_parts * rows};
          cross_entropy(execution, own, logits[p].view(), device_targets.array(), losses.array(), true);
          if (p == 0) first = losses.values();
          CHECK(losses.values() == first);  // every rank has the same bits
          const std::vector<float> got = logits[p].values();
          const std::int64_t columns = std::ssize(got) / rows;
          for (std::int64_t i = 0; i < std::ssize(got); ++i)
            if (i % columns < own.vocabulary)
              gradient[i / columns * vocabulary + begins[p] + i % columns] = got[i];
            else
              REQUIRE(got[i] == 0.0f);
        }
        std::vector<double> expected;
        for (std::int64_t n = 0; n < rows; ++n) {
          const Row64 want =
              row64(o, {stored.begin() + n * vocabulary, stored.begin() + (n + 1) * vocabulary}, targets[n]);
          // As for the whole vocabulary.
          CHECK(std::abs(first[n] - want.loss) <= 2e-6 * (1 + std::abs(want.loss)));
          for (const double value : want.gradient)
            expected.push_back(static_cast<double>(o.scale) * (o.weights.empty() ? 1 : o.weights[n]) * value);
        }
        CHECK(relative_error(gradient, expected) <= row_tolerance(type));
      }
  });
}

TEST_CASE("cross-entropy with a temperature and no cap agrees with float64") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t rows = 5, vocabulary = 61, columns = 64;
    for (const float temperature : {0.5f, 0.9f, 3.0f}) {
      const Options o{vocabulary, 0, 0, 0.5f, random_floats(rows, 3), temperature};
      const Rows logits(random_floats(rows * columns, 1, 6.0f), rows, columns, Scalar::fp32);
      const std::vector<float> stored = logits.values();
      const std::vector<std::int32_t> targets = {0, 60, 7, 8, 9};
      const Result result = run(execution, o, logits, targets, true);
      std::vector<double> gradient;
      for (std::int64_t n = 0; n < rows; ++n) {
        const Row64 want = row64(o, {stored.begin() + n * columns, stored.begin() + (n + 1) * columns}, targets[n]);
        CHECK(std::abs(result.losses[n] - want.loss) <= 2e-6 * (1 + std::abs(want.loss)));
        for (const double value : want.gradient) gradient.push_back(0.5 * o.weights[n] * value);
      }
      CHECK(relative_error(result.logits, gradient) <= row_tolerance(Scalar::fp32));
    }
  });
}

TEST_CASE("cross-entropy of a vocabulary of one token is 0") {
  for_each_backend([&](const Execution& execution) {
    const Rows logits({5, -7}, 2, 1, Scalar::fp32);
    CHECK(run(execution, {1}, logits, {0, 0}, true).losses == std::vector<float>(2, 0.0f));
    CHECK(logits.values() == std::vector<float>(2, 0.0f));
  });
}

TEST_CASE("cross-entropy of huge logits is finite; without a counted target loss and gradient are 0") {
  for_each_backend([&](const Execution& execution) {
    const Rows huge({3e38f, -3e38f, 1e38f, 0.0f}, 1, 4, Scalar::fp32);
    CHECK(run(execution, {4}, huge, {0}, true).losses == std::vector<float>{0});
    CHECK(huge.values() == std::vector<float>(4, 0.0f));
    const Rows large({-100, -100, 100, -100}, 1, 4, Scalar::fp32);
    CHECK(run(execution, {4}, large, {0}, true).losses == std::vector<float>{200});
    CHECK(large.values() == std::vector<float>{-1, 0, 1, 0});
    const Rows ignored(random_floats(12, 1), 3, 4, Scalar::bf16);
    CHECK(run(execution, {4}, ignored, {kIgnored, kIgnored, kIgnored}, true).losses == std::vector<float>(3, 0.0f));
    CHECK(ignored.values() == std::vector<float>(12, 0.0f));
  });
}

TEST_CASE("a row's loss and gradient do not depend on the rows beside it: any chunk of the head gives the same bits") {
  for_each_backend([&](const Execution& execution) {
    const std::int64_t rows = 40, columns = 72;
    const std::vector<float> values = random_floats(rows * columns, 4, 5.0f);
    std::vector<std::int32_t> targets;
    for (std::int64_t n = 0; n < rows; ++n) targets.push_back(static_cast<std::int32_t>(n % 70));
    const Rows whole(values, rows, columns, Scalar::fp32);
    const Result all = run(execution, {70}, whole, targets, true);
    for (std::int64_t begin = 0, count = 17; begin < rows; begin += count) {
      const std::int64_t end = std::min(rows, begin + count);
      const Rows part({values.begin() + begin * columns, values.begin() + end * columns}, end - begin, columns,
                      Scalar::fp32);
      const Result chunk = run(execution, {70}, part, {targets.begin() + begin, targets.begin() + end}, true);
      CHECK(chunk.losses == std::vector<float>(all.losses.begin() + begin, all.losses.begin() + end));
      CHECK(chunk.logits ==
            std::vector<float>(all.logits.begin() + begin * columns, all.logits.begin() + end * columns));
    }
  });
}

}  // namespace weft::testing
