// SPDX-License-Identifier: Apache-2.0
//
// Norms and nearest rows of the decoder against float64 loops, with more features than a block holds and on several
// ranks.
#include "transcoder/features/decoder_rows.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "device/memory.hpp"
#include "kernels/kokkos_runtime.hpp"
#include "kernels/optimize/adam.hpp"
#include "tests/test.hpp"

namespace weft::transcoder {
namespace {

using testing::execution;
using testing::world;

constexpr std::int64_t kLayers = 2, kWidth = 5, kFeatures = 5001;  // blocks of 4096 rows: two on one rank

/// A transcoder with initial values, but layer 1 has a zero row 3 and, far apart, two equal rows 7 and 5000.
struct Sample {
  parallel::Grid grid{world(), parallel::data_by_feature(1, world().size())};
  Model model{{kLayers, kWidth, kFeatures}, kernels::StorageType::fp32, grid, execution(), Moments::none};
  std::vector<std::vector<float>> rows;  ///< [layer] of all features

  Sample() {
    model.initialise(3);  // the same on any grid
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      const kernels::ParameterRows& decoder = model.decoder()[static_cast<std::size_t>(layer)];
      auto* weight = static_cast<float*>(decoder.weight);
      const auto local = [&](std::int64_t f) { return weight + (f - model.features().begin) * decoder.columns; };
      const auto here = [&](std::int64_t f) { return f >= model.features().begin && f < model.features().end; };
      if (layer == 1) {
        if (here(3)) std::fill(local(3), local(3) + decoder.columns, 0.0f);
        for (const std::int64_t f : {std::int64_t{7}, std::int64_t{5000}})
          if (here(f))
            for (std::int64_t i = 0; i < decoder.columns; ++i) local(f)[i] = static_cast<float>(i + 1) * 0.25f;
      }
      std::vector<std::int64_t> bytes;
      for (std::int64_t g = 0; g < world().size(); ++g)
        bytes.push_back(parallel::part(kFeatures, world().size(), g).size() * decoder.columns * 4);
      rows.emplace_back(static_cast<std::size_t>(kFeatures * decoder.columns));
      grid.axis(parallel::kFeatureAxis).all_gather_uneven(weight, rows.back().data(), bytes);
    }
  }

  double dot(std::int64_t layer, std::int64_t a, std::int64_t b) const {
    const std::int64_t columns = (kLayers - layer) * kWidth;
    const float* const all = rows[static_cast<std::size_t>(layer)].data();
    double sum = 0;
    for (std::int64_t i = 0; i < columns; ++i)
      sum += static_cast<double>(all[a * columns + i]) * static_cast<double>(all[b * columns + i]);
    return sum;
  }
  double cosine(std::int64_t layer, std::int64_t a, std::int64_t b) const {
    const double norms = dot(layer, a, a) * dot(layer, b, b);
    return norms > 0 ? dot(layer, a, b) / std::sqrt(norms) : 0;
  }
};

}  // namespace

// The test changes weights in place, where the kernels run.
TEST_CASE("nearest rows are those of all pairs, in any block and on any rank" * doctest::skip(kernels::kCudaBuild)) {
  const Sample sample;
  constexpr std::int64_t k = 3;
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    const LargestEntries found = nearest_features(sample.model, layer, k, sample.grid, execution());
    for (std::int64_t local = 0; local < sample.model.n_local(); ++local) {
      const std::int64_t f = sample.model.features().begin + local;
      // All pairs take seconds: some features, and those with special rows.
      if (f % 500 != 0 && f != 3 && f != 7) continue;
      std::vector<double> cosines;
      for (std::int64_t other = 0; other < kFeatures; ++other)
        if (other != f) cosines.push_back(sample.cosine(layer, f, other));
      std::partial_sort(cosines.begin(), cosines.begin() + k, cosines.end(), std::greater<>());
      for (std::int64_t i = 0; i < k; ++i) {
        const auto at = static_cast<std::size_t>(local * k + i);
        // fp32 products of ten terms.
        CHECK(std::abs(static_cast<double>(found.value[at]) - cosines[static_cast<std::size_t>(i)]) < 1e-6);
        CHECK(found.index[at] != f);
        CHECK(std::abs(sample.cosine(layer, f, found.index[at]) - cosines[static_cast<std::size_t>(i)]) < 1e-6);
      }
      if (layer == 1 && f == 7) CHECK(found.index[static_cast<std::size_t>(local * k)] == 5000);
      if (layer == 1 && f == 5000) CHECK(found.index[static_cast<std::size_t>(local * k)] == 7);
      // A zero row has cosine 0 with all: the first ones are kept.
      if (layer == 1 && f == 3)
        CHECK(std::vector(found.index.begin() + local * k, found.index.begin() + local * k + k) ==
              std::vector<std::int64_t>{0, 1, 2});
    }
  }
}

TEST_CASE("rows of decoders tied per target are those of each target" * doctest::skip(kernels::kCudaBuild)) {
  const parallel::Grid grid(world(), parallel::data_by_feature(1, world().size()));
  Shape shape{kLayers, kWidth, 11, Decoder::tied_target};
  shape.affine = true;
  shape.scale_initial = 0.5;
  Model model(shape, kernels::StorageType::fp32, grid, execution(), Moments::none);
  model.initialise(3);
  for (std::int64_t s = 0; s < kLayers; ++s) {
    const std::int64_t n = model.n_local(), columns = row_columns(shape, s);
    REQUIRE(columns == (kLayers - s) * kWidth);
    const device::Buffer<float> rows(n * columns);
    decoder_rows(model, s, 0, execution(), rows.matrix(n, columns));
    for (std::int64_t f = 0; f < n; ++f)
      for (std::int64_t t = s; t < kLayers; ++t)
        for (std::int64_t i = 0; i < kWidth; ++i) {
          const auto* weight = static_cast<const float*>(model.decoder()[static_cast<std::size_t>(t)].weight);
          CHECK(rows.data()[f * columns + (t - s) * kWidth + i] == (t == s ? 1 : 0.5f) * weight[f * kWidth + i]);
        }
  }
}

TEST_CASE("effects on logits are products of all that a feature writes, in raw space" *
          doctest::skip(kernels::kCudaBuild)) {
  constexpr std::int64_t kFew = 11, kTokens = 9, k = 4;
  const parallel::Grid grid(world(), parallel::data_by_feature(1, world().size()));
  const std::size_t width = kLayers * kWidth;
  dataset::Normalisation affine{{std::vector<float>(width, 0.0f), std::vector<float>(width, 1.0f)},
                                {std::vector<float>(width, 0.0f), std::vector<float>(width)}};
  for (std::size_t i = 0; i < width; ++i) affine.targets.scale[i] = 0.5f + 0.25f * static_cast<float>(i);
  dataset::Statistics statistics;
  statistics.targets.mean.assign(width, 0.0);
  statistics.targets.standard_deviation.assign(width, 1.0);
  const NormalisationOnDevice normalisation(affine, statistics, execution());
  const auto unembedding = [](std::int64_t token, std::int64_t i) {
    return std::sin(static_cast<double>(3 * token + i * i + 1));
  };
  const RowBlocks tokens{kTokens, [&](std::int64_t begin, kernels::Matrix<float> out) {
                           for (std::int64_t row = 0; row < out.rows; ++row)
                             for (std::int64_t i = 0; i < kWidth; ++i)
                               out(row, i) = static_cast<float>(unembedding(begin + row, i));
                         }};
  for (const Decoder decoder : {Decoder::cross_layer, Decoder::per_layer, Decoder::tied}) {
    const Shape shape{kLayers, kWidth, kFew, decoder};
    Model model(shape, kernels::StorageType::fp32, grid, execution(), Moments::none);
    model.initialise(3);
    for (std::int64_t s = 0; s < kLayers; ++s)
      for (const float sign : {1.0f, -1.0f}) {
        const LargestEntries found = logit_effects(model, normalisation, s, k, sign, tokens, execution());
        const kernels::ParameterRows& rows = model.decoder()[static_cast<std::size_t>(s)];
        for (std::int64_t f = 0; f < model.n_local(); ++f) {
          std::vector<std::pair<double, std::int64_t>> expected;
          for (std::int64_t token = 0; token < kTokens; ++token) {
            double effect = 0;
            for (std::int64_t t = s; t < s + shape.targets(s); ++t)
              for (std::int64_t i = 0; i < kWidth; ++i) {
                const std::int64_t strip = decoder == Decoder::tied ? 0 : t - s;
                effect +=
                    static_cast<double>(static_cast<const float*>(rows.weight)[f * rows.columns + strip * kWidth + i]) /
                    static_cast<double>(affine.targets.scale[static_cast<std::size_t>(t * kWidth + i)]) *
                    unembedding(token, i);
              }
            expected.emplace_back(-static_cast<double>(sign) * effect, token);
          }
          std::sort(expected.begin(), expected.end());
          for (std::int64_t i = 0; i < k; ++i) {
            const auto at = static_cast<std::size_t>(f * k + i);
            CHECK(found.index[at] == expected[static_cast<std::size_t>(i)].second);
            CHECK(static_cast<double>(sign * found.value[at]) ==
                  doctest::Approx(-expected[static_cast<std::size_t>(i)].first).epsilon(1e-5));
          }
        }
      }
  }
}

TEST_CASE("shares of the squared norm sum to 1, over all ranks" * doctest::skip(kernels::kCudaBuild)) {
  const Sample sample;
  const DecoderSummary summary = summarise_decoder(sample.model, sample.grid, execution());
  double own = 0, all = 0;
  for (std::int64_t f = 0; f < kFeatures; ++f)
    for (std::int64_t i = 0; i < 2 * kWidth; ++i) {
      const double w = static_cast<double>(sample.rows[0][static_cast<std::size_t>(f * 2 * kWidth + i)]);
      all += w * w;
      if (i < kWidth) own += w * w;
    }
  REQUIRE(summary.share.size() == 2);
  CHECK(summary.share[0][0] == doctest::Approx(own / all).epsilon(1e-12));  // fp64 sums
  CHECK(summary.share[0][1] == doctest::Approx(1 - own / all).epsilon(1e-12));
  CHECK(summary.share[1] == std::vector<double>{1});
  // Thousands of random rows of five numbers: nearly all have a close neighbour.
  CHECK(summary.redundant_fraction[1] > 0.9);
  CHECK(summary.redundancy[1] > 0.9);
  CHECK(summary.redundancy[0] < summary.redundancy[1]);
}

}  // namespace weft::transcoder
