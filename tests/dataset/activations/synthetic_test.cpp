// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/synthetic.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>
#include <tuple>
#include <vector>

#include "base/error.hpp"
#include "dataset/activations/statistics.hpp"
#include "tests/dataset/activations/samples.hpp"
#include "tests/test.hpp"

namespace weft::dataset {
namespace {

using testing::Scratch;

SyntheticSettings small(const std::string& output) {
  SyntheticSettings settings;
  settings.output = output;
  settings.layers = 3;
  settings.d_model = 16;
  settings.features = 40;
  settings.k = 4;
  settings.tokens = 5000;
  settings.validation_tokens = 300;
  settings.rows_per_file = 2000;
  return settings;
}

std::vector<const float*> strips(const std::vector<std::vector<float>>& decoder) {
  std::vector<const float*> pointers;
  for (const auto& layer : decoder) pointers.push_back(layer.data());
  return pointers;
}

}  // namespace

TEST_CASE("a synthetic dataset is valid, has the requested sizes and the same bytes for any number of threads") {
  for (const kernels::Scalar dtype : {kernels::Scalar::bf16, kernels::Scalar::fp16, kernels::Scalar::fp32}) {
    const Scratch one, four;
    SyntheticSettings settings = small(one / "data");
    settings.dtype = dtype;
    settings.compression = dtype == kernels::Scalar::fp16 ? Compression::gzip : Compression::none;
    write_synthetic(settings, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // detects time stamps in files
    settings.output = four / "data";
    write_synthetic(settings, 4);
    for (const char* file : {"train/chunk_0.hdf5", "train/chunk_2.hdf5", "validation/chunk_0.hdf5",
                             "train/metadata.json", "train/index.bin"})
      CHECK(testing::file_digest(one / "data/" + file) == testing::file_digest(four / "data/" + file));
    const Description train = describe(testing::world(), one / "data/train", {});
    CHECK(train.own_layout);
    CHECK(train.n_rows == 5000);
    CHECK(train.files.size() == 3);
    CHECK(train.dtype == dtype);
    CHECK(describe(testing::world(), one / "data/validation", {}).n_rows == 300);
    CHECK(ground_truth_path(train.path) == one / "data/ground_truth.h5");
    check(testing::world(), train, 1);
  }
}

TEST_CASE("signal, mean, noise and frequencies agree with the ground truth") {
  const Scratch directory;
  SyntheticSettings settings = small(directory / "data");
  settings.dtype = kernels::Scalar::fp32;
  settings.tokens = 20000;
  write_synthetic(settings, 2);
  const GroundTruth truth = read_ground_truth(directory / "data/ground_truth.h5");
  CHECK(truth.n_layers == 3);
  CHECK(truth.encoder[0].size() == 40 * 16);
  CHECK(truth.decoder[1].size() == 40 * 2 * 16);
  for (std::size_t layer = 0; layer < 3; ++layer) {
    std::int64_t fired = 0;
    for (std::int64_t f = 0; f < 40; ++f) {
      fired += truth.fired[layer][static_cast<std::size_t>(f)];
      double norm = 0;
      for (std::int64_t j = 0; j < 16; ++j)
        norm += std::pow(truth.encoder[layer][static_cast<std::size_t>(f * 16 + j)], 2);
      CHECK(std::abs(norm - 1) < 1e-5);  // fp32 rounding of 16 terms
    }
    CHECK(fired == 4 * 20000);                                  // exactly k of them per token and layer
    CHECK(truth.fired[layer][0] > 4 * truth.fired[layer][39]);  // 40^0.8 = 19 before saturation
    CHECK(truth.fired[layer][39] > 100);
  }
  // Power of one dimension: k * E[c^2] / d of the signal, and 1 % of it (20 dB) noise; 3 sources reach the last target.
  const Description train = describe(testing::world(), directory / "data/train", {});
  const Statistics statistics = compute_statistics(testing::world(), train, 2);
  const double power = 4 * (1 + 0.5 * std::sqrt(2 / M_PI) + 0.0625) / 16 * 1.01;
  for (const auto& [side, layer, sources] :
       {std::tuple{&statistics.inputs, 0, 1}, {&statistics.targets, 0, 1}, {&statistics.targets, 2, 3}}) {
    double variance = 0, offset = 0;
    for (int j = 0; j < 16; ++j) {
      variance += std::pow(side->standard_deviation[static_cast<std::size_t>(layer * 16 + j)], 2) / 16;
      offset += std::pow(side->mean[static_cast<std::size_t>(layer * 16 + j)], 2) / 16;
    }
    // Features of unequal frequency contribute part of their power to the mean, which reduces the variance.
    CHECK(variance + offset > power * sources);
    CHECK(variance < 1.05 * power * sources);
    CHECK(variance > 0.5 * power * sources);
  }
}

TEST_CASE("reach limits the layers that a feature writes to") {
  const Scratch directory;
  SyntheticSettings settings = small(directory / "data");
  settings.reach = 2;
  write_synthetic(settings, 1);
  const GroundTruth truth = read_ground_truth(directory / "data/ground_truth.h5");
  const std::vector<float>& decoder = truth.decoder[0];
  CHECK(std::any_of(decoder.begin() + 16, decoder.begin() + 32, [](float w) { return w != 0; }));
  CHECK(std::all_of(decoder.begin() + 32, decoder.begin() + 48, [](float w) { return w == 0; }));
}

TEST_CASE("recovery finds all planted strips after reordering, scaling and adding others") {
  const Scratch directory;
  SyntheticSettings settings = small(directory / "data");
  settings.tokens = 40000;
  write_synthetic(settings, 2);
  const GroundTruth truth = read_ground_truth(directory / "data/ground_truth.h5");
  std::vector<std::vector<float>> learned(3);
  for (std::size_t layer = 0; layer < 3; ++layer) {
    const std::size_t width = (3 - layer) * 16;
    learned[layer].assign(60 * width, 0.0f);
    for (std::size_t f = 0; f < 40; ++f)
      for (std::size_t j = 0; j < width; ++j)
        learned[layer][(59 - f) * width + j] = 3.0f * truth.decoder[layer][f * width + j];
  }
  const Recovery all = recovery(truth, strips(learned), 60, 2);
  CHECK(all.fraction == 1.0);
  CHECK(all.recovered == all.counted);
  CHECK(all.counted > 100);

  // Copies of one strip match one planted feature only. Opposite directions do not match.
  for (std::size_t f = 0; f < 30; ++f)
    std::copy_n(learned[0].begin() + 59 * 48, 48, learned[0].begin() + static_cast<std::ptrdiff_t>((58 - f) * 48));
  for (float& w : learned[1]) w = -w;
  const Recovery fewer = recovery(truth, strips(learned), 60, 1);
  CHECK(fewer.per_layer[0] < 0.4);
  CHECK(fewer.per_layer[1] == 0.0);
  CHECK(fewer.per_layer[2] == 1.0);
}

TEST_CASE("recovery uses a maximum matching") {
  // Learned 0 may match both planted features, learned 1 only planted 0: a maximum matching has both.
  GroundTruth truth;
  truth.n_layers = 1;
  truth.d_model = 2;
  truth.n_features = 2;
  truth.decoder = {{1.0f, 0.0f, std::cos(0.6f), std::sin(0.6f)}};
  truth.fired = {{1000, 5000}};
  const std::vector<std::vector<float>> learned = {{std::cos(0.3f), std::sin(0.3f), std::cos(-0.2f), std::sin(-0.2f)}};
  CHECK(recovery(truth, strips(learned), 2, 1).recovered == 2);
  truth.fired = {{999, 5000}};
  const Recovery one = recovery(truth, strips(learned), 2, 1);
  CHECK(one.counted == 1);  // the other one fired only 999 times
  CHECK(one.recovered == 1);
}

TEST_CASE("invalid settings are usage errors, an existing dataset is not modified") {
  const Scratch directory;
  SyntheticSettings settings = small(directory / "data");
  settings.k = 41;
  CHECK_THROWS_AS(write_synthetic(settings, 1), Error);
  settings.k = 40;  // all features active is valid
  settings.tokens = 3;
  settings.validation_tokens = 0;
  write_synthetic(settings, 1);
  CHECK(read_ground_truth(directory / "data/ground_truth.h5").fired[0][39] == 3);
  const std::string before = testing::digest_of(directory.path.string());
  CHECK_THROWS_AS(write_synthetic(settings, 1), Error);
  CHECK(testing::digest_of(directory.path.string()) == before);
}

}  // namespace weft::dataset
