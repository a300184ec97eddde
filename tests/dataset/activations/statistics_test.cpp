// SPDX-License-Identifier: Apache-2.0
#include "dataset/activations/statistics.hpp"

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "dataset/activations/stored_order.hpp"
#include "parallel/grid.hpp"
#include "tests/dataset/activations/samples.hpp"
#include "tests/test.hpp"

namespace weft::dataset {
namespace {

using kernels::Scalar;
using testing::Sample;
using testing::Scratch;

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
    const Scratch directory;
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
    CHECK(to_text(compute_statistics(testing::world(), description, 1), {}) == to_text(result, {}));
  }
}

TEST_CASE(
    "statistics of the first rows are those of a two-pass algorithm on them, and do not take another number's cache") {
  const Sample sample{2, 6, {3000, 3000, 77}, Scalar::fp32, Compression::none};
  const Scratch directory;
  testing::write_sample(directory / "train", sample);
  const Description description = describe(testing::world(), directory / "train", {});
  // All rows, a part of the first file, all of it and a row more, more than there are.
  for (const std::int64_t n_rows : {0, 1500, 3001, 9000}) {
    const std::int64_t counted = n_rows == 0 ? 6077 : std::min<std::int64_t>(n_rows, 6077);
    const Statistics result = statistics(testing::world(), description, directory / "statistics.json", 1, n_rows);
    CHECK(result.n_rows == counted);
    check_equal(result.inputs.mean, two_pass(sample, counted, false).mean);
    check_equal(result.targets.standard_deviation, two_pass(sample, counted, true).standard_deviation);
    testing::world().all().barrier();
  }
}

TEST_CASE("statistics are bitwise equal on any number of ranks") {
  const Sample sample{2, 6, {3000, 3000, 77}, Scalar::fp32, Compression::none};
  const Scratch directory;
  testing::write_sample(directory / "train", sample);
  const Description description = describe(testing::world(), directory / "train", {});
  const std::string text = to_text(compute_statistics(testing::world(), description, 1), {});
  // The first line is the sha256 of all numbers, compared with a reference value. It depends only on the summation
  // tree: IEEE 754 defines sqrt exactly.
  CHECK(text.substr(0, 64) == "bc6fc68c7a921a50c831f050244c9e8cd4218a8d3576efd7860ddccb3fe9f666");
}

TEST_CASE("a value that is not finite is reported with file, dataset and row on all ranks") {
  const Scratch directory;
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
  const Scratch directory;
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
  Description other = description;
  other.fingerprint = "another dataset";
  CHECK(to_text(statistics_from_text(good, description), description) == good);
  for (const int damage : {0, 1, 2, 3}) {
    testing::world().all().barrier();
    if (testing::world().is_root()) {
      std::string bad = good;
      if (damage == 0) bad.resize(bad.size() / 2);
      if (damage == 1) bad[bad.size() / 2] = static_cast<char>(bad[bad.size() / 2] ^ 1);
      if (damage == 2) bad.clear();
      if (damage == 3) bad = to_text(first, other);
      std::ofstream(cache, std::ios::binary) << bad;
    }
    testing::world().all().barrier();
    CHECK(to_text(statistics(testing::world(), description, cache, 1), {}) == to_text(first, {}));
    testing::world().all().barrier();
    CHECK(content() == good);
  }
}

TEST_CASE("cached statistics are not used for files that were written since, though their fingerprint is the same") {
  const Scratch directory;
  testing::write_sample(directory / "train", {2, 6, {40, 40, 7}, Scalar::fp32, Compression::none});
  const Description before = describe(testing::world(), directory / "train", {});
  const std::string cached = to_text(compute_statistics(testing::world(), before, 1), before);
  testing::world().all().barrier();
  if (testing::world().is_root())
    std::filesystem::last_write_time(directory / "train/chunk_1.hdf5",
                                     std::filesystem::file_time_type::clock::now() + std::chrono::seconds(5));
  const Description after = describe(testing::world(), directory / "train", {});
  CHECK(after.fingerprint == before.fingerprint);
  statistics_from_text(cached, before);
  CHECK_THROWS_WITH_AS(statistics_from_text(cached, after), "the files of the dataset were written or copied since",
                       Error);
}

namespace {

/// `rows` rows of 2 layers of width 4, bf16, changed by `change(row, inputs, targets)`.
void write_rows(const std::string& path, int rows, const std::function<void(int, float*, float*)>& change) {
  testing::world().on_root([&] {
    WriterSettings settings;
    settings.path = path;
    settings.n_layers = 2;
    settings.d_model = 4;
    settings.dtype = Scalar::bf16;
    settings.rows_per_file = 3000;
    ActivationWriter writer(settings);
    for (int row = 0; row < rows; ++row) {
      std::vector<float> x(8), y(8);
      for (int j = 0; j < 8; ++j) x[j] = y[j] = static_cast<float>((row + j) % 9 - 4);
      change(row, x.data(), y.data());
      std::vector<std::byte> raw_x(16), raw_y(16);
      store_as(Scalar::bf16, x.data(), 8, raw_x.data());
      store_as(Scalar::bf16, y.data(), 8, raw_y.data());
      writer.append(1, raw_x.data(), raw_y.data());
    }
    writer.finish();
    return std::string();
  });
}

/// The message of an Error(data) that all ranks know.
template <class Function>
std::string refusal(Function&& function) {
  try {
    function();
  } catch (const Error& failure) {
    CHECK(failure.code() == ExitCode::data);
    CHECK(failure.known_to() == KnownTo::all_ranks);
    return failure.what();
  }
  return "";
}

}  // namespace

TEST_CASE("constant layers and dimensions are found") {
  const Scratch directory;
  write_rows(directory / "train", 5000, [](int, float* x, float* y) {
    x[2] = -1.25f;
    for (int j = 4; j < 8; ++j) y[j] = 0.1f * static_cast<float>(j);
  });
  const Description description = describe(testing::world(), directory / "train", {});
  CHECK(constant_dimensions(compute_statistics(testing::world(), description, 1), description) ==
        std::vector<std::string>{"1 of 4 dimensions of /layer_0/inputs have the same value in every row (column 2)",
                                 "/layer_1/targets is the same in every row"});
}

TEST_CASE("the check of all rows counts the values that are not finite") {
  const Scratch directory;
  write_rows(directory / "train", 5000, [](int row, float* x, float* y) {
    if (row == 4321) y[6] = NAN;
    if (row == 4400) x[0] = x[7] = INFINITY;
  });
  const Description description = describe(testing::world(), directory / "train", {});
  const std::string message = refusal([&] { check(testing::world(), description, 2); });
  CHECK(message.find("chunk_1.hdf5: /layer_1/targets row 1321, column 2 is not finite") != std::string::npos);
  CHECK(message.find("3 values in 2 rows") != std::string::npos);
}

TEST_CASE("batches in stored order refuse values that are not finite, on all ranks, with the place of the first") {
  const Scratch directory;
  write_rows(directory / "train", 5000, [](int row, float* x, float* y) {
    if (row == 4321) y[6] = NAN;
    if (row == 4330 || row == 4400) x[0] = INFINITY;
  });
  const Description description = describe(testing::world(), directory / "train", {});
  const parallel::Grid grid(testing::world(), parallel::data_by_feature(1, testing::world().size()));
  StoredOrder batches(description, 1000, grid, 1);
  for (int i = 0; i < 4; ++i) batches.read(i);
  CHECK(refusal([&] { batches.read(4); }).find("chunk_1.hdf5: /layer_1/targets row 1321, column 2 is not finite") !=
        std::string::npos);
}

TEST_CASE("ranks that see other files under the same path are refused, with rank and host") {
  const Scratch directory;
  const std::filesystem::path before = std::filesystem::current_path();
  const int other = testing::world().size() - 1;
  write_rows(directory / "a/train", 4000, [](int, float*, float*) {});
  std::error_code ignored;
  if (testing::world().is_root())
    std::filesystem::copy(directory / "a", directory / "same", std::filesystem::copy_options::recursive, ignored);
  write_rows(directory / "b/train", 4000, [](int, float* x, float*) { x[1] = 3; });
  write_rows(directory / "c/train", 3500, [](int, float*, float*) {});
  testing::world().on_root([&] {
    std::filesystem::create_directories(directory / "d");
    return std::string();
  });
  for (const char* theirs : {"same", "b", "c", "d"}) {
    std::filesystem::current_path(directory / (testing::world().rank() == other ? theirs : "a"));
    const std::string message = refusal([&] { describe(testing::world(), "train", {}); });
    std::filesystem::current_path(before);
    CAPTURE(theirs);
    CAPTURE(message);
    if (other == 0 || std::string(theirs) == "same")
      CHECK((message.empty() || other == 0));
    else
      CHECK((message.find(fmt::format("rank {}: ", other)) == 0 && message.find("on host ") != std::string::npos));
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
