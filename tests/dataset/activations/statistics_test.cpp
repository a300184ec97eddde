// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/statistics.hpp"

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "tests/dataset/activations/samples.hpp"
#include "tests/test.hpp"

namespace weft::dataset {
namespace {

using kernels::Scalar;
using testing::Directory;
using testing::Sample;

/// The two-pass sums, in long double.
SideStatistics two_pass(const Sample& sample, std::int64_t n_rows, bool target) {
  SideStatistics result;
  const std::int64_t columns = sample.layers * sample.d_model;
  for (std::int64_t j = 0; j < columns; ++j) {
    long double sum = 0, square = 0;
    for (std::int64_t r = 0; r < n_rows; ++r) sum += testing::sample_value(r, target, j);
    const long double mean = sum / static_cast<long double>(n_rows);
    for (std::int64_t r = 0; r < n_rows; ++r) {
      const long double e = testing::sample_value(r, target, j) - mean;
      square += e * e;
    }
    result.mean.push_back(static_cast<double>(mean));
    result.standard_deviation.push_back(static_cast<double>(std::sqrt(square / static_cast<long double>(n_rows - 1))));
  }
  for (std::int64_t layer = 0; layer < sample.layers; ++layer) {
    long double norms = 0;
    for (std::int64_t r = 0; r < n_rows; ++r) {
      long double square = 0;
      for (std::int64_t j = 0; j < sample.d_model; ++j) {
        const long double value = testing::sample_value(r, target, layer * sample.d_model + j);
        square += value * value;
      }
      norms += std::sqrt(square);
    }
    result.mean_norm.push_back(static_cast<double>(norms / static_cast<long double>(n_rows)));
  }
  return result;
}

void check_equal(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  // Mean of about 6,000 numbers of magnitude 15 in fp64: error about 1e-14. Tolerance: 100 times that.
  for (std::size_t i = 0; i < a.size(); ++i) CHECK(std::abs(a[i] - b[i]) < 1e-12);
}

}  // namespace

TEST_CASE("statistics equal those of a two-pass algorithm, for all ranks, files and types") {
  const Sample samples[] = {{2, 6, {3000, 3000, 77}, Scalar::fp32, Compression::none},
                            {3, 5, {40, 40, 7}, Scalar::bf16, Compression::gzip},
                            {1, 9, {1500}, Scalar::fp16, Compression::none}};
  for (const Sample& sample : samples) {
    const Directory directory;
    testing::write_sample(directory / "train", sample);
    const Description description = describe(testing::world(), directory / "train", {});
    const Statistics result = compute_statistics(testing::world(), description, 2);
    CHECK(result.n_rows == description.n_rows);
    for (const bool target : {false, true}) {
      const SideStatistics expected = two_pass(sample, description.n_rows, target);
      const SideStatistics& side = target ? result.targets : result.inputs;
      check_equal(side.mean, expected.mean);
      check_equal(side.standard_deviation, expected.standard_deviation);
      check_equal(side.mean_norm, expected.mean_norm);
    }
    // Bitwise equal with one thread.
    CHECK(to_text(compute_statistics(testing::world(), description, 1), "") == to_text(result, ""));
  }
}

TEST_CASE("statistics are bitwise equal on any number of ranks") {
  const Sample sample{2, 6, {3000, 3000, 77}, Scalar::fp32, Compression::none};
  const Directory directory;
  testing::write_sample(directory / "train", sample);
  const Description description = describe(testing::world(), directory / "train", {});
  const std::string text = to_text(compute_statistics(testing::world(), description, 1), "");
  // The first line is the sha256 of all numbers, compared with a reference value. It depends only on the summation
  // tree: IEEE 754 defines sqrt exactly.
  CHECK(text.substr(0, 64) == "bc6fc68c7a921a50c831f050244c9e8cd4218a8d3576efd7860ddccb3fe9f666");
}

TEST_CASE("a value that is not finite is reported with file, dataset and row on all ranks") {
  const Directory directory;
  testing::world().on_root([&] {
    WriterSettings settings;
    settings.path = directory / "train";
    settings.n_layers = 2;
    settings.d_model = 4;
    settings.dtype = Scalar::bf16;
    settings.rows_per_file = 3000;
    ActivationWriter writer(settings);
    for (int row = 0; row < 5000; ++row) {
      std::vector<float> x(8), y(8);
      for (int j = 0; j < 8; ++j) x[j] = y[j] = static_cast<float>((row + j) % 9 - 4);
      if (row == 4321) y[6] = NAN;
      if (row == 4400) x[0] = INFINITY;
      std::vector<std::byte> raw_x(16), raw_y(16);
      store_as(Scalar::bf16, x.data(), 8, raw_x.data());
      store_as(Scalar::bf16, y.data(), 8, raw_y.data());
      writer.append(1, raw_x.data(), raw_y.data());
    }
    writer.finish();
    return std::string();
  });
  const Description description = describe(testing::world(), directory / "train", {});
  std::string message;
  try {
    compute_statistics(testing::world(), description, 2);
  } catch (const Error& failure) {
    message = failure.what();
    CHECK(failure.code() == ExitCode::data);
    CHECK(failure.known_to() == KnownTo::all_ranks);
  }
  CHECK(message.find("chunk_1.hdf5: /layer_1/targets row 1321, column 2 is not finite") != std::string::npos);
}

TEST_CASE("a valid cache is used, any other is replaced") {
  const Sample sample{2, 6, {40, 40, 7}, Scalar::fp32, Compression::none};
  const Directory directory;
  testing::write_sample(directory / "train", sample);
  const Description description = describe(testing::world(), directory / "train", {});
  const std::string cache = directory / "statistics.json";
  const Statistics first = statistics(testing::world(), description, cache, 1);
  CHECK(std::filesystem::exists(cache));
  const auto content = [&] {
    std::ifstream in(cache, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const std::string good = content();
  CHECK(to_text(statistics_from_text(good, description), description.fingerprint) == good);
  for (const int damage : {0, 1, 2, 3}) {
    testing::world().all().barrier();
    if (testing::world().is_root()) {
      std::string bad = good;
      if (damage == 0) bad.resize(bad.size() / 2);
      if (damage == 1) bad[bad.size() / 2] = static_cast<char>(bad[bad.size() / 2] ^ 1);
      if (damage == 2) bad.clear();
      if (damage == 3) bad = to_text(first, "another dataset");
      std::ofstream(cache, std::ios::binary) << bad;
    }
    testing::world().all().barrier();
    CHECK(to_text(statistics(testing::world(), description, cache, 1), "") == to_text(first, ""));
    testing::world().all().barrier();
    CHECK(content() == good);
  }
}

TEST_CASE("normalisation modes: none, scalar, per_dimension") {
  Description description;
  description.n_layers = 1;
  description.d_model = 4;
  Statistics s;
  s.inputs = {{1, 2, 3, 4}, {0.5, 1, 2, 0}, {8}};
  s.targets = {{0, 0, 0, 0}, {1, 1, 1, 1}, {2}};
  const Normalisation none = normalisation(s, description, Normalise::none);
  CHECK(none.inputs.mean == std::vector<float>{0, 0, 0, 0});
  CHECK(none.targets.scale == std::vector<float>{1, 1, 1, 1});
  const Normalisation scalar = normalisation(s, description, Normalise::scalar);
  CHECK(scalar.inputs.scale == std::vector<float>{0.25f, 0.25f, 0.25f, 0.25f});
  CHECK(scalar.targets.scale[0] == 1.0f);
  CHECK(scalar.inputs.mean[2] == 0.0f);
  const Normalisation each = normalisation(s, description, Normalise::per_dimension);
  CHECK(each.inputs.mean == std::vector<float>{1, 2, 3, 4});
  CHECK(each.inputs.scale[0] == static_cast<float>(1 / (0.5 + 1e-6)));
  CHECK(each.inputs.scale[3] == static_cast<float>(1 / 1e-6));
  s.inputs.mean_norm = {0};
  CHECK_THROWS_AS(normalisation(s, description, Normalise::scalar), Error);
}

TEST_CASE("statistics of real activations agree with their norm_stats.json") {
  const char* data = std::getenv("WEFT_TEST_DATA");
  if (data == nullptr || *data == '\0') {
    if (testing::world().is_root()) MESSAGE("skipped 1: WEFT_TEST_DATA is not set");
    return;
  }
  const Description description = describe(testing::world(), std::string(data) + "/minilm-l6/train", {});
  CHECK(description.n_layers == 6);
  CHECK(description.d_model == 384);
  CHECK(description.n_rows == 6144);
  CHECK(description.dtype == Scalar::fp16);
  CHECK(!description.own_layout);
  CHECK(description.files[1].compressed);
  CHECK(!description.files[0].compressed);
  const Statistics result = check(testing::world(), description, 1);
  // Mean norms from the README of the dataset, two decimals.
  const double inputs[] = {13.10, 13.25, 13.83, 13.67, 13.08, 12.59},
               targets[] = {6.87, 6.29, 7.14, 7.17, 18.53, 31.11};
  for (std::size_t layer = 0; layer < 6; ++layer) {
    CHECK(std::abs(result.inputs.mean_norm[layer] - inputs[layer]) < 0.0051);
    CHECK(std::abs(result.targets.mean_norm[layer] - targets[layer]) < 0.0051);
  }
}

}  // namespace weft::dataset
