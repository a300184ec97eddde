// SPDX-License-Identifier: Apache-2.0
//
// Kernels of dead features, rankings and tied decoders against plain float64 loops.
#include <limits>
#include <tuple>

#include "kernels/transcoder/decode/by_target.hpp"
#include "kernels/transcoder/decode/pair_bias.hpp"
#include "kernels/transcoder/decode/tied.hpp"
#include "kernels/transcoder/encode/quantile_bias.hpp"
#include "kernels/transcoder/encode/resample.hpp"
#include "kernels/transcoder/loss/auxiliary_loss.hpp"
#include "kernels/transcoder/loss/penalty.hpp"
#include "kernels/transcoder/select/ranking.hpp"
#include "tests/kernels/support.hpp"

namespace weft::testing {

using namespace weft::kernels;

TEST_CASE("mask_alive keeps the biases of features that have been silent for the window") {
  for_each_backend([&](const Execution& execution) {
    constexpr std::int64_t kLayers = 3, kFeatures = 37;
    const std::vector<float> bias = random_floats(kLayers * kFeatures, 1);
    std::vector<std::int64_t> clocks;
    for (std::int64_t i = 0; i < kLayers * kFeatures; ++i) clocks.push_back(90 + i % 21);
    const DeviceArray<float> b(bias), masked(kLayers * kFeatures);
    mask_alive(execution, b.matrix(kLayers, kFeatures), DeviceArray<std::int64_t>(clocks).array(), 100,
               masked.matrix(kLayers, kFeatures));
    const std::vector<float> found = masked.values();
    for (std::size_t i = 0; i < bias.size(); ++i)
      CHECK(found[i] == (clocks[i] >= 100 ? bias[i] : -std::numeric_limits<float>::infinity()));
  });
}

TEST_CASE("biases from data let so many tokens pass, also with equal values and with some that are not finite") {
  for_each_backend([&](const Execution& execution) {
    constexpr std::int64_t kTokens = 101, kFeatures = 5;
    std::vector<float> z = random_floats(kTokens * kFeatures, 3);
    for (std::int64_t n = 0; n < kTokens; ++n) {
      z[n * kFeatures + 1] = 0.5f;                                                     // all equal
      z[n * kFeatures + 2] = std::numeric_limits<float>::quiet_NaN();                  // none counts
      if (n % 50 == 0) z[n * kFeatures + 3] = std::numeric_limits<float>::infinity();  // three do not count
    }
    for (const std::int64_t active : {0, 1, 30, 97}) {
      CAPTURE(active);
      const DeviceArray<float> values(z), bias(kFeatures);
      bias_of_quantile(execution, values.matrix(kTokens, kFeatures), active, 0.25f, bias.array());
      const std::vector<float> found = bias.values();
      for (const std::int64_t f : {0, 3, 4}) {
        std::int64_t passing = 0;
        for (std::int64_t n = 0; n < kTokens; ++n)
          passing +=
              std::isfinite(z[n * kFeatures + f]) && double(z[n * kFeatures + f]) + double(found[f]) > 0.25 + 1e-6;
        CHECK(passing == active);
      }
      CHECK(found[1] == -0.25f);
      CHECK(found[2] == 0.0f);
    }
  });
}

TEST_CASE("dead features are directed at tokens in proportion to their squares; others keep their bits") {
  for_each_backend([&](const Execution& execution) {
    constexpr std::int64_t kTokens = 50, kFeatures = 4000, kColumns = 300;
    for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
      std::vector<float> rows = random_floats(kTokens * kColumns, 5);
      for (std::int64_t i = 0; i < kTokens * kColumns; ++i)
        rows[i] *= i / kColumns < 10 ? 2.0f : i / kColumns < 20 ? 0.0f : 1.0f;
      rows[30 * kColumns] = std::numeric_limits<float>::quiet_NaN();
      const TestMatrix source(rows, kTokens, kColumns, type);
      std::vector<std::int64_t> clocks(kFeatures, 100);
      for (std::int64_t f = 0; f < kFeatures; f += 4) clocks[f] = 99;
      const DeviceArray<std::int64_t> clock(clocks), token(kFeatures);
      const DeviceArray<double> sums(kTokens);
      sums_of_squares(execution, source.view(), sums.array());
      draw_tokens(execution, clock.array(), 100, sums.array(), 7, 20, 3, token.array());
      const std::vector<std::int64_t> drawn = token.values();
      std::vector<double> count(3);
      for (std::int64_t f = 0; f < kFeatures; ++f) {
        CHECK((drawn[f] < 0) == (f % 4 == 0));
        if (drawn[f] < 0) continue;
        REQUIRE(drawn[f] != 30);                     // not finite
        REQUIRE((drawn[f] < 10 || drawn[f] >= 20));  // zero
        ++count[drawn[f] < 10 ? 0 : 2];
      }
      // 40 to 29 in expectation: 1739 of 3000, with a deviation of 27, besides that of the random rows.
      CHECK(std::abs(count[0] / 3000 - 40.0 / 69) < 0.05);

      const std::vector<float> old = random_floats(kFeatures * kColumns, 6);
      const DeviceArray<float> weights(old);
      direct_rows(execution, token.array(), source.view(), -1.5f, weights.matrix(kFeatures, kColumns));
      const std::vector<float> found = weights.values(), stored = source.values();
      for (std::int64_t f = 0; f < kFeatures; ++f) {
        double square = 0;
        for (std::int64_t j = 0; drawn[f] >= 0 && j < kColumns; ++j)
          square += double(stored[drawn[f] * kColumns + j]) * double(stored[drawn[f] * kColumns + j]);
        for (std::int64_t j = 0; j < kColumns; j += 7) {
          if (drawn[f] < 0) {
            REQUIRE(found[f * kColumns + j] == old[f * kColumns + j]);
            continue;
          }
          const double expected = -1.5 / std::sqrt(square) * stored[drawn[f] * kColumns + j];
          REQUIRE(found[f * kColumns + j] == doctest::Approx(expected).epsilon(1e-6));
        }
      }
    }
  });
}

TEST_CASE("moments of the features from those of the inputs are those of their pre-activations, and rank them") {
  for_each_backend([&](const Execution& execution) {
    constexpr std::int64_t kTokens = 83, kFeatures = 19, kWidth = 270;
    const std::vector<float> x = random_floats(kTokens * kWidth, 1), w = random_floats(kFeatures * kWidth, 2),
                             b = random_floats(kFeatures, 3);
    std::vector<float> sums(kWidth), products(kWidth * kWidth), z(kTokens * kFeatures);
    std::vector<double> exact(kTokens * kFeatures), product(kFeatures * kWidth), mean(kFeatures), deviation(kFeatures);
    for (std::int64_t i = 0; i < kWidth; ++i) {
      double sum = 0;
      for (std::int64_t n = 0; n < kTokens; ++n) sum += x[n * kWidth + i];
      sums[i] = static_cast<float>(sum);
      for (std::int64_t j = 0; j < kWidth; ++j) {
        double both = 0;
        for (std::int64_t n = 0; n < kTokens; ++n) both += double(x[n * kWidth + i]) * double(x[n * kWidth + j]);
        products[i * kWidth + j] = static_cast<float>(both);
      }
    }
    for (std::int64_t f = 0; f < kFeatures; ++f) {
      for (std::int64_t n = 0; n < kTokens; ++n) {
        for (std::int64_t i = 0; i < kWidth; ++i)
          exact[n * kFeatures + f] += double(w[f * kWidth + i]) * double(x[n * kWidth + i]);
        z[n * kFeatures + f] = static_cast<float>(exact[n * kFeatures + f]);
        exact[n * kFeatures + f] += b[f];
        mean[f] += exact[n * kFeatures + f] / kTokens;
      }
      for (std::int64_t n = 0; n < kTokens; ++n)
        deviation[f] += std::pow(exact[n * kFeatures + f] - mean[f], 2) / (kTokens - 1);
      deviation[f] = std::sqrt(deviation[f]);
    }
    const DeviceArray<float> sum(sums), both(products), bias(b), means(kFeatures), spreads(kFeatures);
    const TestMatrix weight(w, kFeatures, kWidth, Scalar::fp32), tile(z, kTokens, kFeatures, Scalar::fp32);
    centre_products(execution, sum.array(), kTokens, both.matrix(kWidth, kWidth));
    const std::vector<float> centred = both.values();
    std::vector<float> wc(kFeatures * kWidth);
    for (std::int64_t f = 0; f < kFeatures; ++f)
      for (std::int64_t j = 0; j < kWidth; ++j) {
        double total = 0;
        for (std::int64_t i = 0; i < kWidth; ++i) total += double(w[f * kWidth + i]) * double(centred[i * kWidth + j]);
        wc[f * kWidth + j] = static_cast<float>(total);
      }
    const DeviceArray<float> of_weight(wc);
    feature_statistics(execution, weight.view(), bias.array(), of_weight.matrix(kFeatures, kWidth), sum.array(),
                       kTokens, means.array(), spreads.array());
    const std::vector<float> m = means.values(), s = spreads.values();
    standardise_tile(execution, tile.view(), bias.array(), means.array(), spreads.array());
    const std::vector<float> r = tile.values();
    for (std::int64_t f = 0; f < kFeatures; ++f) {
      // Stored sums and products have a rounding each; deviations are about 16, so that these are relative to them.
      CHECK(std::abs(m[f] - mean[f]) <= 1e-5 * deviation[f]);
      CHECK(s[f] == doctest::Approx(deviation[f] + 1e-6).epsilon(1e-5));
      for (std::int64_t n = 0; n < kTokens; ++n) {
        const double value = exact[n * kFeatures + f], score = (value - mean[f]) / (deviation[f] + 1e-6);
        if (std::abs(value) < 1e-3 || std::abs(score) < 1e-3) continue;  // within rounding of taking part or not
        CHECK(std::abs(r[n * kFeatures + f] - (value > 0 && score > 0 ? score : 0)) <= 1e-4);
      }
    }
  });
}

TEST_CASE("biases of pairs: the sum of t + 1 equal ones, and the norm of their gradients") {
  for_each_backend([&](const Execution& execution) {
    constexpr std::int64_t kLayers = 4, kWidth = 37;
    const std::vector<float> before = random_floats(kLayers * kWidth, 1), after = random_floats(kLayers * kWidth, 2);
    const DeviceArray<float> old(before), values(after), scaled(kLayers * kWidth);
    norm_of_pairs(execution, values.array(), kWidth, scaled.array());
    extend_update(execution, old.array(), kWidth, values.array());
    const std::vector<float> found = values.values(), norms = scaled.values();
    for (std::int64_t j = 0; j < kLayers * kWidth; ++j) {
      const double t = static_cast<double>(j / kWidth), from = before[j], to = after[j];
      // The difference, the product and the sum.
      CHECK(std::abs(found[j] - (from + (t + 1) * (to - from))) <=
            3 * kRoundoff * (std::abs(from) + (t + 1) * (std::abs(from) + std::abs(to))));
      CHECK(norms[j] == doctest::Approx(std::sqrt(t + 1) * to).epsilon(1e-6));
    }
  });
}

TEST_CASE("auxiliary_rows agrees with float64, and adds its squares") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : {Scalar::fp32, Scalar::bf16})
      for (const std::int64_t columns : {1, 300, 770})
        for (const std::int64_t parts : {1, 3}) {
          constexpr std::int64_t kRows = 7;
          const TestMatrix partial(random_floats(parts * kRows * columns, 1), parts * kRows, columns, type),
              gradient(random_floats(kRows * columns, 2), kRows, columns, type),
              rows(std::vector<float>(kRows * columns, 9.0f), kRows, columns, type);
          const DeviceArray<double> squares(std::vector<double>(kRows, 2.0));
          constexpr float kFactor = 0.3f, kCoefficient = 0.7f;
          auxiliary_rows(execution, partial.view(), parts, gradient.view(), kFactor, kCoefficient, rows.view(),
                         squares.array());
          const std::vector<float> p = partial.values(), g = gradient.values(), found = rows.values();
          const std::vector<double> sums = squares.values();
          // At most parts + 3 roundings of terms below 0.3 parts + 1, and one of the stored type.
          const double tolerance = static_cast<double>(parts + 3) * kRoundoff * (0.3 * static_cast<double>(parts) + 1) +
                                   (type == Scalar::bf16 ? kRoundoffBf16 * (0.3 * static_cast<double>(parts) + 1) : 0);
          for (std::int64_t n = 0; n < kRows; ++n) {
            double sum = 2;
            for (std::int64_t j = 0; j < columns; ++j) {
              double u = 0;
              for (std::int64_t part = 0; part < parts; ++part) u += p[(part * kRows + n) * columns + j];
              u = static_cast<double>(kCoefficient) *
                  (static_cast<double>(kFactor) * u + static_cast<double>(g[n * columns + j]));
              sum += u * u;
              CHECK(std::abs(found[n * columns + j] - u) <= tolerance);
            }
            // Before rounding to the stored type.
            CHECK(sums[n] == doctest::Approx(sum).epsilon(1e-5));
          }
        }
  });
}

TEST_CASE("sums of the sparsity penalty and its gradients agree with float64, the same bits every time") {
  for_each_backend([&](const Execution& execution) {
    // One token, features without a hit, and features with one for nearly every token.
    for (const auto& [n_tokens, n_layers, n_features] :
         {std::tuple<std::int64_t, std::int64_t, std::int64_t>{1, 1, 1}, {37, 3, 50}, {900, 2, 33}})
      for (const SparsityForm form : {SparsityForm::tanh, SparsityForm::linear}) {
        CAPTURE(n_tokens);
        CAPTURE(static_cast<int>(form));
        const Sparse sparse = random_sparse(n_tokens, n_layers, n_features, 0.1, 3);
        const std::int64_t n_keys = sparse.n_keys();
        std::vector<float> norms = random_floats(n_keys, 7);
        for (float& norm : norms) norm = std::abs(norm);
        norms[0] = 0.0f;
        const DeviceArray<AdamStep> step(std::vector<AdamStep>{test_step()});  // step 7
        const SparsityPenalty penalty{form, 1.5f, {.value = 0.25f, .begin = 2, .end = 12, .from = 0}, step.data()};
        const double coefficient = 0.25 * (7 - 2) / (12 - 2);
        const DeviceArray<float> norm(norms), norm_gradient(n_keys), again(n_keys);
        const std::vector<float> before = random_floats(sparse.capacity(), 8);
        const DeviceArray<float> activation_gradient(before);
        const DeviceArray<double> value(n_keys);
        sparsity_sums(execution, penalty, sparse.csr(), sparse.csc(), norm.array(), again.array(), value.array());
        sparsity_sums(execution, penalty, sparse.csr(), sparse.csc(), norm.array(), norm_gradient.array(),
                      value.array());
        add_sparsity_gradient(execution, penalty, sparse.csr(), norm.array(), activation_gradient.array());
        CHECK(norm_gradient.values() == again.values());
        const std::vector<float> slopes = norm_gradient.values(), da = activation_gradient.values();
        const std::vector<double> values = value.values();
        std::vector<double> slope64(n_keys, 0.0), value64(n_keys, 0.0);
        for (std::int64_t i = 0; i < sparse.size(); ++i) {
          const std::uint32_t key = sparse.key[i];
          const double a = sparse.value[i], nu = norms[key], v = 1.5 * a * nu;
          const double p = form == SparsityForm::tanh ? std::tanh(v) : v,
                       slope = form == SparsityForm::tanh ? 1.5 * (1 - p * p) : 1.5;
          slope64[key] += coefficient * a * slope;
          value64[key] += coefficient * p;
          // 1 - tanh^2 in fp32: a few roundings of 1.
          CHECK(std::abs(da[i] - before[i] - coefficient * nu * slope) <= 2e-6 * (1 + std::abs(before[i])));
        }
        for (std::int64_t key = 0; key < n_keys; ++key) {
          const double hits = static_cast<double>(sparse.offsets[key + 1] - sparse.offsets[key]);
          CHECK(std::abs(slopes[key] - slope64[key]) <= 2e-6 * hits);  // 0 without hits
          CHECK(std::abs(values[key] - value64[key]) <= 2e-6 * hits);
        }
      }
  });
}

TEST_CASE("rank_tile gives relu(z) times the norm, and unrank the activations back") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : {Scalar::fp32, Scalar::bf16}) {
      constexpr std::int64_t kRows = 5, kFeatures = 300;
      std::vector<float> norm = random_floats(kFeatures, 3);
      for (float& value : norm) value = std::abs(value) + 0.1f;
      norm[7] = 0;
      const TestMatrix product(random_floats(kRows * kFeatures, 1), kRows, kFeatures, type);
      const std::vector<float> before = product.values(), bias = random_floats(kFeatures, 2);
      rank_tile(execution, product.view(), DeviceArray<float>(bias).array(), DeviceArray<float>(norm).array());
      const std::vector<float> found = product.values();
      // Two roundings of fp32, one of the stored type.
      const double relative = 2 * kRoundoff + (type == Scalar::bf16 ? kRoundoffBf16 : kRoundoff);
      for (std::size_t i = 0; i < found.size(); ++i) {
        const float z = before[i] + bias[i % kFeatures];
        const double expected = z > 0 ? static_cast<double>(z) * norm[i % kFeatures] : 0;
        CHECK(std::abs(found[i] - expected) <= relative * expected);
      }
    }
    // Two tokens of two layers; the last place of the list is not in use.
    const std::vector<float> norm{0.5f, 2, 4, 8};
    const DeviceArray<std::int64_t> offsets(std::vector<std::int64_t>{0, 2, 3});
    const DeviceArray<std::uint32_t> key(std::vector<std::uint32_t>{0, 3, 2, 1});
    const DeviceArray<float> value(std::vector<float>{1, 16, 2, 7});
    unrank(execution, {2, 2, 2, offsets.array(), key.array(), value.array()}, DeviceArray<float>(norm).array());
    CHECK(value.values() == std::vector<float>{2, 2, 0.5f, 7});
  });
}

TEST_CASE(
    "lists by target hold every entry once per target; gradients return to the entries and to offsets and scales") {
  for_each_backend([&](const Execution& execution) {
    for (const bool affine : {false, true}) {
      constexpr std::int64_t kTokens = 23, kLayers = 4, kFeatures = 11, kPairs = kLayers * (kLayers + 1) / 2;
      const Sparse of = random_sparse(kTokens, kLayers, kFeatures, 0.2, 8);
      const std::vector<float> o = random_floats(kPairs * kFeatures, 1), gamma = random_floats(kPairs * kFeatures, 2);
      const DeviceArray<float> offset(o), scale(gamma);
      const PairAffine pairs =
          affine ? PairAffine{offset.matrix(kPairs, kFeatures), scale.matrix(kPairs, kFeatures)} : PairAffine{};
      const std::int64_t most = kLayers * of.capacity();
      const DeviceArray<std::int64_t> begin(kTokens * kLayers + 1), row_offsets(kTokens + 1),
          hit_offsets(kLayers * kFeatures + 1);
      const DeviceArray<std::uint32_t> key(most), hit_token(most), hit_position(most);
      const DeviceArray<float> value(most);
      lists_by_target(execution, of.csr(), pairs,
                      {kTokens, kLayers, kFeatures, row_offsets.array(), key.array(), value.array()}, begin.array());
      hits_by_target(execution, of.csr(), of.csc(), begin.array(),
                     {hit_offsets.array(), hit_token.array(), hit_position.array()});

      // What the definition gives, one entry after another.
      std::vector<std::uint32_t> keys;
      std::vector<float> values;
      std::vector<std::int64_t> rows{0}, source_of, pair_at;  // of each: position in `of`, offset into o and gamma
      for (std::int64_t n = 0; n < kTokens; ++n) {
        for (std::int64_t t = 0; t < kLayers; ++t)
          for (std::int64_t e = of.row_offsets[n]; e < of.row_offsets[n + 1]; ++e) {
            const std::int64_t s = of.key[e] / kFeatures, f = of.key[e] % kFeatures;
            if (s > t) continue;
            const std::int64_t at = pair_of(s, t, kLayers) * kFeatures + f;
            keys.push_back(static_cast<std::uint32_t>(t * kFeatures + f));
            values.push_back(affine ? (of.value[e] + o[at]) * gamma[at] : of.value[e]);
            source_of.push_back(e);
            pair_at.push_back(at);
          }
        rows.push_back(std::ssize(keys));
      }
      CHECK(row_offsets.values() == rows);
      const auto used = [&](auto all) {
        all.resize(keys.size());
        return all;
      };
      CHECK(used(key.values()) == keys);
      CHECK(used(value.values()) == values);
      // Each entry is a hit of its key, of its token, once.
      const std::vector<std::int64_t> offsets = hit_offsets.values();
      const std::vector<std::uint32_t> tokens = hit_token.values(), positions = hit_position.values();
      REQUIRE(offsets.back() == std::ssize(keys));
      std::vector<int> seen(keys.size(), 0);
      for (std::int64_t k = 0; k < kLayers * kFeatures; ++k)
        for (std::int64_t hit = offsets[k]; hit < offsets[k + 1]; ++hit) {
          const std::uint32_t at = positions[hit];
          ++seen[at];
          CHECK(keys[at] == k);
          CHECK(rows[tokens[hit]] <= at);
          CHECK(at < rows[tokens[hit] + 1]);
        }
      CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));

      const std::vector<float> d = random_floats(std::ssize(keys), 5);
      const DeviceArray<float> delta(d), gradient(of.capacity()), of_offset(kPairs * kFeatures),
          of_scale(kPairs * kFeatures);
      gradient_by_source(execution, of.csr(), pairs, begin.array(), delta.array(), gradient.array());
      std::vector<double> expected(of.value.size()), offsets64(kPairs * kFeatures), scales64(kPairs * kFeatures);
      for (std::size_t i = 0; i < keys.size(); ++i) {
        const auto e = static_cast<std::size_t>(source_of[i]), at = static_cast<std::size_t>(pair_at[i]);
        expected[e] += (affine ? gamma[at] : 1.0f) * double{d[i]};
        offsets64[at] += double{gamma[at]} * d[i];
        scales64[at] += (double{of.value[e]} + o[at]) * d[i];
      }
      const std::vector<float> found = gradient.values();
      // At most four terms below 1.
      for (std::size_t e = 0; e < expected.size(); ++e) CHECK(std::abs(found[e] - expected[e]) <= 8 * kRoundoff * 4);
      if (!affine) continue;
      affine_gradient(execution, of.csr(), of.csc(), pairs, begin.array(), delta.array(),
                      {of_offset.matrix(kPairs, kFeatures), of_scale.matrix(kPairs, kFeatures)});
      const std::vector<float> found_offset = of_offset.values(), found_scale = of_scale.values();
      // fp64 sums of up to 23 fp32 products below 2.1.
      for (std::size_t i = 0; i < offsets64.size(); ++i) {
        CHECK(std::abs(found_offset[i] - offsets64[i]) <= 23 * 3 * kRoundoff * 2.1);
        CHECK(std::abs(found_scale[i] - scales64[i]) <= 23 * 3 * kRoundoff * 2.1);
      }
    }
  });
}

TEST_CASE("norms of features tied per target are those of the rows from their layer on; factors the sums up to it") {
  for_each_backend([&](const Execution& execution) {
    const DeviceArray<float> norm(std::vector<float>{1, 2, 2, 0, 4, 5}), factor(std::vector<float>{1, 2, 3, 4, 5, 6});
    norms_of_features(execution, 3, norm.array());
    factors_of_rows(execution, 3, factor.array());
    const std::vector<double> squares{1 + 4 + 16, 4 + 0 + 25, 4 + 16, 25, 16, 25};
    for (std::size_t i = 0; i < squares.size(); ++i)
      CHECK(norm.values()[i] == doctest::Approx(std::sqrt(squares[i])).epsilon(1e-6));
    CHECK(factor.values() == std::vector<float>{1, 2, 4, 6, 9, 12});
    const DeviceArray<float> rows(std::vector<float>{1, 2, 3, 4});
    scale_each_row(execution, norm.array(), rows.matrix(2, 2));
    for (std::size_t i = 0; i < 4; ++i) CHECK(rows.values()[i] == (i + 1.0f) * norm.values()[i / 2]);
  });
}

TEST_CASE("sums over layers in both directions agree with float64") {
  for_each_backend([&](const Execution& execution) {
    for (const Scalar type : {Scalar::fp32, Scalar::bf16})
      for (const std::int64_t d : {1, 20, 770})
        for (const bool later : {true, false}) {
          constexpr std::int64_t kRows = 5, kLayers = 4;
          const TestMatrix rows(random_floats(kRows * kLayers * d, 4), kRows, kLayers * d, type);
          const std::vector<float> before = rows.values();
          if (later)
            sum_to_later_layers(execution, rows.view(), d);
          else
            sum_from_later_layers(execution, rows.view(), d);
          const std::vector<float> after = rows.values();
          for (std::int64_t n = 0; n < kRows; ++n)
            for (std::int64_t c = 0; c < d; ++c) {
              double sum = 0;
              for (std::int64_t i = 0; i < kLayers; ++i) {
                const auto at = static_cast<std::size_t>((n * kLayers + (later ? i : kLayers - 1 - i)) * d + c);
                sum += before[at];
                // Sums of at most four values below 1: three roundings of fp32, and one of the stored type.
                CHECK(std::abs(after[at] - sum) <= 4 * (3 * kRoundoff + (type == Scalar::bf16 ? kRoundoffBf16 : 0)));
              }
            }
        }
  });
}

}  // namespace weft::testing
